"""What is shown while a run is on."""

import re
import sys
from functools import partial
from io import StringIO
from typing import cast

import pytest

from loadgen.analysis.run.record import Record
from loadgen.cli.output import Output, _ProgressLine, show_progress
from loadgen.engine.client_health import FirstTokens, LiveCounters
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
    answered=4,
    ttft_ns=10**9,
)
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
        "ended: 9/10 sent, 3 streaming, 4 complete, 1 truncated, 2 failed, 1 rejected, 1 dropped, mean TTFT 250 ms"
        in line
    )
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
    """The line is redrawn in place: a bar with the requests left, TTFT so far, and what went wrong; where the clock
    ends the run, a bar with the time left, and afterwards what is still in flight."""
    monkeypatch.setenv("COLUMNS", "80")
    line = shown(10, None, COUNTS, COUNTS)
    assert re.search(r"━+╌+  1 left  mean TTFT 250 ms  [\d,]+ tokens/s  5 incomplete$", line), line
    assert re.search(r"  ╌+  1:00 left  mean TTFT", shown(None, 60.0, COUNTS))
    assert "1 in flight" in shown(None, 0.0, COUNTS)
    assert shown(10, None, LiveCounters(), phase="connecting").endswith("connecting")


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_live_line_never_breaks(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """However large its numbers are: it is shorter than the terminal, so that it is redrawn where it stands."""
    monkeypatch.setenv("COLUMNS", str(width))
    large = LiveCounters(**{name: 10**6 for name, _ in LiveCounters._fields_})
    large.ttft_ns = 123_456 * 10**12
    assert len(shown(4 * 10**6, None, large)) < width
    assert len(shown(None, 36_000.0, large)) < width


def test_throughput_is_that_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not since the start, and not of the moment since the last line."""
    now_s = 100.0
    monkeypatch.setattr("loadgen.cli.output.time.monotonic", lambda: now_s)
    look = _ProgressLine(10, None)
    for step in range(41):  # 4 s: at first 1,000 tokens/s, in the last second 100
        now_s = 100.0 + step / 10
        look.update("running", LiveCounters(tokens=100 * min(step, 30) + 10 * max(0, step - 30)))
    assert " 100 tokens/s" in look.live("running", LiveCounters(), 80, "#-")


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


def test_ttft_so_far_counts_each_first_token_once() -> None:
    """A response under way counts from its first event with a token on; one that nobody looked at counts at its end."""
    counts = LiveCounters()
    tokens = FirstTokens(counts, PLAIN, list, partial(first_token_end, dialect=DIALECTS["openai", "chat"]))
    exchange = Exchange(cast("Poller", None), lambda _: None, sent_ns=1_000)
    for data, at_ns in ((HEAD, 1_500), (b"%x\r\n%b\r\n" % (len(ROLE), ROLE), 2_000)):
        arrived(exchange, data, at_ns)
        tokens.look({exchange})
        assert counts.answered == 0
    arrived(exchange, b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 3_000)
    arrived(exchange, b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 4_000)
    tokens.look({exchange})
    tokens.look({exchange})
    record = Record(id=0, state="complete", sent_ns=1_000, chunk_ns=[5_000])
    tokens.take(exchange, record)
    assert (counts.answered, counts.ttft_ns) == (1, 2_000)
    tokens.take(None, record)
    tokens.take(None, Record(id=1, state="failed"))
    assert (counts.answered, counts.ttft_ns) == (2, 6_000)


def test_ttft_so_far_is_never_negative() -> None:
    """A timestamp before the request was sent is wrong. The request counts at its end, when its Record has another
    source's timestamps."""
    counts = LiveCounters()
    tokens = FirstTokens(counts, PLAIN, list, partial(first_token_end, dialect=DIALECTS["openai", "chat"]))
    exchange = Exchange(cast("Poller", None), lambda _: None, sent_ns=1_000)
    arrived(exchange, HEAD + b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN), 999)
    tokens.look({exchange})
    assert counts.answered == 0
    tokens.take(exchange, Record(id=0, state="complete", sent_ns=1_000, chunk_ns=[5_000]))
    assert (counts.answered, counts.ttft_ns) == (1, 4_000)


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
    assert (counts.answered, counts.ttft_ns) == (1, 2_000)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 429 No\r\n\r\n" + TOKEN, b"data: x", HEAD + b"zz\r\n" + ROLE])
def test_bytes_that_are_no_stream_have_no_first_token(raw: bytes) -> None:
    """Whatever a server sends, looking for a token raises nothing."""
    assert first_token_end(raw, DIALECTS["openai", "chat"]) is None
