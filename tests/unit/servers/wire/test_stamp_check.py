"""The self-check of timestamps: what counts as a contradiction, and which timestamps a response has then."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loadgen.analysis.run.record import Record
from loadgen.engine.client_health import Health
from loadgen.engine.clock import ClockPairs
from loadgen.engine.record_builder import build_records
from loadgen.servers.wire.packet_ring import UNKNOWN, TcpStream
from loadgen.servers.wire.stamp_check import (
    DISAGREEING_SHARE,
    LIMIT_NS,
    REJECTED_MIN,
    REJECTED_SHARE,
    checked_instants,
    in_order,
    stamp_differences,
    stamps_agree,
)
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps
from loadgen.servers.wire.timestamps import PLAIN, SocketTimestamps, TimestampSource
from loadgen.servers.wire.transport import Exchange
from loadgen.workloads.request import Request
from tests.support.answers import chunk, usage
from tests.support.dialects import DIALECTS
from tests.support.loopback import chunked

MS = 1_000_000
KEY = ("vllm", "completions")
EVENTS = [*(chunk(KEY, word) for word in "abcd"), chunk(KEY, "", "length"), usage(4), "[DONE]"]
PIECES = chunked(*[f"data: {event}\n\n".encode() for event in EVENTS])
GREETED_BYTES = 500
"""Bytes that came on the connection before the response, such as session tickets."""
SENT_NS = 5_050 * MS
ARRIVED_NS = [5_100 * MS + 10 * MS * number for number in range(len(PIECES))]


@pytest.mark.parametrize(
    ("ring", "socket", "closed_ns", "expected"),
    [
        ([10, 20], [11, 22], 0, [1, 2]),
        ([10, UNKNOWN], [11, 9 * MS], 0, [1]),
        ([10, 20], [11, 20 + 9 * MS], 20 + 9 * MS, [1, 0]),
        ([10, 20], [11, 20 + 9 * MS], 7 * MS, [1, 2 * MS + 20]),
        ([], [], 0, []),
    ],
)
def test_differences_are_those_of_reads_that_the_ring_knows(
    ring: list[int], socket: list[int], closed_ns: int, expected: list[int]
) -> None:
    """A read that the ring knows nothing of is left out. The last one may have the instant of the connection's end."""
    assert stamp_differences(ring, socket, closed_ns) == expected


def test_one_read_in_a_hundred_may_differ() -> None:
    """The machine may pause between the two timestamps of a read. In a short response no read may differ."""
    alike, apart = LIMIT_NS, LIMIT_NS + 1
    most = round(DISAGREEING_SHARE * 200)
    assert stamps_agree([])
    assert stamps_agree([alike] * 4)
    assert not stamps_agree([alike, alike, alike, apart])
    assert stamps_agree([apart] * most + [alike] * (200 - most))
    assert not stamps_agree([apart] * (most + 1) + [alike] * (199 - most))


@pytest.mark.parametrize(
    ("sent_ns", "user", "arrivals", "instants", "fits"),
    [
        (5, [20, 40], [10, 30], [10, 10, 30], True),
        (10, [20, 40], [10, 30], [10, 10, 30], True),
        (11, [20, 40], [10, 30], [10, 10, 30], False),
        (None, [20, 40], [10, 30], [10, 10, 30], True),
        (5, [20, 40], [10, 30], [10, 31, 30], False),
        (5, [20, 40], [10, 40 + LIMIT_NS], [10, 30], True),
        (5, [20, 40], [10, 41 + LIMIT_NS], [10, 30], False),
    ],
)
def test_timestamps_fit_their_own_request(
    sent_ns: int | None, user: list[int], arrivals: list[int], instants: list[int], fits: bool
) -> None:
    """They ascend, none lies before the request was sent, and none after the read that returned the bytes."""
    response: Any = SimpleNamespace(sent_ns=sent_ns, user_ns=user)
    assert in_order(response, arrivals, instants) is fits


class Fixed(TimestampSource):
    """A source with one timestamp for everything."""

    def __init__(self, at_ns: int, fallback: TimestampSource | None) -> None:
        self.at_ns, self._fallback, self.rejected = at_ns, fallback, 0

    @property
    def fallback(self) -> TimestampSource | None:
        return self._fallback

    def reject(self) -> None:
        self.rejected += 1

    def instants(self, received: Any, ends: Sequence[int], to_monotonic: Any) -> Any:  # noqa: ARG002
        return [self.at_ns] * len(ends), self


def test_the_first_source_that_fits_is_used() -> None:
    """Each source that does not fit is told so. The last one is used in any case."""
    last = Fixed(1, None)
    good = Fixed(7, last)
    worse = Fixed(2, good)
    best = Fixed(3, worse)
    response: Any = SimpleNamespace(sent_ns=5, user_ns=[9], sizes=array("q", [10]))
    ((arrivals, (instants, by)),) = checked_instants(best, [(response, [1, 10])], list)
    assert (arrivals, instants, by) == ([7], [7, 7], good)
    assert [source.rejected for source in (best, worse, good, last)] == [1, 1, 0, 0]
    ((_, (instants, by)),) = checked_instants(Fixed(4, last), [(response, [1, 10])], list)
    assert (instants, by) == ([1, 1], last)


def response(*, shift: int = 0, cut_reads: Sequence[int] = (), arrived_ns: Sequence[int] = ARRIVED_NS) -> Exchange:
    """A response in one read per piece, over TLS, whose connection counted `shift` bytes too few before it. All clocks
    are one."""
    exchange = Exchange(cast(Any, None), lambda _: None, sent_ns=SENT_NS, sent_end_ns=SENT_NS + 1)
    exchange.ended_at_ns, exchange.cut_reads = 6_000 * MS, [*cut_reads]
    flow = exchange.tcp_stream = TcpStream(0)
    flow.add(0, GREETED_BYTES, MS)
    exchange.stream_start = GREETED_BYTES - shift
    for piece, size, at_ns in zip(PIECES, accumulate(map(len, PIECES)), arrived_ns, strict=True):
        flow.add(flow.contiguous_end, GREETED_BYTES + size, at_ns)
        exchange.parts.append(piece)
        exchange.size = size
        exchange.sizes.append(size)
        exchange.tls_records.append((size, GREETED_BYTES + size - shift))
        exchange.read_ends.append(GREETED_BYTES + size - shift)
        exchange.user_ns.append(at_ns + 1_000)
        exchange.kernel_timespecs += array("q", divmod(at_ns, 10**9)).tobytes()
    exchange.framing.scan(exchange.raw)
    return exchange


def record_of(exchange: Exchange, stamps: TimestampSource) -> Record:
    """Its Record, of a run that began at instant 0."""
    clocks = ClockPairs(lambda: 10**9, lambda: 10**9)
    (record,) = build_records([(exchange, Request(0, "text", 5, 4))], DIALECTS[KEY], clocks, 0, Health(), stamps)
    assert record.state == "complete", record.error_detail
    return record


def ring() -> PacketRingTimestamps:
    return PacketRingTimestamps([], [], SocketTimestamps())


TOKENS_NS = ARRIVED_NS[1:5]


@pytest.mark.parametrize(("shift", "source"), [(0, "ring"), (200, "socket"), (GREETED_BYTES, "socket")])
def test_a_response_whose_packets_were_taken_for_others_has_the_sockets_timestamps(shift: int, source: str) -> None:
    """An offset that is wrong gives each byte the instant of an earlier packet: the Record has the socket's timestamps
    and says so, and the run counts it."""
    stamps = ring()
    record = record_of(response(shift=shift), stamps)
    assert (record.stamps, record.chunk_ns) == (source, TOKENS_NS)
    assert (record.first_byte_ns or 0) > (record.sent_ns or 0)
    assert stamps.counts()["ring_rejected"] == (source != "ring")
    assert stamps.counts()["ring_rejected"] == 0


def test_an_early_packet_is_noticed_where_reads_agree() -> None:
    """The first byte is in no packet that came before the request was sent, even if every read ends where it should."""
    exchange, stamps = response(), ring()
    exchange.tls_records[0] = (exchange.tls_records[0][0], GREETED_BYTES)
    assert record_of(exchange, stamps).stamps == "socket"


def test_reads_that_stop_inside_a_buffer_are_not_compared() -> None:
    """Their socket timestamps may be those of later packets."""
    late = [at + 5 * MS * (number == 2) for number, at in enumerate(ARRIVED_NS)]
    for cut_reads, source in (([], "socket"), ([2], "ring")):
        exchange, other = response(cut_reads=cut_reads), response(arrived_ns=late)
        exchange.kernel_timespecs, exchange.user_ns = other.kernel_timespecs, other.user_ns
        assert record_of(exchange, ring()).stamps == source


def test_kernel_timestamps_that_contradict_the_request_give_way_to_the_process_own() -> None:
    """A wall clock that is set back shifts ring and socket alike. Then the instants of the reads are left."""
    exchange, stamps = response(), SocketTimestamps()
    exchange.sent_ns, exchange.user_ns = ARRIVED_NS[0] + 1, array("q", [at + 20 * MS for at in ARRIVED_NS])
    record = record_of(exchange, stamps)
    assert (record.stamps, record.chunk_ns) == ("user", [at + 20 * MS for at in TOKENS_NS])
    assert [stamps.counts(), stamps.counts()] == [{"socket_rejected": 1}, {"socket_rejected": 0}]


def test_a_ring_that_is_often_wrong_is_given_up() -> None:
    """After three rejected responses that are more than one in twenty, the socket's timestamps are used for all that
    follow, and nothing is read late any more."""
    stamps = ring()
    enough = round(REJECTED_MIN / REJECTED_SHARE)
    for _ in range(enough):
        record_of(response(), stamps)
    for _ in range(REJECTED_MIN):
        record_of(response(shift=200), stamps)
    assert (stamps.active_source, record_of(response(), stamps).stamps) == (stamps, "ring")
    assert record_of(response(shift=200), stamps).stamps == "socket"
    assert stamps.active_source is stamps.fallback
    told = stamps.counts()
    assert (told["ring_rejected"], told["ring_given_up"]) == (REJECTED_MIN + 1, 1)
    late = response()
    assert (record_of(late, stamps).stamps, late.tcp_stream.discarded_end) == ("socket", GREETED_BYTES)
    late.read_ends[-1] += 1
    assert stamps.ready(late)
    assert stamps.instants(late, [1], list)[1] is stamps.fallback


def test_responses_of_one_group_are_judged_one_by_one() -> None:
    """One that the ring does not see changes nothing for the others."""
    unseen = response()
    unseen.tcp_stream = None
    several = [response(), unseen, response(shift=200)]
    clocks = ClockPairs(lambda: 10**9, lambda: 10**9)
    requests = [(exchange, Request(number, "text", 5, 4)) for number, exchange in enumerate(several)]
    for group in (requests, requests[::2]):
        records = build_records(group, DIALECTS[KEY], clocks, 0, Health(), ring())
        assert [record.stamps for record in records] == ["ring", *["socket"] * (len(group) - 1)]


def test_the_last_source_has_no_fallback() -> None:
    """The instants of the reads are right by themselves: they are those of this process."""
    PLAIN.reject()
    assert (PLAIN.fallback, SocketTimestamps().fallback) == (None, PLAIN)
