"""Equal work: the output lengths that one server produced, given to the others.

TGI stops where the model stops: nothing on HTTP fixes its output length (docs/reference/dialects.md). So that the
others do the same work, they are asked for lengths drawn from those that TGI's answers had, on the same host with the
same model under the same workload.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.errors import LoadgenError
from loadgen.matrix.cells import Cell, Repeat
from loadgen.matrix.plan import MatrixPlan
from loadgen.matrix.state import finished
from loadgen.record import Record
from loadgen.runfile import scan

FOLDER = "equal-work"


class EqualWorkError(LoadgenError):
    """The server that says how much work there is has no finished run yet."""


def given(plan: MatrixPlan, folder: Path, cell: Cell) -> Path:
    """The file with one length per answer of the leading server's runs so far, for the cells beside `cell`.

    Written once, when it is first asked for: all later runs draw from the same lengths. Raises EqualWorkError.
    """
    file = folder / FOLDER / f"{cell.host}-{cell.model}-{cell.workload}.txt"
    if file.exists():
        return file
    leader = Cell(str(plan.equal_work), cell.host, cell.model, cell.workload)
    found = sorted(length for number in range(1, plan.repeats + 1) for length in _of(folder, Repeat(leader, number)))
    if not found:
        raise EqualWorkError(
            f"equal work: {leader} has no complete answer to take output lengths from",
            "Mend that cell and go on with --resume, or leave out equal_work.",
        )
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text("".join(f"{length}\n" for length in found), encoding="ascii")
    unfinished.rename(file)
    return file


def _of(folder: Path, repeat: Repeat) -> list[int]:
    """Output lengths of the complete answers of one run; none where it is not finished."""
    found: list[int] = []

    def take(record: Record) -> None:
        if record.phase == "measured" and record.state == "complete" and record.output_tokens:
            found.append(record.output_tokens)

    if finished(folder, repeat):
        scan(folder / repeat.folder, take)
    return found
