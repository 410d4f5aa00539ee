"""Elementwise functions that accept numbers and NumPy arrays.

NumPy is imported only if an argument is an array. A command that needs no arrays starts twice as fast without this
import.
"""

from __future__ import annotations

import math
from typing import Any


def as_float(value: Any) -> Any:
    """Return a number as a float, and anything else as an array of floats."""
    if isinstance(value, int | float):
        return float(value)
    import numpy as np

    return np.asarray(value, float)


def ceiling(value: Any) -> Any:
    """Round a number, or each element of an array, up to a whole number. The results are floats."""
    if isinstance(value, float | int):
        return float(math.ceil(value))
    import numpy as np

    return np.ceil(value)


def elementwise_max(first: Any, second: Any) -> Any:
    """Return the larger of two numbers, or an array with the larger of each pair of elements."""
    if isinstance(first, float | int) and isinstance(second, float | int):
        return max(first, second)
    import numpy as np

    return np.maximum(first, second)


def elementwise_min(first: Any, second: Any) -> Any:
    """Return the smaller of two numbers, or an array with the smaller of each pair of elements."""
    if isinstance(first, float | int) and isinstance(second, float | int):
        return min(first, second)
    import numpy as np

    return np.minimum(first, second)


def where(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return `if_true` or `if_false`, depending on the condition. An array of conditions selects element by element."""
    if isinstance(condition, bool):
        return if_true if condition else if_false
    import numpy as np

    return np.where(condition, if_true, if_false)


def log2(value: Any) -> Any:
    """Return the logarithm to base 2 of a number, or of each element of an array."""
    if isinstance(value, float | int):
        return math.log2(value)
    import numpy as np

    return np.log2(value)
