"""Servers that accept only HTTP/2: how they are recognised, and the process that translates requests for them.

loadgen speaks HTTP/1.1. If a server refuses HTTP/1.1 and speaks HTTP/2, `start_translator` starts a separate process
(loadgen.servers.http2_translator). The translator accepts HTTP/1.1 on a Unix socket, and sends each request to the
server as a stream of an HTTP/2 connection. All later requests of this process to the server use this socket.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from loadgen.servers.auth import Access, tls_context
from loadgen.servers.errors import UnreachableError
from loadgen.servers.lifeline import lifeline
from loadgen.servers.own_process import own_process
from loadgen.servers.proxy import Proxy, Tunnel

if TYPE_CHECKING:
    import ssl
    import subprocess

PROTOCOL = "HTTP/2"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of an HTTP/2 connection: the client's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
FRAME_HEAD_BYTES = 9
SETTINGS_TYPE = 4
REFUSED_HTTP1_STATUSES = (426, 464, 505)
"""HTTP statuses of servers that refuse HTTP/1.1: Upgrade Required, HTTP Version Not Supported, and 464 of AWS."""
CHECK_LIMIT_S = 2.0
"""Time limit in seconds for finding out whether a server speaks HTTP/2."""
START_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0
READ_BYTES = 4_096


class RunningTranslator(NamedTuple):
    """A child process that translates HTTP/1.1 requests to HTTP/2."""

    path: str
    """Path of the Unix socket of the translator."""
    pid: int
    stack: contextlib.ExitStack
    """Ends the translator when it is closed."""


_translators: dict[tuple[str, str], RunningTranslator] = {}
"""The running translators, by scheme and `HOST:PORT` of their servers."""


def translator_socket(url: str) -> str:
    """Return the path of the Unix socket of the translator for a server, or "" if this process has started none."""
    running = _translators.get(_origin(url))
    return running.path if running else ""


def refuses_http1(error: Exception) -> bool:
    """Return True if `error` may be the reaction of a server that speaks only HTTP/2 to a request in HTTP/1.1."""
    import http.client
    import ssl

    if isinstance(error, ssl.SSLError):
        return "NO_APPLICATION_PROTOCOL" in str(error.reason)
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "\\x00\\x00" in str(error)  # the representation of bytes at the start of an HTTP/2 frame
    return isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError)


def speaks_http2(url: str, access: Access) -> bool:
    """Connect to the server at `url`, and return True if the server speaks HTTP/2.

    The function begins an HTTP/2 connection, and checks that the first bytes of the server are an HTTP/2 settings
    frame.
    """
    received = b""
    with contextlib.suppress(OSError), _connect(url, access) as sock:
        sock.sendall(PREFACE)
        while len(received) < FRAME_HEAD_BYTES:
            data = sock.recv(READ_BYTES)
            if not data:
                break
            received += data
    return len(received) >= FRAME_HEAD_BYTES and received[0] == 0 and received[3] == SETTINGS_TYPE


def _connect(url: str, access: Access) -> socket.socket:
    """Open a connection to the server, through the proxy and with TLS if needed. Raises OSError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    peer = (access.proxy.host, access.proxy.port) if access.proxy else (host, port)
    sock = socket.create_connection(peer, CHECK_LIMIT_S)
    try:
        if access.proxy:
            open_tunnel(sock, access.proxy, host, port)
        if parts.scheme == "https":
            sock = http2_context(access).wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    return sock


def open_tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Ask a proxy for a tunnel to the server. Raises OSError.

    `sock` is a blocking socket that is connected to the proxy. `host` and `port` are those of the server.
    """
    tunnel = Tunnel(proxy, host, port)
    sock.sendall(tunnel.take_request())
    while not tunnel.receive(sock.recv(READ_BYTES)):
        pass


def http2_context(access: Access) -> ssl.SSLContext:
    """Return a TLS context that offers only HTTP/2 to the server, with the certificates of `access`."""
    context = tls_context(*access.files)
    context.set_alpn_protocols(["h2"])
    return context


def start_translator(url: str, access: Access) -> str:
    """Start a translator for the HTTP/2 server at `url`. Return the path of the translator's Unix socket.

    If a translator for this server is already running, the path of its socket is returned. All translators end with
    this process. Raises UnreachableError if the library h2 is not installed.
    """
    origin = _origin(url)
    if origin not in _translators:
        stack = contextlib.ExitStack()
        path, pid = _start(url, access, stack)
        _translators[origin] = RunningTranslator(path, pid, stack)
        if len(_translators) == 1:
            atexit.register(stop_translators)
    return _translators[origin].path


def translator_pids() -> list[int]:
    """Return the process ids of the translators that this process has started.

    In a forked process, the result also contains the translators that its parent had started before the fork.
    """
    return [translator.pid for translator in _translators.values()]


def stop_translators() -> None:
    """End every translator that this process has started."""
    while _translators:
        _translators.popitem()[1].stack.close()


def _start(url: str, access: Access, stack: contextlib.ExitStack) -> tuple[str, int]:
    """Start a translator. Return the path of its socket and its process id.

    The translator is stopped when `stack` is closed.
    """
    import subprocess

    process = subprocess.Popen(  # noqa: S603 - our own module
        own_process("loadgen.servers.http2_translator"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt must not end the translator before the run has ended
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(_stop, process)
    stack.enter_context(lifeline(process.stdin))
    files = [None if file is None else str(file) for file in access.files[:1]]
    settings: dict[str, Any] = {
        "url": url,
        "files": [*files, access.files.insecure, *(file and str(file) for file in access.files[2:])],
        "proxy": access.proxy.url if access.proxy else None,
    }
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or b"{}")
    if "socket" not in answer:
        stack.close()
        raise UnreachableError(
            f"{url} accepts only HTTP/2, and the translator did not start: {answer.get('error', 'no output')}",
            "install the library h2: pip install h2",
        )
    return str(answer["socket"]), process.pid


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a translator process to end. If the process still runs after STOP_LIMIT_S, kill it."""
    import subprocess

    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
