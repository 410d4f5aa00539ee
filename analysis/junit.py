"""Moved to analysis.slo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis.slo import junit
from analysis.summary import typed


def render(summaries: Sequence[Mapping[str, Any]]) -> str:
    """From plain dicts."""
    return junit([typed(each) for each in summaries])
