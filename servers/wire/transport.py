"""The transport: sends one request and reads its answer, with the kernel's receive stamp of every read.

The stamps are right however late this process gets round to reading (see stamps), so the read path does nothing
but `recvmsg`, append, and "has this body ended?". Everything else waits for the end of the request.
"""

from __future__ import annotations

import ssl
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import monotonic_ns
from typing import Any, Literal

from loadgen.servers.auth import connection_error
from loadgen.servers.wire.connection import READ_BYTES, Connection
from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming
from loadgen.servers.wire.local_limits import NO_BUFFER_ERRORS
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.tcp_info import losses, receive_window
from loadgen.servers.wire.timestamps import CONTROL_BYTES, TIMESPEC_BYTES

RESPONSE_LIMIT_BYTES = 64 << 20
MAX_PARTS, SMALL_BYTES = 16, 65_536  # Looked at before the end, for which others may wait; to join more is dear
SHUT_BYTES = 4_096  # A server that may send no more than this is held back
WireError = Literal["connect", "client_limit", "timeout", "protocol", "truncated", "cancelled"]
"""Ways to end without an answer; each is an error kind of loadgen.analysis.run.record."""
_NO_STAMP = bytes(TIMESPEC_BYTES)
INTO_BYTES = 1 << 20
"""Largest read. The kernel may hold many packets as one buffer, with the timestamp of the newest of them. A read that
stops inside such a buffer gets a timestamp that is too late, so this is more than lies waiting as a rule."""
_INTO = [memoryview(bytearray(INTO_BYTES))]  # What is read goes through here: room of its own for each read costs more


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request on the wire: what was sent when, and every byte that came back with its stamps. Mutable, because it
    is the measuring path. All instants are CLOCK_MONOTONIC ns except `kernel`, which holds the kernel's own timespecs
    (CLOCK_REALTIME) as bytes, 16 per read, zero where it gave none. `sizes[i]` is the length of `raw` after read i.
    `raw` itself is in `parts`, and what was before them `aside`, until somebody asks for all.
    With TLS `seals` has the end of each record, in `raw` and in all that came on the connection. `cut_reads` are the
    indexes of reads that filled the buffer, whose kernel timestamps may be too late (INTO_BYTES)."""

    _poller: Poller
    _on_end: Callable[[Exchange], None]
    sealed: bytes | memoryview = b""  # What is still to be sent
    connection: Connection | None = None
    framing: ResponseFraming = field(default_factory=ResponseFraming)
    parts: list[bytes] = field(default_factory=list)
    spilled: list[Callable[[], bytes]] = field(default_factory=list)
    size: int = 0
    sizes: array[int] = field(default_factory=partial(array, "q"))
    user_ns: array[int] = field(default_factory=partial(array, "q"))
    kernel_timespecs: bytearray = field(default_factory=bytearray)
    tls_records: list[tuple[int, int]] = field(default_factory=list)
    tcp_stream: Any = None
    stream_start: int = 0
    read_ends: list[int] = field(default_factory=list)
    cut_reads: list[int] = field(default_factory=list)
    tls_end: tuple[WireError | Literal[""], str] | None = None  # How TLS ended; no error kind for a proper end
    sent_ns: int | None = None
    sent_end_ns: int | None = None
    ended_at_ns: int | None = None
    reusable_connection: Connection | None = None  # The connection after the end, where another request may use it
    window_checks: int = 0  # Reads that may have been late, before which the receive window was looked at ...
    full_windows: int = 0  # ... and found shut, or nearly
    losses: tuple[int, int] = (0, 0)  # Segments that we sent again, and that came out of order, meanwhile
    error_kind: WireError | Literal[""] = ""
    error_detail: str = ""

    @property
    def raw(self) -> bytes:
        """All that came."""
        if self.spilled:
            self.parts, self.spilled = [*(take() for take in self.spilled), *self.parts], []
        return self.tail()

    def tail(self) -> bytes:
        """What of it is not aside."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0] if self.parts else b""

    def prepare(self, connection: Connection, sealed: bytes) -> None:
        """Take a connection and the bytes to send on it; nothing is sent yet."""
        self.connection = connection
        self.sealed = sealed
        self.tcp_stream, self.stream_start = connection.tcp_stream, connection.received

    def send(self, *others: Exchange) -> None:
        """Send the request, and right behind it those of others: the end of one `send` is the start of the next. What
        the loop looks at was looked at before it, and so is in the processor's caches."""
        every = (self, *others)
        calls = [(each.connection.sock.send, each.sealed) for each in every if each.connection is not None]
        taken, instants = list[int | OSError](), [monotonic_ns()]
        for send, sealed in calls:
            taken.append(_taken(send, sealed))
            instants.append(monotonic_ns())
        for each, count, begun_ns, ended_ns in zip(every, taken, instants[:-1], instants[1:], strict=True):
            each.sent_ns = begun_ns
            each.on_sent(count, ended_ns)

    def on_sent(self, count: int | OSError, ended_ns: int) -> None:
        """The socket has taken so many of the bytes to send, or none; the rest waits for room in its buffer."""
        assert self.connection is not None
        if count == len(self.sealed):
            self.sealed, self.sent_end_ns = b"", ended_ns
            if self.connection.tls is not None and self.connection.outgoing.pending:
                self.connection.flush()
        elif isinstance(count, OSError) and not isinstance(count, BlockingIOError):
            kind: WireError = "client_limit" if count.errno in NO_BUFFER_ERRORS else "connect"
            self.fail(kind, f"send failed: {count.strerror or count}")
        else:
            self.sealed = memoryview(self.sealed)[count if isinstance(count, int) else 0 :]
            self._poller.loop.add_writer(self.connection.sock, self._on_writable)

    def listen(self) -> None:
        """Start reading. Called after the whole burst is out, so that no read delays a send."""
        connection = self.connection
        if connection is not None and not self.error_kind:
            self.stream_start = connection.received  # session tickets may have come since `prepare`
            self._poller.add(connection.sock, self._on_readable if connection.tls is None else self._on_sealed)

    def offsets(self, places: Sequence[int]) -> Sequence[int]:
        """Where these places of `raw` are in all that came on the connection
        (loadgen.servers.wire.timestamps.Received)."""
        if not self.tls_records:
            return [self.stream_start + index for index in places] if self.stream_start else places
        return [self.tls_records[bisect_left(self.tls_records, (index,))][1] for index in places]

    def fail(self, kind: WireError, detail: str) -> None:
        """End this exchange now, unless it has ended, keeping what came."""
        if self.connection is None:
            return
        self.error_kind, self.error_detail = kind, detail
        self._finish()

    def _on_writable(self) -> None:
        assert self.connection is not None
        self._poller.loop.remove_writer(self.connection.sock)
        self.on_sent(_taken(self.connection.sock.send, self.sealed), monotonic_ns())

    def give_up(self, kind: WireError, detail: str) -> None:
        """End this exchange for a reason of ours, with what has come."""
        if self.connection is not None:
            self._on_readable()
        self.fail(kind, detail)

    def _on_sealed(self) -> None:
        """Read TLS records, reply where TLS itself must, and end the exchange if the TLS session has ended. The end
        comes after the data that came before it, which may complete the response."""
        connection = self.connection
        assert connection is not None
        self._on_readable()
        if connection.outgoing.pending and self.sent_end_ns is not None and self.connection is not None:
            connection.flush()
        if self.tls_end is not None and self.connection is not None:
            kind, detail = self.tls_end
            if kind:
                self.fail(kind, detail)
            else:
                self._closed(detail)

    def _on_readable(self) -> None:
        connection = self.connection
        assert connection is not None
        late = self._poller.late
        if late and (left := receive_window(connection.sock)) is not None:
            self.window_checks += 1
            self.full_windows += left < SHUT_BYTES
        try:
            count, control, _, _ = connection.sock.recvmsg_into(_INTO, CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._closed(f"connection lost: {error.strerror or error}")
            return
        now = monotonic_ns()
        if not count:
            self._closed("the server closed the connection")
            return
        self._poller.largest_read = max(self._poller.largest_read, count)
        self._poller.bytes_read = self._poller.bytes_read + count
        data, framing = bytes(_INTO[0][:count]), self.framing
        if connection.tls is not None:
            data = self._unseal(connection, data)
            if not data:
                return
        self.parts.append(data)
        self.size = size = self.size + len(data)
        self.sizes.append(size)
        self.user_ns.append(now)
        self.kernel_timespecs += control[0][2][:TIMESPEC_BYTES] if control else _NO_STAMP
        # A chunked body can only have ended in a read that ends with an empty line, or in one too short to show it.
        ending = data.endswith(b"\r\n\r\n") or len(data) < 5 or (len(self.parts) > MAX_PARTS and size < SMALL_BYTES)
        if size > RESPONSE_LIMIT_BYTES:
            self.fail("protocol", f"answer longer than {RESPONSE_LIMIT_BYTES >> 20} MiB")
        elif ending if framing.chunked else size >= framing.need:
            self.scan()

    def scan(self) -> None:
        """Has it ended?"""
        try:
            tail = self.tail()
            if self.framing.scan(tail, self.size - len(tail)):
                self._finish()
        except ProtocolError as error:
            self.fail("protocol", str(error))

    def _unseal(self, connection: Connection, data: bytes) -> bytes:
        """Return the data that these bytes complete, which is empty for records of TLS itself and for parts of records.
        Note the end of the session in `tls_end`."""
        assert connection.tls is not None
        if len(data) == INTO_BYTES:
            self.cut_reads.append(len(self.sizes))
        connection.feed(data)
        parts, size = list[bytes](), self.size
        try:
            while part := connection.tls.read(READ_BYTES):  # one record, and nothing of the next is taken
                parts.append(part)
                size += len(part)
                self.tls_records.append((size, connection.received - connection.incoming.pending))
            self.tls_end = "", "the server closed the TLS session"
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            # A server that refuses the client's certificate says so after the handshake (TLS 1.3).
            self.tls_end = "protocol" if size else "connect", connection_error(error)
        if parts:
            self.read_ends.append(connection.received)
        return b"".join(parts)

    def _closed(self, detail: str) -> None:
        if self.framing.at_eof(self.size):
            self._finish()
        elif self.parts:
            self.fail("truncated", detail)
        else:
            self.fail("connect", f"{detail} before any answer")

    def _finish(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self.ended_at_ns = monotonic_ns()
        if connection.tls is None:
            connection.received += self.size
            if self.size >= INTO_BYTES:
                reads = enumerate(pairwise((0, *self.sizes)))
                self.cut_reads = [index for index, (begin, end) in reads if end - begin == INTO_BYTES]
        before, connection.losses = connection.losses, losses(connection.sock)
        self.losses = (connection.losses[0] - before[0], connection.losses[1] - before[1])
        if self.sent_ns is not None:
            if self.sent_end_ns is None:
                self._poller.loop.remove_writer(connection.sock)
            self._poller.remove(connection.sock)
        if not self.error_kind and self.sent_end_ns is not None and self.framing.can_reuse(self.size):
            self.reusable_connection = connection
        else:
            connection.close()
        self._on_end(self)


def _taken(send: Callable[[bytes | memoryview], int], sealed: bytes | memoryview) -> int | OSError:
    """How many bytes a socket takes, or why none."""
    try:
        return send(sealed)
    except OSError as error:
        return error
