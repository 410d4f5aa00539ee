"""Moved to analysis.client."""

from analysis.client import median_off_s

__all__ = ["median_off_s"]
