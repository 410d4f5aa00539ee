"""The report: one or several Runs as one self-contained HTML page."""

from analysis.report.page import write

__all__ = ["write"]
