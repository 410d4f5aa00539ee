"""Evaluates latency objectives on simulated runs, for capacity planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen.analysis import stats
from loadgen.analysis.objectives import LATENCIES, Objective
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.steady_window import frame_of_run


def unplannable(objectives: Sequence[Objective]) -> list[str]:
    """Return the text of each objective that capacity planning does not support.

    Capacity planning supports only upper bounds on latencies.
    """
    return [
        objective.text
        for objective in objectives
        if objective.figure not in LATENCIES or not objective.comparison.startswith("<")
    ]


def figure_reader(objectives: Sequence[Objective]) -> Callable[[Run], list[float | None]]:
    """Return a function that computes the figure of each objective from a run, such as the TTFT p99 in seconds.

    The function returns None for an objective if no request has the latency that the objective limits. If any request
    did not complete, it returns None for all objectives.
    """

    def figures(run: Run) -> list[float | None]:
        frame = frame_of_run(run)
        if not bool(frame.complete.all()):
            return [None] * len(objectives)
        values: list[float | None] = []
        for objective in objectives:
            samples = LATENCIES[objective.figure].values(frame)
            if not len(samples):
                values.append(None)
            elif objective.percentile is not None:
                values += stats.percentiles(samples, objective.percentile)
            else:
                values.append(float(getattr(samples, objective.statistic)()))
        return values

    return figures


def objectives_check(objectives: Sequence[Objective]) -> Callable[[Sequence[float | None], float], bool]:
    """Return a function that checks whether figures meet all objectives.

    The returned function takes one figure per objective and a factor. It returns True if every figure, multiplied by
    the factor, meets its objective. A figure of None meets no objective.
    """

    def check(figures: Sequence[float | None], factor: float) -> bool:
        return all(
            figure is not None and objective.satisfied_by(figure * factor)
            for objective, figure in zip(objectives, figures, strict=True)
        )

    return check
