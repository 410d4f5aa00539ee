"""Compares each class of traffic in a run with a run of this class alone (`--alone`).

Each ratio divides a latency in the run of all classes by the same latency in the run of the class alone. The
confidence interval of the ratio is computed as in `loadgen compare` for two single runs: it includes the sampling error
of both runs and the variation between two runs of one server.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.compare.figures import compare_single_runs
from loadgen.analysis.compare.parts import part_of_run
from loadgen.analysis.compare.run_variance import ComparedRun
from loadgen.analysis.frame import Frame
from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.steady_window import load_run
from loadgen.analysis.summary import Interference, Summary

FIGURES = ("ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "e2e.p99")
"""Latencies that are compared."""
ALONE = "alone"
"""Name in the header's `client` under which the folders of the runs of single classes are stored, by class."""


def add_interference(run: Run, frame: Frame, summary: Summary) -> None:
    """Compare each class of traffic with a run of this class alone, and add the result to the figures of the class.

    If the run of a class is missing or unreadable, the summary gets a note instead.
    """
    folders = run.header.client.get(ALONE) or {}
    for figures in summary.traffic:
        folder = folders.get(figures.name)
        if not isinstance(folder, str):
            continue
        path = Path(run.path).parent / folder
        try:
            alone, alone_frame = load_run(path)
        except RunFileError as error:
            summary.run.notes = [*summary.run.notes, f"{figures.name} cannot be compared with its run alone: {error}"]
            continue
        together = part_of_run(ComparedRun(run, frame, summary), figures.name)
        rows = compare_single_runs(ComparedRun(alone, alone_frame, summarise(alone, alone_frame)), together, FIGURES)
        figures.interference = [
            Interference(
                figure=row.figure,
                alone=row.a,
                together=row.b,
                ratio=row.b / row.a if row.a and row.b else None,
                ratio_ci95=row.ratio_ci95,
                why=row.why,
            )
            for row in rows
        ]
