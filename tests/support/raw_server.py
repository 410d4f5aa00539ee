"""A loopback server that answers each GET request with given bytes.

The bytes may form a malformed response, a slow one, or none.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

HANG = b"HANG"
"""As a response: send nothing, and keep the connection open."""
DRIP = b"DRIP"
"""At the start of a response: send the remaining bytes one at a time, with a pause of 20 ms after each."""
CLOSE = b"CLOSE"
"""At the start of a response: close the connection after the remaining bytes."""


@dataclass
class Raw:
    """The URL of the server, and the heads (request line and headers) of the requests that it received."""

    url: str = ""
    heard: list[bytes] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [head.split(b" ")[1].decode() for head in self.heard]


def page(body: bytes, *, status: str = "200 OK", length: int | None = None, kind: bytes = b"") -> bytes:
    """Return the bytes of a response with `body`.

    `length` replaces the true Content-Length. `kind` contains additional header lines, such as the content type.
    """
    size = len(body) if length is None else length
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status.encode(), kind, size, body)


@contextlib.contextmanager
def serving(answer: Callable[[str], bytes]) -> Iterator[Raw]:
    """Run a server that answers each GET request with the bytes that `answer` returns for the path.

    If `answer` returns no bytes, the server closes the connection.
    """
    raw = Raw()
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        raw.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threads = [threading.Thread(target=_accept, args=(listening, answer, raw, stopped))]
        threads[0].start()
        try:
            yield raw
        finally:
            stopped.set()
            threads[0].join()


def _accept(listening: socket.socket, answer: Callable[[str], bytes], raw: Raw, stopped: threading.Event) -> None:
    listening.settimeout(0.02)
    threads = []
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            connection, _ = listening.accept()
            threads.append(threading.Thread(target=_talk, args=(connection, answer, raw, stopped)))
            threads[-1].start()
    for thread in threads:
        thread.join()


def _talk(connection: socket.socket, answer: Callable[[str], bytes], raw: Raw, stopped: threading.Event) -> None:
    connection.settimeout(0.02)
    head = b""
    with connection, contextlib.suppress(ConnectionError):
        while not stopped.is_set():
            try:
                piece = connection.recv(65_536)
            except TimeoutError:
                continue
            if not piece:
                return
            head += piece
            if not head.endswith(b"\r\n\r\n"):
                continue
            raw.heard.append(head)
            said, head = answer(raw.paths()[-1]), b""
            if said == HANG:
                stopped.wait()
            if not said:
                return
            _say(connection, said.removeprefix(CLOSE), stopped)
            if said.startswith(CLOSE):
                return


def _say(connection: socket.socket, said: bytes, stopped: threading.Event) -> None:
    if not said.startswith(DRIP):
        connection.sendall(said)
        return
    for byte in said.removeprefix(DRIP):
        if stopped.is_set():
            return
        connection.sendall(bytes([byte]))
        time.sleep(0.02)
