"""Compresses the files of Records that a long run has completed, and removes old ones (--soak, --keep-records).

The work is done by a separate process of the lowest priority, so that it takes CPU time only when no measuring process
needs it. The process ends when its standard input is closed: at the end of the run, or when the coordinator dies.

Before a file is removed, figures of its Records are written. If the disk is full, these figures still fit into space
that the process has reserved.

    python -m loadgen.engine.record_keeper FOLDER KEEP_NS
"""

from __future__ import annotations

import ctypes
import gzip
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from loadgen.analysis.run.errors import OutputError, RunFileError
from loadgen.analysis.run.record_files import COMPRESSED, record_files
from loadgen.analysis.run.runfile import append_lines
from loadgen.engine.priority import lower_priority
from loadgen.engine.signals import Interrupts
from loadgen.servers.own_process import own_process

PART = "part-removed.jsonl"
POLL_S = 5.0
LEVEL = 1
"""Level of compression. Level 1 takes a third of the time of level 6, and its files are a tenth larger."""
END_LIMIT_S = 600.0
MAX_STARTS = 3
"""Maximum number of times that the process is started. It is started again if it ends during the run."""
FAILED = "the process that compresses files of Records failed, so some are not compressed"
ENDED_EARLY = "an interrupt ended the compression of files of Records, so some are not compressed"
END_POLL_S = 0.1
RESERVED_BYTES = 1 << 20
"""Space in bytes that is reserved on the disk for the figures of removed Records. The figures of a file take up to 130
kB."""
KEEP_SIZE = 1
"""Flag of fallocate(2): reserve space behind the end of a file, without a change of the size of the file."""


class RecordKeeper:
    """A separate process that compresses and removes files of Records. The coordinator of a run starts and ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._starts = 0
        self._folder = Path()

    def begin(self, folder: Path, keep_s: float | None) -> None:
        """Start the process that compresses files of Records and removes old Records in `folder`.

        Records are removed when they are older than `keep_s` seconds. With None, no Records are removed.
        """
        keep_ns = 0 if keep_s is None else round(keep_s * 1e9)
        self._command = own_process("loadgen.engine.record_keeper", str(folder), str(keep_ns))
        self._folder = folder
        self._start()

    def watch(self) -> None:
        """Start the process again if it has ended. Call this method often during the run."""
        if self._process is not None and self._process.poll() is not None and self._starts < MAX_STARTS:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._start()

    def end(self, notes: list[str], interrupts: Interrupts, on_wait: Callable[[], object] = lambda: None) -> list[Path]:
        """Let the process compress the remaining files of Records, and wait until the process has ended.

        Return a list with the file that contains the figures of removed Records. The list is empty if no Records were
        removed during the run.

        - `notes`: a message is added to this list if the process fails or is ended early. Files may then stay
          uncompressed.
        - `interrupts`: a further interrupt during the wait ends the process at once. A wait of more than END_LIMIT_S
          seconds also ends the process.
        - `on_wait`: this function is called when the wait begins, and then every END_POLL_S seconds.
        """
        if self._process is None:
            return []
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        before = interrupts.count
        limit_s = time.monotonic() + END_LIMIT_S
        while process.poll() is None and interrupts.count == before and time.monotonic() < limit_s:
            on_wait()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_POLL_S)
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.returncode:
            notes.append(FAILED if interrupts.count == before else ENDED_EARLY)
            for unfinished in self._folder.glob(".records-*.part"):
                unfinished.unlink(missing_ok=True)
        part = self._folder / PART
        if part.exists() and not part.stat().st_size:  # The process has reserved space, but removed no file.
            part.unlink()
        return [part] if part.exists() else []

    def _start(self) -> None:
        self._starts += 1
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603


def keep_records(folder: Path, keep_ns: int) -> None:
    """Compress the files of Records in `folder` and remove old files, repeatedly, until standard input is closed.

    `keep_ns` is the maximum age of a file in ns. If it is 0, no file is removed. Old files are removed before files are
    compressed, because the disk may be too full for a compressed file.
    """
    if keep_ns:
        reserve_space(folder / PART)
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        if keep_ns and not ended:
            with suppress(OutputError, RunFileError, OSError):
                remove_old(folder, keep_ns)
        for file in record_files(folder):
            if not file.name.endswith(COMPRESSED):
                with suppress(OSError):  # If the disk is full, the next attempt may succeed.
                    compress(file)


def compress(file: Path) -> Path:
    """Replace a file by a compressed file, and return the path of the compressed file.

    Both files have the same modification time. The old file is deleted only after the new one is on disk, so no data is
    lost in a crash.
    """
    target = file.with_name(file.name + COMPRESSED)
    temporary = file.with_name(f".{file.name}.part")
    try:
        with file.open("rb") as source, temporary.open("wb") as stream:
            with gzip.open(stream, "wb", LEVEL) as compressed:
                shutil.copyfileobj(source, compressed, 1 << 20)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError:  # The disk is full.
        temporary.unlink(missing_ok=True)
        raise
    times = file.stat()
    os.utime(temporary, ns=(times.st_atime_ns, times.st_mtime_ns))
    temporary.replace(target)
    sync_folder(file.parent)
    file.unlink()
    return target


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on disk, so that they survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old(folder: Path, keep_ns: int) -> None:
    """Remove every file of Records in `folder` that was last written more than `keep_ns` ago.

    Before a file is removed, figures of its Records are appended to the part file PART. If the figures cannot be
    written or the file cannot be removed, the function undoes its change of the part file and raises the error.

    After each file, disk space for the next figures is reserved. They can then be written even if the disk is full.
    """
    part = folder / PART
    for file in record_files(folder):
        if time.time_ns() - file.stat().st_mtime_ns < keep_ns:
            continue
        from loadgen.analysis.removed_windows import describe_removed

        figures = msgspec.json.encode(describe_removed(file)) + b"\n"
        size = part.stat().st_size if part.exists() else 0
        try:
            append_lines(part, [figures])
            file.unlink()
        except (OutputError, OSError):
            with suppress(OSError):
                os.truncate(part, size)
            raise
        finally:
            reserve_space(part)


def reserve_space(file: Path) -> None:
    """Reserve RESERVED_BYTES behind the end of a file, so that lines can be appended even if the disk is full.

    The size of the file does not change, and the file is created if it does not exist. Nothing is reserved if the disk
    is full or the file system cannot reserve space.
    """
    with suppress(OSError, AttributeError), file.open("ab") as stream:  # AttributeError: the system has no fallocate
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
        fallocate(stream.fileno(), KEEP_SIZE, file.stat().st_size, RESERVED_BYTES)


if __name__ == "__main__":
    lower_priority()
    keep_records(Path(sys.argv[1]), int(sys.argv[2]))
