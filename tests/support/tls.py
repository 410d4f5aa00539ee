"""Creates certificates, and runs TLS servers that send known TLS records in known TCP segments at known times."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import trustme

HOST = "127.0.0.1"
GAP_S = 0.02
"""Pause in seconds between two sends. A timestamp that is assigned to the wrong send is wrong by this time."""


class Contexts(NamedTuple):
    """TLS contexts of a server and of a client that trusts the server's certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(
    *, version: ssl.TLSVersion | None = None, tickets: int = 2, client_certificate: bool | None = None
) -> Contexts:
    """Create TLS contexts for a server and its client.

    - `version` is the only TLS version that the server accepts (None: any).
    - `tickets` is the number of session tickets that the server sends.
    - `client_certificate` is None if the server requires no client certificate. True: the server requires one, and the
      client has one. False: the server requires one, but the client has none.
    """
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(server)
    authority.configure_trust(client)
    server.num_tickets = tickets
    if not tickets:
        server.options |= ssl.OP_NO_TICKET
    if version is not None:
        server.minimum_version = server.maximum_version = version
    if client_certificate is not None:
        authority.configure_trust(server)
        server.verify_mode = ssl.CERT_REQUIRED
    if client_certificate:
        authority.issue_cert("client.test").configure_cert(client)
    return Contexts(server, client)


def certificate_files(folder: Path) -> tuple[Path, Path]:
    """Write two files, and return their paths: server.pem and authority.pem.

    server.pem contains a certificate for HOST and its key. authority.pem contains the certificate of its authority.
    """
    authority = trustme.CA()
    both, trusted = folder / "server.pem", folder / "authority.pem"
    authority.issue_cert(HOST).private_key_and_cert_chain_pem.write_to_path(str(both))
    authority.cert_pem.write_to_path(str(trusted))
    return both, trusted


class Step(NamedTuple):
    """Data that a scripted server sends at one time: each piece is one TLS record, and all records form one segment."""

    pieces: Sequence[bytes]
    halved: bool = False
    """If True, the server sends the records in two segments with a pause between them."""
    close_notify: bool = False
    """If True, the same segment ends the TLS session (close_notify). The TCP connection stays open."""
    junk: bytes = b""
    """Bytes at the end of the segment that are not a TLS record."""


@dataclass
class Scripted:
    """A running TLS server that sends scripted data, and the times at which it sent them."""

    port: int
    sent_ns: list[list[int]] = field(default_factory=list)
    """For each request, one time per piece: CLOCK_REALTIME in ns immediately before the send that completed it."""
    resumed: list[bool] = field(default_factory=list)
    """For each connection, whether it resumed an earlier TLS session."""

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"


@contextlib.contextmanager
def scripted(
    context: ssl.SSLContext, script: Sequence[Step], request: bytes, greeting: bytes = b""
) -> Iterator[Scripted]:
    """Run a TLS server in a thread, which answers each `request` with the steps of `script`.

    The server pauses for GAP_S before each step. It sends `greeting` together with its last handshake message.
    """
    with socket.create_server((HOST, 0)) as listening:
        server, accepted = Scripted(listening.getsockname()[1]), list[socket.socket]()

        def accept() -> None:
            with contextlib.suppress(OSError):  # raised when the listening socket is shut down
                while True:
                    connection, _ = listening.accept()
                    accepted.append(connection)
                    with connection, contextlib.suppress(OSError, EOFError):
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        _serve(connection, context, request, server, script, greeting)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server
        finally:
            for each in (listening, *accepted):
                with contextlib.suppress(OSError):  # raised if the socket is already closed
                    each.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(
    connection: socket.socket,
    context: ssl.SSLContext,
    request: bytes,
    server: Scripted,
    script: Sequence[Step],
    greeting: bytes,
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)

    def receive() -> None:
        if not (received := connection.recv(65_536)):
            raise EOFError
        incoming.write(received)

    while True:
        try:
            tls.do_handshake()
            if greeting:
                tls.write(greeting)
            break
        except ssl.SSLWantReadError:
            connection.sendall(outgoing.read())
            receive()
        finally:
            connection.sendall(outgoing.read())  # this may include session tickets or an alert
    server.resumed.append(tls.session_reused)
    while True:
        heard = b""
        while len(heard) < len(request):
            try:
                heard += tls.read(65_536)
            except ssl.SSLWantReadError:
                receive()
        server.sent_ns.append([])
        for step in script:
            time.sleep(GAP_S)
            _send(connection, _sealed(step, tls, outgoing), step, server.sent_ns[-1])


def _sealed(step: Step, tls: ssl.SSLObject, outgoing: ssl.MemoryBIO) -> bytes:
    for piece in step.pieces:
        tls.write(piece)
    if step.close_notify:
        with contextlib.suppress(ssl.SSLWantReadError):  # the client has not sent its close_notify
            tls.unwrap()
    return outgoing.read() + step.junk


def _send(connection: socket.socket, sealed: bytes, step: Step, sent_ns: list[int]) -> None:
    if step.halved:
        connection.sendall(sealed[: len(sealed) // 2])
        sealed = sealed[len(sealed) // 2 :]
        time.sleep(GAP_S)
    sent_ns += [time.time_ns()] * len(step.pieces)
    connection.sendall(sealed)


TLS_1_3 = b"InnerContent"
DATA_IN_TLS_1_3 = b">>> TLS 1.2, InnerContent [length 0001]\n    17\n"
DATA_IN_TLS_1_2 = b">>> TLS 1.2, RecordHeader [length 0005]\n    17 "
"""What `openssl s_server -msg` prints when it writes data. In TLS 1.3, only the content type tells data from other
messages, because the headers of all records are equal."""


class OpensslServer:
    """A running `openssl s_server`, which can send key updates and renegotiate. Python's ssl module can do neither."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._output = b""
        """What openssl has printed since the line that the last call of `wait` found."""
        self._printed = b""
        """Everything that openssl has printed."""
        self.port = int(self.wait(b"ACCEPT ").rpartition(b":")[2])

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"

    def send(self, data: bytes) -> int:
        """Send data as one TLS record, or execute a command of one letter (see openssl-s_server(1)).

        Return CLOCK_REALTIME in ns immediately before the data is written.
        """
        assert self._process.stdin is not None
        sent_ns = time.time_ns()
        self._process.stdin.write(data)
        self._process.stdin.flush()
        return sent_ns

    def send_record(self, data: bytes) -> int:
        """Send data as one TLS record, and wait until openssl has written it.

        Without the wait, an openssl that had to wait for a core might read this data together with the next, and send
        both in one record. Return CLOCK_REALTIME in ns immediately before the data is written.
        """
        sign = DATA_IN_TLS_1_3 if TLS_1_3 in self._printed else DATA_IN_TLS_1_2
        written = self._printed.count(sign)
        sent_ns = self.send(data)
        until_s = time.monotonic() + 20
        while self._printed.count(sign) == written:
            self._receive(until_s, "a record of data")
        return sent_ns

    def wait(self, words: bytes) -> bytes:
        """Wait until openssl prints a line that contains `words`, and return the line from these words on."""
        until_s = time.monotonic() + 20
        while True:
            _, found, end = self._output.partition(words)
            if found and b"\n" in end:
                line, _, self._output = end.partition(b"\n")
                return found + line
            self._receive(until_s, repr(words))

    def _receive(self, until_s: float, what: str) -> None:
        """Read what openssl prints next. Fail if it has printed nothing at `until_s` (time.monotonic)."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))
        received = os.read(self._process.stdout.fileno(), 65_536) if ready else b""
        if not received:
            raise AssertionError(f"openssl s_server said nothing of {what}: {self._output!r}")
        self._output += received
        self._printed += received


@contextlib.contextmanager
def openssl_server(folder: Path, *options: str) -> Iterator[OpensslServer]:
    """Run `openssl s_server` with a certificate whose authority is in `folder/authority.pem`.

    The server prints every TLS message (option -msg).
    """
    both, _ = certificate_files(folder)
    command = ["openssl", "s_server", "-accept", "0", "-cert", str(both), "-msg", *options]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0)
    try:
        yield OpensslServer(process)
    finally:
        process.kill()
        process.communicate()
