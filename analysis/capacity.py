"""What a capacity is planned by: of a simulated run the figures that objectives speak of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadgen.analysis import stats
from loadgen.analysis.objectives import LATENCIES, Objective
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.steady_window import frame_of_run


def unplannable(objectives: Sequence[Objective]) -> list[str]:
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
        figure is not None and each.satisfied_by(figure * times)
        for each, figure in zip(objectives, figures, strict=True)
    )
