"""Moved to analysis.slo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from analysis import slo
from analysis.frame import Frame
from analysis.objectives import Objective
from analysis.summary import typed


def judge(objectives: Iterable[Objective], frame: Frame, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As plain dicts."""
    return [msgspec.json.decode(msgspec.json.encode(each)) for each in slo.judge(objectives, frame, typed(summary))]
