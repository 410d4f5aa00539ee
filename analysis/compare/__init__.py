"""Comparing runs: is B another than A, by how much, and what can be told from so many samples.

    (here)    the comparison, whether the two did equal work, and what there is to say of it
    figures   each figure of A against that of B: better, worse, no difference or cannot tell; and `--fail-if`
    noise     how far a figure of one run may lie from that of another run of the same server

What is compared by choice (the server, its version, its address, how it is asked, what it admits, what it runs on) is
no difference of work: the notes name it. Everything that changes what has to be done, or when, is. A repeat that was no
measurement, because its client was the limit or it was interrupted, is left out where others are left, and else marked.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from analysis import report as doc
from analysis.compare.figures import (
    LOGARITHM_MOST,
    MARGIN,
    RUN_VARIATION,
    ComparedFigure,
    Gate,
    GateResult,
    judge_gates,
    judged,
    of_groups,
    of_single_runs,
)
from analysis.compare.noise import RUNS_DIFFER, ComparedRun
from analysis.repeats import state
from analysis.report import terminal
from analysis.report.format import UNKNOWN, count, share, significant, simulated, unit_of
from analysis.report.sections import ReportedRun, full
from analysis.report.tables import LEVELS as GATE_LEVELS
from analysis.report.tables import Cells, table
from analysis.summarise import summarise
from analysis.window import load

__all__ = ["FIGURES", "ComparedRun", "Comparison", "compare", "document", "page", "read"]
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
LENGTHS_ALIKE = 0.01
"""Mean output lengths that differ by no more are the same: chance in when answers end by themselves."""
ONE_RUN_EACH = (
    f"One run each: the intervals hold chance within a run, and at least {RUNS_DIFFER * 100:g} % for what makes runs "
    "differ, such as the state of the card or a neighbour. How much that is, only repeats show (--repeats 5)."
)
TOO_SHORT = (
    "The runs are too short to show how the server varies: what {} rests on is the bound of {} for that "
    "(--run-variation), and longer runs or repeats may say more."
)
SAME_ADDRESS = (
    "Both sent the same prompts to the same address: with a prefix cache the later ones were helped by the earlier "
    "ones, unless the server was started again or its cache emptied in between."
)
LEVELS: dict[str, doc.Level] = {"better": "ok", "worse": "error", "no difference": "note", "cannot tell": "warning"}
CAPTION = (
    "A point is B's figure by A's, the line its 95 % interval. Where the line lies within the shaded margin of "
    "{:g} %, there is no difference that matters; where it crosses 100 %, chance alone may have made one."
)


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
    notes: list[str]
    gates: list[GateResult]

    @property
    def title(self) -> str:
        return f"{self.name_b} (B) against {self.name_a} (A)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(terminal.render(document(self, brief=True)))}</pre>"

    def json(self) -> dict[str, Any]:
        """As plain values; what cannot be tested is None."""
        found = asdict(self)
        found["conditions"] = found.pop("gates")
        for row in found["rows"]:
            bound = row.pop("bound")
            row["run_variation"] = round(math.expm1(bound), 6) if bound < LOGARITHM_MOST else None
            for name in ("error", "error_least", "freedom", "sampling"):
                del row[name]
        return found


def read(path: Path) -> ComparedRun:
    """Read a run. Raises RunFileError."""
    run, frame = load(path)
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
        what, found = "raw samples of one run each", of_single_runs(a[0], b[0], figures, run_variation)
    else:
        what = "one figure per run, Welch's t between runs"
        found = of_groups([run.summary for run in a], [run.summary for run in b], figures, run_variation)
    rows = judged(list(found), margin, gates)
    notes = [*left_a, *left_b, *cold, *_notes(a, b, alone=alone)]
    if short := [row.figure for row in rows if row.p_value is not None and math.isinf(row.error)]:
        notes.append(TOO_SHORT.format(", ".join(short), share(run_variation)))
    mark = next((mark for run in (*a, *b) if (mark := simulated(run.summary))), "")
    name_a, name_b = (", ".join(dict.fromkeys(run.name.partition("/")[0] for run in group)) for group in (a, b))
    method = _method(what, rows, gates, run_variation)
    beside = unequal_work(a, b), notes, judge_gates(gates, rows)
    return Comparison(name_a, name_b, len(a), len(b), mark, method, margin, run_variation, rows, *beside)


def _method(what: str, rows: Sequence[ComparedFigure], gates: Sequence[Gate], run_variation: float) -> str:
    asked = {gate.figure for gate in gates}
    tested = sum(row.p_value is not None and row.figure not in asked for row in rows)
    others = f", the {len(gates)} with a --fail-if at 5 % by themselves (Bonferroni's)" if gates else ""
    return (
        f"From {what}; intervals are 95 % each. Two runs of one server are taken to differ by at most "
        f"{share(run_variation)} (--run-variation), or as these runs show: beyond that a difference is called. Better "
        f"and worse are said at 5 % for all {tested} figures together (Holm's correction){others}."
    )


def _measured(title: str, group: Sequence[ComparedRun]) -> tuple[Sequence[ComparedRun], list[str]]:
    """The runs that measured the server, and a sentence for each that did not. Where none did, all of them."""
    bad = {place: why for place, run in enumerate(group) if (why := _no_measurement(run))}
    kept = [run for place, run in enumerate(group) if place not in bad]
    if kept:
        return kept, [f"Run {place + 1} of {title} is left out: {why}." for place, why in bad.items()]
    runs = "The run" if len(group) == 1 else "Every run"
    return group, [f"{runs} of {title} is in doubt: {why}." for why in dict.fromkeys(bad.values())]


def _cold(title: str, group: Sequence[ComparedRun]) -> list[str]:
    """A sentence where some repeats met a cold server and vary by it."""
    states = state([run.summary for run in group])
    if len(set(states)) < 2:
        return []
    cold = ", ".join(str(place) for place, each in enumerate(states, 1) if each == "cold")
    return [f"Run {cold} of {title} met a cold server, the others a warm one."]


def _no_measurement(run: ComparedRun) -> str:
    if run.summary.run.interrupted:
        return f"it is only a part, as it {'goes on' if run.summary.run.going_on else 'was interrupted'}"
    if run.summary.client.ok:
        return ""
    return f"its client was the limit and measured itself ({'; '.join(run.summary.client.reasons)})"


def _notes(a: Sequence[ComparedRun], b: Sequence[ComparedRun], *, alone: bool) -> list[str]:
    """What leaves the work equal and yet may mislead."""
    found = [ONE_RUN_EACH] if alone else []
    for what, of in CONDITIONS:
        texts = [" / ".join(sorted({str(of(run)) for run in group})) for group in (a, b)]
        if texts[0] != texts[1]:
            found.append(f"{what[0].upper()}{what[1:]}: {texts[0]} in A, {texts[1]} in B.")
    if any(run.summary.run.may_end for run in (*a, *b)):
        found.append(_early(a, b))
    urls_a, urls_b = ({run.summary.server.url for run in group} for group in (a, b))
    if urls_a & urls_b and not any(run.summary.server.simulated for run in (*a, *b)):
        found.append(SAME_ADDRESS)
    for title, group in (("A", a), ("B", b)):
        if lost := sum(run.summary.requests.sent - run.summary.requests.complete for run in group):
            found.append(f"{lost:,} requests of {title} were not complete and are in no latency.")
    return found


def _early(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> str:
    """What answers that might end early mean for the work."""
    means = [np.concatenate([run.frame.output_tokens[run.frame.sampled] for run in group]) for group in (a, b)]
    told = " and ".join(f"{each.mean():.1f} in {name}" for name, each in zip("AB", means, strict=True) if len(each))
    had = f": tokens in the mean {told}" if told else ""
    return f"Answers might end early (--output-tokens max:...), so equal work is not given{had}."


def unequal_work(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[UnequalWork]:
    """Everything in which A and B, or the runs within one of them, did unequal work; empty where they are alike."""
    found = []
    for what, why, of in CHECKS:
        texts = [sorted({str(of(run)) for run in group}) for group in (a, b)]
        if texts[0] != texts[1] or len(texts[0]) > 1:
            found.append(UnequalWork(what, " / ".join(texts[0]), " / ".join(texts[1]), why))
    # Lengths as they came out: prompts to the token, answers where the server could not be held to a length.
    for what, column in (("prompt lengths as reported", "prompt_tokens"), ("output lengths as sent", "output_tokens")):
        lengths = [np.concatenate([getattr(run.frame, column)[run.frame.sampled] for run in group]) for group in (a, b)]
        if column == "output_tokens" and all(run.summary.run.may_end for run in (*a, *b)):
            continue  # as the plan has it: `_notes` says so
        if all(map(len, lengths)):
            mean_a, mean_b = (float(each.mean()) for each in lengths)
            if abs(mean_a - mean_b) > LENGTHS_ALIKE * max(mean_a, mean_b):
                text_a, text_b = f"{mean_a:.1f} in the mean", f"{mean_b:.1f} in the mean"
                found.append(UnequalWork(what, text_a, text_b, "longer requests are more work"))
    return found


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
    return doc.Document(
        "loadgen compare", found.title, [replace(_section(found, brief=brief), title="")], mark=found.mark
    )


def page(found: Comparison, runs: Sequence[ReportedRun]) -> doc.Document:
    """The comparison above what a page of these runs holds."""
    whole = full(runs, [_section(found)])
    drawn = [
        {"figure": row.figure, "ratio": row.ratio, "low": ends[0], "high": ends[1], "outcome": row.verdict}
        for row in found.rows
        if row.ratio is not None and (ends := row.ratio_ci95)
    ]
    data = {**whole.data, "comparison": {"rows": drawn, "margin": found.margin}}
    scripts = [*whole.scripts, "compare.js"]
    return replace(whole, kind="loadgen compare", title=found.title, subtitle=whole.title, scripts=scripts, data=data)


def _section(found: Comparison, *, brief: bool = False) -> doc.Section:
    """Verdicts, figures and what to know of them; a chart where there is room for one."""
    runs = f"A: {found.name_a} ({count(found.runs_a, 'run')}). B: {found.name_b} ({count(found.runs_b, 'run')})."
    verdicts = Counter(row.verdict for row in found.rows)
    headline = (
        f"Of {count(len(found.rows), 'figure')} of B: {verdicts['better']} better, {verdicts['worse']} worse, "
        f"{verdicts['no difference']} without a difference larger than {share(found.margin)}, "
        f"{verdicts['cannot tell']} inconclusive."
    )
    blocks: list[doc.Block] = [doc.Paragraph(headline), doc.Paragraph(runs)]
    if found.unequal:
        text = "The work was not equal. What differs may be the reason for a difference below:"
        unequal = doc.Findings([doc.Finding(each.what, "error", each.sentence) for each in found.unequal])
        blocks += [doc.Paragraph(text, "error"), unequal]
    if not brief:
        caption = CAPTION.format(found.margin * 100)
        blocks.append(doc.ChartRef("comparison", "B as a share of A, with its interval", [caption], zoom="none"))
    blocks += [figures_table(found, brief=brief), doc.Paragraph(found.method, "note")]
    blocks += [doc.Paragraph(note, "warning") for note in found.notes]
    if found.gates:
        gates = [doc.Finding(each.condition, GATE_LEVELS[each.verdict], each.sentence) for each in found.gates]
        blocks.append(doc.Findings(gates))
    return doc.Section("comparison", "B against A", blocks)


def figures_table(found: Comparison, *, brief: bool) -> doc.Table:
    """One row per figure. Briefly, why some could not be tested stands below it."""
    heads: dict[str, doc.Kind] = {"figure": "head", "A": "number", "B": "number", "unit": "unit"}
    heads |= dict.fromkeys(("difference", "95 %") if brief else ("B / A", "95 %", "difference", "adjusted p"), "number")
    rows: list[Cells] = []
    notes = []
    for row in found.rows:
        if brief and row.why:
            notes.append(f"{row.figure}: inconclusive ({row.why})")
        verdict = doc.TableCell(
            _verdict(row, brief=brief), row.verdict, "" if brief else remark(row), LEVELS[row.verdict]
        )
        rows.append((doc.TableCell(row.figure, code=True), *_texts(row, brief=brief), verdict))
    if brief and any(row.needs_more for row in found.rows):
        notes.append("inconclusive (N more): about so many more in each of A and B would tell.")
    return table("Figures compared", heads | {"B is": "text"}, rows, several=True, id="compared", notes=notes)


def _verdict(row: ComparedFigure, *, brief: bool = False) -> str:
    text = "inconclusive" if row.verdict == "cannot tell" else row.verdict
    if brief and row.verdict == "no difference":
        return f"{text} > {share(row.no_larger_than or 0)}"
    return f"{text} ({row.needs_more:,} more)" if brief and row.needs_more else text


def remark(row: ComparedFigure) -> str:
    """What goes with a verdict: how large a difference there may be, or what would help to tell."""
    if row.verdict == "no difference":
        points = " points" if row.ratio is None and row.unit == "share" else ""
        return f"at most {share(row.no_larger_than or 0)}{points}"
    if row.verdict != "cannot tell" or row.why:
        return row.why
    if row.needs_more is None:
        other = "" if row.more_of == "runs" else ", repeats may"
        return f"no practical number of {row.more_of} would help{other}"
    return f"needs about {count(row.needs_more, f'more {row.more_of[:-1]}')} in each"


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
