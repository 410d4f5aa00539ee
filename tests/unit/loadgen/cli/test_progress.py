"""What is shown while a run is on."""

import re
import sys
from functools import partial
from io import StringIO
from typing import cast

import pytest

from loadgen.analysis.run.record import Record
from loadgen.cli.output import Output, show_progress
from loadgen.engine.client_health import COUNTER_NAMES, FirstTokens, LiveCounters
from loadgen.engine.record_builder import first_token_end
from loadgen.plan import Plan
from loadgen.servers.wire.poller import Poller
from loadgen.servers.wire.timestamps import PLAIN
from loadgen.servers.wire.transport import Exchange
from tests.support.dialects import DIALECTS


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


COUNTS = LiveCounters(
    due=10,
    sent=9,
    streaming=3,
    complete=4,
    truncated=1,
    failed=2,
    rejected=1,
    dropped=1,
    tokens=77,
    first_sent_ns=10**9,
    last_end_ns=2 * 10**9,
    tokens_per_s=1234.4,
)
for ttft_ms in (100, 200, 300, 400):
    COUNTS.ttft.add(ttft_ms * 1e6)
CONTROL = re.compile(r"\x1b\[[^a-zA-Z]*[a-zA-Z]")


def shown(requests: int | None, duration_s: float | None, *counts: LiveCounters, phase: str = "running") -> str:
    """The last live line."""
    stream = Terminal()
    with show_progress(requests, duration_s, stream) as show:
        for each in counts:
            show(phase, each)
    drawn = [line.strip("\r\n") for line in CONTROL.sub("\n", stream.getvalue()).splitlines()]
    return [line for line in drawn if line.strip()][-1]


def test_without_a_terminal_lines_are_plain() -> None:
    """One line with every count, and no control characters."""
    stream = StringIO()
    with show_progress(10, None, stream) as show:
        show("ended", COUNTS)
    line = stream.getvalue()
    assert (
        "ended: 9/10 sent, 3 streaming, 4 complete, 1 truncated, 2 failed, 1 rejected, 1 dropped, "
        "TTFT p50 251 ms p99 399 ms, 77 tokens/s"
    ) in line
    assert line.isprintable() or line.count("\n") == 1


def test_prompts_that_are_built_before_the_run_are_counted() -> None:
    """Both kinds of lines show how many prompts have been built while their number grows, and then the phase again."""
    counts = [LiveCounters(prepared=number) for number in (11_000, 12_300)]
    line = shown(100_000, None, *counts, phase="building prompts")
    assert line.endswith("building prompts: 12,300 of 100,000")
    assert shown(None, 60.0, *counts, phase="connecting").endswith("building prompts: 12,300")
    assert shown(None, 60.0, *counts, counts[-1], phase="connecting").endswith("connecting")
    stream = StringIO()
    with show_progress(100_000, None, stream) as show:
        show("connecting", counts[0])
    assert stream.getvalue().endswith("s  building prompts: 11,000 of 100,000\n")


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is redrawn in place: a bar with the requests left, TTFT so far, the rate, and what went wrong.

    Where the clock ends the run, a bar with the time left, and afterwards what is still in flight. TPOT needs a wider
    terminal.
    """
    monkeypatch.setenv("COLUMNS", "80")
    with_tpot = LiveCounters.from_buffer_copy(COUNTS)
    with_tpot.tpot.add(8.36e6)
    for counts in (COUNTS, with_tpot):
        line = shown(10, None, counts, counts)
        assert re.search(r"  1 left  TTFT p50 251 ms p99 399 ms  1,234 tokens/s  5 incomplete$", line), line
    monkeypatch.setenv("COLUMNS", "120")
    line = shown(10, None, with_tpot)
    assert re.search(r"━+╌+  1 left  TTFT [^T]+  TPOT p50 8.\d+ ms p99 8.\d+ ms  1,234 tokens/s", line), line
    assert re.search(r"  ╌+  1:00 left  TTFT p50", shown(None, 60.0, COUNTS))
    assert "1 in flight" in shown(None, 0.0, COUNTS)
    assert shown(10, None, LiveCounters(), phase="connecting").endswith("connecting")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_live_line_never_breaks(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """However large its numbers are: it is shorter than the terminal, so that it is redrawn where it stands."""
    monkeypatch.setenv("COLUMNS", str(width))
    large = LiveCounters(**dict.fromkeys(COUNTER_NAMES, 10**6), tokens_per_s=1e12)
    large.ttft.add(10**18)
    large.tpot.add(10**18)
    assert len(shown(4 * 10**6, None, large)) < width
    assert len(shown(None, 36_000.0, large)) < width


@pytest.mark.parametrize("kind", [StringIO, Terminal])
@pytest.mark.parametrize(("quiet", "plain"), [(True, True), (False, False)])
def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, kind: type[StringIO], quiet: bool, plain: bool) -> None:
    """With --quiet whatever the stream is; a matrix shows nothing where that is no terminal."""
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with Output(as_json=False, quiet=quiet).progress(Plan(server="vllm", n=10), plain=plain) as show:
        show("ended", COUNTS)
    assert (stream.getvalue() == "") == (quiet or not stream.isatty())


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
