"""An OpenAI-compatible server made of plain sockets and threads, whose `answer` decides when connections are closed.

It shares no code with the simulated servers: every byte of a response is written here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loadgen.workloads.request import number_of_wire_id

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "someone"}]}).encode()


def event(text: str, finish: str | None = None) -> bytes:
    """Return one event of a streamed completion."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "text_completion", "model": "m", "choices": [choice]}).encode() + b"\n\n"


EVENTS = [
    event("a "),
    event("b ", "length"),
    b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
]
"""A whole answer of two tokens."""


@dataclass
class PlainServer:
    """The address of the server, and a record of the requests that it has received."""

    url: str = ""
    port: int = 0
    ids: list[str] = field(default_factory=list)
    """The number in the `X-Request-Id` of every request for tokens that the server has read."""
    connections: int = 0
    requests: list[tuple[int, bytes]] = field(default_factory=list)
    """The client's port and the bytes of every request for tokens that the server has read."""


@dataclass
class Talk:
    """One completion request on a connection, and methods to answer it."""

    sock: socket.socket
    number: int
    """Number of this request on its connection, from 1."""
    open: bool = True

    def stream(self, *, more: str = "", version: str = "1.1", pause_s: float = 0.002) -> None:
        """Send a complete response of two tokens.

        With HTTP `version` 1.1, the body is chunked. With version 1.0, the end of the connection ends the body. `more`
        contains additional header lines. `pause_s` is the pause before each event in seconds.
        """
        coding = "Transfer-Encoding: chunked\r\n" if version == "1.1" else ""
        head = f"HTTP/{version} 200 OK\r\nContent-Type: text/event-stream\r\n{coding}{more}\r\n"
        self.sock.sendall(head.encode())
        for piece in EVENTS:
            time.sleep(pause_s)
            self.sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if coding else piece)
        if coding:
            self.sock.sendall(b"0\r\n\r\n")

    def close(self) -> None:
        """Tell the server to close the connection with a FIN when its function `answer` returns."""
        self.open = False

    def reset(self) -> None:
        """Tell the server to close the connection with a RST when its function `answer` returns."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.open = False


@contextlib.contextmanager
def plain_openai(
    answer: Callable[[Talk], None], *, host: str = "127.0.0.1", port: int = 0, idle_s: float = 60.0
) -> Iterator[PlainServer]:
    """Run the server until the `with` block ends. `answer` answers each completion request of a run.

    A connection is closed if it is idle for `idle_s` seconds after a response.
    """
    found = PlainServer()
    stopped = threading.Event()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=512) as listening:
        listening.settimeout(0.02)
        found.port = listening.getsockname()[1]
        found.url = f"http://{f'[{host}]' if ':' in host else host}:{found.port}"
        accepting = threading.Thread(target=_accept, args=(listening, answer, found, stopped, idle_s))
        accepting.start()
        try:
            yield found
        finally:
            stopped.set()
            accepting.join()


def _accept(
    listening: socket.socket,
    answer: Callable[[Talk], None],
    found: PlainServer,
    stopped: threading.Event,
    idle_s: float,
) -> None:
    threads = []
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            sock, _ = listening.accept()
            found.connections += 1
            threads.append(threading.Thread(target=_serve, args=(sock, answer, found, stopped, idle_s)))
            threads[-1].start()
    listening.close()
    for thread in threads:
        thread.join()


def _serve(
    sock: socket.socket, answer: Callable[[Talk], None], found: PlainServer, stopped: threading.Event, idle_s: float
) -> None:
    number = 0
    with sock, contextlib.suppress(ConnectionError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (request := _request(sock, stopped, idle_s if number else 60.0)) is not None:
            head = request.split(b"\r\n\r\n", 1)[0].decode()
            if head.startswith("GET"):
                body = MODELS if head.startswith("GET /v1/models ") else b""
                status = "200 OK" if body else "404 Not Found"
                kind = "Content-Type: application/json\r\n"
                sock.sendall(f"HTTP/1.1 {status}\r\n{kind}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                continue
            lines = [line.partition(": ") for line in head.split("\r\n")]
            ids = [value for name, _, value in lines if name.lower() == "x-request-id"]
            if not ids:  # the probe asks for one token before the run
                Talk(sock, 0).stream()
                continue
            number += 1
            found.requests.append((sock.getpeername()[1], request))
            with contextlib.suppress(ValueError):  # the user's own id
                found.ids += [str(number_of_wire_id(text)) for text in ids]
            talk = Talk(sock, number)
            answer(talk)
            if not talk.open:
                return


def _request(sock: socket.socket, stopped: threading.Event, limit_s: float) -> bytes | None:
    """Read one request, and return its bytes.

    Return None if the client closes the connection, if `stopped` is set, or if the request takes longer than `limit_s`.
    """
    until_s, received = time.monotonic() + limit_s, b""
    while not stopped.is_set():
        head, ended, body = received.partition(b"\r\n\r\n")
        lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if ended and len(body) >= (lengths[0] if lengths else 0):
            return received
        sock.settimeout(max(0.001, min(0.05, until_s - time.monotonic())))
        try:
            piece = sock.recv(65_536)
        except TimeoutError:
            if time.monotonic() >= until_s:
                return None
            continue
        if not piece:
            return None
        received += piece
    return None
