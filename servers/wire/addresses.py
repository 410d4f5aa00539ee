"""Selects the server addresses that a run uses, and the address of each new connection.

    before the run    All addresses of the host name are tried at the same time. The first working address in the order
                      of getaddrinfo determines the family (IPv4 or IPv6). The run uses all working addresses of this
                      family.
    during the run    Each new connection uses the next of these addresses.
    after a failure   The connection is tried again with the next address. For a few seconds, new connections try the
                      failed address last.

A host that supports IPv4 and IPv6 has an address of each family (`localhost` is ::1 and 127.0.0.1). A name has several
addresses of one family if several hosts serve it (DNS round robin). Requests before the run use the first address.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Awaitable, Sequence
from time import monotonic

from msgspec.structs import replace

from loadgen.servers.errors import LocalLimitError
from loadgen.servers.target import Address, Target, address_text, connection_error
from loadgen.servers.wire.connection import Connection, connect
from loadgen.servers.wire.local_limits import explain_local_limit
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

FIRST_ANSWER_S, OTHER_ANSWERS_S = 3.0, 0.3
"""Time limits in seconds before the run: until the first address accepts a connection, and then for the others."""
ATTEMPT_S = 3.0
"""Time limit in seconds for one address to accept a connection during the run, if there is another one to try."""
REST_S = 5.0
"""Time in seconds during which an address that has failed is tried last."""


def select_addresses(target: Target) -> Target:
    """Return `target` with only those addresses that the run will use.

    The function tries to connect to each address. The run uses the addresses that accept the connection. If these are
    both IPv4 and IPv6 addresses, only one of the two versions is used: that of the first address that accepts the
    connection.

    If no address accepts the connection, all of them are kept. The requests of the run then fail and record the error.
    A target with a single address is returned without a test.
    """
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
    """Return a line of text that names the used and unused addresses of a target, for the log of a run."""
    used = ", ".join(address_text(address) for address in target.addresses)
    unused = [f"{address} is not used ({reason})" for address, reason in target.unused.items()]
    turns = "connections go in turn to" if len(target.addresses) > 1 else "connections go to"
    return "; ".join([f"{target.connects_to}: {turns} {used}", *unused])


def _try_all(addresses: Sequence[Address]) -> dict[Address, str]:
    """Connect to all addresses at the same time.

    Return the error for each address, or "" if it accepted the connection.
    """
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
    """Start connecting to `address`, and do not wait for the connection.

    - If the result is not known at once, the socket of the connection is registered with `selector`.
    - If the connection fails at once, `failures[address]` is set to the error message.
    - If the connection opens at once, `failures[address]` is set to "".
    """
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
    """Decides in which order each new connection tries the addresses of a target."""

    def __init__(self, addresses: Sequence[Address], first: int = 0) -> None:
        """Create a rotation that starts with the address at index `first`, modulo the number of addresses."""
        self._addresses = tuple(addresses)
        self._next = first
        self._rests_until_s: dict[Address, float] = {}

    def order(self) -> list[Address]:
        """Return every address, in the order in which the next connection tries the addresses.

        Addresses that failed within the last REST_S seconds come last."""
        first = self._next % len(self._addresses)
        self._next = first + 1
        now_s = monotonic()
        ordered = [*self._addresses[first:], *self._addresses[:first]]
        return sorted(ordered, key=lambda address: self._rests_until_s.get(address, 0.0) > now_s)

    def failed(self, address: Address) -> None:
        """Record that a connection to this address could not be opened."""
        self._rests_until_s[address] = monotonic() + REST_S


def error_to_report(errors: Sequence[OSError]) -> OSError:
    """Return the error to report if the connections to all addresses failed. `errors` has one error per address.

    The result is the first error that the network or the server caused. If this machine caused every error
    (LocalLimitError), the first error is returned.
    """
    return next((error for error in errors if not isinstance(error, LocalLimitError)), errors[0])


class Connector:
    """Opens connections to the addresses of a target in turn."""

    def __init__(
        self,
        target: Target,
        timeout_s: float,
        stamps: TimestampSource = PLAIN,
        receive_buffer: int = 0,
        *,
        first: int = 0,
        name: str = "",
    ) -> None:
        """Prepare a connector without opening a connection.

        - `target` contains the network addresses of a server or of one of its replicas.
        - `timeout_s` is the time limit in seconds for opening one connection.
        - `stamps` is the timestamp source of the connections.
        - `receive_buffer` is the requested size of the receive buffer in bytes (0: the system's default).
        - `first` is the index of the address that the first connection tries.
        - `name` is the name of the replica. The attribute `address` of a connection is then this name. If the target
          has several addresses, the attribute contains the name and the address of the connection.
        """
        self._target = target
        self._timeout_s = timeout_s
        self._stamps = stamps
        self._receive_buffer = receive_buffer
        self._rotation = Rotation(target.addresses, first)
        self._name = name

    def __call__(self) -> Connection | Awaitable[Connection]:
        """Open one connection.

        Return the connection if it is open at once, otherwise an awaitable that opens it. This method and the awaitable
        raise the errors of loadgen.servers.wire.connection.connect.
        """
        if len(self._target.addresses) == 1:
            opening = connect(self._target, self._timeout_s, self._stamps, self._receive_buffer)
            return self._named(opening) if self._name else opening
        return self._attempt(self._rotation.order(), [])

    def _named(self, opening: Connection | Awaitable[Connection]) -> Connection | Awaitable[Connection]:
        """Store the name of the replica in the attribute `address` of a connection, and return the connection.

        `opening` is an open connection, or an awaitable of a connection. For an awaitable, the result is an awaitable
        too, and the name is stored when the connection is open.
        """
        if isinstance(opening, Connection):
            opening.address = self._name
            return opening
        return self._await_named(opening)

    async def _await_named(self, opening: Awaitable[Connection]) -> Connection:
        connection = await opening
        connection.address = self._name
        return connection

    def _address_name(self, address: Address) -> str:
        """Return the name of the replica, followed by `address`. Targets with several addresses use this text."""
        return f"{self._name} {address_text(address)}".strip()

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
                opening.address = self._address_name(address)
                return opening
            return self._await(opening, address, rest, errors)
        raise error_to_report(errors)

    async def _await(
        self, opening: Awaitable[Connection], address: Address, rest: Sequence[Address], errors: list[OSError]
    ) -> Connection:
        try:
            connection = await opening
            connection.address = self._address_name(address)
            return connection
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            errors.append(error)
            self._rotation.failed(address)
        following = self._attempt(rest, errors)
        return following if isinstance(following, Connection) else await following
