"""Service-level objectives of a run: which objectives it keeps (--assert), how many of its requests were good
(--goodput), and the same for CI systems (--junit).

An objective on a percentile, a mean or a share speaks of the server, of which a run is a sample: it passes when the
whole interval around the figure keeps to the bound, fails when the whole interval breaks it, and is inconclusive
otherwise. Counts, extremes, rates and the skew speak of this one run: the figure itself is held against the bound, as
is a share against 0 % or 100 %, which no sample could prove. Latencies and rates are those of the measuring
window, counts and shares those of the whole run.

A request is good when it is complete and keeps every bound asked for. Its *need* is the factor by which all bounds
would have to be scaled for it to keep them: the largest of its latencies over their bounds; infinite where it is not
complete. So the share of needs of at most x is the attainment with all bounds scaled by x: one sorted array is the
whole curve, and its 90 % point is what 90 % of the requests would have met. A latency that a request does not have
(TPOT of a single token) binds it to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from xml.etree import ElementTree as Xml

import msgspec
import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.format import UNKNOWN, pluralise, scale_of, server_label, significant, simulated
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.objectives import (
    GOODPUT_FIGURES,
    LATENCIES,
    SKEW,
    STATES,
    AttainmentCurve,
    BoundsMet,
    Goodput,
    Objective,
    ObjectiveVerdict,
)
from loadgen.analysis.report.findings import client_sentence, findings, measured_text, outcome_sentence
from loadgen.analysis.summary import Summary

MAX_POINTS = 300
"""Of the attainment curve."""
SHARES = (0.5, 0.9, 0.95, 0.99)
"""Of the requests: what so many would have met."""
RUN_PROPERTIES = ("id", "label", "started_at", "arrivals", "seed", "command", "version")
SERVER_PROPERTIES = ("name", "version", "model", "url", "endpoint", "simulated")
"""What JUnit XML says of a run."""


class _Evidence(msgspec.Struct, frozen=True):
    """A figure and the interval around it, whose ends are the figure itself where it speaks of this run alone."""

    measured: float
    low: float
    high: float
    requests: int
    requests_needed: int | None = None

    @property
    def exact(self) -> bool:
        return self.low == self.measured == self.high


def judge(objectives: Iterable[Objective], frame: Frame, summary: Summary) -> list[ObjectiveVerdict]:
    """What became of each objective. `frame` is the run's, with its window."""
    lost = int((frame.inside & ~frame.complete).sum()) + summary.requests.unrecorded
    return [_verdict(objective, _evidence(objective, frame, summary), lost) for objective in objectives]


def _verdict(objective: Objective, found: _Evidence | None, lost: int) -> ObjectiveVerdict:
    verdict: Literal["pass", "fail", "inconclusive"] = "fail"
    if found is not None:
        retained = {objective.satisfied_by(found.low), objective.satisfied_by(found.high)}
        verdict = "inconclusive" if len(retained) == 2 else "pass" if True in retained else "fail"
    return ObjectiveVerdict(
        objective=objective.text,
        figure=objective.figure,
        verdict=verdict,
        unit=objective.unit,
        bound=objective.bound,
        measured=None if found is None else _finite(found.measured),
        ci95=None if found is None or found.exact else (_finite(found.low), _finite(found.high)),
        requests=0 if found is None else found.requests,
        left_out=lost if objective.figure in LATENCIES else 0,
        requests_needed=found.requests_needed if found and verdict == "inconclusive" else None,
        said=_said(objective, found, verdict),
    )


def _evidence(objective: Objective, frame: Frame, summary: Summary) -> _Evidence | None:
    if objective.figure in LATENCIES:
        return _latency(objective, frame)
    if objective.figure in STATES:
        number, requested = getattr(summary.requests, objective.figure), summary.requests.planned
        return (
            _of_this_run(number, requested)
            if objective.unit == "requests"
            else _share(number, requested, objective.bound)
        )
    if objective.figure in GOODPUT_FIGURES:
        result = summary.goodput
        if result is None or not result.requests:  # no --goodput says what good is
            return None
        if objective.figure == "goodput":
            return _of_this_run(result.per_s, result.requests)
        return _share(result.good, result.requests, objective.bound)
    figure = summary.burst.skew_s if objective.figure == SKEW else getattr(summary.throughput, objective.figure)
    return _of_this_run(figure, summary.requests.planned)


def _of_this_run(figure: float | None, requests: int) -> _Evidence | None:
    return None if figure is None else _Evidence(figure, figure, figure, requests)


def _latency(objective: Objective, frame: Frame) -> _Evidence | None:
    """A percentile by order statistics: that it lies below a bound says that at least its share of samples does, so the
    number that would tell is the number that tells a share. A mean by Student's t, whose interval narrows with the root
    of the number of requests (Cochran, section 4.6)."""
    metric, bound = LATENCIES[objective.figure], objective.bound
    samples, offsets = metric.values(frame), metric.groups(frame)
    if len(samples) == 0:
        return None
    requests = len(samples) if offsets is None else int(np.count_nonzero(np.diff(offsets)))
    if (rank := objective.percentile) is not None:
        ordered = np.sort(samples)
        size = stats.effective_size(samples, offsets, rank, ordered)
        low, high = stats.interval(ordered, rank, size)
        below = samples < bound if objective.comparison in ("<", ">=") else samples <= bound
        needed = stats.samples_to_decide(float(below.mean()), rank, size)
        return _Evidence(
            stats.percentile(ordered, rank),
            -math.inf if low is None else low,
            math.inf if high is None else high,
            requests,
            None if needed is None else math.ceil(needed * requests / size),
        )
    if objective.statistic != "mean":
        return _of_this_run(float(samples.min() if objective.statistic == "min" else samples.max()), requests)
    mean, (minimum, maximum) = float(samples.mean()), stats.mean_interval(samples, offsets)
    needed = stats.MIN_DEGREES_OF_FREEDOM + 1
    if math.isfinite(maximum):
        factor = requests * ((maximum - mean) / abs(mean - bound)) ** 2 if mean != bound else math.inf
        needed = math.ceil(min(factor, stats.MAX_USEFUL_SAMPLES + 1))
    return _Evidence(mean, minimum, maximum, requests, needed if needed <= stats.MAX_USEFUL_SAMPLES else None)


def _share(count: int, total: int, bound: float) -> _Evidence | None:
    """By Clopper and Pearson."""
    if total == 0:
        return None
    share = count / total
    if bound in (0, 1):
        return _of_this_run(share, total)
    return _Evidence(share, *stats.share_interval(count, total), total, stats.samples_to_decide(share, bound, total))


def _finite(value: float) -> float | None:
    return stats.round_to_ns(value) if math.isfinite(value) else None


def _said(objective: Objective, found: _Evidence | None, verdict: str) -> str:
    latency = objective.figure in LATENCIES
    if found is None:
        return "no complete request has one" if latency else "the run has no such figure"
    said = _figures(objective, found)
    if verdict != "inconclusive":
        return said
    if found.requests_needed is None:
        return f"{said}; too close to the bound for any number of requests to tell"
    noun = "complete request" if latency else "request"
    return f"{said}; about {pluralise(found.requests_needed, noun)} would tell"


def _figures(objective: Objective, found: _Evidence) -> str:
    """The figure and its interval, in the unit in which the figure reads best."""
    if objective.unit == "requests":
        return pluralise(int(found.measured), "request")
    if objective.unit == "per second":
        return f"{significant(found.measured, 4)} per second"
    # A share near 100 % needs more digits than a duration to differ from it.
    share = objective.unit == "share"
    factor, unit = (100, "%") if share else scale_of(found.measured)
    measured, low, high = (
        UNKNOWN if not math.isfinite(value) else f"{value * factor:.5g}" if share else significant(value * factor, 4)
        for value in (found.measured, found.low, found.high)
    )
    if found.exact:
        return f"{measured} {unit}"
    if math.isfinite(found.low) and math.isfinite(found.high):
        return f"{measured} {unit}, 95 %: {low} to {high} {unit}"
    if math.isfinite(found.low):
        return f"{measured} {unit}, 95 %: {low} {unit} or more"
    return f"{measured} {unit}, 95 %: " + (f"{high} {unit} or less" if math.isfinite(found.high) else "anything")


def goodput(frame: Frame, bounds: Sequence[Objective], unrecorded: int = 0) -> Goodput:
    """The `goodput` part of the summary."""
    needed = bound_scale(frame, bounds)
    everyone = np.sort(np.concatenate((needed[frame.inside], np.full(unrecorded, math.inf))))
    total, good, span = len(everyone), int((everyone <= 1).sum()), frame.span_ns
    ended = int((frame.measured & (needed <= 1) & frame.within(frame.end_ns)).sum())
    alone = {bound.text: int((bound_scale(frame, [bound])[frame.inside] <= 1).sum()) for bound in bounds}
    return Goodput(
        bounds=[bound.text for bound in bounds],
        good=good,
        requests=total,
        attainment=good / total if total else None,
        attainment_ci95=stats.share_interval(good, total),
        per_s=None if span is None else stats.round_to_ns(ended / (span[1] - span[0]) * 1e9),
        each={text: number / total if total else None for text, number in alone.items()},
        met_by={f"{share:.0%}": _met_by(everyone, share, bounds) for share in SHARES},
        curve=attainment_curve(everyone),
    )


def bound_scale(frame: Frame, bounds: Sequence[Objective]) -> Floats:
    """Per request the scale of all bounds at which it keeps them; infinite for one that is not complete."""
    result = np.zeros(len(frame))
    for bound in bounds:
        ratio = LATENCIES[bound.figure].rows(frame) / bound.bound
        result = np.fmax(result, np.where(np.isnan(ratio), 0.0, ratio))
    return np.where(frame.complete, result, math.inf)


def attainment_curve(ordered: Floats) -> AttainmentCurve:
    """Attainment over the scale of the bounds, from sorted needs: x and y of its steps, thinned evenly where they are
    many. It ends below 1 where some requests would never be good."""
    finite = ordered[np.isfinite(ordered)]
    ranks = np.unique(np.linspace(0, len(finite) - 1, min(len(finite), MAX_POINTS)).astype(np.int64))
    x, y = finite[ranks], (ranks + 1) / max(1, len(ordered))
    return AttainmentCurve(x=np.round(x, 6).tolist(), y=np.round(y, 6).tolist(), n=len(ordered), drawn=len(ranks))


def _met_by(ordered: Floats, share: float, bounds: Sequence[Objective]) -> BoundsMet | None:
    """The least scale at which at least this share is good: an order statistic, so that it is exact."""
    index = math.ceil(share * len(ordered)) - 1
    if index < 0 or not math.isfinite(ordered[index]):
        return None
    scale = float(ordered[index])
    bounds_s = {bound.figure: stats.round_to_ns(scale * bound.bound) for bound in bounds}
    return BoundsMet(scale=float(f"{scale:.6g}"), bounds_s=bounds_s)


def junit(summaries: Sequence[Summary]) -> str:
    """Objectives as JUnit XML, which every CI system shows: one test suite for each run, one test case for each
    objective; what is inconclusive counts as skipped. There is no standard; this keeps to the strictest schema in use,
    that of Ant's reports (windyroad/JUnit-Schema, JUnit.xsd), in which all attributes below are required and in this
    order of elements."""
    root = Xml.Element("testsuites")
    for index, summary in enumerate(summaries):
        run = summary.run
        verdicts = [objective.verdict for objective in summary.objectives]
        mark = simulated(summary)
        try:  # UTC to the second and without a zone, as the schema has it
            started = datetime.fromisoformat(run.started_at).astimezone(UTC)
        except ValueError:  # the run file holds no time
            started = datetime.fromtimestamp(0, UTC)
        suite = _element(
            root,
            "testsuite",
            id=index,
            name=" ".join(part for part in (mark, server_label(summary), run.id) if part),
            package="loadgen",
            hostname="localhost",
            timestamp=started.strftime("%Y-%m-%dT%H:%M:%S"),
            time=run.duration_s,
            tests=len(verdicts),
            failures=verdicts.count("fail"),
            errors=0,
            skipped=verdicts.count("inconclusive"),
        )
        properties = Xml.SubElement(suite, "properties")
        known = {f"run.{key}": getattr(run, key) for key in RUN_PROPERTIES}
        known |= {f"server.{key}": getattr(summary.server, key) for key in SERVER_PROPERTIES}
        for key, value in (known | {"client.verdict": summary.client.verdict}).items():
            if value is not None:
                _element(properties, "property", name=key, value=value)
        group = " ".join(part for part in (f"loadgen.{summary.server.name}", mark) if part)
        for objective in summary.objectives:
            case = _element(suite, "testcase", name=objective.objective, classname=group, time=0)
            if objective.verdict == "fail":
                _element(case, "failure", message=objective.said, type="objective").text = _text(
                    f"{objective.objective}: {measured_text(objective)}"
                )
            elif objective.verdict == "inconclusive":
                _element(case, "skipped", message=objective.said)
        Xml.SubElement(suite, "system-out").text = _text(f"{outcome_sentence(summary)}\n{client_sentence(summary)}")
        warnings = [finding.sentence for finding in findings(summary) if finding.level in ("warning", "error")]
        Xml.SubElement(suite, "system-err").text = _text("\n".join(warnings))
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="unicode")}\n'


def _element(parent: Xml.Element, tag: str, **attributes: Any) -> Xml.Element:
    return Xml.SubElement(parent, tag, {key: _text(value) for key, value in attributes.items()})


def _text(value: Any) -> str:
    """Without what XML 1.0 cannot hold even when escaped (section 2.2): control characters, surrogates, U+FFFE."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in str(value))
