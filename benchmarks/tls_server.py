"""A TLS server that logs when it sends each token. Client timestamps over TLS are compared with this log.

    python -m benchmarks.tls_server CERTIFICATE LOG TTFT ITL [JITTER]    # prints its URL; ends with its standard input

The server has the OpenAI completions route. Each token is one TLS record in one segment. It is encrypted before its
send time is taken, and sent immediately afterwards. Sessions use TLS 1.3, so session tickets follow each handshake.

The log has one line per response, in the format of `loadgen mock-server` (loadgen.analysis.calibration.ServerLogLine).
It is written when no response is in progress.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"
BACKLOG = 4096
READ_BYTES = 65_536
EVENTS_PER_TURN = 64
TOKEN = b'data: {"id":"1","object":"text_completion","choices":[{"index":0,"text":" a","finish_reason":%s}]}\n\n'
END = b'data: {"id":"1","object":"text_completion","choices":[],"usage":%s}\n\ndata: [DONE]\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def make_certificate(folder: Path) -> Path:
    """Write a self-signed certificate for HOST and its key into one file, and return its path."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-keyout", str(key)]
    named = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}", "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *made, *named], check=True, capture_output=True)  # noqa: S607
    with certificate.open("a", encoding="ascii") as file:
        file.write(key.read_text("ascii"))
    return certificate


@contextmanager
def serving(certificate: Path, log: Path, ttft_s: float, itl_s: float, jitter_s: float = 0.0) -> Iterator[str]:
    """Run the server in a separate process, and yield its URL. The server ends with the context."""
    words = [str(certificate), str(log), str(ttft_s), str(itl_s), str(jitter_s)]
    command = [sys.executable, "-m", "benchmarks.tls_server", *words]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait()


@dataclass(eq=False)
class Client:
    """One TLS connection to a client."""

    sock: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    greeted: bool = False
    heard: bytes = b""

    def send(self, data: bytes = b"") -> int:
        """Encrypt and send `data`, and any pending TLS messages. Return the send time in ns (CLOCK_REALTIME).

        The time is taken immediately before the first byte is sent.
        """
        if data:
            self.tls.write(data)
        sealed = self.outgoing.read()
        at_ns = time.time_ns()
        with suppress(ConnectionError):
            sent = 0
            while sent < len(sealed):
                with suppress(BlockingIOError):  # a client that does not read
                    sent += self.sock.send(sealed[sent:])
        return at_ns


@dataclass
class Response:
    """A streamed response in progress, with the due times and send times for the log."""

    client: Client
    request_id: str
    due_ns: list[int]
    sent_ns: list[int] = field(default_factory=list)


ANSWERS = {
    b"/v1/models": b'{"object":"list","data":[{"id":"m","object":"model"}]}',
    b"/v1/completions": b'{"choices":[{"text":"a","finish_reason":"length"}],"usage":{"completion_tokens":1}}',
}
"""Responses to requests without an id, which a client sends before the load: the list of models, and a test request."""


class Server:
    """Sends responses to all clients, until its standard input is closed."""

    def __init__(self, certificate: Path, log: Path, ttft_s: float, itl_s: float, jitter_s: float) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._ttft_ns, self._itl_ns, self._jitter_ns = (round(each * 1e9) for each in (ttft_s, itl_s, jitter_s))
        self._log, self._lines, self._random = log, list[str](), random.Random(7)  # noqa: S311 - moves tokens
        self._clients: dict[int, Client] = {}
        self._agenda: list[tuple[int, int, Response]] = []
        self._number = 0

    def run(self) -> None:
        with socket.create_server((HOST, 0), backlog=BACKLOG) as listening, select.epoll() as epoll:
            listening.setblocking(False)
            epoll.register(listening, select.EPOLLIN)
            epoll.register(sys.stdin, select.EPOLLIN)
            print(f"https://{HOST}:{listening.getsockname()[1]}", flush=True)
            while True:
                while self._agenda and self._agenda[0][0] <= time.time_ns():
                    self._token()
                left_s = (self._agenda[0][0] - time.time_ns()) / 1e9 if self._agenda else None
                # The kernel rounds the timeout to milliseconds, so poll in a loop for the last 2 ms.
                for descriptor, _ in epoll.poll(None if left_s is None else max(0, left_s - 0.002), EVENTS_PER_TURN):
                    if descriptor == sys.stdin.fileno():
                        return
                    if descriptor == listening.fileno():
                        self._accept(listening, epoll)
                    else:
                        self._read(self._clients[descriptor], epoll)

    def _accept(self, listening: socket.socket, epoll: select.epoll) -> None:
        with suppress(BlockingIOError):
            sock, _ = listening.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = self._context.wrap_bio(incoming, outgoing, server_side=True)
            self._clients[sock.fileno()] = Client(sock, tls, incoming, outgoing)
            epoll.register(sock, select.EPOLLIN)

    def _read(self, client: Client, epoll: select.epoll) -> None:
        try:
            received = client.sock.recv(READ_BYTES)
        except OSError:
            received = b""
        if not received:
            epoll.unregister(client.sock)
            del self._clients[client.sock.fileno()]
            client.sock.close()
            return
        client.incoming.write(received)
        with suppress(ssl.SSLError):  # more is to come
            if not client.greeted:
                client.tls.do_handshake()
                client.greeted = True
            while data := client.tls.read(READ_BYTES):
                client.heard += data
        if client.outgoing.pending:
            client.send()
        self._respond(client)

    def _respond(self, client: Client) -> None:
        head, found, rest = client.heard.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        pairs = (line.partition(b":") for line in lines[1:])
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = int(fields.get(b"content-length", b"0"))
        if not found or len(rest) < length:
            return
        body, client.heard = rest[:length], rest[length:]
        path = lines[0].split(b" ")[1]
        if path == b"/v1/completions" and b"x-request-id" in fields:
            self._begin(client, fields[b"x-request-id"].decode(), json.loads(body)["max_tokens"])
            return
        answer = ANSWERS.get(path, b'{"error":"not found"}')
        client.send(WHOLE % (b"200 OK" if path in ANSWERS else b"404 Not Found", len(answer), answer))

    def _begin(self, client: Client, request_id: str, tokens: int) -> None:
        first_ns = time.time_ns() + self._ttft_ns
        moved = [self._random.randint(-self._jitter_ns, self._jitter_ns) for _ in range(tokens)]
        due_ns = [first_ns + number * self._itl_ns + by_ns for number, by_ns in enumerate(moved)]
        self._plan(Response(client, request_id, due_ns))

    def _plan(self, response: Response) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (response.due_ns[len(response.sent_ns)], self._number, response))

    def _token(self) -> None:
        response = heapq.heappop(self._agenda)[2]
        number, tokens = len(response.sent_ns), len(response.due_ns)
        last = number == tokens - 1
        event = TOKEN % (b'"length"' if last else b"null")
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        response.sent_ns.append(response.client.send(chunk if number else STREAM + chunk))
        if not last:
            self._plan(response)
            return
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
        event = END % json.dumps(usage).encode()
        response.client.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        facts = {"request_id": response.request_id, "due_ns": response.due_ns, "sent_ns": response.sent_ns}
        self._lines.append(json.dumps(facts))
        if not self._agenda:
            with self._log.open("a", encoding="ascii") as file:
                file.writelines(f"{line}\n" for line in self._lines)
            self._lines.clear()


def main() -> None:
    certificate, log, *times = sys.argv[1:]
    Server(Path(certificate), Path(log), *(float(each) for each in (*times, "0")[:3])).run()


if __name__ == "__main__":
    main()
