"""Who may take part: where the master listens, the shared token, and digests of what will be sent.

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

import hashlib
import hmac
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from loadgen.distributed import DistributedError, TokenError
from servers.kinds.base import Dialect
from workloads.request import Request

PORT = 5557
"""Locust's own."""
VARIABLE = "LOADGEN_TOKEN"
LENGTH_LEAST = 16
"""Characters. Whoever hears a handshake can try tokens against it at leisure, so a short one protects nothing."""
WORKER, MASTER = "worker", "master"
FINGERPRINT_REQUESTS = 2


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
    token = environ.get(VARIABLE, "")
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
