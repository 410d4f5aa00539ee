"""What `loadgen plan-capacity` says: of a simulated run the figures that objectives speak of, and the GPUs that a load
takes, by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from analysis import stats
from analysis.hardware import aligned
from analysis.objectives import LATENCIES, Objective
from analysis.report.format import duration, significant
from analysis.window import frame_of_run
from loadgen.runfile import Run

HEADS = ("GPUs", "kind", "TP", "requests/s each", "per hour", "per 1M tokens")


class GpusForLoad(Protocol):
    """As loadgen.capacity.CapacityOption."""

    gpu: str
    tensor_parallel: int
    format: str
    not_possible: str
    replica_per_s: float | None
    replica_per_s_low: float | None
    replica_per_s_high: float | None
    gpus: int | None
    gpus_low: int | None
    gpus_high: int | None
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    figures: list[float | None]


def unfit(objectives: Sequence[Objective]) -> list[str]:
    """Those that are no upper bound on a latency, which alone can be planned for."""
    return [each.text for each in objectives if each.figure not in LATENCIES or not each.comparison.startswith("<")]


def figures_of(objectives: Sequence[Objective]) -> Callable[[Run], list[float | None]]:
    """Of a run, for each objective, in seconds; None where no request has that latency, or any was refused or given
    up."""

    def figures(run: Run) -> list[float | None]:
        frame = frame_of_run(run)
        if not bool(frame.complete.all()):
            return [None] * len(objectives)
        found: list[float | None] = []
        for each in objectives:
            samples = LATENCIES[each.figure].values(frame)
            if not len(samples):
                found.append(None)
            elif each.percentile is not None:
                found += stats.percentiles(samples, each.percentile)
            else:
                found.append(float(getattr(samples, each.statistic)()))
        return found

    return figures


def met(objectives: Sequence[Objective]) -> Callable[[Sequence[float | None], float], bool]:
    """Whether figures, so many times as large, meet all objectives."""
    return lambda figures, times: all(
        figure is not None and each.keeps(figure * times) for each, figure in zip(objectives, figures, strict=True)
    )


def ranked(options: Sequence[GpusForLoad]) -> list[Any]:
    """Those that are possible, the cheapest first; without a price, the fewest GPUs first."""
    possible = [each for each in options if each.gpus]
    return sorted(possible, key=lambda each: (each.cost_per_hour is None, each.cost_per_hour or 0, each.gpus, each.gpu))


def text(options: Sequence[GpusForLoad], objectives: Sequence[Objective]) -> str:
    """A table, the cheapest first, and why others cannot."""
    several = len({each.format for each in options}) > 1
    rows = []
    for each in ranked(options):
        ends = f"{each.gpus_low}-{each.gpus_high or '∞'}"
        exact = each.gpus_low == each.gpus_high
        low, high = (significant(end or 0) for end in (each.replica_per_s_low, each.replica_per_s_high))
        costs = each.cost_per_hour, each.cost_per_million_tokens
        rows.append(
            (
                f"{each.gpus}{'' if exact else f' ({ends})'}",
                f"{each.gpu}{f' {each.format}' if several else ''}",
                f"{each.tensor_parallel}",
                f"{significant(each.replica_per_s or 0)} ({low}-{high})",
                *("-" if cost is None else f"{cost:,.2f}" for cost in costs),
            )
        )
    blocks = [aligned([HEADS, *rows])] if rows else []
    left = [each for each in options if not each.gpus]
    if left:
        lines = []
        for each in left:
            why = each.not_possible
            if each.figures:
                alone = zip(objectives, each.figures, strict=True)
                why = "alone " + ", ".join(f"{one.figure}.{one.statistic} {_told(figure)}" for one, figure in alone)
            lines.append(f"  {each.gpu} x {each.tensor_parallel}{f' {each.format}' if several else ''}: {why}")
        blocks.append("\n".join(["Not possible:", *lines]))
    return "\n\n".join(blocks)


def _told(figure: float | None) -> str:
    return "unknown" if figure is None else duration(figure)
