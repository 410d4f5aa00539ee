"""After the run: the workers' parts become one file, with a Record for every request whose turn had come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.analysis.run.record import ErrorKind, unsent_record
from loadgen.analysis.run.runfile import Footer, Header, append_lines
from loadgen.errors import OutputError
from loadgen.servers.errors import DECODE_ERRORS

if TYPE_CHECKING:
    from loadgen.engine.worker import WorkerTask


class WorkerExit(msgspec.Struct, frozen=True):
    """How one worker ended."""

    task: WorkerTask
    due: int
    """How many requests of its task had their turn; of a lost one also those that nobody sends any more."""
    exit: str
    """Its exit code or signal, in words."""
    rescued: Path | None
    """Where it wrote what the run's disk refused."""
    convert: Callable[[bytes], bytes] | None = None
    """What makes its lines into lines of this Run, where they were written by another machine's clock."""


class _Ended(msgspec.Struct, tag_field="type", tag="request"):
    id: int
    state: str
    phase: str = "measured"


_ENDED = msgspec.json.Decoder(_Ended)


def merge_parts(
    outcomes: Sequence[WorkerExit],
    header: Header,
    main: Path,
    *,
    interrupted: bool,
    ended_ns: int | None = None,
    beside: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> Footer:
    """Append every part to `main`, account for each request, close with the footer, remove the parts. `ended_ns`: when
    the last request had ended, on the monotonic clock; None is now. The files `beside` hold lines of telemetry, `notes`
    are what else is to be said. Raises OutputError when `main` cannot be written; the parts stay for `read`."""
    counts, all_notes = Counter[str](), list(notes)
    try:
        for outcome in outcomes:
            append_lines(main, _accounted(outcome, counts, all_notes, interrupted=interrupted))
        append_lines(main, whole_lines(beside, all_notes, "telemetry"))
        footer = Footer(
            ended_ns=(time.monotonic_ns() if ended_ns is None else ended_ns) - header.start_ns,
            sent=counts.total() - counts["dropped"],
            interrupted=interrupted,
            notes=all_notes,
            **{state: counts[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")},
        )
        append_lines(main, [msgspec.json.encode(footer) + b"\n"])
    except OutputError as error:
        error.hint = (
            f"What was received is in the part files in {main.parent}: free some space, then `loadgen report` it."
        )
        if rescued := [str(path) for path in (*(outcome.rescued for outcome in outcomes), *beside[1:]) if path]:
            error.hint += f" Their last lines are in {', '.join(rescued)}: append each to its part first."
        raise
    for path in (*(path for outcome in outcomes for path in (outcome.task.part, outcome.rescued) if path), *beside):
        path.unlink(missing_ok=True)
    return footer


def _accounted(outcome: WorkerExit, counts: Counter[str], notes: list[str], *, interrupted: bool) -> Iterator[bytes]:
    """The whole lines of a worker's part, then a Record for each request that has none."""
    seen: set[int] = set()
    worker = outcome.task.worker
    whole = whole_lines((outcome.task.part, outcome.rescued), notes, f"worker {worker}")
    for line in whole if outcome.convert is None else map(outcome.convert, whole):
        with suppress(*DECODE_ERRORS):
            ended = _ENDED.decode(line)
            if ended.phase == "measured":
                seen.add(ended.id)
                counts[ended.state] += 1
        yield line
    lost = 0
    kind: ErrorKind = "cancelled" if interrupted else "worker_lost"
    detail = f"its worker process ended with {outcome.exit}"
    open_loop = () if outcome.task.prompts.has_sessions else outcome.task.schedule.due_ns or ()
    requests = islice(outcome.task.requests(), outcome.due if outcome.due > len(seen) else 0)
    for request, due_ns in zip(requests, chain(open_loop, repeat(0)), strict=False):
        if request.id not in seen:
            lost += 1
            record = unsent_record(request, kind, detail)
            record.worker, record.due_ns = worker, due_ns
            yield msgspec.json.encode(record) + b"\n"
    if lost:
        counts["failed"] += lost
        notes.append(f"worker {worker} ended with {outcome.exit}; {lost} requests without record")


def whole_lines(paths: Iterable[Path | None], notes: list[str], whose: str) -> Iterator[bytes]:
    """The whole lines of files of which each may go on in the next one; those that do not exist are passed over."""
    rest = b""
    for path in paths:
        if path is None or not path.exists():
            continue
        with path.open("rb") as stream:
            for piece in stream:
                line = rest + piece
                rest = b"" if line.endswith(b"\n") else line
                if not rest:
                    yield line
    if rest:
        notes.append(f"{whose}: its last line was cut off and is left out")
