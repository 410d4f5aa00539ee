"""A small HTTP proxy as companies run them: CONNECT tunnels for https, absolute request targets for http."""

from __future__ import annotations

import contextlib
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class ForwardProxy:
    """A running proxy, and the first lines of the requests that it received."""

    port: int
    credentials: str = ""
    """USER:PASSWORD that every request must contain. Empty: no credentials are required."""
    refusal: str = ""
    """Status line of the response to every CONNECT, such as `403 Forbidden`. Empty: tunnels are opened."""
    request_lines: list[str] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket) -> None:
        """Serve one connection: open one tunnel, or forward every request to the server that the request names."""
        with contextlib.suppress(OSError), client:
            head = b""
            while b"\r\n\r\n" not in head:
                received = client.recv(65_536)
                if not received:
                    return
                head += received
            lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
            self.request_lines.append(lines[0])
            method, target, _ = lines[0].split(" ")
            token = b64encode(self.credentials.encode()).decode()
            if self.credentials and f"Proxy-Authorization: Basic {token}" not in lines:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            elif method == "CONNECT" and self.refusal:
                client.sendall(f"HTTP/1.1 {self.refusal}\r\nContent-Length: 0\r\n\r\n".encode())
            elif method == "CONNECT":
                server = self.connect(target)
                client.sendall(b"HTTP/1.1 200 Connection established\r\nX-Proxy: test\r\n\r\n")
                self.forward(client, server)
            else:
                # All later requests of the connection go to the same server. The server understands whole URLs too.
                server = self.connect(urlsplit(target).netloc)
                server.sendall(head)
                self.forward(client, server)

    def connect(self, netloc: str) -> socket.socket:
        host, _, port = netloc.rpartition(":")
        server = socket.create_connection((host, int(port)))
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(server)
        return server

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        backward = threading.Thread(target=self._copy, args=(server, client), daemon=True)
        backward.start()
        self._copy(client, server)
        backward.join()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if data.startswith((b"POST http", b"GET http")):
                    self.request_lines.append(data.partition(b"\r\n")[0].decode("latin-1"))
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def forward_proxy(*, credentials: str = "", refusal: str = "") -> Iterator[ForwardProxy]:
    """Run a proxy on a free port of 127.0.0.1 until the context ends."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    proxy = ForwardProxy(listening.getsockname()[1], credentials, refusal)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                proxy.sockets.append(client)
                threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield proxy
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for sock in proxy.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        acceptor.join()
