"""Estimates how long a matrix takes, and formats the text of the dry run.

An estimate is the mean duration of finished runs. Before the first run, it is the result of a simulation or a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import fmean
from typing import Any, Literal, NamedTuple

from loadgen.engine import prepare
from loadgen.errors import LoadgenError
from loadgen.journal import JournalLine
from loadgen.plan import Plan
from loadgen.servers.simulated.scheduler_presets import ENGINES
from loadgen.studies.matrix import (
    Cell,
    Matrix,
    MatrixPlan,
    Repeat,
    Start,
    newest_lines,
    plan_cells,
    run_settings,
    skipped_cells,
    sweep_options,
)
from loadgen.workloads.workload_facts import length_facts

STARTUP_S: Mapping[str, float] = {"compose": 180.0, "process": 60.0, "simulated": 1.0, "running": 0.0}
"""Guessed startup time of a server in s, by launch method. Most of this time is spent on loading the weights."""
TOKENS_PER_S = 1_000.0
"""Guessed output tokens per second of a server."""
OVERHEAD_S = 2.0
"""Time of a run in addition to its load: building prompts, connecting, and writing the run file and its summary."""
MAX_MODELLED_REQUESTS = 500
"""Maximum number of requests that are simulated to estimate a run. The time of a larger run is extrapolated."""
DEFAULT_OUTPUT_TOKENS = 256
"""Guessed mean response length in tokens if the lengths come from a file."""
STARTUP_TEXT = ", ".join(f"{seconds:g} s ({launch})" for launch, seconds in STARTUP_S.items())
ESTIMATE_SOURCES = {
    "measured": "mean of the runs of this matrix so far",
    "modelled": f"simulation of this server, GPU and model, plus {OVERHEAD_S:g} s; or the duration of the run",
    "guessed": f"a server starts in {STARTUP_TEXT}; a run has {TOKENS_PER_S:,.0f} output tokens/s",
}


class Estimate(NamedTuple):
    """The estimated duration of a run or of the startup of a server, and the source of this estimate."""

    seconds: float
    source: Literal["measured", "modelled", "guessed"]
    accuracy: str = ""
    """Accuracy of the simulated latencies from which the estimate was computed. An example is `vllm on A100-80GB SXM:
    TTFT, TPOT not validated`. Empty without a simulation."""


def estimate_start(start: Start, lines: Sequence[JournalLine]) -> Estimate:
    """Estimate the startup time of a server.

    The estimate is the mean duration of earlier starts of the server with this model. If there is none, it is a guess.
    """
    measured = [
        float(line["seconds"])
        for line in lines
        if line["type"] == "up" and (line["server"], line["model"]) == (start.server.name, start.model.name)
    ]
    return Estimate(fmean(measured), "measured") if measured else Estimate(STARTUP_S[start.launch], "guessed")


def estimate_runs(matrix: Matrix, lines: Sequence[JournalLine]) -> dict[Cell, Estimate]:
    """Estimate the duration of one run of each cell (a combination of server, host, model and workload).

    The estimate is the mean duration of the cell's finished runs. If there is none, it is the result of a simulation or
    a guess.
    """
    measured: dict[Cell, list[float]] = {}
    for repeat, line in newest_lines(lines, "end").items():
        measured.setdefault(repeat.cell, []).append(float(line["seconds"]))
    starts = {repeat.cell: start for start in reversed(matrix.starts) for repeat in start.repeats}
    estimates: dict[Cell, Estimate] = {}
    for cell, first_start in starts.items():
        if cell in measured:
            estimates[cell] = Estimate(fmean(measured[cell]), "measured")
        else:
            estimates[cell] = _estimate_run(matrix.plan, first_start, cell)
    return estimates


def remaining_s(matrix: Matrix, lines: Sequence[JournalLine], done: Sequence[Repeat]) -> float:
    """Return the estimated remaining time of a matrix in s.

    This is the time of all remaining runs, plus the startup time of the servers that these runs need.
    """
    runs = estimate_runs(matrix, lines)
    seconds = 0.0
    for start in matrix.starts:
        remaining = [repeat for repeat in start.repeats if repeat not in done]
        if remaining:
            seconds += estimate_start(start, lines).seconds
            seconds += sum(runs[repeat.cell].seconds for repeat in remaining)
    return seconds


def format_duration(seconds: float) -> str:
    """Return a rounded duration, such as `about 40 s`, `about 12 min` or `about 7 h 30 min`."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60 // 10 * 10} min"


def heading(matrix: Matrix) -> str:
    """Return one line with the numbers of servers, hosts, models, workloads, cells, repeats, runs and starts."""
    plan = matrix.plan
    sizes = [
        pluralise(len(plan.servers), "server"),
        pluralise(len(plan.hosts), "host"),
        pluralise(len(plan.models), "model"),
        pluralise(len(plan.workloads), "workload"),
    ]
    cells = pluralise(len(plan_cells(plan)), "cell")
    repeats = pluralise(plan.repeats, "repeat")
    starts = pluralise(len(matrix.starts), "start")
    return f"{plan.name}: {' x '.join(sizes)}: {cells}, {repeats} each: {_count_runs(matrix)} in {starts}"


def _count_runs(matrix: Matrix) -> str:
    """Return the number of runs and sweeps as text, such as `8 runs and 2 sweeps`."""
    sweeps = sum(sweep_options(matrix.plan, repeat.cell.workload) is not None for repeat in matrix.repeats)
    counts = {"run": len(matrix.repeats) - sweeps, "sweep": sweeps}
    return " and ".join(pluralise(number, noun) for noun, number in counts.items() if number)


def pluralise(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 run` or `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def dry_run_text(matrix: Matrix, lines: Sequence[JournalLine], done: Sequence[Repeat], *, width: int = 100) -> str:
    """Return the text that a dry run of a matrix prints.

    The text lists all server starts in order, with their runs and estimated times. It also explains the sources of the
    estimates.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "server", "host", "model", "runs", "up after", "runs take"):
        justify: Any = "right" if name in ("start", "up after", "runs take") else "left"
        table.add_column(name, justify=justify, no_wrap=name != "runs")
    runs = estimate_runs(matrix, lines)
    startups = [estimate_start(start, lines) for start in matrix.starts]
    for start, startup in zip(matrix.starts, startups, strict=True):
        remaining = [runs[repeat.cell] for repeat in start.repeats if repeat not in done]
        table.add_row(
            str(start.number),
            f"{start.server.name} ({start.launch})",
            start.host.name,
            start.model.name,
            "  ".join(_repeat_text(repeat, done) for repeat in start.repeats),
            f"{startup.seconds:,.0f} s {startup.source}" if remaining else "",
            _runs_time(remaining) if remaining else "done",
        )
    skipped = [f"Not measured: {cell}: {reason}." for cell, reason in skipped_cells(matrix.plan).items()]
    runs_to_go = pluralise(len(matrix.repeats) - len(done), "run")
    done_text = f", {len(done)} done" if done else ""
    total = f"{runs_to_go} to go{done_text}: {format_duration(remaining_s(matrix, lines, done))}."
    used = {estimate.source for estimate in (*runs.values(), *startups)}
    sources = [f"  {source}: {meaning}." for source, meaning in ESTIMATE_SOURCES.items() if source in used]
    accuracies = sorted({estimate.accuracy for estimate in runs.values()} - {""})
    sources += [f"  accuracy of the model for {accuracy}." for accuracy in accuracies]
    output = StringIO()
    console = Console(file=output, width=width, highlight=False)
    for part in (heading(matrix), "", table, *skipped, "", total, *sources):
        console.print(part, markup=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _repeat_text(repeat: Repeat, done: Sequence[Repeat]) -> str:
    """Return the name of a repeat for the dry run, such as `burst#1`, or `burst#1 done` if the repeat is in `done`."""
    return f"{repeat.cell.workload}#{repeat.number}{' done' if repeat in done else ''}"


def _runs_time(estimates: Sequence[Estimate]) -> str:
    """Return the total estimated time of runs and the sources of the estimates, such as `26 s measured/modelled`."""
    sources = "/".join(dict.fromkeys(estimate.source for estimate in estimates))
    return f"{sum(estimate.seconds for estimate in estimates):,.0f} s {sources}"


def _estimate_run(plan: MatrixPlan, start: Start, cell: Cell) -> Estimate:
    """Estimate the duration of a run or sweep of `cell`, which was not measured yet.

    The estimate comes from the duration in the plan, from a simulation, or from a guessed token rate. A sweep is
    assumed to need its maximum number of runs.
    """
    run = run_settings(plan, cell.workload, server=start.server.server)
    options = sweep_options(plan, cell.workload)
    steps = 1 if options is None else options.max_steps
    if run.duration_s is not None and not run.arrival_process.facts.burst:
        return Estimate(steps * (run.duration_s + OVERHEAD_S), "modelled")
    due_ns = prepare.build_schedule(run).due_ns
    last_due_s = due_ns[-1] / 1e9 if due_ns else 0.0
    modelled = _modelled_run(start, run)
    if modelled is not None:
        return modelled._replace(seconds=steps * (max(last_due_s, modelled.seconds) + OVERHEAD_S))
    guessed_s = (run.n or 1) * _mean_length(run.output_tokens) / TOKENS_PER_S
    return Estimate(steps * (max(last_due_s, guessed_s) + OVERHEAD_S), "guessed")


def gpus_of_start(start: Start) -> str:
    """Return the GPUs of a real server as text, such as `2 x H100`.

    Return "" if `count_gpus` finds no GPU, or if the server is simulated. A simulated server reports its GPUs itself.
    """
    number, name = count_gpus(start)
    return f"{number} x {name}" if name and start.launch != "simulated" else ""


def count_gpus(start: Start) -> tuple[int, str]:
    """Return the number and the name of a server's GPUs.

    Return 0 and "" if the plan names no GPU, or a GPU that is not in the hardware tables.
    """
    from loadgen.servers.hardware import HardwareError, parse_gpus

    if not start.host.gpu:
        return 0, ""
    try:
        number, name = parse_gpus(start.host.gpu)
    except HardwareError:
        return 0, ""
    if not name:
        return 0, ""
    return max(number, int(start.options.get("tensor_parallel") or 1)), name


def _modelled_run(start: Start, run: Plan) -> Estimate | None:
    """Return an estimate of the duration of `run` from a simulation, or None if the run cannot be simulated.

    A simulation is impossible if, for example, the server, the GPU or the model is unknown. Of a long run, only the
    first MAX_MODELLED_REQUESTS requests are simulated, and the duration is extrapolated. `start` is the launch of the
    server that serves this run.
    """
    from loadgen.studies import simulate

    options: Mapping[str, Any] = start.options
    gpu = start.host.gpu or options.get("gpu")
    shape = start.model.shape or options.get("model_shape")
    if not gpu or not shape or start.server.server not in ENGINES:
        return None
    requests = run.n or 1
    simulated_requests = min(requests, MAX_MODELLED_REQUESTS)
    tensor = int(options.get("tensor_parallel", 1))
    try:
        server_model = simulate.ServerModel(gpu=str(gpu), model=str(shape), tensor=tensor)
        plan = run.replaced(n=simulated_requests, metrics_every_s=0.0)
        resolved = simulate.resolve_model(plan, server_model)
        footer = simulate.run_in_memory(plan, server_model, resolved=resolved).footer
    except (LoadgenError, ValueError):
        return None
    if footer is None:
        return None
    speed = float(options.get("speed", 1.0)) if start.launch == "simulated" else 1.0
    accuracy = f"{plan.server} on {resolved.hardware['gpu']}: {resolved.hardware['accuracy']}"
    return Estimate(footer.ended_ns / 1e9 * requests / simulated_requests / speed, "modelled", accuracy)


def _mean_length(tokens: int | str) -> int:
    """Return the approximate mean response length in tokens.

    Return DEFAULT_OUTPUT_TOKENS if the lengths come from a file.
    """
    mean = length_facts(tokens).mean
    return DEFAULT_OUTPUT_TOKENS if mean is None else max(1, round(mean))
