"""A load generator whose own machine runs out of ports, files or routes says so, and does not blame the server."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen import machine as host
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import read
from loadgen.servers.discovery import probe
from loadgen.servers.errors import ClientLimitError, LocalLimitError, UnreachableError
from loadgen.servers.json_client import JsonClient
from loadgen.servers.target import resolve_target
from loadgen.servers.wire.connection import connect
from tests.support.command import burst, summary_of
from tests.support.loopback import connected
from tests.support.namespaces import loadgen_inside
from tests.support.plain_openai import Talk, plain_openai

LOAD = ("--server", "openai", "--endpoint", "completions", "--lengths", "approximate", "--input-tokens", "4")
LOAD = (*LOAD, "--output-tokens", "max:2", "--no-report")
RUN = (*LOAD, "--metrics-every", "0", "--timeout", "20s", "--out", "run")
FEW_PORTS = "echo 40000 40019 > /proc/sys/net/ipv4/ip_local_port_range"


def records_of(folder: Path, n: int) -> list[Record]:
    """Return the Records of a run, one for each of `n` requests."""
    records = sorted(read(folder / "run").records, key=lambda record: record.id)
    assert [record.id for record in records] == list(range(n))
    return records


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file or socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("more", [(), ("--assert", "complete >= 99%"), ("--workers", "2")], ids=str)
def test_ports_that_run_out_during_a_run_are_the_clients_limit(more: tuple[str, ...], tmp_path: Path) -> None:
    """20 ports, and more requests in flight: those without a port are `client_limit`, the run is invalid, exit 5."""
    words = ("run", *RUN, "--url", "http://127.0.0.1:PORT", "--arrivals", "constant:10", "--n", "45", *more)
    code, out, err = loadgen_inside(tmp_path, FEW_PORTS, *words, answer="time.sleep(4); talk.stream()")
    assert code == 5, out + err
    kinds = Counter(record.error_kind for record in records_of(tmp_path, 45))
    assert set(kinds) == {"", "client_limit"}, kinds
    client = summary_of(tmp_path)["client"]
    assert client["verdict"] == "limited"
    assert client["client_limit"] == kinds["client_limit"]
    assert "Invalid: this machine could not send every request" in out
    assert "ip_local_port_range is 40000 to 40019" in " ".join(out.split())
    assert "sysctl -w" in out


def test_a_burst_of_more_requests_than_ports_is_refused(tmp_path: Path) -> None:
    """The limit is known before the burst: nothing is sent, and the message says how to raise it."""
    words = ("burst", *RUN, "--url", "http://127.0.0.1:PORT", "--n", "21")
    code, out, err = loadgen_inside(tmp_path, FEW_PORTS, *words)
    assert code == 2, out + err
    assert "21 concurrent requests need 21 connections" in err
    assert "allows only 20" in err
    assert "sysctl -w" in err


def test_users_without_a_port_are_the_clients_limit(tmp_path: Path) -> None:
    """The users of the interactive part give up with the same kind, and the command ends with exit code 5."""
    words = ("ui", "--headless", *RUN, "--url", "http://127.0.0.1:PORT", "--users", "30", "--spawn-rate", "30")
    code, out, err = loadgen_inside(
        tmp_path, FEW_PORTS, *words, "--run-time", "3s", answer="time.sleep(1); talk.stream()"
    )
    assert code == 5, out + err
    kinds = Counter(record.error_kind for record in read(tmp_path / "run").records)
    assert kinds["client_limit"] > 0
    assert kinds["connect"] == 0
    assert kinds[""] > 0


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("true", "no route to 10.9.8.7"),
        ("ip route add unreachable 10.9.8.0/24", "no route to 10.9.8.7"),
        ("ip route add blackhole 10.9.8.0/24", "no route to 10.9.8.7"),
        ("ip route add prohibit 10.9.8.0/24", "does not permit connections to 10.9.8.7"),
    ],
)
def test_a_network_that_this_machine_cannot_reach_is_not_the_servers_fault(
    setup: str, words: str, tmp_path: Path
) -> None:
    """No route, or one that refuses: the probe ends with exit code 5, names the cause, and says what to check."""
    code, out, err = loadgen_inside(tmp_path, setup, "burst", *RUN, "--url", "http://10.9.8.7:8000", "--n", "2")
    assert code == 5, out + err
    assert "http://10.9.8.7:8000 cannot be reached from here" in err
    assert words in err
    assert "nothing listens" not in err


def test_a_route_that_is_lost_during_a_run_is_the_clients_limit(tmp_path: Path) -> None:
    """The server's address becomes unreachable after ten requests: later ones fail on this machine, exit code 5."""
    lost = "len(server.ids) == 10 and subprocess.call(['ip', 'address', 'del', '10.9.9.1/32', 'dev', 'lo'])"
    answer = f"{lost}; talk.stream(more='Connection: close\\r\\n'); talk.close()"
    words = ("run", *LOAD, "--metrics-every", "0", "--timeout", "2s", "--out", "run", "--arrivals", "constant:20")
    code, out, err = loadgen_inside(
        tmp_path,
        "ip address add 10.9.9.1/32 dev lo",
        *(*words, "--url", "http://10.9.9.1:PORT", "--n", "80"),
        answer=answer,
        host="10.9.9.1",
    )
    assert code == 5, out + err
    kinds = Counter(record.error_kind for record in records_of(tmp_path, 80))
    assert kinds["client_limit"] >= 15, kinds
    assert kinds["connect"] == 0, kinds
    assert "no route to 10.9.9.1" in out


@pytest.mark.parametrize("arrivals", ["constant:60", "closed:100"])
def test_files_that_run_out_during_a_run_are_the_clients_limit(
    arrivals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run meets the limit on open files midway: `client_limit`, invalid, exit code 5, and `ulimit -n` is named."""
    monkeypatch.setattr(host, "allow_open_files", lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90)))

    def answer(talk: Talk) -> None:
        time.sleep(2)
        talk.stream()

    with plain_openai(answer) as server:
        words = (*LOAD, "--metrics-every", "0", "--timeout", "20s", "--url", server.url, "--n", "150")
        code, out, err = burst(tmp_path, *words, "--arrivals", arrivals, command="run")
    assert code == 5, out + err
    kinds = Counter(record.error_kind for record in records_of(tmp_path, 150))
    assert set(kinds) == {"", "client_limit"}, kinds
    assert "90 open files are allowed. Raise ulimit -n" in out


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_probe_without_a_free_file_is_the_clients_limit(name: str) -> None:
    """The probe needs a socket, and a name needs a file to be looked up: neither says that nothing listens."""
    JsonClient("http://127.0.0.1:1").close()  # what is imported late needs files
    with pytest.raises(UnreachableError, match="nothing listens"):
        probe("http://127.0.0.1:1", "vllm")
    with no_more_files(), pytest.raises(ClientLimitError, match="no free file"):
        probe(f"http://{name}:1", "vllm")


async def test_a_connection_without_a_free_file_names_the_limit_and_the_remedy() -> None:
    """`connect` raises a LocalLimitError, also for TLS; what a server refuses stays an OSError."""
    for scheme in ("http", "https"):
        target = resolve_target(f"{scheme}://127.0.0.1:1", None)
        with no_more_files(), pytest.raises(LocalLimitError, match="ulimit -n"):
            connect(target, 5)
        with pytest.raises(ConnectionRefusedError) as refused:
            await connected(target, 5)
        assert not isinstance(refused.value, LocalLimitError)
