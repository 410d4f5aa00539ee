"""Responses that a server sends before it has received a request."""

from __future__ import annotations

import asyncio
import socket

import pytest

from loadgen.analysis.run.record import Record
from loadgen.engine.client_health import Health
from loadgen.engine.clock import ClockPairs
from loadgen.engine.record_builder import build_records
from loadgen.servers.target import resolve_target
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import SocketTimestamps, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request
from tests.support.dialects import DIALECTS
from tests.support.loopback import connected

REQUEST = encode_post("/", "loopback", {}, b"{}")
BODY = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def received(stamps: TimestampSource, *, early: bool, wait_s: float) -> Record:
    """Return the Record of a response that the server sends `wait_s` before the request, or after it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Exchange] = loop.create_future()
    clocks = ClockPairs()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        connection = await connected(resolve_target(url, None), 5, stamps)
        server, _ = listening.accept()
        with server:
            exchange = Exchange(Poller(loop), ended.set_result)
            exchange.prepare(connection, connection.seal(REQUEST))
            if early:
                server.sendall(RESPONSE)
            await asyncio.sleep(wait_s)
            exchange.send()
            exchange.listen()
            if not early:
                server.sendall(RESPONSE)
            await asyncio.wait_for(ended, 10)
        if exchange.reusable_connection is not None:
            exchange.reusable_connection.close()
    (record,) = build_records(
        [(exchange, Request(0, "a", 1, 1))], DIALECTS["openai", "completions"], clocks, 0, Health(), stamps
    )
    return record


@pytest.mark.parametrize("stamps", [SocketTimestamps(), TimestampSource()], ids=["kernel timestamps", "none"])
async def test_a_response_before_the_request_is_a_failure(stamps: TimestampSource) -> None:
    """It is no answer to the request, although it has a token and an end marker."""
    record = await received(stamps, early=True, wait_s=0.1)
    expected = ("failed", "protocol", "the server sent a response before the request")
    assert (record.state, record.error_kind, record.error_detail) == expected


async def test_kernel_timestamps_show_a_response_shortly_before_the_request() -> None:
    """The kernel's timer is too coarse for 2 ms."""
    record = await received(SocketTimestamps(), early=True, wait_s=0.002)
    assert (record.state, record.error_kind) == ("failed", "protocol")


@pytest.mark.parametrize("stamps", [SocketTimestamps(), TimestampSource()], ids=["kernel timestamps", "none"])
@pytest.mark.parametrize("wait_s", [0, 0.1])
async def test_a_response_after_the_request_is_complete(stamps: TimestampSource, wait_s: float) -> None:
    """Also on a connection that was idle before, and if the server answers at once."""
    assert (await received(stamps, early=False, wait_s=wait_s)).state == "complete"
