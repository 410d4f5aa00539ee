"""Live TTFTs: found while responses are still arriving, from their first bytes."""

from functools import partial
from typing import cast

import pytest

from loadgen.analysis.run.record import Record
from loadgen.engine.client_health import FirstTokens, LiveCounters
from loadgen.engine.record_builder import first_token_end
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import PLAIN
from loadgen.servers.wire.transport import Exchange
from tests.support.dialects import DIALECTS

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def arrived(exchange: Exchange, data: bytes, at_ns: int) -> None:
    exchange.parts.append(data)
    exchange.sizes.append(len(exchange.raw))
    exchange.user_ns.append(at_ns)


def ttfts_us(counts: LiveCounters) -> list[int]:
    """The TTFTs so far, in whole microseconds."""
    return [round(2 ** (bucket / 64)) for bucket, count in counts.ttft.by_bucket().items() for _ in range(count)]


def test_ttft_so_far_counts_each_first_token_once() -> None:
    """A response under way counts from its first event with a token on; one that nobody looked at counts at its end. A
    response that fails later no longer counts."""
    counts = LiveCounters()
    tokens = FirstTokens(counts, PLAIN, list, partial(first_token_end, dialect=DIALECTS["openai", "chat"]))
    exchange = Exchange(cast("Poller", None), lambda _: None, sent_ns=1_000)
    for data, at_ns in ((HEAD, 1_500), (b"%x\r\n%b\r\n" % (len(ROLE), ROLE), 2_000)):
        arrived(exchange, data, at_ns)
        tokens.look({exchange})
        assert ttfts_us(counts) == []
    arrived(exchange, b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 3_000)
    arrived(exchange, b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 4_000)
    tokens.look({exchange})
    tokens.look({exchange})
    assert ttfts_us(counts) == [2]
    record = Record(id=0, state="complete", sent_ns=1_000, chunk_ns=[3_000])
    tokens.take(exchange, record)
    assert ttfts_us(counts) == [2]
    tokens.take(None, Record(id=0, state="complete", sent_ns=1_000, chunk_ns=[5_000]))
    tokens.take(None, Record(id=1, state="failed"))
    assert ttfts_us(counts) == [2, 4]
    tokens.look({exchange})
    assert ttfts_us(counts) == [2, 2, 4]
    tokens.take(exchange, Record(id=0, state="truncated", sent_ns=1_000, chunk_ns=[3_000]))
    assert ttfts_us(counts) == [2, 4]


def test_ttft_so_far_is_never_negative() -> None:
    """A timestamp before the request was sent is wrong. The request counts at its end, when its Record has another
    source's timestamps."""
    counts = LiveCounters()
    tokens = FirstTokens(counts, PLAIN, list, partial(first_token_end, dialect=DIALECTS["openai", "chat"]))
    exchange = Exchange(cast("Poller", None), lambda _: None, sent_ns=1_000)
    arrived(exchange, HEAD + b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 999)
    tokens.look({exchange})
    assert ttfts_us(counts) == []
    tokens.take(exchange, Record(id=0, state="complete", sent_ns=1_000, chunk_ns=[5_000]))
    assert ttfts_us(counts) == [4]


def test_a_first_token_behind_long_events_is_found() -> None:
    """Some servers open a chat with a long event without a token, such as the results of a content filter."""
    filtered = b'data: {"choices":[],"prompt_filter_results":"%b"}\n\n' % (b"x" * 3_000)
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + filtered + TOKEN
    dialect = DIALECTS["openai", "chat"]
    assert first_token_end(raw, dialect) == len(raw)
    assert first_token_end(raw[:-4], dialect) is None
    counts = LiveCounters()
    exchange = Exchange(cast("Poller", None), lambda _: None, sent_ns=1_000)
    arrived(exchange, raw, 3_000)
    FirstTokens(counts, PLAIN, list, partial(first_token_end, dialect=dialect)).look({exchange})
    assert ttfts_us(counts) == [2]


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 429 No\r\n\r\n" + TOKEN, b"data: x", HEAD + b"zz\r\n" + ROLE])
def test_bytes_that_are_no_stream_have_no_first_token(raw: bytes) -> None:
    """Whatever a server sends, looking for a token raises nothing."""
    assert first_token_end(raw, DIALECTS["openai", "chat"]) is None
