"""Reads the result of a sweep from its files, and writes sweep.json and the frontier page.

The frontier page plots throughput against speed per user, with one point for each load of a sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.errors import OutputError
from loadgen.results import SUMMARY_BYTES, load_and_summarise, report_link, write_text
from loadgen.studies.sweep import measured_steps, read_lines, step_folder
from loadgen.studies.sweep.measure import SweepTargets, capacity_of
from loadgen.workloads.input_files import read_input

if TYPE_CHECKING:
    from loadgen.analysis.sweep import SweepResult


def read_sweep(folder: Path) -> SweepResult:
    """Read the result of a sweep from its files. Raises OutputError if the sweep is missing or corrupted."""
    from msgspec import MsgspecError

    from loadgen.analysis.objectives import ObjectiveError, parse
    from loadgen.analysis.summary import from_json
    from loadgen.analysis.sweep import MeasuredStep, build_result

    lines = read_lines(folder)
    first = next((line for line in lines if line["type"] == "plan"), None)
    if first is None:
        raise OutputError(f"{folder} does not contain a sweep.", "Name a folder with a sweep.jsonl.")
    try:
        plan = first["plan"]
        targets = SweepTargets(objectives=parse(plan.get("objectives") or ()), over=plan["over"])
        search_settings = next((line for line in reversed(lines) if line["type"] == "search"), {})
        steps = []
        for line in measured_steps(lines):
            run = folder / step_folder(line["step"])
            try:
                summary = from_json(read_input(run / "summary.json", SUMMARY_BYTES, pipes=False))
            except (OSError, MsgspecError):
                summary = load_and_summarise(run, targets.objectives, targets.bounds, drawn=False).summary
            steps.append(MeasuredStep(line, step_folder(line["step"]), summary))
        capacity = capacity_of(plan, search_settings, lines)
        ends = (line["why"] for line in reversed(lines) if line["type"] in ("ended", "resumed") and "why" in line)
        return build_result(plan, steps, capacity, search_settings, next(ends, ""))
    except (AttributeError, KeyError, TypeError, ObjectiveError) as error:
        raise OutputError(f"{folder}: sweep.jsonl is damaged: {error}", "Start again with another --out.") from None


def write_sweeps(sweeps: Mapping[str, tuple[Path, SweepResult]], page: Path) -> list[str]:
    """Write sweep.json for each sweep, and one page for all sweeps. Return the content of each sweep.json.

    `sweeps` maps the name of each sweep on the page to its folder and its result. Raises OutputError if a file cannot
    be written.
    """
    import msgspec

    from loadgen.analysis.report.page import render
    from loadgen.analysis.sweep.document import frontier_document

    texts = []
    for folder, result in sweeps.values():
        text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
        write_text(folder / "sweep.json", text)
        texts.append(text)
    folders = {id(result): folder for folder, result in sweeps.values()}
    results = {name: result for name, (_, result) in sweeps.items()}
    document = frontier_document(results, lambda result, step: report_link(folders[id(result)] / step, page))
    write_text(page, render(document))
    return texts
