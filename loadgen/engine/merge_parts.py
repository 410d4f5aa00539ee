"""Merges the workers' part files into one run file after the run, with a Record for every request that was due."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.analysis.run.id_set import IdSet
from loadgen.analysis.run.packed_ids import unpack_ids
from loadgen.analysis.run.record import ErrorKind, unsent_record
from loadgen.analysis.run.record_files import open_records, plain_name, record_files
from loadgen.analysis.run.removed_records import RemovedRecords
from loadgen.analysis.run.runfile import Footer, Header, append_lines
from loadgen.errors import OutputError
from loadgen.servers.errors import DECODE_ERRORS

if TYPE_CHECKING:
    from loadgen.engine.worker import WorkerTask


class WorkerExit(msgspec.Struct, frozen=True):
    """Describes how a worker process ended, and how many of its requests were due until then."""

    task: WorkerTask
    due: int
    """Number of the worker's requests that were due. If the process was lost, its requests that were not due yet are
    included."""
    exit: str
    """Exit code or signal of the worker process, as text."""
    rescued: Path | None
    """File with the lines that could not be written to the run's disk, if there are any."""
    convert: Callable[[bytes], bytes] | None = None
    """Converts each line to the clock of this run. None if the lines were written on this machine."""


class _RecordHead(msgspec.Struct, tag_field="type", tag="request"):
    """The fields of a Record that are needed to merge part files. The other fields are not decoded."""

    id: int
    state: str
    phase: str = "measured"


_RECORD_HEAD = msgspec.json.Decoder(_RecordHead)


def merge_parts(
    exits: Sequence[WorkerExit],
    header: Header,
    main: Path,
    *,
    interrupted: bool,
    ended_ns: int | None = None,
    telemetry_parts: Sequence[Path] = (),
    removed_parts: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> Footer:
    """Append every part file to the run file `main`, add the footer, and delete the part files.

    A request that was due but has no Record gets a Record with the state `failed`. `ended_ns` is the time when the last
    request ended (CLOCK_MONOTONIC, default: now). `notes` are stored in the footer. The files `telemetry_parts` contain
    telemetry and the results of `--at` commands. The files `removed_parts` contain figures of Records that were removed
    during the run (--keep-records).

    Raises OutputError if `main` cannot be written. In this case the part files are kept, and `loadgen report` can read
    them.
    """
    counts = Counter[str]()
    all_notes = list(notes)
    removed = _removed_records(removed_parts)
    try:
        for worker_exit in exits:
            own = [part for part in removed if part.worker == worker_exit.task.number]
            append_lines(main, _all_records(worker_exit, counts, all_notes, own, interrupted=interrupted))
        append_lines(main, whole_lines(telemetry_parts, all_notes, "telemetry"))
        append_lines(main, whole_lines(removed_parts, all_notes, "figures of removed Records"))
        footer = Footer(
            ended_ns=(time.monotonic_ns() if ended_ns is None else ended_ns) - header.start_ns,
            sent=counts.total() - counts["dropped"],
            interrupted=interrupted,
            notes=all_notes,
            abandoned=counts["abandoned"],
            **{state: counts[state] for state in ("complete", "truncated", "failed", "rejected", "dropped")},
        )
        append_lines(main, [msgspec.json.encode(footer) + b"\n"])
    except OutputError as error:
        error.hint = (
            f"The results are in the part files in {main.parent}: free some space, then run `loadgen report` on it."
        )
        rescued = [worker_exit.rescued for worker_exit in exits] + [*telemetry_parts[1:]]
        files = [str(path) for path in rescued if path]
        if files:
            error.hint += f" Their last lines are in {', '.join(files)}: append each to its part file first."
        raise
    for worker_exit in exits:
        worker_exit.task.part.unlink(missing_ok=True)
        if worker_exit.rescued:
            worker_exit.rescued.unlink(missing_ok=True)
    for path in (*telemetry_parts, *removed_parts):
        path.unlink(missing_ok=True)
    return footer


def _removed_records(parts: Sequence[Path]) -> list[RemovedRecords]:
    """Return the summaries of the files of Records that were removed during a long run.

    `parts` are the part files that contain the summaries, one per line. A line that cannot be decoded is skipped. A
    summary is also skipped if its file of Records still exists, because the Records can then be read from this file.
    """
    by_file: dict[str, RemovedRecords] = {}
    for line in whole_lines(parts, [], ""):
        with suppress(*DECODE_ERRORS):
            removed = msgspec.json.decode(line, type=RemovedRecords)
            by_file[plain_name(removed.file)] = removed
    existing = {plain_name(file.name) for folder in {part.parent for part in parts} for file in record_files(folder)}
    return [removed for name, removed in by_file.items() if name not in existing]


def _removed_ids(removed: Sequence[RemovedRecords]) -> IdSet:
    """Return the ids of the requests whose Records were removed during the run."""
    result = IdSet()
    for part in removed:
        for request_id in unpack_ids(part.ids):
            result.add(request_id)
    return result


def _all_records(
    worker_exit: WorkerExit,
    counts: Counter[str],
    notes: list[str],
    removed: Sequence[RemovedRecords],
    *,
    interrupted: bool,
) -> Iterator[bytes]:
    """Yield the Records of one worker as lines, including a failed Record for each due request that has no Record.

    The complete lines of the worker's part file come first. The failed Records follow. Their error kind is `cancelled`
    if `interrupted` is True, and `worker_lost` otherwise. The number of measured requests in each state is added to
    `counts`. Messages about missing Records are added to `notes`.

    In a long run (--soak), the worker moves Records from the part file to separate files. These Records are counted,
    but not yielded. Some of the separate files may have been removed during the run. `removed` contains the figures of
    these files, and their requests are counted too.
    """
    seen = IdSet()
    task = worker_exit.task
    for part in removed:
        counts.update(part.states)
    for file in record_files(task.part.parent, task.number) if task.rotate_bytes else ():
        try:
            with open_records(file) as stream:
                for line in stream:
                    _count(line, seen, counts)
        except (OSError, EOFError, zlib.error) as error:  # the last two are errors of compressed data
            reason = getattr(error, "strerror", None) or error
            notes.append(
                f"worker {task.number}: cannot read {file.name} ({reason}), so some of its records are missing"
            )
    lines = whole_lines((task.part, worker_exit.rescued), notes, f"worker {task.number}")
    for line in lines if worker_exit.convert is None else map(worker_exit.convert, lines):
        _count(line, seen, counts)
        yield line
    lost = 0
    kind: ErrorKind = "cancelled" if interrupted else "worker_lost"
    detail = f"its worker process ended with {worker_exit.exit}"
    due_instants = () if task.prompts.has_sessions else task.schedule.due_ns or ()
    recorded = len(seen) + sum(part.requests for part in removed)
    requests = islice(task.requests(), worker_exit.due if worker_exit.due > recorded else 0)
    removed_ids = _removed_ids(removed if worker_exit.due > recorded else ())
    for request, due_ns in zip(requests, chain(due_instants, repeat(0)), strict=False):
        if request.id not in seen and request.id not in removed_ids:
            lost += 1
            record = unsent_record(request, kind, detail)
            record.worker = task.number
            record.due_ns = due_ns
            yield msgspec.json.encode(record) + b"\n"
    if lost:
        counts["failed"] += lost
        number = "1 request" if lost == 1 else f"{lost} requests"
        notes.append(f"worker {task.number} ended with {worker_exit.exit}; {number} without record")


def _count(line: bytes, seen: IdSet, counts: Counter[str]) -> None:
    """Count the Record in a line of a part file, and note the id of its request.

    The entry for the state of the Record in `counts` is increased by 1. The id is added to `seen`. Nothing is counted
    for requests that are not measured, such as warm-up requests, or for lines that cannot be decoded.
    """
    with suppress(*DECODE_ERRORS):
        record_head = _RECORD_HEAD.decode(line)
        if record_head.phase == "measured":
            seen.add(record_head.id)
            counts[record_head.state] += 1


def whole_lines(paths: Iterable[Path | None], notes: list[str], whose: str) -> Iterator[bytes]:
    """Yield the complete lines of several files, as if the files were one file.

    A line may begin in one file and end in the next. Missing files are skipped. If the last line is incomplete, it is
    left out, and a message is added to `notes`. The message begins with `whose`, for example `worker 3`.
    """
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
