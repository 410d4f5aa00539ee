"""What a machine allows, found out before anything is sent."""

import resource
from pathlib import Path

import pytest

from loadgen import host
from loadgen.errors import OpenFilesError, OutputError


def test_too_few_open_files_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit may not be raised: the message names both numbers and what to do."""

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(OpenFilesError, match=r"1000 connections in one process need 1064 open files.*512") as caught:
        host.allow_open_files(1000)
    assert "--workers 4" in caught.value.hint


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than needed, and the hard limit stays."""
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    host.allow_open_files(1000)
    assert wanted == [(1064, 4096)]


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    """Before anything is sent, with both sizes."""
    with pytest.raises(OutputError, match="MB are free"):
        host.make_folder(tmp_path / "run", 1 << 60)


def test_a_folder_that_holds_something_is_never_written_to(tmp_path: Path) -> None:
    """An empty folder will do; one with a file in it is somebody's run."""
    host.make_folder(tmp_path / "new", 1)
    host.make_folder(tmp_path / "new", 1)
    (tmp_path / "new" / "run.jsonl").write_text("precious")
    with pytest.raises(OutputError, match="not empty"):
        host.make_folder(tmp_path / "new", 1)


def test_the_facts_of_a_machine_are_plain_values() -> None:
    """They go into the header as they are."""
    facts = host.facts()
    assert isinstance(facts["cores"], int)
    assert facts["memory_bytes"] > 1 << 20


def proxy(proc: Path, pid: int, port: str, listens: str = "127.0.0.1", container: str = "172.18.0.2") -> None:
    """A docker-proxy as Docker 28 starts it, in this network."""
    words = ["/usr/bin/docker-proxy", "-proto", "tcp", "-host-ip", listens, "-host-port", port]
    words += ["-container-ip", container, "-container-port", "8000", "-use-listen-fd"]
    for each in (str(pid), "self"):
        (proc / each / "ns").mkdir(parents=True, exist_ok=True)
        (proc / each / "ns/net").unlink(missing_ok=True)
        (proc / each / "ns/net").symlink_to("/proc/self/ns/net")
    (proc / str(pid) / "cmdline").write_text("\0".join(words) + "\0")


def test_a_docker_proxy_in_the_way_is_found(tmp_path: Path) -> None:
    """By the port it publishes, on loopback only: what comes from elsewhere the kernel forwards by itself."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cmdline").write_bytes(b"python\0-m\0docker-proxy\xff\0")
    (tmp_path / "8").mkdir()  # has ended meanwhile
    proxy(tmp_path, 40, "8001")
    proxy(tmp_path, 41, "8002", "0.0.0.0", "fd00::2")
    proxy(tmp_path, 42, "8003", "10.0.0.5")
    assert host.proxied_to("http://127.0.0.1:8001", tmp_path) == "http://172.18.0.2:8000"
    assert host.proxied_to("http://localhost:8001", tmp_path) == "http://172.18.0.2:8000"
    assert host.proxied_to("https://[::1]:8002", tmp_path) == "https://[fd00::2]:8000"
    for url in ("http://10.0.0.5:8001", "http://127.0.0.1:8003", "http://127.0.0.1:8004", "http://127.0.0.1"):
        assert host.proxied_to(url, tmp_path) == ""


def test_a_docker_proxy_of_another_network_is_not_in_the_way(tmp_path: Path) -> None:
    """An engine in a network namespace of its own publishes nothing here."""
    proxy(tmp_path, 40, "8001")
    (tmp_path / "40/ns/net").unlink()
    (tmp_path / "40/ns/net").symlink_to("/proc/self/ns/mnt")
    assert host.proxied_to("http://127.0.0.1:8001", tmp_path) == ""
