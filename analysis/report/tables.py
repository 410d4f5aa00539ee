"""Each table of a report and the cards of its first screen, once: for one run or several, in short or in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from loadgen.analysis.client_health import LIMITS
from loadgen.analysis.client_health import figure_text as limit_text
from loadgen.analysis.format import (
    UNKNOWN,
    byte_size,
    duration,
    figure_title,
    percent,
    pluralise,
    scale_of,
    significant,
    unit_of,
)
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.objectives import AdjustedDistribution, Distribution
from loadgen.analysis.report import Card, ColumnKind, Level, Table, TableCell, TableColumn, TableRow, findings
from loadgen.analysis.stats import PERCENTILES, WITH_INTERVAL, samples_needed
from loadgen.analysis.summary import Summary

STATISTICS = ("mean", "min", *WITH_INTERVAL, "p99_9", "max")
BRIEF_STATISTICS = ("mean", *WITH_INTERVAL, "max")
BRIEF_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "normalised_s")
OVERVIEW = (
    *(("ttft_s", "p50", "s"), ("ttft_s", "p99", "s"), ("tpot_s", "p50", "ms"), ("itl_s", "p99", "ms")),
    ("e2e_s", "p50", "s"),
)
OF_TOKENS = ("output", "total", "ttft_s", "tpot_s", "itl_s", "normalised")
"""Cards that a run without generated tokens does not have."""
TURNS_BRIEF = 10
"""Turns in the terminal; the page has them all."""
ERROR_SAID = 1e-3
"""From which share on the timing error of a rate is mentioned."""
DIGITS_MAX = 100_000
"""A median from here on takes another unit than the latencies it is compared with."""
LEVELS: Mapping[str, Level] = {"pass": "ok", "fail": "error", "inconclusive": "warning"}
Summaries = Sequence[Summary]
Cells = Sequence[TableCell | str]


def number_columns(*titles: str) -> dict[str, ColumnKind]:
    """The heads of columns of numbers."""
    return dict.fromkeys(titles, "number")


def table(title: str, heads: Mapping[str, ColumnKind], rows: Iterable[Cells], *, several: bool, **more: Any) -> Table:
    """A table from texts and cells. The column `run` is left out where there is one run."""
    retained = [index for index, head in enumerate(heads) if several or head != "run"]
    columns = [TableColumn(head, kind) for head, kind in heads.items() if several or head != "run"]
    made = [[TableCell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return Table(title, columns, [TableRow([row[each] for each in retained]) for row in made], **more)


def cards(summary: Summary) -> dict[str, Card]:
    """The figures of the first screen, by short names."""
    throughput, latency, requests = summary.throughput, summary.latencies, summary.requests
    if not requests.complete:
        took = f"in {duration(summary.run.duration_s)}"
        return {"requests": Card("Requests complete", "0", f"of {requests.planned:,}", took)}
    ended = _joined(_completed(summary), _interval(summary, "requests_per_s"))
    error, steady = throughput.error_share or 0, throughput.steady_output_tokens_per_s
    drain = f"{significant(steady, 4)} excluding drain ({percent(throughput.tail_share)} of the run)"
    timing = f"±{percent(error)} timing error" if error >= ERROR_SAID else ""
    tokens = ""
    if throughput.output_tokens is not None:
        tokens = f"{throughput.output_tokens:,} tokens in {duration(throughput.span_s)}"
    drained = "" if steady is None else drain
    exact = _joined(tokens, _interval(summary, "output_tokens_per_s"), drained, timing)
    total = _interval(summary, "total_tokens_per_s") or "with prompts"
    result = {
        "output": Card("Output throughput", significant(throughput.output_tokens_per_s, 4), "tokens/s", exact),
        "total": Card("Total throughput", significant(throughput.total_tokens_per_s, 4), "tokens/s", total),
        "requests": Card("Requests", significant(throughput.requests_per_s), "/s", ended),
        **{name: _median(METRICS[name].title, latency[name]) for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        "normalised": _timed("Normalised latency", latency["normalised_s"].mean, "mean, per token"),
    }
    if summary.burst.skew_s is not None:
        bounds = summary.burst.skew_range_s
        said = f"{duration(bounds[0])} to {duration(bounds[1])}, as far as clocks tell" if bounds else ""
        result["skew"] = _timed("Burst skew", summary.burst.skew_s, said or "from the first byte sent to the last")
    else:
        rate = summary.delivery.rate_per_s
        target = "" if rate.named is None else f"target {significant(rate.named, 4)}"
        title = "Sessions begun" if summary.run.load.sessions else "Actual load"
        result["load"] = Card(title, significant(rate.sent, 4), "/s", target)
    if summary.generates:
        return result
    exact = _joined(_interval(summary, "input_tokens_per_s"), timing)
    first = {"input": Card("Input throughput", significant(throughput.input_tokens_per_s, 4), "tokens/s", exact)}
    return first | {name: each for name, each in result.items() if name not in OF_TOKENS}


def _completed(summary: Summary) -> str:
    """How many requests completed in how long: the numerator and the denominator of the request throughput."""
    requests, throughput = summary.requests, summary.throughput
    of_all = f"{requests.complete:,} of {requests.planned:,} complete"
    rejected = f"{requests.rejected:,} rejected" if requests.rejected else ""
    if throughput.completed is None:  # written by an older version
        return _joined(of_all, rejected)
    span = duration(throughput.span_s)
    if summary.window.whole:
        return _joined(f"{of_all} in {span}", rejected)
    return _joined(f"{throughput.completed:,} ended in the window of {span}", of_all, rejected)


def latency(
    summaries: Summaries, *, brief: bool = False, adjusted: bool = False, only: Sequence[str] = tuple(METRICS)
) -> Table:
    """Statistics of each latency and run. `adjusted`: with every other request as infinitely slow."""
    several = len(summaries) > 1
    shown = WITH_INTERVAL if adjusted else BRIEF_STATISTICS if brief else STATISTICS
    parts: list[Mapping[str, Distribution | AdjustedDistribution]]
    parts = [dict(summary.latencies_adjusted if adjusted else summary.latencies) for summary in summaries]
    rows = []
    requested = any(summary.generates for summary in summaries)
    for name in BRIEF_LATENCIES if brief else parts[0]:
        if name not in only or (not requested and not any(part[name].n for part in parts)):
            continue
        factor, unit = _unit(name, parts)
        for index, part in enumerate(parts):
            heads = [TableCell(METRICS[name].short, note="" if brief else METRICS[name].title)]
            heads += [_run(index)] if several else []
            heads += [TableCell(unit), *([] if brief else [TableCell(f"{part[name].n:,}", part[name].n)])]
            cells = [statistic_cell(part[name], figure, factor) for figure in shown]
            rows.append(TableRow([*heads, *cells], name, several and index == 0))
    columns = [TableColumn("" if brief else "latency", "head"), *([TableColumn("run", "text")] if several else [])]
    columns += [TableColumn("" if brief else "unit", "unit"), *([] if brief else [TableColumn("n")])]
    columns += [TableColumn(name.replace("p99_9", "p99.9"), key=name) for name in shown]
    thin = [name for index, name in enumerate(shown, -len(shown)) if any(row.cells[index].thin for row in rows)]
    needed = ", ".join(f"{name.replace('_', '.')} {samples_needed(PERCENTILES[name]):,}" for name in thin)
    notes = [f"* too few independent samples: {needed} needed."] if thin else []
    if brief and summaries[0].burst.skew_s is not None and summaries[0].requests.complete:
        notes.append("Requests share one queue: only --repeats shows how another burst would differ.")
    title = "Latency, incomplete requests as infinitely slow" if adjusted else "Latency of complete requests"
    return Table(title, columns, rows, "percentiles", notes)


def _unit(name: str, parts: Sequence[Mapping[str, Distribution | AdjustedDistribution]]) -> tuple[float, str]:
    """Factor and unit of a latency's row, the same for every run and every statistic.

    Latencies that are compared with each other share the unit of the first of them: TTFT with E2E, TPOT with ITL. A
    row's own median is no good guide for ITL, because tokens that share a read make it tiny next to the mean. A row
    leaves the shared unit where its median would have more than five digits."""
    metric = METRICS[name]
    paced = metric.unit == "s/token" or metric.per in ("chunk", "token")
    own_s = _typical_s(parts, name)
    shared_s = _typical_s(parts, "tpot_s" if paced else "ttft_s") or own_s
    shared = scale_of(shared_s)
    return scale_of(own_s) if own_s is not None and own_s * shared[0] >= DIGITS_MAX else shared


def _typical_s(parts: Sequence[Mapping[str, Distribution | AdjustedDistribution]], name: str) -> float | None:
    """The median of a latency in the middle one of several runs, or its mean where the median is 0 or infinite."""
    known = [part[name].p50 or getattr(part[name], "mean", None) for part in parts if name in part]
    values = [value for value in known if value]
    return median_low(values) if values else None


def statistic_cell(
    described: Distribution | AdjustedDistribution, figure: str, factor: float, *, bare: bool = False
) -> TableCell:
    """One statistic with its interval, or without; a percentile of too few samples has a mark."""
    value = getattr(described, figure)
    thin = figure in described.thin or (figure == "p99_9" and value is None and described.n > 0)
    infinite = isinstance(described, AdjustedDistribution) and described.failures
    text = "∞" if value is None and infinite else significant(value if value is None else value * factor, 4)
    text += "*" if thin and text != UNKNOWN else ""
    ends = (None, None) if isinstance(described, AdjustedDistribution) else described.ci95.get(figure, (None, None))
    if bare or ends == (None, None):
        return TableCell(text, value, thin=thin)
    said = ["∞" if end is None else significant(end * factor, 4) for end in ends]
    return TableCell(text, value, " to ".join(said), thin=thin)


def turns(summaries: Summaries, *, brief: bool = False) -> Table:
    """Latency by turn, where runs were of sessions."""
    rows: list[Cells] = []
    for index, summary in enumerate(summaries):
        for turn in summary.turns[: TURNS_BRIEF if brief else None]:
            prompts = turn.prompt_tokens_mean
            heads = (str(turn.turn), f"{turn.n:,}", UNKNOWN if prompts is None else f"{prompts:,.0f}")
            both = [(each, figure) for each in (turn.ttft_s, turn.e2e_s) for figure in ("p50", "p90")]
            rows.append([_run(index), *heads, *(statistic_cell(each, figure, 1e3, bare=True) for each, figure in both)])
    more = len(summaries[0].turns) - TURNS_BRIEF
    notes = [f"{pluralise(more, 'later turn')} in summary.json and on the page."] if brief and more > 0 else []
    columns = number_columns(
        "turn", "n", "prompt, tokens", "TTFT p50, ms", "TTFT p90, ms", "E2E p50, ms", "E2E p90, ms"
    )
    several = len(summaries) > 1
    return table("Latency by turn", {"run": "text", **columns}, rows, several=several, id="turns", notes=notes)


def failures(summary: Summary, run: int | None = None) -> Table:
    """One row per kind of error: how many, their share, and its most frequent reasons."""
    requests = summary.requests
    rows = []
    for kind, number in requests.errors.items():
        lines = []
        for example in requests.examples[kind]:
            status = f"HTTP {example.http_status}" if example.http_status not in (None, 200) else ""
            said = " ".join(filter(None, (status, example.detail and f"“{example.detail}”"))) or kind
            lines.append(f"{example.count:,} x {said}")
        if (others := number - sum(example.count for example in requests.examples[kind])) > 0:
            lines.append(f"and {others:,} others")
        part = percent(number / max(1, requests.sent + requests.dropped))
        level: Level = "warning" if kind == "rejected" else "error"
        cells = [TableCell(f"{number:,}", number), TableCell(kind, code=True, level=level), TableCell(part)]
        firsts = [example.request for example in requests.examples[kind]] if run is None else []
        rows.append(TableRow([*cells, TableCell("", lines=lines, requests=firsts)], kind))
    heads: dict[str, ColumnKind] = {"requests": "number", "kind": "head", "share": "number", "reasons": "text"}
    stopped = findings.stopped_count(summary)
    title = f"{requests.failed - stopped:,} failed, {requests.rejected:,} rejected, "
    title += f"{requests.truncated:,} truncated, {requests.dropped:,} dropped"
    title += f", {stopped:,} stopped with the run" if stopped else ""
    return Table(title, [TableColumn(*head) for head in heads.items()], rows, "failures", run=run)


def objectives(summaries: Summaries) -> Table:
    """Every objective, its verdict, and what was measured."""
    stated = [(index, objective) for index, summary in enumerate(summaries) for objective in summary.objectives]
    rows = []
    for index, each in stated:
        verdict = TableCell(each.verdict, level=LEVELS[each.verdict])
        rows.append((_run(index), verdict, TableCell(each.objective, code=True), findings.measured_text(each)))
    untold = sum(each.verdict == "inconclusive" for _, each in stated)
    notes = [f"{pluralise(untold, 'objective')} inconclusive: neither passed nor failed."] if untold else []
    heads: Mapping[str, ColumnKind] = {"run": "text", "verdict": "text", "objective": "head", "measured": "text"}
    return table("Objectives", heads, rows, several=len(summaries) > 1, id="objectives", notes=notes)


def prediction(summaries: Summaries) -> Table:
    """Each figure that a twin predicts, with its interval."""
    rows: list[Cells] = []
    for index, each in ((index, each) for index, summary in enumerate(summaries) for each in summary.prediction):
        factor, unit = unit_of(each.figure, each.value)
        ends = " to ".join(significant(end * factor) for end in (each.low, each.high))
        rows.append((_run(index), figure_title(each.figure), significant(each.value * factor), unit, ends))
    heads: Mapping[str, ColumnKind] = {
        "run": "text",
        "figure": "head",
        "predicted": "number",
        "unit": "text",
        "95 %": "number",
    }
    return table("Predicted by the twin", heads, rows, several=len(summaries) > 1)


def goodput(summaries: Summaries) -> Table:
    """How many requests met the bounds, and which bounds 90 % would have met."""
    rows: list[Cells] = []
    for index, result in ((index, each.goodput) for index, each in enumerate(summaries) if each.goodput):
        met = result.met_by["90%"]
        bounds = (", ".join(findings.bound_texts(met, " ")) or "any bounds") if met else UNKNOWN
        interval = " to ".join(significant(end * 100) for end in result.attainment_ci95)
        figures = (f"{result.good:,}", f"{result.requests:,}", percent(result.attainment), f"{interval} %")
        rows.append([_run(index), *figures, significant(result.per_s), bounds])
    columns = number_columns("good", "of", "attainment", "95 %", "goodput, requests/s")
    heads: Mapping[str, ColumnKind] = {"run": "head", **columns, "90 % would have met": "text"}
    return table("Good requests", heads, rows, several=len(summaries) > 1)


def overview(summaries: Summaries, heads: Mapping[str, ColumnKind] | None = None, named: Sequence[Cells] = ()) -> Table:
    """One row per run: latencies are in one unit down a column, to be compared. `named` are the cells that tell the
    runs apart, under `heads`."""
    rows: list[Cells] = []
    for index, each in enumerate(summaries):
        verdict = findings.verdict(each, findings.findings(each))
        rates = (each.throughput.output_tokens_per_s, each.throughput.requests_per_s)
        cells = [*(named[index] if named else [_run(index)])]
        cells += [TableCell(significant(rate, 4), rate) for rate in rates]
        for name, figure, unit in OVERVIEW:
            cells.append(statistic_cell(each.latencies[name], figure, {"s": 1.0, "ms": 1e3}[unit], bare=True))
        ended = TableCell(f"{each.requests.complete:,} of {each.requests.planned:,}", each.requests.complete)
        rows.append([*cells, ended, TableCell(verdict.id, level=verdict.level)])
    latencies = (f"{METRICS[name].short} {figure}, {unit}" for name, figure, unit in OVERVIEW)
    columns = number_columns("output, tokens/s", "requests, /s", *latencies, "complete")
    heads = {**(heads or {"run": "head"}), **columns, "validity": "text"}
    return table("All runs", heads, rows, several=True, id="overview")


def longest_gaps(gaps: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """Eight of one run, three of each of several."""
    several = len(gaps) > 1
    rows = []
    for index, result in enumerate(gaps):
        for gap in result[: 3 if several else 8]:
            size_s = TableCell(duration(gap["gap_s"]), gap["gap_s"])
            rows.append((_run(index), size_s, str(gap["request"]), f"{gap['token']:,}", f"{gap['from_s']:,.3f}"))
    heads: Mapping[str, ColumnKind] = {"run": "text", **number_columns("gap", "request", "before token", "from, s")}
    return table("Longest gaps", heads, rows, several=several)


def load(summaries: Summaries, names: Sequence[str]) -> Table:
    """The load as requested, as due, and as sent: one column per run. Of sessions their first turns are meant."""
    result = [summary.delivery for summary in summaries]
    what = "Sessions" if all(summary.run.load.sessions for summary in summaries) else "Requests"
    sides = {"named": "target", "due": "due", "sent": "actual"}
    counted = {"asked": "due", "sent": "sent", "not_sent": "not sent"}
    rows = [(f"{what} {side}", [f"{getattr(each, key):,}" for each in result]) for key, side in counted.items()]
    for key, title in {"rate_per_s": f"{what} per second", "cv": "Inter-arrival CV"}.items():
        for side, word in sides.items():
            values = [getattr(getattr(each, key), side) for each in result]
            rows.append((f"{title}, {word}", [significant(value, 4) for value in values]))
    for side in ("due", "sent"):
        tests = [getattr(each.ks, side) for each in result]
        rows.append((f"Kolmogorov-Smirnov p, {sides[side]}", [significant(test and test.p_value, 2) for test in tests]))
    for figure in ("p50", "p90", "p99", "max"):
        late = [getattr(each.late_s, figure) if each.late_s else None for each in result]
        rows.append((f"Dispatch delay, {figure}", [duration(value) for value in late]))
    known = [(title, *texts) for title, texts in rows if set(texts) != {UNKNOWN}]
    return table("Requested and actual load", _by_run(names), known, several=True, id="load")


def lengths(summaries: Summaries) -> Table:
    """Tokens requested, tokens reported, and the requests in which the two differ."""
    rows: list[Cells] = []
    for index, tokens in enumerate(summary.tokens for summary in summaries):
        for side in ("Prompt", "Output"):
            figures = (getattr(tokens, f"{side.lower()}_{what}") for what in ("asked", "reported", "mismatches"))
            rows.append((_run(index), f"{side}s", *(f"{figure:,}" for figure in figures)))
    columns = number_columns("requested", "reported", "requests that differ")
    heads: Mapping[str, ColumnKind] = {"run": "text", "side": "head", **columns}
    return table("Tokens, as counted by the server", heads, rows, several=len(summaries) > 1, id="lengths")


def client(summaries: Summaries, names: Sequence[str]) -> Table:
    """The load generator's figures, with the limit beyond which it is taken for the bottleneck."""
    limits = {limit.figure: (limit_text(limit.figure, limit.most), limit.meaning) for limit in LIMITS}
    rows = []
    for name, title in CLIENT_FIGURES.items():
        values = [limit_text(name, getattr(summary.client, name)) for summary in summaries]
        rows.append((title, *values, *limits.get(name, ("", ""))))
    heads: Mapping[str, ColumnKind] = {**_by_run(names), "limit": "number", "beyond it": "text"}
    return table("The client, and its limits", heads, rows, several=True)


def memory(summaries: Summaries) -> Table:
    """Memory of GPUs, processes and hosts: before, after, at its peak, and in all."""
    rows = []
    for index, result in ((index, each.memory) for index, each in enumerate(summaries) if each.memory):
        for each in (*result.gpus, *result.processes, *([result.host] if result.host else [])):
            on = getattr(each, "on", "host")
            of = f"{each.of[0].upper()}{each.of[1:]}{f' on {on}' if on != 'host' else ''}"
            levels = (each.idle_bytes, each.loaded_bytes, each.peak_bytes, getattr(each, "total_bytes", None))
            cells = [TableCell(byte_size(level), level) for level in levels]
            rows.append([_run(index), TableCell(of, note=getattr(each, "name", "")), *cells])
    columns = number_columns("before the first request", "after the last", "peak", "total")
    heads: Mapping[str, ColumnKind] = {"run": "text", "of": "head", **columns}
    return table("Memory in use", heads, rows, several=len(summaries) > 1, id="memory")


def counters(summaries: Summaries) -> Table:
    """What the server counted beside the client's counts."""
    rows = []
    for index, summary in enumerate(summaries):
        for word, entry in summary.server_counters.items():
            ours = UNKNOWN if entry.client is None else f"{entry.client:,}"
            ours += "" if entry.client_most is None else f" to {entry.client_most:,}"
            agree = {True: "yes", False: "no", None: UNKNOWN}[entry.agree]
            titles = {"cached_prompt_tokens": "Prompt tokens from the cache"}
            title = titles.get(word, word.replace("_", " ").capitalize())
            rows.append((_run(index), title, f"{entry.server:,}", ours, agree, entry.why))
    columns = number_columns("server", "client")
    heads: Mapping[str, ColumnKind] = {"run": "text", "counted": "head", **columns, "equal": "text", "why not": "text"}
    return table("Server and client counts", heads, rows, several=len(summaries) > 1, id="counters")


def _interval(summary: Summary, rate: str) -> str:
    """The 95 % interval of a rate; empty where the run cannot tell it."""
    ends = summary.throughput.ci95.get(rate)
    return f"95 %: {significant(ends[0], 4)} to {significant(ends[1], 4)}" if ends else ""


def _median(label: str, described: Distribution) -> Card:
    factor, _ = scale_of(described.p50)
    low, high = described.ci95.get("p50", (None, None))
    if "p50" in described.thin or low is None or high is None:
        interval = f"median of {described.n:,}: too few" if described.n else "no sample"
    else:
        interval = f"median, 95 %: {significant(low * factor)} to {significant(high * factor)}"
    p99 = "" if "p99" in described.thin or described.p99 is None else f"p99 {duration(described.p99)}"
    return _timed(label, described.p50, _joined(interval, p99))


def _timed(label: str, seconds: float | None, note: str) -> Card:
    value, _, unit = duration(seconds).partition(" ")
    return Card(label, value, unit, note)


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _run(place: int) -> TableCell:
    return TableCell("", run=place)


def _by_run(names: Sequence[str]) -> dict[str, ColumnKind]:
    """The heads of a table with one column per run."""
    return {"figure": "head", **number_columns(*(names if len(names) > 1 else ["value"]))}


CLIENT_FIGURES = {
    "error_bar_s": "Error of a timestamp",
    "error_bar_ttft_s": "Error of TTFT",
    "error_bar_tpot_s": "Error of TPOT",
    "error_bar_itl_s": "Error of ITL",
    "late_p50_s": "Reads late, median",
    "late_p99_s": "Reads late, p99",
    "late_max_s": "Reads late, largest",
    "coalesced_share": "Coalesced reads",
    "send_late_p99_s": "Dispatch delay, p99",
    "stall_max_s": "Longest stall",
    "full_reads": "Reads of a full window",
    "windows": "Late reads before which the window was looked at",
    "sweep_max_s": "Longest interval between reads",
    "retransmit_share": "Retransmitted segments, per request",
    "out_of_order_share": "Segments out of order, per read",
    "ring_drops": "Segments the packet ring had no room for",
    "ring_missed": "Instants the packet ring did not have",
    "ring_rejected": "Requests whose packet timestamps were wrong",
    "ring_given_up": "Workers that stopped using packet timestamps",
    "socket_rejected": "Requests whose kernel timestamps were wrong",
    "ring_off_p50_s": "Packet ring against socket stamps, median",
    "ring_off_p99_s": "Packet ring against socket stamps, p99",
    "ring_off_max_s": "Packet ring against socket stamps, largest",
    "cpu_share": "CPU in the busiest second, of one core",
    "cpu_s": "CPU time of all workers",
    "core_wait_s": "Time that workers waited for a core",
    "core_wait_max_s": "Longest such wait in one second",
    "realtime_given_up": "Workers that gave up real-time priority",
    "clock_disagreement_s": "Clocks moved apart",
    "clock_step_s": "of which more than slewing explains",
    "first_token_merged": "Coalesced first tokens",
    "reopened": "Connections reopened",
    "sent_again": "Requests sent again",
    "pauses": "Waits of a closed loop after failures",
    "paused_s": "Length of these waits, of all clients",
    "worker_lost": "Requests lost with their worker",
    "client_limit": "Requests that this machine could not send",
}
