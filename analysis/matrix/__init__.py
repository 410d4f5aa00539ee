"""A matrix in figures: its runs grouped into cells, what each cell gave over its repeats, and what differs.

Pure functions of the plan, of the summaries and samples of the runs, and of what matrix.jsonl says beside them; nothing
is read here. A cell is one server on one host with one model under one workload. The Structs are matrix.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from loadgen.analysis.compare import MAX_LENGTH_DIFFERENCE
from loadgen.analysis.compare.figures import RUN_VARIATION, compare_values
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.repeats import FigureOverRuns, describe_over_runs, figures_of
from loadgen.analysis.stats import percentile
from loadgen.analysis.summary import Memory, MemoryLevels, Summary
from loadgen.analysis.sweep import SweepResult

FORMAT = 1
SAMPLED = ("e2e_s", "ttft_s", "tpot_s")
"""Latencies of which a cell's distribution is drawn: one sample per request each."""
FIGURES = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50"),
    *("e2e.p50", "e2e.p99", "normalised.mean"),
)
"""Those of a run by which cells are compared; the names are those of --assert."""
COMPARED = ("output_tokens_per_s", "ttft.p50", "tpot.p50", "e2e.p50", "e2e.p99")
STATES = ("sent", "complete", "truncated", "failed", "rejected", "dropped")
Number = TypeVar("Number", int, float)


class CellName(msgspec.Struct, frozen=True):
    """One server on one host with one model under one workload, by their names in the plan."""

    server: str
    host: str
    model: str
    workload: str


class CellLengths(msgspec.Struct, frozen=True):
    """Output tokens of complete answers, over all repeats: asked in all, and as they came."""

    asked: int
    reported: int
    differ: int
    """Answers of another length than asked."""
    answers: int
    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    max: float | None


class CellMemoryLevel(msgspec.Struct, frozen=True):
    """One GPU, process or host: means over the repeats, the largest of the peaks."""

    of: str
    total_bytes: int | None
    idle_bytes: float | None
    loaded_bytes: float | None
    peak_bytes: int | None


class CellKvCache(msgspec.Struct, frozen=True):
    """Likewise of the KV cache in use."""

    mean_share: float | None
    peak_share: float | None
    peak_fullest_share: float | None
    """That of the fullest engine, where there are several."""
    tokens: int | None


class CellMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of a cell over its repeats; empty where no run has a reading."""

    levels: list[CellMemoryLevel] = []
    kv_cache: CellKvCache | None = None
    notes: list[str] = []
    """What the engine takes at its start, and what could not be read."""


class CellRun(msgspec.Struct, frozen=True):
    """One finished run of a cell."""

    repeat: int
    folder: str
    """Below the matrix's folder."""
    started_at: str
    start: int | None
    """Which start of the server it was part of; None where matrix.jsonl does not say."""
    place: int | None
    cold: bool | None
    """Whether it was the first run after that start."""
    seed: int | None
    duration_s: float
    verdict: str
    """Of the client on itself."""
    output_tokens_asked: int | str | None
    output_tokens_per_s: float | None


class CellSummary(CellName, frozen=True, kw_only=True):
    """What a cell gave over its repeats."""

    kind: str
    """Of server."""
    state: Literal["measured", "partly measured", "failed", "not measured"]
    planned: int
    failed: int
    versions: list[str]
    served: list[str]
    """The models that the server said it served."""
    simulated: bool
    speed: float | None
    figures: dict[str, FigureOverRuns]
    """By name, as `ttft.p50`; of the valid runs, where there are any."""
    lengths: CellLengths
    requests: dict[str, int]
    """By how they ended."""
    errors: dict[str, int]
    verdicts: dict[str, int]
    """Of the client on itself, how many runs each."""
    memory: CellMemory
    limit: HardwareLimit | None = None
    """Of its first valid run: what the hardware allows for the load."""
    runs: list[CellRun]

    @property
    def valid(self) -> bool:
        """Whether there is a run in which the client was not the limit."""
        return bool(self.verdicts.get("ok"))

    @property
    def clock(self) -> float:
        """How many times faster than real time its server ran. Only cells of one speed are compared."""
        return self.speed or 1.0

    @property
    def cell(self) -> CellName:
        return CellName(self.server, self.host, self.model, self.workload)


class CellDifference(msgspec.Struct, frozen=True):
    """One figure of two cells that differ in the server alone, or in the host alone."""

    figure: str
    by: Literal["server", "host"]
    a: CellName
    b: CellName
    ratio: float | None
    """Of `a` to `b`, of their geometric means over the runs."""
    ci95: tuple[float, float] | None
    verdict: Literal["different", "no difference seen", "inconclusive"]
    """`different` when its interval does not hold 1; `inconclusive` where one of them was not measured twice, its runs
    differ beyond all measure, or none of them is valid."""
    equal_work: bool
    """False where the answers' mean lengths differ."""


class EqualWork(msgspec.Struct, frozen=True):
    """Which server led, and which lengths the others were given: of `host`, `model` and `workload` the file `given`."""

    server: str
    lengths: list[dict[str, str]]


class CellSweep(CellName, frozen=True, kw_only=True):
    """A cell whose workload is a sweep."""

    folder: str
    """Below the matrix's folder."""
    page: str
    """The frontier of all sweeps of this workload, there too."""
    state: Literal["measured", "partly measured", "failed", "not measured"]
    result: SweepResult | None
    """Its sweep.json."""

    @property
    def cell(self) -> CellName:
        return CellName(self.server, self.host, self.model, self.workload)


class RunFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run that could not be made, as matrix.jsonl has it."""

    type: str
    at: str
    cell: CellName
    repeat: int
    kind: str
    reason: str
    hint: str
    log: str
    start: int | None = None


class ServerStart(msgspec.Struct, frozen=True):
    """A server that came up, as matrix.jsonl has it."""

    type: str
    at: str
    start: int
    server: str
    host: str
    model: str
    seconds: float
    facts: dict[str, Any]


class MatrixSummary(msgspec.Struct, frozen=True, kw_only=True):
    """matrix.json."""

    format: int = FORMAT
    name: str
    started_at: str
    version: str
    interrupted: bool
    simulated: bool
    servers: list[dict[str, str]]
    """`name`, kind (`server`) and `title`: the kind's own name in its usual spelling, or that which the plan gives."""
    hosts: list[dict[str, str]]
    """`name`, `platform` and `title`: its platform, with its own name where two share one."""
    models: list[str]
    workloads: list[str]
    repeats: int
    starts: int
    seed: int
    equal_work: EqualWork | None
    references: list[dict[str, str]]
    plan: dict[str, Any]
    cells: list[CellSummary]
    sweeps: list[CellSweep] = []
    differences: list[CellDifference]
    skipped: list[dict[str, str]]
    failures: list[RunFailure]
    server_starts: list[ServerStart]


class CellRunData(NamedTuple):
    """One finished run of a cell, and what is drawn of it."""

    cell: CellName
    run: CellRun
    summary: Summary
    samples: Mapping[str, Floats]
    """Of each metric in SAMPLED."""
    lengths: Floats
    """Output tokens of each complete answer."""


def build_cell_run(
    cell: CellName, repeat: int, folder: str, start: int | None, place: int | None, frame: Frame, summary: Summary
) -> CellRunData:
    """What is kept of a run; `start` and `place` as matrix.jsonl has them, 0 the first run after that start."""
    run, rate, cold = summary.run, summary.throughput.output_tokens_per_s, None if place is None else place == 0
    told = run.seed, run.duration_s, summary.client.verdict, run.output_tokens, rate
    lengths = frame.output_reported[frame.measured & frame.complete]
    samples = {name: METRICS[name].values(frame) for name in SAMPLED}
    result = CellRun(repeat, folder, run.started_at, start, place, cold, *told)
    return CellRunData(cell, result, summary, samples, lengths[~np.isnan(lengths)])


def summarise_matrix(
    begun: Mapping[str, Any],
    measured: Sequence[CellRunData],
    *,
    order: Sequence[CellName],
    sweeps: Sequence[CellSweep] = (),
    skipped: Mapping[str, str],
    failed: Sequence[Mapping[str, Any]],
    starts: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
) -> MatrixSummary:
    """matrix.json, from its finished runs and the lines of matrix.jsonl: the first one, with the resolved plan; the
    newest failure of each run that is not finished; each time a server came up. `order` names all cells that were to be
    measured, but for `sweeps`; `titles` each kind of server in its usual spelling."""
    plan: dict[str, Any] = dict(begun["plan"])
    platforms = {name: host["platform"] or name for name, host in plan.pop("hosts_found").items()}
    shared = Counter(platforms.values())
    kinds = {each["name"]: str(each["server"]) for each in plan["servers"]}
    failures = msgspec.convert(failed, list[RunFailure])
    failures_of, repeats = Counter(failure.cell for failure in failures), plan["repeats"]
    cells = []
    for cell in order:
        runs = [run for run in measured if run.cell == cell]
        cells.append(_cell(cell, kinds[cell.server], runs, repeats, failures_of[cell]))
    given = [
        {"host": host, "model": model, "workload": load, "given": f"equal-work/{host}-{model}-{load}.txt"}
        for server, host, model, load in map(astuple, order)
        if server == plan.get("equal_work")
    ]
    return MatrixSummary(
        name=plan["name"],
        started_at=str(begun["at"]),
        version=str(begun["version"]),
        interrupted=len(measured) + len([failure for failure in failures if failure.cell in order])
        < len(cells) * repeats
        or any(sweep.state in ("partly measured", "not measured") for sweep in sweeps),
        simulated=any(run.summary.server.simulated for run in measured)
        or any(sweep.result.mark for sweep in sweeps if sweep.result),
        servers=[
            {"name": name, "server": kind, "title": titles.get(kind, name) if name == kind else name}
            for name, kind in kinds.items()
        ],
        hosts=[
            {"name": name, "platform": of, "title": of if shared[of] == 1 else f"{of} ({name})"}
            for name, of in platforms.items()
        ],
        models=[each["name"] for each in plan["models"]],
        workloads=[each["name"] for each in plan["workloads"]],
        repeats=repeats,
        starts=plan["starts"],
        seed=plan["seed"],
        equal_work=EqualWork(plan["equal_work"], given) if plan.get("equal_work") else None,
        references=plan.get("references", []),
        plan=plan,
        cells=cells,
        sweeps=list(sweeps),
        differences=list(_differences([cell for cell in cells if cell.runs])),
        skipped=[{"cell": cell, "reason": reason} for cell, reason in skipped.items()],
        failures=failures,
        server_starts=msgspec.convert(starts, list[ServerStart]),
    )


def _cell(cell: CellName, kind: str, runs: Sequence[CellRunData], planned: int, failed: int) -> CellSummary:
    summaries = [run.summary for run in runs]
    state: Any = "measured" if len(runs) == planned else "partly measured"
    if not runs:
        state = "failed" if failed else "not measured"
    values = [figures_of(each) for each in [summary for summary in summaries if summary.client.ok] or summaries]
    errors = sum((Counter(summary.requests.errors) for summary in summaries), Counter[str]())
    return CellSummary(
        *astuple(cell),
        kind=kind,
        state=state,
        planned=planned,
        failed=failed,
        versions=sorted({summary.server.version or "" for summary in summaries}),
        served=sorted({summary.server.model or "" for summary in summaries}),
        simulated=any(summary.server.simulated for summary in summaries),
        speed=summaries[0].server.speed if summaries else None,
        figures={name: describe_over_runs([value[name] for value in values]) for name in FIGURES},
        lengths=_lengths(runs),
        requests={name: sum(getattr(summary.requests, name) for summary in summaries) for name in STATES},
        errors=dict(errors.most_common()),
        verdicts=dict(Counter(summary.client.verdict for summary in summaries)),
        memory=merge_cell_memory([summary.memory for summary in summaries if summary.memory]),
        limit=next((summary.limit for summary in summaries if summary.limit and summary.client.ok), None),
        runs=[run.run for run in runs],
    )


def _lengths(runs: Sequence[CellRunData]) -> CellLengths:
    ordered = np.sort(np.concatenate([np.zeros(0), *(run.lengths for run in runs)]))
    requested, reported, differ = (
        sum(getattr(run.summary.tokens, f"output_{what}") for run in runs)
        for what in ("asked", "reported", "mismatches")
    )
    mean = round(float(ordered.mean()), 3) if len(ordered) else None
    shares = (percentile(ordered, share) if len(ordered) else None for share in (0.0, 0.5, 0.9, 1.0))
    return CellLengths(requested, reported, differ, len(ordered), mean, *shares)


def merge_cell_memory(found: Sequence[Memory]) -> CellMemory:
    """Memory over the repeats. Processes are told apart by their place in the list, because a server that was started
    twice had two process ids."""
    if not found:
        return CellMemory()
    parts = [[*each.gpus, *each.processes, *([each.host] if each.host else [])] for each in found]
    levels = [_level([run[index] for run in parts if len(run) > index]) for index in range(max(map(len, parts)))]
    cache = None
    if caches := [each.kv_cache for each in found if each.kv_cache]:
        cache = CellKvCache(
            mean_share=_mean([cache.mean_share for cache in caches]),
            peak_share=_largest([cache.peak_share for cache in caches]),
            peak_fullest_share=_largest([cache.peak_fullest_share for cache in caches]),
            tokens=caches[0].tokens,
        )
    notes = []
    for each in found:
        notes += [f"{each.taken_at_start.note}."] if each.taken_at_start else []
        notes += [f"Not read, {source}: {reason}." for source, reason in each.not_measured.items()]
    return CellMemory(levels, cache, list(dict.fromkeys(notes)))


def _level(seen: Sequence[MemoryLevels]) -> CellMemoryLevel:
    """A GPU by index and name; a process by what it is, not by an id that differs from start to start."""
    first = seen[0]
    name, on = getattr(first, "name", ""), getattr(first, "on", "")
    of = f"process {name} on {on}".replace("  ", " ") if on else f"{first.of} {name}".rstrip()
    idle, loaded = _mean([each.idle_bytes for each in seen]), _mean([each.loaded_bytes for each in seen])
    peak = _largest([each.peak_bytes for each in seen])
    return CellMemoryLevel(of, getattr(first, "total_bytes", None), idle, loaded, peak)


def _largest(values: Sequence[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def _differences(cells: Sequence[CellSummary]) -> Iterator[CellDifference]:
    """Every pair of measured cells that differ in the server alone or in the host alone, figure by figure. One figure
    per run, Welch's interval for the difference of two means on logarithms, so that it is an interval of the ratio.
    Only differences between runs are in it, which is what chance there is when the matrix is measured again, and no
    interval is wider than runs may differ, as in `loadgen compare`."""
    for a, b in combinations(cells, 2):
        alike = [one == other for one, other in zip(astuple(a.cell), astuple(b.cell), strict=True)]
        if alike not in ([False, True, True, True], [True, False, True, True]) or a.clock != b.clock:
            continue
        means = [cell.lengths.mean for cell in (a, b) if cell.lengths.mean is not None]
        equal = len(means) == 2 and abs(means[0] - means[1]) <= MAX_LENGTH_DIFFERENCE * max(means)
        for name in COMPARED:
            result = compare_values(name, b.figures[name].values, a.figures[name].values, RUN_VARIATION)
            ratio, ends = result.ratio, result.ratio_ci95 if result.count > 1 else None
            yield CellDifference(
                name,
                "host" if alike[0] else "server",
                a.cell,
                b.cell,
                ratio and round(ratio, 6),
                ends and (round(ends[0], 6), round(ends[1], 6)),
                "inconclusive"
                if not (ends and a.valid and b.valid)
                else "no difference seen"
                if ends[0] <= 1 <= ends[1]
                else "different",
                equal,
            )
