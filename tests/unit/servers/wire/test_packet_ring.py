"""The packet ring's pure part: blocks of headers in, arrivals out."""

from __future__ import annotations

import socket
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loadgen.servers.simulated.arrivals import Clients
from loadgen.servers.wire.packet_ring import UNKNOWN, TcpStream, TcpStreamTable
from loadgen.servers.wire.packet_socket import MAX_ADDRESSES, filter_program
from loadgen.servers.wire.ports import PortRange
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps
from loadgen.servers.wire.timestamps import PLAIN
from tests.support.packets import PORT, SERVER, SERVER_6, SYN, Sent, came

WRAPPING = 0xFFFFFFF0


def flow_of(*blocks: list[Sent], opened_ns: int = 10) -> TcpStream:
    """One connection that was watched before what these blocks hold."""
    flows = TcpStreamTable()
    flow = flows.watch(PORT, opened_ns)
    for each in blocks:
        flows.add(came(each))
    return flow


def greeting(sequence: int = 999, stamp_ns: int = 1) -> Sent:
    """The server's SYN-ACK: the first byte of its stream is the one after `sequence`."""
    return Sent(sequence, 0, stamp_ns, flags=SYN | 0x10)


@pytest.mark.parametrize(("family", "server"), [(socket.AF_INET, SERVER), (socket.AF_INET6, SERVER_6)])
@pytest.mark.parametrize("extra", [{}, {"padding": 6}, {"big": True}])
def test_a_block_gives_columns(family: int, server: tuple[str, int], extra: dict[str, int]) -> None:
    """Port, sequence number, length of what was said and stamp of each segment, whatever the frame adds."""
    sent = [Sent(7, 100, 3_000_000_004, port=50_000, source=server, **extra), Sent(107, 1, 5, source=server)]
    found = came(sent, [Sent(108, 2, 6, source=server)], family=family, servers=[server])
    assert found.key.tolist() == [50_000, PORT, PORT]
    assert found.sequence.tolist() == [7, 107, 108]
    assert found.length.tolist() == [100, 1, 2]
    assert found.stamp_ns.tolist() == [3_000_000_004, 5, 6]
    assert not found.syn.any()


def test_packets_of_several_sizes_are_walked() -> None:
    """Options of IP make the strides of a block differ, and shift where TCP begins."""
    found = came([], [Sent(1, 10), Sent(11, 20, ip_options=5), Sent(31, 30)], [Sent(61, 5, ip_options=1)])
    assert (found.sequence.tolist(), found.length.tolist()) == ([1, 11, 31, 61], [10, 20, 30, 5])


def test_several_addresses_are_told_apart() -> None:
    """Two servers may send to one port of ours."""
    other = ("10.1.2.4", 8000)
    found = came([Sent(1, 1), Sent(2, 1, source=other)], servers=[SERVER, other])
    assert found.key.tolist() == [PORT, PORT + 65_536]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_filter_keeps_no_more_than_the_ports_numbers_and_flags(family: int) -> None:
    """Of its own family alone, as all protocols come to it. Its last instruction returns the IP header's length and 14
    bytes; its other end returns none."""
    server, protocol = (SERVER, 0x0800) if family == socket.AF_INET else (SERVER_6, 0x86DD)
    most = [server] * MAX_ADDRESSES[family]
    code = np.frombuffer(filter_program(family, most, PortRange(40_000, 41_000)), np.dtype("u2,u1,u1,u4"))
    assert [(do, value) for do, _, _, value in code[:2].tolist()] == [(0x28, 0xFFFFF000), (0x15, protocol)]
    assert code[-4:].tolist() == [(0x06, 0, 0, 0), (0x87, 0, 0, 0), (0x04, 0, 0, 14), (0x16, 0, 0, 0)]
    for at, (_, true, false, _) in enumerate(code.tolist()):
        assert at + max(true, false) + 1 <= len(code)


@pytest.mark.parametrize(("family", "client"), [(socket.AF_INET, SERVER), (socket.AF_INET6, SERVER_6)])
def test_of_an_address_with_any_port_each_port_is_a_connection(family: int, client: tuple[str, int]) -> None:
    """A server that listens knows its clients by their ports."""
    sent = [Sent(7, 5, source=(client[0], port), port=8000) for port in (50_000, 60_000)]
    assert came(sent, family=family, servers=[(client[0], 0)]).key.tolist() == [50_000, 60_000]


def test_a_client_is_watched_before_it_is_accepted() -> None:
    """What came before a busy server accepted the connection is known, and of a port that comes again only what came
    since. One that is accepted before its SYN has been seen is known as well."""
    clients = Clients()
    clients.add(came([greeting(999, 1), Sent(1000, 10, 2)]))
    first = clients.watch(PORT, 3)
    clients.add(came([Sent(1010, 10, 4)]))
    clients.add(came([greeting(99, 5), Sent(100, 10, 6)]))
    again = clients.watch(PORT, 7)
    early = clients.watch(PORT + 1, 9)
    clients.add(came([Sent(499, 0, 8, port=PORT + 1, flags=SYN), Sent(500, 10, 10, port=PORT + 1)]))
    assert [flow.arrivals([10]) for flow in (first, again, early)] == [[2], [6], [10]]
    assert first.arrivals([20]) == [4]


def test_an_arrival_is_that_of_the_segment_that_brought_the_byte() -> None:
    """By offsets from the SYN-ACK's sequence number, over several reads of the ring."""
    flow = flow_of([greeting(), Sent(1000, 10, 100)], [Sent(1010, 5, 200), Sent(1015, 5, 300)])
    assert flow.arrivals([1, 10, 11, 15, 16, 20, 21]) == [100, 100, 200, 200, 300, 300, UNKNOWN]
    assert not flow.reordered


def test_sequence_numbers_wrap() -> None:
    """After 2^32 they begin at 0 again."""
    flow = flow_of(
        [greeting(WRAPPING)], [Sent(WRAPPING + 1, 10, 1), Sent((WRAPPING + 11) % 2**32, 10, 2), Sent(5, 9, 3)]
    )
    assert flow.arrivals([10, 20, 29]) == [1, 2, 3]


def test_what_is_behind_a_hole_was_not_there_before_it_was_filled() -> None:
    """A loss holds back the bytes behind it; a segment that comes twice counts when it came first."""
    flow = flow_of(
        [greeting(), Sent(1000, 10, 1), Sent(1020, 10, 2), Sent(1030, 10, 3)], [Sent(1010, 10, 9), Sent(1010, 10, 12)]
    )
    assert flow.arrivals([10, 11, 20, 30, 40]) == [1, 9, 9, 9, 9]
    assert flow.reordered


def test_what_is_sent_again_for_nothing_changes_nothing() -> None:
    """A repeated segment neither moves an instant nor makes the order of the stamps doubtful."""
    flow = flow_of([greeting(), Sent(1000, 10, 1), Sent(1000, 10, 2), Sent(1010, 5, 3)])
    assert (flow.arrivals([10, 15]), flow.reordered) == ([1, 3], False)


def test_a_segment_that_the_ring_dropped_leaves_the_others_known() -> None:
    """What the socket delivered and the ring does not hold is unknown, and nothing else is."""
    flow = flow_of([greeting(), Sent(1000, 10, 1), Sent(1020, 10, 3)])
    assert flow.arrivals([10, 15, 20, 21, 30, 31]) == [1, UNKNOWN, UNKNOWN, 3, 3, UNKNOWN]


def test_a_connection_goes_on_after_an_answer() -> None:
    """On a kept connection offsets count on, and what was asked for is forgotten."""
    flow = flow_of([greeting(), Sent(1000, 10, 1), Sent(1010, 10, 2)])
    flow.discard_before(10)
    assert flow.arrivals([10, 11, 20]) == [UNKNOWN, 2, 2]
    flow.discard_before(20)
    assert (flow.contiguous_end, flow.arrivals([20])) == (20, [UNKNOWN])


def test_a_port_that_is_used_again_is_another_connection() -> None:
    """Each has the segments after its own SYN-ACK, whether that was read before it was watched or after."""
    flows = TcpStreamTable()
    first = flows.watch(PORT, opened_ns=10)
    flows.add(came([greeting(), Sent(1000, 10, 20), greeting(4999, 30)]))
    second = flows.watch(PORT, opened_ns=40)
    flows.add(came([Sent(1010, 5, 29), Sent(5000, 10, 50)]))
    third = flows.watch(PORT, opened_ns=70)
    flows.add(came([Sent(5010, 5, 55), greeting(99, 60), Sent(100, 10, 80)]))
    assert [each.arrivals([10]) for each in (first, second, third)] == [[20], [50], [80]]
    assert [each.contiguous_end for each in (first, second, third)] == [10, 10, 10]


def test_other_connections_are_not_kept() -> None:
    """Those of other processes, and those whose SYN-ACK was not seen."""
    flows = TcpStreamTable()
    flow = flows.watch(PORT, opened_ns=10)
    flows.add(came([Sent(1000, 10, 20), Sent(1, 1, 1, port=PORT + 1)]))
    assert (flow.contiguous_end, flow.arrivals([1])) == (0, [UNKNOWN])


def test_what_has_come_is_known_before_it_is_read() -> None:
    """Live figures count the bytes of this answer that have arrived, read or not, and none of the answer before it on a
    reused connection."""
    stamps, flow = PacketRingTimestamps([], [], PLAIN), TcpStream(0)
    for start in range(0, 500, 100):
        flow.add(start, start + 100, start)
    kept: Any = SimpleNamespace(tcp_stream=flow, stream_start=200, sizes=[])
    burst: Any = SimpleNamespace(tcp_stream=flow, stream_start=0, sizes=[])
    unseen: Any = SimpleNamespace(tcp_stream=None, stream_start=0, sizes=[100])
    assert stamps.arrived_bytes([kept, burst, unseen]) == [300, 500, 100]
    assert stamps.arrived_bytes([burst, burst]) == [500, 500]


def test_what_is_not_sorted_yet_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live figures go on between two sorts; other processes' packets, and an end without bytes, are no tokens."""
    now_ns = 2_000_000_000
    monkeypatch.setattr("loadgen.servers.wire.timestamp_sources.monotonic_ns", lambda: now_ns)
    tokens = [Sent(1000, 10, 70), Sent(1010, 10, 80), Sent(1020, 0, 90, flags=0x11), Sent(1, 10, 90, port=PORT + 1)]
    blocks = [came([greeting()]), came(tokens)]
    flows, ring = TcpStreamTable(), SimpleNamespace(read=lambda: blocks.pop(0) if blocks else None)
    stamps = PacketRingTimestamps([ring], [flows], PLAIN)  # type: ignore[list-item]
    answer: Any = SimpleNamespace(tcp_stream=flows.watch(PORT, 10), stream_start=0, sizes=[])
    stamps.collect()
    now_ns += 2_000_000
    stamps.collect()
    assert (stamps.arrived_bytes([answer]), stamps.unsorted_bytes) == ([0], 20)
    stamps.collect(at_once=True)
    assert (stamps.arrived_bytes([answer]), stamps.unsorted_bytes) == ([20], 0)


def test_the_ring_is_read_while_connections_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 20 ms or so: each millisecond in which a packet comes takes one of its blocks."""
    reads = list[int]()
    monkeypatch.setattr(
        "loadgen.servers.wire.timestamp_sources.SETTLED_NS", 0
    )  # nobody waits for the first connection's SYN-ACK
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ring = SimpleNamespace(
            family=socket.AF_INET, addresses=[listening.getsockname()], read=lambda: reads.append(now_ns)
        )
        stamps = PacketRingTimestamps([ring], [TcpStreamTable()], PLAIN)  # type: ignore[list-item]
        for now_ns in range(1_000_000_000, 1_100_000_000, 1_000_000):
            monkeypatch.setattr("loadgen.servers.wire.timestamp_sources.monotonic_ns", lambda: now_ns)  # noqa: B023
            with socket.create_connection(listening.getsockname()) as sock:
                stamps.watch(sock)
    assert 4 <= len(reads) <= 6


def test_what_is_asked_for_is_sorted_however_lately_the_ring_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an answer that ended a while ago, asked for right after the ring was read, would lack its stamps."""
    now_ns = 1_000_000_000
    monkeypatch.setattr("loadgen.servers.wire.timestamp_sources.monotonic_ns", lambda: now_ns)
    blocks = [came([greeting()]), came([Sent(1000, 100, 70)]), None]
    flows, ring = TcpStreamTable(), SimpleNamespace(read=lambda: blocks.pop(0))
    stamps = PacketRingTimestamps([ring], [flows], PLAIN)  # type: ignore[list-item]
    answer: Any = SimpleNamespace(
        tcp_stream=flows.watch(PORT, 10), sizes=[100], user_ns=[0], read_ends=[], offsets=lambda places: places
    )
    stamps.collect()
    now_ns += 2_000_000
    stamps.collect()
    assert stamps.ready(answer)
    assert answer.tcp_stream.arrivals([100]) == [70]


def test_answers_that_came_on_one_connection_are_told_together() -> None:
    """As of a closed loop that nobody had time for: the marks of the first are there until it has been told."""
    flow, stamps = TcpStream(0), PacketRingTimestamps([], [], PLAIN)
    flow.ends, flow.stamps = array("q", [100, 150, 250]), array("q", [70, 80, 90])

    def answer(begins: int, size: int) -> Any:
        def offsets(places: list[int]) -> list[int]:
            return [begins + place for place in places]

        sizes = array("q", [size])
        return SimpleNamespace(
            tcp_stream=flow,
            stream_start=begins,
            sizes=sizes,
            read_ends=[],
            kernel_timespecs=bytearray(16),
            offsets=offsets,
        )

    told = stamps.instants_batch([(answer(0, 150), [1, 150]), (answer(150, 100), [1])], list)
    assert told == [([80], ([70, 80], stamps)), ([90], ([90], stamps))]
    assert (flow.discarded_end, [*flow.ends]) == (150, [250])
