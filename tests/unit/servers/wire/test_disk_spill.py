"""Answers that wait in a file for their ends are what came, and take no memory meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from loadgen.engine.client_health import LiveCounters
from loadgen.engine.driver import Recorder
from loadgen.engine.record_buffer import RecordBuffer
from loadgen.servers.wire import disk_spill as limits
from loadgen.servers.wire.disk_spill import BLOCK_BYTES, DiskSpill, bytes_in_memory
from loadgen.servers.wire.timestamps import PLAIN
from loadgen.servers.wire.transport import Exchange
from tests.support.dialects import DIALECTS

EVENT = b'data: {"choices":[{"text":" word"}]}\n\n'
PIECES = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"%x\r\n%s\r\n" % (len(EVENT), EVENT)] * 9_000]
END = b"0\r\n\r\n"


def under_way(*pieces: bytes) -> Exchange:
    """An Exchange of which this has been read."""
    exchange = Exchange(cast(Any, None), lambda _: None)
    for piece in pieces:
        read(exchange, piece)
    return exchange


def read(exchange: Exchange, piece: bytes) -> None:
    exchange.parts.append(piece)
    exchange.size += len(piece)


def test_what_was_aside_is_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The framing goes on where it was, and all bytes are there in the end; the file has no name and is used again."""
    monkeypatch.setattr(limits, "MEMORY_LIMIT_BYTES", 0)
    aside = DiskSpill(tmp_path)
    for _ in range(2):
        exchange = under_way()
        for piece in PIECES:
            read(exchange, piece)
            if bytes_in_memory(exchange) > 3 * BLOCK_BYTES:
                aside.spill([exchange])
                assert bytes_in_memory(exchange) < BLOCK_BYTES + len(EVENT) + 10
        read(exchange, END)
        whole, apart = under_way(*PIECES, END), exchange.size - bytes_in_memory(exchange)
        assert apart > 4 * BLOCK_BYTES
        assert whole.framing.scan(whole.raw)
        assert exchange.framing.scan(b"".join(exchange.parts), apart)
        assert exchange.framing.bounds == whole.framing.bounds
        assert exchange.raw == whole.raw
        assert bytes_in_memory(exchange) == exchange.size
    assert [*tmp_path.iterdir()] == []
    assert aside.put(bytes(BLOCK_BYTES)) < len(whole.raw) // BLOCK_BYTES
    aside.close()


def test_answers_are_laid_aside_when_they_take_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before; and no more once the disk has refused it, which loses nothing."""
    exchange = under_way(*PIECES)
    aside = DiskSpill(tmp_path)
    recorder = Recorder(DIALECTS["vllm", "completions"], RecordBuffer(), 0, LiveCounters(), PLAIN, disk_spill=aside)
    recorder.watch({exchange})
    assert bytes_in_memory(exchange) == exchange.size
    monkeypatch.setattr(limits, "MEMORY_LIMIT_BYTES", 100_000)
    recorder.watch({exchange})
    assert bytes_in_memory(exchange) < 2 * BLOCK_BYTES
    exchange = under_way(*PIECES)
    monkeypatch.setattr(os, "pwrite", lambda *_: 10)
    recorder.watch({exchange})
    assert (bytes_in_memory(exchange), exchange.raw) == (exchange.size, b"".join(PIECES))
    aside.close()
