"""Where the master listens."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from loadgen.distributed.errors import DistributedError

PORT = 5557
"""Locust's own."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int = PORT

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

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
