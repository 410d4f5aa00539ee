"""A restart of the server during a run: another process answers at the same address."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from loadgen.analysis.run_course import START_TIME_TOLERANCE_S
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import start, wait_for
from tests.support.simulated import running

CONFIG = SimulatedConfig(server="vllm", ttft_s=0.01, itl_s=0.001)


class Address:
    """An address behind which one server can take the place of another. Each connection goes to the current server."""

    def __init__(self, server_url: str) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._server_url = server_url
        self._sockets: list[socket.socket] = []
        self._forwards: list[threading.Thread] = []
        self.metrics_reads = 0
        """Number of reads of /metrics since the current server took its place."""
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepts = threading.Thread(target=self._accept, daemon=True)
        self._accepts.start()

    def replace(self, server_url: str) -> None:
        """Close every connection, as the end of a process does, and send new connections to another server."""
        self._server_url = server_url
        self._disconnect()
        self.metrics_reads = 0

    def close(self) -> None:
        """Stop to listen, and close every connection."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepts.join()
        self._listening.close()
        self._disconnect()
        for thread in self._forwards:
            thread.join()

    def _disconnect(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                parts = urlsplit(self._server_url)
                server = socket.create_connection((parts.hostname, parts.port))
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._forward, args=(source, target), daemon=True)
                    thread.start()
                    self._forwards.append(thread)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(source):
            while data := source.recv(1 << 16):
                target.sendall(data)
                self.metrics_reads += data.startswith(b"GET /metrics")
            target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def address_of(server_url: str) -> Iterator[Address]:
    address = Address(server_url)
    try:
        yield address
    finally:
        address.close()


def test_a_restart_is_seen(tmp_path: Path) -> None:
    """The server that took the place of another has a later start time in its metrics, which is a finding."""
    started_s = time.time()
    with running(CONFIG) as first, address_of(first.url) as address:
        load = (
            "--url",
            address.url,
            "--rate",
            "20",
            "--duration",
            "10m",
            "--output-tokens",
            "4",
            "--input-tokens",
            "16",
        )
        process = start(tmp_path, *load, command="run")
        wait_for(lambda: len(first.log) > 20 and time.time() > started_s + 3 * START_TIME_TOLERANCE_S, process)
        with running(CONFIG) as second:
            address.replace(second.url)
            wait_for(lambda: address.metrics_reads > 2, process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    restarts = json.loads((tmp_path / "run" / "summary.json").read_text())["course"]["restarts"]
    assert [restart["evidence"] for restart in restarts] == ["start_time"]
    assert "The server restarted between" in " ".join(out.split())
