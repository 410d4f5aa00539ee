"""Computes figures over all repeats of a plan, with confidence intervals.

A repeat is one run of the plan. The requests of one run share one server during the same time, so they do not show how
much another run may differ. This module therefore takes one value of a figure from each run, and computes a Student's t
interval over these values (Student, "The probable error of a mean", 1908). An interval needs at least MIN_RUNS runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loadgen.analysis.format import (
    UNKNOWN,
    figure_title,
    interval_text,
    percent,
    pluralise,
    server_label,
    significant,
    simulated,
    unit_of,
    workload_sentence,
)
from loadgen.analysis.report import (
    Block,
    ColumnKind,
    Document,
    Findings,
    Paragraph,
    Section,
    findings,
)
from loadgen.analysis.report.tables import objectives, table
from loadgen.analysis.shares import SHARES, counts_of
from loadgen.analysis.stats import (
    CONFIDENCE,
    DECIMALS,
    PERCENTILES,
    mean_and_deviation,
    samples_needed,
    share_interval,
    student_quantile,
)
from loadgen.analysis.summary import Summary

STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RATES = ("output_tokens_per_s", "steady_output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "tail_share")
FROM_0_TO_1 = (*SHARES, "tail_share")
ORDER = "one after the other, in the order of their numbers; all have the same plan, so the order is not randomised"
SHOWN = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "complete", "goodput", "attainment"),
    *("valid_output", "answered"),
    *("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "itl.p99", "e2e.p50", "e2e.p99", "normalised.mean"),
)
MIN_RUNS = 3
"""Minimum number of runs for an interval. With two runs, the interval would be 13 times as wide as their difference."""
MAX_VALUES = 5
"""Maximum number of runs for which a table row lists the value of every run."""


class FigureOverRuns(msgspec.Struct, frozen=True):
    """One figure over several runs, with the confidence interval of its mean."""

    n: int
    mean: float | None
    """None if at least one run does not have the figure."""
    std: float | None
    """None for fewer than two runs."""
    ci95: tuple[float, float] | None
    """None for fewer than three runs."""
    values: list[float | None]
    """The figure of each run, in the order of the runs."""
    thin: bool = False
    """True for a percentile if at least one run has too few samples for it."""


class RepeatsSummary(msgspec.Struct, frozen=True):
    """The joint result of all repeats of a plan: `repeats` in summary.json."""

    runs: int
    order: str
    state: list[str]
    """Start state of each run, `cold` or `warm` (see `start_states`)."""
    state_said: str
    seeds: list[int | None]
    confidence: float
    figures: dict[str, FigureOverRuns]
    """Figures by the name that --assert uses: `ttft.p99`, `output_tokens_per_s`."""


def summarise_repeats(summaries: Sequence[Summary]) -> RepeatsSummary:
    """Return the joint result of all repeats of a plan. `summaries` are in the order in which the repeats ran."""
    states = start_states(summaries)
    figures = [figures_of(summary, thin=True) for summary in summaries]
    over_runs = {name: describe_over_runs([values.get(name) for values in figures]) for name in figures[0]}
    return RepeatsSummary(
        runs=len(summaries),
        order=ORDER,
        state=states,
        state_said=_state_sentence(states),
        seeds=[summary.run.seed for summary in summaries],
        confidence=CONFIDENCE,
        figures={name: _adjusted(name, figure, summaries) for name, figure in over_runs.items()},
    )


def _state_sentence(states: Sequence[str]) -> str:
    """Return a sentence that says which repeats started on a cold server. `states` contains `warm` or `cold` per
    repeat.
    """
    cold = [str(number) for number, state in enumerate(states, 1) if state == "cold"]
    if not cold:
        return "All runs started warm: requests had been sent to the server before each run."
    if len(cold) == len(states):
        return "All runs started cold."
    which = f"Repeat {cold[0]}" if len(cold) == 1 else f"Repeats {', '.join(cold)}"
    return f"{which} started cold, the others warm; use --warmup N to start all runs warm."


def figures_of(summary: Summary, *, thin: bool = False) -> dict[str, float | None]:
    """Return the figures of a run that can be compared with other runs, by name.

    The names are those that --assert uses, such as `ttft.p99`. A figure is None if the run does not have it. A
    percentile from too few samples is also None, unless `thin` is true.
    """
    figures: dict[str, float | None] = {name: getattr(summary.throughput, name) for name in RATES}
    shares = {name: counts_of(name, summary) for name in SHARES}
    figures["complete"] = None
    if summary.goodput:
        figures |= {"goodput": summary.goodput.per_s, "attainment": summary.goodput.attainment}
    figures |= {name: count / total for name, (count, total) in shares.items() if total}
    for latency, distribution in summary.latency.items():
        for name in STATISTICS:
            known = thin or name not in distribution.thin
            figures[f"{latency.removesuffix('_s')}.{name}"] = distribution.of(name) if known else None
    return figures | {"skew": summary.burst.skew_s}


def describe_over_runs(values: Sequence[float | None]) -> FigureOverRuns:
    """Return the mean, the standard deviation and the 95% interval of a figure.

    `values` contains the figure of each run.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return FigureOverRuns(len(known), None, None, None, list(values))
    mean, deviation = mean_and_deviation(known)
    if deviation is None:
        return FigureOverRuns(1, mean, None, None, [*known])
    if len(known) < MIN_RUNS:
        return FigureOverRuns(len(known), round(mean, DECIMALS), round(deviation, DECIMALS), None, [*known])
    margin = student_quantile((1 + CONFIDENCE) / 2, len(known) - 1) * deviation / math.sqrt(len(known))
    ends = round(mean - margin, DECIMALS), round(mean + margin, DECIMALS)
    return FigureOverRuns(len(known), round(mean, DECIMALS), round(deviation, DECIMALS), ends, [*known])


def _adjusted(name: str, figure: FigureOverRuns, summaries: Sequence[Summary]) -> FigureOverRuns:
    """Return `figure` with a corrected confidence interval. A percentile of too few samples is also marked as `thin`.

    `name` is the name of the figure, such as `ttft.p99`. `summaries` are the summaries of its runs.

    - A percentile is marked as `thin` if at least one run has too few samples for it.
    - No figure is negative, so the interval is cut off at 0.
    - A share is at most 1, so its interval is also cut off at 1.
    - The interval of a share of requests is widened first. It then contains the exact binomial interval over the
      requests of all runs (Clopper and Pearson). Without this correction, the interval would be too narrow if the runs
      had similar results by chance.
    """
    if any(is_thin(summary, name) for summary in summaries):
        figure = msgspec.structs.replace(figure, thin=True)
    if figure.ci95 is None:
        return figure
    low, high = max(0.0, figure.ci95[0]), figure.ci95[1]
    if name not in FROM_0_TO_1:
        return msgspec.structs.replace(figure, ci95=(low, high))
    if name in SHARES:
        counts = [counts_of(name, summary) for summary in summaries]
        exact_low, exact_high = share_interval(sum(good for good, _ in counts), sum(total for _, total in counts))
        low, high = min(low, round(exact_low, DECIMALS)), max(high, round(exact_high, DECIMALS))
    return msgspec.structs.replace(figure, ci95=(low, min(1.0, high)))


def is_thin(summary: Summary, name: str) -> bool:
    """Return True if the figure `name`, such as `ttft.p99`, is a percentile of too few samples."""
    latency, _, statistic = name.partition(".")
    distribution = summary.latencies.get(f"{latency}_s")
    return distribution is not None and statistic in distribution.thin


def start_states(summaries: Sequence[Summary]) -> list[str]:
    """Return the start state of each run, `warm` or `cold`.

    A run is warm if it had warm-up requests, or if the previous run used a server at the same address.
    """
    previous_runs = [None, *summaries[:-1]]
    return [
        "warm" if summary.requests.warmup or (previous and previous.server.url == summary.server.url) else "cold"
        for summary, previous in zip(summaries, previous_runs, strict=True)
    ]


def section(repeats: RepeatsSummary, name: str = "between-runs", title: str = "Between runs") -> Section:
    """Return the report section on the variation between the repeats of a plan.

    The section contains the mean of each main figure with its interval, and the value of each run.
    """
    few = repeats.runs <= MAX_VALUES
    heads: dict[str, ColumnKind] = {"figure": "head", "unit": "unit", "mean": "number", "95% CI": "number"}
    rows, needed = [], dict[str, str]()
    for figure_name in SHOWN:
        figure = repeats.figures.get(figure_name)
        if figure is None or figure.mean is None:
            continue
        factor, unit = unit_of(figure_name, figure.mean)
        ends = UNKNOWN if figure.ci95 is None else interval_text(*(significant(end * factor, 4) for end in figure.ci95))
        if few:
            last_cell = ", ".join(significant(value and value * factor, 4) for value in figure.values)
        else:
            last_cell = percent(None if figure.std is None or not figure.mean else figure.std / figure.mean)
        mark = "*" if figure.thin else ""
        rows.append((figure_title(figure_name), unit, significant(figure.mean * factor, 4) + mark, ends, last_cell))
        if figure.thin:
            percentile = figure_name.partition(".")[2]
            needed[percentile] = f"{percentile} {samples_needed(PERCENTILES[percentile]):,}"
    notes = [f"* too few independent samples: {', '.join(needed.values())} needed."] if needed else []
    shown = table(
        f"Mean of {pluralise(repeats.runs, 'run')}",
        heads | {"each run" if few else "spread": "text"},
        rows,
        several=True,
        id="repeats",
        notes=notes,
    )
    text = Paragraph(f"Intervals are for the mean over {pluralise(repeats.runs, 'run')} (Student's t).")
    if repeats.runs < MIN_RUNS:
        runs = pluralise(repeats.runs, "run")
        text = Paragraph(f"{runs} only: an interval between runs needs {MIN_RUNS} runs.", "warning")
    return Section(name, title, [shown, text, Paragraph(repeats.state_said)])


def document(repeats: RepeatsSummary, summaries: Sequence[Summary]) -> Document:
    """Return the terminal report of repeats: their joint result, and the main findings on each run."""
    first = summaries[0]
    blocks: list[Block] = []
    for number, summary in enumerate(summaries, 1):
        of_run = findings.findings(summary)
        sentences = " ".join(finding.sentence for finding in of_run if finding.id in ("complete", "client"))
        good = summary.requests.all_complete and summary.client.ok
        blocks.append(Paragraph(f"repeat {summary.run.repeat or number}: {sentences}", "ok" if good else "error"))
        blocks.append(Findings([finding for finding in of_run if finding.level == "warning"]))
        blocks += [objectives([summary])] if summary.objectives else []
    blocks.append(Findings([*filter(None, [findings.seed_finding(first)])]))
    title = f"{server_label(first)}  {first.server.model or ''}"
    subtitle = f"{workload_sentence(first)}, {repeats.runs} times"
    sections = [section(repeats, title=""), Section("repeats", "", blocks)]
    return Document("loadgen report", title, sections, subtitle, simulated(first))
