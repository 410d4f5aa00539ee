"""Until every module reads typed summaries: what this called it of `analysis.report.format`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.report import format as formats
from analysis.report.format import length
from analysis.summary import typed

__all__ = ["length"]


def asked(summary: Mapping[str, Any]) -> str:
    return formats.asked(typed(summary))
