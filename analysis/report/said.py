"""The sentences below the charts of single requests: what each shows, so that nobody has to see it to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analysis import words

Curves = Mapping[str, Any]
Summary = Mapping[str, Any]


def captions(curves: Curves) -> dict[str, str]:
    """One sentence or two for each of position, prompt, points, gaps and timeline."""
    return {
        "position": position(curves["first"]),
        "prompt": prompt(curves["first"]),
        "points": points(curves["first"]),
        "gaps": gaps(curves["lifetime"]),
        "timeline": timeline(curves["timeline"]),
    }


def position(first: Curves) -> str:
    """How TTFT goes along the queue."""
    trend = first["by_position"]
    if not first["n"]:
        return "No sample."
    if not trend["x"]:
        return f"{words.count(first['n'], 'request')}: too few for a line along the queue."
    return f"{_rise(trend)} from the first requests sent to the last."


def prompt(first: Curves) -> str:
    """How TTFT goes with the prompt's length, or why that cannot be said."""
    if not first["n"]:
        return "No sample."
    least, most = first["prompts"]
    if least == most:
        return f"Every prompt had {words.count(least, 'token')}: this cannot tell how TTFT depends on it."
    between = f"Prompts of {least:,} to {most:,} tokens"
    trend = first["by_prompt"]
    return f"{between}. {_rise(trend)} from the shortest to the longest." if trend["x"] else f"{between}."


def points(first: Curves) -> str:
    """Which points are drawn, where not all are."""
    if first["drawn"] == first["n"]:
        return ""
    return (
        f"Points are {first['drawn']:,} of {first['n']:,} requests: evenly spaced in the order sent, and the slowest. "
        "The lines are of all."
    )


def gaps(lifetime: Curves) -> str:
    """The typical gap at both ends of an answer, and the longest."""
    if not lifetime["token"]:
        return "No answer had two chunks, so there is no gap."
    known = [(token, gap) for token, gap in zip(lifetime["token"], lifetime["p50"], strict=True) if gap is not None]
    wide = f" (tokens in groups of {lifetime['width']:,})" if lifetime["width"] > 1 else ""
    longest = lifetime["longest"][0]
    most = (
        f"The longest gap, {words.duration(longest['gap_s'])}, came before token {longest['token']:,} of request "
        f"{longest['request']}, {words.duration(longest['from_s'])} into the run."
    )
    if not known:
        return most
    (_, begins), (last, ends) = known[0], known[-1]
    typical = f"Typical gap {words.duration(begins)} at first and {words.duration(ends)} at token {last:,}{wide}."
    return f"{typical} {most}"


def timeline(drawn: Curves) -> str:
    """How many requests there are to see, and by which rule they were chosen."""
    if not drawn["n"]:
        return "Nothing was sent."
    if drawn["drawn"] == drawn["n"]:
        return f"All {drawn['n']:,} requests that were sent, first sent on top."
    some = f"{drawn['drawn']:,} of {drawn['n']:,} requests: every {_th(drawn['every'])} in the order sent"
    return f"{some}, the 100 that took longest, and up to 100 of those that were not complete."


def longest_rows(curves_of_runs: Sequence[Curves]) -> list[dict[str, Any]]:
    """The longest gaps of each run, longest first: eight of one run, three of each of several."""
    most = 8 if len(curves_of_runs) == 1 else 3
    return [
        gap | {"run": run, "gap": words.duration(gap["gap_s"])}
        for run, curves in enumerate(curves_of_runs)
        for gap in curves["lifetime"]["longest"][:most]
    ]


def _rise(trend: Curves) -> str:
    begins, ends = (words.duration(trend["p50"][place]) for place in (0, -1))
    return f"Median TTFT goes from {begins} to {ends}"


def _th(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number:,}{ending}"
