"""Timestamps over TLS on loopback: every record has the timestamp of its own packet, whatever TLS sends in between.

The servers are Python's ssl module on plain sockets, where the test decides what each segment holds, and `openssl
s_server`. Each arrival is compared with the server's own send instants: it lies after its own send and before the next
one.
"""

from __future__ import annotations

import asyncio
import select
import ssl
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest

from loadgen.servers.target import resolve_target
from loadgen.servers.wire.connection import Connection
from loadgen.servers.wire.http1 import encode_post, join_pieces
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamp_sources import PacketRingTimestamps
from loadgen.servers.wire.timestamps import RETRY_S
from loadgen.servers.wire.transport import Exchange
from tests.support.loopback import chunked, connected
from tests.support.tls import GAP_S, OpensslServer, Step, contexts, openssl_server, scripted

REQUEST = encode_post("/", "loopback", {}, b'{"x":1}')
PIECES = chunked(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")
ONE_EACH = [Step([piece]) for piece in PIECES]
IDLE_S = 0.05
"""Pause before a request: session tickets and key updates arrive on the idle connection."""
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


class Client:
    """Sends requests one after another, on connections that a packet ring watches."""

    def __init__(self, url: str, tls: Any) -> None:
        self.target = resolve_target(url, tls)
        stamps = PacketRingTimestamps.open(self.target.addresses)
        assert stamps is not None, "packet sockets are for root, or for who has CAP_NET_RAW"
        self.stamps = stamps
        self.poller = Poller(asyncio.get_running_loop())
        self.connections = list[Connection]()

    async def connect(self) -> Connection:
        self.connections.append(await connected(self.target, 5, self.stamps))
        return self.connections[-1]

    async def ask(self, connection: Connection, sealed: bytes | None = None) -> Exchange:
        """Send a request (`sealed` already, or now) on an idle connection, after the driver's look at it, and wait for
        the end."""
        ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        exchange = Exchange(self.poller, ended.set_result)
        exchange.prepare(connection, connection.seal(REQUEST) if sealed is None else sealed)
        await asyncio.sleep(IDLE_S)
        assert not connection.closed_by_peer()
        exchange.send()
        exchange.listen()
        await asyncio.wait_for(ended, 20)
        while not self.stamps.ready(exchange):
            await asyncio.sleep(RETRY_S)
        return exchange

    def arrivals(self, exchange: Exchange, pieces: Sequence[bytes] = PIECES) -> list[int]:
        """CLOCK_REALTIME ns at which each piece of the response had arrived, by the ring."""
        ((_, (instants, by)),) = self.stamps.instants_batch(
            [(exchange, array("q", accumulate(map(len, pieces))))], list
        )
        assert by is self.stamps
        return instants


@asynccontextmanager
async def client_of(url: str, tls: Any) -> AsyncIterator[Client]:
    client = Client(url, tls)
    try:
        yield client
        told = client.stamps.counts()
        assert (told["ring_missed"], told["ring_rejected"]) == (0, 0)
    finally:
        for connection in client.connections:
            connection.close()
        client.poller.close()
        client.stamps.close()


def check(arrivals: Sequence[int], sent_ns: Sequence[int]) -> None:
    """Each piece arrived after its own send began and before the next one did."""
    assert len(arrivals) == len(sent_ns)
    following = [later for at, later in zip(sent_ns, [*sent_ns[1:], time.time_ns()], strict=True) if later != at]
    begins = sorted(set(sent_ns))
    for arrival, at in zip(arrivals, sent_ns, strict=True):
        assert at <= arrival < following[begins.index(at)]


async def ask_repeatedly(client: Client, connection: Connection, sent_ns: list[list[int]], times: int = 3) -> None:
    for number in range(times):
        exchange = await client.ask(connection)
        assert not exchange.error_kind, exchange.error_detail
        check(client.arrivals(exchange), sent_ns[number])
        connection = cast("Connection", exchange.reusable_connection)
        assert connection is not None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("tickets", [0, 2])
async def test_kept_connections_have_the_timestamps_of_their_own_packets(version: ssl.TLSVersion, tickets: int) -> None:
    """Session tickets that come on the idle connection are part of its stream: they shift no later timestamp."""
    server_tls, client_tls = contexts(version=version, tickets=tickets)
    with scripted(server_tls, ONE_EACH, REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            await ask_repeatedly(client, await client.connect(), server.sent_ns)


@pytest.mark.parametrize("version", VERSIONS)
async def test_resumed_sessions_have_the_timestamps_of_their_own_packets(version: ssl.TLSVersion) -> None:
    """A connection that resumes an earlier session has a shorter handshake, which is counted as well."""
    server_tls, client_tls = contexts(version=version)

    class Resuming:
        """Client settings that offer the session of the connection before."""

        session: ssl.SSLSession | None = None

        def wrap_bio(self, *bios: ssl.MemoryBIO, server_hostname: str) -> ssl.SSLObject:
            return client_tls.wrap_bio(*bios, server_hostname=server_hostname, session=self.session)

    resuming = Resuming()
    with scripted(server_tls, ONE_EACH, REQUEST) as server:
        async with client_of(server.url, resuming) as client:
            for number in range(2):
                connection = await client.connect()
                exchange = await client.ask(connection)
                check(client.arrivals(exchange), server.sent_ns[number])
                assert connection.tls is not None
                resuming.session = connection.tls.session
                connection.close()
    assert server.resumed == [False, True]


@pytest.mark.parametrize("version", VERSIONS)
async def test_records_are_merged_into_and_split_over_segments(version: ssl.TLSVersion) -> None:
    """Records of one segment arrived together; a record that two segments share arrived with the second one. A response
    larger than the largest record is no exception."""
    large = b"x" * 40_000
    script = [
        Step([PIECES[0], PIECES[1]]),
        Step([PIECES[2]], halved=True),
        Step([b"%x\r\n%s\r\n" % (len(large), large)], halved=True),
        Step(PIECES[3:]),
    ]
    pieces = [piece for step in script for piece in step.pieces]
    server_tls, client_tls = contexts(version=version)
    with scripted(server_tls, script, REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            connection = await client.connect()
            for number in range(2):
                exchange = await client.ask(connection)
                assert not exchange.error_kind, exchange.error_detail
                arrivals = client.arrivals(exchange, pieces)
                sent_ns = server.sent_ns[number]
                check(arrivals, sent_ns)
                assert arrivals[0] == arrivals[1] < arrivals[2] < arrivals[3] < arrivals[4] == arrivals[5]
                assert exchange.reusable_connection is not None
                connection = exchange.reusable_connection


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_client_certificate_changes_no_timestamp(version: ssl.TLSVersion) -> None:
    """The handshake has more messages in both directions then."""
    server_tls, client_tls = contexts(version=version, client_certificate=True)
    with scripted(server_tls, ONE_EACH, REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            await ask_repeatedly(client, await client.connect(), server.sent_ns, times=2)


async def test_a_refusal_after_the_handshake_is_named() -> None:
    """A TLS 1.3 server that wants a client certificate says so when the client takes the handshake for done. An idle
    connection is not used then, and a request that was sent at once fails with the server's reason."""
    server_tls, client_tls = contexts(version=ssl.TLSVersion.TLSv1_3, client_certificate=False)
    with scripted(server_tls, ONE_EACH, REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            idle = await client.connect()
            while not idle.closed_by_peer():
                await asyncio.sleep(0.005)
            ended: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
            exchange = Exchange(client.poller, ended.set_result)
            connection = await client.connect()
            exchange.prepare(connection, connection.seal(REQUEST))
            with suppress(OSError):
                exchange.listen()
            await asyncio.wait_for(ended, 20)
    assert (exchange.error_kind, server.sent_ns) == ("connect", [])
    assert "requires a client certificate" in exchange.error_detail


async def stream(server: OpensslServer, commands: Sequence[bytes]) -> list[int]:
    """Send the response's pieces, and before the second one these commands; the send instant of each piece."""
    sent_ns = []
    for number, piece in enumerate(PIECES):
        for command in commands if number == 1 else ():
            await asyncio.sleep(GAP_S)
            server.send(command)
        await asyncio.sleep(GAP_S)
        sent_ns.append(await asyncio.to_thread(server.send_record, piece))
    return sent_ns


async def converse(
    client: Client,
    connection: Connection,
    server: OpensslServer,
    *commands: bytes,
    heard: Sequence[bytes] = (b"POST / ",),
    sealed: bytes | None = None,
) -> Connection:
    """One request, of which the server prints what it heard, and its response, with these commands in the middle of
    it; the connection."""
    asking = asyncio.create_task(client.ask(connection, sealed))
    for words in heard:
        await asyncio.to_thread(server.wait, words)
    sent_ns = await stream(server, commands)
    exchange = await asking
    assert not exchange.error_kind, exchange.error_detail
    check(client.arrivals(exchange), sent_ns)
    assert exchange.reusable_connection is not None
    return exchange.reusable_connection


async def test_key_updates_shift_no_timestamp_and_are_answered(tmp_path: Path) -> None:
    """A server may change its keys at any time, and ask the client to do the same: in the middle of a response, while
    the connection is idle, and while a request that is sealed waits for its instant. The client does so with its next
    request."""
    update = b" TLS 1.3, Handshake [length 0005], KeyUpdate"
    updated = (b"<<<" + update, b"POST / ")
    with openssl_server(tmp_path) as server:
        tls = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        async with client_of(server.url, tls) as client:
            connection = await converse(client, await client.connect(), server)
            connection = await converse(client, connection, server, b"k\n", b"K\n")
            connection = await converse(client, connection, server, heard=updated)
            server.send(b"K\n")
            await asyncio.to_thread(server.wait, b">>>" + update)
            await asyncio.to_thread(select.select, [connection.sock], [], [], 20)  # what the server wrote has arrived
            assert not connection.closed_by_peer()
            connection = await converse(client, connection, server, heard=updated)
            sealed = connection.seal(REQUEST)
            server.send(b"K\n")
            await asyncio.to_thread(server.wait, b">>>" + update)
            connection = await converse(client, connection, server, sealed=sealed)
            await converse(client, connection, server, heard=updated)


async def test_renegotiation_is_answered(tmp_path: Path) -> None:
    """A TLS 1.2 server may begin another handshake before it answers, as to ask for a certificate. On an idle
    connection, for which a request is sealed already, it makes a new connection necessary."""
    with openssl_server(tmp_path, "-tls1_2") as server:
        tls = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        async with client_of(server.url, tls) as client:
            connection = await converse(client, await client.connect(), server, b"r\n")
            await asyncio.to_thread(server.wait, b"Handshake [length 0010], Finished")
            connection = await converse(client, connection, server)
            server.send(b"r\n")
            while not connection.closed_by_peer():
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_end_of_the_session_ends_a_body_without_a_length(version: ssl.TLSVersion) -> None:
    """A server that says goodbye in TLS and leaves the TCP connection open has ended its response."""
    head, body = b"HTTP/1.1 200 OK\r\n\r\n", b"hello"
    server_tls, client_tls = contexts(version=version)
    with scripted(server_tls, [Step([head]), Step([body], close_notify=True)], REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            exchange = await client.ask(await client.connect())
    assert (exchange.error_kind, exchange.reusable_connection) == ("", None)
    assert join_pieces(exchange.raw, exchange.framing.body_bounds(exchange.raw)) == body


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_session_that_ends_too_early_is_a_truncated_response(version: ssl.TLSVersion) -> None:
    """The end of the session in the middle of a body with a length is no end of the response."""
    server_tls, client_tls = contexts(version=version)
    with scripted(server_tls, [Step(PIECES[:2], close_notify=True)], REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            exchange = await client.ask(await client.connect())
    assert (exchange.error_kind, exchange.error_detail) == ("truncated", "the server closed the TLS session")


@pytest.mark.parametrize("last", [Step(PIECES, close_notify=True), Step(PIECES, junk=b"\x17\x03\x03\x00\x05hello")])
async def test_a_session_that_ends_with_the_response_serves_no_other_request(last: Step) -> None:
    """The response is complete, whether a goodbye or an error follows it in the same segment, and the connection is not
    used again."""
    server_tls, client_tls = contexts()
    with scripted(server_tls, [last], REQUEST) as server:
        async with client_of(server.url, client_tls) as client:
            exchange = await client.ask(await client.connect())
            assert not exchange.error_kind, exchange.error_detail
            check(client.arrivals(exchange), server.sent_ns[0])
            assert exchange.reusable_connection is None or exchange.reusable_connection.closed_by_peer()


async def test_data_that_comes_with_the_handshake_is_noticed() -> None:
    """A response that no request asked for would be taken for that of the first request."""
    server_tls, client_tls = contexts(version=ssl.TLSVersion.TLSv1_2)
    with scripted(server_tls, ONE_EACH, REQUEST, greeting=b"HTTP/1.1 408 Request Time-out\r\n\r\n") as server:
        async with client_of(server.url, client_tls) as client:
            assert (await client.connect()).closed_by_peer()
