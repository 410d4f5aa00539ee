"""Servers that close connections: no request is lost, none is sent twice without need, and an outage burns few."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import read
from tests.support.command import burst, summary_of
from tests.support.plain_openai import PlainServer, Talk, plain_openai
from tests.support.runs import said

LOAD = ("--server", "openai", "--endpoint", "completions", "--lengths", "approximate", "--input-tokens", "4")
LOAD = (*LOAD, "--output-tokens", "max:2", "--metrics-every", "0", "--timeout", "20s")


def run(folder: Path, url: str, arrivals: str, n: int, *more: str) -> tuple[list[Record], dict[str, Any], int]:
    """Run a load; return its Records, its summary and the exit code."""
    code, out, err = burst(folder, *LOAD, "--url", url, "--arrivals", arrivals, "--n", str(n), *more, command="run")
    assert "Traceback" not in out + err
    return list(read(folder / "run").records), summary_of(folder), code


def states(records: list[Record]) -> Counter[str]:
    """Count the Records by state."""
    return Counter(record.state for record in records)


def closes_unannounced(talk: Talk) -> None:
    """Answer, and close the connection without having said so. llama.cpp does this after each stream."""
    talk.stream(more="Keep-Alive: timeout=5, max=100\r\n")
    talk.close()


def closes_announced(talk: Talk) -> None:
    """Answer, and close the connection as the head of the response says."""
    talk.stream(more="Connection: close\r\n")
    talk.close()


def speaks_http_1_0(talk: Talk) -> None:
    """Answer in HTTP/1.0, where the end of the connection is the end of the body."""
    talk.stream(version="1.0")
    talk.close()


def resets_after_the_answer(talk: Talk) -> None:
    """Answer, and reset the connection a little later."""
    talk.stream()
    time.sleep(0.001)
    talk.reset()


@pytest.mark.parametrize(
    "answer", [closes_unannounced, closes_announced, speaks_http_1_0, resets_after_the_answer], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("arrivals", ["closed:8", "closed:3,think=3ms", "constant:200"])
def test_a_server_that_closes_each_connection_gets_every_request(
    answer: Callable[[Talk], None], arrivals: str, tmp_path: Path
) -> None:
    """Closed or open loop, announced or not: every request is complete, and none is dropped."""
    with plain_openai(answer) as server:
        records, summary, _ = run(tmp_path, server.url, arrivals, 120)
    assert states(records) == {"complete": 120}
    assert summary["requests"]["errors"] == {}
    assert set(server.ids) == {str(record.id) for record in records}


def resets_reused(talk: Talk) -> None:
    """Answer the first request of a connection, and reset the connection at the second one."""
    if talk.number == 1:
        talk.stream()
    else:
        talk.reset()


def closes_reused(talk: Talk) -> None:
    """Answer the first request of a connection, and close the connection at the second one."""
    if talk.number == 1:
        talk.stream()
    else:
        talk.close()


@pytest.mark.parametrize("answer", [resets_reused, closes_reused], ids=lambda f: f.__name__)
def test_a_request_that_an_idle_connection_lost_is_sent_once_more_and_counted(
    answer: Callable[[Talk], None], tmp_path: Path
) -> None:
    """Summary and report count the requests that were sent again. Their TTFT counts from the second send, and the
    instant of the first one is kept."""
    with plain_openai(answer) as server:
        records, summary, _ = run(tmp_path, server.url, "closed:2", 20)
    again = [record for record in records if record.first_sent_ns is not None]
    assert states(records) == {"complete": 20}
    assert again
    assert max(Counter(server.ids).values()) == 2
    assert {number for number, times in Counter(server.ids).items() if times == 2} == {str(each.id) for each in again}
    for record in again:
        assert record.first_sent_ns is not None
        assert record.sent_ns is not None
        assert record.due_ns <= record.first_sent_ns < record.sent_ns < record.chunk_ns[0]
    assert summary["client"]["sent_again"] == len(again)
    assert f"{len(again)} requests" in said(summary, "sent-again")


def closes_every_connection(talk: Talk) -> None:
    """Read a request and close the connection without an answer."""
    talk.close()


def begins_an_answer(talk: Talk) -> None:
    """Answer the first request of a connection, and break off in the first line of the second answer."""
    if talk.number == 1:
        talk.stream()
    else:
        talk.sock.sendall(b"HTTP/1.1 2")
        time.sleep(0.01)
        talk.reset()


def test_a_request_on_a_new_connection_is_never_sent_again(tmp_path: Path) -> None:
    """The server hangs up on every request: each is sent once, and fails."""
    with plain_openai(closes_every_connection) as server:
        records, summary, code = run(tmp_path, server.url, "closed:4", 8)
    assert states(records) == {"failed": 8}
    assert set(Counter(server.ids).values()) == {1}
    assert (summary["client"]["sent_again"], code) == (0, 1)


def test_a_request_whose_response_had_begun_is_never_sent_again(tmp_path: Path) -> None:
    """A few bytes of the response came before the reset: the request is truncated, and the server got it once."""
    with plain_openai(begins_an_answer) as server:
        records, summary, _ = run(tmp_path, server.url, "closed:2", 20)
    assert states(records)["truncated"] > 0
    assert set(Counter(server.ids).values()) == {1}
    assert summary["client"]["sent_again"] == 0


@pytest.mark.parametrize("arrivals", ["closed:4,think=300ms", "burst:8/300ms", "constant:13"])
def test_a_server_whose_idle_time_equals_the_gap_between_requests_loses_none(arrivals: str, tmp_path: Path) -> None:
    """The server closes idle connections just when the next requests come."""
    with plain_openai(Talk.stream, idle_s=0.3) as server:
        records, _, _ = run(tmp_path, server.url, arrivals, 32)
    assert states(records) == {"complete": 32}


@contextlib.contextmanager
def bouncing(up_s: float, down_s: float) -> Any:
    """A server that is up for `up_s`, gone for `down_s`, and back at the same port. Yields the first server."""

    def slow(talk: Talk) -> None:
        talk.stream(pause_s=0.01)

    stopped, first = threading.Event(), PlainServer()
    started = threading.Event()

    def serve() -> None:
        with plain_openai(slow) as server:
            first.url, first.port = server.url, server.port
            started.set()
            stopped.wait(up_s)
        stopped.wait(down_s)
        with plain_openai(slow, port=first.port):
            stopped.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    started.wait(10)
    try:
        yield first
    finally:
        stopped.set()
        thread.join()


def test_rejections_inside_streams_make_a_closed_loop_wait(tmp_path: Path) -> None:
    """A server is overloaded for a second and says so in an event of a stream with status 200. Once the loop has seen
    that, its clients wait, and most requests are left for afterwards."""
    since_s: list[float] = []

    def overloaded(talk: Talk) -> None:
        since_s.append(time.monotonic())
        if since_s[-1] - since_s[0] > 1.0:
            talk.stream()
            return
        event = b'data: {"error":{"message":"Model is overloaded","type":"overloaded"}}\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(event)
        talk.sock.sendall(head + event)

    with plain_openai(overloaded) as server:
        records, summary, _ = run(tmp_path, server.url, "closed:8", 300)
    ended = states(records)
    assert ended.total() == 300
    assert 8 <= ended["rejected"] <= 100
    assert ended["complete"] == 300 - ended["rejected"]
    assert summary["client"]["pauses"] >= 8


def test_an_outage_costs_a_closed_loop_few_requests(tmp_path: Path) -> None:
    """The server is gone for a second: each client loses a request or two, the loop waits, and goes on. The report says
    how often it paused."""
    with bouncing(1.5, 1.0) as server:
        records, summary, code = run(tmp_path, server.url, "closed:8", 400)
    ended = states(records)
    assert ended.total() == 400
    assert ended["dropped"] == 0
    assert 8 <= ended["failed"] + ended["truncated"] <= 32
    assert code == 1
    assert summary["client"]["pauses"] >= 8
    assert "paused" in said(summary, "pauses")
