"""Holds a run against its objectives: pass, fail, or cannot tell, each with the evidence it rests on.

An objective on a percentile, a mean or a share speaks of the server, of which a run is a sample: it passes when the
whole interval around the figure keeps to the bound, fails when the whole interval breaks it, and cannot be told
otherwise. Counts, extremes, rates and the skew speak of this one run: the figure itself is held against the bound, as
is a share against 0 % or 100 %, which no sample could prove. Latencies and rates are those of the measuring
window, counts and shares those of the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from analysis import stats, words
from analysis.formulas import group_offsets
from analysis.frame import Floats, Frame, Integers
from analysis.metrics import METRICS
from analysis.objectives import ATTAINMENT, GOODPUT, LATENCIES, SKEW, STATES, Objective, Unit

Outcome = Literal["pass", "fail", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one objective."""

    objective: str
    """As it was written."""
    figure: str
    verdict: Outcome
    unit: Unit
    """Of the next three."""
    bound: float
    measured: float | None
    """None where the run has no such figure, which fails."""
    ci95: tuple[float | None, float | None] | None
    """None for a figure of this run alone; an end is None where no sample lies far enough out to bound it."""
    requests: int
    """Those it rests on: for a latency the complete ones, else all."""
    left_out: int
    """For a latency, the requests that were due in the window and not complete."""
    requests_needed: int | None
    """When it cannot be told, about how many requests would tell if they went on like these; None: no such number."""
    said: str
    """The measured figure, its interval, and what would tell, in words."""


@dataclass(frozen=True, slots=True)
class _Evidence:
    """A figure and the interval around it, whose ends are the figure itself where it speaks of this run alone."""

    measured: float
    low: float
    high: float
    requests: int
    requests_needed: int | None = None

    @property
    def exact(self) -> bool:
        return self.low == self.measured == self.high


def judge(objectives: Iterable[Objective], frame: Frame, summary: words.Summary) -> list[dict[str, Any]]:
    """One Verdict for each objective, as the entries of `objectives` in summary.json.

    `frame` is the run's, with its window, and `summary` its summary.json.
    """
    lost = int((frame.inside & ~frame.complete).sum()) + summary["requests"]["unrecorded"]
    return [asdict(_verdict(objective, _evidence(objective, frame, summary), lost)) for objective in objectives]


def _verdict(objective: Objective, found: _Evidence | None, lost: int) -> Verdict:
    verdict: Outcome = "fail" if found is None else _side(objective, found)
    return Verdict(
        objective=objective.text,
        figure=objective.figure,
        verdict=verdict,
        unit=objective.unit,
        bound=objective.bound,
        measured=None if found is None else _finite(found.measured),
        ci95=None if found is None or found.exact else (_finite(found.low), _finite(found.high)),
        requests=0 if found is None else found.requests,
        left_out=lost if objective.figure in LATENCIES else 0,
        requests_needed=found.requests_needed if found and verdict == "cannot tell" else None,
        said=_said(objective, found, verdict),
    )


def _side(objective: Objective, found: _Evidence) -> Outcome:
    kept = {objective.keeps(found.low), objective.keeps(found.high)}
    return "cannot tell" if len(kept) == 2 else "pass" if True in kept else "fail"


def _evidence(objective: Objective, frame: Frame, summary: words.Summary) -> _Evidence | None:
    if objective.figure in LATENCIES:
        return _latency(objective, frame)
    if objective.figure in STATES:
        return _ended(objective, summary)
    if objective.figure in (GOODPUT, ATTAINMENT):
        return _good(objective, summary.get("goodput"))
    figure = summary["burst"]["skew_s"] if objective.figure == SKEW else summary["throughput"][objective.figure]
    return None if figure is None else _Evidence(figure, figure, figure, _asked(summary))


def _latency(objective: Objective, frame: Frame) -> _Evidence | None:
    metric = METRICS[f"{objective.figure}_s"]
    samples, offsets = metric.values(frame), group_offsets(metric.per, frame)
    if len(samples) == 0:
        return None
    requests = len(samples) if offsets is None else int(np.count_nonzero(np.diff(offsets)))
    if objective.percentile is not None:
        return _percentile(objective, objective.percentile, samples, offsets, requests)
    if objective.statistic == "mean":
        return _mean(objective, samples, offsets, requests)
    extreme = float(samples.min() if objective.statistic == "min" else samples.max())
    return _Evidence(extreme, extreme, extreme, requests)


def _percentile(
    objective: Objective, share: float, samples: Floats, offsets: Integers | None, requests: int
) -> _Evidence:
    """By order statistics. That a percentile lies below a bound says that at least its share of samples does, so the
    number that would tell is the number that tells a share."""
    ordered = np.sort(samples)
    size = stats.effective_size(samples, offsets, share, ordered)
    low, high = stats.interval(ordered, share, size)
    below = samples < objective.bound if objective.comparison in ("<", ">=") else samples <= objective.bound
    needed = stats.samples_to_tell(float(below.mean()), share, size)
    return _Evidence(
        stats.percentile(ordered, share),
        -math.inf if low is None else low,
        math.inf if high is None else high,
        requests,
        None if needed is None else math.ceil(needed * requests / size),
    )


def _mean(objective: Objective, samples: Floats, offsets: Integers | None, requests: int) -> _Evidence:
    """By Student's t. The interval narrows with the root of the number of requests (Cochran, section 4.6)."""
    mean = float(samples.mean())
    low, high = stats.mean_interval(samples, offsets)
    needed = stats.FREEDOM_LEAST + 1
    if math.isfinite(high):
        distance = abs(mean - objective.bound)
        most = requests * ((high - mean) / distance) ** 2 if distance else math.inf
        needed = math.ceil(min(most, stats.SAMPLES_MOST + 1))
    return _Evidence(mean, low, high, requests, needed if needed <= stats.SAMPLES_MOST else None)


def _ended(objective: Objective, summary: words.Summary) -> _Evidence | None:
    """Counts as they are; shares of all requests asked, by Clopper and Pearson."""
    count, total = summary["requests"][objective.figure], _asked(summary)
    if objective.unit == "requests":
        return _Evidence(count, count, count, total)
    if total == 0:
        return None
    share = count / total
    if objective.bound in (0, 1):
        return _Evidence(share, share, share, total)
    needed = stats.samples_to_tell(share, objective.bound, total)
    return _Evidence(share, *stats.share_interval(count, total), total, needed)


def _good(objective: Objective, found: words.Summary | None) -> _Evidence | None:
    """Goodput is of this run; attainment a share of requests. None where no --goodput says what good is."""
    if found is None or not found["requests"]:
        return None
    total = found["requests"]
    if objective.figure == GOODPUT:
        return None if found["per_s"] is None else _Evidence(found["per_s"], found["per_s"], found["per_s"], total)
    share = found["attainment"]
    if objective.bound in (0, 1):
        return _Evidence(share, share, share, total)
    low, high = found["attainment_ci95"]
    return _Evidence(share, low, high, total, stats.samples_to_tell(share, objective.bound, total))


def _asked(summary: words.Summary) -> int:
    requests = summary["requests"]
    return int(requests["sent"] + requests["dropped"] + requests["unrecorded"])


def _finite(value: float) -> float | None:
    return round(value, stats.DECIMALS) if math.isfinite(value) else None


def _said(objective: Objective, found: _Evidence | None, verdict: Outcome) -> str:
    latency = objective.figure in LATENCIES
    if found is None:
        return "no complete request has one" if latency else "the run has no such figure"
    said = _figures(objective, found)
    if verdict != "cannot tell":
        return said
    if found.requests_needed is None:
        return f"{said}; too close to the bound for any number of requests to tell"
    noun = "complete request" if latency else "request"
    return f"{said}; about {words.count(found.requests_needed, noun)} would tell"


def _figures(objective: Objective, found: _Evidence) -> str:
    """The figure and its interval, in the unit in which the figure reads best."""
    if objective.unit == "requests":
        return words.count(int(found.measured), "request")
    if objective.unit == "per second":
        return f"{words.significant(found.measured, 4)} per second"
    share = objective.unit == "share"
    factor, unit = (100, "%") if share else words.scale_of(found.measured)
    measured, low, high = (_number(value * factor, share) for value in (found.measured, found.low, found.high))
    if found.exact:
        return f"{measured} {unit}"
    if math.isfinite(found.low) and math.isfinite(found.high):
        return f"{measured} {unit}, 95 %: {low} to {high} {unit}"
    if math.isfinite(found.low):
        return f"{measured} {unit}, 95 %: {low} {unit} or more"
    return f"{measured} {unit}, 95 %: " + (f"{high} {unit} or less" if math.isfinite(found.high) else "anything")


def _number(value: float, share: bool) -> str:
    """A share near 100 % needs more digits than a duration to differ from it."""
    if not math.isfinite(value):
        return words.UNKNOWN
    return f"{value:.5g}" if share else words.significant(value, 4)
