"""Standard output and standard error for commands whose measurement must survive a broken, full or closed stream."""

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
"""Text written at once. A piece fits into the stream's buffer, so a pipe that is not ready loses nothing."""
READY_WAIT_S = 5.0
"""How long to wait for room in a non-blocking pipe."""
NO_READER_ERRORS = frozenset((errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENXIO))
"""Errors of a pipe or terminal that has no reader any more. Output to nobody is no failure."""


class TolerantStream:
    """A text stream whose write errors never end a command.

    After the first error the stream goes to /dev/null, so the interpreter does not stumble over buffered text when it
    exits.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """The first error. None: everything has been written."""
        self.kept_in: Path | None = None
        """The folder that holds the results, too. Losing the text of a measurement is then no failure."""
        self.needed = True
        """Whether a text that could not be written makes the command fail."""
        with suppress(AttributeError, io.UnsupportedOperation, ValueError):
            if stream.errors == "strict":
                cast("io.TextIOWrapper", stream).reconfigure(errors="replace")  # ASCII terminals get a question mark

    def write(self, text: str) -> int:
        """Write and flush the text; errors are kept in `error`."""
        for begin in range(0, len(text), CHUNK_CHARACTERS):
            self._attempt(self._stream.write, text[begin : begin + CHUNK_CHARACTERS])
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the stream; errors are kept in `error`."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def lost(self) -> bool:
        """Whether text was lost that somebody may still be waiting for."""
        return self.error is not None and self.error.errno not in NO_READER_ERRORS

    def _attempt(self, call: Any, *arguments: str) -> None:
        try:
            call(*arguments)
        except BlockingIOError as error:  # somebody else made the pipe non-blocking, and it is full
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
    """A stream for people, to which all commands print. It removes control characters and hides secrets. Text that
    `loadgen.analysis.report.terminal` has made safe, and coloured, goes to its `own` stream."""

    def __init__(self, own: TolerantStream) -> None:
        self.unfiltered = own

    def write(self, text: str) -> int:
        from loadgen.analysis.format import printable
        from loadgen.servers.auth import hide_secrets

        return self.unfiltered.write(hide_secrets(printable(text, "\n\t"), whole=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def protect() -> tuple[SafeStream, SafeStream]:
    """Replace standard output and standard error by streams that tolerate errors. Raises nothing."""
    out, err = (SafeStream(TolerantStream(stream or _null())) for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (out, err))
    return out, err


def results_are_kept(folder: Path, *, text_only: bool) -> None:
    """Note that the results of a measurement are in `folder`. If standard output is `text_only`, the command does not
    fail when that text cannot be written."""
    stream = getattr(sys.stdout, "unfiltered", None)
    if isinstance(stream, TolerantStream):
        stream.kept_in, stream.needed = folder, not text_only


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream that takes control characters, for text that is safe already."""
    return getattr(stream, "unfiltered", stream)


def _null() -> TextIO:
    """Stand in for a stream that was closed before the interpreter started."""
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - open until the process ends
