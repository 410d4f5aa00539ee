"""Whole runs over TLS, against servers that nobody here wrote: each token arrives when it was sent, and no earlier.

Arrivals are compared with the log of the server that made the tokens, behind whatever stands before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import cast

import pytest

from loadgen.analysis.calibration import read_log
from loadgen.analysis.run.runfile import Run, read
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.servers.wire.connection import Connection
from tests.support.command import burst, summary_of
from tests.support.tls import certificate_files
from tests.support.tls_servers import Completions, SentNs, haproxy, nginx, serving_uvicorn

TTFT_S, ITL_S = 0.04, 0.02
TOKENS = 6
LOADS = {
    "burst": ("burst", "--n", "12"),
    "closed loop": ("run", "--arrivals", "closed:3", "--n", "12"),
    "Poisson": ("run", "--arrivals", "poisson:40", "--n", "16"),
}
Serving = Callable[[Path], contextlib.AbstractContextManager[tuple[str, Callable[[], SentNs]]]]
"""Given a folder, a running server: its URL, and what reads the log of its send instants."""


def by_uvicorn(loop: str) -> Serving:
    @contextlib.contextmanager
    def serving(folder: Path) -> Iterator[tuple[str, Callable[[], SentNs]]]:
        app = Completions(TTFT_S, ITL_S)
        with serving_uvicorn(app, loop, certificate_files(folder)[0]) as url:
            yield url, lambda: app.sent_ns

    return serving


def behind(proxy: Callable[..., contextlib.AbstractContextManager[str]], version: str) -> Serving:
    @contextlib.contextmanager
    def serving(folder: Path) -> Iterator[tuple[str, Callable[[], SentNs]]]:
        log = folder / "sent.jsonl"
        script = SimulatedConfig(server="vllm", ttft_s=TTFT_S, itl_s=ITL_S, log=log)
        certificate, _ = certificate_files(folder)
        with spawn(script) as backend, proxy(folder, certificate, backend, version) as url:
            yield url, lambda: {number: line.sent_ns for number, line in read_log(log).items()}

    return serving


SERVERS = {
    "asyncio": by_uvicorn("asyncio"),
    "uvloop": by_uvicorn("uvloop"),
    "nginx, TLS 1.3": behind(nginx, "1.3"),
    "nginx, TLS 1.2": behind(nginx, "1.2"),
    "haproxy, TLS 1.3": behind(haproxy, "1.3"),
    "haproxy, TLS 1.2": behind(haproxy, "1.2"),
}


def measure(folder: Path, server: Path, url: str, load: str) -> tuple[int, str, Run]:
    """Run one of LOADS; exit code, last words and run."""
    folder.mkdir()
    command, *options = LOADS[load]
    options += ["--url", url, "--ca-file", str(server / "authority.pem"), "--lengths", "approximate"]
    code, _, err = burst(
        folder, *options, "--input-tokens", "8", "--output-tokens", str(TOKENS), "--quiet", command=command
    )
    return code, err, read(folder / "run")


def late_s(run: Run, sent_ns: SentNs) -> list[list[float]]:
    """Of each request, by how much each token arrived after it was sent."""
    start_ns = run.header.start_realtime_ns
    return [
        [(start_ns + at - sent) / 1e9 for at, sent in zip(record.chunk_ns, sent_ns[record.id], strict=True)]
        for record in run.records
    ]


@pytest.mark.parametrize("serving", SERVERS.values(), ids=SERVERS)
def test_tokens_arrive_when_the_server_sent_them(tmp_path: Path, serving: Serving) -> None:
    """In a burst, a closed loop and an open loop: no token before its send, and half of the first ones before the next
    one's. Every timestamp is the packet ring's, which agrees with the socket's."""
    with serving(tmp_path) as (url, log):
        for load in LOADS:
            folder = tmp_path / load
            code, err, run = measure(folder, tmp_path, url, load)
            assert code in (0, 5), err  # 5: this machine was busy
            assert {(record.state, record.stamps) for record in run.records} == {("complete", "ring")}
            late = late_s(run, log())
            assert min(min(each) for each in late) >= 0
            assert median(each[0] for each in late) < ITL_S
            client = summary_of(folder)["client"]
            counts = [client[name] for name in ("ring_missed", "ring_rejected", "socket_rejected", "ring_given_up")]
            assert counts == [0, 0, 0, 0]


def test_packet_timestamps_that_are_wrong_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that forgets to count session tickets takes each packet for an earlier one. The run notices it, has the
    socket's timestamps, stays valid, and blames neither the client nor the server."""
    gone = Connection.closed_by_peer

    def uncounted(connection: Connection) -> bool:
        before = connection.received
        closed = gone(connection)
        connection.received = before
        return closed

    monkeypatch.setattr(Connection, "closed_by_peer", uncounted)
    with SERVERS["uvloop"](tmp_path) as (url, log):
        _, err, run = measure(tmp_path / "wrong", tmp_path, url, "closed loop")
        late = late_s(run, log())
    assert {(record.state, record.stamps) for record in run.records} == {("complete", "socket")}
    assert min(min(each) for each in late) >= 0
    assert median(each[0] for each in late) < ITL_S
    client = summary_of(tmp_path / "wrong")["client"]
    assert client["ring_given_up"] == 1
    assert not [reason for reason in cast("list[str]", client["reasons"]) if "ring" in reason], err
