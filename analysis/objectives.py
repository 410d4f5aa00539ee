"""Objectives: what a run has to keep to, in the words of a command line: `ttft.p99 < 500ms`, `complete >= 99.9%`.

This file only reads them, and says what latencies have to hold them against, without numpy, so that a wrong one is
found before anything is sent; `loadgen.analysis.slo` holds a run against them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Literal, TypeVar

import msgspec

from loadgen.analysis.metrics import METRICS

Read = TypeVar("Read")
Described = TypeVar("Described")
Unit = Literal["s", "share", "requests", "per second"]
Interval = tuple[float | None, float | None]
"""Ends of a 95 % confidence interval; an end is None where no sample lies far enough out to bound it."""

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LATENCIES = {metric.key: metric for metric in METRICS.values() if metric.per != "run"}
"""The latencies of summary.json without the unit at the end of their names."""
STATISTICS = ("mean", "min", "max")
STATES = ("complete", "truncated", "failed", "rejected", "dropped")
RATES = {metric.key: metric for metric in METRICS.values() if metric.judged and metric.unit.endswith("/s")}
SKEW = METRICS["skew_s"].key
GOODPUT_FIGURES = ("goodput", "attainment")
"""Of the bounds that --goodput states."""
TIME: Mapping[str, tuple[int, Unit]] = {"s": (0, "s"), "ms": (-3, "s"), "us": (-6, "s")}
NUMBER: Mapping[str, tuple[int, Unit]] = {"": (0, "requests"), "%": (-2, "share")}
SHARE: Mapping[str, tuple[int, Unit]] = {"%": (-2, "share")}
RATE: Mapping[str, tuple[int, Unit]] = {"": (0, "per second"), "/s": (0, "per second")}
"""Units of a bound: each a power of ten, so that the bound is the float nearest to what was written, and a Unit."""

HINT = f"""An objective is a figure, a comparison and a bound, such as 'ttft.p99 < 500ms'.
  figures      LATENCY.STATISTIC, {SKEW}, {", ".join(STATES)},
               {", ".join(RATES)}, {", ".join(GOODPUT_FIGURES)}
  latencies    {", ".join(LATENCIES)}
  statistics   p1 to p99.9, {", ".join(STATISTICS)}
  comparisons  {", ".join(COMPARISONS)}
  bounds       us, ms or s for latencies and {SKEW};
               a number or a share such as 99.9% for {", ".join(STATES)}; a plain number for the rest"""

_COMPARISON = re.compile("(<=|>=|<|>)")
_BOUND = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([^\d\s]*)")
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")

REQUEST_LATENCIES = {key: metric for key, metric in LATENCIES.items() if metric.per == "request"}
"""Those of which a request has one."""
BOUND_HINT = f"""A bound on each request is a latency, < or <=, and a time, such as 'ttft < 500ms'.
  latencies    {", ".join(REQUEST_LATENCIES)}"""


class ObjectiveError(Exception):
    """Expressions that are no objectives: the message has one line for each, the hint lists what is allowed."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Objective(msgspec.Struct, frozen=True):
    """One bound on one figure of a run, or on a latency of each request (--goodput)."""

    text: str
    """As it was written, with single blanks."""
    figure: str
    """A latency, a state, a rate, or the skew, as listed above."""
    statistic: str
    """`p99`, `mean`, `min` or `max` of a latency of a run; empty for the rest."""
    comparison: str
    bound: float
    """In `unit`: seconds, a share from 0 to 1, requests, or so many per second."""
    unit: Unit

    @property
    def percentile(self) -> float | None:
        """0.99 for `p99`; None for other statistics."""
        match = _PERCENTILE.fullmatch(self.statistic)
        return None if match is None else float(Decimal(match[1]).scaleb(-2))

    def satisfied_by(self, value: float) -> bool:
        """Whether this value is within the bound."""
        return COMPARISONS[self.comparison](value, self.bound)


class BoundsMet(msgspec.Struct, kw_only=True):
    """What a share of the requests would have met."""

    scale: float
    """Factor of all bounds."""
    bounds_s: dict[str, float]
    """By latency."""


class AttainmentCurve(msgspec.Struct, kw_only=True):
    """Attainment `y` with all bounds scaled by `x`."""

    x: list[float]
    y: list[float]
    n: int
    drawn: int


class Goodput(msgspec.Struct, kw_only=True):
    """Complete requests that met every bound (--goodput). Requests due in the window count, sent or not."""

    bounds: list[str]
    good: int
    requests: int
    attainment: float | None
    """good / requests."""
    attainment_ci95: tuple[float, float]
    """Clopper and Pearson."""
    per_s: float | None
    """Good requests that ended inside the window, per second of it."""
    each: dict[str, float | None]
    """Attainment of each bound alone."""
    met_by: dict[str, BoundsMet | None]
    """By share of the requests (`90%`); None where too many are not complete."""
    curve: AttainmentCurve


class ObjectiveVerdict(msgspec.Struct, kw_only=True):
    """What became of one objective (--assert)."""

    objective: str
    """As it was written."""
    figure: str
    verdict: Literal["pass", "fail", "inconclusive"]
    unit: Literal["s", "share", "requests", "per second"]
    """Of the next three."""
    bound: float
    measured: float | None
    """None where the run has no such figure, which fails."""
    ci95: Interval | None
    """None for a figure of this run alone."""
    requests: int
    """Those it rests on: for a latency the complete ones, else all."""
    left_out: int
    """For a latency, the requests that were due in the window and not complete."""
    requests_needed: int | None
    """When it is inconclusive, about how many requests would tell if they went on like these; None: no such number."""
    said: str
    """The measured figure, its interval, and what would tell, in words."""


class Distribution(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A latency of complete requests, in seconds (of `tpot_s` and `normalised_s`, seconds per token)."""

    n: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    p99_9: float | None = None
    """Only where there are enough samples for it."""
    ci95: dict[str, Interval]
    """By percentile."""
    thin: list[str]
    """Percentiles that rest on too few samples to mean something."""

    def of(self, statistic: str) -> float | None:
        """A statistic by its name, such as `mean` or `p99`; percentiles that are thin included."""
        return getattr(self, statistic)  # type: ignore[no-any-return]


class AdjustedDistribution(msgspec.Struct, kw_only=True):
    """A latency in which each request that is not complete counts as infinitely slow; None is infinite."""

    n: int
    failures: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    thin: list[str]


class ByLatency(dict[str, Described]):
    """Latencies by the name that METRICS gives them, as keys (`latency["ttft_s"]`) and attributes (`latency.ttft`)."""

    def __getattr__(self, name: str) -> Described:
        for key in (f"{name}_s", name):
            if not name.startswith("_") and key in self:
                return self[key]
        raise AttributeError(f"no latency {name!r}; there are {', '.join(self.__dir__())}")

    def __dir__(self) -> list[str]:
        return [name.removesuffix("_s") for name in self]


def parse(expressions: Iterable[str], option: str = "--assert") -> list[Objective]:
    """Read expressions such as `tpot.p50 <= 30ms`. Raises ObjectiveError, which names every mistake in all of them."""
    return parse_each(expressions, _objective, option, HINT)


def parse_bounds(expressions: Iterable[str]) -> list[Objective]:
    """Read bounds on single requests such as `ttft < 500ms`. Raises ObjectiveError, which names every mistake."""
    return parse_each(expressions, _request_bound, "--goodput", BOUND_HINT)


def parse_each(expressions: Iterable[str], read: Callable[[str], Read], option: str, hint: str) -> list[Read]:
    """What `read` makes of each expression. Raises ObjectiveError with a line for each of its ValueErrors."""
    result, mistakes = [], []
    for expression in expressions:
        try:
            result.append(read(" ".join(expression.split())))
        except ValueError as mistake:
            mistakes.append(f"{option} {expression!r}: {mistake}")
    if mistakes:
        raise ObjectiveError("\n".join(mistakes), hint)
    return result


def _request_bound(text: str) -> Objective:
    left, *rest = _COMPARISON.split(text, maxsplit=1)
    latency = left.strip()
    if latency not in REQUEST_LATENCIES:
        raise ValueError(f"{latency!r} is no latency that a request has one of")
    if not rest or rest[0] not in ("<", "<="):
        raise ValueError("a request is good when it is fast: write < and a time")
    bound_s, unit = _bound(rest[1].strip(), latency)
    if bound_s <= 0:
        raise ValueError("a bound of nothing is kept by nobody")
    return Objective(text, latency, "", rest[0], bound_s, unit)


def _objective(text: str) -> Objective:
    left, *rest = _COMPARISON.split(text, maxsplit=1)
    if not rest:
        raise ValueError(f"there is no comparison; write one of {', '.join(COMPARISONS)}")
    figure, dot, statistic = left.strip().partition(".")
    if figure in LATENCIES:
        if not statistic:
            raise ValueError(f"{figure} is a distribution; say which figure of it, such as {figure}.p99")
        match = _PERCENTILE.fullmatch(statistic)
        if statistic not in STATISTICS and not (match and 1 <= float(match[1]) <= 99.9):
            raise ValueError(f"{statistic!r} is no statistic; write p1 to p99.9 or {', '.join(STATISTICS)}")
    elif figure not in (*STATES, *RATES, SKEW, *GOODPUT_FIGURES):
        raise ValueError(f"{left.strip()!r} is no figure of a run")
    elif dot:
        raise ValueError(f"{figure} is a single figure, without {dot + statistic!r}")
    comparison, right = rest
    bound, unit = _bound(right.strip(), figure)
    return Objective(text, figure, statistic, comparison, bound, unit)


def _bound(text: str, figure: str) -> tuple[float, Unit]:
    match = _BOUND.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no bound; write a number and perhaps a unit")
    number, unit = match.groups()
    others = SHARE if figure == "attainment" else NUMBER if figure in STATES else RATE
    units = TIME if figure in LATENCIES or figure == SKEW else others
    if not unit and units is TIME:
        raise ValueError(f"{number} has no unit: write {number}ms or {number}s")
    if not unit and units is SHARE:
        raise ValueError(f"{number} has no unit: write {number}%")
    if unit not in units:
        raise ValueError(f"{unit!r} is no unit of {figure}; it has {', '.join(known or 'none' for known in units)}")
    power, result = units[unit]
    if result == "share" and Decimal(number) > 100:
        raise ValueError("a share is at most 100%")
    if result == "requests" and Decimal(number) % 1:
        raise ValueError(f"{number!r} is no number of requests; write {number}% for a share")
    return float(Decimal(number).scaleb(power)), result
