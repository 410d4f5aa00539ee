"""Moved to analysis.slo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from analysis import slo
from analysis.frame import Frame
from analysis.objectives import Bound


def goodput(frame: Frame, bounds: Sequence[Bound], unrecorded: int = 0) -> dict[str, Any]:
    """As a plain dict."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(slo.goodput(frame, bounds, unrecorded)))
    return found
