"""Moved to analysis.client."""

from analysis.client import LIMITS, reasons, text

__all__ = ["LIMITS", "reasons", "text"]
