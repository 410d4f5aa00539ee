"""The driver against loopback servers: each way a request can end gets its state, and nothing received is lost."""

from __future__ import annotations

import asyncio
import time
from array import array
from functools import partial
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import RunWriter
from loadgen.engine import driver as driver_module
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.clock import SystemClock
from loadgen.engine.driver import Driver, Recorder
from loadgen.engine.record_builder import raw_offsets
from loadgen.engine.request_queue import OpenLoop, ScheduledRequest
from loadgen.servers.target import resolve_target
from loadgen.servers.wire.connection import connect
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.pool import Pool
from loadgen.servers.wire.timestamps import SocketTimestamps
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request
from tests.support.dialects import DIALECTS
from tests.support.loopback import CLOSE, HANG, RESET, Script, chunked, playing

TGI = DIALECTS["tgi", "generate"]


def event(index: int, last: bool = False) -> bytes:
    """One TGI event; the last one carries the details."""
    details = (
        f'{{"finish_reason":"length","generated_tokens":{index},"seed":null,"input_length":5}}' if last else "null"
    )
    text = '"done"' if last else "null"
    token = '{"id":1,"text":" a","logprob":0,"special":false}'
    data = f'{{"index":{index},"token":{token},"generated_text":{text},"details":{details}}}'
    return f"data: {data}\n\n".encode()


ANSWER = chunked(event(1), event(2), event(3, last=True))


def driver_of(
    slots: list[ScheduledRequest], url: str, part: RunWriter, counts: LiveCounters, timeout_s: float = 20.0
) -> Driver:
    """An open-loop driver of these slots, with a connection for each."""
    loop = asyncio.get_running_loop()
    stamps = SocketTimestamps()
    pool = Pool(partial(connect, resolve_target(url, None), 5, stamps), spare=len(slots))
    recorder = Recorder(TGI, part, 0, counts, stamps)
    clock, exchange = SystemClock(loop), partial(Exchange, Poller(loop))
    limits = {"timeout_s": timeout_s, "in_flight_max": len(slots)}
    return Driver(OpenLoop(iter(slots)), pool, exchange, recorder, clock=clock, **limits)


def slot_of(url: str, index: int) -> ScheduledRequest:
    """A slot due at once, of three output tokens."""
    request = Request(index, "text", 5, 3)
    return ScheduledRequest(
        request, encode_post(TGI.path, resolve_target(url, None).host_field, {}, TGI.encode(request, "m")), 0
    )


async def drive(
    url: str, part: Path, *, n: int = 1, timeout_s: float = 20.0, interrupt: bool = False
) -> tuple[list[Record], LiveCounters]:
    """Send `n` requests at once and give back their Records and the counts at the end."""
    counts, file = LiveCounters(), RunWriter(part)
    driver = driver_of([slot_of(url, index) for index in range(n)], url, file, counts, timeout_s)
    await driver.open()
    running = asyncio.create_task(driver.run(time.monotonic_ns()))
    if interrupt:
        while counts.streaming < n:
            await asyncio.sleep(0.01)
        driver.interrupt()
    await asyncio.wait_for(running, 30)
    file.close()
    lines = [msgspec.json.decode(line) for line in part.read_bytes().splitlines()]
    return [msgspec.convert(line, Record) for line in lines if line["type"] == "request"], counts


async def one(script: Script, part: Path, **options: float) -> Record:
    async with playing(script) as server:
        (record,), _ = await drive(server.url, part, **options)
    return record


async def test_a_complete_request_is_recorded_whole(tmp_path: Path) -> None:
    """Instants in order, one entry per chunk with its tokens, lengths as asked and as reported."""
    record = await one(ANSWER, tmp_path / "part")
    assert (record.state, record.error_kind, record.http_status) == ("complete", "", 200)
    assert record.chunk_tokens == [1, 1, 1]
    assert (record.prompt_tokens_asked, record.prompt_tokens) == (5, 5)
    assert (record.output_tokens_asked, record.output_tokens, record.counted_by) == (3, 3, "server")
    assert record.finish_reason == "length"
    assert record.stamps == "socket"
    instants = [record.connected_ns, 0, record.sent_ns, record.first_byte_ns, *record.chunk_ns]
    assert instants == sorted(instants, key=lambda instant: instant or 0)
    assert record.chunk_ns[0] < record.chunk_ns[1] < record.chunk_ns[2] == record.end_ns
    assert record.coalesced_reads == 0


async def test_events_that_share_a_read_are_counted_and_marked(tmp_path: Path) -> None:
    """Two tokens in one read share its stamp: the read is coalesced, and TTFT is marked as bounded, not exact."""
    record = await one(chunked(event(1) + event(2), event(3, last=True)), tmp_path / "part")
    assert record.state == "complete"
    assert record.chunk_ns[0] == record.chunk_ns[1] < record.chunk_ns[2]
    assert record.coalesced_reads == 1
    assert record.first_token_merged


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OVERLOAD = b'data: {"error":"Model is overloaded","error_type":"overloaded"}\n\n'
BUSY = b'{"error":"Model is overloaded","error_type":"overloaded"}'


@pytest.mark.parametrize(
    ("script", "state", "kind", "detail", "tokens"),
    [
        ([*chunked(event(1), event(2), end=False), CLOSE], "truncated", "truncated", "after tokens had come", 2),
        ([*chunked(event(1), end=False), RESET], "truncated", "truncated", "after tokens had come", 1),
        (chunked(event(1), event(2)), "truncated", "truncated", "without the end marker", 2),
        (chunked(event(1), OVERLOAD), "failed", "in_band_error", "overloaded", 1),
        (chunked(b"data: {nonsense\n\n"), "failed", "protocol", "", 0),
        ([HEAD, b"junk\r\n\r\n"], "failed", "protocol", "chunk size", 0),
        ([b"SSH-2.0-OpenSSH\r\n"], "failed", "protocol", "not an HTTP response", 0),
        ([CLOSE], "failed", "connect", "before any response", 0),
        ([HEAD[:20], CLOSE], "truncated", "truncated", "closed the connection", 0),
        (
            [b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%s" % (len(BUSY), BUSY)],
            "rejected",
            "rejected",
            "overloaded",
            0,
        ),
        (chunked(OVERLOAD), "rejected", "rejected", "overloaded", 0),
        ([b"HTTP/1.1 503 X\r\nRetry-After: 30\r\n\r\n", CLOSE], "rejected", "rejected", "; retry after 30 s", 0),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"], "failed", "protocol", "not an event stream", 0),
    ],
)
async def test_each_bad_ending_has_its_state_and_keeps_its_tokens(
    script: Script, state: str, kind: str, detail: str, tokens: int, tmp_path: Path
) -> None:
    """Truncated, failed and rejected are apart, none is complete, and what arrived before the end is kept."""
    record = await one(script, tmp_path / "part")
    assert (record.state, record.error_kind) == (state, kind)
    assert detail in record.error_detail
    assert sum(record.chunk_tokens) == tokens
    assert record.end_ns is not None


async def test_a_silent_server_is_given_up_in_time(tmp_path: Path) -> None:
    """A stream that stalls past the time limit fails with what came before."""
    record = await one([*chunked(event(1), end=False), HANG], tmp_path / "part", timeout_s=0.3)
    assert (record.state, record.error_kind) == ("failed", "timeout")
    assert sum(record.chunk_tokens) == 1


@pytest.mark.parametrize("checked_group", [driver_module.CHECKED_GROUP, 0])
async def test_a_connection_closed_while_idle_is_opened_again_and_counted(
    checked_group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server closed a connection that was opened before the start. Its request is sent once, on a new connection.

    Connections of groups that are larger than CHECKED_GROUP are checked before the start, but not when they are sent.
    """
    monkeypatch.setattr(driver_module, "CHECKED_GROUP", checked_group)
    async with playing(ANSWER, on_accept=[CLOSE]) as server:
        slot, part = slot_of(server.url, 0), RunWriter(tmp_path / "part")
        driver = driver_of([slot], server.url, part, LiveCounters())
        await driver.open()
        assert slot.exchange is not None
        assert slot.exchange.connection is not None
        while not slot.exchange.connection.closed_by_peer():
            await asyncio.sleep(0.005)
        await asyncio.wait_for(driver.run(time.monotonic_ns()), 20)
        part.close()
        record = msgspec.json.decode((tmp_path / "part").read_bytes().splitlines()[0], type=Record)
    assert (record.state, record.reopened, record.first_sent_ns) == ("complete", 1, None)


async def test_no_connection_is_a_record_not_an_exception(tmp_path: Path) -> None:
    """A refused connection fails each request with the reason."""
    async with playing(ANSWER) as server:
        url = server.url
    records, _ = await drive(url, tmp_path / "part", n=3)
    assert [(record.state, record.error_kind, record.sent_ns) for record in records] == [
        ("failed", "connect", None)
    ] * 3
    assert "refused" in records[0].error_detail.lower()


async def test_an_interrupt_keeps_what_came(tmp_path: Path) -> None:
    """Cut off in the middle: every request has a Record, with the chunks that had arrived."""
    async with playing([*chunked(event(1), event(2), end=False), HANG]) as server:
        records, _ = await drive(server.url, tmp_path / "part", n=5, interrupt=True)
    assert [record.error_kind for record in records] == ["cancelled"] * 5
    assert all(sum(record.chunk_tokens) >= 1 for record in records)


async def test_many_requests_are_all_accounted_for(tmp_path: Path) -> None:
    """Sent = complete + truncated + failed, and the shared counts end the same."""
    async with playing(ANSWER) as server:
        records, counts = await drive(server.url, tmp_path / "part", n=200)
    assert sorted(record.id for record in records) == list(range(200))
    assert {record.state for record in records} == {"complete"}
    assert (counts.due, counts.sent, counts.complete, counts.tokens) == (200, 200, 200, 600)


def test_events_map_to_the_read_that_brought_their_last_byte() -> None:
    """Chunk boundaries, event boundaries and reads need not coincide."""
    # raw:    head 0..10 | chunk data 12..22 | chunk data 26..36;  events end at body offsets 4, 12, 20
    assert raw_offsets([4, 10, 12, 20], array("q", (12, 22, 26, 36))) == [16, 22, 28, 36]
    assert raw_offsets([20], array("q", (12, 22, 26, 36))) == [36]
    assert raw_offsets([], array("q")) == []
