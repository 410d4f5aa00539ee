"""Round numbers for the pieces that a chart divides its axis into."""

from __future__ import annotations

import numpy as np


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least this much."""
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)))
