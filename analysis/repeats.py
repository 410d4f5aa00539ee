"""Repeats of one plan: how much its figures differ from run to run.

Requests of one run share one server and one stretch of time, so an interval made from them says nothing about another
run. The interval here is over runs: Student's t on one figure per run (Student, "The probable error of a mean", 1908).
It is the one that counts when runs are compared, and it needs two runs at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import words
from analysis.stats import share_interval, student_quantile

CONFIDENCE = 0.95
DECIMALS = 9
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATES = ("output_tokens_per_s", "steady_output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "tail_share")
SHARES = ("complete", "attainment", "tail_share")
ORDER = "one after the other, as they are numbered: all have one plan, so there is no order to draw"


def between(summaries: Sequence[words.Summary]) -> dict[str, Any]:
    """What repeats of one plan say together, from their summaries in the order in which they ran.

    `figures` has, by the name that --assert uses (`ttft.p99`, `output_tokens_per_s`), each run's value, their mean,
    standard deviation and 95 % interval of the mean; the last two are None for fewer than two runs, and a figure that a
    run does not have is None for all. `state` is `cold` or `warm` for each run.
    """
    states = state(summaries)
    values = [figures(summary) for summary in summaries]
    names = list(values[0]) if values else []
    return {
        "runs": len(summaries),
        "order": ORDER,
        "state": states,
        "state_said": _said(states),
        "seeds": [summary["run"]["seed"] for summary in summaries],
        "confidence": CONFIDENCE,
        "figures": {name: _within(name, over_runs([each[name] for each in values]), summaries) for name in names},
    }


def figures(summary: words.Summary) -> dict[str, float | None]:
    """The figures of one run by which runs are told apart; None where the run has none, or too few samples for it."""
    throughput, (complete, total) = summary["throughput"], ended(summary)
    found: dict[str, float | None] = {name: throughput.get(name) for name in RATES}
    found["complete"] = complete / total if total else None
    if good := summary.get("goodput"):
        found |= {"goodput": good["per_s"], "attainment": good["attainment"]}
    for latency, described in summary["latency"].items():
        for statistic in STATISTICS:
            thin = statistic in described["thin"]
            found[f"{latency.removesuffix('_s')}.{statistic}"] = None if thin else described[statistic]
    found["skew"] = summary["burst"]["skew_s"]
    return found


def ended(summary: words.Summary) -> tuple[int, int]:
    """How many requests were complete, of all that were asked."""
    requests = summary["requests"]
    return requests["complete"], requests["sent"] + requests["dropped"] + requests["unrecorded"]


def over_runs(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, standard deviation and interval of one figure per run."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {"n": len(known), "mean": None, "std": None, "ci95": None, "values": list(values)}
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return {"n": 1, "mean": mean, "std": None, "ci95": None, "values": known}
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1))
    margin = student_quantile((1 + CONFIDENCE) / 2, len(known) - 1) * deviation / math.sqrt(len(known))
    return {
        "n": len(known),
        "mean": round(mean, DECIMALS),
        "std": round(deviation, DECIMALS),
        "ci95": [round(mean - margin, DECIMALS), round(mean + margin, DECIMALS)],
        "values": known,
    }


def _within(name: str, figure: dict[str, Any], summaries: Sequence[words.Summary]) -> dict[str, Any]:
    """A share is at most 1, and so is its interval's end; of requests it is no better known than by counting them all
    (Clopper and Pearson), however alike the runs are."""
    if name not in SHARES or figure["ci95"] is None:
        return figure
    low, high = figure["ci95"]
    if counts := [each for summary in summaries if (each := _counted(name, summary))]:
        exact_low, exact_high = share_interval(sum(good for good, _ in counts), sum(total for _, total in counts))
        low, high = min(low, round(exact_low, DECIMALS)), max(high, round(exact_high, DECIMALS))
    return figure | {"ci95": [max(0.0, low), min(1.0, high)]}


def _counted(name: str, summary: words.Summary) -> tuple[int, int] | None:
    """Of how many requests it is the share of how many; None for a share that is not of requests."""
    if name == "complete":
        return ended(summary)
    good = summary.get("goodput")
    return (good["good"], good["requests"]) if name == "attainment" and good else None


def state(summaries: Sequence[words.Summary]) -> list[str]:
    """`warm` for a run with warm-up requests, or one after another run at the same address; else `cold`."""
    found = []
    before: Mapping[str, Any] | None = None
    for summary in summaries:
        same = before is not None and before["server"]["url"] == summary["server"]["url"]
        found.append("warm" if summary["requests"]["warmup"] or same else "cold")
        before = summary
    return found


def _said(states: Sequence[str]) -> str:
    """Which runs met a cold server, in a sentence."""
    cold = [str(place) for place, each in enumerate(states, 1) if each == "cold"]
    if not cold:
        return "All warm: requests had been sent to the server before each."
    if len(cold) == len(states):
        return "All cold: each met a server to which nothing of these had been sent."
    which = f"Repeat {cold[0]} was" if len(cold) == 1 else f"Repeats {', '.join(cold)} were"
    return f"{which} cold, the others warm; --warmup N makes all alike."
