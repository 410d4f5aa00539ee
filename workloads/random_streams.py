"""Draws random numbers that are the same in every Python version.

All draws use the sequence of `Random.random`, the only one that Python guarantees. `random.expovariate`, `gammavariate`
and `gauss` may change between Python versions, but a seed must always give the same load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from random import Random
from typing import TypeVar

UNITS_PER_NS = 1 << 20
"""Resolution of the sum of random gaps. Rounding each gap to whole ns would bias the mean at high rates."""

Item = TypeVar("Item")
Draw = Callable[[], float]
"""A function that returns the next number of a random stream, uniform on [0, 1)."""


def random_stream(seed: int, purpose: str) -> Draw:
    """Return a function that draws random numbers, uniform on [0, 1).

    `seed` and `purpose` determine the sequence of numbers. Because each purpose has a separate sequence, drawing
    lengths, for example, does not change the due times."""
    return Random(f"{seed}/{purpose}").random  # noqa: S311 - load, not secrets


def item_picker(items: Sequence[Item]) -> Callable[[Random, int], list[Item]]:
    """Return a function `pick(random, count)` that returns `count` random items. It may return an item several times.

    The result is the same as from `count` evaluations of `items[int(random.random() * len(items))]`, but NumPy computes
    it faster. For this, NumPy combines two 32-bit numbers into 53 bits, as `random.random()` does (CPython,
    genrand_res53).
    """
    import numpy as np

    items_array = np.array(items, dtype=object)
    scale = len(items) / 9007199254740992.0
    upper_mask = np.uint64(0x7FFFFFF << 26)
    shift_up, shift_down = np.array([21, 38], np.uint64)

    def pick(random: Random, count: int) -> list[Item]:
        words = np.frombuffer(random.randbytes(8 * count), "<u8")
        draws = ((words << shift_up) & upper_mask) | (words >> shift_down)
        picked: list[Item] = items_array[(draws * scale).astype(np.int64)].tolist()
        return picked

    return pick


def exponential(draw: Draw) -> float:
    """Return an exponential variate of mean 1 by inversion: `-ln(1 - u)` for a uniform `u`.

    `1 - u` is never 0, so the logarithm is finite."""
    return -math.log(1.0 - draw())


def normal(draw: Draw) -> float:
    """Return a standard normal variate by the cosine formula of Box and Muller (1958)."""
    radius = math.sqrt(2.0 * exponential(draw))
    return radius * math.cos(2.0 * math.pi * draw())


def gamma(draw: Draw, shape: float) -> float:
    """Return a gamma variate with scale 1 (Marsaglia and Tsang, ACM TOMS 26 (2000), 363-372).

    Shapes below 1 follow section 6 of the paper: `gamma(shape) = gamma(shape + 1) * u**(1 / shape)` for a uniform `u`.
    """
    if shape < 1.0:
        return gamma(draw, shape + 1.0) * float((1.0 - draw()) ** (1.0 / shape))
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = normal(draw)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(1.0 - draw()) < 0.5 * x * x + d * (1.0 - v + math.log(v)):
            return d * v


def running_sums(draw_gap: Callable[[], float], scale_ns: Fraction) -> Iterator[int]:
    """Yield the sum of the first gap, of the first two gaps, and so on, in ns. The gaps are random.

    Each gap is `draw_gap() * scale_ns`. Gaps are drawn as floats but summed as integers, so that rounding errors do not
    accumulate in long runs.
    """
    scale = float(scale_ns * UNITS_PER_NS)
    total = 0
    while True:
        total += round(draw_gap() * scale)
        yield total // UNITS_PER_NS
