"""Builds the HTML page on all repeats of a plan. The page begins with the joint figures of all repeats.

The other sections of the page are those of a report on several runs. Sections with a table row or a paragraph per
repeat are folded, because they are so long that they would hide the joint figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.analysis.format import (
    confidence_interval,
    figure_title,
    interval_text,
    pluralise,
    server_label,
    significant,
    start_time,
    unit_of,
    workload_sentence,
)
from loadgen.analysis.repeats import MIN_RUNS, FigureOverRuns, RepeatsSummary, section
from loadgen.analysis.report import Block, Card, ChartRef, Disclosure, Document, DotStrip, Scorecard, Section, Table
from loadgen.analysis.report.chart_data import thin_points
from loadgen.analysis.report.joint_findings import joint_findings, joint_objectives, joint_verdict
from loadgen.analysis.report.run_document import ReportedRun, list_title, page_document
from loadgen.analysis.summary import Summary

CARDS = (
    *("goodput", "output_tokens_per_s", "total_tokens_per_s", "requests_per_s"),
    *("ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "skew"),
)
"""Figures with a card, in the order of the page. The first figure that the repeats have is the largest."""
TITLES = {"requests_per_s": "Requests", "skew": "Burst skew"}
"""Titles of cards that differ from `figure_title`."""
FOLDED = ("goodput", "objectives", "percentiles", "failures", "canaries", "sending", "lengths", "client", "machines")
"""Sections with a table row or a paragraph per repeat, which the page folds into one section."""
THINNED = ("goodput", "ttft_s", "tpot_s", "itl_s", "e2e_s", "position", "sends")
"""Charts of which the page draws fewer points per repeat. The report of each repeat draws all of them."""
POINTS = 1200
"""Maximum number of points of each of these charts, over all repeats. It keeps the page below 1.3 MB."""
POINTS_MIN = 60
"""Minimum number of points of a chart for one repeat."""
STRIP_MARGIN = 5.0
"""Distance between the ends of a dot strip and its outermost dot or interval end, as a percentage of its width."""


def repeats_document(runs: Sequence[ReportedRun], repeats: RepeatsSummary) -> Document:
    """Return the document on all repeats of a plan, for the HTML page. `runs` are in the order of the repeats."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
    points_max = max(POINTS_MIN, POINTS // len(runs))
    document = page_document([_thinned(run, points_max) for run in runs])
    answer, *others = document.sections
    tables = [block for block in answer.blocks if isinstance(block, Table)]
    of_runs = [block for block in answer.blocks if not isinstance(block, Table)]
    scorecard = _joint_scorecard(summaries, repeats)
    between = section(repeats)
    figures, interval, state = between.blocks
    # Sentences are visible if they limit the figures: too few repeats, or both cold and warm ones.
    visible = [interval] * (repeats.runs < MIN_RUNS) + [state] * (len(set(repeats.state)) > 1)
    folded = [figures, *(block for block in (interval, state) if block not in visible)]
    between = replace(between, blocks=[Disclosure("Mean, interval and repeats of every figure", folded), *visible])
    shown = [replace(answer, blocks=[scorecard, *tables]), between]
    details: list[Block] = [Disclosure("Results and validity of each repeat", of_runs)]
    for part in others:
        has_visible_chart = any(isinstance(block, ChartRef) for block in part.blocks)
        blocks = part.blocks if has_visible_chart else _unfolded(part.blocks)
        charts: list[Block] = [_with_folded_caption(block) for block in blocks if isinstance(block, ChartRef)]
        rest = [block for block in blocks if not isinstance(block, ChartRef)]
        if part.id in FOLDED:
            details.append(Disclosure(part.title, _unfolded(rest)))
            shown += [replace(part, blocks=[Disclosure("", charts)])] if charts else []
        elif part.id == "again":
            shown.append(Section("details", "Each repeat", details))
            shown.append(replace(part, blocks=[Disclosure("", _first_command(rest))]))
        else:
            shown.append(
                replace(part, blocks=[*charts, *rest] if has_visible_chart else [Disclosure("", [*charts, *rest])])
            )
    return replace(
        document,
        title=f"{pluralise(repeats.runs, 'repeat')}: {workload_sentence(first)}",
        sections=shown,
        servers=server_label(first),
    )


def _thinned(run: ReportedRun, points_max: int) -> ReportedRun:
    """Return the run with at most `points_max` points in each chart that is listed in THINNED."""
    data = {
        chart: thin_points(values, points_max) if chart in THINNED else values for chart, values in run.data.items()
    }
    return replace(run, data=data)


def _joint_scorecard(summaries: Sequence[Summary], repeats: RepeatsSummary) -> Scorecard:
    first = summaries[0]
    joint = joint_findings(summaries)
    took = f"took {sum(summary.run.duration_s for summary in summaries):.1f} s in total"
    return Scorecard(
        run=0,
        subheading=first.server.model or "",
        facts=" · ".join(filter(None, (start_time(first), ", ".join(first.server.replicas) or first.server.url, took))),
        cards=[
            _with_bounds(card, first) if card.label == figure_title("goodput") else card for card in _cards(repeats)
        ],
        verdict=joint_verdict(summaries, joint),
        findings=joint,
        objectives=joint_objectives(summaries),
        heading=server_label(first),
        list_title=list_title(summaries),
    )


def _with_bounds(card: Card, summary: Summary) -> Card:
    """Return the goodput card with the bounds of --goodput added to its note."""
    bounds = summary.goodput.bounds if summary.goodput else []
    noun = "bound" if len(bounds) == 1 else "bounds"
    return replace(card, note=f"{card.note}; {noun} on each request: {' and '.join(bounds)}")


def _cards(repeats: RepeatsSummary) -> list[Card]:
    """Return a card for each main figure, such as the TTFT p99.

    A card shows the mean of the figure over the repeats, the confidence interval of this mean, and a dot per repeat.
    For a percentile, each repeat contributes its own percentile to the mean. There is no card for percentiles from too
    few samples.
    """
    result = []
    for name in CARDS:
        figure = repeats.figures.get(name)
        if figure is None or figure.mean is None or figure.thin:
            continue
        factor, unit = unit_of(name, figure.mean)
        values = [value * factor for value in figure.values if value is not None]
        low, high = figure.ci95 or (min(values) / factor, max(values) / factor)
        ends = (significant(low * factor, 4), significant(high * factor, 4))
        note = confidence_interval(*ends) if figure.ci95 else f"repeats {interval_text(*ends)}"
        title = TITLES.get(name) or figure_title(name)
        shown_unit = "/s" if unit == "requests/s" else unit
        strip = _dot_strip(figure, factor, unit)
        result.append(Card(title, significant(figure.mean * factor, 4), shown_unit, note, strip=strip))
    return result


def _dot_strip(figure: FigureOverRuns, factor: float, unit: str) -> DotStrip | None:
    """Return a strip with one dot per repeat, which shows the values of a figure. Return None if there are fewer than
    two values or no mean."""
    values = [value for value in figure.values if value is not None]
    if figure.mean is None or len(values) < 2:
        return None
    ends = [*values, *(figure.ci95 or ())]
    lowest, span = min(ends), max(ends) - min(ends)

    def position(value: float) -> float:
        share = (value - lowest) / span if span else 0.5
        return round(STRIP_MARGIN + share * (100 - 2 * STRIP_MARGIN), 2)

    interval = (position(figure.ci95[0]), position(figure.ci95[1])) if figure.ci95 else None
    listed = ", ".join(significant(value * factor, 4) for value in values)
    smallest, largest = (significant(value * factor, 4) for value in (min(values), max(values)))
    dots = [position(value) for value in values]
    return DotStrip(dots, position(figure.mean), interval, (smallest, largest), f"Repeats: {listed} {unit}")


def _with_folded_caption(chart: ChartRef) -> ChartRef:
    """Return the chart with its caption moved into the folded part, which the page hides until the reader clicks it.

    The caption has a sentence per repeat, so it is long.
    """
    return replace(chart, caption=[], folded=[*chart.caption, *chart.folded])


def _unfolded(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks, with each collapsed block (Disclosure) replaced by the blocks inside it."""
    result: list[Block] = []
    for block in blocks:
        result += block.blocks if isinstance(block, Disclosure) else [block]
    return result


def _first_command(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with the command and the settings of the first repeat.

    `blocks` contains the name, the command and the settings of each repeat. The command of the first repeat runs all
    repeats, so the page needs no other command.
    """
    return list(blocks[1:3])
