"""Moved to analysis.client."""

from analysis.client import first_off_s, median_off_s

__all__ = ["first_off_s", "median_off_s"]
