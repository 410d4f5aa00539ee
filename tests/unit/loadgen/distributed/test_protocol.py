"""Part files on their way: everything arrives, in order, and never much at a time; and frames between processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from loadgen.distributed.protocol import (
    ClockSeries,
    Frames,
    Order,
    Piece,
    PieceAck,
    Sealed,
    append_piece,
)
from loadgen.distributed.worker import MAX_PIECES_IN_FLIGHT, PIECE_BYTES, Outgoing
from loadgen.errors import OutputError


def test_parts_arrive_whole_and_little_at_a_time(tmp_path: Path) -> None:
    """While they grow and after the end, with what a full disk moved elsewhere. Pieces wait for earlier ones."""
    here = {3: tmp_path / "part-3.jsonl", 4: tmp_path / "part-4.jsonl"}
    there = {worker: tmp_path / f"there-{worker}.jsonl" for worker in here}
    here[3].write_bytes(b"a" * (6 * PIECE_BYTES + 17))
    way: list[Piece] = []
    outgoing = Outgoing(here, way.append)
    assert not outgoing.pump()
    assert len(way) == MAX_PIECES_IN_FLIGHT
    here[4].write_bytes(b"b" * 100)
    rescued = tmp_path / "rescued"
    rescued.write_bytes(b"c" * (PIECE_BYTES + 1))
    outgoing.append(4, rescued)
    most = 0
    while not outgoing.pump():
        most = max(most, len(way))
        piece = way.pop(0)
        outgoing.acknowledge(append_piece(piece, there[piece.worker]))
    assert most == MAX_PIECES_IN_FLIGHT
    assert there[3].read_bytes() == here[3].read_bytes()
    assert there[4].read_bytes() == here[4].read_bytes() + rescued.read_bytes()


def test_nothing_is_over_before_it_is_taken(tmp_path: Path) -> None:
    """A part that is on its way is not delivered yet, and what was never sent cannot be taken."""
    part = tmp_path / "part-0.jsonl"
    part.write_bytes(b"line\n")
    outgoing = Outgoing({0: part}, lambda _: None)
    assert not outgoing.pump()
    outgoing.acknowledge(PieceAck(0, 77))
    assert not outgoing.pump()
    outgoing.acknowledge(PieceAck(0, 5))
    assert outgoing.pump()


def test_a_disk_that_is_full_is_said() -> None:
    """The master's disk refuses: a typed error that names the file."""
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left"):
        append_piece(Piece(0, 0, b"line\n"), Path("/dev/full"))


def test_frames_keep_messages_whole() -> None:
    """Several at once, one in pieces, nothing in time, and the end."""
    left, right = socket.socketpair()
    ours: Frames[Order] = Frames(left, Order)
    theirs: Frames[Order] = Frames(right, Order)
    said = [Sealed("a", b"x" * 70_000), ClockSeries("b"), Sealed("", b"")]
    for each in said:
        ours.post(each)
    assert [theirs.receive(1) for _ in said] == said
    assert theirs.receive(0) is None
    left.close()
    with pytest.raises(EOFError):
        theirs.receive(1)
    theirs.post(said[0])
    right.close()
