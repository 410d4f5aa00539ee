"""Compares the classes of traffic of two runs, or of two groups of runs, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as evolve_struct

from loadgen.analysis.compare.figures import ComparedFigure, compare_groups, compare_single_runs, judge_figures
from loadgen.analysis.compare.run_variance import ComparedRun
from loadgen.analysis.frame_parts import find_part

PART_FIGURES = ("output_tokens_per_s", "complete", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "e2e.p99")
"""Figures that are compared for each class."""


@dataclass(frozen=True, slots=True)
class ComparedClass:
    """The comparison of one class of traffic."""

    name: str
    rows: list[ComparedFigure]


def compare_classes(
    a: Sequence[ComparedRun], b: Sequence[ComparedRun], margin: float, run_variation: float, invalid: str
) -> list[ComparedClass]:
    """Compare each class of traffic that all runs have.

    The p-values of the figures of all classes are adjusted together, so the probability of any false verdict on a class
    is at most 5%. The verdicts on the whole runs have a separate error rate of 5%. `invalid` is the reason why no
    figure can have a verdict, or "" if figures can have one.
    """
    runs = (*a, *b)
    names = [part.name for part in runs[0].summary.traffic]
    names = [name for name in names if all(name in [part.name for part in run.summary.traffic] for run in runs)]
    tested: list[tuple[str, ComparedFigure]] = []
    for name in names:
        parts_a, parts_b = ([part_of_run(run, name) for run in group] for group in (a, b))
        if len(a) == len(b) == 1:
            rows = compare_single_runs(parts_a[0], parts_b[0], PART_FIGURES, run_variation)
        else:
            summaries_a, summaries_b = [run.summary for run in parts_a], [run.summary for run in parts_b]
            rows = compare_groups(summaries_a, summaries_b, PART_FIGURES, run_variation)
        tested += [(name, replace(row, p_value=None, why=row.why or invalid) if invalid else row) for row in rows]
    judged = judge_figures([row for _, row in tested], margin)
    return [
        ComparedClass(name, [row for (of, _), row in zip(tested, judged, strict=True) if of == name]) for name in names
    ]


def classes_method(classes: Sequence[ComparedClass]) -> str:
    """Return a sentence about the chance of a false verdict on classes of traffic, or "" if no verdict is tested.

    A comparison has two tables of verdicts: one on whole runs, and one on classes. Each table is corrected for its
    number of tests. The probability that a table contains a false verdict is therefore at most 5%.
    """
    tested = sum(row.p_value is not None for part in classes for row in part.rows)
    if not tested:
        return ""
    return (
        f"The {tested} figures of the classes have a separate level of 5% (Holm's correction), so each of the two "
        "tables has its own chance of a false verdict."
    )


def part_of_run(run: ComparedRun, name: str) -> ComparedRun:
    """Return the data of one class of traffic of a run, as if the class were a run."""
    frame = find_part(run.frame, name)
    figures = next(part for part in run.summary.traffic if part.name == name)
    assert frame is not None
    summary = evolve_struct(
        run.summary,
        requests=figures.requests,
        throughput=figures.throughput,
        latencies=figures.latencies,
        goodput=figures.goodput,
    )
    return ComparedRun(run.run, frame, summary)
