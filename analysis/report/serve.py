"""Shows one page on loopback, for a browser that cannot open files or sits behind a tunnel. Nothing else is served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 10.0
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the policy in the page, which cannot say this
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@contextmanager
def serving(page: bytes) -> Iterator[ThreadingHTTPServer]:
    """A server of this page on an ephemeral port of loopback; the caller runs it. Closed on leaving."""
    server = ThreadingHTTPServer((HOST, 0), _handler(page))
    server.daemon_threads = True
    try:
        yield server
    finally:
        server.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    """Where its page is."""
    return f"http://{HOST}:{server.server_port}/"


def _handler(page: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET and HEAD of `/` to whoever calls it by its loopback name."""

        server_version, sys_version = "loadgen", ""
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            _, port = self.connection.getsockname()
            if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                # A name of somebody else's that leads here: a page of theirs must not read this one (DNS rebinding).
                self._send(HTTPStatus.MISDIRECTED_REQUEST, b"", with_body=False)
            elif self.path.partition("?")[0] != "/":
                self._send(HTTPStatus.NOT_FOUND, b"", with_body=False)
            else:
                self._send(HTTPStatus.OK, page, with_body=with_body)

        def _send(self, status: HTTPStatus, body: bytes, *, with_body: bool) -> None:
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
            """Nothing: the terminal is for the address."""

    return Handler
