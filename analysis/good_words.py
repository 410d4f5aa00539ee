"""Goodput in words, for the terminal."""

from __future__ import annotations

from analysis.words import Summary, count, duration, share, significant


def goodput(summary: Summary) -> list[str]:
    """How many requests were good, what 90 % would have met, and which bound cost the most; nothing if not asked."""
    found = summary.get("goodput")
    if not found or not found["requests"]:
        return []
    low, high = (significant(end * 100, 3) for end in found["attainment_ci95"])
    good = f"{found['good']:,} of {count(found['requests'], 'request')} kept {' and '.join(found['bounds'])}"
    lines = [
        f"Goodput {significant(found['per_s'])} requests/s: {good} "
        f"({share(found['attainment'])}, 95 %: {low} to {high} %)."
    ]
    if met := found["met_by"]["90%"]:
        bounds = " and ".join(f"{latency} < {duration(bound)}" for latency, bound in met["bounds_s"].items())
        lines.append(f"90 % would have met {bounds} (bounds x{significant(met['scale'])}).")
    else:
        lines.append("No bounds would have been met by 90 %: too many were not complete.")
    return lines
