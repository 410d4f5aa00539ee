"""A loopback server that answers requests with a script of bytes, for tests of the transport and the load driver."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from loadgen.servers.target import Target
from loadgen.servers.wire.connection import Connection, connect
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

RESET = "reset"
"""Close with RST instead of FIN."""
CLOSE = "close"
HANG = "hang"
"""Send nothing more, and keep the connection open."""

Script = Sequence[bytes | str]


@dataclass
class Loopback:
    """The URL of the loopback server, the requests that it received, and its number of connections."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    accepted: int = 0


@contextlib.asynccontextmanager
async def playing(
    script: Script, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, on_accept: Script = ()
) -> AsyncIterator[Loopback]:
    """Run a server that sends `script` in response to the first request of each connection.

    A script consists of bytes to send and of the actions CLOSE, RESET and HANG. If `on_accept` is given, the server
    plays it on the first connection instead, before it reads a request.
    """
    heard = Loopback("")
    writers: list[asyncio.StreamWriter] = []
    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.accepted += 1
        writers.append(writer)
        answering.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if heard.accepted == 1 and on_accept:
                await _play(on_accept, writer)
                return
            heard.requests.append(await _request(reader))
            await _play(script, writer)

    server = await asyncio.start_server(answer, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    heard.url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        yield heard
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(AttributeError):  # raised by Python 3.11 if the TLS session has ended
                writer.transport.abort()  # close() of a TLS connection would wait for the client's close_notify
        await asyncio.gather(*(task for task in answering if task is not None), return_exceptions=True)


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    return head + await reader.readexactly(length)


async def _play(script: Script, writer: asyncio.StreamWriter) -> None:
    for step, following in zip(script, (*script[1:], ""), strict=True):
        if step == HANG:
            return
        if step == RESET:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        if step == CLOSE:
            break
        assert isinstance(step, bytes)
        writer.write(step)
        await writer.drain()
        if following != RESET:
            await asyncio.sleep(0.005)  # the client reads each piece separately; a reset follows without a pause
    writer.close()


def chunked(*pieces: bytes, end: bool = True) -> list[bytes]:
    """Return the script of an event-stream response, with one HTTP chunk per piece.

    If `end` is False, the last chunk, which ends the response, is missing.
    """
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), *([b"0\r\n\r\n"] if end else [])]


async def connected(target: Target, timeout_s: float, stamps: TimestampSource = PLAIN) -> Connection:
    """Open a connection to the target, and wait until the connection is open."""
    begun = connect(target, timeout_s, stamps)
    return begun if isinstance(begun, Connection) else await begun
