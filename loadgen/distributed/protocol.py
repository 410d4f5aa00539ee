"""Messages between the master and worker machines, and between a command and its own Locust process.

This module also checks who may take part (a shared token) and measures the offset between two machines' clocks.

    command <── frames ──> Locust process <══ Locust's messages, sealed ══> Locust process <── frames ──> command
    master                 MasterRunner                                     WorkerRunner                  worker

Command messages pass from one command to the other. The Locust processes seal and open them but do not read them.
Events and orders pass between a command and its own Locust process. A frame is a length of four bytes (network byte
order) followed by msgpack.

Both sides prove that they hold the token. Every later message carries a code (HMAC) derived from it:

    worker machine                        master
    hello, nonce ─────────────────────────>
           <───────────────── challenge, nonce
    proof(worker) ────────────────────────>      wrong: refused, and nothing else is sent
           <──────────── welcome, proof(master)
    sealed messages <────────────> sealed messages

The worker proves itself first, so that a stranger who reaches the master's port sees nothing derived from the token.
HMAC is RFC 2104 with SHA-256. Messages are authenticated, not encrypted.
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
"""Locust's default port."""
VARIABLE = "LOADGEN_TOKEN"
MIN_TOKEN_LENGTH = 16
"""Characters. An eavesdropper can test guesses against a recorded handshake, so a short token protects nothing."""
WORKER, MASTER = "worker", "master"
FINGERPRINT_REQUESTS = 2
MAX_FRAME_BYTES = 1 << 24
"""Every message is far shorter."""
MASTER_LIMIT_S = 300
"""How long a worker machine without `--stay` waits for its master."""
END_LIMIT_S = 5.0
"""How long Locust may take to disconnect."""
_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base class of all messages."""


# Command messages from a worker machine to the master.


class Hello(Message, frozen=True):
    """A worker machine introduces itself."""

    version: str
    """Version of loadgen. A seed gives the same prompts only within one version."""
    host: dict[str, Any]
    folder: str
    """Folder of the machine's part files, in case it cannot send them."""


class PromptsReady(Message, frozen=True):
    """The machine has reached the server and drawn its prompts."""

    fingerprints: list[bytes]
    """One per worker process: a digest of the first bodies that it will send."""
    server: dict[str, Any]
    """Facts of the server as the machine sees it."""


class Ready(Message, frozen=True):
    """The machine has encoded its requests and opened its connections."""

    stamps: str
    """The least exact timestamp source of its workers."""
    scheduling: SchedulingFacts = SchedulingFacts()
    """Scheduling of the worker whose priority was raised least."""


class Unable(Message, frozen=True):
    """The machine cannot carry out its assignment."""

    message: str
    hint: str


class Progress(Message, frozen=True):
    """Live counters of a machine: sent when the order to start arrives, and then twice a second."""

    counts: list[int]
    """Sums over its workers, in the field order of loadgen.engine.client_health.LiveCounters."""
    due: list[int]
    """Per worker: the number of its requests whose turn has come."""
    ahead_ns: int = 0
    """How long before the start instant the order arrived; negative if it arrived too late."""


class Piece(Message, frozen=True):
    """Bytes of a worker's part file, starting at `offset`."""

    worker: int
    offset: int
    data: bytes


class Ended(Message, frozen=True):
    """The machine has sent every Piece."""

    at_ns: int
    """End of its last request, on the machine's CLOCK_MONOTONIC."""
    due: list[int]
    exits: list[str]
    """Per worker: its exit code or signal, as text."""
    interrupted: bool
    """Whether the command was interrupted on that machine."""


# Command messages from the master to a worker machine.


class Assign(Message, frozen=True):
    """Assign a share of the run. The machine draws its prompts from the plan's seed."""

    plan: dict[str, Any]
    """The plan. `workers` counts the workers of all machines; `url` is the one that the master resolved."""
    first: int
    """Number of the machine's first worker."""
    workers: int
    """Number of workers that the machine runs."""


class Connect(Message, frozen=True):
    """Encode the requests and connect. Sent once every machine has drawn its prompts, because servers close
    connections that stay idle for some seconds."""


class StartAt(Message, frozen=True):
    """Start at this instant of the receiver's CLOCK_MONOTONIC."""

    at_ns: int


class Stop(Message, frozen=True):
    """End the run and keep what was received."""


class PieceAck(Message, frozen=True):
    """The master has written this worker's part up to this offset."""

    worker: int
    offset: int


class Wait(Message, frozen=True):
    """The machine is not needed now. A later run may need it."""

    reason: str


class Bye(Message, frozen=True):
    """End of the conversation. With `kept`, the master has written everything that it received."""

    reason: str
    kept: bool


WorkerMessage = Hello | PromptsReady | Ready | Unable | Progress | Piece | Ended
MasterMessage = Assign | Connect | StartAt | Stop | PieceAck | Wait | Bye
WORKER_MESSAGE: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
MASTER_MESSAGE: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)

# Between a command and its own Locust process.


class Listening(Message, frozen=True):
    """Event at the master: worker machines can connect."""

    port: int


class Joined(Message, frozen=True):
    """Event: the other side has proven that it holds the token."""

    node: str


class PeerLost(Message, frozen=True):
    """Event: the other side was refused, left, or was silent for too long. At a worker machine, `node` is set when
    this machine itself was refused."""

    node: str
    reason: str


class ClockSample(msgspec.Struct, frozen=True):
    """One exchange of timestamps as in NTP (RFC 5905, section 8). The master notes t1 when it sends, the worker machine
    t2 on arrival and t3 on reply, and the master t4 on arrival, all on CLOCK_MONOTONIC.

        offset = ((t2 - t1) + (t3 - t4)) / 2        worker's clock minus master's
        round trip = (t4 - t1) - (t3 - t2)

    If both directions took equally long, the offset is exact. The two ends cannot see how unequal they were. Neither
    direction takes negative time, so the true offset is within half the round trip.
    """

    at_ns: int
    """Midpoint of the exchange on the master's clock."""
    offset_ns: int
    round_trip_ns: int

    @property
    def facts(self) -> dict[str, int]:
        """Return the offset and its maximum error."""
        return {"offset_ns": self.offset_ns, "uncertainty_ns": (self.round_trip_ns + 1) // 2}


def exchanged(t1: int, t2: int, t3: int, t4: int) -> ClockSample:
    """Return the clock sample of one exchange."""
    return ClockSample((t1 + t4) // 2, ((t2 - t1) + (t3 - t4)) // 2, (t4 - t1) - (t3 - t2))


class Exchanged(Message, frozen=True):
    """Event at the master: one exchange of timestamps has ended."""

    node: str
    sample: ClockSample


class ClockSeries(Message, frozen=True):
    """Order at the master: run a series of exchanges with this machine. Event: the series has ended."""

    node: str


class Sealed(Message, frozen=True):
    """Order: seal this message and send it. Event: a sealed message was opened."""

    node: str
    body: bytes
    """A command message. Only a holder of the token can send one, so anything else here is our own bug."""


Event = Listening | Joined | PeerLost | Exchanged | ClockSeries | Sealed
Order = ClockSeries | Sealed


class Frames(Generic[T]):
    """One end of the stream socket between a command and its Locust process. Reads messages of type T."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()  # greenlets of the Locust process must not interleave long messages

    def post(self, message: Message) -> None:
        """Write one message. Blocks while the other end does not read. `receive` reports an end that is gone."""
        body = msgspec.msgpack.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def send(self, message: WorkerMessage | MasterMessage, node: str = "") -> None:
        """Have the Locust process send a command message to the other side. The master names the machine in `node`."""
        self.post(Sealed(node, msgspec.msgpack.encode(message)))

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message, or None after the timeout. Raises EOFError if the other end is gone."""
        if timeout_s is not None and not self._poll.poll(timeout_s * 1000):
            return None
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        assert length <= MAX_FRAME_BYTES
        return self._decoder.decode(self._read(length))

    def available(self, timeout_s: float) -> Iterator[T]:
        """Yield the messages that have arrived. Waits up to `timeout_s` for the first. Raises EOFError if the other end
        is gone."""
        message = self.receive(timeout_s)
        while message is not None:
            yield message
            message = self.receive(0)

    def _read(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises EOFError if the sender is gone before they are complete."""
        result = bytearray()
        with contextlib.suppress(ConnectionError):
            while len(result) < size and (piece := self._socket.recv(size - len(result))):
                result += piece
        if len(result) < size:
            raise EOFError
        return bytes(result)


@contextlib.contextmanager
def locust_process(role: Literal["master", "worker"], host: str, port: int) -> Iterator[Frames[Event]]:
    """Run the Locust process of a command. It also ends when the command is killed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "loadgen.distributed.locust_process", role, host, str(port), str(theirs.fileno())]
    with ours, theirs, lifeline(ours):
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own arguments
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")},
            start_new_session=True,  # Ctrl-C goes to the command alone
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


def append_piece(piece: Piece, path: Path) -> PieceAck:
    """Append a piece to a worker's part file. Raises OutputError if it cannot be written."""
    try:
        with path.open("ab") as file:
            assert file.tell() == piece.offset, "pieces of one worker arrive in order"
            file.write(piece.data)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}",
            "Free some space. The worker machines keep their part files and print the folder: copy the files into the "
            "run's folder.",
        ) from error
    return PieceAck(piece.worker, piece.offset + len(piece.data))


def require_locust() -> None:
    """Raise DistributedError unless Locust is installed. Locust is not imported, because it patches the process."""
    if find_spec("locust") is None:
        raise DistributedError(
            "runs over several machines need Locust, which is not installed", "pip install 'llm-loadgen[ui]'"
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
        """The address with a numeric host, as binding a socket needs it. Raises DistributedError."""
        if self.host == "*":
            return Address("0.0.0.0", self.port)  # noqa: S104 - requested, and refused without a token
        try:
            return Address(socket.gethostbyname(self.host), self.port)
        except OSError as error:
            raise DistributedError(f"{self.host}: {error.strerror}", "Name this machine's own address.") from error


def address_of(text: str, option: str) -> Address:
    """Parse HOST or HOST:PORT. Raises DistributedError."""
    name, colon, number = text.rpartition(":")
    if not colon:
        return Address(text)
    if not name or not number.isdecimal() or int(number) > 65535:
        raise DistributedError(
            f"{option} {text}: not an address", f"Write HOST or HOST:PORT, such as {text or 'bench-1'}:{PORT}."
        )
    return Address(name, int(number))


def fingerprint(requests: Iterable[Request], dialect: Dialect, model: str) -> bytes:
    """Return a digest of the first bodies that a worker sends.

    Digests are equal if prompts, model and dialect are equal. So machines can be checked without shipping prompts."""
    bodies = (dialect.encode(request, model) for request in islice(requests, FINGERPRINT_REQUESTS))
    return hashlib.sha256(b"".join(bodies)).digest()


def token_of(environ: Mapping[str, str]) -> str:
    """Return the token from the environment, or an empty string. Raises TokenError for a token that is too short."""
    token = read_secret(VARIABLE, environ)
    if token and len(token) < MIN_TOKEN_LENGTH:
        raise TokenError(
            f"{VARIABLE} has {len(token)} characters: it needs {MIN_TOKEN_LENGTH} or more",
            f"Make a token, and set the same one on every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


@dataclass(frozen=True, slots=True)
class Handshake:
    """The facts that both sides know when a worker machine joins."""

    token: str
    node: str
    """The worker machine's name in Locust."""
    worker_nonce: bytes
    master_nonce: bytes

    def proof(self, role: str) -> bytes:
        """Return the proof that only a holder of the token can compute, for this handshake and role."""
        return self._code("proof", role)

    def is_proof(self, role: str, proof: object) -> bool:
        """Return whether `proof` is the right proof for this role."""
        return isinstance(proof, bytes) and hmac.compare_digest(proof, self.proof(role))

    def channel(self, role: str) -> SealedChannel:
        """Return the channel of sealed messages that follows the handshake, from this role's side."""
        return SealedChannel(self._code("session"), role, MASTER if role == WORKER else WORKER)

    def _code(self, *parts: str) -> bytes:
        return _code(self.token.encode(), *parts, self.node, self.worker_nonce, self.master_nonce)


@dataclass(slots=True)
class SealedChannel:
    """Seals messages to the other side and opens messages from it."""

    _key: bytes
    _role: str
    _other: str
    _sent: int = 0
    _opened: int = 0

    def seal(self, body: bytes) -> dict[str, object]:
        """Return the sealed message. Messages are numbered, so that none is accepted twice."""
        self._sent += 1
        return {"number": self._sent, "body": body, "code": _code(self._key, "message", self._role, self._sent, body)}

    def open(self, message: Mapping[str, object]) -> bytes:
        """Return the body of a sealed message. Raises TokenError if the other side did not seal it, or for a repeated
        message."""
        number, body, code = message.get("number"), message.get("body"), message.get("code")
        if not (isinstance(number, int) and isinstance(body, bytes) and isinstance(code, bytes)):
            raise TokenError("a message without its code")
        if not hmac.compare_digest(code, _code(self._key, "message", self._other, number, body)):
            raise TokenError("a message with a wrong code")
        if number <= self._opened:
            raise TokenError("a message that was received before")
        self._opened = number
        return body


def _code(key: bytes, *parts: object) -> bytes:
    """Return the HMAC over the parts as msgpack, which encodes different lists differently."""
    return hmac.digest(key, msgspec.msgpack.encode(parts), "sha256")
