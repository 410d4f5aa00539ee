"""Builds the tables of a report and the cards at its top, for one run or several runs.

Some tables have a brief form for the terminal and a full form for the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from msgspec.structs import replace

from loadgen.analysis.client_health import LIMITS, figure_text
from loadgen.analysis.format import (
    UNKNOWN,
    byte_size,
    confidence_interval,
    duration,
    elapsed,
    figure_title,
    interval_text,
    percent,
    pluralise,
    scale_of,
    significant,
    unit_of,
)
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import AdjustedDistribution, Distribution
from loadgen.analysis.report import Card, ColumnKind, Level, Table, TableCell, TableColumn, TableRow, findings, status
from loadgen.analysis.report.course_findings import course_events
from loadgen.analysis.stats import PERCENTILES, WITH_INTERVAL, samples_needed
from loadgen.analysis.summary import ErrorExample, PartFigures, Summary

STATISTICS = ("mean", "min", *WITH_INTERVAL, "p99_9", "max")
BRIEF_STATISTICS = ("mean", *WITH_INTERVAL, "max")
BRIEF_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "normalised_s")
OVERVIEW = (
    *(("ttft_s", "p50", "s"), ("ttft_s", "p99", "s"), ("tpot_s", "p50", "ms"), ("itl_s", "p99", "ms")),
    ("e2e_s", "p50", "s"),
)
OVERVIEW_FACTORS = {"s": 1.0, "ms": 1e3}
"""Factors from seconds to the units in OVERVIEW."""
TOKEN_CARDS = ("output", "total", "ttft_s", "tpot_s", "itl_s")
"""Cards that are omitted for a run without generated tokens."""
TURNS_BRIEF = 10
"""Maximum number of turns in the terminal. The page shows all turns."""
CARD_OF_FIGURE = {
    **{"ttft": "ttft_s", "ttft_due": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2e": "e2e_s", "e2e_due": "e2e_s"},
    **{"output_tokens_per_s": "output", "total_tokens_per_s": "total", "requests_per_s": "requests"},
    **dict.fromkeys(("complete", "truncated", "failed", "rejected", "dropped"), "requests"),
    **{"attainment": "goodput", "inputs_per_s": "inputs", "input_tokens_per_s": "input"},
    **{"audio_seconds_per_s": "audio", "audio_bytes_per_s": "audio_bytes"},
}
"""Card that shows an objective, by the figure of the objective. Other figures have a card of the same name, or none."""
DRAIN_CHANGE_MIN = 0.01
"""Minimum difference between the output throughput with and without the drain, as a share, that the report shows."""
ERROR_SHARE_MIN = 1e-3
"""Minimum timing error of a rate, as a share of the rate, that the report shows."""
SHARED_UNIT_MAX = 100_000
"""Maximum value of a median in a unit that it shares with other latencies. Larger medians get a separate unit."""
SERVER_WORDS = ("http_status", "in_band_error", "rejected")
"""Error kinds whose messages are words of the server. The messages of other kinds are findings of loadgen."""
LEVELS: Mapping[str, Level] = {"pass": "ok", "fail": "error", "inconclusive": "warning"}
MARGINAL = "Marginal: the bound lies inside the interval, so another run may be judged differently (--confidence)."
PAGE_LATENCIES = BRIEF_LATENCIES[:-1]
"""Latencies that the page shows before the reader unfolds the others."""
Summaries = Sequence[Summary]
Cells = Sequence[TableCell | str]


def number_columns(*titles: str) -> dict[str, ColumnKind]:
    """Return a dict that maps each title to the column kind `number`, as `table` expects it."""
    return dict.fromkeys(titles, "number")


def table(title: str, heads: Mapping[str, ColumnKind], rows: Iterable[Cells], *, several: bool, **more: Any) -> Table:
    """Return a table with the title `title`, the headings `heads` and the rows `rows`.

    `several` is true if the table covers several runs. Otherwise the column `run` is omitted.
    """
    retained = [index for index, head in enumerate(heads) if several or head != "run"]
    columns = [TableColumn(head, kind) for head, kind in heads.items() if several or head != "run"]
    table_rows = []
    for row in rows:
        cells = [TableCell(cell) if isinstance(cell, str) else cell for cell in row]
        table_rows.append(TableRow([cells[index] for index in retained]))
    return Table(title, columns, table_rows, **more)


def cards(summary: Summary) -> dict[str, Card]:
    """Return the cards at the top of the report, by short name.

    If an objective failed, the card of its metric names it.
    """
    failed: dict[str, list[str]] = {}
    for entry in summary.objectives:
        if entry.verdict == "fail":
            name = CARD_OF_FIGURE.get(entry.figure, entry.figure)
            failed.setdefault(name, []).append(f"objective {status.failure_text(entry)}")
    return {name: replace(card, failed=failed.get(name, [])) for name, card in _cards(summary).items()}


def _cards(summary: Summary) -> dict[str, Card]:
    """Return the cards with the main figures for the top of the report, by the short name of the card, such as
    `ttft_s`.

    The function `cards` adds the failed objectives to these cards.
    """
    if not summary.requests.complete:
        elapsed = f"in {duration(summary.run.duration_s)}"
        return {"requests": Card("Requests complete", "0", f"of {summary.requests.planned:,}", elapsed)}
    throughput, latencies = summary.throughput, summary.latencies
    total = _interval(summary, "total_tokens_per_s") or "with prompts"
    requests = _joined(_completed(summary), _interval(summary, "requests_per_s"))
    result = {
        **({"goodput": _goodput_card(summary)} if summary.goodput else {}),
        "output": _output_card(summary),
        "total": Card("Total throughput", significant(throughput.total_tokens_per_s, 4), "tokens/s", total),
        "requests": Card("Requests", significant(throughput.requests_per_s, 4), "/s", requests),
        **{name: _median_card(METRICS[name].title, latencies[name]) for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
    }
    if summary.burst.skew_s is not None:
        bounds = summary.burst.skew_range_s
        note = "from the first byte sent to the last"
        if bounds:
            note = f"{duration(max(0.0, bounds[0]))} to {duration(bounds[1])}, given the clock uncertainty"
        result["skew"] = _duration_card("Burst skew", summary.burst.skew_s, note)
    result = _audio_cards(summary) | result
    if summary.generates:
        return result
    note = _joined(_interval(summary, "input_tokens_per_s"), _timing_error(summary))
    inputs = f"{summary.run.batch_size} per request" if summary.run.batch_size > 1 else ""
    inputs = _joined(inputs, _interval(summary, "inputs_per_s"))
    inputs_card = Card("Inputs", significant(throughput.inputs_per_s, 4), "/s", inputs)
    input_card = Card("Input throughput", significant(throughput.input_tokens_per_s, 4), "tokens/s", note)
    input_cards = {"inputs": inputs_card, "input": input_card} if throughput.inputs_per_s is not None else {}
    measured = [name for name, described in latencies.items() if described.n]
    return input_cards | {name: card for name, card in result.items() if name not in TOKEN_CARDS or name in measured}


def _audio_cards(summary: Summary) -> dict[str, Card]:
    """Return the cards with figures about audio, by short name.

    The dict is empty if the run neither sends recordings nor receives speech.
    """
    throughput = summary.throughput
    cards = {}
    if throughput.audio_seconds_per_s is not None:
        note = _joined("seconds of audio per second", _interval(summary, "audio_seconds_per_s"))
        cards["audio"] = Card("Audio (RTFx)", significant(throughput.audio_seconds_per_s, 4), "s/s", note)
    if throughput.audio_bytes_per_s is not None:
        cards["audio_bytes"] = Card("Audio bytes", byte_size(throughput.audio_bytes_per_s), "/s")
    first_audio, rtf = summary.latencies["first_audio_s"], summary.latencies["rtf"]
    if first_audio.n:
        cards["first_audio"] = _median_card(METRICS["first_audio_s"].title, first_audio)
    if rtf.n:
        cards["rtf"] = Card("Real-time factor", significant(rtf.p50), "", f"median; p99 {significant(rtf.p99)}")
    return cards


def _goodput_card(summary: Summary) -> Card:
    """Return the card of goodput: good requests per second, the number of good requests, and the measured time."""
    result, span_s = summary.goodput, summary.throughput.span_s
    assert result is not None
    bounds = " and ".join(result.bounds)
    noun = "bound" if len(result.bounds) == 1 else "bounds"
    share = percent(result.attainment)
    good = f"{result.good:,} of {result.requests:,} requests ({share}) met the {noun} on each request, {bounds},"
    rate = ""
    if span_s is None or not summary.window.whole:
        good = good.removesuffix(",")
    if result.per_s is not None and span_s is not None and not summary.window.whole:
        rate = f"{round(result.per_s * span_s):,} of these ended in the window of {duration(span_s, 4)}"
    elif span_s is not None:
        good += f" in {duration(span_s, 4)}"
    return Card("Goodput", significant(result.per_s), "requests/s", _joined(good, rate))


def _output_card(summary: Summary) -> Card:
    """Return the card of the output throughput. Its main figure is the throughput of the whole run.

    The throughput is lower during the drain: the end of the run, when only the last responses still arrive. If the
    throughput before the drain differs clearly, the card shows it as a second figure. The second figure is better for a
    comparison of runs with different lengths, because the drain is a larger part of a short run.
    """
    throughput = summary.throughput
    tokens, before_drain = "", None
    if throughput.output_tokens is not None:
        tokens = f"{throughput.output_tokens:,} tokens in {duration(throughput.span_s, 4)}"
    rate_per_s, steady_per_s = throughput.output_tokens_per_s, throughput.steady_output_tokens_per_s
    if rate_per_s and steady_per_s is not None and abs(steady_per_s / rate_per_s - 1) >= DRAIN_CHANGE_MIN:
        drain = f"before the drain, the last {percent(throughput.tail_share)} of the run"
        before_drain = (significant(steady_per_s, 4), drain)
    interval = _interval(summary, "output_tokens_per_s")
    note = _joined(f"whole run: {tokens}" if before_drain and tokens else tokens, interval, _timing_error(summary))
    value = significant(throughput.output_tokens_per_s, 4)
    return Card("Output throughput", value, "tokens/s", note, second=before_drain)


def _timing_error(summary: Summary) -> str:
    error_share = summary.throughput.error_share or 0
    return f"±{percent(error_share)} timing error" if error_share >= ERROR_SHARE_MIN else ""


def _completed(summary: Summary) -> str:
    """Return a text with the number of complete requests and the length of the measurement window.

    If the window is only a part of the run, the text begins with the number of requests that ended in the window. This
    number, divided by the length of the window, is the request throughput. If requests were rejected, the text ends
    with their number.
    """
    requests, throughput = summary.requests, summary.throughput
    of_all = f"{requests.complete:,} of {requests.planned:,} complete"
    rejected = f"{requests.rejected:,} rejected" if requests.rejected else ""
    if throughput.completed is None:  # the summary was written by an older version
        return _joined(of_all, rejected)
    span = duration(throughput.span_s, 4)
    if summary.window.whole:
        return _joined(f"{of_all} in {span}", rejected)
    return _joined(f"{throughput.completed:,} ended in the window of {span}", of_all, rejected)


def latency(
    summaries: Summaries, *, brief: bool = False, adjusted: bool = False, only: Sequence[str] = tuple(METRICS)
) -> Table:
    """Return the table of latency statistics, with one row per latency and run.

    The brief table has fewer latencies and statistics. If `adjusted` is true, incomplete requests count as infinitely
    slow. `only` selects latencies by name.
    """
    several = len(summaries) > 1
    shown: Sequence[str] = BRIEF_STATISTICS if brief else STATISTICS
    if adjusted:
        shown = WITH_INTERVAL
    parts: list[Mapping[str, Distribution | AdjustedDistribution]]
    parts = [dict(summary.latencies_adjusted if adjusted else summary.latencies) for summary in summaries]
    rows = []
    generates = any(summary.generates for summary in summaries)
    for name in _brief_latencies(summaries) if brief else parts[0]:
        has_samples = any(part[name].n for part in parts)
        shows_empty = generates and not METRICS[name].optional
        if name not in only or not (has_samples or shows_empty):
            continue
        factor, unit = _unit(name, parts)
        for index, part in enumerate(parts):
            title = METRICS[name].title
            # The page shows the titles of its main latencies above their charts. Their rows only have a tooltip.
            cells = [
                TableCell(METRICS[name].short, note="" if brief or only is PAGE_LATENCIES else title, full_text=title)
            ]
            if several:
                cells.append(_run(index))
            cells.append(TableCell(unit))
            if not brief:
                cells.append(TableCell(f"{part[name].n:,}", part[name].n))
            cells += [statistic_cell(part[name], figure, factor) for figure in shown]
            rows.append(TableRow(cells, name, several and index == 0))
    thin = [name for index, name in enumerate(shown, -len(shown)) if any(row.cells[index].thin for row in rows)]
    needed = ", ".join(f"{name.replace('_', '.')} {samples_needed(PERCENTILES[name]):,}" for name in thin)
    notes = [f"* too few independent samples: {needed} needed."] if thin else []
    if brief and summaries[0].burst.skew_s is not None and summaries[0].requests.complete:
        notes.append("Requests share one queue: only --repeats shows how another burst would differ.")
    title = "Latency, incomplete requests as infinitely slow" if adjusted else "Latency of complete requests"
    return Table(title, _latency_columns(shown, several=several, brief=brief), rows, "percentiles", notes)


def _brief_latencies(summaries: Summaries) -> Sequence[str]:
    """Return the names of the latencies in the brief table of latencies.

    TTFT from the due time is included if requests of any run waited because of `--concurrency`. The latencies of
    reasoning and of audio are always included. The table itself omits a latency that no response has.
    """
    from_due = ("ttft_due_s",) if any(summary.delivery.queue_wait for summary in summaries) else ()
    reasoning = ("ttfa_s", "think_s", "reasoning_tokens")
    first = ("first_audio_s", "ttft_s", *from_due, *reasoning)
    return (*first, "tpot_s", "tpot_reasoning_s", "tpot_answer_s", *BRIEF_LATENCIES[2:], "rtf")


def _latency_columns(statistics: Sequence[str], *, several: bool, brief: bool) -> list[TableColumn]:
    columns = [TableColumn("" if brief else "latency", "head")]
    if several:
        columns.append(TableColumn("run", "text"))
    columns.append(TableColumn("" if brief else "unit", "unit"))
    if not brief:
        columns.append(TableColumn("n"))
    return columns + [TableColumn(name.replace("p99_9", "p99.9"), key=name) for name in statistics]


def _unit(name: str, parts: Sequence[Mapping[str, Distribution | AdjustedDistribution]]) -> tuple[float, str]:
    """Return the unit in which the latency `name` is displayed, as a pair (factor, unit).

    The factor converts seconds to this unit. `parts` contains the distributions of each run or part. All runs and all
    statistics of a latency have the same unit.

    Latencies that readers compare share a unit. A latency per token or chunk, such as ITL, has the unit of TPOT. Any
    other latency, such as E2E, has the unit of TTFT. A latency gets a separate unit only if its typical value would be
    SHARED_UNIT_MAX or more in the shared unit.

    The shared unit is not chosen from ITL, because several tokens in one read can make the median of ITL tiny.
    """
    metric = METRICS[name]
    if not metric.timed:
        return unit_of(metric.key, None)
    paced = metric.unit == "s/token" or metric.per in ("chunk", "token")
    own_s = _typical_s(parts, name)
    shared_s = _typical_s(parts, "tpot_s" if paced else "ttft_s") or own_s
    factor, unit = scale_of(shared_s)
    if own_s is not None and own_s * factor >= SHARED_UNIT_MAX:
        return scale_of(own_s)
    return factor, unit


def _typical_s(parts: Sequence[Mapping[str, Distribution | AdjustedDistribution]], name: str) -> float | None:
    """Return a typical value of the latency `name` in s: the median of the medians of all runs.

    A run whose median is 0 or infinite is represented by its mean. Return None if no run has a median or a mean.
    """
    known = [part[name].p50 or getattr(part[name], "mean", None) for part in parts if name in part]
    values = [value for value in known if value]
    return median_low(values) if values else None


def statistic_cell(
    described: Distribution | AdjustedDistribution, figure: str, factor: float, *, bare: bool = False
) -> TableCell:
    """Return a cell with the statistic `figure` of a distribution, such as its p99, multiplied by `factor`.

    Unless `bare` is true, the confidence interval follows. An asterisk marks a percentile with too few samples.
    """
    value = getattr(described, figure)
    thin = figure in described.thin or (figure == "p99_9" and value is None and described.n > 0)
    if value is None and isinstance(described, AdjustedDistribution) and described.failures:
        text = "∞"
    else:
        text = significant(None if value is None else value * factor, 4)
    if thin:
        text += "*"
    interval = (None, None) if isinstance(described, AdjustedDistribution) else described.ci95.get(figure, (None, None))
    if bare or interval == (None, None):
        return TableCell(text, value, thin=thin)
    low, high = ("∞" if end is None else significant(end * factor, 4) for end in interval)
    return TableCell(text, value, "" if low == high else interval_text(low, high), thin=thin)


def turns(summaries: Summaries, *, brief: bool = False) -> Table:
    """Return the table of latency by turn, for runs with sessions."""
    rows: list[Cells] = []
    shows_cached = any(turn.cached_share is not None for summary in summaries for turn in summary.turns)
    for index, summary in enumerate(summaries):
        for turn in summary.turns[: TURNS_BRIEF if brief else None]:
            prompts = turn.prompt_tokens_mean
            row: list[TableCell | str] = [_run(index), str(turn.turn), f"{turn.n:,}"]
            row.append(UNKNOWN if prompts is None else f"{prompts:,.0f}")
            if shows_cached:
                row.append(percent(turn.cached_share))
            for described in (turn.ttft_s, turn.e2e_s):
                row += [statistic_cell(described, figure, 1e3, bare=True) for figure in ("p50", "p90")]
            rows.append(row)
    later = len(summaries[0].turns) - TURNS_BRIEF
    notes = [f"{pluralise(later, 'later turn')} in summary.json and on the page."] if brief and later > 0 else []
    thin = {
        figure for summary in summaries for turn in summary.turns for figure in (*turn.ttft_s.thin, *turn.e2e_s.thin)
    }
    needed = [f"{figure} {samples_needed(PERCENTILES[figure]):,}" for figure in ("p50", "p90") if figure in thin]
    if needed:
        notes.append(f"* too few independent samples: {', '.join(needed)} needed.")
    cached = ("cached",) if shows_cached else ()
    columns = number_columns(
        "turn", "n", "prompt, tokens", *cached, "TTFT p50, ms", "TTFT p90, ms", "E2E p50, ms", "E2E p90, ms"
    )
    several = len(summaries) > 1
    return table("Latency by turn", {"run": "text", **columns}, rows, several=several, id="turns", notes=notes)


PART_FIGURES = (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p50"), ("e2e_s", "p50"), ("e2e_s", "p99"))
"""Latencies and statistics in the table of models or classes of traffic."""


def models(summaries: Summaries, *, brief: bool = False) -> Table:
    """Return the table of figures per model, for runs whose requests named several models.

    The brief table has fewer figures.
    """
    return _parts("Models", "model", summaries, [summary.models for summary in summaries], brief=brief)


def replicas(summaries: Summaries, *, brief: bool = False) -> Table:
    """Return the table of figures per replica, for runs whose responses name the replica."""
    return _parts("Replicas", "replica", summaries, [summary.replicas for summary in summaries], brief=brief)


def server_timing(summaries: Summaries) -> Table:
    """Return the table of the parts of TTFT, or of E2E, as the server states them (--server-timing).

    An asterisk marks a percentile with too few samples.
    """
    rows: list[Cells] = []
    thin = set[str]()
    for index, summary in enumerate(summaries):
        timing = summary.server_timing
        if timing is None or not timing.requests:
            continue
        total = (timing.latency.upper(), timing.requests, {"p50": timing.p50_s, "p99": timing.p99_s})
        parts = [(part.name, part.requests, {"p50": part.p50_s, "p99": part.p99_s}) for part in timing.parts]
        for name, number, statistics in (total, *parts):
            row: list[TableCell | str] = [_run(index), name, f"{number:,}"]
            for figure, seconds in statistics.items():
                is_thin = seconds is not None and number < samples_needed(PERCENTILES[figure])
                text = UNKNOWN if seconds is None else significant(seconds * 1e3) + "*" * is_thin
                row.append(TableCell(text, seconds, thin=is_thin))
                thin |= {figure} if is_thin else set()
            rows.append(row)
    needed = ", ".join(f"{figure} {samples_needed(PERCENTILES[figure]):,}" for figure in sorted(thin))
    notes = [f"* too few samples: {needed} needed."] if thin else []
    heads: Mapping[str, ColumnKind] = {"run": "text", "part": "head", **number_columns("n", "p50, ms", "p99, ms")}
    several = len(summaries) > 1
    return table("Parts by the server's own times", heads, rows, several=several, id="server_timing", notes=notes)


def traffic(summaries: Summaries, *, brief: bool = False) -> Table:
    """Return the table of figures per class of traffic."""
    return _parts("Traffic", "class", summaries, [summary.traffic for summary in summaries], brief=brief)


def interference(summaries: Summaries, *, brief: bool = False) -> Table:
    """Return the table that compares each class of traffic with a run of this class alone.

    Each row contains a figure of both runs, their ratio, and the confidence interval of the ratio. If `brief` is True,
    rows without a confidence interval are left out.
    """
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for part in summary.traffic:
            for item in part.interference:
                if brief and item.ratio_ci95 is None:
                    continue
                factor, unit = unit_of(item.figure, item.alone or 0.0)
                values = [
                    UNKNOWN if value is None else significant(value * factor, 4)
                    for value in (item.alone, item.together)
                ]
                ratio = UNKNOWN if item.ratio is None else f"{item.ratio:.3g}x"
                interval = item.why
                if item.ratio_ci95:
                    interval = interval_text(*(f"{end:.3g}x" for end in item.ratio_ci95))
                rows.append([_run(index), part.name, figure_title(item.figure), *values, unit, ratio, interval])
    heads: Mapping[str, ColumnKind] = {
        "run": "text",
        "class": "head",
        "figure": "text",
        **number_columns("alone", "together"),
        "unit": "text",
        **number_columns("ratio"),
        "95% CI": "text",
    }
    several = len(summaries) > 1
    return table("Each class alone and together", heads, rows, several=several, id="interference")


def _parts(
    title: str, noun: str, summaries: Summaries, parts: Sequence[Sequence[PartFigures]], *, brief: bool
) -> Table:
    """Return a table of the parts of runs, such as models or classes of traffic.

    The table has one row per part of each run, and one row for all requests of the run. Runs with fewer than two parts
    have no rows. `noun` is the heading of the column with the names of the parts. The brief table has fewer figures.
    """
    rows: list[Cells] = []
    shows_good = any(summary.goodput for summary in summaries)
    shows_good = shows_good or any(part.goodput for parts_of_run in parts for part in parts_of_run)
    for index, (summary, parts_of_run) in enumerate(zip(summaries, parts, strict=True)):
        if len(parts_of_run) < 2:
            continue
        named: list[tuple[str, Summary | PartFigures]] = [(part.name, part) for part in parts_of_run]
        for name, part in (*named, ("all", summary)):
            rows.append([_run(index), name, *_part_cells(part, shows_good=shows_good, brief=brief)])
    unit = "" if brief else ", ms"
    latencies = [f"{METRICS[name].short} {figure}{unit}" for name, figure in _part_figures(brief=brief)]
    goodput = ["good"] if shows_good else []
    columns = number_columns("sent", "complete", *goodput, "req/s", "tokens/s", *latencies)
    thin = any(isinstance(cell, TableCell) and cell.thin for row in rows for cell in row)
    notes = ["* too few independent samples."] if thin else []
    heads: Mapping[str, ColumnKind] = {"run": "text", noun: "head", **columns}
    full_title = f"{title}, latencies in ms" if brief else title
    return table(full_title, heads, rows, several=len(summaries) > 1, id=title.lower(), notes=notes)


def _part_figures(*, brief: bool) -> Sequence[tuple[str, str]]:
    return PART_FIGURES[:3] if brief else PART_FIGURES


def _part_cells(part: Summary | PartFigures, *, shows_good: bool, brief: bool) -> list[TableCell]:
    """Return the cells of one row: sent, complete and good requests, the rates, and the latencies in ms."""
    requests = part.requests
    throughput = part.throughput
    latencies = part.latencies
    good = TableCell("")
    if part.goodput is not None:
        good = TableCell(percent(part.goodput.attainment), part.goodput.attainment)
    rates = (throughput.requests_per_s, throughput.output_tokens_per_s)
    return [
        TableCell(f"{requests.sent:,}", requests.sent),
        TableCell(f"{requests.complete:,}", requests.complete),
        *([good] if shows_good else []),
        *(TableCell(significant(rate, 4), rate) for rate in rates),
        *(statistic_cell(latencies[name], figure, 1e3, bare=True) for name, figure in _part_figures(brief=brief)),
    ]


def session_roles(summaries: Summaries) -> Table:
    """Return the table of latency by role, for runs whose sessions are graphs."""
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for role in summary.sessions.roles if summary.sessions else ():
            row: list[TableCell | str] = [_run(index), role.role, f"{role.n:,}"]
            for described in (role.ttft_s, role.e2e_s):
                row += [statistic_cell(described, figure, 1e3, bare=True) for figure in ("p50", "p90")]
            rows.append(row)
    columns = number_columns("n", "TTFT p50, ms", "TTFT p90, ms", "E2E p50, ms", "E2E p90, ms")
    several = len(summaries) > 1
    return table("Latency by role", {"run": "text", "role": "text", **columns}, rows, several=several, id="roles")


def session_edges(summaries: Summaries) -> Table:
    """Return the table of requested and actual delays between requests, for runs whose sessions are graphs."""
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for edge in summary.sessions.edges if summary.sessions else ():
            row: list[TableCell | str] = [_run(index), edge.after, f"{edge.n:,}", f"{edge.deciding:,}"]
            for described in (edge.requested_s, edge.actual_s):
                row += [statistic_cell(described, figure, 1e3, bare=True) for figure in ("p50", "max")]
            row += [statistic_cell(edge.late_s, figure, 1e3, bare=True) for figure in ("p99", "max")]
            rows.append(row)
    columns = number_columns(
        "edges",
        "deciding",
        "requested p50, ms",
        "requested max, ms",
        "actual p50, ms",
        "actual max, ms",
        "late p99, ms",
        "late max, ms",
    )
    several = len(summaries) > 1
    return table(
        "Delays between requests", {"run": "text", "after the": "text", **columns}, rows, several=several, id="edges"
    )


def failures(summary: Summary, run: int | None = None) -> Table:
    """Return the table of errors, with one row per kind: its count, its share and the most frequent reasons."""
    requests = summary.requests
    rows = []
    for kind, count in requests.errors.items():
        examples = requests.examples[kind]
        times = [f"{example.count:,} x " if len(examples) > 1 or example.count < count else "" for example in examples]
        lines = [f"{number}{_reason(kind, example)}" for number, example in zip(times, examples, strict=True)]
        remaining = count - sum(example.count for example in examples)
        if remaining > 0:
            lines.append(f"and {remaining:,} others")
        share = percent(count / max(1, requests.sent + requests.dropped))
        level: Level = "warning" if kind == "rejected" else "error"
        cells = [TableCell(f"{count:,}", count), TableCell(kind, code=True, level=level), TableCell(share)]
        linked = [example.request for example in examples] if run is None else []
        rows.append(TableRow([*cells, TableCell("", lines=lines, requests=linked)], kind))
    heads: dict[str, ColumnKind] = {"requests": "number", "kind": "head", "share": "number", "reasons": "text"}
    stopped = findings.stopped_count(summary)
    counts = {"failed": requests.failed - stopped, "rejected": requests.rejected, "truncated": requests.truncated}
    counts |= {"dropped": requests.dropped, "stopped with the run": stopped}
    title = ", ".join(f"{number:,} {state}" for state, number in counts.items() if number)
    return Table(title, [TableColumn(*head) for head in heads.items()], rows, "failures", run=run)


def _reason(kind: str, example: ErrorExample) -> str:
    """Return the reason for an error as text. The words of the server are in quotation marks.

    Servers often repeat the HTTP status at the end of their message. The result contains the status only once."""
    status = "" if example.http_status in (None, 200) else f"HTTP {example.http_status}"
    detail = example.detail
    if status:
        detail = detail.removesuffix(f" ({example.http_status})")
        detail = re.sub(rf", {example.http_status}\)$", ")", detail)
    if detail and kind in SERVER_WORDS:
        detail = f"“{detail}”"
    return " ".join(filter(None, (status, detail))) or kind


def events(summaries: Summaries) -> Table:
    """Return the table of the events that are marked on the chart of the run over time, such as restarts."""
    rows = [
        (
            _run(index),
            TableCell(elapsed(event.at_s), event.at_s),
            TableCell(event.label, level=event.level),
            event.sentence.replace("`", ""),
        )
        for index, summary in enumerate(summaries)
        for event in course_events(summary)
    ]
    heads: Mapping[str, ColumnKind] = {"run": "text", "time": "head", "event": "text", "description": "text"}
    return table("Events", heads, rows, several=len(summaries) > 1, id="events")


def objectives(summaries: Summaries) -> Table:
    """Return the table of objectives, with their verdicts and the measured values."""
    rows = []
    for index, summary in enumerate(summaries):
        for objective in summary.objectives:
            verdict = TableCell(objective.verdict, level=LEVELS[objective.verdict])
            text = TableCell(objective.objective, code=True)
            rows.append((_run(index), verdict, text, objective.said))
    judged = [objective for summary in summaries for objective in summary.objectives]
    inconclusive = sum(objective.verdict == "inconclusive" for objective in judged)
    notes = []
    left_out = max((objective.left_out for objective in judged), default=0)
    if left_out:
        notes.append(f"Latencies leave out {pluralise(left_out, 'incomplete request')}.")
    if inconclusive:
        notes.append(f"{pluralise(inconclusive, 'objective')} inconclusive: neither passed nor failed.")
    if any(objective.marginal and objective.verdict != "inconclusive" for objective in judged):
        notes.append(MARGINAL)
    heads: Mapping[str, ColumnKind] = {"run": "text", "verdict": "text", "objective": "head", "measured": "text"}
    return table("Objectives", heads, rows, several=len(summaries) > 1, id="objectives", notes=notes)


def prediction(summaries: Summaries) -> Table:
    """Return the table of the figures that a twin (a simulated server fitted to a measured one) predicts."""
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for predicted in summary.prediction:
            factor, unit = unit_of(predicted.figure, predicted.value)
            value = significant(predicted.value * factor)
            interval = interval_text(significant(predicted.low * factor), significant(predicted.high * factor))
            rows.append((_run(index), figure_title(predicted.figure), value, unit, interval))
    heads: Mapping[str, ColumnKind] = {
        "run": "text",
        "figure": "head",
        "predicted": "number",
        "unit": "text",
        "95% CI": "number",
    }
    return table("Predicted by the twin", heads, rows, several=len(summaries) > 1)


def goodput(summaries: Summaries) -> Table:
    """Return the table of goodput: the number of requests that met the bounds of --goodput.

    The last column shows the bounds that 90% of the requests would have met.
    """
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        result = summary.goodput
        if not result:
            continue
        if len(result.bounds) > 1:
            for bound, attainment in result.each.items():
                good = "" if attainment is None else f"{round(attainment * result.requests):,}"
                bound_cells = (_run(index), TableCell(bound, code=True), good, f"{result.requests:,}")
                rows.append([*bound_cells, percent(attainment), "", "", ""])
        met = result.met_by["90%"]
        bounds = (", ".join(findings.bound_texts(met, " ")) or "any bounds") if met else UNKNOWN
        interval = interval_text(*(significant(end * 100) for end in result.attainment_ci95))
        figures = (f"{result.good:,}", f"{result.requests:,}", percent(result.attainment), f"{interval}%")
        every = TableCell("all bounds") if len(result.bounds) > 1 else TableCell(result.bounds[0], code=True)
        rows.append([_run(index), every, *figures, significant(result.per_s), bounds])
    columns = number_columns("good", "of", "attainment", "95% CI", "goodput, requests/s")
    heads: Mapping[str, ColumnKind] = {"run": "text", "bound": "head", **columns, "90% would have met": "text"}
    return table("Good requests", heads, rows, several=len(summaries) > 1)


def overview(summaries: Summaries, heads: Mapping[str, ColumnKind] | None = None, named: Sequence[Cells] = ()) -> Table:
    """Return the table with the main figures of the runs, with one row per run. Each latency column has a fixed unit.

    By default, the first column shows the name of the run. A caller can replace this column with other columns that
    identify a run: `heads` are their headings, and `named` contains their cells for each run.
    """
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        cells = named[index] if named else [_run(index)]
        rows.append([*cells, *overview_cells(summary)])
    heads = {**(heads or {"run": "head"}), **overview_columns()}
    return table("All runs", heads, rows, several=True, id="overview")


def overview_columns() -> dict[str, ColumnKind]:
    """Return the headings of the main figures of a run, as `table` expects them."""
    latencies = (f"{METRICS[name].short} {figure}, {unit}" for name, figure, unit in OVERVIEW)
    return {**number_columns("output, tokens/s", "requests, /s", *latencies, "complete"), "validity": "text"}


def overview_cells(summary: Summary) -> list[TableCell]:
    """Return the cells with the main figures of a run, one for each of `overview_columns`."""
    requests_per_s = summary.throughput.requests_per_s
    cells = [output_rate_cell(summary), TableCell(significant(requests_per_s, 4), requests_per_s)]
    for name, figure, unit in OVERVIEW:
        cells.append(statistic_cell(summary.latencies[name], figure, OVERVIEW_FACTORS[unit], bare=True))
    requests = summary.requests
    complete = TableCell(f"{requests.complete:,} of {requests.planned:,}", requests.complete)
    return [*cells, complete, validity_cell(summary)]


def output_rate_cell(summary: Summary) -> TableCell:
    """Return the cell with the output tokens per second, or with a dash for a run that generates no tokens."""
    rate = summary.throughput.output_tokens_per_s
    return TableCell(significant(rate, 4), rate) if summary.generates else TableCell(UNKNOWN)


def validity_cell(summary: Summary) -> TableCell:
    """Return the cell that says whether the measurement of a run is valid, such as `valid`, `warning` or `invalid`.

    Incomplete requests do not affect this cell, because the table has a separate column for them.
    """
    verdict = findings.verdict(summary, findings.concerns(findings.findings(summary)))
    return TableCell(verdict.id, level=verdict.level)


def longest_gaps(gaps: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """Return the table of the longest gaps between tokens.

    The table has the eight longest gaps of a single run, or the three longest gaps of each of several runs.
    """
    several = len(gaps) > 1
    rows = []
    for index, gaps_of_run in enumerate(gaps):
        for gap in gaps_of_run[: 3 if several else 8]:
            size_s = TableCell(duration(gap["gap_s"]), gap["gap_s"])
            rows.append((_run(index), size_s, str(gap["request"]), f"{gap['token']:,}", f"{gap['from_s']:,.3f}"))
    heads: Mapping[str, ColumnKind] = {"run": "text", **number_columns("gap", "request", "before token", "from, s")}
    return table("Longest gaps", heads, rows, several=several)


def load(summaries: Summaries, names: Sequence[str]) -> Table:
    """Return the table that compares the requested load with the actual load, with one column per run.

    The rows marked `target` show the requested load, and the rows marked `actual` show the load that was sent. The rows
    marked `due` show the load according to the due times of the requests. For runs with sessions, the table counts
    sessions instead of requests.
    """
    deliveries = [summary.delivery for summary in summaries]
    noun = "Sessions" if all(summary.run.load.sessions for summary in summaries) else "Requests"
    sides = {"named": "target", "due": "due", "sent": "actual"}
    counts = {"asked": "due", "sent": "sent", "not_sent": "not sent"}
    rows = []
    for key, word in counts.items():
        rows.append((f"{noun} {word}", [f"{getattr(delivery, key):,}" for delivery in deliveries]))
    for key, title in {"rate_per_s": f"{noun} per second", "cv": "Inter-arrival CV"}.items():
        for side, word in sides.items():
            values = [getattr(getattr(delivery, key), side) for delivery in deliveries]
            rows.append((f"{title}, {word}", [significant(value, 4) for value in values]))
    for side in ("due", "sent"):
        tests = [getattr(delivery.ks, side) for delivery in deliveries]
        rows.append((f"Kolmogorov-Smirnov p, {sides[side]}", [significant(test and test.p_value, 2) for test in tests]))
    for figure in ("p50", "p90", "p99", "max"):
        delays = [getattr(delivery.late_s, figure) if delivery.late_s else None for delivery in deliveries]
        rows.append((f"Dispatch delay, {figure}", [duration(delay) for delay in delays]))
    known = [(title, *texts) for title, texts in rows if set(texts) != {UNKNOWN}]
    return table("Requested and actual load", _columns_by_run(names), known, several=True, id="load")


def lengths(summaries: Summaries) -> Table:
    """Return the table of requested tokens, reported tokens, and the number of requests in which the two differ."""
    rows: list[Cells] = []
    for index, tokens in enumerate(summary.tokens for summary in summaries):
        for side in ("Prompt", "Output"):
            figures = (getattr(tokens, f"{side.lower()}_{name}") for name in ("asked", "reported", "mismatches"))
            rows.append((_run(index), f"{side}s", *(f"{figure:,}" for figure in figures)))
    columns = number_columns("requested", "reported", "requests that differ")
    heads: Mapping[str, ColumnKind] = {"run": "text", "side": "head", **columns}
    incomplete = sum(summary.requests.incomplete for summary in summaries)
    notes = []
    if incomplete:
        verb = "is" if incomplete == 1 else "are"
        notes.append(f"{pluralise(incomplete, 'incomplete request')} {verb} requested but not compared.")
    title = "Tokens, as counted by the server"
    return table(title, heads, rows, several=len(summaries) > 1, id="lengths", notes=notes)


def canaries(summaries: Summaries) -> Table:
    """Return the table of the answers to canaries (test prompts of --verify) by the number of requests in flight."""
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for level in summary.canaries.levels if summary.canaries else ():
            low, high = (f"{end * 100:.3g}" for end in level.same_ci95)
            in_flight = (
                f"{level.low:,}" if level.low == level.high else interval_text(f"{level.low:,}", f"{level.high:,}")
            )
            wrong = TableCell(f"{level.wrong:,}", level.wrong, level="error" if level.wrong else "")
            share = percent(level.same / level.answers)
            cells = (_run(index), TableCell(in_flight, level.low), f"{level.answers:,}", f"{level.same:,}")
            rows.append([*cells, share, f"{interval_text(low, high)}%", wrong])
    columns = number_columns("answers", "same as without load", "share", "95% CI", "wrong")
    heads: Mapping[str, ColumnKind] = {"run": "text", "requests in flight": "head", **columns}
    notes = ["An answer that begins in the same way and then differs is neither the same nor wrong."]
    return table("Answers by load", heads, rows, several=len(summaries) > 1, id="canaries", notes=notes if rows else [])


def client(summaries: Summaries, names: Sequence[str]) -> Table:
    """Return the table of the client's health figures and their limits.

    If a figure exceeds its limit, the client may have influenced the results.
    """
    limits = {limit.figure: (figure_text(limit.figure, limit.maximum), limit.meaning) for limit in LIMITS}
    rows = []
    for name, title in CLIENT_FIGURES.items():
        values = [figure_text(name, getattr(summary.client, name)) for summary in summaries]
        rows.append((title, *values, *limits.get(name, ("", ""))))
    heads: Mapping[str, ColumnKind] = {**_columns_by_run(names), "limit": "number", "if exceeded": "text"}
    return table("Client figures and limits", heads, rows, several=True)


def memory(summaries: Summaries) -> Table:
    """Return the table of memory use by GPU, process and host: before and after the load, peak, and capacity."""
    rows = []
    for index, summary in enumerate(summaries):
        result = summary.memory
        if not result:
            continue
        hosts = [result.host] if result.host else []
        for levels in (*result.gpus, *result.processes, *hosts):
            owner = f"{levels.of[0].upper()}{levels.of[1:]}"
            device = getattr(levels, "on", "host")
            if device != "host":
                owner += f" on {device}"
            total_bytes = getattr(levels, "total_bytes", None)
            sizes = (levels.idle_bytes, levels.loaded_bytes, levels.peak_bytes, total_bytes)
            cells = [TableCell(byte_size(size_bytes), size_bytes) for size_bytes in sizes]
            rows.append([_run(index), TableCell(owner, note=getattr(levels, "name", "")), *cells])
    columns = number_columns("before the first request", "after the last", "peak", "total")
    heads: Mapping[str, ColumnKind] = {"run": "text", "memory of": "head", **columns}
    return table("Memory in use", heads, rows, several=len(summaries) > 1, id="memory")


def counters(summaries: Summaries) -> Table:
    """Return the table that compares the counters of the server with the counters of the client."""
    titles = {"cached_prompt_tokens": "Prompt tokens from the cache"}
    rows = []
    for index, summary in enumerate(summaries):
        for name, counter in summary.server_counters.items():
            client_count = UNKNOWN if counter.client is None else f"{counter.client:,}"
            if counter.client_most is not None:
                client_count += f" to {counter.client_most:,}"
            equal = {True: "yes", False: "no", None: UNKNOWN}[counter.agree]
            title = titles.get(name, name.replace("_", " ").capitalize())
            rows.append((_run(index), title, f"{counter.server:,}", client_count, equal, counter.why))
    columns = number_columns("server", "client")
    heads: Mapping[str, ColumnKind] = {"run": "text", "counter": "head", **columns, "equal": "text", "reason": "text"}
    return table("Server and client counts", heads, rows, several=len(summaries) > 1, id="counters")


def _interval(summary: Summary, rate: str) -> str:
    """Return the 95% interval of the rate `rate` as text, or an empty string if the run has no interval."""
    ends = summary.throughput.ci95.get(rate)
    return confidence_interval(significant(ends[0], 4), significant(ends[1], 4)) if ends else ""


def _median_card(label: str, described: Distribution) -> Card:
    factor, _ = scale_of(described.p50)
    low, high = described.ci95.get("p50", (None, None))
    if "p50" in described.thin or low is None or high is None:
        interval = f"median of {described.n:,}: too few" if described.n else "no sample"
    else:
        ends = confidence_interval(significant(low * factor), significant(high * factor))
        interval = ", ".join(filter(None, ("median", ends)))
    p99 = "" if "p99" in described.thin or described.p99 is None else f"p99 {duration(described.p99)}"
    return _duration_card(label, described.p50, _joined(interval, p99))


def _duration_card(label: str, seconds: float | None, note: str) -> Card:
    value, _, unit = duration(seconds).partition(" ")
    return Card(label, value, unit, note)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _run(index: int) -> TableCell:
    """Return a cell that shows the name of the run with this index."""
    return TableCell("", run=index)


def _columns_by_run(names: Sequence[str]) -> dict[str, ColumnKind]:
    """Return the headings and the column kinds of a table of figures with one column per run.

    `names` are the names of the runs.
    """
    return {"figure": "head", **number_columns(*(names if len(names) > 1 else ["value"]))}


CLIENT_FIGURES = {
    "error_bar_s": "Error of a timestamp",
    "error_bar_ttft_s": "Error of TTFT",
    "error_bar_tpot_s": "Error of TPOT",
    "error_bar_itl_s": "Error of ITL",
    "late_p50_s": "Read delay, median",
    "late_p99_s": "Read delay, p99",
    "late_max_s": "Read delay, maximum",
    "coalesced_share": "Coalesced reads",
    "send_late_p99_s": "Dispatch delay, p99",
    "stall_max_s": "Longest stall",
    "full_reads": "Reads of a full window",
    "windows": "Late reads before which the receive window was checked",
    "sweep_max_s": "Longest interval between reads",
    "retransmit_share": "Retransmitted segments, per request",
    "out_of_order_share": "Segments out of order, per read",
    "ring_drops": "Segments dropped by the packet ring",
    "ring_missed": "Timestamps missing in the packet ring",
    "ring_rejected": "Requests whose packet timestamps were wrong",
    "ring_given_up": "Workers that stopped using packet timestamps",
    "socket_rejected": "Requests whose kernel timestamps were wrong",
    "ring_off_p50_s": "Difference of packet and socket timestamps, median",
    "ring_off_p99_s": "Difference of packet and socket timestamps, p99",
    "ring_off_max_s": "Difference of packet and socket timestamps, maximum",
    "cpu_share": "CPU in the busiest second, of one core",
    "cpu_s": "CPU time of all workers",
    "core_wait_s": "Time that workers waited for a core",
    "core_wait_max_s": "Longest wait for a core in one second",
    "realtime_given_up": "Workers that gave up real-time priority",
    "clock_disagreement_s": "Clock drift during the run",
    "clock_step_s": "Clock drift that slewing does not explain",
    "first_token_merged": "Coalesced first tokens",
    "reopened": "Connections reopened",
    "sent_again": "Requests sent again",
    "pauses": "Pauses of the closed loop after failures",
    "paused_s": "Total length of these pauses, over all clients",
    "worker_lost": "Requests lost with their worker",
    "client_limit": "Requests that this machine could not send",
}
