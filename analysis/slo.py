"""Judges a run by its objectives (--assert), and writes the verdicts as JUnit XML (--junit).

An objective sets a bound for a figure of the run, such as `ttft.p99 < 500ms`. The objective passes if the measured
figure meets the bound. It fails if the figure violates the bound, or if the run does not have the figure.

A percentile, a mean or a share has a confidence interval, because the objective is about the server, and the run is
only a sample. If the bound lies inside this interval, the verdict is also *marginal*: a repetition of the run might be
judged differently.

With a required confidence (--confidence), the whole interval decides:

- pass: the whole interval meets the bound.
- fail: the whole interval violates the bound.
- inconclusive: one end of the interval meets the bound and the other violates it.

An objective may also limit the drift of a figure, which is its change per hour. The whole interval always decides about
a drift, because a short run shows little about the change per hour. The verdict is inconclusive if the run is too short
to measure the drift.

Some figures describe only this run and have no interval: counts, minima, maxima, rates, the burst skew and the share of
cached prompt tokens. Any other share has no interval if its bound is 0% or 100%, because no sample could prove such a
bound.

Latencies and rates cover the measurement window. Counts and shares of request states cover the whole run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal
from xml.etree import ElementTree as Xml

import msgspec
import numpy as np

from loadgen.analysis import stats
from loadgen.analysis.cached_prompts import count_in_responses
from loadgen.analysis.drift import drift_windows, first_beyond, first_missed, measure_drift, reason_without_drift
from loadgen.analysis.format import (
    UNKNOWN,
    elapsed,
    interval_text,
    pluralise,
    scale_of,
    server_label,
    significant,
    simulated,
)
from loadgen.analysis.frame import Frame
from loadgen.analysis.frame_parts import find_part
from loadgen.analysis.objectives import (
    CACHED,
    GOODPUT_FIGURES,
    LATENCIES,
    RATES,
    RESPONSE_SHARES,
    RUN_SHARES,
    SKEW,
    STATES,
    Goodput,
    Objective,
    ObjectiveVerdict,
)
from loadgen.analysis.reasoning import Answered
from loadgen.analysis.report.findings import client_sentence, findings, measured_text, outcome_sentence
from loadgen.analysis.shares import Counts, counts_of
from loadgen.analysis.summary import PartFigures, RequestCounts, Summary, Throughput
from loadgen.analysis.time_windows import WindowSeries
from loadgen.analysis.valid_outputs import ValidOutputs

RUN_PROPERTIES = ("id", "label", "started_at", "arrivals", "seed", "command", "version")
SERVER_PROPERTIES = ("name", "version", "model", "url", "endpoint", "simulated")
"""Names of the run's and the server's properties in JUnit XML."""


class _Evidence(msgspec.Struct, frozen=True):
    """A measured figure and its confidence interval.

    A figure that describes only this run, such as a maximum, has no interval. `low` and `high` then equal the figure.
    """

    measured: float
    low: float
    high: float
    requests: int
    requests_needed: int | None = None
    """Number of requests that would move the bound out of the interval, if the bound lies inside it."""

    @property
    def exact(self) -> bool:
        return self.low == self.measured == self.high


class _JudgedPart(msgspec.Struct):
    """The requests that an objective judges: those of the whole run, of one class of traffic, of one model or of one
    replica.
    """

    frame: Frame
    requests: RequestCounts
    throughput: Throughput
    goodput: Goodput | None
    outputs: ValidOutputs | None
    answered: Answered | None
    skew_s: float | None
    cached_share: float | None
    """Share of prompt tokens that came from the server's prefix cache. None if the server does not report it."""
    run_shares: dict[str, Counts] = {}
    """Numerator and denominator of the shares in RUN_SHARES. Empty for a part of a run."""

    @property
    def incomplete(self) -> int:
        """The number of requests that have no latency, because they are not complete or have no Record."""
        return int((self.frame.inside & ~self.frame.complete).sum()) + self.requests.unrecorded


def judge(
    objectives: Iterable[Objective], frame: Frame, summary: Summary, confidence: float | None = None
) -> list[ObjectiveVerdict]:
    """Return the verdict on each objective. `frame` contains the run's Records and its measurement window.

    `confidence` is the value of --confidence. With a value, the whole interval with this confidence must meet the
    bound. With None, the measured figure decides.
    """
    cached = None if summary.cached_prompts is None else summary.cached_prompts.share
    everything = _judged_part(frame, summary, summary.burst.skew_s, cached)
    if summary.canaries:
        everything.run_shares["canary"] = summary.canaries.same, summary.canaries.answers
    if summary.expected_texts:
        everything.run_shares["expected"] = summary.expected_texts.expected, summary.expected_texts.checked
    judged: dict[str, _JudgedPart | None] = {"": everything}
    verdicts = []
    for objective in objectives:
        if objective.part not in judged:
            judged[objective.part] = _find_judged(objective.part, frame, summary)
        part = judged[objective.part]
        if objective.drift:
            verdicts.append(_judge_drift(objective, part, confidence or stats.CONFIDENCE))
            continue
        evidence = None if part is None else _evidence(objective, part, confidence or stats.CONFIDENCE)
        verdict = _verdict(objective, evidence, 0 if part is None else part.incomplete, confidence)
        if verdict.verdict == "fail" and part is not None:
            _add_first_missed(verdict, objective, part.frame)
        verdicts.append(verdict)
    return verdicts


def _judge_drift(objective: Objective, part: _JudgedPart | None, confidence: float) -> ObjectiveVerdict:
    """Return the verdict on an objective that limits the drift of a figure, such as `ttft.p99 drift < 5%/h`.

    `part` is the part of the run that the objective judges. If `part` is None or has no such figure, the verdict is
    `fail`. `confidence` is the confidence of the drift's interval. The verdict is `inconclusive` if only one end of
    this interval meets the bound, or if the run is too short to measure the drift.
    """
    verdict: Literal["pass", "fail", "inconclusive"] = "inconclusive"
    first_bad_s = None
    series: WindowSeries | str = ""
    drift = None
    if part is not None and _has_figure(objective, part):
        series = drift_windows(objective, part.frame)
        drift = None if isinstance(series, str) else measure_drift(series, confidence)
    else:
        verdict, series = "fail", _missing_text(objective)
    if isinstance(series, str):
        said = series
    elif drift is None:
        said = reason_without_drift(series)
    else:
        ends = objective.satisfied_by(drift.low), objective.satisfied_by(drift.high)
        if ends[0] == ends[1]:
            verdict = "pass" if ends[0] else "fail"
        numbers = [f"{value * 100:+.3g}" for value in (drift.per_hour, drift.low, drift.high)]
        said = f"{numbers[0]}%/h, {confidence * 100:.4g}% CI {numbers[1]} to {numbers[2]}%/h"
        if verdict == "fail":
            first_bad_s = first_beyond(series, objective, drift)
            said += _since_text(first_bad_s)
        elif verdict == "inconclusive":
            said += "; a longer run would decide"
    return ObjectiveVerdict(
        objective=objective.text,
        figure=objective.figure,
        verdict=verdict,
        marginal=drift is not None and verdict == "inconclusive",
        whole_interval=True,
        unit=objective.unit,
        bound=objective.bound,
        measured=None if drift is None else drift.per_hour,
        interval=None if drift is None else (drift.low, drift.high),
        confidence=confidence,
        requests=0 if part is None else int(part.frame.sampled.sum()),
        left_out=0 if part is None or objective.figure not in LATENCIES else part.incomplete,
        requests_needed=None,
        said=said,
        first_bad_s=first_bad_s,
    )


def _has_figure(objective: Objective, part: _JudgedPart) -> bool:
    """Return True if the requests of `part` have a value of the figure that `objective` limits.

    For example, requests without streamed tokens have no TPOT.
    """
    if objective.figure in LATENCIES:
        return len(LATENCIES[objective.figure].values(part.frame)) > 0
    return getattr(part.throughput, objective.figure) is not None


def _missing_text(objective: Objective) -> str:
    """Return the reason why an objective cannot be judged, such as `the run does not have this figure`.

    If the objective names a part of the run, such as a class of traffic, the text may name this part instead of the
    run.
    """
    if objective.figure in LATENCIES:
        return "no complete request has this latency"
    return f"{objective.part or 'the run'} does not have this figure"


def _add_first_missed(verdict: ObjectiveVerdict, objective: Objective, frame: Frame) -> None:
    """Store in `verdict` the first time window of the run in which a failed objective was missed.

    The start and the end of the window are stored in `first_bad_s`, and the text of the verdict states them. Nothing is
    stored in these cases:

    - The figure of the objective is neither a latency nor a rate.
    - The run is too short for time windows.
    - The figure missed the bound from the beginning.
    - The figure never missed the bound in several windows in a row.
    """
    if objective.figure not in (*LATENCIES, *RATES):
        return
    series = drift_windows(objective, frame)
    if not isinstance(series, str):
        verdict.first_bad_s = first_missed(series, objective)
        verdict.said += _since_text(verdict.first_bad_s)


def _since_text(window_s: tuple[float, float] | None) -> str:
    """Return the end of a sentence about a failed objective, such as `; first missed from 30 s to 45 s`.

    `window_s` is the time window in which the objective was first missed, or None if it is unknown. The result is then
    "".
    """
    if window_s is None:
        return ""
    return f"; first missed from {elapsed(window_s[0])} to {elapsed(window_s[1])}"


def _find_judged(name: str, frame: Frame, summary: Summary) -> _JudgedPart | None:
    """Return the class of traffic, the model or the replica with this name, or None if the run has no such part."""
    rows = find_part(frame, name)
    figures = next((part for part in (*summary.traffic, *summary.models, *summary.replicas) if part.name == name), None)
    if rows is None or figures is None:
        return None
    cached, prompt_tokens = count_in_responses(rows)
    return _judged_part(rows, figures, figures.skew_s, cached / prompt_tokens if prompt_tokens else None)


def _judged_part(
    frame: Frame, figures: Summary | PartFigures, skew_s: float | None, cached_share: float | None
) -> _JudgedPart:
    return _JudgedPart(
        frame,
        figures.requests,
        figures.throughput,
        figures.goodput,
        figures.outputs,
        figures.answered,
        skew_s,
        cached_share,
    )


def _verdict(
    objective: Objective, evidence: _Evidence | None, incomplete: int, confidence: float | None
) -> ObjectiveVerdict:
    verdict: Literal["pass", "fail", "inconclusive"] = "fail"
    marginal = False
    if evidence is not None:
        marginal = objective.satisfied_by(evidence.low) != objective.satisfied_by(evidence.high)
        if marginal and confidence is not None:
            verdict = "inconclusive"
        elif objective.satisfied_by(evidence.measured):
            verdict = "pass"
    level = confidence or stats.CONFIDENCE
    return ObjectiveVerdict(
        objective=objective.text,
        figure=objective.figure,
        verdict=verdict,
        marginal=marginal,
        whole_interval=confidence is not None,
        unit=objective.unit,
        bound=objective.bound,
        measured=None if evidence is None else _finite(evidence.measured),
        interval=None if evidence is None or evidence.exact else (_finite(evidence.low), _finite(evidence.high)),
        confidence=level,
        requests=0 if evidence is None else evidence.requests,
        left_out=incomplete if objective.figure in LATENCIES else 0,
        requests_needed=evidence.requests_needed if evidence and marginal else None,
        said=_explanation(objective, evidence, verdict, level),
    )


def _evidence(objective: Objective, part: _JudgedPart, confidence: float) -> _Evidence | None:
    if objective.figure in LATENCIES:
        return _latency(objective, part.frame, confidence)
    if objective.figure in STATES:
        count, planned = getattr(part.requests, objective.figure), part.requests.planned
        if objective.unit == "requests":
            return _of_this_run(count, planned)
        return _share(count, planned, objective.bound, confidence)
    if objective.figure in (*RESPONSE_SHARES, *RUN_SHARES):
        is_whole = objective.figure in RUN_SHARES
        good, total = part.run_shares.get(objective.figure, (0, 0)) if is_whole else counts_of(objective.figure, part)
        return _share(good, total, objective.bound, confidence)
    if objective.figure in GOODPUT_FIGURES:
        return _goodput_evidence(objective, part.goodput, confidence)
    own = {SKEW: part.skew_s, CACHED: part.cached_share}
    figure = own[objective.figure] if objective.figure in own else getattr(part.throughput, objective.figure)
    return _of_this_run(figure, part.requests.planned)


def _goodput_evidence(objective: Objective, goodput: Goodput | None, confidence: float) -> _Evidence | None:
    if goodput is None or not goodput.requests:  # Without --goodput, good requests are not defined.
        return None
    if objective.figure == "goodput":
        return _of_this_run(goodput.per_s, goodput.requests)
    return _share(goodput.good, goodput.requests, objective.bound, confidence)


def _of_this_run(figure: float | None, requests: int) -> _Evidence | None:
    return None if figure is None else _Evidence(figure, figure, figure, requests)


def _latency(objective: Objective, frame: Frame, confidence: float) -> _Evidence | None:
    """Return the measured figure of `objective`, which limits a latency, and the confidence interval of this figure.

    The result also contains `requests_needed`: the estimated number of requests that would make the verdict clear,
    because the interval would no longer contain the bound of the objective. The function returns None if no request has
    the latency.

    The statistic of the objective determines the interval:

    - Percentile p: the ends of the interval are two of the sorted samples. The percentile is below the bound if at
      least the share p of all samples is below the bound. `requests_needed` is therefore the number of requests that
      would show whether this share is above or below p.
    - Mean: the interval comes from Student's t-distribution. Its width is proportional to `1 / sqrt(requests)`
      (Cochran, Sampling Techniques, section 4.6).
    - Minimum or maximum: there is no interval, because the figure describes only this run.
    """
    metric, bound = LATENCIES[objective.figure], objective.bound
    samples, offsets = metric.values(frame), metric.groups(frame)
    if len(samples) == 0:
        return None
    requests = len(samples) if offsets is None else int(np.count_nonzero(np.diff(offsets)))
    share = objective.percentile
    if share is not None:
        ordered = np.sort(samples)
        size = stats.effective_size(samples, offsets, share, ordered)
        low, high = stats.interval(ordered, share, size, confidence)
        below = samples < bound if objective.comparison in ("<", ">=") else samples <= bound
        needed = stats.samples_to_decide(float(below.mean()), share, size, confidence)
        return _Evidence(
            stats.percentile(ordered, share),
            -math.inf if low is None else low,
            math.inf if high is None else high,
            requests,
            None if needed is None else math.ceil(needed * requests / size),
        )
    if objective.statistic != "mean":
        return _of_this_run(float(samples.min() if objective.statistic == "min" else samples.max()), requests)
    mean = float(samples.mean())
    mean_low, mean_high = stats.mean_interval(samples, offsets, confidence)
    needed = stats.MIN_DEGREES_OF_FREEDOM + 1
    if math.isfinite(mean_high):
        estimate = requests * ((mean_high - mean) / abs(mean - bound)) ** 2 if mean != bound else math.inf
        needed = math.ceil(min(estimate, stats.MAX_USEFUL_SAMPLES + 1))
    return _Evidence(mean, mean_low, mean_high, requests, needed if needed <= stats.MAX_USEFUL_SAMPLES else None)


def _share(count: int, total: int, bound: float, confidence: float) -> _Evidence | None:
    """Return `count / total` with its exact confidence interval (Clopper and Pearson). Return None if `total` is 0.

    `bound` is the limit that an objective sets for this share, for example 0.01. There is no interval if the limit is 0
    or 1, because no sample could prove that the server always meets such a limit.
    """
    if total == 0:
        return None
    share = count / total
    if bound in (0, 1):
        return _of_this_run(share, total)
    low, high = stats.share_interval(count, total, confidence)
    return _Evidence(share, low, high, total, stats.samples_to_decide(share, bound, total, confidence))


def _finite(value: float) -> float | None:
    return stats.round_to_ns(value) if math.isfinite(value) else None


def _explanation(objective: Objective, evidence: _Evidence | None, verdict: str, confidence: float) -> str:
    """Return the measured figure as text, or a message if the figure is missing.

    If the bound lies inside the interval of the figure, the text also says how many requests a clear verdict needs.
    """
    if evidence is None:
        return _missing_text(objective)
    text = _figure_text(objective, evidence, confidence)
    if objective.satisfied_by(evidence.low) == objective.satisfied_by(evidence.high):
        return text
    mark = "" if verdict == "inconclusive" else "marginal, "
    if evidence.requests_needed is None:
        return f"{text}; {mark}too close to the bound for any number of requests to decide"
    noun = "complete request" if objective.figure in LATENCIES else "request"
    return f"{text}; {mark}about {pluralise(evidence.requests_needed, noun)} would decide"


def _figure_text(objective: Objective, evidence: _Evidence, confidence: float) -> str:
    """Return the measured figure of an objective and its interval as text, in a unit that suits the figure."""
    if objective.unit == "requests":
        return pluralise(int(evidence.measured), "request")
    if objective.unit == "per second":
        return f"{significant(evidence.measured, 4)} per second"
    write, unit = _number_format(objective, evidence.measured)

    def number(value: float) -> str:
        return write(value) if math.isfinite(value) else UNKNOWN

    suffix = unit if unit in ("", "%") else f" {unit}"
    text = f"{number(evidence.measured)}{suffix}"
    if evidence.exact:
        return text
    if math.isfinite(evidence.low) and number(evidence.low) == number(evidence.high):
        return text
    interval = "any value"
    if math.isfinite(evidence.low) and math.isfinite(evidence.high):
        interval = f"{interval_text(number(evidence.low), number(evidence.high))}{suffix}"
    elif math.isfinite(evidence.low):
        interval = f"{number(evidence.low)}{suffix} or more"
    elif math.isfinite(evidence.high):
        interval = f"{number(evidence.high)}{suffix} or less"
    return f"{text}, {confidence * 100:.4g}% CI {interval}"


def _number_format(objective: Objective, measured: float) -> tuple[Callable[[float], str], str]:
    """Return how a figure of an objective is written: a function that formats a value, and the unit.

    `measured` is the measured value, whose size determines the unit of a duration.
    """
    if objective.unit == "share":
        return lambda share: _share_text(share, objective.bound), "%"
    if objective.unit in ("tokens", "ratio"):
        return lambda number: f"{number:,.6g}", "tokens" if objective.unit == "tokens" else ""
    factor, unit = scale_of(measured)
    return lambda seconds: significant(seconds * factor, 4), unit


def _share_text(share: float, bound: float) -> str:
    """Return a share in percent without trailing zeros, such as `99.5` for the share 0.995.

    The percentage is rounded to two decimals. If `bound` has more decimals in percent, it is rounded to as many as
    `bound` has.
    """
    bound_decimals = len(f"{bound * 100:.8g}".partition(".")[2])
    return f"{share * 100:.{max(2, bound_decimals)}f}".rstrip("0").rstrip(".")


def junit(summaries: Sequence[Summary]) -> str:
    """Return the objectives of these runs as JUnit XML, which CI systems display.

    Each run is a test suite and each objective is a test case. An inconclusive objective counts as skipped. The output
    of the test suite lists every objective with its verdict and its interval, because a passed test case has no place
    for such details.

    JUnit XML has no standard. This output follows the strictest schema in use, that of Ant's reports
    (windyroad/JUnit-Schema, JUnit.xsd). This schema requires the attributes and the order of elements that the function
    writes.
    """
    root = Xml.Element("testsuites")
    for index, summary in enumerate(summaries):
        run = summary.run
        verdicts = [objective.verdict for objective in summary.objectives]
        mark = simulated(summary)
        try:  # The schema wants UTC to the second, without a time zone.
            started = datetime.fromisoformat(run.started_at).astimezone(UTC)
        except ValueError:  # The run file does not hold a valid time.
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
        lines = [outcome_sentence(summary), client_sentence(summary)]
        lines += [f"{item.verdict}: {item.objective}: {measured_text(item)}" for item in summary.objectives]
        Xml.SubElement(suite, "system-out").text = _text("\n".join(lines))
        warnings = [finding.sentence for finding in findings(summary) if finding.level in ("warning", "error")]
        Xml.SubElement(suite, "system-err").text = _text("\n".join(warnings))
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="unicode")}\n'


def _element(parent: Xml.Element, tag: str, **attributes: Any) -> Xml.Element:
    return Xml.SubElement(parent, tag, {key: _text(value) for key, value in attributes.items()})


def _text(value: Any) -> str:
    """Return the value as text, with U+FFFD in place of all non-printable characters except newlines.

    XML 1.0 does not allow some of these characters, even escaped: control characters, surrogates and U+FFFE (section
    2.2).
    """
    characters = str(value)
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in characters)
