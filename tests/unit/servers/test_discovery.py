"""The parts of the probe that need no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.discovery import check_limits, docker_proxy_target
from loadgen.servers.errors import LimitError


@pytest.mark.parametrize(
    ("limits", "n", "input_tokens", "output_tokens", "named"),
    [
        ({}, 10**6, 10**6, 10**6, []),
        ({"max_model_len": 640}, 1000, 512, 128, []),
        ({"max_model_len": 639}, 1000, 512, 128, ["max_model_len of 639"]),
        ({"max_input_tokens": 511, "max_total_tokens": 4096}, 1, 512, 1, ["max_input_tokens of 511"]),
        ({"max_concurrent_requests": 128}, 128, 1, 1, []),
        ({"max_concurrent_requests": 128}, 129, 1, 1, ["129 requests at once", "max_concurrent_requests of 128"]),
        (
            {"max_concurrent_requests": 128, "max_input_tokens": 100, "max_total_tokens": 200},
            1000,
            512,
            128,
            ["max_concurrent_requests", "max_input_tokens", "max_total_tokens"],
        ),
        ({"running_max_req_size": 256}, 1000, 1, 1, []),
    ],
)
def test_check_limits(limits: dict[str, int], n: int, input_tokens: int, output_tokens: int, named: list[str]) -> None:
    """Every limit that the burst exceeds is named with its value; limits that only make requests wait are not."""
    kind = next(kind.name for kind in BACKENDS.values() if limits.keys() <= kind.limits.keys())
    facts = ServerFacts(kind, "http://h", limits=limits)
    if not named:
        check_limits(facts, n, input_tokens, output_tokens)
        return
    with pytest.raises(LimitError) as caught:
        check_limits(facts, n, input_tokens, output_tokens)
    assert all(name in str(caught.value) for name in named)
    assert caught.value.hint


def test_limits_name_their_options() -> None:
    """The hint names the options of the server that raise the limits."""
    tgi = ServerFacts("tgi", "http://h", limits={"max_concurrent_requests": 128, "max_input_tokens": 100})
    with pytest.raises(LimitError) as caught:
        check_limits(tgi, 1000, 512, 128)
    assert caught.value.hint.endswith("a higher --max-input-tokens, --max-concurrent-requests")
    with pytest.raises(LimitError) as caught:
        check_limits(ServerFacts("lightllm", "http://h", limits={"max_model_len": 600}), 1000, 512, 128)
    assert caught.value.hint.endswith("a higher --max_req_total_len")


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
    assert docker_proxy_target("http://127.0.0.1:8001", tmp_path) == "http://172.18.0.2:8000"
    assert docker_proxy_target("http://localhost:8001", tmp_path) == "http://172.18.0.2:8000"
    assert docker_proxy_target("https://[::1]:8002", tmp_path) == "https://[fd00::2]:8000"
    for url in ("http://10.0.0.5:8001", "http://127.0.0.1:8003", "http://127.0.0.1:8004", "http://127.0.0.1"):
        assert docker_proxy_target(url, tmp_path) == ""


def test_a_docker_proxy_of_another_network_is_not_in_the_way(tmp_path: Path) -> None:
    """An engine in a network namespace of its own publishes nothing here."""
    proxy(tmp_path, 40, "8001")
    (tmp_path / "40/ns/net").unlink()
    (tmp_path / "40/ns/net").symlink_to("/proc/self/ns/mnt")
    assert docker_proxy_target("http://127.0.0.1:8001", tmp_path) == ""
