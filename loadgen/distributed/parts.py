"""Part files on their way from a worker machine to the master.

The worker machine reads its own part files as they grow and sends pieces of them; the master writes each piece down and
says so, and no more than PIECES_UNTAKEN of a machine are on their way. What could not be sent stays where it is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from loadgen.distributed.messages import Piece, Taken
from loadgen.errors import OutputError

PIECE_BYTES = 1 << 18
PIECES_UNTAKEN = 4


class Outgoing:
    """Sends the part files of this machine's workers."""

    def __init__(self, parts: dict[int, Path], send: Callable[[Piece], None]) -> None:
        """`parts` by the worker's number."""
        self._files = {worker: [path] for worker, path in parts.items()}
        self._send = send
        self._sent = dict.fromkeys(parts, 0)
        self._read = dict.fromkeys(parts, 0)
        self._untaken: deque[tuple[int, int]] = deque()

    def append(self, worker: int, rescued: Path) -> None:
        """A worker wrote the end of its part elsewhere, because its own disk was full."""
        self._files[worker].append(rescued)

    def taken(self, word: Taken) -> None:
        """The master has written down a piece."""
        if (word.worker, word.offset) in self._untaken:
            self._untaken.remove((word.worker, word.offset))

    def pump(self, *, ended: bool = False) -> bool:
        """Send what has come and may go. Whether everything that there is has been taken.

        As long as the run has not `ended`, only pieces that are whole or a worker's flush; a file that follows waits.
        """
        more = True
        while more and len(self._untaken) < PIECES_UNTAKEN:
            more = False
            for worker in self._files:  # in turn, so that no part waits for the others to end
                more |= self._room and self._send_one(worker, ended=ended)
        return not more and not self._untaken

    @property
    def _room(self) -> bool:
        return len(self._untaken) < PIECES_UNTAKEN

    def _send_one(self, worker: int, *, ended: bool) -> bool:
        files = self._files[worker]
        data = _read(files[0], self._read[worker])
        while not data and ended and len(files) > 1:
            del files[0]
            self._read[worker] = 0
            data = _read(files[0], 0)
        if not data:
            return False
        self._send(Piece(worker, self._sent[worker], data))
        self._read[worker] += len(data)
        self._sent[worker] += len(data)
        self._untaken.append((worker, self._sent[worker]))
        return True


class Incoming:
    """Writes down the pieces of every machine, in the run's folder."""

    def __init__(self, parts: dict[int, Path]) -> None:
        self._files = {worker: path.open("ab", buffering=0) for worker, path in parts.items()}
        self._paths = parts

    def take(self, piece: Piece) -> Taken:
        """Write it down. Raises OutputError when the disk does not take it."""
        file = self._files[piece.worker]
        assert file.tell() == piece.offset, "pieces of one worker come in their order"
        rest = memoryview(piece.data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            path = self._paths[piece.worker]
            raise OutputError(
                f"cannot write {path}: {error.strerror}",
                "Free some space. The worker machines keep their parts and say where: copy them into the run's folder.",
            ) from error
        return Taken(piece.worker, file.tell())

    def close(self) -> None:
        """After the last piece."""
        for file in self._files.values():
            file.close()


def remove(files: Sequence[Path]) -> None:
    """What the master has does not have to be here too."""
    for file in files:
        file.unlink(missing_ok=True)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), PIECE_BYTES, offset)
    except FileNotFoundError:
        return b""
