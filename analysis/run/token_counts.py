"""The token counts that a request's figures use: one rule, explained in docs/concepts/tokens.md.

A response has two token counts. The *generated* tokens are the server's total, if it reports one; lengths and
throughput use them. The *streamed* tokens are those in the chunks; TPOT and ITL use them, because they measure the time
between chunks. The counts are equal unless the server generates tokens that it never streams (hidden reasoning),
reports no count for chunks of several tokens, or contradicts itself. `streamed_tokens` distinguishes these cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from loadgen.analysis.run.record import Record

Basis = Literal["counted", "chunks", "spread", "hidden", "assumed_hidden", "contradicted"]
"""The basis of a streamed token count.

- `counted`: each chunk has a count.
- `chunks`: one token per chunk is assumed, and nothing contradicts that.
- `spread`: the server's total is spread evenly over the chunks.
- `hidden`: some generated tokens were never streamed, by the server's counts or because the text is too short for them.
- `assumed_hidden`: some generated tokens were probably never streamed, judging by the text and the timing.
- `contradicted`: the chunks' counts exceed the server's total, which is spread evenly instead."""
BASES: tuple[Basis, ...] = get_args(Basis)

BYTES_PER_TOKEN_MIN = 3.0
"""Text nearly always has more bytes per token than this."""
PHRASES_SHARE_MAX = 0.1
"""Chunks hold several tokens if more than this share of them hold several words: a token is at most one word."""
PACE_MIN = 0.5
"""Hidden tokens take at least this part of the time of the same number of streamed chunks."""


class StreamedTokens(NamedTuple):
    """The streamed tokens of one response."""

    counts: Sequence[int]
    """Tokens of each chunk, at least 1."""
    tokens: float
    """Total streamed tokens. Fewer than the chunks if a token arrives in several chunks."""
    first: float
    """Tokens of the first chunk."""
    basis: Basis
    hidden: int
    """Generated tokens that were not streamed. If the server's total contradicts the chunks: total minus chunks."""


def streamed_tokens(record: Record) -> StreamedTokens:
    """Return the streamed tokens of a record with at least one chunk."""
    counts = record.chunk_tokens
    total = record.output_tokens
    if record.counted_by == "server" and total is not None and is_total_valid(record, total):
        if _has_chunk_counts(record):
            return _with_chunk_counts(record, total)
        return _without_chunk_counts(record, total)
    known = record.chunk_counts != "chunk" and record.counted_by != "chunks"
    basis: Basis = "counted" if known else "chunks"
    if record.refuted_total is not None:
        return StreamedTokens(counts, sum(counts), counts[0], "contradicted", record.refuted_total - sum(counts))
    return StreamedTokens(counts, sum(counts), counts[0], basis, 0)


def generated_tokens(record: Record) -> int:
    """Return the generated tokens of a record: the server's total, or the sum over chunks without a valid total."""
    total = record.output_tokens
    if record.counted_by != "server" or total is None or not is_total_valid(record, total):
        return sum(record.chunk_tokens)
    return total


def is_total_valid(record: Record, total: int) -> bool:
    """Return whether the server's total is valid. It is not for a failed response that is longer than requested."""
    return record.state == "complete" or total <= record.output_tokens_asked


def _has_chunk_counts(record: Record) -> bool:
    """Return whether each chunk has a known count. Older run files do not state it; a count above 1 shows it."""
    if record.chunk_counts:
        return record.chunk_counts != "chunk"
    return any(tokens > 1 for tokens in record.chunk_tokens)


def _with_chunk_counts(record: Record, total: int) -> StreamedTokens:
    """Return the streamed tokens if each chunk has a known count and the server states a total."""
    counts, counted = record.chunk_tokens, sum(record.chunk_tokens)
    if counted > total:
        return _spread(total, len(counts), "contradicted", total - counted)
    hidden_in_counts = record.hidden_tokens - (total - counted)
    if hidden_in_counts > 0:
        counts = _remove_hidden(counts, hidden_in_counts)
    hidden = total - sum(counts)
    if hidden <= 1:  # A single token that was not streamed is the end-of-text token, which has no text.
        return StreamedTokens(counts, sum(counts), counts[0], "counted", 0)
    return StreamedTokens(counts, sum(counts), counts[0], "hidden", hidden)


def _without_chunk_counts(record: Record, total: int) -> StreamedTokens:
    """Return the streamed tokens if the counts of chunks are unknown and the server states a total."""
    chunks = len(record.chunk_tokens)
    missing = total - chunks
    one_each = StreamedTokens([1] * chunks, chunks, 1, "chunks", 0)
    end_of_text = missing == 1 and record.finish_reason not in ("", "length")  # This token has no text.
    if missing == 0 or (end_of_text and not record.hidden_tokens):
        return one_each
    if record.hidden_tokens and missing > 0:
        hidden = min(record.hidden_tokens, missing)
        return _spread(total - hidden, chunks, "hidden", hidden)
    if record.text_bytes and total > record.text_bytes:
        return one_each._replace(basis="hidden", hidden=missing)
    if missing > 0 and _looks_hidden(record, chunks, total):
        return one_each._replace(basis="assumed_hidden", hidden=missing)
    return _spread(total, chunks, "spread", 0)


def _remove_hidden(counts: Sequence[int], hidden: int) -> list[int]:
    """Subtract hidden tokens from the first chunks, before whose text they were generated. Each chunk keeps one."""
    remaining, visible = hidden, []
    for tokens in counts:
        removed = min(remaining, max(0, tokens - 1))
        remaining -= removed
        visible.append(tokens - removed)
    return visible


def _spread(tokens: int, chunks: int, basis: Basis, hidden: int) -> StreamedTokens:
    """Spread tokens evenly over chunks, in whole numbers of at least one."""
    tokens = max(tokens, 1)
    ends = [tokens * (index + 1) // chunks for index in range(chunks)]
    counts = [max(1, end - start) for start, end in pairwise([0, *ends])]
    return StreamedTokens(counts, tokens, tokens / chunks, basis, hidden)


def _looks_hidden(record: Record, chunks: int, total: int) -> bool:
    """Return whether tokens beyond one per chunk were probably hidden rather than in the chunks.

    Three conditions must hold. Chunks are single words. The text has too few bytes for all tokens. Before the first
    chunk there was enough time to generate the missing tokens at the pace of the chunks."""
    if not record.text_bytes or chunks < 2 or record.sent_ns is None:
        return False
    pace_ns = (record.chunk_ns[-1] - record.chunk_ns[0]) / (chunks - 1)
    return (
        record.text_bytes < BYTES_PER_TOKEN_MIN * total
        and record.phrase_chunks <= PHRASES_SHARE_MAX * chunks
        and record.chunk_ns[0] - record.sent_ns >= PACE_MIN * pace_ns * (total - chunks)
    )
