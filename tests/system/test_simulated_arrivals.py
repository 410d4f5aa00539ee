"""When requests reached a simulated server: by the kernel's stamps where it may have them, else as it read them."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.comparison import judge
from loadgen.servers.simulated import arrivals
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn_process
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.servers.wire.packet_ring import PacketRing
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.ports import PortRange
from loadgen.servers.wire.timestamps import Received, TimestampSource
from tests.support.simulated import running

BODY = json.dumps({"inputs": "spoken words", "parameters": {"max_new_tokens": 3}}).encode()
SCRIPT = {"ttft_s": 0.3, "itl_s": 0.001}
DUE_NS = [300_000_000, 301_000_000, 302_000_000]
N = 200
AWAY_S = 0.05
RST = struct.pack("ii", 1, 0)


def head(name: object) -> bytes:
    """Of a request that the log knows by this name."""
    said = f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: {name}\r\n"
    return f"{said}Content-Length: {len(BODY)}\r\n\r\n".encode()


def opened(url: str) -> socket.socket:
    """A connection to the server."""
    return socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20)


def read(client: socket.socket, end: bytes = b"0\r\n\r\n") -> None:
    """An answer to its end."""
    got = b""
    while not got.endswith(end):
        part = client.recv(65_536)
        assert part
        got += part


def asked(client: socket.socket, name: str) -> tuple[int, int]:
    """One request to the end of its answer, its body well behind its head; CLOCK_REALTIME around the body's send."""
    client.sendall(head(name))
    time.sleep(AWAY_S)
    began_ns = time.time_ns()
    client.sendall(BODY)
    ended_ns = time.time_ns()
    read(client)
    return began_ns, ended_ns


def due_ns(line: LogLine) -> list[int]:
    """When tokens were due, counted from when the request came."""
    return [at_ns - line.received_ns for at_ns in line.due_ns]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_burst_came_when_the_kernel_had_it(tmp_path: Path, host: str) -> None:
    """The server is stopped while 200 requests come: each has its own instant in the order of sending, none is later
    than the last send, and tokens are due from there."""
    config = SimulatedConfig(server="tgi", host=host, max_concurrent_requests=N, log=tmp_path / "log", **SCRIPT)
    with spawn_process(config) as (url, process):
        clients = [opened(url) for _ in range(N)]
        os.kill(process, signal.SIGSTOP)
        began_ns = time.time_ns()
        for number, client in enumerate(clients):
            client.sendall(head(number) + BODY)
        ended_ns = time.time_ns()
        time.sleep(AWAY_S)
        os.kill(process, signal.SIGCONT)
        for client in clients:
            read(client)
            client.close()
    lines, summary = judge.read_log(tmp_path / "log")
    assert {line["stamps"] for line in lines} == {summary["stamps"]} == {"ring"}
    assert [line["request_id"] for line in lines] == [*map(str, range(N))]
    assert began_ns <= lines[0]["received_ns"] <= lines[-1]["received_ns"] <= ended_ns
    assert {at_ns - line["received_ns"] for line in lines for at_ns in line["due_ns"]} == {*DUE_NS}


def test_connections_made_while_the_server_is_away_are_known(tmp_path: Path) -> None:
    """Connections and their requests wait for a server that is stopped, beside one that was reset meanwhile."""
    config = SimulatedConfig(server="tgi", log=tmp_path / "log", **SCRIPT)
    with spawn_process(config) as (url, process):
        os.kill(process, signal.SIGSTOP)
        clients = [opened(url) for _ in range(6)]
        clients[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        clients[0].close()
        for name, client in enumerate(clients[1:]):
            client.sendall(head(name) + BODY)
        ended_ns = time.time_ns()
        time.sleep(AWAY_S)
        os.kill(process, signal.SIGCONT)
        for client in clients[1:]:
            read(client)
            client.close()
    lines, _ = judge.read_log(tmp_path / "log")
    assert [(line["request_id"], line["stamps"]) for line in lines] == [(str(name), "ring") for name in range(5)]
    assert lines[-1]["received_ns"] <= ended_ns


def test_a_client_that_has_gone_is_not_watched() -> None:
    """A connection that was reset before it was accepted has no address any more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with ThreadPoolExecutor(1) as pool:  # whose right goes with it
            stamps = pool.submit(arrivals.open_arrivals, listening).result()
        assert stamps.name == "ring"
        with socket.create_connection(listening.getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        with listening.accept()[0] as server:
            assert stamps.watch(server) is None
        stamps.close()


def test_a_request_came_with_its_last_byte() -> None:
    """Of each request on one connection, whatever came before it there: the kernel's stamp of the end of its body."""
    with running(SimulatedConfig(server="tgi", **SCRIPT)) as server, opened(server.url) as client:
        sends = {"a": asked(client, "a")}
        client.sendall(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 404")
        sends["b"] = asked(client, "b")
    assert [(line.request_id, line.stamps, due_ns(line)) for line in server.log] == [
        (name, "ring", DUE_NS) for name in sends
    ]
    for line in server.log:
        began_ns, ended_ns = sends[line.request_id]
        assert began_ns <= line.received_ns <= ended_ns


def test_without_the_right_a_request_came_when_it_was_read() -> None:
    """Where no packet socket may be opened the server notes itself when it has read a request's head, and says so."""

    def work() -> tuple[int, list[LogLine]]:
        set_packet_capability(effective=False)  # of this thread, and of those that it starts
        with running(SimulatedConfig(server="tgi", **SCRIPT)) as server, opened(server.url) as client:
            began_ns, _ = asked(client, "a")
        return began_ns, server.log

    with ThreadPoolExecutor(1) as pool:
        began_ns, (line,) = pool.submit(work).result()
    assert (line.stamps, due_ns(line)) == ("user", DUE_NS)
    assert line.received_ns < began_ns  # of the body


def test_a_process_with_another_time_counts_from_its_own_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's stamps are of before the server began: tokens count from when it has read a request's head."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 3_600_000_000_000)
    with running(SimulatedConfig(server="tgi", **SCRIPT)) as server, opened(server.url) as client:
        began_ns, _ = asked(client, "a")
    (line,) = server.log
    assert (line.stamps, due_ns(line)) == ("user", DUE_NS)
    assert line.received_ns < began_ns  # of the body


def test_an_engine_takes_a_request_when_it_has_read_it() -> None:
    """Under the batching clock nobody asks the kernel."""
    with running(SimulatedConfig(server="tgi", clock="batching")) as server, opened(server.url) as client:
        began_ns, _ = asked(client, "a")
    (line,) = server.log
    assert line.stamps == "user"
    assert line.received_ns < began_ns


class Silent(TimestampSource):
    """A ring that never says when anything came."""

    name = "silent"
    asked = 0

    def ready(self, received: Received) -> bool:  # noqa: ARG002
        self.asked += 1
        return False


@pytest.mark.parametrize(("ttft_s", "often"), [(0.0, False), (0.3, True)])
def test_no_token_waits_for_a_stamp(monkeypatch: pytest.MonkeyPatch, ttft_s: float, often: bool) -> None:
    """The ring is asked until the first token is due, at least once, and then what the server noted has to do."""
    silent = Silent()
    monkeypatch.setattr(arrivals, "open_arrivals", lambda _: silent)
    config = SimulatedConfig(server="tgi", ttft_s=ttft_s, itl_s=0.001)
    with running(config) as server, opened(server.url) as client:
        asked(client, "a")
    assert [len(line.sent_ns) for line in server.log] == [3]
    assert (silent.asked > 1) is often


def test_the_ring_of_a_server_holds_requests_alone() -> None:
    """Of a connection with one request and five pieces of an answer, each acknowledged: a SYN and the request's
    headers, and nothing of what was said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        ring = PacketRing(socket.AF_INET, [("127.0.0.1", 0)], PortRange(address[1], address[1]))
        with socket.create_connection(address) as client:
            server, (_, port) = listening.accept()
            client.sendall(BODY)
            for _ in range(5):
                server.sendall(b"token")
                assert client.recv(5) == b"token"
            server.close()
        time.sleep(AWAY_S)
        memory = ring.words.tobytes()
        came = ring.read()
        assert came is not None
        assert {*came.key.tolist()} == {port}
        assert (came.syn.tolist(), came.length.tolist()) == ([True, False], [0, len(BODY)])
        assert BODY[:4] not in memory
        ring.close()
