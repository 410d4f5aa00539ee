"""The transport on loopback sockets: what is read, how it is stamped, and how each ending is told apart."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from array import array
from operator import sub

import pytest
import trustme
import uvloop

from loadgen.servers.target import resolve_target
from loadgen.servers.wire.connection import Connection
from loadgen.servers.wire.deferred_reads import ReadPacer
from loadgen.servers.wire.http1 import ResponseFraming, encode_post, join_pieces
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import TIMESPEC_BYTES, SocketTimestamps
from loadgen.servers.wire.transport import SMALL_BYTES, Exchange
from tests.support.loopback import CLOSE, RESET, Script, chunked, connected, playing

REQUEST = encode_post("/", "loopback", {}, b'{"x":1}')


async def exchange(
    script: Script, *, host: str = "127.0.0.1", authority: trustme.CA | None = None, sweeps: ReadPacer | None = None
) -> Exchange:
    """Send one request to a server that plays `script` and wait for the exchange's end."""
    server_tls = client_tls = None
    if authority is not None:
        server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(server_tls)
        authority.configure_trust(client_tls)
    ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
    async with playing(script, host=host, tls=server_tls) as server:
        connection = await connected(resolve_target(server.url, client_tls), 5, SocketTimestamps())
        made = Exchange(Poller(asyncio.get_running_loop(), sweeps), ended.set_result)
        made.prepare(connection, connection.seal(REQUEST))
        made.send()
        made.listen()
        result = await asyncio.wait_for(ended, 10)
        if result.reusable_connection is not None:
            result.reusable_connection.close()
        assert server.requests == [REQUEST]
    return result


def body(made: Exchange) -> bytes:
    return join_pieces(made.raw, made.framing.body_bounds(made.raw))


def test_certificates_are_checked_unless_told_otherwise() -> None:
    """Against the system's authorities, and the name; over http nothing of TLS is set up."""
    tls = resolve_target("https://127.0.0.1:1", None).tls
    assert tls is not None
    assert (tls.verify_mode, tls.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert resolve_target("http://127.0.0.1:1", None).tls is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_each_read_has_a_kernel_stamp_between_send_and_read(host: str) -> None:
    """Stamps lie between the request's send and the read that returned them, in order, on IPv4 and IPv6."""
    before = time.time_ns()
    made = await exchange(chunked(b"data: 1\n\n", b"data: 2\n\n"), host=host)
    timespecs = array("q", struct.unpack(f"{len(made.kernel_timespecs) // 8}q", made.kernel_timespecs))
    stamps = [s * 10**9 + n for s, n in zip(timespecs[::2], timespecs[1::2], strict=True)]
    assert len(stamps) == len(made.sizes) == len(made.user_ns) == len(made.kernel_timespecs) // TIMESPEC_BYTES
    assert before < stamps[0]
    assert stamps == sorted(stamps)
    assert stamps[-1] < time.time_ns()
    assert body(made) == b"data: 1\n\ndata: 2\n\n"
    assert not made.error_kind


async def test_sweeps_know_what_each_read_had() -> None:
    """However soon after the one before: with that unknown they would never be farther apart."""
    had: list[tuple[int, int]] = []

    class Told(ReadPacer):
        def next_delay_s(self, now_ns: int, most: int, total: int) -> float:
            had.append((most, total))
            return super().next_delay_s(now_ns, most, total)

    made = await exchange(chunked(b"data: 1\n\n", b"data: 2\n\n"), sweeps=Told(0.01, 0.4))
    assert sum(total for _, total in had) == made.size
    assert max(most for most, _ in had) == max(map(sub, made.sizes, [0, *made.sizes]))


async def test_what_came_is_looked_at_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many reads some before the end, when little is left to look at and the next request may be waiting for it. Not
    of a long answer: its parts are joined for that, each time."""
    left, scan = list[int](), ResponseFraming.scan

    def looked(self: ResponseFraming, raw: bytes, start: int = 0) -> bool:
        left.append(start + len(raw) - self.position)
        return scan(self, raw, start)

    monkeypatch.setattr(ResponseFraming, "scan", looked)
    made = await exchange(chunked(*[b"data: 1\n\n"] * 60))
    assert len(made.sizes) > 50
    assert left[-1] < made.size / 2
    assert body(made) == b"data: 1\n\n" * 60
    left.clear()
    await exchange(chunked(b"data: %s\n\n" % bytes(SMALL_BYTES), *[b"data: 1\n\n"] * 40))
    assert len(left) <= 2  # the head, and the end


async def test_sent_instants_frame_the_send() -> None:
    """`sent_ns` is before and `sent_end_ns` after the send, both on the monotonic clock."""
    before = time.monotonic_ns()
    made = await exchange(chunked(b"x"))
    assert made.sent_ns is not None
    assert made.sent_end_ns is not None
    assert before < made.sent_ns < made.sent_end_ns < made.user_ns[0]


async def test_requests_sent_together_are_told_apart() -> None:
    """One larger than its socket's buffer follows whole as there is room, one whose peer is gone fails by itself, and
    each has the instants of its own send."""
    loop = asyncio.get_running_loop()
    poller, whole = Poller(loop), bytes(range(256)) * 16_384
    pairs = [socket.socketpair() for _ in range(3)]
    made = [Exchange(poller, lambda _: None) for _ in pairs]
    for each, (ours, theirs), sealed in zip(made, pairs, (whole, REQUEST, REQUEST), strict=True):
        ours.setblocking(False)
        theirs.setblocking(False)
        each.prepare(Connection(ours, 0), sealed)
    pairs[2][1].close()
    made[0].send(*made[1:])
    large, small, gone = made
    assert (large.sent_end_ns, large.error_kind, gone.error_kind) == (None, "", "connect")
    instants = [each or 0 for each in (large.sent_ns, small.sent_ns, small.sent_end_ns)]
    assert 0 < instants[0] < instants[1] < instants[2] == gone.sent_ns
    came = b""
    async with asyncio.timeout(10):
        while len(came) < len(whole):
            came += await loop.sock_recv(pairs[0][1], 1 << 20)
    assert came == whole
    assert large.sent_end_ns is not None
    assert pairs[1][1].recv(1 << 20) == REQUEST
    poller.close()
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


async def test_tls_is_checked_and_keeps_kernel_stamps() -> None:
    """Over TLS the bytes are the same and every read that gave plain bytes has a stamp."""
    made = await exchange(chunked(b"data: 1\n\n", b"data: 2\n\n"), authority=trustme.CA())
    assert body(made) == b"data: 1\n\ndata: 2\n\n"
    assert not made.error_kind
    assert len(made.kernel_timespecs) == TIMESPEC_BYTES * len(made.sizes)
    timespecs = made.kernel_timespecs
    assert bytes(TIMESPEC_BYTES) not in [timespecs[i : i + 16] for i in range(0, len(timespecs), 16)]


async def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    """Certificate checks are on: a server signed by an unknown authority gets no byte of the request."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(tls)
    async with playing([b""], tls=tls) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(resolve_target(server.url, ssl.create_default_context()), 5)
        assert server.requests == []


async def test_bodies_by_length_and_by_close() -> None:
    """Content-Length bodies end at their length, others with the connection; neither is an error."""
    by_length = await exchange([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"hel", b"lo"])
    by_close = await exchange([b"HTTP/1.1 200 OK\r\n\r\n", b"hel", b"lo", CLOSE])
    assert (body(by_length), by_length.error_kind) == (b"hello", "")
    assert (body(by_close), by_close.error_kind) == (b"hello", "")


@pytest.mark.parametrize(
    ("script", "kind", "kept"),
    [
        ([CLOSE], "connect", b""),
        ([*chunked(b"data: 1\n\n", end=False), CLOSE], "truncated", b"data: 1\n\n"),
        ([*chunked(b"data: 1\n\n", end=False), RESET], "truncated", b"data: 1\n\n"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n", b"short", CLOSE], "truncated", b"short"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "protocol", b""),
        ([*chunked(b"data: 1\n\n", end=False), b"zz\r\nwhat?\r\n\r\n"], "protocol", b"data: 1\n\n"),
    ],
)
async def test_endings_that_are_not_an_end_are_named_and_keep_what_came(script: Script, kind: str, kept: bytes) -> None:
    """A cut, a reset, a short body and bytes that are not HTTP each get their kind; nothing received is lost."""
    made = await exchange(script)
    assert made.error_kind == kind
    assert join_pieces(made.raw, made.framing.bounds) == kept or body(made) == kept


async def test_a_terminator_split_over_two_reads_is_seen() -> None:
    """The last chunk's five bytes may arrive in pieces."""
    made = await exchange([*chunked(b"data: 1\n\n", end=False), b"0\r\n", b"\r", b"\n"])
    assert not made.error_kind
    assert body(made) == b"data: 1\n\n"


async def test_an_idle_connection_that_the_server_closed_is_recognised() -> None:
    """`gone` tells a closed idle connection from a live one."""
    async with playing([b""], on_accept=[CLOSE]) as server:
        target = resolve_target(server.url, None)
        closed = await connected(target, 5, SocketTimestamps())
        live = await connected(target, 5, SocketTimestamps())
        while not closed.closed_by_peer():
            await asyncio.sleep(0.005)
        assert not live.closed_by_peer()
        closed.close()
        live.close()


@pytest.mark.parametrize("secure", [False, True])
async def test_an_idle_connection_on_which_something_was_said_is_gone(secure: bool) -> None:
    """A 408, say, would be taken for the next answer. The tickets that TLS brings are nothing of the kind."""
    server_tls = client_tls = None
    if secure:
        authority = trustme.CA()
        server_tls, client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(server_tls)
        authority.configure_trust(client_tls)
    async with playing([b""], tls=server_tls, on_accept=[b"HTTP/1.1 408 Request Time-out\r\n\r\n", CLOSE]) as server:
        target = resolve_target(server.url, client_tls)
        told = await connected(target, 5, SocketTimestamps())
        quiet = await connected(target, 5, SocketTimestamps())
        while not told.closed_by_peer():
            await asyncio.sleep(0.005)
        assert not quiet.closed_by_peer()
        told.close()
        quiet.close()
        await asyncio.sleep(0.05)  # for the server to notice


def test_a_reset_right_behind_the_last_bytes_is_seen_by_every_event_loop() -> None:
    """libuv stops watching a descriptor after one callback with an error; the poller must not miss what follows."""

    async def resets() -> list[str]:
        made = [await exchange([*chunked(b"data: 1\n\n", end=False), RESET]) for _ in range(20)]
        return [each.error_kind for each in made]

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(resets()) == ["truncated"] * 20
