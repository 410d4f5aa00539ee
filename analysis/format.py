"""Formats numbers, durations and names as text for the terminal and for report pages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec.structs import replace

from loadgen.analysis.metrics import METRICS, metric_by_key
from loadgen.workloads.lengths import ANSWERS
from loadgen.workloads.workload_facts import about_tokens, length_facts, workload_facts

if TYPE_CHECKING:
    from loadgen.analysis.summary import RunInfo, Summary

UNKNOWN = "–"  # noqa: RUF001 - a dash in a table cell, typeset as one
EN_DASH, MINUS = "\u2013", "\u2212"
MINUTE_S, HOUR_S = 60, 3600
FACTOR_MIN = 2.0
"""Smallest ratio of two values that `relative_change` writes as a factor."""
DIFFERENT_SPEEDS = "These runs are at different speeds, so their figures cannot be compared."
_SCALES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "µs"), (0.0, 1e9, "ns"))


def significant(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits and thousands separators, but without an exponent."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def nice_step(minimum: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least `minimum`."""
    power = 10.0 ** math.floor(math.log10(minimum))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= minimum * (1 - 1e-9))


def scale_of(seconds: float | None) -> tuple[float, str]:
    """Return the factor and the unit in which to show a duration, such as `(1e3, "ms")`.

    The units are s, ms, µs and ns.
    """
    magnitude = abs(seconds or 0.0)
    if magnitude == 0:
        return 1e3, "ms"
    return next((factor, unit) for minimum, factor, unit in _SCALES if magnitude >= minimum)


def duration(seconds: float | None, digits: int = 3) -> str:
    """Format a duration in a suitable unit, such as `12.3 ms`."""
    if seconds is None:
        return UNKNOWN
    factor, unit = scale_of(seconds)
    text = significant(seconds * factor, digits)
    if text.lstrip("-").startswith("1,000") and unit != "s":  # rounded up to the next unit, such as 999.7 µs
        factor, unit = scale_of(1000 / factor)
        text = significant(seconds * factor, digits)
    return f"{text} {unit}"


def elapsed(seconds: float) -> str:
    """Format a time since the start of a run, such as `0.8 s`, `42 s`, `12 min 30 s` or `3 h 5 min`."""
    if abs(seconds) < MINUTE_S:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < HOUR_S:
        minutes, rest = divmod(whole, MINUTE_S)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(whole / MINUTE_S), MINUTE_S)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def percent(value: float | None) -> str:
    """Format a share from 0 to 1 as a percentage, such as `12%`."""
    return UNKNOWN if value is None else f"{significant(value * 100, 2)}%"


def interval_text(low: str, high: str) -> str:
    """Return the ends of an interval as one text. `low` and `high` are the formatted ends.

    The ends are joined by an en dash, or by ` to ` if one of them has a sign. If both texts are equal, the result is
    this text.
    """
    if low == high:
        return low
    signed = any(end.startswith(("+", "-", MINUS)) for end in (low, high))
    return f"{low} to {high}" if signed else f"{low}{EN_DASH}{high}"


def confidence_interval(low: str, high: str, *, level: float = 0.95) -> str:
    """Return a confidence interval as text that begins with its level, such as `95% CI`.

    `low` and `high` are the ends of the interval as formatted numbers. The text is empty if both numbers are equal,
    because the interval then adds nothing to the figure.
    """
    return "" if low == high else f"{level * 100:.4g}% CI {interval_text(low, high)}"


def signed(value: float, digits: int = 3) -> str:
    """Format a difference with its sign, significant digits and thousands separators. Zero has no sign."""
    text = significant(abs(value), digits)
    return text if value == 0 else f"{'+' if value > 0 else '-'}{text}"


def typeset_minus(text: str) -> str:
    """Return `text` with minus signs instead of hyphens before numbers, for HTML pages."""
    return re.sub(r"(?<!\w)-(?=\d)", MINUS, text)


def relative_change(ratio: float, *, as_factor: bool | None = None) -> str:
    """Format `ratio`, the ratio of two values, as a change such as `+3.2%`, or as a factor such as `6.30x`.

    A ratio of FACTOR_MIN or more is formatted as a factor, because a change of more than 100% is hard to read. If
    `as_factor` is True or False, this argument decides instead. A caller can thus format the ends of an interval in the
    same way as the value between them.
    """
    if ratio >= FACTOR_MIN if as_factor is None else as_factor:
        return f"{significant(ratio)}x"
    change = (ratio - 1) * 100
    return f"{change:+,.1f}%" if abs(change) < 100 else f"{change:+,.0f}%"


def byte_size(number: float | None, digits: int = 3) -> str:
    """Format a number of bytes in GiB or MiB, the units that the tools of GPU drivers use."""
    if number is None:
        return UNKNOWN
    factor, unit = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{significant(number / factor, digits)} {unit}"


def pluralise(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 request` or `1,000 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


SHARE_TITLES = {
    "complete": "Complete",
    "attainment": "Attainment",
    "valid_output": "Valid output",
    "answered": "Reached an answer",
}
"""Titles of the shares in loadgen.analysis.shares."""


def unit_of(figure: str, value: float | None) -> tuple[float, str]:
    """Return (factor, unit) for showing a figure, such as `(1e3, "ms")`. The shown value is the figure times the
    factor.

    `figure` is a name that --assert uses, such as `ttft.p99`. For a duration, `value` in seconds determines the unit.
    """
    if figure.partition(".")[0] == "goodput":
        return 1.0, "requests/s"
    if figure in SHARE_TITLES or figure in ("cached", "canary", "expected") or figure.endswith("_share"):
        return 100.0, "%"
    metric = next((metric for metric in METRICS.values() if metric.key == figure.partition(".")[0]), None)
    if metric is not None and not metric.timed:
        return 1.0, "" if metric.unit == "ratio" else metric.unit
    return scale_of(value)


def figure_title(figure: str) -> str:
    """Return the title of a figure, such as `TTFT p99` for `ttft.p99`. `figure` is a name that --assert uses."""
    key, _, statistic = figure.partition(".")
    if key in SHARE_TITLES:
        return SHARE_TITLES[key]
    if key == "goodput":
        return "Goodput"
    return f"{metric_by_key(key).short} {statistic}" if statistic else metric_by_key(key).title


def printable(text: str, allowed: str = "") -> str:
    """Replace non-printable characters by spaces, except the characters in `allowed`.

    Without this replacement, text from a server could move the cursor or change the direction of writing.
    """
    if str.isprintable(text):
        return text
    return "".join(character if character.isprintable() or character in allowed else " " for character in text)


def simulated(summary: Summary) -> str:
    """Return the label of a simulated run, such as `SIMULATED`. For a run of a real server, the label is empty.

    If the simulated server does not run at real speed, the label also says so: for example, `SIMULATED at 5 times
    speed`, or `SIMULATED (virtual)` for virtual time.
    """
    server = summary.server
    if not server.simulated:
        return ""
    if server.virtual:
        return "SIMULATED (virtual)"
    if not knows_speed(summary):
        return "SIMULATED at unknown speed"
    return f"SIMULATED{times_speed(speed_of(summary))}"


def page_mark(summaries: Iterable[Summary]) -> str:
    """Return the label that marks a page with simulated runs, such as `SIMULATED at 1 and 5 times speed`.

    `summaries` are the summaries of the runs on the page. If all simulated runs have the same label, this is the label
    of the page. Otherwise the label lists the speeds of all simulated runs. The label is empty if no run is simulated.
    """
    simulations = [summary for summary in summaries if summary.server.simulated]
    marks = dict.fromkeys(map(simulated, simulations))
    return next(iter(marks), "") if len(marks) <= 1 else f"SIMULATED{times_speed(*map(speed_of, simulations))}"


def knows_speed(summary: Summary) -> bool:
    """Return True if the speed of the server's clock relative to real time is known.

    The clock of a real server runs in real time. A simulated server states its speed in its responses. The speed is
    unknown only if a gateway hides this statement.
    """
    server = summary.server
    return not server.simulated or server.virtual or server.speed is not None


def speed_of(summary: Summary) -> float:
    """Return the speed of the server's clock in a run, as a multiple of real time.

    Only the clock of a simulated server can be faster or slower than real time. The result is 1 for runs in virtual
    time, and if the speed is unknown.
    """
    return summary.server.speed or 1.0


def times_speed(*speeds: float) -> str:
    """Return the speeds of simulated servers as the end of a phrase, such as ` at 5 times speed`.

    If the servers ran at different speeds, the result is, for example, ` at 1, 4 and 5 times speed`. If all speeds are
    1, the result is empty.
    """
    distinct = sorted(set(speeds))
    if distinct in ([], [1.0]):
        return ""
    *others, last = (f"{speed:g}" for speed in distinct)
    return f" at {', '.join(others)}{' and ' * bool(others)}{last} times speed"


def server_label(summary: Summary) -> str:
    """Return the server's name and version, followed by the server's hardware if the hardware is known."""
    server = summary.server
    name = " ".join(str(part) for part in (server.name, server.version) if part)
    return f"{name} on {server.platform}" if server.platform else name


def workload_sentence(summary: Summary) -> str:
    """Describe the workload: the number of requests, their prompts, arrivals and output lengths.

    The text does not end in a full stop.
    """
    run = summary.run
    noun = "session" if run.load.sessions else "request"
    sent = summary.requests.sent
    if run.load.sessions and summary.sessions is not None:
        sent = summary.sessions.n
    count, duration_text = pluralise(run.n or sent, noun), ""
    if run.asked_s:
        count = f"Up to {count}" if run.n else f"{noun}s".capitalize()
        duration_text = f", for {run.asked_s:g} s"
    if run.load.kind == "traffic":
        plural = "class" if len(summary.traffic) == 1 else "classes"
        return f"{count} of {len(summary.traffic)} {plural} of traffic ({run.load.text}){duration_text}"
    requests = f"{count}{_prompts(run)}, {run.load.text}{duration_text}"
    if run.output_tokens == 0:
        return f"{requests}, {summary.server.endpoint}"
    length = length_facts(run.output_tokens)
    output = "the output lengths of its file"
    if run.load.recorded and run.workload in (None, "synthetic"):
        output = "the recorded output lengths"
    elif length.kind != ANSWERS:
        output = f"{token_length(length.text.removeprefix('max:')).replace('token', 'output token')} each"
    return f"{requests}, {'at most ' * run.may_end}{output}"


def _prompts(run: RunInfo) -> str:
    """Return a description of the prompts, such as ` of 512 tokens`.

    The caller appends the description to text such as `200 requests`.
    """
    facts = workload_facts(run.workload or "synthetic")
    exact = run.prompts_exact
    if run.audio_seconds is not None:
        return f" of {length_text(run.audio_seconds, 'second')} of audio each"
    if run.batch_size > 1:
        inputs = f" of {run.batch_size} inputs"
        return inputs + _prompts(replace(run, batch_size=1))
    if facts.turns is not None:
        thinking = f", {facts.think} after each response" if facts.think else ""
        length = about_tokens(token_length(run.input_tokens), exact=exact)
        return f" of {pluralise(run.load.turns, 'question')}{thinking}, each of {length}"
    if facts.has_own_lengths:
        kind = "" if facts.kind == "sessions" else f"{facts.kind} "  # the sentence already says "sessions"
        return f" from {kind}{facts.options}"
    if run.load.recorded:
        return f" of {about_tokens('the recorded lengths', exact=exact)}"
    shared = f" ({facts.kind}: {facts.options.replace(',', ', ')})" if facts.options else ""
    return f" of {about_tokens(token_length(run.input_tokens), exact=exact)}{shared}"


def token_length(value: int | str | None) -> str:
    """Describe a length in tokens. `value` is a number, or the canonical text of a length distribution."""
    return length_text(value, "token")


def length_text(value: int | str | None, noun: str) -> str:
    """Describe a length in the unit `noun`. `value` is a number, or the canonical text of a length distribution."""
    length = length_facts(value)
    if length.kind == "fixed":
        return pluralise(length.low or 0, noun)
    if length.kind == "uniform":
        return f"{length.low} to {length.high} {noun}s"
    if length.kind == "empirical":
        return f"a number of {noun}s from {length.file}"
    if length.mean is not None:
        return f"about {significant(length.mean)} {noun}s ({length.kind})"
    return f"{length.text} {noun}s"


def start_time(summary: Summary) -> str:
    """Return the start time of the run in UTC.

    If the start time in the run file is not valid, return its text unchanged.
    """
    try:
        return datetime.fromisoformat(summary.run.started_at).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except ValueError:
        return summary.run.started_at
