"""Selects which addresses of a server's name a run uses, and which of them a new connection takes.

    before the run   every address is tried at once; those of one family that accept a connection are used
    in the run       new connections take them in turn, as clients of a name with several addresses do
    one fails        the connection goes to the next one, and the failed address is tried last for some seconds

A name has addresses of both families if a host speaks IPv4 and IPv6 (`localhost` is ::1 and 127.0.0.1). It has several
addresses of one family if several hosts serve it (DNS round robin). So a run uses the family of the first address that
accepts a connection, and in it every address that does. The probe asks the first of these.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Awaitable, Sequence
from time import monotonic

from msgspec.structs import replace

from loadgen.servers.auth import Address, Target, address_text, connection_error
from loadgen.servers.errors import LocalLimitError
from loadgen.servers.wire.connection import Connection, connect
from loadgen.servers.wire.local_limits import explain_local_limit
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

FIRST_ANSWER_S, OTHER_ANSWERS_S = 3.0, 0.3
"""How long any address may take to accept a connection before the run, and how long the others may take after that."""
ATTEMPT_S = 3.0
"""How long one address may take to accept a connection of the run, where there is another one to try."""
REST_S = 5.0
"""How long an address that has failed is tried last."""


def select_addresses(target: Target) -> Target:
    """Return the target with the addresses that the run uses. Every address is used if there is only one, or if none
    accepts a connection: the run then records what is wrong."""
    if len(target.addresses) == 1:
        return target
    failures = _try_all(target.addresses)
    working = [address for address in target.addresses if not failures[address]]
    if not working:
        return target
    used = tuple(address for address in working if address[0] == working[0][0])
    family = "IPv6" if used[0][0] == socket.AF_INET6 else "IPv4"
    unused = {
        address_text(address): failures[address] or f"{family} is used"
        for address in target.addresses
        if address not in used
    }
    return replace(target, addresses=used, unused=unused)


def describe_addresses(target: Target) -> str:
    """Return a line that names the addresses of a target, for the log of a run."""
    used = ", ".join(address_text(address) for address in target.addresses)
    unused = [f"{address} is not used ({reason})" for address, reason in target.unused.items()]
    turns = "connections go in turn to" if len(target.addresses) > 1 else "connections go to"
    return "; ".join([f"{target.host}: {turns} {used}", *unused])


def _try_all(addresses: Sequence[Address]) -> dict[Address, str]:
    """Connect to every address at once. Return why each one failed; the text is empty for those that accepted."""
    failures = dict.fromkeys(addresses, "no connection in time")
    until_s = monotonic() + FIRST_ANSWER_S
    with selectors.DefaultSelector() as selector:
        for address in addresses:
            _begin(address, selector, failures)
        if "" in failures.values():
            until_s = monotonic() + OTHER_ANSWERS_S
        while selector.get_map():
            ready = selector.select(max(0.0, until_s - monotonic()))
            for key, _ in ready:
                sock, address = key.fileobj, key.data
                assert isinstance(sock, socket.socket)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                failures[address] = os.strerror(code) if code else ""
                selector.unregister(sock)
                sock.close()
            if not ready:
                break
            if "" in failures.values():
                until_s = min(until_s, monotonic() + OTHER_ANSWERS_S)
        for key in [*selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return failures


def _begin(address: Address, selector: selectors.BaseSelector, failures: dict[Address, str]) -> None:
    """Begin to connect to an address, without waiting for it."""
    family, peer = address
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        failures[address] = connection_error(explain_local_limit(error, address))
        return
    sock.setblocking(False)
    code = sock.connect_ex(peer)
    if code == errno.EINPROGRESS:
        selector.register(sock, selectors.EVENT_WRITE, address)
        return
    sock.close()
    failures[address] = connection_error(explain_local_limit(OSError(code, os.strerror(code)), address)) if code else ""


class Rotation:
    """The order in which new connections try the addresses of a target."""

    def __init__(self, addresses: Sequence[Address], first: int = 0) -> None:
        """The first connection begins with the address that has the index `first`, modulo their number."""
        self._addresses = tuple(addresses)
        self._next = first
        self._rests_until_s: dict[Address, float] = {}

    def order(self) -> list[Address]:
        """Return every address, in the order in which the next connection tries them. Addresses that failed a short
        time ago are last."""
        first = self._next % len(self._addresses)
        self._next = first + 1
        now_s = monotonic()
        ordered = [*self._addresses[first:], *self._addresses[:first]]
        return sorted(ordered, key=lambda address: self._rests_until_s.get(address, 0.0) > now_s)

    def failed(self, address: Address) -> None:
        """Note that a connection to this address could not be opened."""
        self._rests_until_s[address] = monotonic() + REST_S


def error_to_report(errors: Sequence[OSError]) -> OSError:
    """Return the error that counts where every address has failed: the first that is not this machine's own fault."""
    return next((error for error in errors if not isinstance(error, LocalLimitError)), errors[0])


class Connector:
    """Opens connections to the addresses of a target, in turn."""

    def __init__(
        self,
        target: Target,
        timeout_s: float,
        stamps: TimestampSource = PLAIN,
        receive_buffer: int = 0,
        *,
        first: int = 0,
    ) -> None:
        """`timeout_s` limits one connection. `receive_buffer` is the receive buffer to ask for, in bytes (0: the
        system's choice). `first` is the index of the address that the first connection tries."""
        self._target = target
        self._timeout_s = timeout_s
        self._stamps = stamps
        self._receive_buffer = receive_buffer
        self._rotation = Rotation(target.addresses, first)

    def __call__(self) -> Connection | Awaitable[Connection]:
        """Open one connection. Return it if it is open at once, else an awaitable that opens it. Raises what
        loadgen.servers.wire.connection.connect raises."""
        if len(self._target.addresses) == 1:
            return connect(self._target, self._timeout_s, self._stamps, self._receive_buffer)
        return self._attempt(self._rotation.order(), [])

    def _attempt(self, addresses: Sequence[Address], errors: list[OSError]) -> Connection | Awaitable[Connection]:
        for index, address in enumerate(addresses):
            rest = addresses[index + 1 :]
            limit_s = min(self._timeout_s, ATTEMPT_S) if rest else self._timeout_s
            try:
                opening = connect(self._target, limit_s, self._stamps, self._receive_buffer, address)
            except OSError as error:
                errors.append(error)
                self._rotation.failed(address)
                continue
            if isinstance(opening, Connection):
                return opening
            return self._await(opening, address, rest, errors)
        raise error_to_report(errors)

    async def _await(
        self, opening: Awaitable[Connection], address: Address, rest: Sequence[Address], errors: list[OSError]
    ) -> Connection:
        try:
            return await opening
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            errors.append(error)
            self._rotation.failed(address)
        following = self._attempt(rest, errors)
        return following if isinstance(following, Connection) else await following
