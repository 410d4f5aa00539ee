"""Elementwise functions that accept numbers and NumPy arrays.

NumPy is imported only when an argument is an array. A command that computes one load starts twice as fast without it.
"""

from __future__ import annotations

import math
from typing import Any


def as_float(value: Any) -> Any:
    """Return a number as a float, or anything else as an array of floats."""
    if isinstance(value, int | float):
        return float(value)
    import numpy as np

    return np.asarray(value, float)


def ceiling(value: Any) -> Any:
    """Round up to whole numbers, as floats."""
    if isinstance(value, float | int):
        return float(math.ceil(value))
    import numpy as np

    return np.ceil(value)


def elementwise_max(first: Any, second: Any) -> Any:
    """Return the larger of two numbers, or of each pair of elements."""
    if isinstance(first, float | int) and isinstance(second, float | int):
        return max(first, second)
    import numpy as np

    return np.maximum(first, second)


def elementwise_min(first: Any, second: Any) -> Any:
    """Return the smaller of two numbers, or of each pair of elements."""
    if isinstance(first, float | int) and isinstance(second, float | int):
        return min(first, second)
    import numpy as np

    return np.minimum(first, second)


def where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Choose between two values, element by element for an array."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    import numpy as np

    return np.where(condition, if_true, if_false)


def log2(value: Any) -> Any:
    """Return the logarithm to base 2."""
    if isinstance(value, float | int):
        return math.log2(value)
    import numpy as np

    return np.log2(value)
