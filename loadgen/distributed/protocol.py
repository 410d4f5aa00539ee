"""What master and worker machines say to each other, and what each command says to its own Locust process.

    command <── frames ──> Locust process <══ Locust's messages, sealed ══> Locust process <── frames ──> command
    master                 MasterRunner                                     WorkerRunner                  worker

Words pass from command to command; the Locust processes seal and open them and do not read them. Events and orders are
between a command and its own Locust process. A frame is a length of four bytes, then msgpack.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from loadgen.distributed import DistributedError
from loadgen.distributed.clocks import ClockSample
from loadgen.errors import OutputError

FRAME_BYTES_MOST = 1 << 24
"""Nothing that is said is nearly as long."""
PIECE_BYTES = 1 << 18
PIECES_UNTAKEN = 4
"""Of a machine's part files, so many pieces at most are on their way at a time."""
END_LIMIT_S = 5.0
"""For Locust to say goodbye."""
_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Anything that is said here."""


# Words: worker to master.


class Hello(Message, frozen=True):
    """Here I am."""

    version: str
    """Of loadgen. The same seed gives the same prompts in the same version only."""
    host: dict[str, Any]
    folder: str
    """Where its part files are, should it be unable to send them."""


class Drawn(Message, frozen=True):
    """It has found the server and drawn its prompts."""

    fingerprints: list[bytes]
    """Of what each of its workers will send."""
    server: dict[str, Any]
    """Who answers, as seen from there."""


class Ready(Message, frozen=True):
    """Everything is encoded and connected."""

    stamps: str


class Unable(Message, frozen=True):
    """It cannot do what was assigned."""

    message: str
    hint: str


class Started(Message, frozen=True):
    """The order came this long before the instant; below zero it came too late."""

    ahead_ns: int


class Progress(Message, frozen=True):
    """Twice a second: the sums of loadgen.engine.health.Counts, in its order."""

    counts: list[int]
    due: list[int]
    """Of each worker: how many of its requests had their turn."""


class Piece(Message, frozen=True):
    """Bytes of a worker's part file, from this offset on."""

    worker: int
    offset: int
    data: bytes


class Ended(Message, frozen=True):
    """Everything has been sent: after the last Piece."""

    at_ns: int
    """When its last request had ended, on its own CLOCK_MONOTONIC."""
    due: list[int]
    exits: list[str]
    """Of each worker: its exit code or signal, in words."""
    interrupted: bool
    """Somebody interrupted it there."""


# Words: master to worker.


class Assign(Message, frozen=True):
    """What to do. Prompts are drawn from the plan's seed."""

    plan: dict[str, Any]
    """`workers` is that of all machines together, and the url is the one that the master found."""
    first: int
    """The first of its workers' numbers."""
    workers: int
    """How many of them it runs."""


class Connect(Message, frozen=True):
    """Everybody has drawn, so encode and connect. Not earlier: servers close connections that idle for some seconds."""


class StartAt(Message, frozen=True):
    """Begin at this instant of your CLOCK_MONOTONIC."""

    at_ns: int


class Stop(Message, frozen=True):
    """End the run and keep what came."""


class Taken(Message, frozen=True):
    """This worker's part is written down up to this offset."""

    worker: int
    offset: int


class Wait(Message, frozen=True):
    """Not needed now, and why. Another run may need it."""

    reason: str


class Bye(Message, frozen=True):
    """That was all. With `kept` everything received is written down."""

    reason: str
    kept: bool


WorkerWord = Hello | Drawn | Ready | Unable | Started | Progress | Piece | Ended
MasterWord = Assign | Connect | StartAt | Stop | Taken | Wait | Bye
WORKER_WORD: msgspec.msgpack.Decoder[WorkerWord] = msgspec.msgpack.Decoder(WorkerWord)
MASTER_WORD: msgspec.msgpack.Decoder[MasterWord] = msgspec.msgpack.Decoder(MasterWord)

# Between a command and its own Locust process.


class Listening(Message, frozen=True):
    """Event at the master: worker machines can come."""

    port: int


class Joined(Message, frozen=True):
    """Event: the other side has proven itself."""

    node: str


class Gone(Message, frozen=True):
    """Event: the other side was not let in, left, or was not heard of for too long. At a worker machine, `node` is set
    where it is this machine that was not let in."""

    node: str
    reason: str


class Exchanged(Message, frozen=True):
    """Event at the master: stamps were exchanged."""

    node: str
    sample: ClockSample


class ClockSeries(Message, frozen=True):
    """Order at the master: a series of exchanges with this machine. Event: it is over."""

    node: str


class Sealed(Message, frozen=True):
    """Order: seal this and send it. Event: it was opened."""

    node: str
    body: bytes
    """A word. Only a holder of the token gets here, so anything else is a bug of ours."""


Event = Listening | Joined | Gone | Exchanged | ClockSeries | Sealed
Order = ClockSeries | Sealed


class Frames(Generic[T]):
    """One end of a stream socket between a command and its Locust process. Reads messages of type T."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()  # of greenlets in a Locust process: what is long goes out in several pieces

    def post(self, message: Message) -> None:
        """Write one message; waits as long as the other end does not read. If that is gone, `receive` tells."""
        body = msgspec.msgpack.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def tell(self, word: WorkerWord | MasterWord, node: str = "") -> None:
        """Order the Locust process to send a word to the other side; at the master, to this machine."""
        self.post(Sealed(node, msgspec.msgpack.encode(word)))

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message, or None when none came in time. Raises EOFError when the other end is gone."""
        if timeout_s is not None and not self._poll.poll(timeout_s * 1000):
            return None
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        assert length <= FRAME_BYTES_MOST
        return self._decoder.decode(self._read(length))

    def available(self, timeout_s: float) -> Iterator[T]:
        """What has come; waits so long at most for the first of it. Raises EOFError when the other end is gone."""
        message = self.receive(timeout_s)
        while message is not None:
            yield message
            message = self.receive(0)

    def _read(self, size: int) -> bytes:
        """So many bytes: what has begun to come comes whole, or its sender is gone."""
        found = bytearray()
        with contextlib.suppress(ConnectionError):
            while len(found) < size and (piece := self._socket.recv(size - len(found))):
                found += piece
        if len(found) < size:
            raise EOFError
        return bytes(found)


@contextlib.contextmanager
def locust_process(role: Literal["master", "worker"], host: str, port: int) -> Iterator[Frames[Event]]:
    """Start a command's own Locust process, and end it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "loadgen.distributed.locust_process", role, host, str(port), str(theirs.fileno())]
    with ours, theirs:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own arguments
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")},
            start_new_session=True,  # an interrupt is the command's to understand
        )
        theirs.close()
        try:
            yield Frames(ours, Event)
        finally:
            ours.close()
            try:
                child.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def require_locust() -> None:
    """Raises DistributedError unless Locust is installed. Nothing of it is imported: it would patch this process."""
    if find_spec("locust") is None:
        raise DistributedError(
            "several machines are joined by Locust, which is not installed", "pip install 'llm-loadgen[ui]'"
        )


class Outgoing:
    """Sends the part files of a worker machine as they grow. What could not be sent stays where it is."""

    def __init__(self, parts: dict[int, Path], send: Callable[[Piece], None]) -> None:
        """`parts` by the worker's number."""
        self._files = {worker: [path] for worker, path in parts.items()}
        self._send = send
        self._sent = dict.fromkeys(parts, 0)
        self._untaken: set[Taken] = set()

    def append(self, worker: int, rescued: Path) -> None:
        """A worker has ended, and wrote the end of its part elsewhere, because its own disk was full."""
        self._files[worker].append(rescued)

    def taken(self, word: Taken) -> None:
        """The master has written down a piece."""
        self._untaken.discard(word)

    def pump(self) -> bool:
        """Send what has come and may go. Whether everything that there is has been taken."""
        more = True
        while more:
            more = False
            for worker in self._files:  # in turn, so that no part waits for the others to end
                if len(self._untaken) == PIECES_UNTAKEN:
                    return False
                if data := _read_from(self._files[worker], self._sent[worker]):
                    more = True
                    self._send(Piece(worker, self._sent[worker], data))
                    self._sent[worker] += len(data)
                    self._untaken.add(Taken(worker, self._sent[worker]))
        return not self._untaken


def _read_from(files: Sequence[Path], offset: int) -> bytes:
    """A piece, from this offset on, of files of which each goes on in the next one."""
    for path in files:
        size = path.stat().st_size if path.exists() else 0
        if offset < size:
            with path.open("rb") as file:
                return os.pread(file.fileno(), PIECE_BYTES, offset)
        offset -= size
    return b""


def write_down(piece: Piece, path: Path) -> Taken:
    """Append what came to the worker's part. Raises OutputError when the disk does not take it."""
    try:
        with path.open("ab") as file:
            assert file.tell() == piece.offset, "pieces of one worker come in their order"
            file.write(piece.data)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}",
            "Free some space. The worker machines keep their parts and say where: copy them into the run's folder.",
        ) from error
    return Taken(piece.worker, piece.offset + len(piece.data))
