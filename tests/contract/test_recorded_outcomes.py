"""Every recorded response of a real server, as the Record that it becomes: state, kind of error and the server's words.

The bytes take the whole way from the wire: HTTP framing, events, dialect, verdict. `recorded.py` says what the decoders
read of the streams in detail."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from loadgen.analysis.run.record import Record
from tests.contract.recorded import TRANSCRIPTS
from tests.support.answers import recorded
from tests.support.dialects import EVERY

TABLE = Path(__file__).parent / "recorded_outcomes.csv"
PAGES = (
    *("health", "info", "load", "metric", "models", "ping", "token_load", "tokenize", "chat_tokenize", "version"),
    *("server_info", "flush_cache", "detokenize", "messages_count", "decode", "similarity"),
)
"""Responses to a GET, and of tokenize routes: no load is sent there."""


class Outcome(NamedTuple):
    """One line of the table: which dialect reads the file, how many tokens were asked for, and what becomes of it."""

    file: str
    server: str
    endpoint: str
    version: str
    asked: str
    state: str
    kind: str
    tokens: str
    """Streamed and generated: `18/48`."""
    words: str

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.endpoint


def outcomes() -> list[Outcome]:
    """The lines of the table."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return [Outcome(**line) for line in csv.DictReader(lines)]


def record_of(outcome: Outcome) -> Record:
    """Send a recorded response through the decoder. Each event of a stream is a chunk of its own, as servers send it;
    a response that was cut off lacks the last chunk."""
    raw = (TRANSCRIPTS / outcome.file).read_bytes()
    head, _, body = raw.partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.lower().startswith((b"transfer-encoding", b"content-le"))]
    cut = "killed" in outcome.file and "shard" not in outcome.file
    if b"text/event-stream" in head:
        pieces = [piece + b"\n\n" for piece in body.split(b"\n\n") if piece]
        coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + (b"" if cut else b"0\r\n\r\n")
        kept.append(b"Transfer-Encoding: chunked")
    else:
        coded = body
        kept.append(b"Content-Length: %d" % len(body))
    record, _ = recorded(
        outcome.key,
        raw=b"\r\n".join(kept) + b"\r\n\r\n" + coded,
        cut=("truncated", "the server closed the connection") if cut else None,
        asked=int(outcome.asked),
        dialect=EVERY[outcome.key].variant(outcome.version),
    )
    return record


@pytest.mark.parametrize("outcome", outcomes(), ids=lambda outcome: outcome.file.removesuffix(".txt"))
def test_a_recorded_response_has_its_outcome(outcome: Outcome) -> None:
    """Complete only with the end marker and the tokens asked for; else the reason is the server's own."""
    record = record_of(outcome)
    assert (record.state, record.error_kind) == (outcome.state, outcome.kind)
    assert f"{sum(record.chunk_tokens)}/{record.output_tokens or 0}" == outcome.tokens
    assert outcome.words in record.error_detail
    assert bool(outcome.words) == bool(record.error_detail)


def test_every_recorded_response_is_in_the_table() -> None:
    """A recording that no test reads would prove nothing."""
    on_disk = {
        path.relative_to(TRANSCRIPTS).as_posix()
        for path in TRANSCRIPTS.rglob("*.txt")
        if path.read_bytes().startswith(b"HTTP/") and not path.name.removesuffix(".txt").startswith(PAGES)
    }
    assert on_disk == {outcome.file for outcome in outcomes()}
