"""Opens the files that a user names: plans, datasets, lengths, run files, certificates.

An input is a regular file or a pipe, such as `<(zcat lengths.gz)`. Devices, directories and sockets are refused:
`/dev/zero` never ends. Every error is an `InputFileError`, an OSError whose `strerror` completes the sentence
"cannot read FILE: ...".

A pipe can be read only once, but a run reads its input several times and in several processes. The first read
therefore takes the whole pipe into memory, and later reads, also those of forked workers, get the same bytes.
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
"""Maximum size of an input that comes through a pipe: it stays in memory."""
PIPE_NOTE_S, PIPE_SILENCE_S = 2.0, 30.0
"""A pipe through which no data comes for this long is mentioned on stderr; for this long, it is given up."""
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
"""The content of every pipe that was read, by device and inode."""


class InputFileError(OSError):
    """A file that cannot be an input. `strerror` says why, and what is expected instead."""

    def __str__(self) -> str:
        return str(self.strerror)


class LongLineError(ValueError):
    """A line that is longer than any line of the expected kind of file."""


def open_input(path: Path, *, pipes: bool = True) -> BinaryIO:
    """Open a regular file, or return the content of a pipe. Without `pipes` a pipe is refused too. Raises OSError."""
    mode = path.stat().st_mode  # Before it is opened: opening a device can have side effects
    _check_kind(mode, pipes=pipes)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe without a writer would block here
    try:
        result = os.fstat(file)
        _check_kind(result.st_mode, pipes=pipes)
        if stat.S_ISREG(result.st_mode):
            os.set_blocking(file, True)
            return open(file, "rb")  # noqa: PTH123 - a file number, which the caller closes
        key = result.st_dev, result.st_ino
        if key not in _pipes:
            _pipes[key] = _read_pipe(file, path)
        content = _pipes[key]
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return io.BytesIO(content)


def read_input(path: Path, limit_bytes: int, *, pipes: bool = True) -> bytes:
    """Return the content of an input of at most `limit_bytes`. Raises OSError."""
    with open_input(path, pipes=pipes) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise InputFileError(errno.EINVAL, f"it has more than {limit_bytes:,} bytes, so it is another kind of file")
    return content


def check_input(path: Path) -> None:
    """Check that an input can be opened. The content of a pipe is read, and kept for later. Raises OSError."""
    open_input(path).close()


@contextmanager
def input_path(path: Path, limit_bytes: int) -> Iterator[Path]:
    """Yield the path of a regular file with the content of an input, for a library that opens files itself. Raises
    OSError."""
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


def _read_pipe(file: int, path: Path) -> bytes:
    """Return everything that is written to a pipe, up to its end. Ctrl-C ends the wait."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
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
            piece = os.read(file, READ_BYTES)
        except BlockingIOError:
            continue
        if not piece:
            return bytes(content)
        content += piece
        if len(content) > PIPE_BYTES:
            raise InputFileError(
                errno.EINVAL, f"more than {PIPE_BYTES:,} bytes came through this pipe; write them to a file and name it"
            )
