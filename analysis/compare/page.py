"""A comparison on the report's page: its own section, above the charts in which both are drawn."""

from __future__ import annotations

from analysis import words
from analysis.compare.comparison import Comparison
from analysis.compare.text import headline, table
from analysis.report.page import Extra


def extra(found: Comparison) -> Extra:
    """The section of a comparison, and what its chart draws: the ratio of each figure with its interval."""
    drawn = [
        {
            "figure": row.figure,
            "ratio": row.ratio,
            "low": row.ratio_ci95[0],
            "high": row.ratio_ci95[1],
            "outcome": row.verdict,
        }
        for row in found.rows
        if row.ratio is not None and row.ratio_ci95 is not None
    ]
    return Extra(
        "comparison",
        "B against A",
        "compare.html.j2",
        {
            "found": found,
            "rows": table(found.rows),
            "headline": headline(found),
            "count": words.count,
        },
        {"rows": drawn, "margin": found.margin},
        "compare.js",
    )
