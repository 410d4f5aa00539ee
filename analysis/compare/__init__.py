"""Comparing runs: is B another than A, by how much, and what can be told from so many samples.

    (here)    the comparison, whether the two did equal work, and what there is to say of it
    figures   each figure of A against that of B: better, worse, no difference or inconclusive; and `--fail-if`
    noise     how far a figure of one run may lie from that of another run of the same server

What is compared by choice (the server, its version, its address, how it is asked, what it admits, what it runs on) is
no difference of work: the notes name it. Everything that changes what has to be done, or when, is. A repeat that was no
measurement is left out; where no valid one is left, there is no verdict.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as evolve
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from loadgen.analysis import report as doc
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare.figures import (
    LOGARITHM_MOST,
    MARGIN,
    RUN_VARIATION,
    ComparedFigure,
    Gate,
    GateResult,
    compare_groups,
    compare_single_runs,
    judge_figures,
    judge_gates,
)
from loadgen.analysis.compare.run_variance import MIN_RUN_VARIATION, ComparedRun, run_name
from loadgen.analysis.format import (
    UNKNOWN,
    figure_title,
    percent,
    pluralise,
    significant,
    simulated,
    start_time,
    unit_of,
)
from loadgen.analysis.repeats import start_states
from loadgen.analysis.report import tables, terminal
from loadgen.analysis.report.charts import DASHES, Chart, ChartRun, chart_spec, visible_charts
from loadgen.analysis.report.findings import hardware_limit_sentence
from loadgen.analysis.report.run_document import DEFINITIONS, ReportedRun
from loadgen.analysis.report.tables import LEVELS as GATE_LEVELS
from loadgen.analysis.report.tables import Cells, table
from loadgen.analysis.steady_window import load_run
from loadgen.analysis.summary import Summary

__all__ = ["FIGURES", "ComparedRun", "Comparison", "compare", "document", "page_document", "read_run"]
FIGURES = (
    *("output_tokens_per_s", "complete", "ttft.p50", "ttft.p99", "ttft.pairs", "tpot.p50", "tpot.p99"),
    *("itl.p99", "e2e.p50", "e2e.p99", "e2e.pairs"),
)
"""What is compared unless more is asked: few, because each question more makes every answer weaker."""
PLANNED = (
    *("arrivals", "n", "duration_s", "workload", "input_tokens", "output_tokens", "max_in_flight", "window_s"),
    *("header", "extra_body", "ignore_eos", "image"),
)
OLDER: dict[str, Any] = {
    **{"arrivals": "burst", "workload": "synthetic", "ignore_eos": True},
    **{"header": [], "extra_body": {}, "image": []},
}
"""What held where the plan of an older run does not say."""
MAX_LENGTH_DIFFERENCE = 0.01
"""Mean output lengths that differ by no more are the same: chance in when answers end by themselves."""
ONE_RUN_EACH = (
    f"One run each: intervals hold at least {MIN_RUN_VARIATION * 100:g} % for how runs differ; --repeats 5 shows it."
)
TOO_SHORT = "Too short to show how the server varies: {} rests on the bound of {} for that (--run-variation)."
SAME_ADDRESS = "Same prompts, same address: a prefix cache may have helped B, unless it was emptied between."
LEVELS: dict[str, doc.Level] = {"better": "ok", "worse": "error", "no difference": "note", "inconclusive": "warning"}
CAPTION = "Lines are 95 % intervals. Within the shaded {:g} %: no difference; across 100 %: may be chance."
CARDS = ("output_tokens_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50")
OVERLAID = ("goodput", "ttft_s", "tpot_s", "itl_s", "e2e_s", "course")
"""Charts of the page."""
POINTS = 1600  # in each of them, over all runs: a page stays below 1.5 MB


@dataclass(frozen=True, slots=True)
class UnequalWork:
    """One thing that the two groups did not have in common, and what that does to a comparison."""

    what: str
    a: str
    b: str
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.a} in A, {self.b} in B ({self.why})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two groups of runs beside each other. B is judged against A."""

    name_a: str
    name_b: str
    runs_a: int
    runs_b: int
    mark: str
    """SIMULATED if any of the runs was."""
    method: str
    margin: float
    run_variation: float
    """By how much two runs of one server are taken to differ at most, as a share."""
    rows: list[ComparedFigure]
    unequal: list[UnequalWork]
    """What makes the work unequal; nothing of it may be left for a fair comparison."""
    left_out: list[str]
    """A sentence for each run that was no measurement."""
    notes: list[str]
    gates: list[GateResult]
    invalid: str = ""
    """Why there is no verdict: no run of a group is valid."""

    @property
    def title(self) -> str:
        return f"{self.name_b} (B) against {self.name_a} (A)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(terminal.render(document(self, brief=True)))}</pre>"

    def json(self) -> dict[str, Any]:
        """As plain values; what cannot be tested is None."""
        result = asdict(self)
        result["conditions"] = result.pop("gates")
        for row in result["rows"]:
            bound = row.pop("bound")
            row["run_variation"] = round(math.expm1(bound), 6) if bound < LOGARITHM_MOST else None
            for name in ("error", "error_floor", "freedom", "sampling"):
                del row[name]
        return result


def read_run(path: Path) -> ComparedRun:
    """Read a run. Raises RunFileError."""
    run, frame = load_run(path)
    return ComparedRun(run, frame, summarise(run, frame))


def compare(
    a: Sequence[ComparedRun],
    b: Sequence[ComparedRun],
    *,
    margin: float = MARGIN,
    gates: Sequence[Gate] = (),
    run_variation: float = RUN_VARIATION,
) -> Comparison:
    """Compare B with A, runs or groups of repeats. `margin` is by how much a figure may differ before it matters,
    `run_variation` by how much two runs of one server are taken to differ at most. Work that was unequal is in
    `unequal`, and the figures are compared all the same: it is for the caller to refuse."""
    cold = [*_cold("A", a), *_cold("B", b)]
    (a, left_a), (b, left_b) = _measured("A", a), _measured("B", b)
    figures = list(dict.fromkeys((*FIGURES, *(gate.figure for gate in gates))))
    if alone := len(a) == len(b) == 1:
        what, result = "raw samples of one run each", compare_single_runs(a[0], b[0], figures, run_variation)
    else:
        what = "one figure per run, Welch's t between runs"
        result = compare_groups([run.summary for run in a], [run.summary for run in b], figures, run_variation)
    limited = [side for side, group in (("A", a), ("B", b)) if not any(run.summary.client.ok for run in group)]
    invalid = f"possible client bottleneck in every run of {' and '.join(limited)}" if limited else ""
    rows = judge_figures(
        [evolve(row, p_value=None, why=row.why or invalid) if invalid else row for row in result], margin, gates
    )
    notes = [*cold, *_notes(a, b, alone=alone)]
    if short := [row.figure for row in rows if row.p_value is not None and math.isinf(row.error)]:
        notes.append(TOO_SHORT.format(", ".join(short), percent(run_variation)))
    mark = next((mark for run in (*a, *b) if (mark := simulated(run.summary))), "")
    name_a, name_b = (", ".join(dict.fromkeys(run.name.partition("/")[0] for run in group)) for group in (a, b))
    method = _method(what, rows, gates, run_variation)
    beside = unequal_work(a, b), [*left_a, *left_b], notes, judge_gates(gates, rows), invalid
    return Comparison(name_a, name_b, len(a), len(b), mark, method, margin, run_variation, rows, *beside)


def _method(what: str, rows: Sequence[ComparedFigure], gates: Sequence[Gate], run_variation: float) -> str:
    requested = {gate.figure for gate in gates}
    tested = sum(row.p_value is not None and row.figure not in requested for row in rows)
    if not tested and not requested:
        return f"From {what}; intervals are 95 % each."
    others = f", the {len(gates)} with a --fail-if at 5 % by themselves (Bonferroni's)" if gates else ""
    return (
        f"From {what}; intervals are 95 % each. Two runs of one server are taken to differ by at most "
        f"{percent(run_variation)} (--run-variation), or as these runs show: beyond that a difference is called. "
        f"Better and worse are said at 5 % for all {tested} figures together (Holm's correction){others}."
    )


def _measured(title: str, group: Sequence[ComparedRun]) -> tuple[Sequence[ComparedRun], list[str]]:
    """The runs that measured the server, and a sentence for each that did not. Where none did, all of them."""
    bad = {index: why for index, run in enumerate(group) if (why := _no_measurement(run.summary))}
    retained = [run for index, run in enumerate(group) if index not in bad]
    if retained:
        return retained, [f"Run {index + 1} of {title} is left out: {why}." for index, why in bad.items()]
    runs = "The run" if len(group) == 1 else "Every run"
    return group, [f"{runs} of {title} is in doubt: {why}." for why in dict.fromkeys(bad.values())]


def _cold(title: str, group: Sequence[ComparedRun]) -> list[str]:
    """A sentence where some repeats met a cold server and vary by it."""
    states = start_states([run.summary for run in group])
    if len(set(states)) < 2:
        return []
    cold = ", ".join(str(index) for index, each in enumerate(states, 1) if each == "cold")
    return [f"Run {cold} of {title} met a cold server, the others a warm one."]


def _no_measurement(summary: Summary) -> str:
    if summary.run.interrupted:
        return f"it is only a part, as it {'goes on' if summary.run.going_on else 'was interrupted'}"
    return "" if summary.client.ok else f"possible client bottleneck ({'; '.join(summary.client.reasons)})"


def _notes(a: Sequence[ComparedRun], b: Sequence[ComparedRun], *, alone: bool) -> list[str]:
    """What leaves the work equal and yet may mislead."""
    result = [ONE_RUN_EACH] if alone else []
    for what, of in CONDITIONS:
        texts = [" / ".join(sorted({str(of(run)) for run in group})) for group in (a, b)]
        if texts[0] != texts[1]:
            result.append(f"{what[0].upper()}{what[1:]}: {texts[0]} in A, {texts[1]} in B.")
    if any(run.summary.run.may_end for run in (*a, *b)):
        result.append(_early(a, b))
    urls_a, urls_b = ({run.summary.server.url for run in group} for group in (a, b))
    if urls_a & urls_b and not any(run.summary.server.simulated for run in (*a, *b)):
        result.append(SAME_ADDRESS)
    for title, group in (("A", a), ("B", b)):
        result += [f"{title}: {hardware_limit_sentence(said)}" for run in group[:1] if (said := run.summary.limit)]
        if lost := sum(run.summary.requests.sent - run.summary.requests.complete for run in group):
            result.append(f"{lost:,} requests of {title} were not complete and are in no latency.")
    return result


def _early(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> str:
    """What answers that might end early mean for the work."""
    means = [np.concatenate([run.frame.output_tokens[run.frame.sampled] for run in group]) for group in (a, b)]
    told = " and ".join(f"{each.mean():.1f} in {name}" for name, each in zip("AB", means, strict=True) if len(each))
    had = f": tokens in the mean {told}" if told else ""
    return f"Answers might end early (--output-tokens max:...), so equal work is not given{had}."


def unequal_work(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[UnequalWork]:
    """Everything in which A and B, or the runs within one of them, did unequal work; empty where they are alike."""
    result = []
    for what, why, of in CHECKS:
        texts = [sorted({str(of(run)) for run in group}) for group in (a, b)]
        if texts[0] != texts[1] or len(texts[0]) > 1:
            result.append(UnequalWork(what, " / ".join(texts[0]), " / ".join(texts[1]), why))
    # Lengths as they came out: prompts to the token, answers where the server could not be held to a length.
    for what, column in (("prompt lengths as reported", "prompt_tokens"), ("output lengths as sent", "output_tokens")):
        lengths = [np.concatenate([getattr(run.frame, column)[run.frame.sampled] for run in group]) for group in (a, b)]
        if column == "output_tokens" and all(run.summary.run.may_end for run in (*a, *b)):
            continue  # as the plan has it: `_notes` says so
        if all(map(len, lengths)):
            mean_a, mean_b = (float(length.mean()) for length in lengths)
            if abs(mean_a - mean_b) > MAX_LENGTH_DIFFERENCE * max(mean_a, mean_b):
                text_a, text_b = f"{mean_a:.1f} in the mean", f"{mean_b:.1f} in the mean"
                result.append(UnequalWork(what, text_a, text_b, "longer requests are more work"))
    return result


def _planned(name: str) -> Callable[[ComparedRun], Any]:
    return lambda run: run.run.header.plan.get(name, OLDER.get(name))


def _seed(run: ComparedRun) -> int:
    """That of the first repeat."""
    plan = run.run.header.plan
    return int(plan.get("seed", 0)) - max(0, int(plan.get("repeat", 0)) - 1)


def _model(run: ComparedRun) -> str:
    """Its name without a folder or an organisation, which servers leave out or not."""
    return str(run.summary.server.model).rstrip("/").rpartition("/")[2].lower()


def _limits(run: ComparedRun) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(run.summary.server.limits.items())) or "unknown"


def _users(run: ComparedRun) -> str:
    """The most there were at a time, where they came and went by hand."""
    there = [sample.values["users"] for sample in run.run.telemetry if "users" in sample.values]
    return f"up to {max(there)} by hand" if there else "as planned"


CHECKS: tuple[tuple[str, str, Callable[[ComparedRun], Any]], ...] = (
    *((name, "the plan asks for other work", _planned(name)) for name in PLANNED),
    ("seed", "other prompts, lengths or gaps were drawn", _seed),
    ("warm-up", "a cold server is slower at first", _planned("warmup")),
    ("model", "another model is another amount of work", _model),
    ("clock", "time does not pass alike", lambda run: simulated(run.summary) or "a real server"),
    ("users", "another load", _users),
    ("run", "a part of a run is no run", lambda run: "interrupted" if run.summary.run.interrupted else "to its end"),
)
"""What makes work unequal."""
CONDITIONS: tuple[tuple[str, Callable[[ComparedRun], Any]], ...] = (
    ("endpoint", lambda run: run.summary.server.endpoint),
    ("server limits", _limits),
    ("platform", lambda run: run.summary.server.platform or "not said"),
    ("stamps", lambda run: run.summary.client.stamps),
)
"""Where servers differ, or how exactly they were measured."""


def document(found: Comparison, *, brief: bool) -> doc.Document:
    """`brief` is for the terminal: fewer columns and words."""
    section = _section(found, brief=brief)
    text = [doc.Paragraph(found.method, "note"), *(doc.Paragraph(note, "warning") for note in found.notes)]
    blocks = [*section.blocks, doc.Paragraph(_who(found)), *text]
    return doc.Document("loadgen compare", found.title, [replace(section, title="", blocks=blocks)], mark=found.mark)


def page_document(
    found: Comparison, a: Sequence[ReportedRun], b: Sequence[ReportedRun], links: Sequence[str] = ()
) -> doc.Document:
    """The verdict, A and B overlaid, and what it rests on; `links` lead to the reports of all runs, in their order."""
    groups = (("A", found.name_a, "run-1", a), ("B", found.name_b, "run-2", b))
    retained = [[run for run in group if not _no_measurement(run.summary)] or group for *_, group in groups]
    drawn, maximum = list[ChartRun](), POINTS // sum(map(len, retained))
    for (side, name, colour, _), runs, dash in zip(groups, retained, DASHES, strict=False):
        title = f"{side}: {name}" if len(name) < 40 else side  # as wide as a legend may be
        for run in runs:
            thin = {name: _thinned(run.data[name], maximum) for name in OVERLAID if name in run.data}
            drawn.append(ChartRun(title, colour, found.mark, dash=dash, summary=run.summary, data=thin))
    charts = visible_charts(drawn)
    axis = doc.Switch("axis", "Latency axis", (("linear", "linear"), ("log", "logarithmic")))
    first = _section(found)
    ratio = doc.ChartRef("comparison", "B as a share of A, with its interval", [CAPTION.format(found.margin * 100)])
    shown = doc.Cards(_cards(found)), replace(ratio, zoom="none")
    sections = [replace(first, blocks=[first.blocks[0], *shown, *first.blocks[1:]])]
    for name, title in {"latency": "Latency, A and B", "course": "Output, A and B"}.items():
        if own := [chart for chart in charts if (chart.section == "latency") == (name == "latency")]:
            titles = {each.id: "Output tokens per second" if each.script else each.title for each in own}
            refs = [doc.ChartRef(each.id, titles[each.id], _medians(found, each.id)) for each in own]
            sections.append(doc.Section(name, title, refs, title.partition(",")[0], [axis][: name == "latency"]))
    texts = [doc.Paragraph(text) for text in (found.method, *found.notes)]
    sections.append(doc.Section("method", "Method", [doc.Disclosure("Method and conditions", texts)]))
    sections += [_runs([(side, run) for side, *_, group in groups for run in group], links), DEFINITIONS]
    ratios = [
        {"figure": row.figure, "ratio": row.ratio, "low": ends[0], "high": ends[1], "outcome": row.verdict}
        for row in found.rows
        if row.ratio is not None and (ends := row.ratio_ci95)
    ]
    looks = [{key: getattr(run, key) for key in ("name", "colour", "dash", "data")} for run in drawn]
    data: dict[str, Any] = {"runs": looks, "charts": [_overlaid(chart, drawn) for chart in charts]}
    data["comparison"] = {"rows": ratios, "margin": found.margin}
    given = found.mark, (), ["compare.js"], data, a[0].summary.run.version
    return doc.Document("loadgen compare", f"Comparison: {found.title}", sections, _who(found), *given)


def _thinned(data: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    """What a chart draws of one run, in about so many points."""
    if "course" in data:
        return {"course": {name: data["course"][name] for name in ("start_s", "tokens_per_s")}}
    every = max(1, math.ceil(len(data["x"]) / max(2, most)))
    return {name: each[:-1:every] + each[-1:] if isinstance(each, list) else each for name, each in data.items()}


def _overlaid(chart: Chart, drawn: Sequence[ChartRun]) -> dict[str, Any]:
    """As charts.js draws it; of repeats thin lines and no bands."""
    made = chart_spec(chart, drawn) | {"script": ""}
    made["table"] = made["table"] or {"from_s": "course.start_s", "tokens_per_s": "course.tokens_per_s"}
    if len(drawn) > 2:
        lines = [trace for trace in made["traces"] if trace.get("name") == "@name"]
        made["traces"] = [trace | {"line": trace["line"] | {"width": 1}} for trace in lines]
    return made


def _medians(found: Comparison, chart: str) -> list[str]:
    """p50 and p99 of both, below the chart of a latency."""
    parts = []
    for row in (row for row in found.rows if row.figure.startswith(chart.removesuffix("_s") + ".p")):
        a, b, unit, by, _ = _texts(row, brief=True)
        parts.append(f"{row.figure.rpartition('.')[2]}: A {a}, B {b} {unit} ({by})")
    return ["; ".join(parts[:2])]


def _runs(runs: Sequence[tuple[str, ReportedRun]], links: Sequence[str]) -> doc.Section:
    """Each with its figures, a link to its own report, and its command."""
    heads: dict[str, doc.ColumnKind] = {"side": "text", "run": "head", "began, UTC": "text"}
    named, commands = [], list[doc.Block]()
    for index, (side, run) in enumerate(runs):
        name = doc.TableCell(run_name(run.run), link=links[index] if links else "")
        named.append((side, name, start_time(run.summary).removesuffix(" UTC")))
        commands.append(doc.Code(run.summary.run.command, f"Command of {name.text}", copy=True))
    return doc.Section(
        "runs",
        "Runs",
        [tables.overview([run.summary for _, run in runs], heads, named), doc.Disclosure("Commands", commands)],
    )


def _who(found: Comparison) -> str:
    return (
        f"A: {found.name_a} ({pluralise(found.runs_a, 'run')}). B: {found.name_b} ({pluralise(found.runs_b, 'run')})."
    )


def headline(found: Comparison) -> doc.Finding:
    """The verdict in a sentence."""
    if found.invalid:
        return doc.Finding("verdict", "error", f"No verdict: {found.invalid}.")
    number = Counter[str](row.verdict for row in found.rows)
    named = {"better": "better", "worse": "worse", "no difference": f"within {percent(found.margin)}"}
    named |= {"inconclusive": "inconclusive"}
    counts = ", ".join(f"{number[verdict]} {text}" for verdict, text in named.items())
    said: tuple[doc.Level, str] = ("warning", "Inconclusive")
    if number["better"] or number["worse"]:
        said = ("error", "B is worse") if number["worse"] else ("ok", "B is better")
        said = ("warning", "B is better and worse") if number["better"] and number["worse"] else said
    elif number["no difference"] > number["inconclusive"]:
        said = ("ok", "No difference")
    return doc.Finding("verdict", said[0], f"{said[1]}: of {pluralise(len(found.rows), 'figure')} {counts}.")


def _section(found: Comparison, *, brief: bool = False) -> doc.Section:
    """The verdict and the figures."""
    findings = [headline(found)]
    findings += [doc.Finding(each.what, "error", f"Unequal work: {each.sentence}.") for each in found.unequal]
    findings += [doc.Finding("left out", "warning", text, "runs") for text in found.left_out]
    findings += [doc.Finding(gate.condition, GATE_LEVELS[gate.verdict], gate.sentence) for gate in found.gates]
    return doc.Section("comparison", "B against A", [doc.Findings(findings), figures_table(found, brief=brief)])


def _cards(found: Comparison) -> list[doc.Card]:
    """By how much B differs, in the figures that are asked for first."""
    cards = []
    for row in (row for row in found.rows if row.figure in CARDS and row.difference is not None):
        a, b, unit, by, interval = _texts(row, brief=True)
        ends = f"95 %: {interval}{'' if row.ratio_ci95 is None else ' %'}; {a} to {b} {unit}"
        cards.append(doc.Card(figure_title(row.figure), by, _verdict(row), ends))
    return cards


def figures_table(found: Comparison, *, brief: bool) -> doc.Table:
    """One row per figure. Briefly, why some could not be tested stands below it."""
    heads: dict[str, doc.ColumnKind] = {"figure": "head", "A": "number", "B": "number", "unit": "unit"}
    heads |= dict.fromkeys(("difference", "95 %") if brief else ("B / A", "95 %", "difference", "adjusted p"), "number")
    rows: list[Cells] = []
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if brief and row.why:
            reasons.setdefault(row.why, []).append(row.figure)
        verdict = doc.TableCell(
            _verdict(row, brief=brief), row.verdict, "" if brief else remark(row), LEVELS[row.verdict]
        )
        rows.append((doc.TableCell(row.figure, code=True), *_texts(row, brief=brief), verdict))
    notes = [f"{', '.join(of)}: inconclusive ({why})" for why, of in reasons.items()]
    if brief and any(row.needs_more for row in found.rows):
        notes.append("inconclusive (N more): about so many more in each of A and B would tell.")
    return table("Figures compared", heads | {"B is": "text"}, rows, several=True, id="compared", notes=notes)


def _verdict(row: ComparedFigure, *, brief: bool = False) -> str:
    if brief and row.verdict == "no difference":
        return f"{row.verdict} > {percent(row.no_larger_than or 0)}"
    return f"{row.verdict} ({row.needs_more:,} more)" if brief and row.needs_more else row.verdict


def remark(row: ComparedFigure) -> str:
    """What goes with a verdict: how large a difference there may be, or what would help to tell."""
    if row.verdict == "no difference":
        points = " points" if row.ratio is None and row.unit == "share" else ""
        return f"at most {percent(row.no_larger_than or 0)}{points}"
    if row.verdict != "inconclusive" or row.why:
        return row.why
    if row.needs_more is None:
        other = "" if row.more_of == "runs" else ", repeats may"
        return f"no practical number of {row.more_of} would help{other}"
    return f"needs about {pluralise(row.needs_more, f'more {row.more_of[:-1]}')} in each"


def _texts(row: ComparedFigure, *, brief: bool) -> list[str]:
    """A, B and unit; the ratio (briefly, by how much it is not 1) and its interval; difference and p-value. Of a share
    its difference stands for the ratio."""
    factor, unit = (100.0, "%") if row.unit == "share" else unit_of(row.figure, row.a)
    values = [significant(each and each * factor, 4) for each in (row.a, row.b)]
    ratio = difference = UNKNOWN
    interval = UNKNOWN if row.difference is None else "unbounded"
    if row.difference is not None:
        difference = f"{row.difference * factor:+.4g} {unit}"
        ratio = f"{row.difference * factor:+.3g}"
    if row.ratio is not None:
        ratio = f"{_percent(row.ratio)} %" if brief else f"{row.ratio:.3f}"
    if row.ratio is not None and row.ratio_ci95:
        interval = " to ".join(_percent(end) if brief else f"{end:.3f}" for end in row.ratio_ci95)
    elif row.difference_ci95:
        interval = " to ".join(f"{end * factor:+.3g}" for end in row.difference_ci95)
    p = row.adjusted_p
    p_text = UNKNOWN if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return [*values, unit, ratio, interval, *([] if brief else [difference, p_text])]


def _percent(ratio: float) -> str:
    """By how much a ratio is not 1."""
    percent = (ratio - 1) * 100
    return f"{percent:+,.0f}" if abs(percent) >= 100 else f"{percent:+.1f}"
