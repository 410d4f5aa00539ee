"""Sends one request and reads its response, with the kernel's receive timestamp of every read.

Kernel timestamps are correct even if this process reads late (loadgen.servers.wire.timestamps). To keep reads cheap, a
read only calls `recvmsg_into`, decrypts TLS records, appends the bytes, and checks whether the body has ended. All
other work is done after the end of the response.
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

from loadgen.servers.target import connection_error
from loadgen.servers.wire.connection import READ_BYTES, Connection
from loadgen.servers.wire.http1 import ProtocolError, ResponseFraming
from loadgen.servers.wire.local_limits import NO_BUFFER_ERRORS
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.tcp_info import network_facts, receive_window
from loadgen.servers.wire.timestamps import CONTROL_BYTES, TIMESPEC_BYTES

RESPONSE_LIMIT_BYTES = 64 << 20
MAX_PARTS = 16
SMALL_BYTES = 65_536
"""A response below this size is joined and scanned once it has more than MAX_PARTS parts, because other requests may
wait for its end. Joining a larger response takes too long."""
SHUT_BYTES = 4_096
"""If the receive window is smaller than this, the server has to wait before it sends more."""
UPLOAD_BYTES = 65_536
"""A request larger than this is an upload. If the server reads an upload late, its receive buffer drops segments, and
this machine sends them again. That is no sign of a lossy network."""
WireError = Literal["connect", "client_limit", "timeout", "protocol", "truncated", "cancelled", "abandoned"]
"""Ways in which an exchange ends without a response. Each is an error kind of loadgen.analysis.run.record."""
_NO_STAMP = bytes(TIMESPEC_BYTES)
INTO_BYTES = 1 << 20
"""Size of the read buffer. The kernel may join many packets into one buffer, with the timestamp of the newest of them.
A read that stops inside such a buffer gets a timestamp that is too late. The read buffer is therefore larger than the
data that usually waits in the socket."""
_INTO = [memoryview(bytearray(INTO_BYTES))]  # One buffer for all reads, because a new buffer per read costs more


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request and its response: the time at which the request was sent, and every received byte with timestamps.

    All times are CLOCK_MONOTONIC ns, except `kernel_timespecs`.

    - `raw` is the received response. It is stored in blocks that were `spilled` to disk, followed by `parts`.
    - `sizes[i]` is the length of `raw` after read number i, and `user_ns[i]` is the time at which this read ended.
    - `kernel_timespecs` contains the kernel's timespec of each read (CLOCK_REALTIME, 16 bytes, 0 if there is none).
    - `tls_records` contains the end of each TLS record, as an offset in `raw` and an offset in the TCP stream.
    - `cut_reads` contains the indexes of reads that filled the read buffer. Their kernel timestamps may be too late
      (see INTO_BYTES).
    """

    _poller: Poller
    _on_end: Callable[[Exchange], None]
    unsent: bytes | memoryview = b""
    connection: Connection | None = None
    framing: ResponseFraming = field(default_factory=ResponseFraming)
    parts: list[bytes] = field(default_factory=list)
    spilled: list[Callable[[], bytes]] = field(default_factory=list)
    size: int = 0
    sizes: array[int] = field(default_factory=partial(array, "q"))
    user_ns: array[int] = field(default_factory=partial(array, "q"))
    kernel_timespecs: bytearray = field(default_factory=bytearray)
    tls_records: list[tuple[int, int]] = field(default_factory=list)
    tcp_stream: Any = None  # What TimestampSource.watch returned for the connection
    stream_start: int = 0  # Offset in the TCP stream at which this response starts
    read_ends: list[int] = field(default_factory=list)
    cut_reads: list[int] = field(default_factory=list)
    tls_end: tuple[WireError | Literal[""], str] | None = None  # How TLS ended; no error kind for a proper end
    sent_ns: int | None = None
    sent_end_ns: int | None = None
    ended_at_ns: int | None = None
    reusable_connection: Connection | None = None  # After the end, the connection if it can carry another request
    window_checks: int = 0  # Number of checks of the receive window, each before a read that may have been late
    full_windows: int = 0  # Number of these checks that found the receive window full or nearly full
    losses: tuple[int, int] = (0, 0)
    """Segments that we retransmitted, except those of an upload, and segments that arrived out of order."""
    is_upload: bool = False  # Whether the request is larger than UPLOAD_BYTES
    last_data_age_ms: int = 0  # Time from the last arrival of data to the end; 0 if the kernel does not report it
    address: str = ""  # Address of the server, if connections go to several addresses; otherwise ""
    min_rtt_us: int | None = None  # Minimum round-trip time of the connection up to the end of the response
    error_kind: WireError | Literal[""] = ""
    error_detail: str = ""
    gives_up: Callable[[Exchange], str] | None = None
    """Called after each read. If it returns a text, the request is abandoned, and the text is the error detail. Only
    requests that are abandoned after a number of tokens have this function."""
    dialect: Any = None  # The loadgen.servers.backends.dialect.Dialect of the response; None: the run's dialect

    @property
    def raw(self) -> bytes:
        """Every byte of the response received so far. Blocks that were spilled to disk are read back."""
        if self.spilled:
            self.parts = [*(take() for take in self.spilled), *self.parts]
            self.spilled = []
        return self.tail()

    def tail(self) -> bytes:
        """Return the received bytes that are in memory, without the blocks that were spilled to disk."""
        if len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]
        return self.parts[0] if self.parts else b""

    def prepare(self, connection: Connection, sealed: bytes) -> None:
        """Store the connection, and the bytes to send on it. This method does not send them."""
        self.connection = connection
        self.unsent = sealed
        self.is_upload = len(sealed) > UPLOAD_BYTES
        self.tcp_stream, self.stream_start = connection.tcp_stream, connection.received
        self.address = connection.address

    def send(self, *others: Exchange) -> None:
        """Send this request and the requests of `others` immediately one after the other.

        The loop over the requests only calls the `send` function of each socket and reads the clock. Everything else is
        looked up before the loop. The clock is read once after each call. This time is the end of one send and the
        beginning of the next one.
        """
        exchanges = (self, *others)
        calls = [
            (exchange.connection.sock.send, exchange.unsent)
            for exchange in exchanges
            if exchange.connection is not None
        ]
        results = list[int | OSError]()
        instants = [monotonic_ns()]
        for send, sealed in calls:
            results.append(_try_send(send, sealed))
            instants.append(monotonic_ns())
        for exchange, result, begun_ns, ended_ns in zip(exchanges, results, instants[:-1], instants[1:], strict=True):
            exchange.sent_ns = begun_ns
            exchange.on_sent(result, ended_ns)

    def on_sent(self, result: int | OSError, ended_ns: int) -> None:
        """Handle the result of a `send` call: the number of bytes that the socket accepted, or the error.

        `ended_ns` is the time at which the call ended. Bytes that the socket did not accept are sent when the socket is
        writable."""
        assert self.connection is not None
        if result == len(self.unsent):
            self.unsent = b""
            self.sent_end_ns = ended_ns
            if self.connection.tls is not None and self.connection.outgoing.pending:
                self.connection.flush()
        elif isinstance(result, OSError) and not isinstance(result, BlockingIOError):
            kind: WireError = "client_limit" if result.errno in NO_BUFFER_ERRORS else "connect"
            self.fail(kind, f"send failed: {result.strerror or result}")
        else:
            sent_bytes = result if isinstance(result, int) else 0
            self.unsent = memoryview(self.unsent)[sent_bytes:]
            self._poller.loop.add_writer(self.connection.sock, self._on_writable)

    def listen(self) -> None:
        """Start reading the response.

        If several requests are sent together, the load driver calls this method after the last one is sent. Reads
        therefore do not delay sends."""
        connection = self.connection
        if connection is not None and not self.error_kind:
            self.stream_start = connection.received  # TLS session tickets may have arrived since `prepare`
            callback = self._on_readable if connection.tls is None else self._on_tls_readable
            if self.gives_up is not None:
                callback = partial(self._read_until_abandoned, callback)
            self._poller.add(connection.sock, callback)

    def offsets(self, raw_offsets: Sequence[int]) -> Sequence[int]:
        """Convert offsets in the received response (`raw`) to offsets in the TCP stream of its connection.

        The offsets differ if the connection has carried earlier responses, or if TLS encrypts the stream.
        """
        if self.tls_records:
            records = self.tls_records
            return [records[bisect_left(records, (offset,))][1] for offset in raw_offsets]
        if self.stream_start:
            return [self.stream_start + offset for offset in raw_offsets]
        return raw_offsets

    def fail(self, kind: WireError, detail: str) -> None:
        """End this exchange with an error, unless it has already ended. The bytes received so far are kept."""
        if self.connection is None:
            return
        self.error_kind, self.error_detail = kind, detail
        self._finish()

    def _on_writable(self) -> None:
        assert self.connection is not None
        self._poller.loop.remove_writer(self.connection.sock)
        self.on_sent(_try_send(self.connection.sock.send, self.unsent), monotonic_ns())

    def give_up(self, kind: WireError, detail: str) -> None:
        """End this exchange with an error of the client, such as a timeout, after reading the bytes that have arrived.

        `kind` is the kind of the error, and `detail` describes the error.
        """
        if self.connection is not None:
            self._on_readable()
        self.fail(kind, detail)

    def _read_until_abandoned(self, read: Callable[[], None]) -> None:
        """Call `read` once, and then end the exchange if the client must abandon the request now (`--cancel`)."""
        read()
        detail = self.gives_up(self) if self.gives_up is not None and self.connection is not None else ""
        if detail:
            self.fail("abandoned", detail)

    def _on_tls_readable(self) -> None:
        """Read and decrypt TLS records, and send replies that TLS requires. End the exchange if the session has ended.

        Data that was received before the end of the session is handled first, because it may complete the response."""
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
        """Read once from the socket.

        This method is the hot path. A commit that changes it must state the measured cost."""
        connection = self.connection
        assert connection is not None
        poller = self._poller
        if poller.late:
            # Reads were deferred. Record whether the server had to wait for this client.
            window_bytes = receive_window(connection.sock)
            if window_bytes is not None:
                self.window_checks += 1
                self.full_windows += window_bytes < SHUT_BYTES
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
        poller.largest_read = max(poller.largest_read, count)
        poller.bytes_read += count
        data = bytes(_INTO[0][:count])
        framing = self.framing
        if connection.tls is not None:
            data = self._decrypt(connection, data)
            if not data:
                return

        # Store the bytes, and the instants of this read.
        self.parts.append(data)
        self.size = size = self.size + len(data)
        self.sizes.append(size)
        self.user_ns.append(now)
        self.kernel_timespecs += control[0][2][:TIMESPEC_BYTES] if control else _NO_STAMP

        # A chunked body can only have ended in a read that ends with an empty line, or in one too short to show it.
        may_end = data.endswith(b"\r\n\r\n") or len(data) < 5 or (len(self.parts) > MAX_PARTS and size < SMALL_BYTES)
        if size > RESPONSE_LIMIT_BYTES:
            self.fail("protocol", f"answer longer than {RESPONSE_LIMIT_BYTES >> 20} MiB")
        elif may_end if framing.chunked else size >= framing.need:
            self.scan()

    def scan(self) -> None:
        """Search the received bytes for the end of the response, and finish the exchange if the response has ended."""
        try:
            tail = self.tail()
            if self.framing.scan(tail, self.size - len(tail)):
                self._finish()
        except ProtocolError as error:
            self.fail("protocol", str(error))

    def _decrypt(self, connection: Connection, data: bytes) -> bytes:
        """Return the plaintext of the TLS records that are complete after receiving `data`.

        The plaintext is empty if no record is complete, or if the complete records contain no response data. If the TLS
        session has ended, `tls_end` is set."""
        assert connection.tls is not None
        if len(data) == INTO_BYTES:
            self.cut_reads.append(len(self.sizes))
        connection.feed(data)
        parts = list[bytes]()
        size = self.size
        try:
            while part := connection.tls.read(READ_BYTES):  # one record, without the beginning of the next
                parts.append(part)
                size += len(part)
                self.tls_records.append((size, connection.received - connection.incoming.pending))
            self.tls_end = "", "the server closed the TLS session"
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            # A server that refuses the client's certificate reports it after the handshake (TLS 1.3).
            self.tls_end = "protocol" if size else "connect", connection_error(error)
        if parts:
            self.read_ends.append(connection.received)
        return b"".join(parts)

    def _closed(self, detail: str) -> None:
        """Handle the end of the connection. If the response is not complete at this point, the exchange fails."""
        if self.framing.at_eof(self.size):
            self._finish()
        elif self.parts:
            self.fail("truncated", detail)
        else:
            self.fail("connect", f"{detail} before any response")

    def _finish(self) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self.ended_at_ns = monotonic_ns()
        if connection.tls is None:
            connection.received += self.size
            if self.size >= INTO_BYTES:
                reads = enumerate(pairwise((0, *self.sizes)))
                self.cut_reads = [index for index, (start, end) in reads if end - start == INTO_BYTES]
        before = connection.network
        connection.network = after = network_facts(connection.sock)
        retransmits = 0 if self.is_upload else after.retransmits - before.retransmits
        self.losses = (retransmits, after.out_of_order - before.out_of_order)
        self.min_rtt_us = after.min_rtt_us
        self.last_data_age_ms = after.last_data_age_ms
        if self.sent_ns is not None:
            if self.sent_end_ns is None:
                self._poller.loop.remove_writer(connection.sock)
            self._poller.remove(connection.sock)
        if not self.error_kind and self.sent_end_ns is not None and self.framing.can_reuse(self.size):
            self.reusable_connection = connection
        else:
            connection.close()
        self._on_end(self)


def _try_send(send: Callable[[bytes | memoryview], int], sealed: bytes | memoryview) -> int | OSError:
    """Send the bytes `sealed` with the function `send`. Return the number of bytes that the socket accepted.

    If the socket accepted no bytes, return the error. On a TLS connection, the bytes are encrypted.
    """
    try:
        return send(sealed)
    except OSError as error:
        return error
