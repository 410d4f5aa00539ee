"""Arrival timestamps of requests at a simulated server, from the packet ring of loadgen.servers.wire.packet_ring.

The server reads the requests of a burst one after the other. The kernel timestamps each of them earlier, when it
arrives.
"""

from __future__ import annotations

import socket
from time import time_ns

from loadgen.servers.wire.packet_ring import PacketRing, TcpStream, TcpStreamTable
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.ports import PortRange
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
"""Addresses of the clients that are watched. The interface and address of other clients are not known in advance."""


def open_arrivals(listening: socket.socket) -> TimestampSource:
    """Return a packet ring for packets from loopback to this socket, or the plain source if the kernel has none for us.

    The calling thread cannot open another ring afterwards.
    """
    family = listening.family
    port = listening.getsockname()[1]
    try:
        set_packet_capability(effective=True)
        return RequestStamps(PacketRing(family, [(LOOPBACK[family], 0)], PortRange(port, port)))
    except (AttributeError, OSError):  # not Linux, or not permitted
        return PLAIN
    finally:
        set_packet_capability(effective=False)


class RequestStamps(PacketRingTimestamps):
    """Kernel timestamps of the packets from clients, by connection."""

    def __init__(self, ring: PacketRing) -> None:
        self._clients = Clients()
        self._host = ring.addresses[0][0]
        super().__init__([ring], [self._clients], PLAIN)

    def watch(self, sock: socket.socket) -> TcpStream | None:
        try:
            host, port = sock.getpeername()[:2]
        except OSError:  # the client has closed the connection already
            return None
        self.collect(at_once=port in self._clients)
        return self._clients.watch(port, time_ns()) if host == self._host else None


class Clients(TcpStreamTable):
    """TCP streams that are watched from their SYN, because a request may arrive long before a busy server accepts."""

    def __init__(self) -> None:
        super().__init__()
        self._not_accepted: dict[int, TcpStream] = {}

    def watch(self, key: int, opened_ns: int) -> TcpStream:
        return self._not_accepted.pop(key, None) or super().watch(key, opened_ns)

    def _on_syn_ack(self, key: int, first_sequence: int, stamp_ns: int) -> None:
        super()._on_syn_ack(key, first_sequence, stamp_ns)
        if key in self.syn_acks:
            self._not_accepted[key] = super().watch(key, stamp_ns)
