"""Seeded random draws that give the same values in every Python version.

They all come from `Random.random`, the only method whose sequence Python guarantees. `random.expovariate`,
`gammavariate` and `gauss` may change between Python versions, but a seed must always give the same load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from random import Random

UNITS_PER_NS = 1 << 20
"""Resolution of the sum of random gaps. Rounding each gap to whole ns would bias the mean at high rates."""

Draw = Callable[[], float]
"""Returns the next number of a stream that is uniform on [0, 1)."""


def random_stream(seed: int, purpose: str) -> Draw:
    """Return a separate stream for each seed and purpose, so that drawing lengths does not change the due times."""
    return Random(f"{seed}/{purpose}").random  # noqa: S311 - load, not secrets


def item_picker(items: Sequence[int]) -> Callable[[Random, int], list[int]]:
    """Return a function that takes a generator and a count, and draws that many items.

    The items are those of `items[int(random.random() * len(items))]`, but are drawn in one step. A draw has 53 bits
    from two words of the generator (CPython, genrand_res53)."""
    import numpy as np

    items_array = np.array(items, dtype=object)
    scale = len(items) / 9007199254740992.0
    upper_mask = np.uint64(0x7FFFFFF << 26)
    shift_up, shift_down = np.array([21, 38], np.uint64)

    def pick(random: Random, count: int) -> list[int]:
        words = np.frombuffer(random.randbytes(8 * count), "<u8")
        draws = ((words << shift_up) & upper_mask) | (words >> shift_down)
        picked: list[int] = items_array[(draws * scale).astype(np.int64)].tolist()
        return picked

    return pick


def exponential(draw: Draw) -> float:
    """Return an exponential variate of mean 1, by inversion. 1 - u is never 0, so the logarithm is finite."""
    return -math.log(1.0 - draw())


def normal(draw: Draw) -> float:
    """Return a standard normal variate: the cosine half of Box and Muller (1958)."""
    radius = math.sqrt(2.0 * exponential(draw))
    return radius * math.cos(2.0 * math.pi * draw())


def gamma(draw: Draw, shape: float) -> float:
    """Return a gamma variate of this shape and scale 1 (Marsaglia and Tsang, ACM TOMS 26 (2000), 363-372).

    For shapes below 1 their section 6 applies: gamma(shape + 1) times u**(1 / shape)."""
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
    """Yield the running sums in ns of gaps of `draw_gap()` times `scale_ns`.

    A gap is drawn as a float, but the sum is an integer. It therefore does not drift in long runs."""
    scale = float(scale_ns * UNITS_PER_NS)
    total = 0
    while True:
        total += round(draw_gap() * scale)
        yield total // UNITS_PER_NS
