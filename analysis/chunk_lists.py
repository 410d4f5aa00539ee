"""Converts the chunks of Records to arrays, block by block.

The chunks of a Record are either lists of integers or the JSON text of such lists. Converting the text of a whole block
takes a third of the time of decoding its integers one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.analysis.chunk_columns import constant_array
from loadgen.analysis.run.compact_record import EMPTY_LIST, CompactRecord
from loadgen.analysis.run.record import Record
from loadgen.workloads.spec_syntax import TOKENS_LIMIT

Integers = NDArray[np.int64]

MAX_INSTANT_NS = 1 << 61
"""Maximum absolute value of a time in a run file (the type Integer of loadgen.analysis.run.record)."""

END = -(1 << 62)
"""Number that is put after the elements of each list, when many lists are converted together."""
_COMMA_END = f",{END}".encode()
_BETWEEN_LISTS = _COMMA_END + b","
_OPENING, _CLOSING = b"[]"
_BLANKS = (b" ", b"\t", b"\r", b"\n")


class ChunkLists(NamedTuple):
    """The chunks of a block of Records. The chunks of each Record follow those of the previous Record."""

    counts: Integers
    """Number of chunks of each Record."""
    instants: Integers
    """Arrival time of each chunk in ns."""
    tokens: NDArray[np.unsignedinteger]
    """Number of tokens in each chunk, as recorded."""


def lists_of_records(records: Sequence[Record]) -> ChunkLists:
    """Return the chunks of `records` as arrays. In these Records, chunks are lists of integers and not JSON text."""
    counts = np.fromiter((len(record.chunk_ns) for record in records), np.int64, len(records))
    total = int(counts.sum())
    instants = np.fromiter(chain.from_iterable(record.chunk_ns for record in records), np.int64, total)
    chunk_tokens = [record.chunk_tokens for record in records]
    tokens: NDArray[Any]
    try:  # Bytes take a third of the time of a list of integers, and a tenth if every chunk holds one token.
        ones = all(counts_of_record.count(1) == len(counts_of_record) for counts_of_record in chunk_tokens)
        tokens = np.frombuffer(b"\1" * total if ones else b"".join(map(bytes, chunk_tokens)), np.uint8)
    except ValueError:  # A chunk holds more than 255 tokens.
        tokens = np.array([*chain.from_iterable(chunk_tokens)], np.uint32)
    return ChunkLists(counts, instants, tokens)


def lists_of_texts(records: Sequence[CompactRecord]) -> ChunkLists | None:
    """Return the chunks of Records whose chunks are JSON text, or None if a text is damaged.

    A text is damaged if it is not a list of integers within the limits of a run file, or if a Record does not have as
    many arrival times as token counts. If the result is None, the caller must decode the lines of the run file one by
    one, to find the damaged lines.
    """
    read = _integers([record.chunk_ns for record in records], -MAX_INSTANT_NS, MAX_INSTANT_NS)
    if read is None:
        return None
    counts, instants = read
    texts_by_count = {count: _ones(count) for count in set(counts.tolist())}
    texts_of_ones = [texts_by_count[count] for count in counts.tolist()]
    token_texts = [record.chunk_tokens for record in records]
    others = {
        row: text for row, (text, ones) in enumerate(zip(token_texts, texts_of_ones, strict=True)) if text != ones
    }
    if not others:
        return ChunkLists(counts, instants, constant_array(1, np.uint8, len(instants)))
    read = _integers([*others.values()], 0, TOKENS_LIMIT)
    if read is None or not np.array_equal(read[0], counts[[*others]]):
        return None
    tokens: NDArray[Any] = np.ones(len(instants), np.uint8 if read[1].max(initial=0) < 1 << 8 else np.uint32)
    is_other = np.zeros(len(counts), np.bool_)
    is_other[[*others]] = True
    tokens[np.repeat(is_other, counts)] = read[1]
    return ChunkLists(counts, instants, tokens)


def _ones(count: int) -> msgspec.Raw:
    """Return the JSON text of a list with `count` ones, for example `[1,1,1]`. loadgen writes lists without spaces."""
    return msgspec.Raw(b"[" + (b"1," * count)[:-1] + b"]")


def _integers(texts: Sequence[msgspec.Raw], smallest: int, largest: int) -> tuple[Integers, Integers] | None:
    """Return two arrays from JSON lists of integers: the length of each list, and the elements of all lists.

    Return None if an element is not an integer from `smallest` to `largest`.
    """
    filled = np.array([text != EMPTY_LIST for text in texts], np.bool_)
    number = int(filled.sum())
    counts = np.zeros(len(texts), np.int64)
    if not number:
        return counts, np.zeros(0, np.int64)
    lists = texts if number == len(texts) else [*compress(texts, filled.tolist())]
    joined = _BETWEEN_LISTS.join(lists)
    if any(blank in joined for blank in _BLANKS) and not all(bytes(text)[1:-1].strip() for text in lists):
        return None  # NumPy would read the empty list `[ ]` as a 0.
    if not _are_flat_lists(joined, number):
        return None
    elements_only = joined.replace(b"[", b"").replace(b"]", b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            values = np.fromstring(elements_only + _COMMA_END, np.int64, sep=",")
        except (DeprecationWarning, ValueError):  # The text has other characters than those of integers.
            return None
    is_end = values == END
    ends = np.flatnonzero(is_end)
    elements = values[~is_end]
    if len(ends) != number or not smallest <= elements.min(initial=0) <= elements.max(initial=0) <= largest:
        return None
    counts[filled] = np.diff(ends, prepend=-1) - 1
    return counts, elements


def _are_flat_lists(joined: bytes, number: int) -> bool:
    """Return True if `joined` consists of `number` lists, with _BETWEEN_LISTS between them, and no list in a list.

    Other characters than those of integers and brackets are checked only in part.
    """
    characters = np.frombuffer(joined, np.uint8)
    brackets = np.flatnonzero(characters >= _OPENING)
    if len(brackets) != 2 * number or brackets[0] != 0 or brackets[-1] != len(joined) - 1:
        return False
    opening, closing = brackets[::2], brackets[1::2]
    if (characters[opening] != _OPENING).any() or (characters[closing] != _CLOSING).any():
        return False
    return bool((opening[1:] - closing[:-1] == len(_BETWEEN_LISTS) + 1).all())
