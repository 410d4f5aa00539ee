"""When requests reached a simulated server: the packet ring of loadgen.servers.wire.packet_ring, seen from the other
side. The server reads a burst's requests one after the other; the kernel had stamped each before."""

from __future__ import annotations

import socket
from time import time_ns

from loadgen.servers.wire.packet_ring import Ring, TcpStream, TcpStreamTable
from loadgen.servers.wire.packet_socket import may_see_packets
from loadgen.servers.wire.ports import Ports
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
"""Clients that are watched. Of others the interface and the addresses are not known before they come."""


def open_arrivals(listening: socket.socket) -> TimestampSource:
    """The packet ring of what comes from loopback to this socket, or the plain source where the kernel has none for us.
    This thread may open no other afterwards."""
    family, port = listening.family, listening.getsockname()[1]
    try:
        may_see_packets(now=True)
        return RequestStamps(Ring(family, [(LOOPBACK[family], 0)], Ports(port, port)))
    except (AttributeError, OSError):  # not Linux, or not permitted
        return PLAIN
    finally:
        may_see_packets(now=False)


class RequestStamps(PacketRingTimestamps):
    """The kernel's stamps of what clients sent, by connection."""

    def __init__(self, ring: Ring) -> None:
        self._clients, self._host = Clients(), ring.addresses[0][0]
        super().__init__([ring], [self._clients], PLAIN)

    def watch(self, sock: socket.socket) -> TcpStream | None:
        try:
            host, port = sock.getpeername()[:2]
        except OSError:  # it has gone already
            return None
        self.collect(at_once=port in self._clients)
        return self._clients.watch(port, time_ns()) if host == self._host else None


class Clients(TcpStreamTable):
    """Watched from their SYNs on: a request may come long before a busy server has accepted the connection."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, TcpStream] = {}

    def watch(self, key: int, opened_ns: int) -> TcpStream:
        return self._waiting.pop(key, None) or super().watch(key, opened_ns)

    def _greet(self, key: int, first: int, stamp_ns: int) -> None:
        super()._greet(key, first, stamp_ns)
        if key in self.greeted:
            self._waiting[key] = super().watch(key, stamp_ns)
