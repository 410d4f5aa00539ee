"""Messages of distributed runs: between the master and worker machines, and between a command and its Locust process.

This module also authenticates machines with a shared token, and measures the offset between the clocks of two machines.

    command <── frames ──> Locust process <══ Locust's messages, sealed ══> Locust process <── frames ──> command
    master                 MasterRunner                                     WorkerRunner                  worker

There are two groups of messages:

- Command messages pass from one command to the other. The Locust processes seal and open them, but do not read them.
- Events and orders pass between a command and its own Locust process.

A frame consists of a length of 4 bytes (network byte order) and a msgpack message.

Before the first command message, both machines prove that they know the token. A nonce is a random number that is used
once:

    worker machine                        master
    hello, nonce ─────────────────────────>
           <───────────────── challenge, nonce
    proof(worker) ────────────────────────>      wrong: refused, and nothing else is sent
           <──────────── welcome, proof(master)
    sealed messages <────────────> sealed messages

The worker machine proves itself first. A stranger who reaches the master's port therefore sees nothing that is derived
from the token.

A sealed message carries an authentication code (HMAC of RFC 2104, with SHA-256) that is derived from the token. It is
authenticated, but not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import select
import socket
import struct
import subprocess
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
from loadgen.errors import OutputError, install_hint
from loadgen.servers.auth import read_secret
from loadgen.servers.backends.dialect import Dialect, request_body
from loadgen.servers.lifeline import lifeline
from loadgen.servers.own_process import own_process
from loadgen.workloads.request import Request

PORT = 5557
"""Locust's default port."""
VARIABLE = "LOADGEN_TOKEN"
MIN_TOKEN_LENGTH = 16
"""Minimum number of characters of the token.

An eavesdropper can test guesses against a recorded handshake, so a short token gives no protection.
"""
WORKER, MASTER = "worker", "master"
FINGERPRINT_REQUESTS = 2
MAX_FRAME_BYTES = 1 << 24
"""Maximum size of a frame. Every valid message is far smaller."""
MASTER_LIMIT_S = 300
"""Maximum time in seconds that a worker machine without `--stay` waits for its master."""
END_LIMIT_S = 5.0
"""Maximum time in seconds that Locust may take to disconnect."""
_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Message(msgspec.Struct, tag=True, frozen=True):
    """Base class of all messages."""


# Command messages from a worker machine to the master.


class Hello(Message, frozen=True):
    """First message of a worker machine after the handshake: its loadgen version, its host and its folder."""

    version: str
    """Version of loadgen. A seed gives the same prompts only within one version."""
    host: dict[str, Any]
    folder: str
    """Folder of the machine's part files, in case it cannot send them."""


class PromptsReady(Message, frozen=True):
    """Message of a worker machine that has reached the server and built its prompts."""

    fingerprints: list[bytes]
    """One digest per worker process, computed from the first request bodies that the process will send."""
    server: dict[str, Any]
    """Facts about the server, as this machine sees it."""


class Ready(Message, frozen=True):
    """Message of a worker machine that has encoded its requests and opened its connections."""

    stamps: str
    """Name of the least exact timestamp source among the machine's workers."""
    scheduling: SchedulingFacts = SchedulingFacts()
    """Scheduling facts of the worker whose priority was raised least."""


class Unable(Message, frozen=True):
    """Reports that the worker machine cannot carry out its assignment."""

    message: str
    hint: str


class Progress(Message, frozen=True):
    """Live counters of a worker machine.

    The machine sends them when the order to start arrives, and twice a second from then on.
    """

    counts: list[int]
    """The machine's live counters, in the order of loadgen.engine.client_health.INTEGER_NAMES."""
    tokens_per_s: float
    ttft: dict[int, int]
    """Number of TTFTs by bucket (loadgen.engine.live_figures.LatencyHistogram)."""
    tpot: dict[int, int]
    """Number of TPOTs by bucket."""
    due: list[int]
    """Number of requests that have become due, for each worker process."""
    ahead_ns: int = 0
    """Time in ns from the arrival of the order to start until the start. Negative if the order arrived too late."""


class Piece(Message, frozen=True):
    """Bytes of a part file, starting at `offset`. A part file holds the records of one worker process."""

    worker: int
    offset: int
    data: bytes


class Ended(Message, frozen=True):
    """Message of a worker machine that has sent all its part files. It follows the last `Piece`."""

    at_ns: int
    """Time when the machine's last request ended, on its CLOCK_MONOTONIC."""
    due: list[int]
    exits: list[str]
    """Exit code or signal of each worker process, as text."""
    interrupted: bool
    """True if the command was interrupted on that machine."""


# Command messages from the master to a worker machine.


class Assign(Message, frozen=True):
    """Assigns a share of the run to a worker machine. The machine builds its prompts from the plan's seed."""

    plan: dict[str, Any]
    """The plan. `workers` is the total number of workers on all machines, and `url` is the URL that the master
    resolved."""
    first: int
    """Number of the machine's first worker process."""
    workers: int
    """Number of worker processes that the machine runs."""
    id_prefix: str = ""
    """Random prefix of the request ids on the wire, which all machines share."""


class Connect(Message, frozen=True):
    """Tells a worker machine to encode its requests and open its connections.

    The master sends this message when every machine has built its prompts. It is not sent earlier, because servers
    close connections that are idle for some seconds.
    """


class StartAt(Message, frozen=True):
    """Tells a worker machine to start the run at the time `at_ns` on its own CLOCK_MONOTONIC."""

    at_ns: int


class Stop(Message, frozen=True):
    """Tells a worker machine to end the run and keep the results so far."""


class PieceAck(Message, frozen=True):
    """Tells a worker machine that the master has written a piece of a part file.

    The master's copy of the part file of worker process `worker` is complete up to byte `offset`.
    """

    worker: int
    offset: int


class Wait(Message, frozen=True):
    """Tells a worker machine that the current run does not need it. A later run may need it."""

    reason: str


class Bye(Message, frozen=True):
    """Last message of the master to a worker machine. It gives the reason for the end.

    `kept` is True if the master has written all records of this machine to the run file.
    """

    reason: str
    kept: bool


WorkerMessage = Hello | PromptsReady | Ready | Unable | Progress | Piece | Ended
MasterMessage = Assign | Connect | StartAt | Stop | PieceAck | Wait | Bye
WORKER_MESSAGE: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
MASTER_MESSAGE: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)

# Between a command and its own Locust process.


class Listening(Message, frozen=True):
    """Event on the master: its port is open, so worker machines can connect."""

    port: int


class Joined(Message, frozen=True):
    """Event: the other machine has proven that it knows the shared token."""

    node: str


class PeerLost(Message, frozen=True):
    """Event: there is no connection to the other machine. `reason` states why.

    For example, the handshake failed, the other machine has disconnected, or it was silent for too long. On the master,
    `node` is the name of the worker machine. On a worker machine, `node` is empty unless the handshake failed.
    """

    node: str
    reason: str


class ClockSample(msgspec.Struct, frozen=True):
    """One exchange of timestamps between the master and a worker machine, as in NTP (RFC 5905, section 8).

    All timestamps are CLOCK_MONOTONIC, each on the machine that takes it:

    - `t1`: the master sends its message.
    - `t2`: the message arrives at the worker machine.
    - `t3`: the worker machine sends its reply.
    - `t4`: the reply arrives at the master.

    The timestamps give the offset between the clocks and the round trip:

        offset = ((t2 - t1) + (t3 - t4)) / 2        worker's clock minus master's
        round trip = (t4 - t1) - (t3 - t2).

    The offset is exact if both directions take equally long. The error of the offset is at most half the round trip,
    because neither direction takes negative time.
    """

    at_ns: int
    """Midpoint of the exchange on the master's clock."""
    offset_ns: int
    round_trip_ns: int

    @property
    def facts(self) -> dict[str, int]:
        """Return the offset and its maximum error, both in ns."""
        return {"offset_ns": self.offset_ns, "uncertainty_ns": (self.round_trip_ns + 1) // 2}


def exchanged(t1: int, t2: int, t3: int, t4: int) -> ClockSample:
    """Return the clock sample of one exchange of timestamps. ClockSample defines `t1` to `t4`."""
    return ClockSample((t1 + t4) // 2, ((t2 - t1) + (t3 - t4)) // 2, (t4 - t1) - (t3 - t2))


class Exchanged(Message, frozen=True):
    """Event on the master: an exchange of timestamps with the worker machine `node` has ended, with this result."""

    node: str
    sample: ClockSample


class ClockSeries(Message, frozen=True):
    """A message about a series of timestamps that the master exchanges with the worker machine `node`.

    The timestamps show the offset of the machine's clock. The loadgen command on the master sends this message to its
    Locust process to start the series. The Locust process sends the message back when the series has ended.
    """

    node: str


class Sealed(Message, frozen=True):
    """A message between this machine and another one, which passes through the local Locust process.

    A loadgen command talks to other machines only through its Locust process. The two processes on this machine
    exchange such messages in both directions:

    - From the command to the Locust process: the Locust process adds an authentication code to `body`, and sends the
      result to the machine `node`.
    - From the Locust process to the command: `body` is the content of a message from the machine `node`. The Locust
      process has checked its authentication code.
    """

    node: str
    body: bytes
    """A command message. Only a machine that knows the shared token can send one, so an undecodable body is a bug in
    loadgen."""


Event = Listening | Joined | PeerLost | Exchanged | ClockSeries | Sealed
Order = ClockSeries | Sealed


class Frames(Generic[T]):
    """One end of the stream socket between a command and its Locust process. It reads messages of type T."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._sending = threading.Lock()  # greenlets of the Locust process must not interleave long messages

    def post(self, message: Message) -> None:
        """Write one message. The call blocks while the other end does not read.

        If the other end has closed the socket, the message is dropped, and the next call of `receive` raises EOFError.
        """
        body = msgspec.msgpack.encode(message)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def send(self, message: WorkerMessage | MasterMessage, node: str = "") -> None:
        """Send a message to the loadgen command on another machine. It passes through the Locust processes of both
        machines.

        On the master, `node` is the name of the other machine.
        """
        self.post(Sealed(node, msgspec.msgpack.encode(message)))

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message, or None after the timeout.

        Raises EOFError if the other end has closed the socket.
        """
        if timeout_s is not None and not self._poll.poll(timeout_s * 1000):
            return None
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        assert length <= MAX_FRAME_BYTES
        return self._decoder.decode(self._read(length))

    def available(self, timeout_s: float) -> Iterator[T]:
        """Yield the messages that have arrived. Wait up to `timeout_s` seconds for the first message.

        Raises EOFError if the other end has closed the socket.
        """
        message = self.receive(timeout_s)
        while message is not None:
            yield message
            message = self.receive(0)

    def _read(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises EOFError if the other end closes the socket earlier."""
        result = bytearray()
        with contextlib.suppress(ConnectionError):
            while len(result) < size and (piece := self._socket.recv(size - len(result))):
                result += piece
        if len(result) < size:
            raise EOFError
        return bytes(result)


@contextlib.contextmanager
def locust_process(role: Literal["master", "worker"], host: str, port: int) -> Iterator[Frames[Event]]:
    """Start a Locust process for this loadgen command, and yield the socket over which the command talks to this
    process.

    `role` states whether the process is the Locust master or a Locust worker. The master listens at `host` and `port`,
    and a worker connects to this address. The process ends when the context ends, and also if the command is killed.
    """
    ours, theirs = socket.socketpair()
    command = own_process("loadgen.distributed.locust_process", role, host, str(port), str(theirs.fileno()))
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
    """Append a piece to the master's copy of a worker process's part file. Return the acknowledgement.

    Raises OutputError if the file cannot be written."""
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
        raise DistributedError("runs over several machines need Locust, which is not installed", install_hint("ui"))


_ADDRESS = re.compile(r"(?P<host>[\w.-]+|\*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def numeric(self) -> Address:
        """Return the address with a numeric host, which is needed to bind a socket.

        Raises DistributedError if the host name cannot be resolved.
        """
        if self.host == "*":
            return Address("0.0.0.0", self.port)  # noqa: S104 - requested, and refused without a token
        try:
            return Address(socket.gethostbyname(self.host), self.port)
        except OSError as error:
            raise DistributedError(f"{self.host}: {error.strerror}", "Name this machine's own address.") from error


def address_of(text: str, option: str, *, listening: bool = False) -> Address:
    """Parse HOST or HOST:PORT.

    With `listening`, the host may be `*` (every address of this machine), and the port may be 0 (any free port). Raises
    DistributedError for malformed text. The error message names `option`.
    """
    match = _ADDRESS.fullmatch(text)
    if match and (listening or match["host"] != "*"):
        port = int(match["port"] or PORT)
        if (0 if listening else 1) <= port <= 65535:
            return Address(match["host"], port)
    raise DistributedError(
        f"{option} {text or repr(text)}: not an address", f"Write HOST or HOST:PORT, such as bench-1:{PORT}."
    )


def fingerprint(requests: Iterable[Request], dialect: Dialect, model: str) -> bytes:
    """Return a hash of the first request bodies that a worker process sends. `requests` contains the requests of this
    process.

    The master and the machine of the worker process both compute this hash. If the hashes are equal, both have built
    the same prompts for the same model and dialect, so the prompts need not be sent between them.
    """
    bodies = (request_body(request, dialect, model) for request in islice(requests, FINGERPRINT_REQUESTS))
    return hashlib.sha256(b"".join(bodies)).digest()


def token_of(environ: Mapping[str, str]) -> str:
    """Return the shared token from the environment, or an empty string if it is not set.

    Raises TokenError for a token that is too short.
    """
    token = read_secret(VARIABLE, environ)
    if token and len(token) < MIN_TOKEN_LENGTH:
        raise TokenError(
            f"{VARIABLE} has {len(token)} characters: it needs {MIN_TOKEN_LENGTH} or more",
            f"Make a token, and set the same one on every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


@dataclass(frozen=True, slots=True)
class Handshake:
    """The handshake with a joining worker machine. Both sides compute their proofs from its fields."""

    token: str
    node: str
    """Name of the worker machine in Locust."""
    worker_nonce: bytes
    master_nonce: bytes

    def proof(self, role: str) -> bytes:
        """Return the proof that the side with this role sends. Only a machine with the shared token can compute it."""
        return self._code("proof", role)

    def is_proof(self, role: str, proof: object) -> bool:
        """Return True if `proof` is the correct proof for this role, otherwise False."""
        return isinstance(proof, bytes) and hmac.compare_digest(proof, self.proof(role))

    def channel(self, role: str) -> SealedChannel:
        """Return the channel for sealed messages after the handshake. `role` is the role of this side."""
        return SealedChannel(self._code("session"), role, MASTER if role == WORKER else WORKER)

    def _code(self, *parts: str) -> bytes:
        return _code(self.token.encode(), *parts, self.node, self.worker_nonce, self.master_nonce)


@dataclass(slots=True)
class SealedChannel:
    """The channel to an authenticated peer: seals messages to the peer, and opens messages from it."""

    _key: bytes
    _role: str
    _other: str
    _sent: int = 0
    _opened: int = 0

    def seal(self, body: bytes) -> dict[str, object]:
        """Return the sealed message: its number, its body and its authentication code.

        The receiver uses the number to reject a message that it has received before.
        """
        self._sent += 1
        return {"number": self._sent, "body": body, "code": _code(self._key, "message", self._role, self._sent, body)}

    def open(self, message: Mapping[str, object]) -> bytes:
        """Return the body of a sealed message.

        Raises TokenError if the other side did not seal the message, or if the message was received before.
        """
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
    """Return the HMAC of `parts`. They are encoded as msgpack, so that different lists never have the same encoding."""
    return hmac.digest(key, msgspec.msgpack.encode(parts), "sha256")
