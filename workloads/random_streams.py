"""Seeded random draws. Everything comes from `Random.random`, the one method whose sequence Python promises to keep.

`random.expovariate`, `gammavariate` and `gauss` may change between Python versions, and the same seed must give the
same load next year; hence these few lines of our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from random import Random

UNITS_PER_NS = 1 << 20
"""Random gaps are summed in these units: rounding each to whole ns would bend the mean at high rates."""

Draw = Callable[[], float]
"""Gives the next number of a stream that is uniform on [0, 1)."""


def random_stream(seed: int, what: str) -> Draw:
    """A stream of its own for each (seed, what), so that drawing lengths does not move the due instants."""
    return Random(f"{seed}/{what}").random  # noqa: S311 - load, not secrets


def item_picker(items: Sequence[int]) -> Callable[[Random, int], list[int]]:
    """(random, count) to so many of the items, those of `items[int(random.random() * len(items))]`, but all at once: a
    draw has 53 bits of two words (CPython, genrand_res53)."""
    import numpy as np

    ordered, scale = np.array(items, dtype=object), len(items) / 9007199254740992.0
    upper, (up, down) = np.uint64(0x7FFFFFF << 26), np.array([21, 38], np.uint64)

    def pick(random: Random, count: int) -> list[int]:
        words = np.frombuffer(random.randbytes(8 * count), "<u8")
        draws = ((words << up) & upper) | (words >> down)
        picked: list[int] = ordered[(draws * scale).astype(np.int64)].tolist()
        return picked

    return pick


def exponential(draw: Draw) -> float:
    """An exponential variate of mean 1, by inversion. 1 - u is never 0, so neither is the logarithm's argument."""
    return -math.log(1.0 - draw())


def normal(draw: Draw) -> float:
    """A standard normal variate: the cosine half of Box and Muller (1958)."""
    radius = math.sqrt(2.0 * exponential(draw))
    return radius * math.cos(2.0 * math.pi * draw())


def gamma(draw: Draw, shape: float) -> float:
    """A gamma variate of this shape and scale 1: Marsaglia and Tsang, ACM TOMS 26 (2000), 363-372. Below shape 1 by
    their section 6: gamma(shape + 1) times u**(1 / shape)."""
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
    """Running sums, in ns, of gaps of `draw_gap()` times `scale_ns`. Each gap is drawn as a float; the sum is an
    integer, so it cannot drift however long the run."""
    scale = float(scale_ns * UNITS_PER_NS)
    total = 0
    while True:
        total += round(draw_gap() * scale)
        yield total // UNITS_PER_NS
