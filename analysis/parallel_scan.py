"""Reads a large run file with two processes, each of which decodes one half of the file.

Decoding takes most of the time of a report. The second process is a fork. It sends its half of the columns, which are
much smaller than the Records, through a pipe.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from pathlib import Path

import numpy as np

from loadgen.analysis.frame import Frame, FrameBuilder
from loadgen.analysis.run.runfile import Run, add_rest, scan

MIN_BYTES = 64 << 20
"""Minimum size of a run file that two processes read. Smaller files take less time than the second process."""
LOOK_BYTES = 1 << 20


def read_columns(path: Path) -> tuple[Run, Frame]:
    """Read a run file. Return the Run without its Records, and the Frame of all Records in the order of the file.

    Raises RunFileError if there is no readable run.
    """
    main = path / "run.jsonl" if path.is_dir() else path
    middle = _middle(main)
    if middle is not None:
        result = _read_halves(main, middle)
        if result is not None:
            return result
    builder = FrameBuilder()
    run = scan(path, builder.add)
    return run, builder.frame()


def _middle(main: Path) -> int | None:
    """Return the offset in bytes of a line in the middle of a run file, or None if one process must read the file.

    One process reads small files, and runs that are in progress or were killed. One process also reads the file on a
    machine with one CPU core, and if this process has several threads, because such a process cannot be forked safely.
    """
    if len(os.sched_getaffinity(0)) < 2 or threading.active_count() > 1 or not main.is_file():
        return None
    size = main.stat().st_size
    if size < MIN_BYTES or any(main.parent.glob("part-*.jsonl")):
        return None
    with main.open("rb") as stream:
        stream.seek(size // 2)
        rest = stream.readline(LOOK_BYTES)
        return stream.tell() if rest.endswith(b"\n") else None


def _read_halves(main: Path, middle: int) -> tuple[Run, Frame] | None:
    """Read both halves of a run file at the same time.

    Return None if a request occurs in both halves, or if the second process failed. One process must then read the
    file, because only the first Record of a request counts.
    """
    receiving, sending = os.pipe()
    gc.freeze()  # a garbage collection in the child would copy the memory of every object
    child = os.fork()
    if not child:
        _send_half(main, middle, receiving, sending)
    os.close(sending)
    builder = FrameBuilder()
    try:
        with os.fdopen(receiving, "rb") as stream:
            run = scan(main, builder.add, span=(0, middle))
            try:
                later, later_run = pickle.load(stream)  # noqa: S301 - from our own child process
            except (EOFError, pickle.UnpicklingError):
                return None
    except BaseException:
        os.kill(child, signal.SIGKILL)  # its half is of no use without the first one
        raise
    finally:
        os.waitpid(child, 0)
        gc.unfreeze()
    builder.close()
    builder.absorb(later)
    del later
    add_rest(run, later_run)
    frame = builder.frame()
    return (run, frame) if len(np.unique(frame.id)) == len(frame.id) else None


def _send_half(main: Path, middle: int, receiving: int, sending: int) -> None:
    """Read the second half of a run file in a forked process, send its columns and end the process.

    `receiving` and `sending` are the ends of the pipe. The process closes its copy of the receiving end, so that its
    write fails, and does not block, after the death of the parent process.
    """
    code = 1
    try:
        os.close(receiving)
        builder = FrameBuilder()
        run = scan(main, builder.add, span=(middle, None))
        builder.close()
        with os.fdopen(sending, "wb") as stream:
            pickle.dump((builder, run), stream, protocol=5)
        code = 0
    finally:
        os._exit(code)
