"""What the formulas need of numbers and of NumPy arrays alike. NumPy is imported where an array is given: a command
that asks for one load starts twice as fast without."""

from __future__ import annotations

import math
from typing import Any


def as_float(value: Any) -> Any:
    """As a float, or an array of floats."""
    if isinstance(value, int | float):
        return float(value)
    import numpy as np

    return np.asarray(value, float)


def ceiling(value: Any) -> Any:
    if isinstance(value, float | int):
        return float(math.ceil(value))
    import numpy as np

    return np.ceil(value)


def elementwise_max(one: Any, other: Any) -> Any:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def elementwise_min(one: Any, other: Any) -> Any:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return min(one, other)
    import numpy as np

    return np.minimum(one, other)


def where(holds: Any, yes: Any, no: Any) -> Any:
    """One or the other, element by element."""
    if isinstance(holds, bool):
        return yes if holds else no
    import numpy as np

    return np.where(holds, yes, no)


def log2(value: Any) -> Any:
    """The logarithm to base 2."""
    if isinstance(value, float | int):
        return math.log2(value)
    import numpy as np

    return np.log2(value)
