"""A server made of plain sockets that misbehaves as a case tells it, and logs what it received and sent.

The server shares no code with the product. Every byte of a response is written by the case.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from loadgen.workloads.request import number_of_wire_id

KEEP, CLOSE, RESET, HANG, HALF = "keep", "close", "reset", "hang", "half"
"""After the bytes of a reply: the connection goes on; FIN; RST; nothing more; FIN while the server reads on."""
ALL, HEAD, NOTHING = "all", "head", "nothing"
"""How much of a request the server reads before it replies."""
SECRET = "sk-hostile-5Zt8qLw0PmXe4RbN"
"""The API key of every case. No output and no file may contain it."""


@dataclass(frozen=True)
class Reply:
    """The bytes of one response, and the end of the connection."""

    pieces: tuple[bytes | float, ...]
    """Bytes to send, each with a separate call. A number is a pause in seconds."""
    ending: str = KEEP


def reply(*pieces: bytes | float, ending: str = KEEP) -> Reply:
    """Return a reply of these pieces."""
    return Reply(pieces, ending)


def page(body: object, status: str = "200 OK", *fields: str) -> Reply:
    """Return a reply with a Content-Length. A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *fields]
    if not any(line.lower().startswith("content-type") for line in fields):
        lines.insert(1, "Content-Type: application/json")
    return reply("\r\n".join([*lines, "", ""]).encode("latin-1") + data)


def text(content: object = "a ", finish: object = None, **more: object) -> bytes:
    """Return the payload of an event with one token of a completion."""
    choice = {"index": 0, "text": content, "finish_reason": finish}
    return json.dumps({"id": "c", "object": "text_completion", "model": "m", "choices": [choice], **more}).encode()


def usage(prompt: object = 8, completion: object = 3, **more: object) -> bytes:
    """Return the payload of an event that holds only the token counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    return json.dumps({"id": "c", "model": "m", "choices": [], "usage": counts}).encode()


PAYLOADS = (text(), text("b "), text("c ", "length"), usage(), b"[DONE]")
"""A whole answer of three tokens."""


def stream(body: bytes, *fields: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    """Return a response that holds `body` as one HTTP chunk."""
    head = [status, "Content-Type: text/event-stream", "Transfer-Encoding: chunked", *fields, "", ""]
    return "\r\n".join(head).encode("latin-1") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def events(payloads: tuple[bytes, ...] | list[bytes] = PAYLOADS) -> bytes:
    """Return these payloads as server-sent events."""
    return b"".join(b"data: %b\n\n" % payload for payload in payloads)


WHOLE = reply(stream(events()))
MODELS = page({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "someone"}]})
VLLM_MODELS = page(
    {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}
)
VLLM_PAGES = {
    "/v1/models": VLLM_MODELS,
    "/version": page({"version": "0.11.0"}),
    "/tokenize": page({"count": 8, "max_model_len": 4096, "tokens": [*range(100, 108)]}),
}
MISSING = page({"detail": "Not Found"}, "404 Not Found")


@dataclass(frozen=True)
class Behaviour:
    """What the server does."""

    answer: Reply | Callable[[int], Reply] = WHOLE
    """The response to a request of the run, or a function of the request's id."""
    probe: Reply = WHOLE
    """The response to a request for tokens that is not part of the run."""
    pages: Mapping[str, Reply] = field(default_factory=lambda: {"/v1/models": MODELS})
    """The responses to other requests, by path."""
    reads: str = ALL
    """How much of a request of the run is read."""
    connected: Reply | None = None
    """The reply to each connection that is opened after the probe, instead of serving requests."""
    tls: Callable[[], ssl.SSLContext] | None = None
    host: str = "127.0.0.1"


@dataclass
class Log:
    """What the server received and sent."""

    url: str = ""
    received: list[int] = field(default_factory=list)
    """The id of each request of the run, in the order of arrival."""
    first_byte_ns: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By request: CLOCK_MONOTONIC before and after the call that sent the first byte of the response."""
    probed: bool = False
    """Whether a request for tokens that is not part of the run was answered."""


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[Log]:
    """Serve until the block ends."""
    log, stopped = Log(), threading.Event()
    family = socket.AF_INET6 if ":" in behaviour.host else socket.AF_INET
    context = behaviour.tls() if behaviour.tls else None
    with socket.create_server((behaviour.host, 0), family=family, backlog=512) as listening:
        host = f"[{behaviour.host}]" if ":" in behaviour.host else behaviour.host
        log.url = f"{'https' if context else 'http'}://{host}:{listening.getsockname()[1]}"
        listening.settimeout(0.05)

        def accept() -> None:
            while not stopped.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, _ = listening.accept()
                    talk = _Talk(behaviour, log, stopped)
                    threading.Thread(target=talk.run, args=(sock, context), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield log
        finally:
            stopped.set()
            thread.join()


class _Talk:
    """One connection of a client."""

    def __init__(self, behaviour: Behaviour, log: Log, stopped: threading.Event) -> None:
        self._behaviour, self._log, self._stopped = behaviour, log, stopped

    def run(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(60)
            if self._behaviour.connected and self._log.probed:
                with sock:
                    self._send(sock, self._behaviour.connected, None)
                return
            with tls.wrap_socket(sock, server_side=True) if tls else sock as inner:
                while self._serve_one(inner):
                    pass

    def _serve_one(self, sock: socket.socket) -> bool:
        """Answer one request. Return True if the connection goes on."""
        received = b""
        while b"\r\n\r\n" not in received:
            piece = sock.recv(65_536)
            if not piece:
                return False
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, _ = first.split(" ", 2)
        number = fields.get("x-request-id", "")
        path = path.partition("?")[0]
        is_tokens = method == "POST" and path not in self._behaviour.pages
        in_run = is_tokens and number[-1:].isdigit()
        while len(body) < int(fields.get("content-length", 0)) and not (in_run and self._behaviour.reads != ALL):
            body += sock.recv(65_536)
        if in_run:
            self._log.received.append(number_of_wire_id(number))
            answer = self._behaviour.answer
            return self._send(
                sock, answer(number_of_wire_id(number)) if callable(answer) else answer, number_of_wire_id(number)
            )
        if is_tokens:
            self._log.probed = True
            return self._send(sock, self._behaviour.probe, None)
        return self._send(sock, self._behaviour.pages.get(path, MISSING), None)

    def _send(self, sock: socket.socket, answer: Reply, number: int | None) -> bool:
        """Send a reply. Return True if the connection goes on."""
        for piece in answer.pieces:
            if not isinstance(piece, bytes):
                self._stopped.wait(piece)
                continue
            before_ns = time.monotonic_ns()
            sock.sendall(piece)
            if number is not None:
                self._log.first_byte_ns.setdefault(number, (before_ns, time.monotonic_ns()))
        if answer.ending == RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if isinstance(sock, ssl.SSLSocket):
                socket.socket(fileno=sock.detach()).close()
        if answer.ending == HALF:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                pass
        if answer.ending == HANG:
            self._stopped.wait(60)
        return answer.ending == KEEP
