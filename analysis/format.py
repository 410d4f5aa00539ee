"""Numbers, durations and names as people read them: one format for the terminal, the pages and every sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TYPE_CHECKING

from loadgen.analysis.metrics import metric_by_key

if TYPE_CHECKING:
    from loadgen.analysis.summary import RunInfo, Summary

UNKNOWN = "–"  # noqa: RUF001 - a dash in a table cell, typeset as one
DIFFERENT_SPEEDS = "These runs are at different speeds, so their figures cannot be compared."
OWN_LENGTHS = ("sharegpt", "alpaca", "jsonl", "multi-turn")
"""Workloads that bring prompts, or sessions of them; a trace brings lengths."""
_SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "µs"), (0.0, 1e9, "ns"))


def significant(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits and thousands separated; never in exponent notation."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def scale_of(seconds: float | None) -> tuple[float, str]:
    """Factor and unit in which this duration reads best, from s to ns."""
    size = abs(seconds or 0.0)
    if size == 0:
        return 1e3, "ms"
    return next((factor, unit) for minimum, factor, unit in _SCALES if size >= minimum)


def duration(seconds: float | None, digits: int = 3) -> str:
    """A duration in the unit in which it reads best."""
    if seconds is None:
        return UNKNOWN
    factor, unit = scale_of(seconds)
    return f"{significant(seconds * factor, digits)} {unit}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return UNKNOWN if value is None else f"{significant(value * 100, 2)} %"


def byte_size(number: float | None, digits: int = 3) -> str:
    """Bytes in the unit in which they read best: GiB and MiB, as the drivers' own tools count."""
    if number is None:
        return UNKNOWN
    factor, unit = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{significant(number / factor, digits)} {unit}"


def pluralise(number: int, noun: str) -> str:
    """`1 request`, `1,000 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def unit_of(figure: str, value: float | None) -> tuple[float, str]:
    """Factor and unit in which a figure reads best, by its name as --assert knows it."""
    if figure.partition(".")[0] == "goodput":
        return 1.0, "requests/s"
    if figure in ("complete", "attainment") or figure.endswith("_share"):
        return 100.0, "%"
    if figure.endswith("_per_s"):
        return 1.0, "requests/s" if figure.startswith("requests") else "tokens/s"
    return scale_of(value)


def figure_title(figure: str) -> str:
    """What it is called, by its name as --assert knows it: `TTFT p99`; a rate by its title."""
    key, _, statistic = figure.partition(".")
    if key in ("complete", "goodput", "attainment"):
        return key.capitalize()
    return f"{metric_by_key(key).short} {statistic}" if statistic else metric_by_key(key).title


def printable(text: str, kept: str = "") -> str:
    """Without control characters, but for those `kept`: nobody's words may move the cursor, or turn the line about."""
    if str.isprintable(text):
        return text
    return "".join(character if character.isprintable() or character in kept else " " for character in text)


def simulated(summary: Summary) -> str:
    """Return `SIMULATED`, with the speed of its clock if that is not 1, or `(virtual)`; empty for a real server."""
    server = summary.server
    if not server.simulated:
        return ""
    if server.virtual:
        return "SIMULATED (virtual)"
    return f"SIMULATED{times_speed(speed_of(summary))}" if knows_speed(summary) else "SIMULATED at unknown speed"


def page_mark(summaries: Iterable[Summary]) -> str:
    """Return the mark of a page of these runs: the one they share, or `SIMULATED` with all speeds of simulated runs."""
    simulations = [summary for summary in summaries if summary.server.simulated]
    marks = dict.fromkeys(map(simulated, simulations))
    return next(iter(marks), "") if len(marks) <= 1 else f"SIMULATED{times_speed(*map(speed_of, simulations))}"


def knows_speed(summary: Summary) -> bool:
    """Return whether it is known how fast the server's clock ran. A gateway can hide that of a simulated server."""
    server = summary.server
    return not server.simulated or server.virtual or server.speed is not None


def speed_of(summary: Summary) -> float:
    """Return how many times faster than real time the server's clock ran: 1 for real servers and in virtual time."""
    return summary.server.speed or 1.0


def times_speed(*speeds: float) -> str:
    """Return ` at 5 times speed` or ` at 1 and 5 times speed`, to follow a noun; empty where all are at real speed."""
    distinct = sorted(set(speeds))
    return f" at {' and '.join(f'{speed:g}' for speed in distinct)} times speed" if distinct not in ([], [1.0]) else ""


def server_label(summary: Summary) -> str:
    """The server, its version, and what it runs on where that was said."""
    server = summary.server
    name = " ".join(str(part) for part in (server.name, server.version) if part)
    return f"{name} on {platform}" if (platform := server.platform) else name


def workload_sentence(summary: Summary) -> str:
    """What was asked, in one sentence without its full stop: how many requests, how long, when, how much back."""
    run = summary.run
    what = "session" if run.load.sessions else "request"
    number, until = pluralise(run.n or summary.requests.sent, what), ""
    if run.asked_s:
        number, until = f"Up to {number}" if run.n else f"{what}s".capitalize(), f", for {run.asked_s:g} s"
    when = f"{number}{_prompts(run)}, {run.load.text}{until}"
    if run.output_tokens == 0:
        return f"{when}, {summary.server.endpoint}"
    maximum, named = "at most " * run.may_end, str(run.output_tokens or 0).removeprefix("max:")
    back = "the output lengths of its file"
    if run.load.recorded and run.workload in (None, "synthetic"):
        back = "the recorded output lengths"
    elif named != "answers":
        back = f"{token_length(named).replace('token', 'output token')} each"
    return f"{when}, {maximum}{back}"


def _prompts(run: RunInfo) -> str:
    """Where prompts come from and how long they are."""
    kind, _, rest = (run.workload or "synthetic").partition(":")
    about = "" if run.prompts_exact else "about "
    if rest.startswith("turns="):
        thinking = "".join(f", {time} after each answer" for time in rest.split(",think=")[1:])
        return f" of {pluralise(run.load.turns, 'question')}{thinking}, each of {about}{token_length(run.input_tokens)}"
    if kind in OWN_LENGTHS:
        path, comma, options = rest.partition(",")
        return f" from {kind} {PurePath(path).name}{comma}{options}"
    if run.load.recorded:
        return f" of {about}the recorded lengths"
    shared = f" ({kind}: {rest.replace(',', ', ')})" if kind != "synthetic" else ""
    return f" of {about}{token_length(run.input_tokens)}{shared}"


def token_length(value: int | str | None) -> str:
    """A number of tokens, or the canonical text of lengths, in words."""
    if value is None or isinstance(value, int) or value.isdecimal():
        return pluralise(int(value or 0), "token")
    kind, _, rest = value.partition(":")
    if mean := re.search(r"mean=([\d.]+)", rest):
        return f"about {significant(float(mean[1]))} tokens ({kind})"
    if kind == "uniform":
        return f"{rest.replace('..', ' to ')} tokens"
    return f"as many tokens as {PurePath(rest).name} says" if kind == "empirical" else f"{value} tokens"


def start_time(summary: Summary) -> str:
    """When the run began, in UTC; as it stands in the run file where that is not a time."""
    try:
        return datetime.fromisoformat(summary.run.started_at).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return summary.run.started_at
