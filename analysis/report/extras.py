"""Sections that a page has only where there is something to say: of repeats, good requests and turns of sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis import turns_text, words
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


def by_turn(summaries: Sequence[words.Summary]) -> list[Extra]:
    """Latency by turn of the runs that were of sessions; nothing where none was."""
    found = [(place, summary["turns"]) for place, summary in enumerate(summaries) if "turns" in summary]
    if not found:
        return []
    rows = [(place, turns_text.cells(turn)) for place, turns in found for turn in turns]
    curves = [{"run": place, **_medians(turns)} for place, turns in found]
    values = {"heads": turns_text.HEADS, "rows": rows}
    return [Extra("turns", "Turn by turn", "turns.html.j2", values, {"curves": curves}, "turns.js")]


def _medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """TTFT's median in ms over the turns with enough samples for one, and the ends of its interval."""
    known = [turn for turn in turns if turn["ttft_s"]["n"] and "p50" not in turn["ttft_s"]["thin"]]
    ends = [turn["ttft_s"]["ci95"]["p50"] for turn in known]
    return {
        "turn": [turn["turn"] for turn in known],
        "p50": [turn["ttft_s"]["p50"] * 1e3 for turn in known],
        "low": [low and low * 1e3 for low, _ in ends],
        "high": [high and high * 1e3 for _, high in ends],
    }


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
