"""Compares two runs or two groups of runs, A and B, and reports by how much they differ and how certain that is.

    (this module)   the comparison, the check for equal work, and the documents for terminal and page.
    figures         compares each figure: better, worse, no difference or inconclusive.
    gates           evaluates the conditions of `--fail-if`.
    run_variance    estimates by how much a figure varies between two runs of the same server.

Only runs of equal work can be compared fairly. Servers, versions, addresses, endpoints, server limits and platforms may
differ, because users compare these on purpose; notes state such differences. Any other difference that changes the
requests or their timing makes the work unequal.

Invalid runs of a group are excluded. If a group has no valid run, the comparison has no verdict.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as evolve
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from loadgen.analysis import report as doc
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare.figures import (
    LOGARITHM_MAX,
    MARGIN,
    RUN_VARIATION,
    ComparedFigure,
    compare_groups,
    compare_single_runs,
    judge_figures,
    name_of_test,
)
from loadgen.analysis.compare.gates import Gate, GateResult, judge_gates
from loadgen.analysis.compare.parts import ComparedClass, classes_method, compare_classes
from loadgen.analysis.compare.run_variance import MIN_RUN_VARIATION, ComparedRun, run_name
from loadgen.analysis.format import (
    FACTOR_MIN,
    UNKNOWN,
    figure_title,
    interval_text,
    percent,
    pluralise,
    relative_change,
    server_label,
    signed,
    significant,
    simulated,
    start_time,
    typeset_minus,
    unit_of,
    workload_sentence,
)
from loadgen.analysis.metrics import metric_by_key
from loadgen.analysis.objectives import RESPONSE_SHARES
from loadgen.analysis.repeats import start_states
from loadgen.analysis.report import status, tables, terminal
from loadgen.analysis.report.charts import DASHES, Chart, ChartRun, chart_spec, visible_charts
from loadgen.analysis.report.findings import hardware_limit_sentence
from loadgen.analysis.report.run_document import DEFINITIONS, ReportedRun
from loadgen.analysis.report.tables import LEVELS as GATE_LEVELS
from loadgen.analysis.report.tables import Cells, table
from loadgen.analysis.shares import counts_of
from loadgen.analysis.steady_window import load_run
from loadgen.analysis.summary import Summary

__all__ = ["FIGURES", "ComparedRun", "Comparison", "compare", "document", "page_document", "read_run"]
FIGURES = (
    *("output_tokens_per_s", "complete", "ttft.p50", "ttft.p99", "ttft.pairs", "tpot.p50", "tpot.p99"),
    *("itl.p99", "e2e.p50", "e2e.p99", "e2e.pairs"),
)
"""Figures that are compared by default. There are few of them, because each further test weakens all tests."""
REASONING_FIGURES = ("ttfa.p50", "ttfa.p99", "think.p50", "reasoning_tokens.p50")
"""Further figures that are compared if responses begin with reasoning in every run."""
AUDIO_FIGURES = ("audio_seconds_per_s", "first_audio.p50", "rtf.p50", "rtf.p99")
"""Further figures that are compared if every run has audio."""
PLANNED = (
    *("arrivals", "n", "duration_s", "workload", "audio_seconds", "batch_size", "input_tokens"),
    *("output_tokens", "max_in_flight", "concurrency", "window_s"),
    *("header", "extra_body", "ignore_eos", "image"),
)
OLD_PLAN_DEFAULTS: dict[str, Any] = {
    "arrivals": "burst",
    "workload": "synthetic",
    "audio_seconds": None,
    "batch_size": 1,
    "ignore_eos": True,
    "header": [],
    "extra_body": {},
    "image": [],
}
"""Default values of settings that are missing in plans of older versions."""
MAX_LENGTH_DIFFERENCE = 0.01
"""Maximum difference of mean lengths that count as equal, as a share. Responses may end early by chance."""
ONE_RUN_EACH = (
    f"One run each: intervals assume at least {MIN_RUN_VARIATION * 100:g}% variation between runs. "
    "--repeats 5 measures it."
)
TOO_SHORT = "Runs too short to show how the server varies: the interval of {} is the assumed {} (--run-variation)."
RANDOM_SEEDS = (
    "Seeds differ, so prompts, random lengths and random arrivals differ by chance. To send the requests of A to both, "
    "run B with {}."
)
SAME_ADDRESS = "Same prompts and same address: unless it was cleared in between, a prefix cache may have helped B."
LEVELS: dict[str, doc.Level] = {"better": "ok", "worse": "error", "no difference": "note", "inconclusive": "warning"}
WORDS = {"better": "better", "worse": "worse", "no difference": "same", "inconclusive": "unclear"}
"""Verdicts in the table of the terminal, which has 80 columns."""
CAPTION = (
    "Lines are 95% intervals. An interval inside the shaded {:g}% means no difference. An interval that includes 1 may "
    "be chance."
)
LOGARITHMIC = "The axis is logarithmic."
ARROWS = "An arrow marks an interval that continues beyond the chart."
NO_INTERVAL = "Points without a line have no interval."
LOGARITHMIC_FROM = 2.5
"""The axis of the chart of ratios is logarithmic if it contains ratios above this factor, or below its reciprocal."""
CLIP_FACTOR = 4.0
"""On a logarithmic axis, intervals are cut off at this factor above the largest and below the smallest ratio."""
CARDS = ("output_tokens_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50")
OVERLAID = ("goodput", "ttft_s", "tpot_s", "itl_s", "e2e_s", "course")
"""Charts on which the page shows A and B together."""
POINTS = 1600
"""Maximum number of points of a chart, over all runs. It keeps the page below 1.5 MB."""


@dataclass(frozen=True, slots=True)
class UnequalWork:
    """A difference between A and B that makes their work unequal, such as a different model.

    The field `why` is the reason.
    """

    what: str
    a: str
    b: str
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.a} in A, {self.b} in B ({self.why})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two groups of runs. Verdicts describe B compared with A."""

    name_a: str
    name_b: str
    runs_a: int
    runs_b: int
    mark: str
    """`SIMULATED` if any run used a simulated server, else empty."""
    method: str
    margin: float
    """Largest difference that does not matter, as a share of A."""
    run_variation: float
    """Assumed maximum difference between two runs of one server, as a share."""
    rows: list[ComparedFigure]
    unequal: list[UnequalWork]
    """Differences that make the work unequal. The list is empty for equal work."""
    left_out: list[str]
    """A sentence on each invalid run."""
    notes: list[str]
    gates: list[GateResult]
    invalid: str = ""
    """Reason why there is no verdict; empty if every group has a valid run."""
    classes: list[ComparedClass] = field(default_factory=list)
    """The figures of each class of traffic that all runs have."""

    @property
    def title(self) -> str:
        return f"{self.name_b} (B) compared with {self.name_a} (A)"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(terminal.render(document(self)))}</pre>"

    def json(self) -> dict[str, Any]:
        """Return the comparison as a dict that can be serialised as JSON."""
        result = asdict(self)
        result["conditions"] = result.pop("gates")
        for row in (*result["rows"], *(row for part in result["classes"] for row in part["rows"])):
            bound = row.pop("variation_bound")
            row["run_variation"] = round(math.expm1(bound), 6) if bound < LOGARITHM_MAX else None
            for name in ("error", "error_floor", "degrees_of_freedom", "sampling_error"):
                del row[name]
        return result


def read_run(path: Path) -> ComparedRun:
    """Read a run for a comparison. Raises RunFileError if there is no readable run."""
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
    """Compare B with A. Each of A and B is a single run or a group of repeats.

    - `margin`: the largest difference that does not matter.
    - `run_variation`: the largest difference to expect between two runs of one server.
    - `gates`: the conditions of --fail-if.

    Both differences are relative to the value of the figure in A. For example, 0.05 means 5%. Figures are compared even
    if A and B did unequal work. Callers must check the field `unequal` of the result.
    """
    cold_starts = [*_cold_start_note("A", a), *_cold_start_note("B", b)]
    a, left_out_a = _valid_runs("A", a)
    b, left_out_b = _valid_runs("B", b)
    summaries = [run.summary for run in (*a, *b)]
    reasons = all(summary.latencies["ttfa_s"].n for summary in summaries)
    has_audio = all(summary.run.has_audio for summary in summaries)
    shares = [name for name in RESPONSE_SHARES if all(counts_of(name, summary)[1] for summary in summaries)]
    more = (*shares, *(REASONING_FIGURES if reasons else ()), *(AUDIO_FIGURES if has_audio else ()))
    figures = list(dict.fromkeys((*FIGURES, *more, *(gate.figure for gate in gates))))
    single_runs = len(a) == len(b) == 1
    if single_runs:
        data = "raw samples of one run each"
        compared = compare_single_runs(a[0], b[0], figures, run_variation)
    else:
        summaries_a, summaries_b = [run.summary for run in a], [run.summary for run in b]
        data = f"one figure per run, {name_of_test(summaries_a, summaries_b)}"
        compared = compare_groups(summaries_a, summaries_b, figures, run_variation)
    limited = [side for side, group in (("A", a), ("B", b)) if not any(run.summary.client.ok for run in group)]
    invalid = f"the client was the limit in every run of {' and '.join(limited)}" if limited else ""
    if invalid:
        compared = (evolve(row, p_value=None, why=row.why or invalid) for row in compared)
    tested = list(compared)
    results = judge_gates(gates, tested, invalid)
    failed = {gate.figure for gate, result in zip(gates, results, strict=True) if result.verdict == "fail"}
    rows = judge_figures(tested, margin, gates, failed)
    notes = [*cold_starts, *_notes(a, b, single_runs=single_runs)]
    too_short = [row.figure for row in rows if row.p_value is not None and math.isinf(row.error)]
    if too_short:
        notes.append(TOO_SHORT.format(", ".join(too_short), percent(run_variation)))
    marks = [simulated(run.summary) for run in (*a, *b)]
    classes = compare_classes(a, b, margin, run_variation, invalid)
    name_a, name_b = _side_names(a, b)
    return Comparison(
        name_a=name_a,
        name_b=name_b,
        runs_a=len(a),
        runs_b=len(b),
        mark=next(filter(None, marks), ""),
        method=" ".join(filter(None, (_method(data, rows, gates, run_variation), classes_method(classes)))),
        margin=margin,
        run_variation=run_variation,
        rows=rows,
        unequal=unequal_work(a, b),
        left_out=[*left_out_a, *left_out_b],
        notes=notes,
        gates=results,
        invalid=invalid,
        classes=classes,
    )


def _side_names(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return names for A and B that are different and as short as possible.

    Normally, a name is the name of the folder that contains the runs. If A and B come from the same folder, the numbers
    of the repeats or the start times of the runs are added.
    """

    def name(group: Sequence[ComparedRun], name_of: Callable[[ComparedRun], str]) -> str:
        return ", ".join(dict.fromkeys(map(name_of, group)))

    def folder(run: ComparedRun) -> str:
        return run.name.partition("/")[0]

    name_a, name_b = name(a, folder), name(b, folder)
    if name_a == name_b:
        name_a, name_b = (name(group, lambda run: run.name) for group in (a, b))
    if name_a == name_b:
        name_a, name_b = (f"{name(group, folder)}, {start_time(group[0].summary)}" for group in (a, b))
    return name_a, name_b


def _method(data: str, rows: Sequence[ComparedFigure], gates: Sequence[Gate], run_variation: float) -> str:
    gated = {gate.figure for gate in gates}
    tested = sum(row.p_value is not None and row.figure not in gated for row in rows)
    if not tested and not gated:
        return f"Computed from {data}. Each interval has 95% confidence."
    gate_level = "; figures with a --fail-if have a separate level of 5% (Bonferroni's correction)" if gates else ""
    return (
        f"Computed from {data}. Each interval has 95% confidence. Two runs of one server are assumed to differ by at "
        f"most {percent(run_variation)} (--run-variation), or by what these runs show. Any larger difference "
        "counts as real. "
        f"Verdicts use a level of 5% for all {tested} figures together (Holm's correction){gate_level}."
    )


def _valid_runs(title: str, group: Sequence[ComparedRun]) -> tuple[Sequence[ComparedRun], list[str]]:
    """Return the valid runs of a group, and a sentence for each invalid run.

    If no run is valid, return all runs, with one sentence per distinct reason. `title` is `A` or `B`.
    """
    reasons = {index: _invalid_reason(run.summary) for index, run in enumerate(group)}
    invalid = {index: reason for index, reason in reasons.items() if reason}
    retained = [run for index, run in enumerate(group) if index not in invalid]
    if retained:
        return retained, [f"Run {index + 1} of {title} is left out: {reason}." for index, reason in invalid.items()]
    runs = "The run" if len(group) == 1 else "Every run"
    return group, [f"{runs} of {title} is in doubt: {reason}." for reason in dict.fromkeys(invalid.values())]


def _cold_start_note(title: str, group: Sequence[ComparedRun]) -> list[str]:
    """Return a note if some repeats of a group ran on a cold server and others on a warm server.

    Otherwise the list is empty.
    """
    states = start_states([run.summary for run in group])
    if len(set(states)) < 2:
        return []
    cold = ", ".join(str(number) for number, state in enumerate(states, 1) if state == "cold")
    return [f"Run {cold} of {title} started on a cold server, the other runs on a warm one."]


def _invalid_reason(summary: Summary) -> str:
    """Return the reason why a run is not a valid measurement, or an empty string for a valid run."""
    if summary.run.interrupted:
        return f"it is incomplete, as it {'is in progress' if summary.run.going_on else 'was interrupted'}"
    return "" if summary.client.ok else f"the client was the limit ({'; '.join(summary.client.reasons)})"


def _notes(a: Sequence[ComparedRun], b: Sequence[ComparedRun], *, single_runs: bool) -> list[str]:
    """Return notes about conditions that may mislead readers of a comparison, even if A and B did equal work.

    For example, the runs of A and B may have had different endpoints or incomplete requests. `single_runs` is True if A
    and B consist of one run each.
    """
    result = [ONE_RUN_EACH] if single_runs else []
    for name, value_of in CONDITIONS:
        text_a, text_b = (" / ".join(sorted({str(value_of(run)) for run in group})) for group in (a, b))
        if text_a != text_b:
            result.append(f"{name[0].upper()}{name[1:]}: {text_a} in A, {text_b} in B.")
    if any(run.summary.run.may_end for run in (*a, *b)):
        result.append(_early_end_note(a, b))
    result += _seed_notes(a, b)
    for title, group in (("A", a), ("B", b)):
        limit = group[0].summary.limit
        if limit:
            result.append(f"{title}: {hardware_limit_sentence(limit)}")
        counts = [run.summary.requests for run in group]
        incomplete = sum(requests.incomplete for requests in counts)
        if incomplete:
            result.append(f"Excluded from latencies: {pluralise(incomplete, 'request')} of {title}, not complete.")
    return result


def _early_end_note(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> str:
    """Return a note for runs whose responses were allowed to end early. It states the mean length of the responses in A
    and B.
    """
    means = []
    for name, group in (("A", a), ("B", b)):
        tokens = np.concatenate([run.frame.output_tokens[run.frame.sampled] for run in group])
        if len(tokens):
            means.append(f"{tokens.mean():.1f} tokens in {name}")
    lengths = f": on average {' and '.join(means)}" if means else ""
    return (
        "Responses were allowed to end early (--output-tokens max:...), so the runs are not strictly comparable"
        f"{lengths}."
    )


def unequal_work(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[UnequalWork]:
    """Return the differences that make the work of the runs in `a` and `b` unequal, such as different prompt lengths.

    The settings of all runs must be equal, also within `a` and within `b`. The mean measured lengths of prompts and
    responses are compared only between `a` and `b`. The list is empty if the work is equal.
    """
    result = []
    has_random_seeds = any(run.run.header.plan.get("seed_choice") == "random" for run in (*a, *b))
    for name, reason, value_of in CHECKS:
        if name == "seed" and has_random_seeds:
            continue  # no user stated both seeds, so the load is the same on average: `_seed_notes` says so
        values_a, values_b = (sorted({str(value_of(run)) for run in group}) for group in (a, b))
        if values_a != values_b or len(values_a) > 1:
            result.append(UnequalWork(name, " / ".join(values_a), " / ".join(values_b), reason))
    # Compare measured lengths: prompt lengths as counted by the server, and the lengths of responses.
    columns = [("prompt lengths as reported", "prompt_tokens")]
    if not all(run.summary.run.may_end for run in (*a, *b)):  # otherwise `_notes` states the lengths
        columns.append(("output lengths as received", "output_tokens"))
    for name, column in columns:
        lengths = [np.concatenate([getattr(run.frame, column)[run.frame.sampled] for run in group]) for group in (a, b)]
        if all(map(len, lengths)):
            mean_a, mean_b = (float(length.mean()) for length in lengths)
            if abs(mean_a - mean_b) > MAX_LENGTH_DIFFERENCE * max(mean_a, mean_b):
                text_a, text_b = f"{mean_a:.1f} on average", f"{mean_b:.1f} on average"
                result.append(UnequalWork(name, text_a, text_b, "longer requests are more work"))
    return result


def _plan_value(name: str) -> Callable[[ComparedRun], Any]:
    return lambda run: run.run.header.plan.get(name, OLD_PLAN_DEFAULTS.get(name))


def _first_seed(run: ComparedRun) -> int:
    """Return the seed of the first repeat of the run's group. Repeats of a plan have consecutive seeds."""
    plan = run.run.header.plan
    return int(plan.get("seed", 0)) - max(0, int(plan.get("repeat", 0)) - 1)


def _seed_notes(a: Sequence[ComparedRun], b: Sequence[ComparedRun]) -> list[str]:
    """Return a list with at most one note for the reader of a comparison of A and B, about their random seeds.

    - If the seeds differ, the note says that the prompts of A and B differ by chance.
    - If the seeds are equal, and A and B used the same real server, the note says that a prefix cache may have helped
      B, because the server had already seen the prompts. There is no such note if the prefix cache was emptied before
      each run of B, or if the server uses none.
    """
    seeds_a, seeds_b = ({_first_seed(run) for run in group} for group in (a, b))
    if seeds_a != seeds_b:
        text = f"--seed {min(seeds_a)}" if len(seeds_a) == 1 else "the seeds of A"
        return [RANDOM_SEEDS.format(text)]
    urls_a, urls_b = ({run.summary.server.url for run in group} for group in (a, b))
    is_real = not any(run.summary.server.simulated for run in (*a, *b))
    emptied = all(run.summary.run.cold in ("emptied", "unused") for run in b)
    return [SAME_ADDRESS] if urls_a & urls_b and is_real and not emptied else []


def _prompts_from_cache(run: ComparedRun) -> str:
    """Return `from the prefix cache` if the server unexpectedly found prompts of the run in its cache, otherwise
    `computed`.
    """
    cached = run.summary.cached_prompts
    return "from the prefix cache" if cached is not None and cached.unexpected else "computed"


def _model_name(run: ComparedRun) -> str:
    """Return the model name in lower case, without the folder or organisation, which some servers omit."""
    return str(run.summary.server.model).rstrip("/").rpartition("/")[2].lower()


def _server_limits(run: ComparedRun) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(run.summary.server.limits.items())) or "unknown"


def _users(run: ComparedRun) -> str:
    """Return a text about the number of users in a run: `as planned`, or for example `up to 20 by hand`.

    The second form is for interactive runs, in which a person sets the number of users. It states the maximum number.
    """
    counts = [sample.values["users"] for sample in run.run.telemetry if "users" in sample.values]
    return f"up to {max(counts)} by hand" if counts else "as planned"


def _classes(run: ComparedRun) -> str:
    """Return the classes of traffic of a run as text, or `none`."""
    texts = [
        f"{facts.name} ({facts.load.text}, {facts.workload}, {facts.input_tokens} in, {facts.output_tokens} out)"
        for facts in run.run.header.traffic
    ]
    return ", ".join(texts) or "none"


CHECKS: tuple[tuple[str, str, Callable[[ComparedRun], Any]], ...] = (
    *((name, "the plan requests different work", _plan_value(name)) for name in PLANNED),
    ("seed", "prompts, lengths and arrivals differ", _first_seed),
    ("prompts", "a server does not compute prompts that are in its prefix cache", _prompts_from_cache),
    ("warm-up", "a cold server is slower at first", _plan_value("warmup")),
    ("model", "the amount of work depends on the model", _model_name),
    ("clock", "the servers run at different speeds", lambda run: simulated(run.summary) or "a real server"),
    ("users", "the load differs", _users),
    ("classes of traffic", "the plan requests different work", _classes),
    ("run", "an interrupted run did only a part of the work", lambda run: _run_extent(run.summary)),
)
"""Properties that must be equal for equal work: name, reason, and a function that returns the value of a run."""


def _run_extent(summary: Summary) -> str:
    return "interrupted" if summary.run.interrupted else "whole"


CONDITIONS: tuple[tuple[str, Callable[[ComparedRun], Any]], ...] = (
    ("endpoint", lambda run: run.summary.server.endpoint),
    ("server limits", _server_limits),
    ("platform", lambda run: run.summary.server.platform or "unknown"),
    ("timestamps", lambda run: run.summary.client.stamps),
)
"""Properties that may differ although the work is equal: name, and a function that returns the value of a run."""


def document(comparison: Comparison) -> doc.Document:
    """Return the comparison as a document for the terminal and for Markdown, without charts."""
    section = _comparison_section(comparison, brief=True)
    blocks = [*section.blocks, doc.Paragraph(_names_and_counts(comparison)), doc.Paragraph(comparison.method, "note")]
    blocks += [doc.Paragraph(note, "warning") for note in comparison.notes]
    sections = [replace(section, title="", blocks=blocks)]
    return doc.Document("loadgen compare", comparison.title, sections, mark=comparison.mark)


def page_document(
    comparison: Comparison, a: Sequence[ReportedRun], b: Sequence[ReportedRun], links: Sequence[str] = ()
) -> doc.Document:
    """Return the comparison as a document for the HTML page.

    The page contains the verdict, charts that show A and B together, the method and the runs. `links` are the paths to
    the reports of all runs, first those of A and then those of B.
    """
    drawn = _overlaid_runs(comparison, a, b)
    charts = visible_charts(drawn)
    texts = [doc.Paragraph(text) for text in (comparison.method, *comparison.notes)]
    sections = [
        _first_section(comparison),
        *_chart_sections(comparison, charts),
        doc.Section("method", "Method", [doc.Disclosure("Method and conditions", texts)]),
        _runs_section([*(("A", run) for run in a), *(("B", run) for run in b)], links),
        DEFINITIONS,
    ]
    data = {
        "runs": [{key: getattr(run, key) for key in ("name", "colour", "dash", "data")} for run in drawn],
        "charts": [_overlay_spec(chart, drawn) for chart in charts],
        "comparison": {"rows": _ratio_rows(comparison), "margin": comparison.margin, "range": _log_range(comparison)},
    }
    return doc.Document(
        "loadgen compare",
        f"Comparison: {comparison.title}",
        sections,
        names=_sides(comparison, [run.summary for run in a], [run.summary for run in b]),
        mark=comparison.mark,
        scripts=["compare.js"],
        data=data,
        version=a[0].summary.run.version,
        chips=_chips(comparison, [run.summary for run in (*a, *b)]),
    )


def _chips(comparison: Comparison, summaries: Sequence[Summary]) -> list[doc.Chip]:
    """Return the status chips at the top of the page.

    The chips show whether the runs are valid, how many requests are complete, and whether the gates (--fail-if) passed.
    """
    chips = [status.validity(summaries), status.requests(summaries)]
    failed = [gate.condition for gate in comparison.gates if gate.verdict == "fail"]
    unclear = [gate.condition for gate in comparison.gates if gate.verdict == "inconclusive"]
    total = len(comparison.gates)
    if failed:
        chips.append(doc.Chip("Gates", f"{len(failed)} of {total} failed: {', '.join(failed)}", "error"))
    elif unclear:
        chips.append(doc.Chip("Gates", f"{len(unclear)} of {total} inconclusive: {', '.join(unclear)}", "warning"))
    elif total:
        chips.append(doc.Chip("Gates", f"all {total} passed", "ok"))
    return chips


def _overlaid_runs(comparison: Comparison, a: Sequence[ReportedRun], b: Sequence[ReportedRun]) -> list[ChartRun]:
    """Return the runs that the charts show: the valid runs of each group, or all runs of a group without a valid run.

    Their chart data is thinned. The throughput of a group of several runs is shown as a single curve. The first run of
    the group therefore gets the mean throughput of the group, and the other runs have no throughput.
    """
    groups = [[run for run in group if not _invalid_reason(run.summary)] or group for group in (a, b)]
    points_max = POINTS // sum(map(len, groups))
    styles = (("A", comparison.name_a, "run-1", DASHES[0]), ("B", comparison.name_b, "run-2", DASHES[1]))
    drawn = []
    for (side, name, colour, dash), runs in zip(styles, groups, strict=True):
        title = f"{side}: {name}" if len(name) < 40 else side  # a longer name does not fit into the legend
        for index, run in enumerate(runs):
            data = {chart: _thinned(run.data[chart], points_max) for chart in OVERLAID if chart in run.data}
            if len(runs) > 1 and "course" in data:
                # The first run of the group stands for all runs, because steps of many runs hide each other.
                data.pop("course")
                data |= {} if index else {"course": _mean_throughput(runs)}
            drawn.append(ChartRun(title, colour, comparison.mark, dash=dash, summary=run.summary, data=data))
    return drawn


def _first_section(comparison: Comparison) -> doc.Section:
    """Return the first section of the page: the verdict, the cards, the chart of ratios and the table of figures."""
    section = _comparison_section(comparison)
    ratios = doc.ChartRef("comparison", "B / A with its interval", _ratio_caption(comparison), zoom="none")
    return replace(section, blocks=[section.blocks[0], doc.Cards(_cards(comparison)), ratios, *section.blocks[1:]])


def _ratio_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows of the chart of ratios. `low` and `high` are None for a figure without an interval."""
    rows = []
    for row in comparison.rows:
        ratio, ends = _ratio_with_interval(row)
        if ratio is not None:
            low, high = ends or (None, None)
            rows.append(
                {"figure": _row_title(row.figure), "ratio": ratio, "low": low, "high": high, "outcome": row.verdict}
            )
    return rows


def _log_range(comparison: Comparison) -> tuple[float, float] | None:
    """Return both ends of the logarithmic axis of the chart of ratios, or None if the chart has a linear axis.

    A linear axis is sufficient if all values lie between 1 / LOGARITHMIC_FROM and LOGARITHMIC_FROM.

    The axis includes every ratio and normally also its interval. Very wide intervals are cut off, because the other
    intervals would be too short to see. They extend the axis by at most the factor CLIP_FACTOR.
    """
    rows = _ratio_rows(comparison)
    ratios = [row["ratio"] for row in rows if row["ratio"] > 0]
    ends = [end for row in rows for end in (row["low"], row["high"]) if end is not None]
    values = [*ratios, *ends]
    if not ratios or 1 / LOGARITHMIC_FROM < min(values) <= max(values) < LOGARITHMIC_FROM:
        return None
    low = max(min(values), min(ratios) / CLIP_FACTOR)
    high = min(max(values), max(ratios) * CLIP_FACTOR)
    padding = 1.08 * (1 + comparison.margin)
    return min(low, 1.0) / padding, max(high, 1.0) * padding


def _ratio_caption(comparison: Comparison) -> list[str]:
    """Return the caption of the chart of ratios. It explains a logarithmic axis and intervals that are cut off."""
    rows, ends = _ratio_rows(comparison), _log_range(comparison)
    sentences = [CAPTION.format(comparison.margin * 100)]
    if ends is not None:
        sentences.append(LOGARITHMIC)
        if any(row["low"] is not None and (row["low"] < ends[0] or row["high"] > ends[1]) for row in rows):
            sentences.append(ARROWS)
    if any(row["low"] is None for row in rows):
        sentences.append(NO_INTERVAL)
    return [" ".join(sentences)]


def _chart_sections(comparison: Comparison, charts: Sequence[Chart]) -> list[doc.Section]:
    """Return the sections with the charts that show A and B together: latencies, and output over time."""
    axis = doc.Switch("axis", "Latency axis", (("linear", "linear"), ("log", "logarithmic")))
    sections = []
    for name, short in {"latency": "Latency", "course": "Output"}.items():
        of_section = [chart for chart in charts if (chart.section == "latency") == (name == "latency")]
        references = []
        for chart in of_section:
            title = "Output tokens per second" if chart.script else chart.title
            caption = _percentile_caption(comparison, chart.id)
            if chart.script and max(comparison.runs_a, comparison.runs_b) > 1:
                caption = ["Mean of the runs. The band spans the lowest and the highest run."]
            references.append(doc.ChartRef(chart.id, title, caption))
        if references:
            switches = [axis] if name == "latency" else []
            sections.append(doc.Section(name, f"{short}, A and B", references, short, switches))
    return sections


def _mean_throughput(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return the output tokens per second of several runs over time: the mean, minimum and maximum of the runs.

    Each run has one value per time interval. All intervals of a run have the same length, but this length may differ
    between runs. The result uses the largest of these lengths.
    """
    series = [data for run in runs if (data := run.data["course"]["course"])["start_s"]]
    if not series:
        return {"course": {"start_s": [], "tokens_per_s": [], "low": [], "high": []}}
    starts = [np.asarray(data["start_s"], float) for data in series]
    width_s = max(float(data["bin_s"]) for data in series)
    begin_s = min(float(start[0]) for start in starts)
    end_s = max(float(start[-1]) for start in starts) + width_s
    edges = np.arange(begin_s, end_s + width_s / 2, width_s)
    rates = []
    for data, start in zip(series, starts, strict=True):
        tokens = np.concatenate([[0.0], np.cumsum(np.asarray(data["tokens_per_s"], float) * data["bin_s"])])
        rates.append(np.diff(np.interp(edges, np.append(start, start[-1] + data["bin_s"]), tokens)) / width_s)
    columns = {"start_s": edges[:-1], "tokens_per_s": np.mean(rates, 0), "low": np.min(rates, 0)}
    columns["high"] = np.max(rates, 0)
    return {"course": {name: values.round(4).tolist() for name, values in columns.items()}}


def _thinned(data: Mapping[str, Any], points_max: int) -> Mapping[str, Any]:
    """Return the chart data `data` with fewer points: at most about `points_max`.

    Throughput over time (`course`) keeps all of its points, but loses the data that the page does not show.
    """
    if "course" in data:
        return {"course": {name: data["course"][name] for name in ("start_s", "tokens_per_s")}}
    every = max(1, math.ceil(len(data["x"]) / max(2, points_max)))
    thinned = {}
    for name, values in data.items():
        thinned[name] = values[:-1:every] + values[-1:] if isinstance(values, list) else values
    return thinned


def _overlay_spec(chart: Chart, drawn: Sequence[ChartRun]) -> dict[str, Any]:
    """Return the definition of a chart in the form that charts.js expects.

    With more than two runs, a latency chart has thin lines and no bands for the confidence intervals.
    """
    spec = chart_spec(chart, drawn) | {"script": ""}
    spec["table"] = spec["table"] or {"from_s": "course.start_s", "tokens_per_s": "course.tokens_per_s"}
    if chart.id == "course" and len(drawn) > 2:
        spec["traces"] = _throughput_traces(spec["traces"])
    elif len(drawn) > 2:
        lines = [trace for trace in spec["traces"] if trace.get("name") == "@name"]
        spec["traces"] = [trace | {"line": trace["line"] | {"width": 1}} for trace in lines]
    return spec


def _throughput_traces(traces: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the chart traces for the throughput of a group of runs: the mean, and a band from minimum to maximum."""
    edge = {"type": "scatter", "mode": "lines", "x": "$course.start_s", "hoverinfo": "skip", "showlegend": False}
    edge |= {"line": {"width": 0, "shape": "hv"}, "name": "range"}
    mean = next(trace for trace in traces if trace["y"] == "$course.tokens_per_s")
    low, high = edge | {"y": "$course.low"}, edge | {"y": "$course.high", "fill": "tonexty", "fillcolor": "@run:2e"}
    return [low, high, mean]


def _percentile_caption(comparison: Comparison, chart: str) -> list[str]:
    """Return the caption of a latency chart, with p50 and p99 of A and B."""
    prefix = chart.removesuffix("_s") + ".p"
    parts = []
    for row in comparison.rows:
        if row.figure.startswith(prefix):
            a, b, unit, difference, _ = _row_texts(row, brief=True)
            parts.append(f"{row.figure.rpartition('.')[2]}: A {a}, B {b} {unit} ({difference})")
    return ["; ".join(parts[:2])]


def _runs_section(runs: Sequence[tuple[str, ReportedRun]], links: Sequence[str]) -> doc.Section:
    """Return the section on the runs of A and B: their figures, links to their reports, and their commands."""
    heads: dict[str, doc.ColumnKind] = {"side": "text", "run": "head"}
    named, commands = [], list[doc.Block]()
    for index, (side, run) in enumerate(runs):
        name = doc.TableCell(run_name(run.run), note=start_time(run.summary), link=links[index] if links else "")
        named.append((side, name))
        commands.append(doc.Code(run.summary.run.command, f"Command of {name.text}", copy=True))
    return doc.Section(
        "runs",
        "Runs",
        [tables.overview([run.summary for _, run in runs], heads, named), doc.Disclosure("Commands", commands)],
    )


def _sides(comparison: Comparison, a: Sequence[Summary], b: Sequence[Summary]) -> dict[str, str]:
    """Return the facts about A and B for the top of the page: name, server, model, label, number of runs, and load.

    If A and B have the same load, the result has a separate entry `Load`.
    """
    loads = {"A": _common(a, workload_sentence), "B": _common(b, workload_sentence)}
    names = {"A": comparison.name_a, "B": comparison.name_b}
    result = {}
    counts = {"A": comparison.runs_a, "B": comparison.runs_b}
    for side, group in {"A": a, "B": b}.items():
        model = _common(group, lambda summary: summary.server.model or "")
        label = _common(group, lambda summary: summary.run.label)
        server = ", ".join(filter(None, (_common(group, server_label), model)))
        parts = [names[side], server, f"label {label}" if label else "", pluralise(counts[side], "run")]
        result[side] = " · ".join(filter(None, [*parts, loads[side] if loads["A"] != loads["B"] else ""]))
    per_run = "per run " if max(counts.values()) > 1 else ""
    return result | ({"Load": f"{per_run}{loads['A']}"} if loads["A"] == loads["B"] else {})


def _common(summaries: Sequence[Summary], text_of: Callable[[Summary], str]) -> str:
    """Return the distinct texts that `text_of` returns for the runs, joined by slashes."""
    return " / ".join(dict.fromkeys(filter(None, map(text_of, summaries))))


def _names_and_counts(comparison: Comparison) -> str:
    side_a = f"A: {comparison.name_a} ({pluralise(comparison.runs_a, 'run')})."
    side_b = f"B: {comparison.name_b} ({pluralise(comparison.runs_b, 'run')})."
    return f"{side_a} {side_b}"


def headline(comparison: Comparison) -> doc.Finding:
    """Return a finding with the overall verdict on group B, such as `B is worse`, and the number of figures per
    verdict.

    If the groups cannot be compared, the finding states the reason instead.
    """
    if comparison.invalid:
        return doc.Finding("verdict", "error", f"No verdict: {comparison.invalid}.")
    counts = Counter[str](row.verdict for row in comparison.rows)
    level: doc.Level = "warning"
    if counts["better"] and counts["worse"]:
        verdict = "B is better in some figures and worse in others"
    elif counts["worse"]:
        level, verdict = "error", "B is worse"
    elif counts["better"]:
        level, verdict = "ok", "B is better"
    elif counts["no difference"] > counts["inconclusive"]:
        level, verdict = "ok", "No difference"
    else:
        verdict = "Inconclusive"
    text = (
        f"{counts['better']} better, {counts['worse']} worse, {counts['no difference']} within "
        f"{percent(comparison.margin)}, {counts['inconclusive']} inconclusive"
    )
    figures = pluralise(len(comparison.rows), "figure")
    return doc.Finding("verdict", level, f"{verdict}: of {figures} {text}.")


def _comparison_section(comparison: Comparison, *, brief: bool = False) -> doc.Section:
    """Return the section with the verdict on the comparison, its findings, and the tables of figures.

    The brief tables leave out details.
    """
    findings = [headline(comparison)]
    findings += [
        doc.Finding(difference.what, "error", f"Unequal work: {difference.sentence}.")
        for difference in comparison.unequal
    ]
    findings += [doc.Finding("left out", "warning", text, "runs") for text in comparison.left_out]
    findings += [doc.Finding(gate.condition, GATE_LEVELS[gate.verdict], gate.sentence) for gate in comparison.gates]
    blocks: list[doc.Block] = [doc.Findings(findings), figures_table(comparison, brief=brief)]
    classes = classes_table(comparison, brief=brief)
    if classes.rows:
        blocks.append(classes)
    return doc.Section("comparison", "B compared with A", blocks)


def _cards(comparison: Comparison) -> list[doc.Card]:
    """Return cards with the differences between A and B in the most important figures."""
    cards = []
    for row in comparison.rows:
        if row.figure in CARDS and row.difference is not None:
            a, b, unit, difference, interval = _row_texts(row, brief=True)
            if row.ratio_ci95 is not None and row.ratio is not None and row.ratio < FACTOR_MIN:
                interval += "%"
            # An interval with the digits of its figure says nothing more.
            certainty = "" if interval == difference else f"95% CI {interval}; "
            note = typeset_minus(f"{certainty}A\u00a0{a}, B\u00a0{b} {unit}")
            texts = typeset_minus(difference), row.verdict, note
            cards.append(doc.Card(figure_title(row.figure), *texts))
    return cards


def classes_table(comparison: Comparison, *, brief: bool) -> doc.Table:
    """Return the table of the compared figures of each class of traffic.

    The brief table leaves out figures that were not tested."""
    heads: dict[str, doc.ColumnKind] = {"class": "head", "figure": "text", "A": "number", "B": "number", "unit": "unit"}
    heads |= {"difference": "number"} if brief else {"B / A": "number", "95% CI": "number"}
    heads |= {"B is": "text"}
    rows: list[Cells] = []
    for part in comparison.classes:
        for row in part.rows:
            if brief and row.p_value is None:
                continue
            texts = _row_texts(row, brief=brief)[: 4 if brief else 5]
            note = "" if brief else remark(row)
            verdict = doc.TableCell(
                WORDS[row.verdict] if brief else row.verdict, row.verdict, note, LEVELS[row.verdict]
            )
            figure = (
                doc.TableCell(row.figure, code=True) if brief else doc.TableCell(_row_title(row.figure), row.figure)
            )
            rows.append((part.name, figure, *map(typeset_minus, texts), verdict))
    return table("Classes of traffic compared", heads, rows, several=True, id="compared-classes")


def figures_table(comparison: Comparison, *, brief: bool) -> doc.Table:
    """Return the table of the compared figures, with one row per figure.

    If `brief` is true, each verdict is one short word, so that the table fits into 80 columns. Notes below the table
    then contain the details.
    """
    heads: dict[str, doc.ColumnKind] = {"figure": "head", "A": "number", "B": "number", "unit": "unit"}
    heads |= dict.fromkeys(
        ("difference", "95% CI") if brief else ("B / A", "95% CI", "difference", "adjusted p"), "number"
    )
    rows: list[Cells] = []
    for row in comparison.rows:
        verdict = WORDS[row.verdict] if brief else row.verdict
        cell = doc.TableCell(verdict, row.verdict, "" if brief else remark(row), LEVELS[row.verdict])
        texts = _row_texts(row, brief=brief)
        if brief:
            rows.append((doc.TableCell(row.figure, code=True), *texts, cell))
        else:
            head = doc.TableCell(_row_title(row.figure), row.figure)
            rows.append((head, *map(typeset_minus, texts), cell))
    notes = _table_notes(comparison) if brief else []
    return table("Figures compared", heads | {"B is": "text"}, rows, several=True, id="compared", notes=notes)


def _table_notes(comparison: Comparison) -> list[str]:
    """Return the notes below the brief table of figures.

    The notes explain the short verdicts, give the reasons for verdicts, and state how many more requests or runs would
    probably decide an inconclusive comparison.
    """
    verdicts = {row.verdict for row in comparison.rows}
    notes = []
    if "no difference" in verdicts:
        notes.append(f"same: the interval lies within {percent(comparison.margin)} (--margin).")
    if "inconclusive" in verdicts:
        notes.append("unclear: inconclusive, as the runs neither show a difference nor exclude one.")
    figures_by_reason: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.why:
            figures_by_reason.setdefault(row.why, []).append(row.figure)
    notes += [f"{', '.join(figures)}: {reason}." for reason, figures in figures_by_reason.items()]
    for more_of in ("requests", "runs"):
        needed = [(row.figure, row.needs_more) for row in comparison.rows if row.more_of == more_of and row.needs_more]
        if needed:
            numbers = ", ".join(f"{figure} {number:,}" for figure, number in needed)
            notes.append(f"More {more_of} in each of A and B that would decide, about: {numbers}.")
    return notes


def remark(row: ComparedFigure) -> str:
    """Return a note on the verdict of a figure. The note depends on the verdict:

    - `no difference`: how large a difference is still possible.
    - `inconclusive`: why the figure was not tested, or how many more requests or runs are needed.
    - `better` or `worse`: an empty string.
    """
    if row.verdict == "no difference":
        points = " points" if row.ratio is None and row.unit == "share" else ""
        return f"at most {percent(row.no_larger_than or 0)}{points}"
    if row.verdict != "inconclusive" or row.why:
        return row.why
    if row.needs_more is None:
        alternative = "" if row.more_of == "runs" else ", repeats may"
        return f"no practical number of {row.more_of} would help{alternative}"
    return f"needs about {pluralise(row.needs_more, f'more {row.more_of[:-1]}')} in each"


def _row_texts(row: ComparedFigure, *, brief: bool) -> list[str]:
    """Return the cell texts of a figure's table row: A, B, unit, ratio, interval, difference and p-value.

    If `brief` is true, the difference and the p-value are left out, and the ratio is given as a change in percent or as
    a factor. For a figure that is a share, the brief ratio column shows the difference B - A in percentage points.
    """
    factor, unit = (100.0, "%") if row.unit == "share" else unit_of(row.figure, row.a)
    texts = [significant(value and value * factor, 4) for value in (row.a, row.b)]
    texts += [unit, _ratio_text(row, factor, brief=brief), _interval_text(row, factor, brief=brief)]
    if not brief:
        points = "points" if unit == "%" else unit
        texts.append(UNKNOWN if row.difference is None else f"{signed(row.difference * factor, 4)} {points}")
        texts.append(_p_text(row.adjusted_p))
    return texts


def _row_title(figure: str) -> str:
    """Return the title of a figure for the page, such as `TTFT p99` for `ttft.p99`."""
    metric, _, statistic = figure.partition(".")
    return f"{metric_by_key(metric).short}: slower in B" if statistic == "pairs" else figure_title(figure)


def _ratio_with_interval(row: ComparedFigure) -> tuple[float | None, tuple[float, float] | None]:
    """Return the ratio B / A of a figure, and the confidence interval of the ratio. Each of them is None if it is
    unknown.

    Figures in the unit `share`, such as the share of failed requests, are compared by the difference B - A, so their
    rows contain no ratio. For such a figure, the ratio is computed as `1 + difference / A`. The ends of its interval
    are computed in this way from the ends of the interval of the difference.
    """
    if row.ratio is not None:
        return row.ratio, row.ratio_ci95
    if row.unit != "share" or row.difference is None or not row.a:
        return None, None
    ends = row.difference_ci95
    return 1 + row.difference / row.a, None if ends is None else (1 + ends[0] / row.a, 1 + ends[1] / row.a)


def _ratio_text(row: ComparedFigure, factor: float, *, brief: bool) -> str:
    ratio, _ = _ratio_with_interval(row)
    if not brief and ratio is not None:
        return _ratio_number(ratio)
    if row.ratio is not None:
        return relative_change(row.ratio)
    return UNKNOWN if row.difference is None else signed(row.difference * factor)


def _interval_text(row: ComparedFigure, factor: float, *, brief: bool) -> str:
    _, ends = _ratio_with_interval(row)
    if not brief and ends:
        return interval_text(*map(_ratio_number, ends))
    if row.ratio is not None and row.ratio_ci95:
        as_factor = row.ratio >= FACTOR_MIN
        return interval_text(*(relative_change(end, as_factor=as_factor).rstrip("%") for end in row.ratio_ci95))
    if row.difference_ci95:
        return interval_text(*(signed(end * factor) for end in row.difference_ci95))
    return UNKNOWN if row.difference is None else "unbounded"


def _ratio_number(ratio: float) -> str:
    """Format a ratio with three decimals, or with three significant digits from 10 on."""
    return f"{ratio:.3f}" if ratio < 10 else significant(ratio)


def _p_text(p: float | None) -> str:
    if p is None:
        return UNKNOWN
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
