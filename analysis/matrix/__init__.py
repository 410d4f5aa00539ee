"""Computes the results of a matrix: the figures of each cell over its repeats, and the differences between cells.

A cell is the combination of a server, a host, a model and a workload. The functions of this module read no files:
callers pass the plan, the summaries and samples of the runs, and the lines of matrix.jsonl. The Structs define
matrix.json.
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

from loadgen.analysis.compare import FIGURES as FIGURES_COMPARED
from loadgen.analysis.compare import MAX_LENGTH_DIFFERENCE
from loadgen.analysis.compare.figures import compare_groups, judge_figures
from loadgen.analysis.frame import Floats, Frame
from loadgen.analysis.hardware_limit import HardwareLimit
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.repeats import FigureOverRuns, describe_over_runs, figures_of
from loadgen.analysis.stats import percentile
from loadgen.analysis.summary import Memory, MemoryLevels, Summary
from loadgen.analysis.sweep import SweepResult

FORMAT = 1
SAMPLED = ("e2e_s", "ttft_s", "tpot_s")
"""Latencies whose distributions the page shows for each cell. They have one sample per request."""
FIGURES = (
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50"),
    *("e2e.p50", "e2e.p99", "normalised.mean"),
)
"""Figures of a cell, named as in --assert."""
COMPARED = ("output_tokens_per_s", "ttft.p50", "tpot.p50", "e2e.p50", "e2e.p99")
STATES = ("sent", "complete", "truncated", "failed", "rejected", "dropped")
Number = TypeVar("Number", int, float)


class CellName(msgspec.Struct, frozen=True):
    """Identifies a matrix cell by the names of its server, host, model and workload in the plan."""

    server: str
    host: str
    model: str
    workload: str


class CellLengths(msgspec.Struct, frozen=True):
    """Output lengths in tokens over all repeats of a matrix cell.

    `asked` is the total that the client requested, and `reported` is the total that the server reported. `answers` is
    the number of complete responses. `mean`, `min`, `p50`, `p90` and `max` describe the lengths of these responses."""

    asked: int
    reported: int
    differ: int
    """Number of responses whose length differs from the requested length."""
    answers: int
    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    max: float | None


class CellMemoryLevel(msgspec.Struct, frozen=True):
    """Memory use of one GPU, process or host over the repeats of a matrix cell.

    `idle_bytes` and `loaded_bytes` are means over the repeats. `peak_bytes` is the largest peak of all repeats.
    """

    of: str
    total_bytes: int | None
    idle_bytes: float | None
    loaded_bytes: float | None
    peak_bytes: int | None


class CellKvCache(msgspec.Struct, frozen=True):
    """Share of the KV cache in use: the mean over the repeats of a matrix cell, and the largest peak of all repeats."""

    mean_share: float | None
    peak_share: float | None
    peak_fullest_share: float | None
    """Peak of the fullest engine. None if the server has a single engine."""
    tokens: int | None


class CellMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory use of a matrix cell over its repeats. All fields are empty if memory was not measured."""

    levels: list[CellMemoryLevel] = []
    kv_cache: CellKvCache | None = None
    notes: list[str] = []
    """Notes on the memory that the engine reserves when it starts, and on failed readings."""


class CellRun(msgspec.Struct, frozen=True):
    """One finished run of a matrix cell."""

    repeat: int
    folder: str
    """Path relative to the folder of the matrix."""
    started_at: str
    start: int | None
    """Number of the server start after which the run was made. None if matrix.jsonl does not contain it."""
    place: int | None
    """Position of the run among the runs after this server start, from 0."""
    cold: bool | None
    """True for the first run after a server start. None if `place` is unknown."""
    seed: int | None
    duration_s: float
    verdict: str
    """Result of the client's self-check: `ok`, or `limited` if the client was the limit."""
    output_tokens_asked: int | str | None
    output_tokens_per_s: float | None


class CellSummary(CellName, frozen=True, kw_only=True):
    """The figures of a matrix cell over its repeats."""

    kind: str
    """The server backend."""
    state: Literal["measured", "partly measured", "failed", "not measured"]
    planned: int
    failed: int
    versions: list[str]
    served: list[str]
    """Model names that the server reported."""
    simulated: bool
    speed: float | None
    figures: dict[str, FigureOverRuns]
    """Figures by name, such as `ttft.p50`, over the valid runs, or over all runs if no run is valid."""
    lengths: CellLengths
    requests: dict[str, int]
    """Number of requests by outcome."""
    errors: dict[str, int]
    verdicts: dict[str, int]
    """Number of runs by result of the client's self-check (`CellRun.verdict`)."""
    memory: CellMemory
    limit: HardwareLimit | None = None
    """Hardware limit of the first valid run."""
    runs: list[CellRun]

    @property
    def valid(self) -> bool:
        """True if at least one run of the cell is valid. A run is valid if the client was not the limit."""
        return bool(self.verdicts.get("ok"))

    @property
    def clock(self) -> float:
        """Speed of a simulated server's clock relative to real time; 1 for a real server.

        Only cells with equal clock speeds are compared."""
        return self.speed or 1.0

    @property
    def cell(self) -> CellName:
        return CellName(self.server, self.host, self.model, self.workload)


class CellDifference(msgspec.Struct, frozen=True):
    """The difference in one figure between two matrix cells that differ only in the server or only in the host."""

    figure: str
    by: Literal["server", "host"]
    a: CellName
    b: CellName
    ratio: float | None
    """Ratio `a / b` of the geometric means over the runs of each cell."""
    ci95: tuple[float, float] | None
    verdict: Literal["better", "worse", "no difference", "inconclusive"]
    """Verdict on `a` compared with `b`, as `loadgen compare` gives it. `inconclusive` also if a cell has fewer than two
    runs or no valid run."""
    needs_more: int | None
    """For an inconclusive verdict: approximate number of additional repeats of each cell that would decide. None if no
    practical number would decide."""
    equal_work: bool
    """False if the mean response lengths of the two cells differ."""


class EqualWork(msgspec.Struct, frozen=True):
    """Describes how all servers of a matrix were made to generate responses of the same lengths.

    `server` was measured first, and the lengths of its responses were stored in files, one for each host, model and
    workload. The requests to the other servers ask for output lengths that were drawn from these files. `lengths` has
    one entry per file: the key `given` has the path, and the other keys name the host, the model and the workload.
    """

    server: str
    lengths: list[dict[str, str]]


class CellSweep(CellName, frozen=True, kw_only=True):
    """A matrix cell that was measured by a sweep and not by repeated runs."""

    folder: str
    """Path relative to the folder of the matrix."""
    page: str
    """Path of the page with the frontier of all sweeps of this workload, relative to the folder of the matrix."""
    state: Literal["measured", "partly measured", "failed", "not measured"]
    result: SweepResult | None
    """Contents of the sweep's sweep.json. None if the sweep has no result."""

    @property
    def cell(self) -> CellName:
        return CellName(self.server, self.host, self.model, self.workload)


class RunFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of a matrix that failed before or while it was measured.

    The fields are those of the run's `failure` line in matrix.jsonl.
    """

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
    """A successful start of a server of a matrix, with the fields of its line in matrix.jsonl."""

    type: str
    at: str
    start: int
    server: str
    host: str
    model: str
    seconds: float
    facts: dict[str, Any]


class MatrixSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of matrix.json."""

    format: int = FORMAT
    name: str
    started_at: str
    version: str
    interrupted: bool
    simulated: bool
    servers: list[dict[str, str]]
    """Name in the plan (`name`), backend (`server`) and displayed name (`title`) of each server."""
    hosts: list[dict[str, str]]
    """Name in the plan (`name`), `platform` and displayed name (`title`) of each host. The title is the platform,
    followed by the name if several hosts have the same platform."""
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
    """One finished run of a matrix cell, with its summary and the samples for the charts."""

    cell: CellName
    run: CellRun
    summary: Summary
    samples: Mapping[str, Floats]
    """Samples by metric, for the metrics in SAMPLED."""
    lengths: Floats
    """Output length of each complete response, in tokens as reported by the server."""


def build_cell_run(
    cell: CellName, repeat: int, folder: str, start: int | None, place: int | None, frame: Frame, summary: Summary
) -> CellRunData:
    """Return the data of one finished run that the results of a matrix need.

    A matrix starts a server for one or several runs.

    - `start`: the number of the server start before this run.
    - `place`: the number of runs between this server start and this run. With 0, the run began on a cold server.

    Both are None if matrix.jsonl does not contain them.
    """
    run = CellRun(
        repeat=repeat,
        folder=folder,
        started_at=summary.run.started_at,
        start=start,
        place=place,
        cold=None if place is None else place == 0,
        seed=summary.run.seed,
        duration_s=summary.run.duration_s,
        verdict=summary.client.verdict,
        output_tokens_asked=summary.run.output_tokens,
        output_tokens_per_s=summary.throughput.output_tokens_per_s,
    )
    lengths = frame.output_reported[frame.measured & frame.complete]
    samples = {name: METRICS[name].values(frame) for name in SAMPLED}
    return CellRunData(cell, run, summary, samples, lengths[~np.isnan(lengths)])


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
    """Return the contents of matrix.json.

    - `begun`: the first line of matrix.jsonl, which contains the resolved plan.
    - `measured`: the finished runs.
    - `order`: all planned cells except sweeps.
    - `sweeps`: the cells that are sweeps.
    - `skipped`: for each cell that is not measured, the reason.
    - `failed`: for each run that is not finished, its latest failure.
    - `starts`: all successful server starts.
    - `titles`: the displayed name of each server backend.
    """
    plan: dict[str, Any] = dict(begun["plan"])
    platforms = {name: host["platform"] or name for name, host in plan.pop("hosts_found").items()}
    hosts_per_platform = Counter(platforms.values())
    kinds = {server["name"]: str(server["server"]) for server in plan["servers"]}
    failures = msgspec.convert(failed, list[RunFailure])
    failures_by_cell = Counter(failure.cell for failure in failures)
    repeats = plan["repeats"]
    cells = []
    summaries = {}
    for cell in order:
        runs = [run for run in measured if run.cell == cell]
        summaries[cell] = _valid_summaries(runs)
        cells.append(_cell(cell, kinds[cell.server], runs, repeats, failures_by_cell[cell]))
    length_files = []
    for cell in order:
        if cell.server == plan.get("equal_work"):
            names = {"host": cell.host, "model": cell.model, "workload": cell.workload}
            length_files.append(names | {"given": f"equal-work/{cell.host}-{cell.model}-{cell.workload}.txt"})
    runs_ended = len(measured) + len([failure for failure in failures if failure.cell in order])
    unfinished_sweep = any(sweep.state in ("partly measured", "not measured") for sweep in sweeps)
    simulated_run = any(run.summary.server.simulated for run in measured)
    return MatrixSummary(
        name=plan["name"],
        started_at=str(begun["at"]),
        version=str(begun["version"]),
        interrupted=runs_ended < len(cells) * repeats or unfinished_sweep,
        simulated=simulated_run or any(sweep.result.mark for sweep in sweeps if sweep.result),
        servers=[
            {"name": name, "server": kind, "title": titles.get(kind, name) if name == kind else name}
            for name, kind in kinds.items()
        ],
        hosts=[
            {
                "name": name,
                "platform": platform,
                "title": platform if hosts_per_platform[platform] == 1 else f"{platform} ({name})",
            }
            for name, platform in platforms.items()
        ],
        models=[model["name"] for model in plan["models"]],
        workloads=[workload["name"] for workload in plan["workloads"]],
        repeats=repeats,
        starts=plan["starts"],
        seed=plan["seed"],
        equal_work=EqualWork(plan["equal_work"], length_files) if plan.get("equal_work") else None,
        references=plan.get("references", []),
        plan=plan,
        cells=cells,
        sweeps=list(sweeps),
        differences=list(_differences([cell for cell in cells if cell.runs], summaries)),
        skipped=[{"cell": cell, "reason": reason} for cell, reason in skipped.items()],
        failures=failures,
        server_starts=msgspec.convert(starts, list[ServerStart]),
    )


def _valid_summaries(runs: Sequence[CellRunData]) -> list[Summary]:
    """Return the summaries of the runs in which the client was not the limit.

    If the client was the limit in every run, return the summaries of all runs.
    """
    summaries = [run.summary for run in runs]
    return [summary for summary in summaries if summary.client.ok] or summaries


def _cell(cell: CellName, kind: str, runs: Sequence[CellRunData], planned: int, failed: int) -> CellSummary:
    summaries = [run.summary for run in runs]
    state: Any = "measured" if len(runs) == planned else "partly measured"
    if not runs:
        state = "failed" if failed else "not measured"
    values = [figures_of(summary) for summary in _valid_summaries(runs)]
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
        sum(getattr(run.summary.tokens, f"output_{name}") for run in runs)
        for name in ("asked", "reported", "mismatches")
    )
    mean = round(float(ordered.mean()), 3) if len(ordered) else None
    quantiles = (percentile(ordered, share) if len(ordered) else None for share in (0.0, 0.5, 0.9, 1.0))
    return CellLengths(requested, reported, differ, len(ordered), mean, *quantiles)


def merge_cell_memory(memories: Sequence[Memory]) -> CellMemory:
    """Merge the memory use of the runs of a cell. `memories` contains the memory use of each run.

    A process has another id after a restart of the server. The processes of two runs are therefore matched by their
    position in the list of each run.
    """
    if not memories:
        return CellMemory()
    levels_by_run: list[list[MemoryLevels]] = []
    for memory in memories:
        levels_by_run.append([*memory.gpus, *memory.processes])
        if memory.host:
            levels_by_run[-1].append(memory.host)
    levels = [
        _memory_level([run[index] for run in levels_by_run if len(run) > index])
        for index in range(max(map(len, levels_by_run)))
    ]
    cache = None
    caches = [memory.kv_cache for memory in memories if memory.kv_cache]
    if caches:
        cache = CellKvCache(
            mean_share=_mean([cache.mean_share for cache in caches]),
            peak_share=_largest([cache.peak_share for cache in caches]),
            peak_fullest_share=_largest([cache.peak_fullest_share for cache in caches]),
            tokens=caches[0].tokens,
        )
    notes = []
    for memory in memories:
        if memory.taken_at_start:
            notes.append(f"{memory.taken_at_start.note}.")
        notes += [f"Not read, {source}: {reason}." for source, reason in memory.not_measured.items()]
    return CellMemory(levels, cache, list(dict.fromkeys(notes)))


def _memory_level(readings: Sequence[MemoryLevels]) -> CellMemoryLevel:
    """Return the memory use of one GPU, process or host in a matrix cell.

    `readings` contains one reading per run of the cell. The result contains means over the runs, and the largest peak.
    The title of a process does not contain the process id, because each restart of the server changes this id.
    """
    first = readings[0]
    name, device = getattr(first, "name", ""), getattr(first, "on", "")
    title = f"process {name} on {device}".replace("  ", " ") if device else f"{first.of} {name}".rstrip()
    return CellMemoryLevel(
        of=title,
        total_bytes=getattr(first, "total_bytes", None),
        idle_bytes=_mean([reading.idle_bytes for reading in readings]),
        loaded_bytes=_mean([reading.loaded_bytes for reading in readings]),
        peak_bytes=_largest([reading.peak_bytes for reading in readings]),
    )


def _largest(values: Sequence[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def _differences(
    cells: Sequence[CellSummary], summaries: Mapping[CellName, Sequence[Summary]]
) -> Iterator[CellDifference]:
    """Yield the difference of every compared figure, for each pair of measured cells that can be compared.

    Two cells can be compared if only their servers or only their hosts differ, and their clocks have the same speed.
    `summaries` maps the name of each cell to the summaries of the runs from which its figures were computed. `loadgen
    compare` with default options gives the same verdicts and intervals for these runs.
    """
    for a, b in combinations(cells, 2):
        equal_names = [name_a == name_b for name_a, name_b in zip(astuple(a.cell), astuple(b.cell), strict=True)]
        if equal_names not in ([False, True, True, True], [True, False, True, True]) or a.clock != b.clock:
            continue
        means = [cell.lengths.mean for cell in (a, b) if cell.lengths.mean is not None]
        equal_work = len(means) == 2 and abs(means[0] - means[1]) <= MAX_LENGTH_DIFFERENCE * max(means)
        runs_a, runs_b = summaries[a.cell], summaries[b.cell]
        enough_runs = min(len(runs_a), len(runs_b)) > 1
        judged = enough_runs and a.valid and b.valid
        rows = list(compare_groups(runs_b, runs_a, FIGURES_COMPARED))
        by_figure = {row.figure: row for row in (judge_figures(rows) if judged else rows)}
        for name in COMPARED:
            row = by_figure[name]
            interval = row.ratio_ci95 if enough_runs else None
            yield CellDifference(
                figure=name,
                by="host" if equal_names[0] else "server",
                a=a.cell,
                b=b.cell,
                ratio=row.ratio and round(row.ratio, 6),
                ci95=interval and (round(interval[0], 6), round(interval[1], 6)),
                verdict=row.verdict,
                needs_more=row.needs_more,
                equal_work=equal_work,
            )
