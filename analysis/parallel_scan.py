"""Reads a large run file with two processes, each of which decodes one half of the file.

Decoding takes most of the time of a report. The second process is a fork. It sends its half of the columns, which are
much smaller than the Records, through a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from loadgen.analysis.child_process import ChildProcess, can_fork
from loadgen.analysis.frame import Frame, FrameBuilder, Integers
from loadgen.analysis.run.record_files import record_files
from loadgen.analysis.run.runfile import Run, add_rest, scan, scan_records

MIN_BYTES = 64 << 20
"""Minimum size of a run file that two processes read. Smaller files take less time than the second process."""
LOOK_BYTES = 1 << 20


def read_columns(path: Path) -> tuple[Run, Frame]:
    """Read a run file. Return the Run without its Records, and the Frame of all Records in the order of the file.

    Raises RunFileError if there is no readable run.
    """
    main = path / "run.jsonl" if path.is_dir() else path
    files = record_files(main.parent)
    if files and can_fork() and _total_bytes(files) >= MIN_BYTES:
        result = _read_files_and_rest(path, files)
    else:
        middle = _middle(main)
        result = None if middle is None else _read_halves(main, middle)
    if result is not None:
        return result
    builder = FrameBuilder()
    run = scan(path, builder.add, on_block=builder.add_block)
    frame = builder.frame()
    if not _are_distinct(frame.id):  # Only the first Record of a request counts.
        builder = FrameBuilder()
        run = scan(path, builder.add)
        frame = builder.frame()
    return run, frame


def _total_bytes(files: Sequence[Path]) -> int:
    """Return the total size of the files. Files that were renamed or removed since they were listed do not count."""
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def _are_distinct(ids: Integers) -> bool:
    """Return True if no id occurs twice."""
    ordered = np.sort(ids)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _middle(main: Path) -> int | None:
    """Return the byte offset of a line near the middle of the run file `main`. A second process will read from there
    on.

    Return None if the file cannot be divided between two processes:

    - `main` is not a regular file or is too small, or a line in its middle is very long.
    - The folder also contains files of Records.
    - The folder contains the part files of a run that is in progress or was killed.
    - Only one CPU core is available.
    - This process has several threads, so it cannot be forked safely.
    """
    if not can_fork() or not main.is_file():
        return None
    size = main.stat().st_size
    if size < MIN_BYTES or any(main.parent.glob("part-*.jsonl")) or record_files(main.parent):
        return None
    with main.open("rb") as stream:
        stream.seek(size // 2)
        rest = stream.readline(LOOK_BYTES)
        return stream.tell() if rest.endswith(b"\n") else None


def _read_halves(main: Path, middle: int) -> tuple[Run, Frame] | None:
    """Read both halves of a run file at the same time. `middle` is the byte offset of the second half.

    Return None if a request occurs twice, or if the second process failed. One process must then read the whole file.
    Only the first Record of a request counts, and one half does not show which requests the other half contains.
    """
    with ChildProcess(lambda: _read_half(main, (middle, None))) as second_half:
        builder, run = _read_half(main, (0, middle))
        later = second_half.result()
    if later is None:
        return None
    later_builder, later_run = later
    builder.absorb(later_builder)
    add_rest(run, later_run)
    frame = builder.frame()
    return (run, frame) if _are_distinct(frame.id) else None


def _read_files_and_rest(path: Path, files: Sequence[Path]) -> tuple[Run, Frame] | None:
    """Read a long run with two processes: one reads half of its files of Records, the other reads everything else.

    Return None if a request occurs twice, or if the second process failed.
    """
    first = files[: (len(files) + 1) // 2]

    def read_first() -> tuple[FrameBuilder, Run]:
        builder = FrameBuilder()
        run = scan_records(first, builder.add, builder.add_block)
        builder.close()
        return builder, run

    with ChildProcess(read_first) as child:
        later_builder = FrameBuilder()
        later_run = scan(path, later_builder.add, on_block=later_builder.add_block, other_files=first)
        later_builder.close()
        result = child.result()
    if result is None:
        return None
    builder, run = result
    builder.absorb(later_builder)
    run.path, run.header = later_run.path, later_run.header
    add_rest(run, later_run)
    frame = builder.frame()
    return (run, frame) if _are_distinct(frame.id) else None


def _read_half(main: Path, span: tuple[int, int | None]) -> tuple[FrameBuilder, Run]:
    """Read a part of a run file. Return its columns, and the Run without its Records."""
    builder = FrameBuilder()
    run = scan(main, builder.add, span=span, on_block=builder.add_block)
    builder.close()
    return builder, run
