"""How long a matrix will take: from its own finished runs where there are any, else from a model of each server. And
what it is going to do, as text: one line before it begins, and the table of `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

from loadgen.matrix import Cell, MatrixPlan, Repeat, Start, cells, run_settings, skipped
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
LENGTH_UNKNOWN = 256
"""Tokens of an answer whose length is not known without reading a file."""
HOW = {
    "measured": "the mean of what this matrix has measured so far",
    "modelled": f"what the simulated server makes of this server, card and model, and {PREPARED_S:g} s; a run of a "
    "given duration takes that",
    "guessed": f"until a server is up {', '.join(f'{seconds:g} s ({launch})' for launch, seconds in START_S.items())}; "
    f"a run at {TOKENS_PER_S:,.0f} output tokens/s",
}


class Estimate(NamedTuple):
    """How long one start or one run takes, and how that is known."""

    seconds: float
    how: Literal["measured", "modelled", "guessed"]


def of_start(start: Start, lines: Sequence[Line]) -> Estimate:
    """Until its server answers: the mean of the starts of the same server and model so far."""
    same = (start.server.name, start.model.name)
    ups = (line for line in lines if line["type"] == "up")
    seen = [float(line["seconds"]) for line in ups if (line["server"], line["model"]) == same]
    return Estimate(fmean(seen), "measured") if seen else Estimate(START_S[start.launch], "guessed")


def of_runs(plan: MatrixPlan, found: Iterable[Start], lines: Sequence[Line]) -> dict[Cell, Estimate]:
    """One run of each cell: the mean of its own runs so far, else of the model of its server, else a guess."""
    seen: dict[Cell, list[float]] = {}
    for repeat, seconds in took_s(lines).items():
        seen.setdefault(repeat.cell, []).append(seconds)
    servers = {repeat.cell: start for start in reversed(list(found)) for repeat in start.repeats}
    return {
        cell: Estimate(fmean(seen[cell]), "measured") if cell in seen else _foreseen(plan, start, cell)
        for cell, start in servers.items()
    }


def total_s(plan: MatrixPlan, found: Sequence[Start], lines: Sequence[Line], done: Iterable[Repeat]) -> float:
    """What is left: every start that has a run to serve, and those runs."""
    over, runs = set(done), of_runs(plan, found, lines)
    seconds = 0.0
    for start in found:
        if left := [repeat for repeat in start.repeats if repeat not in over]:
            seconds += of_start(start, lines).seconds + sum(runs[repeat.cell].seconds for repeat in left)
    return seconds


def in_words(seconds: float) -> str:
    """`about 40 s`, `about 12 min`, `about 7 h 30 min`."""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60 // 10 * 10} min"


def heading(plan: MatrixPlan, starts: Sequence[Start]) -> str:
    """How much there is to do, in one line."""
    items = (plan.servers, "server"), (plan.hosts, "host"), (plan.models, "model"), (plan.workloads, "workload")
    runs = sum(len(start.repeats) for start in starts)
    return (
        f"{plan.name}: {' x '.join(_count(len(each), noun) for each, noun in items)}: "
        f"{_count(len(cells(plan)), 'cell')}, {_count(plan.repeats, 'repeat')} each: "
        f"{_count(runs, 'run')} in {_count(len(starts), 'start')}"
    )


def dry_run(
    plan: MatrixPlan, starts: Sequence[Start], lines: Sequence[Line], done: Iterable[Repeat], *, width: int = 100
) -> str:
    """The starts in order, what each serves, how long it takes, and how that is known."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "server", "host", "model", "runs", "up after", "runs take"):
        right = name in ("start", "up after", "runs take")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "runs")
    over, runs, ups = frozenset(done), of_runs(plan, starts, lines), [of_start(start, lines) for start in starts]
    for start, up in zip(starts, ups, strict=True):
        found = [runs[repeat.cell] for repeat in start.repeats if repeat not in over]
        hows = "/".join(dict.fromkeys(each.how for each in found))
        order = (f"{each.cell.workload}#{each.number}{' done' if each in over else ''}" for each in start.repeats)
        table.add_row(
            str(start.number),
            f"{start.server.name} ({start.launch})",
            start.host.name,
            start.model.name,
            "  ".join(order),
            f"{up.seconds:,.0f} s {up.how}" if found else "",
            f"{sum(each.seconds for each in found):,.0f} s {hows}" if found else "done",
        )
    not_measured = [f"Not measured: {cell}: {reason}." for cell, reason in skipped(plan).items()]
    left = sum(repeat not in over for start in starts for repeat in start.repeats)
    are_done = f", {len(over)} are done" if over else ""
    to_go = f"{_count(left, 'run')} to go{are_done}: {in_words(total_s(plan, starts, lines, over))}."
    used = {each.how for each in (*runs.values(), *ups)}
    hows_said = [f"  {how}: {meaning}." for how, meaning in HOW.items() if how in used]
    output = StringIO()
    console = Console(file=output, width=width, highlight=False, legacy_windows=False)
    for part in (heading(plan, starts), "", table, *not_measured, "", to_go, *hows_said):
        console.print(part, markup=False)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _foreseen(plan: MatrixPlan, start: Start, cell: Cell) -> Estimate:
    run = run_settings(plan, cell.workload, server=start.server.server)
    if run.duration_s is not None and not arrivals.parse(run.arrivals).burst:
        return Estimate(run.duration_s + PREPARED_S, "modelled")
    due_ns = schedule_of(run).due_ns
    last_due_s = due_ns[-1] / 1e9 if due_ns else 0.0
    if (modelled := _modelled_s(start, run)) is not None:
        return Estimate(max(last_due_s, modelled) + PREPARED_S, "modelled")
    guessed = (run.n or 1) * _mean_length(run.output_tokens) / TOKENS_PER_S
    return Estimate(max(last_due_s, guessed) + PREPARED_S, "guessed")


def _modelled_s(start: Start, run: Plan) -> float | None:
    """The burst on the simulated server's own model of this server and card, without sending anything."""
    from servers.hardware import roofline
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
    speed = float(options.get("speed", 1.0)) if start.launch == "simulated" else 1.0
    return ended_ns / 1e9 * (run.n or 1) / jobs / speed


def _mean_length(tokens: int | str) -> int:
    """About how long, where that is known without reading a file."""
    from workloads.lengths import Exponential, Fixed, Lognormal, Uniform, parse
    from workloads.syntax import WorkloadError

    try:
        named = parse(str(tokens))
    except WorkloadError:  # the lengths of a dataset's own answers
        return LENGTH_UNKNOWN
    match named:
        case Fixed():
            return named.length
        case Uniform():
            return (named.low + named.high) // 2
        case Lognormal() | Exponential():
            return max(1, round(float(named.mean)))
    return LENGTH_UNKNOWN


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
