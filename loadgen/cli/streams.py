"""Replaces standard output and standard error by streams whose errors never end a measurement.

Such an error occurs, for example, if the reader of a pipe has ended, or if the output goes to a file and the disk is
full.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

CHUNK_CHARACTERS = 2_048
"""Maximum characters per write. A chunk fits into the stream's buffer, so a pipe that is not ready loses nothing."""
READY_WAIT_S = 5.0
"""Maximum time to wait until a full non-blocking pipe accepts data again."""
NO_READER_ERRORS = frozenset((errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENXIO))
"""Errors of a pipe or terminal without a reader. They do not count as lost output."""


class TolerantStream:
    """A text stream whose write errors never end a command.

    After the first error the stream is redirected to /dev/null. Otherwise the interpreter would fail at exit when it
    flushes the buffered text.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """The first error, or None if everything has been written."""
        self.results_folder: Path | None = None
        """Folder with the results of the measurement, or None if there was no measurement."""
        self.needed = True
        """True if the command fails when its text cannot be written."""
        with suppress(AttributeError, io.UnsupportedOperation, ValueError):
            if stream.errors in ("strict", "surrogateescape"):  # the second one in the locale C
                cast("io.TextIOWrapper", stream).reconfigure(errors="replace")  # ASCII terminals get a question mark

    def write(self, text: str) -> int:
        """Write and flush the text. The first error is stored in `error`."""
        for begin in range(0, len(text), CHUNK_CHARACTERS):
            self._attempt(self._stream.write, text[begin : begin + CHUNK_CHARACTERS])
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the stream. The first error is stored in `error`."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def lost(self) -> bool:
        """Return True if text could not be written, for example because the disk is full.

        Text does not count as lost if the reader has gone away, for example because the terminal was closed.
        """
        return self.error is not None and self.error.errno not in NO_READER_ERRORS

    def _attempt(self, call: Any, *arguments: str) -> None:
        try:
            call(*arguments)
        except BlockingIOError as error:  # another process made the pipe non-blocking, and it is full
            with suppress(OSError, ValueError):
                select.select((), (self._stream,), (), READY_WAIT_S)
                self._stream.flush()
                return
            self._give_up(error)
        except OSError as error:
            self._give_up(error)
        except ValueError:  # the stream object is closed
            self._give_up(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    def _give_up(self, error: OSError) -> None:
        self.error = self.error or error
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class SafeStream:
    """The text stream to which all commands print. It removes control characters and hides secrets.

    Coloured text from `loadgen.analysis.report.terminal` is already safe, and is written to the `unfiltered` stream.
    """

    def __init__(self, stream: TolerantStream) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        from loadgen.analysis.format import printable
        from loadgen.servers.auth import hide_secrets, register_environment_key

        register_environment_key()  # takes effect once, because known secrets are skipped
        return self.unfiltered.write(hide_secrets(printable(text, "\n\t"), whole=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def protect() -> tuple[SafeStream, SafeStream]:
    """Replace sys.stdout and sys.stderr with streams that tolerate write errors, and return both streams."""
    out, err = (SafeStream(TolerantStream(stream or _null())) for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (out, err))
    return out, err


def results_are_kept(folder: Path, *, text_only: bool) -> None:
    """Record that the results of a measurement are stored in `folder`.

    Set `text_only` if the command prints the results only as text for people, not as JSON. The user can then read the
    results in the folder. A failed write to standard output therefore does not change the exit code.
    """
    stream = getattr(sys.stdout, "unfiltered", None)
    if isinstance(stream, TolerantStream):
        stream.results_folder = folder
        stream.needed = not text_only


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream without the filter for control characters and secrets. Write only safe text to it."""
    return getattr(stream, "unfiltered", stream)


def _null() -> TextIO:
    """Return a stream to /dev/null. It replaces a standard stream that was closed before Python started."""
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - open until the process ends
