"""Loss and reordering on the way from the server: when a token could be read follows from what the link let through."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.own_process import own_process
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import ROOT, accounted, summary_of
from tests.support.delay import HELD_S
from tests.support.network import MASTER, network

REQUESTS, TOKENS = 20, 40
FIRST_SENT = 1

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]

Side = tuple[bytes, int]
"""Address and port."""


class Segment(NamedTuple):
    """What the link let through."""

    at_ns: int
    source: Side
    target: Side
    sequence: int
    syn: bool
    data: bytes


def test_tokens_arrive_when_they_could_be_read(tmp_path: Path) -> None:
    """Every token's instant is that of the segment that closed the last gap before it, never an earlier one; segments
    that came out of order are counted one by one."""
    spoiled = tmp_path / "spoiled"
    with network({"bench": 2}, spoiled) as net:
        told = SimulatedConfig(server="tgi", host=MASTER, ttft_s=0.3, itl_s=0.02)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        # With TCP timestamps, the kernel discards a delayed segment whose timestamp is older than that of a segment
        # that was sent again (PAWS, RFC 7323). The model of this test does not know which segments are discarded.
        off = net.start("bench", "sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_timestamps")
        assert off.communicate(timeout=30) == ("", "")
        server = net.start("master", *own_process("loadgen.servers.simulated"), env=environment, stdin=-1)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(told.to_json().decode())
        server.stdin.flush()
        url = re.search(r"http://\S+:\d+", server.stdout.readline())
        assert url
        load = ["--n", str(REQUESTS), "--input-tokens", "32", "--output-tokens", str(TOKENS)]
        options = ["--server", "tgi", "--url", url[0], *load, "--no-report", "--out", str(tmp_path / "run")]
        client = net.start("bench", sys.executable, "-m", "loadgen", "burst", *options, env=environment)
        out, err = client.communicate(timeout=100)
        assert client.returncode in (0, 5), out + err
        server.communicate(timeout=30)
    assert accounted(tmp_path, REQUESTS) == {"complete": REQUESTS}
    segments = let_through(spoiled)
    run = runfile.read(tmp_path / "run")
    model = {number: found for source in sides(segments) for number, found in deliverable(segments, source).items()}
    lags_ns = [
        arrived + run.header.start_realtime_ns - could
        for record in run.records
        for arrived, could in zip(record.chunk_ns, model[record.id], strict=True)
    ]
    assert {record.stamps for record in run.records} == {"ring"}
    assert min(lags_ns) >= 0
    assert median(lags_ns) < HELD_S * 1e9 / 60
    assert max(lags_ns) < HELD_S * 1e9 / 3
    client_side = summary_of(tmp_path)["client"]
    assert (client_side["ring_drops"], client_side["ring_missed"]) == (0, 0)
    burst = {source for source in sides(segments) if deliverable(segments, source)}
    counted = sum(line.values["out_of_order"] for line in run.telemetry if line.source == "client")
    assert counted == sum(early(segments, source) for source in burst) > 0


def let_through(file: Path) -> list[Segment]:
    """What a file of tests/support/delay.py says."""
    content, at, found = file.read_bytes(), 0, []
    while at + 16 <= len(content):
        instant, size = struct.unpack_from("2q", content, at)
        packet, at = content[at + 16 : at + 16 + size], at + 16 + size
        if packet[0] >> 4 != 4 or packet[9] != 6:
            continue
        tcp = packet[4 * (packet[0] & 15) : struct.unpack_from("!H", packet, 2)[0]]
        ours, theirs, sequence = struct.unpack_from("!HHI", tcp)
        source, target = (packet[12:16], ours), (packet[16:20], theirs)
        found.append(Segment(instant, source, target, sequence, bool(tcp[13] & 2), tcp[4 * (tcp[12] >> 4) :]))
    return found


def sides(segments: list[Segment]) -> set[Side]:
    """The client's ends of the connections."""
    return {segment.source for segment in segments if segment.syn and segment.source[0] == bytes([10, 77, 9, 2])}


def stream(segments: list[Segment]) -> tuple[bytes, list[tuple[int, int]], int]:
    """What one side said; (end, instant) of what could be read when; and how many segments came too early."""
    first = next(segment.sequence for segment in segments if segment.syn) + FIRST_SENT
    said, marks, held, early = b"", list[tuple[int, int]](), defaultdict[int, bytes](bytes), 0
    for segment in segments:
        start = (segment.sequence - first) % (1 << 32)
        if not segment.data or segment.syn or start >= 1 << 31:
            continue
        early += start > len(said)
        held[start] = max(held[start], segment.data, key=len)
        before = len(said)
        while ready := [at for at in held if at <= len(said)]:
            for at in ready:
                said += held.pop(at)[len(said) - at :]
        if len(said) > before:
            marks.append((len(said), segment.at_ns))
    return said, marks, early


def early(segments: list[Segment], client: Side) -> int:
    """Segments of the server's that came before one that belongs in front of them."""
    return stream([segment for segment in segments if segment.target == client])[2]


def deliverable(segments: list[Segment], client: Side) -> dict[int, list[int]]:
    """By request of this connection when each of its tokens could be read."""
    asked = stream([segment for segment in segments if segment.source == client])[0]
    number = re.search(rb"X-Request-Id: \w+-(\d+)", asked)
    if number is None:
        return {}
    said, marks, _ = stream([segment for segment in segments if segment.target == client])
    ends = [found.end() for found in re.finditer(rb"data:[^\n]*\"token\"[^\n]*\n\n", said)]
    return {int(number[1]): [next(instant for mark, instant in marks if mark >= end) for end in ends]}
