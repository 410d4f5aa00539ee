"""Kernel timestamps of the requests that arrive at a simulated server.

When many requests arrive at once, the server reads them one after the other, most of them long after their arrival. The
kernel, however, timestamps each packet when it arrives. The server gets these timestamps from a packet ring
(loadgen.servers.wire.packet_ring).
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
"""Loopback address by address family. Only clients at these addresses are watched, because the interface and the
address of other clients are not known in advance."""


def open_arrivals(listening: socket.socket) -> TimestampSource:
    """Return a source of timestamps for the requests that arrive at the socket `listening` over loopback.

    The source uses a packet ring, in which the kernel timestamps packets. If this process cannot open a packet ring,
    the result is `PLAIN`, which takes timestamps in this process.

    In both cases, the calling thread permanently gives up its capability to open packet sockets.
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
    """Kernel timestamps of the packets that a simulated server receives, stored per client connection."""

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
    """The TCP streams that a simulated server receives from its clients. The key of a stream is the port of the client.

    A stream is created at the SYN-ACK of its connection, before the server accepts the connection. A busy server may
    accept the connection long after the first request has arrived. The early stream already contains the timestamps of
    this request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._not_accepted: dict[int, TcpStream] = {}

    def watch(self, key: int, opened_ns: int) -> TcpStream:
        return self._not_accepted.pop(key, None) or super().watch(key, opened_ns)

    def _on_syn_ack(self, key: int, first_sequence: int, stamp_ns: int) -> None:
        super()._on_syn_ack(key, first_sequence, stamp_ns)
        if key in self.syn_acks:
            self._not_accepted[key] = super().watch(key, stamp_ns)
