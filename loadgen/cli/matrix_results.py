"""What a matrix leaves behind besides its runs: their summaries, matrix.json, matrix.html and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.cli.output import Output


def after_run(folder: Path) -> str:
    """Write summary.json beside a run that has ended; what came back, in a few words."""
    from analysis.gather import load
    from analysis.metrics import summarise

    run, frame = load(folder)
    summary = summarise(run, frame)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    from analysis.matrix_text import in_a_line

    return in_a_line(summary)


def write_report(folder: Path, output: Output, *, interrupted: bool = False) -> int:
    return 0
