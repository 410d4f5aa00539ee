"""Who may take part: a shared token proves both sides, and every later message carries a code made from it.

worker machine                        master
Hello, nonce ─────────────────────────>
       <───────────────── Challenge, nonce
Proof(worker) ────────────────────────>      wrong: Refused, and nothing else is ever told
       <──────────── Welcome, proof(master)
sealed messages <────────────> sealed messages

The worker proves itself first, so that a stranger who reaches the master's port learns nothing made from the token.
HMAC is that of RFC 2104 with SHA-256. Nothing here is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.distributed.errors import TokenError

VARIABLE = "LOADGEN_TOKEN"
LENGTH_LEAST = 16
"""Characters. Whoever hears a handshake can try tokens against it at leisure, so a short one protects nothing."""
NONCE_BYTES = 16
WORKER, MASTER = "worker", "master"


def token_of(environ: Mapping[str, str]) -> str:
    """The token of this environment; empty when there is none. Raises TokenError for one that is too short."""
    token = environ.get(VARIABLE, "")
    if token and len(token) < LENGTH_LEAST:
        raise TokenError(
            f"{VARIABLE} has {len(token)} characters: it needs {LENGTH_LEAST} or more",
            f"Make one, and give the same one to every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


def nonce() -> bytes:
    """A number used once."""
    return secrets.token_bytes(NONCE_BYTES)


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
        return _code(self.token.encode(), b"proof", role.encode(), *self._all())

    def proves(self, role: str, proof: object) -> bool:
        """Whether this is that proof."""
        return isinstance(proof, bytes) and hmac.compare_digest(proof, self.proof(role))

    def session(self, role: str) -> Session:
        """The sealed talk that follows, from this role's side."""
        other = MASTER if role == WORKER else WORKER
        return Session(_code(self.token.encode(), b"session", *self._all()), role, other)

    def _all(self) -> tuple[bytes, bytes, bytes]:
        return self.node.encode(), self.worker_nonce, self.master_nonce


class Session:
    """Seals messages to the other side and opens those that come from it."""

    def __init__(self, key: bytes, role: str, other: str) -> None:
        self._key = key
        self._role = role.encode()
        self._other = other.encode()
        self._sent = 0
        self._opened = 0

    def seal(self, body: bytes) -> dict[str, object]:
        """The message to send. Numbered, so that none counts twice."""
        self._sent += 1
        return {"number": self._sent, "body": body, "code": self._made(self._role, self._sent, body)}

    def open(self, message: Mapping[str, object]) -> bytes:
        """What was sealed. Raises TokenError for anything that the other side did not seal, or that came before."""
        number, body, code = message.get("number"), message.get("body"), message.get("code")
        if not (isinstance(number, int) and isinstance(body, bytes) and isinstance(code, bytes)):
            raise TokenError("a message without its code")
        if not hmac.compare_digest(code, self._made(self._other, number, body)):
            raise TokenError("a message with a wrong code")
        if number <= self._opened:
            raise TokenError("a message that came before")
        self._opened = number
        return body

    def _made(self, role: bytes, number: int, body: bytes) -> bytes:
        return _code(self._key, b"message", role, b"%d" % number, body)


def _code(key: bytes, *parts: bytes) -> bytes:
    """HMAC over the parts, each with its length before it, so that no two lists of parts give the same bytes."""
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(b"%d:" % len(part))
        made.update(part)
    return made.digest()
