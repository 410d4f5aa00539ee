"""The token counts that a request's figures use: one rule, explained in docs/concepts/tokens.md.

A response has two numbers. The tokens *generated* are the server's total where it states one; lengths and throughput
use it. The tokens *streamed* are those that the chunks held; TPOT and ITL use them, because time between chunks is the
time of streamed tokens. The numbers are the same unless the server generates tokens that it never streams (hidden
reasoning), states no count for chunks of several tokens, or contradicts itself. `streamed_tokens` tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from loadgen.analysis.run.record import Record

Basis = Literal["counted", "chunks", "spread", "hidden", "assumed_hidden", "contradicted"]
"""How the streamed tokens are known: `counted` in each chunk; `chunks`, one token each, and nothing says otherwise;
`spread`, the server's total spread evenly over the chunks; `hidden`, generated tokens that were never streamed, by the
server's counts or because the text is too short to hold them; `assumed_hidden`, the same by the look of text and time;
`contradicted`, the chunks' counts add up to more than the server's total, which is spread evenly instead."""
BASES: tuple[Basis, ...] = get_args(Basis)

BYTES_PER_TOKEN_MIN = 3.0
"""Text has more bytes per token than this, nearly always."""
PHRASES_SHARE_MAX = 0.1
"""A token is at most one word, so where more chunks than this share hold several words, chunks hold several tokens."""
PACE_MIN = 0.5
"""Hidden tokens take at least this part of the time that as many streamed chunks take."""


class StreamedTokens(NamedTuple):
    """The streamed tokens of one response."""

    counts: Sequence[int]
    """Tokens of each chunk, at least 1."""
    tokens: float
    """All of them. May be fewer than the chunks, where chunks are pieces of tokens."""
    first: float
    """Tokens of the first chunk."""
    basis: Basis
    hidden: int
    """Generated tokens that were not streamed. Where the server's total contradicts the chunks: total minus chunks."""


def streamed_tokens(record: Record) -> StreamedTokens:
    """Return the tokens that this record's chunks held. The record has at least one chunk."""
    counts = record.chunk_tokens
    total = record.output_tokens
    if record.counted_by == "server" and total is not None and is_total_valid(record, total):
        return (_of_known if _is_known(record) else _of_unknown)(record, total)
    known = record.chunk_counts != "chunk" and record.counted_by != "chunks"
    basis: Basis = "counted" if known else "chunks"
    if record.refuted_total is not None:
        return StreamedTokens(counts, sum(counts), counts[0], "contradicted", record.refuted_total - sum(counts))
    return StreamedTokens(counts, sum(counts), counts[0], basis, 0)


def generated_tokens(record: Record) -> int:
    """Return the tokens that this record's server generated, as far as they are known. Of a response that failed
    because it was said to be longer than asked, what arrived counts."""
    total = record.output_tokens
    if record.counted_by != "server" or total is None or not is_total_valid(record, total):
        return sum(record.chunk_tokens)
    return total


def is_total_valid(record: Record, total: int) -> bool:
    """Return whether the server's total stands: that of a failed response that is longer than asked does not."""
    return record.state == "complete" or total <= record.output_tokens_asked


def _is_known(record: Record) -> bool:
    """Whether each chunk has a count of its own. Earlier versions of run files do not say: there, counts are known if
    one is above 1."""
    if record.chunk_counts:
        return record.chunk_counts != "chunk"
    return any(tokens > 1 for tokens in record.chunk_tokens)


def _of_known(record: Record, total: int) -> StreamedTokens:
    """Each chunk has a count of its own, and the server states a total."""
    counts, counted = record.chunk_tokens, sum(record.chunk_tokens)
    if counted > total:
        return _spread(total, len(counts), "contradicted", total - counted)
    within = record.hidden_tokens - (total - counted)  # hidden tokens that the chunks' counts include
    if within > 0:
        counts = _without_first(counts, within)
    hidden = total - sum(counts)
    if hidden <= 1:  # one token that was not streamed is the end-of-text token, which has no text
        return StreamedTokens(counts, sum(counts), counts[0], "counted", 0)
    return StreamedTokens(counts, sum(counts), counts[0], "hidden", hidden)


def _of_unknown(record: Record, total: int) -> StreamedTokens:
    """Nothing says how many tokens a chunk holds, and the server states a total."""
    chunks = len(record.chunk_tokens)
    missing = total - chunks
    one_each = StreamedTokens([1] * chunks, chunks, 1, "chunks", 0)
    end_of_text = missing == 1 and record.finish_reason not in ("", "length")  # it has no text
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


def _without_first(counts: Sequence[int], hidden: int) -> list[int]:
    """Take hidden tokens away from the first chunks: they were generated before their text. Each chunk keeps one."""
    left, retained = hidden, []
    for tokens in counts:
        taken = min(left, max(0, tokens - 1))
        left -= taken
        retained.append(tokens - taken)
    return retained


def _spread(tokens: int, chunks: int, basis: Basis, hidden: int) -> StreamedTokens:
    """Spread tokens evenly over chunks, in whole numbers of at least one."""
    tokens = max(tokens, 1)
    ends = [tokens * (index + 1) // chunks for index in range(chunks)]
    counts = [max(1, end - start) for start, end in pairwise([0, *ends])]
    return StreamedTokens(counts, tokens, tokens / chunks, basis, hidden)


def _looks_hidden(record: Record, chunks: int, total: int) -> bool:
    """Whether tokens beyond one per chunk are hidden rather than in the chunks, although nothing states that: chunks
    are single words, these have too few bytes for so many tokens, and before the first of them there was time to
    generate the rest at the pace of the chunks."""
    if not record.text_bytes or chunks < 2 or record.sent_ns is None:
        return False
    pace_ns = (record.chunk_ns[-1] - record.chunk_ns[0]) / (chunks - 1)
    return (
        record.text_bytes < BYTES_PER_TOKEN_MIN * total
        and record.phrase_chunks <= PHRASES_SHARE_MAX * chunks
        and record.chunk_ns[0] - record.sent_ns >= PACE_MIN * pace_ns * (total - chunks)
    )
