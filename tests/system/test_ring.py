"""The packet ring on real loopback: what it keeps, what it knows of late reads, and how it is done without."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from pathlib import Path

import pytest
import trustme

from loadgen.analysis.calibration import compare_with_log, read_log
from loadgen.analysis.run.runfile import read
from loadgen.engine.clock import ClockPairs
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn
from loadgen.servers.target import resolve_target
from loadgen.servers.wire import deferred_reads as sweeps
from loadgen.servers.wire import packet_ring as ring
from loadgen.servers.wire import packet_socket as packets
from loadgen.servers.wire import timestamp_sources as sources
from loadgen.servers.wire import transport
from loadgen.servers.wire.http1 import encode_post
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.ports import ports_for_worker
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps, open_source
from loadgen.servers.wire.timestamps import RETRY_S, kernel_stamps
from loadgen.servers.wire.transport import Exchange
from tests.support.command import start, summary_of
from tests.support.loopback import Script, chunked, connected, playing

SAID = b"spoken words that nobody may keep"
REQUEST = encode_post("/", "loopback", {}, b'{"x":"' + SAID + b'"}')
SCRIPT = chunked(SAID, b"one", b"two", b"three", b"four")
PLAYED_S = 0.2
"""Long after the server has sent it all."""
WITHOUT = """
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps, open_source
held = PacketRingTimestamps.open([(2, ('127.0.0.1', 1))])
set_packet_capability(effective=False)
print(open_source('auto', [(2, ('127.0.0.1', 1))]).name, held.counts()['ring_drops'])
"""
PERMITTED = """
import ctypes, struct
from loadgen.servers.wire.capabilities import CAPABILITY_VERSION_3
from loadgen.servers.wire.packet_socket import CAP_NET_RAW, set_packet_capability
from loadgen.servers.wire.timestamp_sources import open_source
libc, header, held = ctypes.CDLL(None), struct.pack("Ii", CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
libc.capget(header, held)
effective, *others = struct.unpack("6I", held.raw)
libc.capset(header, struct.pack("6I", effective & ~(1 << CAP_NET_RAW), *others))
before = open_source("auto", [(2, ("127.0.0.1", 1))]).name
set_packet_capability(effective=True)
print(before, open_source("auto", [(2, ("127.0.0.1", 1))]).name)
"""


async def read_late(
    host: str, authority: trustme.CA | None = None, late_s: float = PLAYED_S, script: Script = SCRIPT
) -> tuple[Exchange, PacketRingTimestamps]:
    """One request, of whose answer nothing is read before all of it has come, or so late."""
    server_tls = client_tls = None
    if authority is not None:
        server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert(host).configure_cert(server_tls)
        authority.configure_trust(client_tls)
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    async with playing(script, host=host, tls=server_tls) as server:
        target = resolve_target(server.url, client_tls)
        stamps = PacketRingTimestamps.open(target.addresses)
        assert stamps is not None, "packet sockets are for root, or for who has CAP_NET_RAW"
        connection = await connected(target, 5, stamps)
        made = Exchange(Poller(asyncio.get_running_loop()), ended.set_result)
        made.prepare(connection, connection.seal(REQUEST))
        made.send()
        await asyncio.sleep(late_s)
        made.listen()
        result = await asyncio.wait_for(ended, 10)
        while not stamps.ready(made):
            await asyncio.sleep(RETRY_S)
        if result.reusable_connection is not None:
            result.reusable_connection.close()
    return result, stamps


def ran(folder: Path, url: str, *options: str, command: str = "burst") -> str:
    """A run in `folder`; what it prints."""
    process = start(folder, "--server", "tgi", "--url", url, *options, command=command)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 5), err
    return " ".join(out.split())


def instants(made: Exchange, stamps: PacketRingTimestamps, ends: Sequence[int]) -> list[int]:
    found, by = stamps.instants(made, ends, ClockPairs().to_monotonic)
    assert by is stamps
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secure", [False, True])
async def test_what_is_read_at_once_has_the_stamps_of_its_packets(host: str, secure: bool) -> None:
    """Five pieces in one read, on IPv4 and IPv6, plain and as TLS records: each arrived after the one before it and
    before it was read. The socket's stamp of the read agrees with the last one."""
    made, stamps = await read_late(host, trustme.CA() if secure else None)
    ends = [*accumulate(map(len, SCRIPT))]
    assert len(made.sizes) < len(ends)
    found = instants(made, stamps, ends)
    assert made.sent_ns is not None
    assert [made.sent_ns, *sorted(set(found)), made.user_ns[-1]] == sorted([made.sent_ns, *found, made.user_ns[-1]])
    assert len(set(found)) == len(ends)
    of_all = stamps.instants(made, made.sizes, list)[0], stamps.instants(made, ends, list)
    assert stamps.instants_batch([(made, ends), (made, ends)], list) == [of_all, of_all]
    told = stamps.counts()
    assert (told["ring_drops"], told["ring_missed"]) == (0, 0)
    assert sum(told["ring_off_counts"].values()) == 2 * len(made.sizes)
    assert max(map(int, told["ring_off_counts"])) < (found[-1] - found[-2]).bit_length()
    stamps.close()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("buffer_bytes", [transport.INTO_BYTES, 4_096])
async def test_large_late_reads_do_not_contradict_the_ring(
    monkeypatch: pytest.MonkeyPatch, secure: bool, buffer_bytes: int
) -> None:
    """The kernel joins waiting packets to one buffer, with the timestamp of the newest. A read that stops inside such a
    buffer has a timestamp that is too late, so it is not compared with the ring's."""
    monkeypatch.setattr(transport, "INTO_BYTES", buffer_bytes)
    monkeypatch.setattr(transport, "_INTO", [memoryview(bytearray(buffer_bytes))])
    pieces = chunked(*[b"x" * 3_000] * 20)
    made, stamps = await read_late("127.0.0.1", trustme.CA() if secure else None, 2 * PLAYED_S, pieces)
    assert made.size > 20 * 3_000
    ((_, (found, by)),) = stamps.instants_batch([(made, [*accumulate(map(len, pieces))])], ClockPairs().to_monotonic)
    assert by is stamps
    assert len(set(found)) == len(pieces)
    told = stamps.counts()
    assert told["ring_rejected"] == 0
    assert sum(told["ring_off_counts"].values()) > 0
    assert max(map(int, told["ring_off_counts"])) < min(map(sub, found[1:], found)).bit_length()
    stamps.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_packets_pass_the_ring_before_they_wake_who_reads(host: str) -> None:
    """Or its stamps would be late by what TCP takes, and the wake-up. The socket's is taken on the way to TCP."""
    made, stamps = await read_late(host, late_s=0)
    by_ring, by_socket = made.tcp_stream.arrivals(made.sizes), kernel_stamps(made)
    assert by_socket is not None
    before_fin = [*zip(by_ring, by_socket, strict=True)][:-1]
    assert before_fin
    assert all(ours <= its for ours, its in before_fin)
    stamps.close()


async def test_each_worker_has_a_ring_of_its_own_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of two workers have ports of two parts, on IPv4 and IPv6, and no ring has a packet of the other's."""
    monkeypatch.setattr(sources, "OPENING_NS", 1 << 62)  # all is left in the ring ...
    monkeypatch.setattr(sources, "SETTLED_NS", 0)  # ... also of the first connection
    parts = [ports_for_worker(worker, 2) for worker in range(2)]
    assert None not in parts
    assert ports_for_worker(0, 1) is None
    for host in ("127.0.0.1", "::1"):
        async with playing(SCRIPT, host=host) as server:
            target = resolve_target(server.url, None)
            opened = [PacketRingTimestamps.open(target.addresses, (worker, 2)) for worker in range(2)]
            for stamps, ports in zip(opened, parts, strict=True):
                assert stamps is not None
                assert ports is not None
                for _ in range(5):
                    connection = await connected(target, 5, stamps)
                    assert ports.first <= connection.sock.getsockname()[1] <= ports.last
                    connection.close()
            await asyncio.sleep(PLAYED_S)
            for stamps, ports in zip(opened, parts, strict=True):
                assert stamps is not None
                assert ports is not None
                came = stamps._rings[0].read()
                assert came is not None
                assert len(set(came.key.tolist())) == 5
                assert {*came.key.tolist()} <= {*range(ports.first, ports.last + 1)}
                stamps.close()


async def test_the_ring_holds_no_payload() -> None:
    """Nothing of what was said, in either direction, is anywhere in the memory that is shared with the kernel."""
    made, stamps = await read_late("127.0.0.1")
    memory = stamps._rings[0].words.tobytes()
    assert SAID in made.raw
    assert SAID[:4] not in memory
    assert b"HTTP" not in memory
    assert sum(word != 0 for word in memory) > 100  # headers are there
    stamps.close()


def test_a_right_that_is_only_permitted_is_taken() -> None:
    """As the Python of the image has it, whose file permits it to a user who is not root."""
    done = subprocess.run([sys.executable, "-c", PERMITTED], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("socket ring", "")


def test_the_right_to_open_rings_is_given_up() -> None:
    """After that a process opens no other, and the one that is open goes on."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("socket 0", "")


def test_kept_connections_go_on_in_the_same_stream(tmp_path: Path) -> None:
    """In a closed loop one connection serves many requests: the stamps of all agree with the server's log."""
    log = tmp_path / "sim.jsonl"
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.01, log=log)) as url:
        ran(tmp_path, url, "--arrivals", "closed:3", "--n", "30", "--output-tokens", "8", command="run")
    seen = compare_with_log(read(tmp_path / "run"), read_log(log))
    assert (seen.stamps, seen.requests, seen.merged) == ("ring", 30, 0)
    assert max(seen.ttft_s.p50, seen.tpot_s.p50) < 1e-3
    client = summary_of(tmp_path)["client"]
    assert (client["ring_drops"], client["ring_missed"]) == (0, 0)


def test_a_stretch_that_the_ring_dropped_has_the_sockets_stamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring that loses some of what comes: those tokens have the socket's stamps, the run says so and how many."""

    class LossyTable(ring.TcpStreamTable):
        """A table that never sees some of the segments."""

        def add(self, *parts: ring.Segments) -> None:
            for part in parts:
                retained = (part.length == 0) | (part.sequence % 7 != 0)
                super().add(ring.Segments(*(column[retained] for column in part)))

    monkeypatch.setattr(ring, "TcpStreamTable", LossyTable)
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.005)) as url:
        printed = ran(tmp_path, url, "--n", "20", "--output-tokens", "20")
    records = read(tmp_path / "run").records
    assert "socket" in {record.stamps for record in records} <= {"ring", "socket"}
    assert all(record.state == "complete" and record.chunk_ns == sorted(record.chunk_ns) for record in records)
    assert summary_of(tmp_path)["client"]["ring_missed"] > 0
    assert "missing in the packet ring: socket timestamps used" in printed


def test_where_addresses_are_translated_the_socket_stamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets that bear another address than the connection has pass the ring unseen. Then nothing is read late, though
    this machine would be busy enough for it, and the run says whose stamps it has."""
    kept = packets.filter_program
    monkeypatch.setattr(
        packets, "filter_program", lambda family, _, ports=None: kept(family, [("192.0.2.1", 9)], ports)
    )
    monkeypatch.setattr(sweeps, "SELDOM", (0.2, -1.0))
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.01)) as url:
        printed = ran(tmp_path, url, "--n", "20", "--output-tokens", "20")
    run, client = read(tmp_path / "run"), summary_of(tmp_path)["client"]
    assert {run.header.stamps.name, *(record.stamps for record in run.records)} == {"socket"}
    assert (client["ring_missed"], client["sweep_max_s"]) == (0, 0)
    assert "no NAT" in printed


def test_without_permission_a_run_says_once_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket stamps it, and one line says what a stamp for each packet needs; not to one that did not ask."""

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(ring, "PacketRing", refused)
    instead = open_source("auto", [(2, ("127.0.0.1", 1))])
    assert instead.name == "socket"
    instead.close()
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.002)) as url:
        for folder, options in (("asked", []), ("not", ["--stamps", "socket"])):
            (tmp_path / folder).mkdir()
            printed = ran(tmp_path / folder, url, "--n", "5", "--output-tokens", "4", *options)
            assert read(tmp_path / folder / "run").header.stamps.name == "socket"
            assert printed.count("CAP_NET_RAW") == (folder == "asked")
