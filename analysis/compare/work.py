"""Whether two groups of runs did equal work, so that a difference is one of the servers and not of what was asked.

What is compared by choice (the server, its version, its address) is no difference here. Everything that changes what
has to be done, when, or how well it was measured is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.compare.loaded import Loaded
from analysis.words import simulated

PLAN = ("arrivals", "n", "duration_s", "workload", "input_tokens", "output_tokens", "max_in_flight", "window_s")
LENGTHS_ALIKE = 0.01
"""Mean output lengths that differ by no more are the same: chance in when answers end by themselves."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that the two groups did not have in common."""

    what: str
    a: str
    b: str
    why: str
    """What it does to a comparison."""


def differences(a: Sequence[Loaded], b: Sequence[Loaded]) -> list[Difference]:
    """Everything in which A and B, or the runs within one of them, did unequal work; empty where they are alike."""
    found = []
    for what, why, of in CHECKS:
        said_a, said_b = _said(a, of), _said(b, of)
        if said_a != said_b or len(said_a) > 1:
            found.append(Difference(what, " / ".join(said_a), " / ".join(said_b), why))
    return [*found, *_lengths(a, b), *_limited(a, b)]


def notes(a: Sequence[Loaded], b: Sequence[Loaded]) -> list[str]:
    """What leaves the work equal and yet may mislead."""
    found = []
    urls_a, urls_b = ({run.summary["server"]["url"] for run in group} for group in (a, b))
    real = not any(run.summary["server"]["simulated"] for run in (*a, *b))
    if real and urls_a & urls_b:
        found.append(
            "Both sent the same prompts to the same address: with a prefix cache the later ones were helped by the "
            "earlier ones, unless the server was started again or its cache emptied in between."
        )
    for title, group in (("A", a), ("B", b)):
        lost = sum(run.summary["requests"]["sent"] - run.summary["requests"]["complete"] for run in group)
        if lost:
            found.append(f"{lost:,} requests of {title} were not complete and are in no latency.")
    return found


def _said(group: Sequence[Loaded], of: Any) -> list[str]:
    return sorted({str(of(run)) for run in group})


def _planned(name: str) -> Any:
    return lambda run: run.plan.get(name, {"arrivals": "burst", "workload": "synthetic"}.get(name))


def _seed(run: Loaded) -> int:
    """That of the first repeat."""
    return int(run.plan.get("seed", 0)) - max(0, int(run.plan.get("repeat", 0)) - 1)


def _limits(run: Loaded) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(run.summary["server"]["limits"].items())) or "unknown"


def _mark(run: Loaded) -> str:
    return simulated(run.summary) or "a real server"


def _lengths(a: Sequence[Loaded], b: Sequence[Loaded]) -> list[Difference]:
    """Lengths as they came out: prompts to the token, answers where the server could not be held to a length."""
    found = []
    for what, reported in (
        ("prompt lengths as reported", "prompt_tokens"),
        ("output lengths as sent", "output_tokens"),
    ):
        mean_a, mean_b = (_mean_length(group, reported) for group in (a, b))
        if mean_a is None or mean_b is None:
            continue
        if abs(mean_a - mean_b) > LENGTHS_ALIKE * max(mean_a, mean_b):
            why = "longer requests are more work"
            found.append(Difference(what, f"{mean_a:.1f} in the mean", f"{mean_b:.1f} in the mean", why))
    return found


def _mean_length(group: Sequence[Loaded], column: str) -> float | None:
    lengths = [getattr(run.frame, column)[run.frame.sampled] for run in group]
    joined = np.concatenate(lengths) if lengths else np.empty(0)
    return float(joined.mean()) if len(joined) else None


def _limited(a: Sequence[Loaded], b: Sequence[Loaded]) -> list[Difference]:
    """A client that was the limit measured itself."""
    said_a, said_b = (", ".join(_said(group, lambda run: run.summary["client"]["verdict"])) for group in (a, b))
    if said_a == said_b == "ok":
        return []
    return [Difference("client verdict", said_a, said_b, "a client that was the limit measured itself, not the server")]


def _users(run: Loaded) -> str:
    """The most there were at a time, where they came and went by hand."""
    there = [sample.values["users"] for sample in run.run.telemetry if "users" in sample.values]
    return f"up to {max(there)} by hand" if there else "as planned"


def _ended(run: Loaded) -> str:
    return "interrupted" if run.summary["run"]["interrupted"] else "to its end"


CHECKS: tuple[tuple[str, str, Any], ...] = (
    *((name, "the plan asks for other work", _planned(name)) for name in PLAN),
    ("seed", "other prompts, lengths or gaps were drawn", _seed),
    ("warm-up", "a cold server is slower at first", _planned("warmup")),
    ("model", "another model is another amount of work", lambda run: run.summary["server"]["model"]),
    ("endpoint", "another way of asking, with other work around it", lambda run: run.summary["server"]["endpoint"]),
    ("server limits", "it admits, holds or turns away another number of requests", _limits),
    ("clock", "time does not pass alike", _mark),
    ("stamps", "another error bar", lambda run: run.summary["client"]["stamps"]),
    ("users", "another load", _users),
    ("platform", "other hardware", _planned("platform")),
    ("run", "a part of a run is no run", _ended),
)
