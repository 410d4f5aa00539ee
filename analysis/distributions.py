"""Moved to analysis.stats."""

from analysis.stats import student_cdf, student_quantile

__all__ = ["student_cdf", "student_quantile"]
