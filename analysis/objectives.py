"""Objectives of a run as written on the command line, such as `ttft.p99 < 500ms` and `complete >= 99.9%`.

This module parses objectives and defines their results. It does not import numpy, so mistakes in objectives are
reported quickly, before any request is sent. `loadgen.analysis.slo` judges runs by their objectives.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Literal, TypeVar

import msgspec

from loadgen.analysis.figure_names import did_you_mean, suggest_figure
from loadgen.analysis.metrics import METRICS
from loadgen.workloads.spec_syntax import parse_seconds

Parsed = TypeVar("Parsed")
Description = TypeVar("Description")
Unit = Literal["s", "share", "requests", "tokens", "ratio", "per second", "share per hour"]
Interval = tuple[float | None, float | None]
"""Ends of a confidence interval. An end is None if there are too few samples to determine it."""

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LATENCIES = {metric.key: metric for metric in METRICS.values() if metric.per != "run"}
"""Latencies by key, which is the name in summary.json without the unit."""
STATISTICS = ("mean", "min", "max")
STATES = ("complete", "truncated", "failed", "rejected", "dropped")
RATES = {metric.key: metric for metric in METRICS.values() if metric.judged and metric.unit.endswith("/s")}
SKEW = METRICS["skew_s"].key
RESPONSE_SHARES = ("valid_output", "answered")
"""Shares of the responses. `valid_output` is defined only for requests with tools or a JSON schema, and `answered`, the
share of responses that reach an answer, only for responses with reasoning."""
RUN_SHARES = ("canary", "expected")
"""Shares that are defined only for a whole run: `canary`, the share of canaries (--verify) whose answer under load is
that without load, and `expected`, the share of responses that contain the text that their request expects."""
CACHED = "cached"
"""Share of prompt tokens that came from the server's prefix cache. It is defined only if the server reports it."""
GOODPUT_FIGURES = ("goodput", "attainment")
"""Figures that are defined only with --goodput, because they depend on its bounds."""
TIME: Mapping[str, tuple[int, Unit]] = {"s": (0, "s"), "ms": (-3, "s"), "us": (-6, "s")}
NUMBER: Mapping[str, tuple[int, Unit]] = {"": (0, "requests"), "%": (-2, "share")}
SHARE: Mapping[str, tuple[int, Unit]] = {"%": (-2, "share")}
TOKENS: Mapping[str, tuple[int, Unit]] = {"": (0, "tokens")}
RATIO: Mapping[str, tuple[int, Unit]] = {"": (0, "ratio")}
RATE: Mapping[str, tuple[int, Unit]] = {"": (0, "per second"), "/s": (0, "per second")}
PER_HOUR: Mapping[str, tuple[int, Unit]] = {"%/h": (-2, "share per hour")}
"""Units of a bound. Each unit has a power of ten, by which the number is scaled, and the unit of the result. The bound
is the float nearest to the scaled decimal number."""

DRIFT = "drift"
"""The word after a latency or a rate in an objective on its change per hour."""

HINT = f"""An objective has a figure, a comparison and a bound, such as 'ttft.p99 < 500ms'.
  figures      LATENCY.STATISTIC, {SKEW}, {", ".join(STATES)},
               {", ".join(RATES)}, {", ".join((*GOODPUT_FIGURES, *RESPONSE_SHARES, CACHED, *RUN_SHARES))}
  latencies    {", ".join(LATENCIES)}
  statistics   p1 to p99.9, {", ".join(STATISTICS)}
  comparisons  {", ".join(COMPARISONS)}
  parts        'chat: ttft.p99 < 500ms' judges one class of traffic, model or replica
  drift        'ttft.p99 drift < 5%/h' or 'output_tokens_per_s drift > -5%/h': change of a latency or a rate per hour
  bounds       us, ms or s for latencies and {SKEW}; a plain number for reasoning_tokens and rtf;
               a number or a share such as 99.9% for {", ".join(STATES)}; a plain number for the rest"""

_COMPARISON = re.compile("(<=|>=|<|>)")
_BOUND = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)) *([^\d\s]*)")
_LONG_TIME = re.compile("(m|min|h)([0-9.]|$)")
"""Matches a time in minutes or hours, such as `2m` or `1m30s`."""
_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")

REQUEST_LATENCIES = {key: metric for key, metric in LATENCIES.items() if metric.per == "request"}
"""Latencies that have one value per request."""
BOUND_HINT = f"""A bound on each request has a latency, < or <=, and a time, such as 'ttft < 500ms'.
A bound on reasoning_tokens or rtf has a number: 'reasoning_tokens <= 2000'.
  latencies    {", ".join(REQUEST_LATENCIES)}"""


class ObjectiveError(Exception):
    """Error for invalid objectives. The message has one line per mistake, and the hint lists the valid forms."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Objective(msgspec.Struct, frozen=True):
    """A bound on a figure of a run (--assert), or on a latency of each request (--goodput)."""

    text: str
    """The expression as the user wrote it, with single spaces."""
    figure: str
    """The key of a latency, a rate, a request state, the burst skew or a goodput figure."""
    statistic: str
    """Statistic of a latency: `mean`, `min`, `max` or a percentile such as `p99`. Empty for all other figures."""
    comparison: str
    bound: float
    """The bound in `unit`: seconds, a share from 0 to 1, a number of requests or tokens, a ratio, or a rate per
    second."""
    unit: Unit
    part: str = ""
    """Class of traffic, model or replica whose requests the figure describes. Empty: all requests."""
    drift: bool = False
    """True if the bound applies to the change of the figure per hour, as a share of its level."""

    @property
    def percentile(self) -> float | None:
        """The percentile of the statistic as a fraction, such as 0.99 for `p99`. None for other statistics, such as
        `mean`.
        """
        match = _PERCENTILE.fullmatch(self.statistic)
        return None if match is None else float(Decimal(match[1]).scaleb(-2))

    def satisfied_by(self, value: float) -> bool:
        """Return True if this value meets the bound."""
        return COMPARISONS[self.comparison](value, self.bound)


class BoundsMet(msgspec.Struct, kw_only=True):
    """The bounds that a given share of the requests, for example 90%, would have met.

    They are the bounds of --goodput, all multiplied by the same factor. The factor is the smallest with which this
    share of the requests meets the bounds. For example, the factor is 1.3 if 90% of the requests meet bounds that are
    1.3 times as large, but fewer requests meet smaller bounds.
    """

    scale: float
    """Factor by which every bound is multiplied."""
    bounds_s: dict[str, float]
    """Scaled bound in seconds, by latency. The bound of `reasoning_tokens` is a number of tokens, that of `rtf` a
    ratio."""


class AttainmentCurve(msgspec.Struct, kw_only=True):
    """A curve in which `y` is the share of good requests if every bound of --goodput is multiplied by `x`."""

    x: list[float]
    y: list[float]
    n: int
    drawn: int


class Goodput(msgspec.Struct, kw_only=True):
    """Number, share and rate of the complete requests that met every bound (--goodput).

    The share is the number of these requests, divided by the number of all requests that were due in the window,
    including requests that were never sent.
    """

    bounds: list[str]
    good: int
    requests: int
    attainment: float | None
    """Share of good requests: `good` / `requests`."""
    attainment_ci95: tuple[float, float]
    """Exact binomial 95% interval of the attainment (Clopper and Pearson)."""
    per_s: float | None
    """Good requests that ended inside the window, per second."""
    each: dict[str, float | None]
    """Attainment of each bound alone, as if it were the only bound."""
    met_by: dict[str, BoundsMet | None]
    """Scaled bounds that a share of the requests, such as `90%`, would have met. None if too few requests are
    complete."""
    curve: AttainmentCurve


class ObjectiveVerdict(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The result of one objective (--assert)."""

    objective: str
    """The objective as the user wrote it."""
    figure: str
    verdict: Literal["pass", "fail", "inconclusive"]
    """`inconclusive` occurs only if the whole interval has to meet the bound (`whole_interval`), or if the run is too
    short for a drift."""
    marginal: bool
    """True if the bound lies inside the interval, so that a repetition of the run might be judged differently."""
    whole_interval: bool
    """True if the whole interval has to meet the bound (--confidence, or a drift). False if the measured figure
    decides."""
    unit: Unit
    """Unit of `bound`, `measured` and `interval`."""
    bound: float
    measured: float | None
    """The measured figure. If the run does not have the figure, this is None and the objective fails."""
    interval: Interval | None
    """Confidence interval of the figure. None for a figure that describes only this run, such as a count or an extreme.
    """
    confidence: float
    """Confidence of the interval: 0.95, or that of --confidence."""
    requests: int
    """Number of requests that the figure is based on: complete requests for a latency, otherwise all requests."""
    left_out: int
    """For a latency: number of requests due in the window that did not complete."""
    requests_needed: int | None
    """For a marginal figure: approximate number of similar requests after which the bound would lie outside the
    interval. None if no practical number would suffice."""
    said: str
    """The measured figure and its interval as text. For a marginal figure, also the number of requests that would
    decide."""
    first_bad_s: tuple[float, float] | None = None
    """Time window in which the figure began to miss its bound: its start and end, in seconds from the start of the run.
    Only for a failed objective on a latency, on a rate or on a drift of one of them. Omitted if no window before it was
    good."""


class Distribution(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Statistics of a latency over the complete requests, in s (`tpot_s` and `normalised_s`: in s/token).

    The statistics of `reasoning_tokens`, which is not a latency, are in tokens.
    """

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
    """Omitted if there are too few samples."""
    ci95: dict[str, Interval]
    """95% interval of each percentile, by percentile."""
    thin: list[str]
    """Percentiles that are based on too few samples to be meaningful."""

    def of(self, statistic: str) -> float | None:
        """Return a statistic by its name, such as `mean` or `p99`. Percentiles from too few samples are included."""
        return getattr(self, statistic)  # type: ignore[no-any-return]


class AdjustedDistribution(msgspec.Struct, kw_only=True):
    """The distribution of a latency in which each incomplete request counts as infinitely slow.

    A percentile is None if it is infinite.
    """

    n: int
    failures: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    thin: list[str]


class ByLatency(dict[str, Description]):
    """A dict of latencies that also has attributes: `latency.ttft` is the same as `latency["ttft_s"]`.

    Keys are names in METRICS.
    """

    def __getattr__(self, name: str) -> Description:
        for key in (f"{name}_s", name):
            if not name.startswith("_") and key in self:
                return self[key]
        raise AttributeError(f"no latency {name!r}; choose one of {', '.join(self.__dir__())}")

    def __dir__(self) -> list[str]:
        return [name.removesuffix("_s") for name in self]


def check_no_parts(objectives: Iterable[Objective], option: str) -> None:
    """Raise ObjectiveError if an objective limits a drift, or if it applies to only a part of the requests.

    A part is a class of traffic, a model or a replica. `option` is the command-line option that states the objectives.
    It judges all requests together, and its runs are too short to measure a drift.
    """
    for objective in objectives:
        if objective.drift:
            raise ObjectiveError(
                f"{option} {objective.text!r}: these runs are too short for a drift",
                "Measure it in one long run: loadgen run --duration 2h --assert 'ttft.p99 drift < 5%/h'.",
            )
        if objective.part:
            raise ObjectiveError(
                f"{option} {objective.text!r}: all requests are judged together, not those of {objective.part!r}",
                f"Write {objective.text.rpartition(':')[2].strip()!r}.",
            )


def part_of(expression: str) -> str:
    """Return the class of traffic, the model or the replica that an objective names, or "" if it names none."""
    figure_text = _COMPARISON.split(expression, maxsplit=1)[0]
    return figure_text.rpartition(":")[0].strip()


def parse(expressions: Iterable[str], option: str = "--assert") -> list[Objective]:
    """Parse objectives such as `tpot.p50 <= 30ms`. Raises ObjectiveError, which lists all mistakes."""
    return parse_each(expressions, _objective, option, HINT)


def parse_bounds(expressions: Iterable[str]) -> list[Objective]:
    """Parse bounds that each request must meet, such as `ttft < 500ms`.

    Raises ObjectiveError, which lists all mistakes.
    """
    return parse_each(expressions, _request_bound, "--goodput", BOUND_HINT)


def parse_each(expressions: Iterable[str], read: Callable[[str], Parsed], option: str, hint: str) -> list[Parsed]:
    """Parse each expression with `read`, and return the results.

    If `read` raises ValueError for some expressions, raise an ObjectiveError with one line for each of these
    expressions.
    """
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
    figure_text, *rest = _COMPARISON.split(text, maxsplit=1)
    latency = figure_text.strip()
    if latency not in REQUEST_LATENCIES:
        raise ValueError(f"{latency!r} is not a latency of single requests{_similar_bound(latency)}")
    if not rest or rest[0] not in ("<", "<="):
        raise ValueError("a bound on a latency needs < or <= and a time")
    bound_s, unit = _bound(rest[1].strip(), latency)
    if bound_s <= 0:
        raise ValueError("the bound must be greater than 0")
    return Objective(text, latency, "", rest[0], bound_s, unit)


def _similar_bound(text: str) -> str:
    """Return the end of an error message, such as `; did you mean ttft?`, or an empty string if there is no suggestion.

    `text` is the name in a bound of --goodput, but no latency has this name. The suggestion is a latency with a similar
    name. For `ttft:500`, a bound as vLLM writes it, the suggestion is `'ttft < 500ms'`.
    """
    from_vllm = re.fullmatch(r"(\w+):(\d+(?:\.\d+)?)", text)  # `--goodput ttft:500` of vLLM, in ms
    name = suggest_figure(from_vllm[1] if from_vllm else text, statistic=False)
    if name not in REQUEST_LATENCIES:
        return ""
    return did_you_mean(f"'{name} < {from_vllm[2]}ms'" if from_vllm else name)


def _objective(text: str) -> Objective:
    figure_text, *rest = _COMPARISON.split(text, maxsplit=1)
    if not rest:
        raise ValueError(f"the comparison is missing; use one of {', '.join(COMPARISONS)}")
    part = part_of(text)
    _, colon, figure_text = figure_text.rpartition(":")
    if colon and not part:
        raise ValueError("no class of traffic, model or replica is named before the colon")
    figure_text, drift = _without_drift(figure_text.strip())
    figure, dot, statistic = figure_text.strip().partition(".")
    if figure in LATENCIES:
        if not statistic:
            raise ValueError(f"{figure} is a distribution; name one of its statistics, such as {figure}.p99")
        match = _PERCENTILE.fullmatch(statistic)
        if statistic not in STATISTICS and not (match and 1 <= float(match[1]) <= 99.9):
            similar = did_you_mean(suggest_figure(f"{figure}.{statistic}") if statistic.isalpha() else None)
            raise ValueError(f"{statistic!r} is not a statistic; use p1 to p99.9 or {', '.join(STATISTICS)}{similar}")
    elif figure not in (*STATES, *RATES, SKEW, *GOODPUT_FIGURES, *RESPONSE_SHARES, CACHED, *RUN_SHARES):
        name = figure_text.strip()
        raise ValueError(f"{name!r} is not a figure of a run{did_you_mean(suggest_figure(name))}")
    elif dot:
        raise ValueError(f"{figure} is a single figure; remove {dot + statistic!r}")
    if drift and figure not in (*LATENCIES, *RATES):
        raise ValueError(f"{figure} has no drift; name a latency such as ttft.p99, or one of {', '.join(RATES)}")
    comparison, right = rest
    bound, unit = _bound(right.strip(), figure, drift=drift)
    return Objective(text, figure, statistic, comparison, bound, unit, part, drift)


def _without_drift(figure_text: str) -> tuple[str, bool]:
    """Return the name of a figure without the word `drift` at its end, and True if the word was there.

    For example, `ttft.p99 drift` gives `ttft.p99` and True.
    """
    name, _, word = figure_text.rpartition(" ")
    return (name.strip(), True) if word == DRIFT and name else (figure_text, False)


def _bound(text: str, figure: str, *, drift: bool = False) -> tuple[float, Unit]:
    match = _BOUND.fullmatch(text)
    units = PER_HOUR if drift else _units_of(figure)
    if units is TIME and _LONG_TIME.search(text):
        return parse_seconds(text), "s"
    if match is None:
        raise ValueError(f"{text!r} is not a bound; use a number with a unit")
    number, unit = match.groups()
    if drift and unit not in units:
        raise ValueError(f"a drift is a share per hour: write {number}%/h")
    if not drift and number[0] in "+-":
        raise ValueError(f"{text!r} is not a bound; use a number with a unit")
    if not unit and units is TIME:
        raise ValueError(f"{number} has no unit: write {number}ms or {number}s")
    if not unit and units is SHARE:
        raise ValueError(f"{number} has no unit: write {number}%")
    if unit not in units:
        allowed = ", ".join(name or "no unit" for name in units)
        raise ValueError(f"{unit!r} is not a unit of {figure}; use {allowed}")
    power, result = units[unit]
    if result == "share" and Decimal(number) > 100:
        raise ValueError("a share is at most 100%")
    if result == "requests" and Decimal(number) % 1:
        raise ValueError(f"{number!r} is not a number of requests; write {number}% for a share")
    return float(Decimal(number).scaleb(power)), result


def _units_of(figure: str) -> Mapping[str, tuple[int, Unit]]:
    """Return the units in which the user may write a bound on this figure.

    The keys are the units as the user writes them. Each value has two parts: the power of ten by which the number is
    multiplied, and the unit of the result. For example, `ms` has the value `(-3, "s")`.
    """
    if figure in LATENCIES and not LATENCIES[figure].timed:
        return TOKENS if LATENCIES[figure].unit == "tokens" else RATIO
    if figure in LATENCIES or figure == SKEW:
        return TIME
    if figure in ("attainment", *RESPONSE_SHARES, CACHED, *RUN_SHARES):
        return SHARE
    return NUMBER if figure in STATES else RATE
