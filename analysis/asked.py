"""What was asked of the server, in words: how many requests, how long, when, and how much back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from analysis.words import Summary, count, of_sessions, significant

OWN_LENGTHS = ("sharegpt", "alpaca", "jsonl", "multi-turn")
"""Workloads that bring prompts, or sessions of them; a trace brings lengths."""


def asked(summary: Summary) -> str:
    """What was asked, in one sentence without its full stop."""
    run = summary["run"]
    what = f"{_how_many(summary)}{_prompts(run)}"
    until = f", for {run['asked_s']:g} s" if run["asked_s"] else ""
    return f"{what}, {arrivals(run['arrivals'])}{until}, {_back(run)} back from each"


def turns(workload: str) -> int:
    """Turns of each session, as the canonical text of a workload says; 1 where it does not."""
    named = re.match(r"multi-turn:turns=(\d+)", workload)
    return int(named[1]) if named else 1


def arrivals(text: str) -> str:
    """The canonical text of arrivals in words."""
    kind, _, rest = text.partition(":")
    return ARRIVALS[kind](rest) if kind in ARRIVALS else f"arriving as {text}"


def length(value: int | str | None) -> str:
    """A number of tokens, or the canonical text of lengths, in words."""
    if value is None or isinstance(value, int) or value.isdecimal():
        return count(int(value or 0), "token")
    kind, _, rest = value.partition(":")
    if mean := re.search(r"mean=([\d.]+)", rest):
        return f"about {significant(float(mean[1]))} tokens ({kind})"
    if kind == "uniform":
        return f"{rest.replace('..', ' to ')} tokens"
    return f"as many tokens as {_name(rest)} says" if kind == "empirical" else f"{value} tokens"


def _how_many(summary: Summary) -> str:
    run, what = summary["run"], "session" if of_sessions(summary) else "request"
    if not run["asked_s"]:
        return count(run["n"] or summary["requests"]["sent"], what)
    return f"Up to {count(run['n'], what)}" if run["n"] else f"{what}s".capitalize()


def _prompts(run: Mapping[str, Any]) -> str:
    """Where prompts come from and how long they are."""
    kind, _, rest = (run["workload"] or "synthetic").partition(":")
    if rest.startswith("turns="):
        thinking = "".join(f", {time} after each answer" for time in rest.split(",think=")[1:])
        return f" of {count(turns(run['workload']), 'question')}{thinking}, each of {length(run['input_tokens'])}"
    if kind in OWN_LENGTHS:
        return f" from {kind} {_name(rest)}"
    if run["arrivals"].startswith("trace:"):
        return " of the recorded lengths"
    shared = f" ({kind}: {rest.replace(',', ', ')})" if kind != "synthetic" else ""
    return f" of {length(run['input_tokens'])}{shared}"


def _back(run: Mapping[str, Any]) -> str:
    if run["arrivals"].startswith("trace:"):
        return "the recorded number of tokens"
    return "as many tokens as its answer on file" if run["output_tokens"] == "answers" else length(run["output_tokens"])


def _name(text: str) -> str:
    """A file's name without its folders, and its options."""
    path, comma, rest = text.partition(",")
    return f"{PurePath(path).name}{comma}{rest}"


def _burst(rest: str) -> str:
    size, _, every = rest.partition("/")
    return f"{size} at once every {every}" if rest else "all at once"


def _gamma(rest: str) -> str:
    rate, _, variation = rest.partition(",cv=")
    return f"{rate} per second (gamma gaps, variation {variation})"


def _ramp(rest: str) -> str:
    rates, _, time = rest.partition("/")
    return f"{rates.replace('..', ' to ')} per second within {time}"


def _closed(rest: str) -> str:
    clients, _, think = rest.partition(",think=")
    waits = "that wait for each answer" if clients != "1" else "that waits for each answer"
    return f"from {count(int(clients), 'client')} {waits}" + (f" and think for {think}" if think else "")


ARRIVALS: Mapping[str, Callable[[str], str]] = {
    "burst": _burst,
    "constant": lambda rest: f"{rest} per second, evenly",
    "poisson": lambda rest: f"{rest} per second (Poisson)",
    "gamma": _gamma,
    "ramp": _ramp,
    "steps": lambda rest: f"{rest.replace('@', ' per second for ').replace(',', ', ')}",
    "closed": _closed,
    "interactive": lambda _: "by users that came and went by hand",
    "trace": lambda rest: f"as recorded in {_name(rest)}",
}
