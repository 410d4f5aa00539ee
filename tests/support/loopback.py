"""A loopback server that plays a script of bytes: what the transport and the driver are tested against."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from loadgen.servers.auth import Target
from loadgen.servers.wire.connection import Connection, connect
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource

RESET = "reset"
"""Close with RST instead of FIN."""
CLOSE = "close"
HANG = "hang"
"""Say nothing more and keep the connection open."""

Script = Sequence[bytes | str]


@dataclass
class Loopback:
    """What it heard, and where it is."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    accepted: int = 0


@contextlib.asynccontextmanager
async def playing(
    script: Script, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, on_accept: Script = ()
) -> AsyncIterator[Loopback]:
    """Answer each request with `script`. `on_accept` is played before anything is read, on the first connection."""
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
            with contextlib.suppress(AttributeError):  # Python 3.11's, of TLS that is gone already
                writer.transport.abort()  # TLS would wait for the other side's goodbye
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
            await asyncio.sleep(0.005)  # let each piece be a read of its own; a reset comes right behind
    writer.close()


def chunked(*pieces: bytes, end: bool = True) -> list[bytes]:
    """An event-stream response in HTTP chunks, one step per chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces), *([b"0\r\n\r\n"] if end else [])]


async def connected(target: Target, timeout_s: float, stamps: TimestampSource = PLAIN) -> Connection:
    """A connection to it."""
    begun = connect(target, timeout_s, stamps)
    return begun if isinstance(begun, Connection) else await begun
