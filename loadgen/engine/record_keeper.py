"""Compresses the files of Records that a long run has completed, and removes old ones (--soak, --keep-records).

The work is done by a separate process of the lowest priority, so that it takes CPU time only when no measuring process
needs it. The process ends when its standard input is closed: at the end of the run, or when the coordinator dies.

    python -m loadgen.engine.record_keeper FOLDER KEEP_NS
"""

from __future__ import annotations

import gzip
import os
import select
import shutil
import subprocess
import sys
import time
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


class RecordKeeper:
    """A separate process that compresses and removes files of Records. The coordinator of a run starts and ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._starts = 0
        self._folder = Path()

    def begin(self, folder: Path, keep_s: float | None) -> None:
        """Start the process. It removes Records that are older than `keep_s` seconds, or none if `keep_s` is None."""
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

    def end(self, notes: list[str], interrupts: Interrupts) -> list[Path]:
        """Let the process compress the remaining files, and wait for it. Return the file with the figures of removed
        Records.

        The result is an empty list if no Records were removed. A further interrupt ends the process at once. If the
        process fails or is ended early, a message is added to `notes`, but no Record is lost.
        """
        if self._process is None:
            return []
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        before = interrupts.count
        limit_s = time.monotonic() + END_LIMIT_S
        while process.poll() is None and interrupts.count == before and time.monotonic() < limit_s:
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
        return [part] if part.exists() else []

    def _start(self) -> None:
        self._starts += 1
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603


def keep_records(folder: Path, keep_ns: int) -> None:
    """Compress files of Records, and remove those older than `keep_ns`, until standard input is closed.

    If `keep_ns` is 0, no file is removed.
    """
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], POLL_S)[0])
        for file in record_files(folder):
            if not file.name.endswith(COMPRESSED):
                with suppress(OSError):  # If the disk is full, the next attempt may succeed.
                    compress(file)
        if keep_ns and not ended:
            with suppress(OutputError, RunFileError, OSError):
                remove_old(folder, keep_ns)


def compress(file: Path) -> Path:
    """Replace a file by a compressed file with the same modification time, and return the path of the compressed file.

    After a crash there is the old file, the complete new file, or both.
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
    """Wait until the names of the files in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old(folder: Path, keep_ns: int) -> None:
    """Remove every file of Records that was last written more than `keep_ns` ago.

    Before a file is removed, the figures of its Records are appended to a part file. If the figures cannot be written,
    or the file cannot be removed, the part file is truncated to its previous length, and the error is raised.
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


if __name__ == "__main__":
    lower_priority()
    keep_records(Path(sys.argv[1]), int(sys.argv[2]))
