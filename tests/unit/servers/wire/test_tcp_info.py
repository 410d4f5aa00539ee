"""What the kernel reports about a connection."""

import socket

from loadgen.servers.wire import tcp_info
from loadgen.servers.wire.tcp_info import NOTHING_MEASURED, network_facts


def test_a_loopback_connection_has_a_short_round_trip() -> None:
    """After the handshake the minimum round-trip time is known, and nothing was lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            client.send(b"x")
            accepted.recv(1)
            facts = network_facts(client)
    assert (facts.retransmits, facts.out_of_order) == (0, 0)
    assert facts.min_rtt_us is not None
    assert 0 < facts.min_rtt_us < 10_000_000


def test_an_old_kernel_measures_nothing(monkeypatch) -> None:
    """A kernel may know TCP_INFO without these fields, and other systems do not know it at all."""
    with socket.socket() as sock:
        for content in (b"", bytes(104), bytes(148) + b"\xff" * 4 + bytes(100)):
            monkeypatch.setattr(tcp_info, "_info", lambda _sock, _size, content=content: content)
            assert network_facts(sock) == NOTHING_MEASURED
