"""What a capacity is planned by: of a simulated run the figures that objectives speak of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen.analysis import stats
from loadgen.analysis.objectives import LATENCIES, Objective
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.steady_window import frame_of_run


def unplannable(objectives: Sequence[Objective]) -> list[str]:
    """Those that are no upper bound on a latency, which alone can be planned for."""
    return [
        objective.text
        for objective in objectives
        if objective.figure not in LATENCIES or not objective.comparison.startswith("<")
    ]


def figure_reader(objectives: Sequence[Objective]) -> Callable[[Run], list[float | None]]:
    """Of a run, for each objective, in seconds; None where no request has that latency, or any was refused or given
    up."""

    def figures(run: Run) -> list[float | None]:
        frame = frame_of_run(run)
        if not bool(frame.complete.all()):
            return [None] * len(objectives)
        result: list[float | None] = []
        for objective in objectives:
            samples = LATENCIES[objective.figure].values(frame)
            if not len(samples):
                result.append(None)
            elif objective.percentile is not None:
                result += stats.percentiles(samples, objective.percentile)
            else:
                result.append(float(getattr(samples, objective.statistic)()))
        return result

    return figures


def objectives_check(objectives: Sequence[Objective]) -> Callable[[Sequence[float | None], float], bool]:
    """Whether figures, so many times as large, meet all objectives."""
    return lambda figures, times: all(
        figure is not None and each.satisfied_by(figure * times)
        for each, figure in zip(objectives, figures, strict=True)
    )
