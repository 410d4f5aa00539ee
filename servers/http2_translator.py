"""A process that receives requests in HTTP/1.1 on a Unix socket, and forwards them to a server in HTTP/2.

loadgen.servers.http2 starts this process for a server that speaks only HTTP/2. Requests share one connection to the
server, as separate streams. If the server limits the number of streams, the process opens further connections. Every
DATA frame of a response is forwarded immediately, as one chunk of an HTTP/1.1 response.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loadgen.servers.auth import Access, TlsFiles
from loadgen.servers.http2 import CHECK_LIMIT_S, http2_context, open_tunnel
from loadgen.servers.lifeline import end_with_parent
from loadgen.servers.proxy import Proxy, proxy_at

WINDOW_BYTES = (1 << 31) - 1
"""Flow-control window of each connection and stream in bytes. It is the largest that HTTP/2 allows."""
READ_BYTES = 1 << 16
HEAD_BYTES = 1 << 20
"""Maximum size in bytes of the first lines and headers of a request."""
BACKLOG = 4_096
CONNECTION_HEADERS = frozenset({"connection", "host", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})
"""Headers of HTTP/1.1 that describe one connection, or that HTTP/2 replaces."""


class Http1Request(NamedTuple):
    """A request of loadgen: its method, path, headers with names in lower case, and body."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class Http2Stream:
    """One request that was sent to the server as a stream of an HTTP/2 connection.

    The response is written to the client in HTTP/1.1.
    """

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """The result is True if the response is complete."""
        self.window_opened = asyncio.Event()
        self._chunked = True

    def head(self, headers: list[tuple[str, str]]) -> None:
        """Write the status and the headers of the response."""
        fields = dict(headers)
        self._chunked = "content-length" not in fields
        lines = [f"HTTP/1.1 {fields[':status']} "]
        lines += [
            f"{name}: {text}" for name, text in headers if not name.startswith(":") and name not in CONNECTION_HEADERS
        ]
        lines += ["transfer-encoding: chunked"] if self._chunked else []
        self.client.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace"))

    def data(self, data: bytes) -> None:
        """Handle received data: write it as a part of the response body."""
        if data:
            self.client.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

    def end(self, *, complete: bool) -> None:
        """Mark the response as ended. `complete` is False if the response is incomplete.

        The caller must close the client's connection after an incomplete response, so that the client notices the
        missing part.
        """
        if self.ended.done():
            return
        if complete and self._chunked:
            self.client.write(b"0\r\n\r\n")
        self.ended.set_result(complete)


class Http2Connection:
    """A connection to the server, with several streams at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection
        from h2.settings import SettingCodes

        self._reader, self._writer = reader, writer
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="latin-1"))
        self._streams: dict[int, Http2Stream] = {}
        self._ready = asyncio.Event()
        """Set when the server has stated its limits."""
        self.usable = True
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        self._h2.increment_flow_control_window(WINDOW_BYTES - self._h2.inbound_flow_control_window)
        self._flush()
        self._task = asyncio.create_task(self._receive())

    async def wait_until_ready(self) -> None:
        """Wait until the server has stated its limits, or has closed the connection."""
        await self._ready.wait()

    @property
    def has_room(self) -> bool:
        """True if the server accepts another stream on this connection."""
        return self.usable and len(self._streams) < self._h2.remote_settings.max_concurrent_streams

    async def send(self, request: Http1Request, scheme: str, authority: str, stream: Http2Stream) -> int:
        """Send a request as a new HTTP/2 stream, and return the number of the stream.

        `scheme` and `authority` are the first two parts of the URL. `stream` receives the response.
        """
        number: int = self._h2.get_next_available_stream_id()
        self._streams[number] = stream
        headers = [(":method", request.method), (":scheme", scheme), (":authority", authority), (":path", request.path)]
        headers += [(name, text) for name, text in request.headers if name not in CONNECTION_HEADERS]
        self._h2.send_headers(number, headers, end_stream=not request.body)
        body = request.body
        while body and self.usable and number in self._streams:
            size = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size, len(body))
            if size:
                self._h2.send_data(number, body[:size], end_stream=size == len(body))
                body = body[size:]
                continue
            self._flush()
            stream.window_opened.clear()
            await stream.window_opened.wait()
        self._flush()
        return number

    def cancel(self, number: int) -> None:
        """Tell the server that the client no longer wants the response of stream `number`."""
        from h2.errors import ErrorCodes
        from h2.exceptions import ProtocolError

        if self._streams.pop(number, None) is not None and self.usable:
            with contextlib.suppress(ProtocolError):
                self._h2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush()

    async def close(self) -> None:
        """Close the connection."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()

    async def _receive(self) -> None:
        """Pass the server's frames to the streams until the connection ends."""
        from h2.exceptions import ProtocolError

        try:
            while data := await self._reader.read(READ_BYTES):
                for event in self._h2.receive_data(data):
                    self._handle(event)
                self._flush()
        except (OSError, ProtocolError) as error:
            print(f"HTTP/2 connection lost: {error}", file=sys.stderr)  # noqa: T201 - the parent shows standard error
        finally:
            self.usable = False
            self._ready.set()
            for stream in [*self._streams.values()]:
                stream.end(complete=False)
                stream.window_opened.set()
            self._streams.clear()
            self._writer.close()

    def _handle(self, event: Any) -> None:
        """Handle one event of the connection."""
        from h2 import events

        stream = self._streams.get(getattr(event, "stream_id", None) or 0)
        match event:
            case events.RemoteSettingsChanged():
                self._ready.set()
                self._open_windows()
            case events.WindowUpdated():
                self._open_windows()
            case events.DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if stream:
                    stream.data(event.data)
            case events.ResponseReceived() if stream:
                stream.head(event.headers)
            case events.StreamEnded() if stream:
                del self._streams[event.stream_id]
                stream.end(complete=True)
            case events.StreamReset() if stream:
                del self._streams[event.stream_id]
                stream.end(complete=False)
                stream.window_opened.set()
            case events.ConnectionTerminated():
                self.usable = False

    def _open_windows(self) -> None:
        for stream in self._streams.values():
            stream.window_opened.set()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())


class Translator:
    """Accepts requests of loadgen in HTTP/1.1, and sends them to one server in HTTP/2."""

    def __init__(self, url: str, access: Access) -> None:
        parts = urlsplit(url)
        self._scheme = parts.scheme
        self._authority = parts.netloc
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._access = access
        self._context = http2_context(access) if parts.scheme == "https" else None
        self._connections: list[Http2Connection] = []
        self._opening = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of loadgen, which carries one request after the other."""
        begin = b""
        try:
            while request := await _read_request(reader, begin):
                begin = b""
                stream = Http2Stream(writer)
                connection = await self._connection()
                number = await connection.send(request, self._scheme, self._authority, stream)
                # The client sends the next request after the response. Until then, it only closes the connection.
                following = asyncio.create_task(reader.read(1))
                await asyncio.wait((stream.ended, following), return_when=asyncio.FIRST_COMPLETED)
                if not stream.ended.done() and not following.result():
                    connection.cancel(number)
                    return
                if not await stream.ended:
                    following.cancel()
                    return
                begin = await following
                if not begin:
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client notices that its connection is closed
        finally:
            writer.close()

    async def _connection(self) -> Http2Connection:
        """Return a connection with room for another stream. Raises OSError if none can be opened."""
        async with self._opening:
            self._connections = [connection for connection in self._connections if connection.usable]
            for connection in self._connections:
                if connection.has_room:
                    return connection
            connection = Http2Connection(*await self._open())
            await connection.wait_until_ready()
            if not connection.usable:
                raise ConnectionResetError
            self._connections.append(connection)
            return connection

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        server_name = self._host if self._context else None
        proxy = self._access.proxy
        if proxy is None:
            return await asyncio.open_connection(self._host, self._port, ssl=self._context, server_hostname=server_name)
        sock = await asyncio.to_thread(_tunnel, proxy, self._host, self._port)
        return await asyncio.open_connection(sock=sock, ssl=self._context, server_hostname=server_name)


def _tunnel(proxy: Proxy, host: str, port: int) -> socket.socket:
    """Return a socket with a tunnel through the proxy to the server. Raises OSError."""
    sock = socket.create_connection((proxy.host, proxy.port), CHECK_LIMIT_S)
    try:
        open_tunnel(sock, proxy, host, port)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


async def _read_request(reader: asyncio.StreamReader, begin: bytes) -> Http1Request | None:
    """Read a request that begins with the bytes `begin`. Return None at the end of the connection."""
    try:
        head = begin + await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    fields = (line.partition(":") for line in lines)
    headers = [(name.strip().lower(), text.strip()) for name, _, text in fields]
    body = await reader.readexactly(int(dict(headers).get("content-length", "0")))
    return Http1Request(method, path, headers, body)


async def _run(settings: Mapping[str, Any]) -> None:
    """Translate the requests of loadgen to HTTP/2 until this process receives SIGTERM."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    proxy = proxy_at(settings["proxy"]) if settings["proxy"] else None
    ca_file, insecure, *own = settings["files"]
    files = TlsFiles(ca_file and Path(ca_file), insecure, *(file and Path(file) for file in own))
    translator = Translator(settings["url"], Access(proxy=proxy, files=files))
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:  # only this user may open it
        path = Path(folder) / "http2"
        server = await asyncio.start_unix_server(translator.serve, path, backlog=BACKLOG, limit=HEAD_BYTES)
        print(json.dumps({"socket": str(path)}), flush=True)  # noqa: T201 - the parent reads it
        await stopped.wait()
        server.close()


def main() -> None:
    """Run the translator. The first line of standard input contains its settings."""
    settings = json.loads(sys.stdin.readline())
    end_with_parent(pipe=sys.stdin.fileno())
    try:
        import h2  # noqa: F401 - checked before the first request
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except ImportError as error:
        print(json.dumps({"error": f"{error}"}), flush=True)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main()
