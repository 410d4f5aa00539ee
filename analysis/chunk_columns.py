"""Compact arrays of exact arrival times and token counts per chunk, for runs with a hundred million chunks.

The arrival time of a chunk is stored as the time since the previous chunk of its request. If there are too many values
to sort, percentiles are computed by counting the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DIGIT_BITS = 20
"""Maximum number of bits per digit in `OrderStatistics`. Each pass over the numbers determines one digit, starting with
the most significant."""
MAX_COUNTERS = 1 << 23
MAX_GATHERED = 1 << 23
"""Maximum number of samples that `OrderStatistics` sorts at the end of a search."""


class GrowingArray:
    """A one-dimensional array to which values can be appended.

    The array grows in place, because joining separate arrays at the end would need twice the memory.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bytes = bytearray()

    def extend(self, values: NDArray[Any]) -> None:
        """Append values.

        If the data type of the values is wider than that of the array, the whole array is converted to the wider type.
        """
        wider = np.promote_types(self._dtype, values.dtype)
        if wider != self._dtype:
            self._bytes = bytearray(self.array().astype(wider).data)
            self._dtype = wider
        self._bytes += values.astype(wider, copy=False).data

    def array(self) -> NDArray[Any]:
        """Return the content as a NumPy array, without copying it."""
        return np.frombuffer(self._bytes, self._dtype)


class GrowingTokens:
    """A growing array with the number of tokens in each chunk.

    While every chunk holds one token, only the number of chunks is stored.
    """

    def __init__(self) -> None:
        self._ones = 0
        """Number of chunks so far if each of them holds one token; otherwise -1."""
        self._counts = GrowingArray(np.dtype(np.uint8))

    def extend(self, values: NDArray[Any]) -> None:
        """Append `values`, the token counts of the next chunks."""
        if self._ones >= 0 and bool((values == 1).all()):
            self._ones += len(values)
            return
        if self._ones > 0:
            self._counts.extend(np.ones(self._ones, np.uint8))
        self._ones = -1
        self._counts.extend(values)

    def array(self) -> NDArray[Any]:
        """Return the token counts of all chunks as a NumPy array, without copying them."""
        return np.broadcast_to(np.uint8(1), self._ones) if self._ones >= 0 else self._counts.array()


class ChunkInstants(msgspec.Struct, frozen=True, eq=False):
    """Arrival times of all chunks, in ns from the run's start.

    `instants[first:last]` returns the arrival times of chunk `first` to chunk `last - 1` as an array.
    """

    steps: NDArray[np.integer]
    """Time since the previous chunk of the same row, in ns; 0 for the first chunk of a row."""
    first_ns: Floats
    """Arrival time of each row's first chunk, in ns; NaN for a row without chunks."""
    offsets: Integers

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, chunks: slice) -> Floats:
        first, last, _ = chunks.indices(len(self.steps))
        if last <= first:
            return np.empty(0)
        row = int(np.searchsorted(self.offsets, first, "right")) - 1
        end = int(np.searchsorted(self.offsets, last))
        begins = int(self.offsets[row])
        counts = np.minimum(self.offsets[row + 1 : end + 1], last) - self.offsets[row:end]
        has_chunks = counts > 0
        instants = np.cumsum(self.steps[begins:last], dtype=np.int64)
        row_starts = self.offsets[row:end][has_chunks] - begins
        base = self.first_ns[row:end][has_chunks].astype(np.int64) - instants[row_starts]
        instants += np.repeat(base, counts[has_chunks])
        return instants[first - begins :].astype(np.float64)


def chunk_steps(instants: Integers, offsets: Integers) -> NDArray[np.integer]:
    """Return, for each chunk, the time in ns since the previous chunk of its request; 0 for a request's first chunk.

    `instants` contains the arrival times of all chunks in ns, and `offsets` delimits the chunks of each request. The
    result has four bytes per chunk if all values fit, otherwise eight.
    """
    steps = np.empty_like(instants)
    np.subtract(instants[1:], instants[:-1], out=steps[1:])
    steps[offsets[:-1][np.diff(offsets) > 0]] = 0
    fits = int(steps.view(np.uint64).max(initial=0)) < 1 << 32  # negative steps are large as unsigned integers
    return steps.astype(np.uint32) if fits else steps


class OrderStatistics:
    """Finds samples by rank in a data set that is too large to sort.

    `statistics[rank]` is the sample with this rank, divided by `scale`. The smallest sample has rank 0.

    - `blocks`: Function that returns the samples in blocks. The samples are integers from 0 to `largest`.
    - `zeros`: Number of additional samples with the value 0. They are part of the data set, but not of the blocks.
    - `count`: Total number of samples, including the additional zeros.
    """

    def __init__(
        self, blocks: Callable[[], Iterable[NDArray[np.integer]]], count: int, zeros: int, largest: int, scale: float
    ) -> None:
        self._blocks = blocks
        self._count = count
        self._zeros = zeros
        self._scale = scale
        self._bits = max(1, largest.bit_length())
        self._known = dict[int, float]()
        self._first_counts: Integers | None = None
        """Number of samples by their most significant digit, after the first search."""

    def with_zeros(self, zeros: int) -> OrderStatistics:
        """Return an OrderStatistics of the same samples and of `zeros` additional samples with the value 0.

        Every search begins with a pass over all samples, which counts them by their most significant bits. The result
        uses the counts of this object, so it does not repeat this pass.
        """
        if self._first_counts is None:
            self._counts(np.zeros(1, np.int64), self._bits, _digit_bits(self._bits, groups=1))
        result = OrderStatistics(self._blocks, self._count + zeros, self._zeros + zeros, 0, self._scale)
        result._bits, result._first_counts = self._bits, self._first_counts
        return result

    def __len__(self) -> int:
        """Return the total number of samples."""
        return self._count

    def __getitem__(self, rank: int) -> float:
        return self.values_at([rank])[0]

    def values_at(self, ranks: Sequence[int] | Integers) -> list[float]:
        """Return the sample at each rank.

        One call for several ranks needs fewer passes over the data than one call per rank.
        """
        requested = [int(rank) + self._count * (rank < 0) for rank in ranks]
        self._known |= dict.fromkeys((rank for rank in requested if rank < self._zeros), 0.0)
        missing = sorted({*requested} - self._known.keys())
        if missing:
            values = self._search(np.array(missing) - self._zeros) / self._scale
            self._known |= dict(zip(missing, values.tolist(), strict=True))
        return [self._known[rank] for rank in requested]

    def _search(self, ranks: Integers) -> Integers:
        """Return the sample at each rank, by a radix search that starts with the most significant digit.

        The search determines all results digit by digit, with one pass over the blocks per digit. A pass considers only
        samples whose first digits equal those found so far, and counts the values of their next digit. The cumulative
        counts show which value this digit has in the sample at each rank. When few samples are left, they are sorted
        instead.
        """
        prefixes = np.zeros(len(ranks), np.int64)
        remaining = ranks.copy()
        bits, selected = self._bits, self._count
        while bits > 0:
            groups, group_of_rank = np.unique(prefixes, return_inverse=True)
            if bits < self._bits and selected <= MAX_GATHERED:
                return self._gathered(groups, bits, prefixes, remaining)
            digit = _digit_bits(bits, len(groups))
            counts = self._counts(groups, bits, digit)
            cumulative = np.cumsum(counts, axis=1)
            sizes = dict[tuple[int, int], int]()
            for index, group in enumerate(group_of_rank.tolist()):
                value = int(np.searchsorted(cumulative[group], remaining[index], "right"))
                remaining[index] -= cumulative[group][value - 1] if value else 0
                prefixes[index] = (prefixes[index] << digit) + value
                sizes[group, value] = int(counts[group, value])
            selected = sum(sizes.values())
            bits -= digit
        return prefixes

    def _counts(self, groups: Integers, bits: int, digit: int) -> Integers:
        """Count the values of one digit of the samples, as a step of a radix search.

        A radix search determines samples digit by digit, from the first bits to the last. This step examines the next
        unknown digit.

        - `bits` is the number of bits of each sample that are still unknown.
        - `digit` is the number of bits in the next digit. This digit consists of the first unknown bits.
        - `groups` contains the groups to count. Samples belong to the same group if their known bits are equal. These
          known bits identify the group.

        The result has one row per group and one column per value of the digit. The counts of the first digit are
        computed only once, because they are the same in every search.
        """
        if bits == self._bits and self._first_counts is not None:
            return self._first_counts
        counts = np.zeros((len(groups), 1 << digit), np.int64)
        for block in self._blocks():
            counts += _count_digits(block, groups, bits, digit, self._bits).reshape(counts.shape)
        if bits == self._bits:
            self._first_counts = counts
        return counts

    def _gathered(self, groups: Integers, bits: int, prefixes: Integers, ranks: Integers) -> Integers:
        """Return the sample at each requested rank, by sorting the few samples that a radix search has left over.

        The search has already found the first bits of each result. The last `bits` bits are still unknown.

        - `prefixes[i]` contains the first bits of result i.
        - `ranks[i]` is the rank of result i, counted from 0. It is the rank among the samples that begin with
          `prefixes[i]`.
        - `groups` contains the distinct values of `prefixes`, in ascending order. Samples that begin with other bits
          are ignored.
        """
        is_wanted: Callable[[NDArray[np.integer]], NDArray[np.bool_]]
        if self._bits - bits <= DIGIT_BITS:  # A lookup table is several times as fast as searching.
            wanted = np.zeros(1 << (self._bits - bits), np.bool_)
            wanted[groups] = True
            is_wanted = wanted.__getitem__
        else:
            is_wanted = partial(np.isin, test_elements=groups)
        parts = [block[is_wanted(block >> bits)] for block in self._blocks()]
        samples = np.sort(np.concatenate(parts)).astype(np.int64)
        result: Integers = samples[np.searchsorted(samples >> bits, prefixes) + ranks]
        return result


def _digit_bits(bits: int, groups: int) -> int:
    """Return how many bits the next step of a radix search determines. These bits are called a digit.

    - `bits` is the number of bits that are still unknown.
    - `groups` is the number of groups of samples. The step needs one counter per group and possible value of the digit.
      If there are many groups, the digit is shorter, so that the number of counters stays below a limit.
    """
    return min(bits, DIGIT_BITS, max(1, (MAX_COUNTERS // groups).bit_length() - 1))


def _count_digits(block: NDArray[np.integer], groups: Integers, bits: int, digit: int, total_bits: int) -> Integers:
    """Count how often each value of the next digit occurs among the numbers in `block`, in one step of a radix search.

    A radix search determines numbers digit by digit, beginning with the most significant digit. A digit consists of
    several consecutive bits.

    - Each number has `total_bits` bits, and its last `bits` bits have not been searched yet.
    - The next digit is the first of these remaining bits. `digit` is the width of this digit in bits.
    - Numbers with the same searched bits form a group. `groups` contains the searched bits of each group that the
      search needs. Numbers in other groups are not counted.

    The result is a flat array. For each group, it has one counter for each value of the digit.
    """
    length = len(groups) << digit
    if bits == total_bits:
        return np.bincount((block >> (bits - digit)).astype(np.intp), minlength=length)
    prefixes = block >> bits
    if total_bits - bits <= DIGIT_BITS:  # A lookup table is several times as fast as searching.
        table = np.full(1 << (total_bits - bits), -1, np.int32)
        table[groups] = np.arange(len(groups))
        index = table[prefixes]
        matches = index >= 0
    else:
        index = np.minimum(np.searchsorted(groups, prefixes), len(groups) - 1)
        matches = groups[index] == prefixes
    digits = (block[matches] >> (bits - digit)).astype(np.int64) & ((1 << digit) - 1)
    return np.bincount((index[matches].astype(np.int64) << digit) + digits, minlength=length)
