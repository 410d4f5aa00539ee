"""Determines how many tokens of a response were generated and how many were streamed (docs/concepts/tokens.md).

- Generated tokens are the server's total, if the server reports a total. Lengths and throughput use this count.
- Streamed tokens are the tokens in the chunks. TPOT and ITL use this count, because they measure time between chunks.

Both counts are usually equal. The counts differ if the server generates tokens that it never streams (hidden
reasoning), sends several tokens per chunk without a count, or reports contradictory counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from loadgen.analysis.run.record import Record

Basis = Literal["counted", "chunks", "spread", "without_text", "hidden", "assumed_hidden", "contradicted"]
"""How a streamed token count was determined.

- `counted`: the token count of each chunk is known.
- `chunks`: each chunk is assumed to hold one token, and no other count contradicts that.
- `spread`: the server's total is spread evenly over the chunks.
- `without_text`: like `spread`, but the text is too short for all tokens, and the server reports that it hid no
  reasoning. Some tokens have no text, such as special tokens and parts of characters.
- `hidden`: some generated tokens were never streamed. The server's counts show it, or the text has fewer bytes than
  tokens.
- `assumed_hidden`: some generated tokens were probably never streamed, judging by the text and the timing.
- `contradicted`: the server's total is smaller than the sum of the chunks' counts and is spread evenly, or the server
  reports a total of 0 for a response with text."""
BASES: tuple[Basis, ...] = get_args(Basis)

BYTES_PER_TOKEN_MIN = 3.0
"""Minimum bytes of text per token. Nearly all texts have more."""
PHRASES_SHARE_MAX = 0.1
"""Maximum share of chunks with several words, if each chunk holds one token. A token is at most one word."""
PACE_MIN = 0.5
"""Minimum time per hidden token, as a share of the mean time between streamed chunks."""


class StreamedTokens(NamedTuple):
    """Streamed tokens of one response: in total, per chunk, and how they were counted."""

    counts: Sequence[int]
    """Tokens of each chunk, at least 1."""
    tokens: float
    """Total streamed tokens. This is less than the number of chunks if a token arrives in several chunks."""
    first: float
    """Tokens of the first chunk."""
    basis: Basis
    hidden: int
    """Generated tokens that were not streamed. If `basis` is `contradicted`, this is the server's total minus the sum
    of the chunks' counts, which may be negative."""


def streamed_tokens(record: Record) -> StreamedTokens:
    """Return the streamed tokens of a record. The record must have at least one chunk."""
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
    """Return the generated tokens of a record: the server's total if it is valid, else the sum over the chunks."""
    total = record.output_tokens
    if record.counted_by != "server" or total is None or not is_total_valid(record, total):
        return sum(record.chunk_tokens)
    return total


def is_total_valid(record: Record, total: int) -> bool:
    """Return True if `total`, the server's token count, is plausible.

    The count is not plausible if the request is incomplete and `total` exceeds the requested length.
    """
    return record.state == "complete" or total <= record.output_tokens_asked


def _has_chunk_counts(record: Record) -> bool:
    """Return True if the number of tokens in each chunk of `record` is known.

    The field `chunk_counts` states the source of these numbers. Records of older versions do not state the source. If
    the numbers were unknown, these versions recorded one token for each chunk. In their Records, a chunk with more than
    one token therefore shows that the numbers are known.
    """
    if record.chunk_counts:
        return record.chunk_counts != "chunk"
    return any(tokens > 1 for tokens in record.chunk_tokens)


def _with_chunk_counts(record: Record, total: int) -> StreamedTokens:
    """Return the streamed tokens of a response whose chunks have known token counts.

    `total` is the number of generated tokens that the server reported."""
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
    """Return the streamed tokens of a response whose chunks have no token counts.

    `total` is the number of generated tokens that the server reported."""
    chunks = len(record.chunk_tokens)
    missing = total - chunks
    one_each = StreamedTokens([1] * chunks, chunks, 1, "chunks", 0)
    end_of_text = missing == 1 and record.finish_reason not in ("", "length")  # This token has no text.
    if missing == 0 or (end_of_text and not record.hidden_tokens):
        return one_each
    if record.hidden_tokens and missing > 0:
        hidden = min(record.hidden_tokens, missing)
        return _spread(total - hidden, chunks, "hidden", hidden)
    too_long_for_text = bool(record.text_bytes) and total > record.text_bytes
    if missing > 0 and (too_long_for_text or _looks_hidden(record, chunks, total)):
        if record.reasoning_reported:
            return _spread(total, chunks, "without_text", 0)
        return one_each._replace(basis="hidden" if too_long_for_text else "assumed_hidden", hidden=missing)
    return _spread(total, chunks, "spread", 0)


def _remove_hidden(counts: Sequence[int], hidden: int) -> list[int]:
    """Subtract `hidden` tokens from the counts of the first chunks, and leave at least one token per chunk.

    Hidden tokens are generated before the visible text, so servers include them in the counts of the first chunks."""
    remaining, visible = hidden, []
    for tokens in counts:
        removed = min(remaining, max(0, tokens - 1))
        remaining -= removed
        visible.append(tokens - removed)
    return visible


def _spread(tokens: int, chunks: int, basis: Basis, hidden: int) -> StreamedTokens:
    """Return StreamedTokens for `tokens` tokens that are spread evenly over `chunks` chunks.

    Each chunk gets at least one token. `basis` states how the tokens were counted. `hidden` is the number of tokens
    that were generated but not streamed.
    """
    tokens = max(tokens, 1)
    ends = [tokens * (index + 1) // chunks for index in range(chunks)]
    counts = [max(1, end - start) for start, end in pairwise([0, *ends])]
    return StreamedTokens(counts, tokens, tokens / chunks, basis, hidden)


def _looks_hidden(record: Record, chunks: int, total: int) -> bool:
    """Return True if the server probably generated `total - chunks` tokens without streaming them.

    `total` is the number of tokens that the server reported, and `chunks` is the number of chunks of the response.
    Three conditions must hold:

    - Nearly all chunks are single words: `phrase_chunks <= PHRASES_SHARE_MAX * chunks`.
    - The text is too short for all tokens: `text_bytes < BYTES_PER_TOKEN_MIN * total`.
    - The first chunk came so late that the other tokens may have been generated before it. The time from sending the
      request to the first chunk is at least `PACE_MIN * pace * (total - chunks)`. Here `pace` is the mean time between
      chunks.
    """
    if not record.text_bytes or chunks < 2 or record.sent_ns is None:
        return False
    pace_ns = (record.chunk_ns[-1] - record.chunk_ns[0]) / (chunks - 1)
    return (
        record.text_bytes < BYTES_PER_TOKEN_MIN * total
        and record.phrase_chunks <= PHRASES_SHARE_MAX * chunks
        and record.chunk_ns[0] - record.sent_ns >= PACE_MIN * pace_ns * (total - chunks)
    )
