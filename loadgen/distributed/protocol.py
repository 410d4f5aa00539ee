"""What master and worker machines say to each other, and what each command says to its own Locust process; who may take
part, and how far apart the clocks of two machines are.

    command <── frames ──> Locust process <══ Locust's messages, sealed ══> Locust process <── frames ──> command
    master                 MasterRunner                                     WorkerRunner                  worker

Words pass from command to command; the Locust processes seal and open them and do not read them. Events and orders are
between a command and its own Locust process. A frame is a length of four bytes, then msgpack.

A token proves both sides, and every later message carries a code made from it:

    worker machine                        master
    hello, nonce ─────────────────────────>
           <───────────────── challenge, nonce
    proof(worker) ────────────────────────>      wrong: refused, and nothing else is ever told
           <──────────── welcome, proof(master)
    sealed messages <────────────> sealed messages

The worker proves itself first, so that a stranger who reaches the master's port learns nothing made from the token.
HMAC is that of RFC 2104 with SHA-256. Nothing here is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from loadgen.analysis.run.runfile import SchedulingFacts
from loadgen.distributed import DistributedError, TokenError
from loadgen.errors import OutputError
from loadgen.servers.auth import read_secret
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.lifeline import lifeline
from loadgen.workloads.request import Request

PORT = 5557
"""Locust's own."""
VARIABLE = "LOADGEN_TOKEN"
LENGTH_LEAST = 16
"""Characters. Whoever hears a handshake can try tokens against it at leisure, so a short one protects nothing."""
WORKER, MASTER = "worker", "master"
FINGERPRINT_REQUESTS = 2
FRAME_BYTES_MOST = 1 << 24
"""Nothing that is said is nearly as long."""
MASTER_LIMIT_S = 300
"""A worker machine without `--stay` waits for its master so long at most."""
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


class PromptsReady(Message, frozen=True):
    """It has found the server and drawn its prompts."""

    fingerprints: list[bytes]
    """Of what each of its workers will send."""
    server: dict[str, Any]
    """Who answers, as seen from there."""


class Ready(Message, frozen=True):
    """Everything is encoded and connected."""

    stamps: str
    scheduling: SchedulingFacts = SchedulingFacts()
    """Of its worker whose priority was raised least."""


class Unable(Message, frozen=True):
    """It cannot do what was assigned."""

    message: str
    hint: str


class Progress(Message, frozen=True):
    """At the order to start and then twice a second: the sums of loadgen.engine.client_health.LiveCounters, in its
    order."""

    counts: list[int]
    due: list[int]
    """Of each worker: how many of its requests had their turn."""
    ahead_ns: int = 0
    """The order to start came this long before the instant; below zero it came too late."""


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


class PieceAck(Message, frozen=True):
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


WorkerWord = Hello | PromptsReady | Ready | Unable | Progress | Piece | Ended
MasterWord = Assign | Connect | StartAt | Stop | PieceAck | Wait | Bye
WORKER_WORD: msgspec.msgpack.Decoder[WorkerWord] = msgspec.msgpack.Decoder(WorkerWord)
MASTER_WORD: msgspec.msgpack.Decoder[MasterWord] = msgspec.msgpack.Decoder(MasterWord)

# Between a command and its own Locust process.


class Listening(Message, frozen=True):
    """Event at the master: worker machines can come."""

    port: int


class Joined(Message, frozen=True):
    """Event: the other side has proven itself."""

    node: str


class PeerLost(Message, frozen=True):
    """Event: the other side was not let in, left, or was not heard of for too long. At a worker machine, `node` is set
    where it is this machine that was not let in."""

    node: str
    reason: str


class ClockSample(msgspec.Struct, frozen=True):
    """An exchange of stamps as in NTP (RFC 5905, section 8): the master notes t1, the worker machine t2 on arrival and
    t3 on reply, the master t4, all on CLOCK_MONOTONIC.

        offset = ((t2 - t1) + (t3 - t4)) / 2        worker's clock minus master's
        round trip = (t4 - t1) - (t3 - t2)

    If both directions took equally long, the offset is exact. How unequal they were cannot be seen from the two ends,
    but neither can have taken less than nothing, so the truth is within half the round trip.
    """

    at_ns: int
    """On the master's clock, half-way through."""
    offset_ns: int
    round_trip_ns: int

    @property
    def facts(self) -> dict[str, int]:
        """The offset, and how far the truth is from it at most."""
        return {"offset_ns": self.offset_ns, "uncertainty_ns": (self.round_trip_ns + 1) // 2}


def exchanged(t1: int, t2: int, t3: int, t4: int) -> ClockSample:
    """What one exchange tells."""
    return ClockSample((t1 + t4) // 2, ((t2 - t1) + (t3 - t4)) // 2, (t4 - t1) - (t3 - t2))


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


Event = Listening | Joined | PeerLost | Exchanged | ClockSeries | Sealed
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
        result = bytearray()
        with contextlib.suppress(ConnectionError):
            while len(result) < size and (piece := self._socket.recv(size - len(result))):
                result += piece
        if len(result) < size:
            raise EOFError
        return bytes(result)


@contextlib.contextmanager
def locust_process(role: Literal["master", "worker"], host: str, port: int) -> Iterator[Frames[Event]]:
    """Start the Locust process of a command, and end it. It also ends when the command is killed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "loadgen.distributed.locust_process", role, host, str(port), str(theirs.fileno())]
    with ours, theirs, lifeline(ours):
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


def write_down(piece: Piece, path: Path) -> PieceAck:
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
    return PieceAck(piece.worker, piece.offset + len(piece.data))


# Who may take part.


def require_locust() -> None:
    """Raises DistributedError unless Locust is installed. Nothing of it is imported: it would patch this process."""
    if find_spec("locust") is None:
        raise DistributedError(
            "several machines are joined by Locust, which is not installed", "pip install 'llm-loadgen[ui]'"
        )


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def numeric(self) -> Address:
        """With the host as numbers, which is all that a socket can be bound to. Raises DistributedError."""
        if self.host == "*":
            return Address("0.0.0.0", self.port)  # noqa: S104 - asked for, and refused without a token
        try:
            return Address(socket.gethostbyname(self.host), self.port)
        except OSError as error:
            raise DistributedError(f"{self.host}: {error.strerror}", "Name this machine's own address.") from error


def address_of(text: str, option: str) -> Address:
    """HOST or HOST:PORT. Raises DistributedError."""
    name, colon, number = text.rpartition(":")
    if not colon:
        return Address(text)
    if not name or not number.isdecimal() or int(number) > 65535:
        raise DistributedError(
            f"{option} {text}: not an address", f"Write HOST or HOST:PORT, such as {text or 'bench-1'}:{PORT}."
        )
    return Address(name, int(number))


def fingerprint(requests: Iterable[Request], dialect: Dialect, model: str) -> bytes:
    """A digest of the first bodies that a worker sends: equal where prompts, model and dialect are, so that no prompt
    has to be shipped."""
    bodies = (dialect.encode(request, model) for request in islice(requests, FINGERPRINT_REQUESTS))
    return hashlib.sha256(b"".join(bodies)).digest()


def token_of(environ: Mapping[str, str]) -> str:
    """The token of this environment; empty when there is none. Raises TokenError for one that is too short."""
    token = read_secret(VARIABLE, environ)
    if token and len(token) < LENGTH_LEAST:
        raise TokenError(
            f"{VARIABLE} has {len(token)} characters: it needs {LENGTH_LEAST} or more",
            f"Make one, and give the same one to every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides know of one worker machine's arrival."""

    token: str
    node: str
    """The worker machine's name in Locust."""
    worker_nonce: bytes
    master_nonce: bytes

    def proof(self, role: str) -> bytes:
        """What only a holder of the token can say, in this handshake and this role."""
        return self._code("proof", role)

    def proves(self, role: str, proof: object) -> bool:
        """Whether this is that proof."""
        return isinstance(proof, bytes) and hmac.compare_digest(proof, self.proof(role))

    def channel(self, role: str) -> SealedChannel:
        """The sealed messages that follow, from this role's side."""
        return SealedChannel(self._code("session"), role, MASTER if role == WORKER else WORKER)

    def _code(self, *parts: str) -> bytes:
        return _code(self.token.encode(), *parts, self.node, self.worker_nonce, self.master_nonce)


@dataclass(slots=True)
class SealedChannel:
    """Seals messages to the other side and opens those that come from it."""

    _key: bytes
    _role: str
    _other: str
    _sent: int = 0
    _opened: int = 0

    def seal(self, body: bytes) -> dict[str, object]:
        """The message to send. Numbered, so that none counts twice."""
        self._sent += 1
        return {"number": self._sent, "body": body, "code": _code(self._key, "message", self._role, self._sent, body)}

    def open(self, message: Mapping[str, object]) -> bytes:
        """What was sealed. Raises TokenError for anything that the other side did not seal, or that came before."""
        number, body, code = message.get("number"), message.get("body"), message.get("code")
        if not (isinstance(number, int) and isinstance(body, bytes) and isinstance(code, bytes)):
            raise TokenError("a message without its code")
        if not hmac.compare_digest(code, _code(self._key, "message", self._other, number, body)):
            raise TokenError("a message with a wrong code")
        if number <= self._opened:
            raise TokenError("a message that came before")
        self._opened = number
        return body


def _code(key: bytes, *parts: object) -> bytes:
    """HMAC over the parts as msgpack, of which no two lists give the same bytes."""
    return hmac.digest(key, msgspec.msgpack.encode(parts), "sha256")
