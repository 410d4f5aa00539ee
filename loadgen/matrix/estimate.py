"""How long a matrix will take: from its own finished runs where there are any, else from a model of each server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from loadgen.matrix.cells import Cell, Repeat, Start
from loadgen.matrix.plan import MatrixPlan, run_settings
from loadgen.matrix.state import Line, took_s
from loadgen.plan import Plan
from loadgen.prepare import schedule_of
from workloads import arrivals

START_S: Mapping[str, float] = {"compose": 180.0, "process": 60.0, "simulated": 1.0, "running": 0.0}
"""Until a server answers: loading the weights is most of it."""
TOKENS_PER_S = 1_000.0
"""Output tokens per second of a server about which nothing is known."""
PREPARED_S = 2.0
"""A run beside its load: prompts, connections, the run file, its summary."""
JOBS_MOST = 2_000
"""Of a larger burst so many are modelled, and the rest taken to go on as fast."""
MEASURED, MODELLED, GUESSED = "measured", "modelled", "guessed"


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long one start or one run takes, and how that is known."""

    seconds: float
    how: str


def of_start(start: Start, lines: Sequence[Line]) -> Estimate:
    """Until its server answers: the mean of the starts of the same server and model so far."""
    seen = [
        float(line["seconds"])
        for line in lines
        if line["type"] == "up" and (line["server"], line["model"]) == (start.server.name, start.model.name)
    ]
    return Estimate(fmean(seen), MEASURED) if seen else Estimate(START_S[start.launch], GUESSED)


def of_runs(plan: MatrixPlan, found: Iterable[Start], lines: Sequence[Line]) -> dict[Cell, Estimate]:
    """One run of each cell: the mean of its own runs so far, else of the model of its server, else a guess."""
    seen: dict[Cell, list[float]] = {}
    for repeat, seconds in took_s(lines).items():
        seen.setdefault(repeat.cell, []).append(seconds)
    estimates: dict[Cell, Estimate] = {}
    for start in found:
        for cell in {repeat.cell: None for repeat in start.repeats}:
            if cell in seen:
                estimates[cell] = Estimate(fmean(seen[cell]), MEASURED)
            elif cell not in estimates:
                estimates[cell] = _foreseen(plan, start, cell)
    return estimates


def total_s(plan: MatrixPlan, found: Sequence[Start], lines: Sequence[Line], done: Iterable[Repeat]) -> float:
    """What is left: every start that has a run to serve, and those runs."""
    over = set(done)
    runs = of_runs(plan, found, lines)
    seconds = 0.0
    for start in found:
        left = [repeat for repeat in start.repeats if repeat not in over]
        if left:
            seconds += of_start(start, lines).seconds + sum(runs[repeat.cell].seconds for repeat in left)
    return seconds


def in_words(seconds: float) -> str:
    """`about 40 s`, `about 12 min`, `about 7 h 30 min`."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min"
    return f"about {minutes // 60} h {minutes % 60 // 10 * 10} min"


def _foreseen(plan: MatrixPlan, start: Start, cell: Cell) -> Estimate:
    run = run_settings(plan, cell.workload, server=start.server.server)
    if run.duration_s is not None and not arrivals.parse(run.arrivals).burst:
        return Estimate(run.duration_s + PREPARED_S, MODELLED)
    due_ns = schedule_of(run).due_ns
    last_due_s = due_ns[-1] / 1e9 if due_ns else 0.0
    modelled = _modelled_s(start, run)
    if modelled is not None:
        return Estimate(max(last_due_s, modelled) + PREPARED_S, MODELLED)
    guessed = (run.n or 1) * _mean_length(run.output_tokens) / TOKENS_PER_S
    return Estimate(max(last_due_s, guessed) + PREPARED_S, GUESSED)


def _modelled_s(start: Start, run: Plan) -> float | None:
    """The burst on the simulated server's own model of this server and card, without sending anything."""
    from servers.hardware.roofline import roofline
    from servers.kinds import simulated_kinds
    from servers.simulated.server import protocol_of
    from servers.simulated.timing import BatchingClock, Job

    options: Mapping[str, Any] = start.options
    gpu, shape = start.host.gpu or options.get("gpu"), start.model.shape or options.get("model_shape")
    if not gpu or not shape or start.server.server not in simulated_kinds():
        return None
    policy = protocol_of(start.server.server).policy
    try:
        hardware = roofline(str(gpu), str(shape), int(options.get("tensor_parallel", 1)))
        clock = BatchingClock(policy, hardware.kv_tokens(policy.memory_fraction), hardware.step_ns)
        jobs = min(run.n or 1, JOBS_MOST)
        for _ in range(jobs):
            clock.submit(Job(_mean_length(run.input_tokens), _mean_length(run.output_tokens), 0), 0)
    except ValueError:
        return None
    ended_ns = 0
    while (ends_ns := clock.next_ns()) is not None:
        clock.emissions(ended_ns := ends_ns)
    simulated = start.launch == "simulated"
    speed = float(options.get("speed", 1.0)) if simulated else 1.0
    return ended_ns / 1e9 * (run.n or 1) / jobs / speed


def _mean_length(tokens: int | str) -> int:
    """About how long, where that is known without reading a file."""
    from workloads.lengths import Exponential, Fixed, Lognormal, Uniform, parse
    from workloads.syntax import WorkloadError

    try:
        named = parse(str(tokens))
    except WorkloadError:  # the lengths of a dataset's own answers
        return 256
    match named:
        case Fixed():
            return named.length
        case Uniform():
            return (named.low + named.high) // 2
        case Lognormal() | Exponential():
            return max(1, round(float(named.mean)))
        case _:
            return 256
