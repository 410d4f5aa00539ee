"""Opens the files that a user names: plans, datasets, files of lengths, run files and certificates.

An input is a regular file or a pipe, such as `<(zcat lengths.gz)`. Directories, sockets and devices are refused. For
example, reading the device `/dev/zero` would never end. Every error is an OSError, whose `strerror` completes the
message "cannot read FILE: ...". `InputFileError` is a subclass of OSError for inputs that this module refuses.

A pipe can be read only once, but a run reads its input several times and in several processes. The first call therefore
stores the whole content of the pipe in memory. Later calls return the stored content, also in forked workers.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO, TextIO

PIPE_BYTES = 1 << 28
"""Maximum size in bytes of an input from a pipe, which is stored in memory."""
PIPE_NOTE_S, PIPE_SILENCE_S = 2.0, 30.0
"""Seconds without data from a pipe: after the first time, a message appears on stderr. After the second time, reading
fails."""
READ_BYTES = 1 << 20
TEXT_LINE_LIMIT = 1 << 22
"""Maximum number of characters in one line of a table or of a list of numbers."""
OTHER_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a pipe"),
)

_pipes: dict[tuple[int, int], bytes] = {}
"""Content of every pipe that was read, by device and inode."""


class InputFileError(OSError):
    """A file that cannot be used as an input. `strerror` states the reason and what is expected instead."""

    def __str__(self) -> str:
        return str(self.strerror)


class LongLineError(ValueError):
    """A line of a text file is longer than this type of file allows."""


def open_input(path: Path, *, pipes: bool = True) -> BinaryIO:
    """Open a regular file or a pipe for reading. A pipe is read to its end, and returned as a file in memory.

    If `pipes` is False, pipes are refused. Raises OSError if the input is refused or cannot be read."""
    mode = path.stat().st_mode  # Checked first, because opening a device can have side effects
    _check_kind(mode, pipes=pipes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe without a writer would block here
    try:
        result = os.fstat(descriptor)
        _check_kind(result.st_mode, pipes=pipes)
        if stat.S_ISREG(result.st_mode):
            os.set_blocking(descriptor, True)
            return open(descriptor, "rb")  # noqa: PTH123 - a file descriptor, which the caller closes
        key = result.st_dev, result.st_ino
        if key not in _pipes:
            _pipes[key] = _read_pipe(descriptor, path)
        content = _pipes[key]
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return io.BytesIO(content)


def read_input(path: Path, limit_bytes: int, *, pipes: bool = True) -> bytes:
    """Return the content of a file or pipe. Raises OSError if it is unreadable or larger than `limit_bytes`."""
    with open_input(path, pipes=pipes) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise InputFileError(
            errno.EINVAL, f"it has more than {limit_bytes:,} bytes, so it is not the expected type of file"
        )
    return content


def check_input(path: Path) -> None:
    """Raise OSError if a file or pipe cannot be read. A pipe is read to its end, and its content is kept in memory."""
    open_input(path).close()


@contextmanager
def input_path(path: Path, limit_bytes: int) -> Iterator[Path]:
    """Context manager that provides the content of an input as a regular file, for a library that opens files itself.

    The context value is the path of this file: `path` itself for a regular file, and a temporary copy for a pipe.
    Raises OSError if the input is unreadable or larger than `limit_bytes`.
    """
    content = read_input(path, limit_bytes)
    if path.is_file():
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="loadgen-input-") as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def limited_lines(file: TextIO, limit: int = TEXT_LINE_LIMIT) -> Iterator[str]:
    """Yield the lines of a text file. Raises LongLineError at a line of more than `limit` characters."""
    for number in count(1):
        line = file.readline(limit + 1)
        if not line:
            return
        if len(line) > limit:
            raise LongLineError(f"line {number} is longer than {limit:,} characters")
        yield line


def _check_kind(mode: int, *, pipes: bool) -> None:
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return
    kind = next((name for matches, name in OTHER_KINDS if matches(mode)), "no regular file")
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise InputFileError(number, f"it is {kind}; name a regular file" + (" or a pipe" if pipes else ""))


def _read_pipe(descriptor: int, path: Path) -> bytes:
    """Read a pipe until its writers close it, and return the content. Ctrl-C interrupts the wait for data.

    `descriptor` is the pipe's open file descriptor, and `path` is its name in messages. Raises InputFileError if no
    data arrives for PIPE_SILENCE_S seconds, or if the content is larger than PIPE_BYTES."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    content = bytearray()
    while True:
        if not poll.poll(PIPE_NOTE_S * 1000):
            sys.stderr.write(f"loadgen: waiting for data from the pipe {path}\n")
            if not poll.poll((PIPE_SILENCE_S - PIPE_NOTE_S) * 1000):
                raise InputFileError(
                    errno.ETIMEDOUT,
                    f"no data came through this pipe for {PIPE_SILENCE_S:g} s; start the program that writes first",
                )
        try:
            piece = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            continue
        if not piece:
            return bytes(content)
        content += piece
        if len(content) > PIPE_BYTES:
            raise InputFileError(
                errno.EINVAL, f"more than {PIPE_BYTES:,} bytes came through this pipe; write them to a file and name it"
            )
