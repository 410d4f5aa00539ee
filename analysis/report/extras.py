"""Sections that a page has only where there is something to say: between repeats, and of good requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis import words
from analysis.repeats_text import rows
from analysis.report.page import Extra


def between_runs(found: Mapping[str, Any], place: int, of: str) -> Extra:
    """What repeats say together. `place` counts the groups of a page from 1; `of` names one of several."""
    name = "between-runs" if place == 1 else f"between-runs-{place}"
    title = f"Between runs of {of}" if of else "Between runs"
    return Extra(name, title, "repeats.html.j2", {"between": found, "rows": rows(found)})


def good_requests(summaries: Sequence[words.Summary]) -> list[Extra]:
    """Goodput of the runs that were asked for it; nothing where none was."""
    asked = [(place, summary["goodput"]) for place, summary in enumerate(summaries) if "goodput" in summary]
    if not asked:
        return []
    values = {"bounds": asked[0][1]["bounds"], "rows": [_good(place, found) for place, found in asked]}
    curves = [{"run": place, "x": found["curve"]["x"], "y": found["curve"]["y"]} for place, found in asked]
    return [Extra("goodput", "Goodput", "goodput.html.j2", values, {"curves": curves}, "goodput.js")]


def _good(place: int, found: Mapping[str, Any]) -> dict[str, Any]:
    low, high = (words.significant(end * 100) for end in found["attainment_ci95"])
    met = found["met_by"]["90%"]
    bounds = [f"{latency} {words.duration(bound)}" for latency, bound in met["bounds_s"].items()] if met else []
    return {
        "run": place,
        "good": f"{found['good']:,}",
        "requests": f"{found['requests']:,}",
        "attainment": words.share(found["attainment"]),
        "interval": f"{low} to {high} %",
        "per_s": words.significant(found["per_s"]),
        "met": ", ".join(bounds) or words.UNKNOWN,
    }
