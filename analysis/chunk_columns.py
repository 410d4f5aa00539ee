"""Compact arrays of exact arrival times and token counts per chunk, for runs with a hundred million chunks.

The arrival time of a chunk is stored as the time since the previous chunk of its request. If there are too many values
to sort, percentiles are computed by counting the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DIGIT_BITS = 18
"""Maximum number of bits per digit in `OrderStatistics`. Each pass over the numbers determines one digit, starting with
the most significant."""
MAX_COUNTERS = 1 << 23
MAX_GATHERED = 1 << 23
"""Maximum number of samples that `OrderStatistics` sorts at the end of a search."""


Array = TypeVar("Array", bound=NDArray[Any])


def read_only(values: Array) -> Array:
    """Make the array read-only, and return it."""
    values.flags.writeable = False
    return values


def constant_array(value: object, dtype: Any, length: int) -> NDArray[Any]:
    """Return an array of equal values, which needs memory for one value only. It cannot be written to.

    The result is that of `np.broadcast_to`, which takes several times as long.
    """
    one = np.array(value, dtype)
    result: NDArray[Any] = np.ndarray((length,), one.dtype, one, strides=(0,))
    return read_only(result)


def is_constant(values: NDArray[Any]) -> bool:
    """Return True if the array needs memory for one value only, because all of its values are equal."""
    return bool(len(values)) and values.strides == (0,)


def map_values(function: Callable[[NDArray[Any]], NDArray[Any]], values: NDArray[Any]) -> NDArray[Any]:
    """Return `function(values)`. The result is a constant array if `values` is one.

    The function must map each value by itself.
    """
    if not is_constant(values):
        return function(values)
    result = function(values[:1])
    return constant_array(result[0], result.dtype, len(values))


class GrowingArray:
    """A one-dimensional array to which values can be appended.

    The array grows in place, because joining separate arrays at the end would need twice the memory. Many columns of a
    run have the same value in every row. While all appended values are equal, the array therefore only stores this
    value and its number. It recognises equal values only in blocks for which `is_constant` is True.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._bytes = bytearray()
        """All values, or one value if `_repeats` is not 0."""
        self._repeats = 0
        """Number of values if all are equal. 0 if there are no values yet, or if values differ."""

    def extend(self, values: NDArray[Any]) -> None:
        """Append values.

        If the data type of the values is wider than that of the array, the whole array is converted to the wider type.
        """
        if values.dtype != self._dtype:
            wider = np.promote_types(self._dtype, values.dtype)
            self._bytes = bytearray(np.frombuffer(self._bytes, self._dtype).astype(wider).data)
            self._dtype = wider
        if is_constant(values) and (self._repeats or not self._bytes):
            value = values[:1].astype(self._dtype).tobytes()
            if not self._repeats or value == self._bytes:
                self._bytes[:] = value
                self._repeats += len(values)
                return
        if self._repeats and len(values):
            self._bytes *= self._repeats
            self._repeats = 0
        self._bytes += np.ascontiguousarray(values, self._dtype).data

    def array(self) -> NDArray[Any]:
        """Return the content as a NumPy array, without copying it."""
        values = np.frombuffer(self._bytes, self._dtype)
        return constant_array(values[0], self._dtype, self._repeats) if self._repeats else values


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


class KnownSamples(msgspec.Struct, frozen=True):
    """Some samples of a large data set, by their rank. The smallest sample has rank 0."""

    count: int
    """Number of samples in the data set."""
    by_rank: Mapping[int, float]

    def __len__(self) -> int:
        return self.count

    def values_at(self, ranks: Sequence[int] | Integers) -> list[float]:
        """Return the sample at each rank. Raises KeyError if a sample is not known."""
        return [self.by_rank[int(rank)] for rank in ranks]


class OrderStatistics:
    """Finds samples by rank in a data set that is too large to sort.

    `statistics[rank]` is the sample with this rank, divided by `scale`. The smallest sample has rank 0.

    - `blocks`: Function that returns the samples in blocks. Each block consists of an array of integers from 0 to
      `largest`, and of the indices of the entries in it that are no samples. There may be few such entries.
    - `zeros`: Number of additional samples with the value 0. They are part of the data set, but not of the blocks.
    - `count`: Total number of samples, including the additional zeros.
    """

    def __init__(
        self,
        blocks: Callable[[], Iterable[tuple[NDArray[np.integer], Integers]]],
        count: int,
        zeros: int,
        largest: int,
        scale: float,
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

    def known(self) -> KnownSamples:
        """Return the samples at all ranks that have been looked up so far."""
        return KnownSamples(self._count, dict(self._known))

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
        counts: Integers = np.zeros(len(groups) << digit, np.int64)
        for block, ignored in self._blocks():
            if bits == self._bits:
                np.add.at(counts, (block >> (bits - digit)).astype(np.intp), 1)
                np.subtract.at(counts, (block[ignored] >> (bits - digit)).astype(np.intp), 1)
            else:
                np.add.at(counts, _counters_of(block, ignored, groups, bits, digit, self._bits), 1)
        counts = counts.reshape(len(groups), 1 << digit)
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
        parts = []
        for block, ignored in self._blocks():
            wanted_entries = is_wanted(block >> bits)
            wanted_entries[ignored] = False
            parts.append(block[wanted_entries])
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


def _counters_of(
    block: NDArray[np.integer], ignored: Integers, groups: Integers, bits: int, digit: int, total_bits: int
) -> NDArray[np.intp]:
    """Return the indices of the counters that one step of a radix search increments for the numbers in `block`.

    A radix search determines numbers digit by digit, beginning with the most significant digit. A digit consists of
    several consecutive bits.

    - Each number has `total_bits` bits, and its last `bits` bits have not been searched yet.
    - The next digit is the first of these remaining bits. `digit` is the width of this digit in bits.
    - Numbers with the same searched bits form a group. `groups` contains the searched bits of each group that the
      search needs. Numbers in other groups are not counted.
    - `ignored` contains the indices of numbers that are not counted either.

    There is one counter for each group and each value of the digit. The counters of a group follow those of the
    previous group.
    """
    prefixes = block >> bits
    if total_bits - bits <= DIGIT_BITS:  # A lookup table is several times as fast as searching.
        table = np.full(1 << (total_bits - bits), -1, np.int32)
        table[groups] = np.arange(len(groups))
        index = table[prefixes]
        matches = index >= 0
    else:
        index = np.minimum(np.searchsorted(groups, prefixes), len(groups) - 1)
        matches = groups[index] == prefixes
    matches[ignored] = False
    digits = (block[matches] >> (bits - digit)).astype(np.int64) & ((1 << digit) - 1)
    counters: NDArray[np.intp] = (index[matches].astype(np.intp) << digit) + digits
    return counters
