"""The progress of a run in a terminal and in a pipe."""

import re
import sys
from io import StringIO

import pytest

from loadgen.cli.output import Output, planned_end
from loadgen.engine.client_health import COUNTER_NAMES, LiveCounters
from loadgen.live.snapshot import PlannedEnd
from loadgen.live.terminal import BLOCKS, show_progress, sparkline
from loadgen.plan import Plan


class Terminal(StringIO):
    """A stream that reports that it is a terminal with UTF-8."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


COUNTS = LiveCounters(
    due=10,
    sent=9,
    streaming=1,
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
SERVER = LiveCounters.from_buffer_copy(COUNTS)
SERVER.set_server_gauges({"running": 128, "waiting": 360, "kv_used": 0.5})
SERVER.tpot.add(8.36e6)
TEN_REQUESTS = PlannedEnd(requests=10)
CONTROL = re.compile(r"\x1b\[[^a-zA-Z]*[a-zA-Z]")


@pytest.fixture(autouse=True)
def terminal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal has 80 columns and 24 lines, unless a test changes it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def drawn_lines(end: PlannedEnd, *counts: LiveCounters, phase: str = "running") -> list[str]:
    """Return the lines of the last drawing on a terminal."""
    stream = Terminal()
    with show_progress(end, stream) as show:
        for counters in counts:
            show(phase, counters)
        drawing = stream.getvalue()
    last = re.split(r"\x1b\[[0-9]*A|\r\x1b\[2K", drawing)[-1] if drawing.count("\n") < 2 else drawing
    lines = CONTROL.sub("", last).splitlines()
    return [line.strip("\r") for line in lines if line.strip()]


def test_a_pipe_gets_plain_lines() -> None:
    """A plain line has every count and every figure, and no control characters."""
    stream = StringIO()
    with show_progress(TEN_REQUESTS, stream) as show:
        show("ended", SERVER)
    line = stream.getvalue()
    assert (
        "ended: 9/10 sent, 1 in flight, 1 streaming, 4 complete, 1 truncated, 2 failed, 1 rejected, 1 dropped, "
        "TTFT p50 251 ms p99 399 ms, TPOT p50 8.33 ms p99 8.33 ms, 77 tokens/s, server runs 128, server queues 360, "
    ) in line
    assert re.search(r"KV cache 50 ?%$", line.strip())
    assert line.isprintable() or line.count("\n") == 1


def test_the_panel_shows_the_same_figures_as_a_plain_line() -> None:
    """The panel has a row per figure, the number of incomplete requests by outcome, and what Ctrl-C does."""
    text = "\n".join(drawn_lines(TEN_REQUESTS, SERVER))
    assert re.search(r"━+╌+  1 of 10 left", text)
    assert re.search(r"in flight +1 .* 1 streaming", text)
    assert re.search(r"waiting +360 .* server runs 128", text)
    assert re.search(r"tokens/s +1,234", text)
    assert re.search(r"TTFT p50 +251 ms .* p99 399 ms", text)
    assert re.search(r"TPOT p50 +8.33 ms .* p99 8.33 ms", text)
    assert re.search(r"KV cache +50 ?%", text)
    assert re.search(r"incomplete +5 .* 2 failed, 1 truncated, 1 rejected, 1 dropped", text)
    assert text.endswith("Ctrl-C stops the run and keeps the results so far.")


def test_the_panel_has_no_rows_for_figures_that_are_not_measured() -> None:
    """Without metrics of the server and without a complete response, their rows are left out."""
    text = "\n".join(drawn_lines(TEN_REQUESTS, LiveCounters(sent=3)))
    assert not re.search("waiting|KV|TTFT|TPOT", text)
    assert re.search(r"incomplete +0", text)


def test_the_panel_explains_a_second_interrupt() -> None:
    """After the first Ctrl-C, the panel says what a second one does."""
    assert "Ctrl-C again" in drawn_lines(TEN_REQUESTS, COUNTS, phase="stopping")[-1]


def test_the_last_compression_of_a_long_run_has_a_phase() -> None:
    """After the last request, the panel says what it waits for, and what Ctrl-C does now."""
    lines = drawn_lines(TEN_REQUESTS, COUNTS, phase="compressing")
    assert lines[-1].strip() == "Compressing the files of records. Ctrl-C leaves the rest as they are."


def test_records_that_wait_for_space_on_the_disk_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The panel, a small terminal and a plain line show that Records could not be written."""
    full = LiveCounters.from_buffer_copy(COUNTS)
    full.unwritten_bytes = 12_300_000
    row = next(line for line in drawn_lines(TEN_REQUESTS, full) if "records  " in line)
    assert row.split(maxsplit=1)[1].startswith("12.3 MB")
    assert row.endswith("wait in memory: is the disk full?")
    stream = StringIO()
    with show_progress(TEN_REQUESTS, stream) as show:
        show("ended", full)
    assert "12.3 MB of records wait in memory: is the disk full?" in stream.getvalue()
    monkeypatch.setenv("LINES", "4")
    assert "disk full?" in drawn_lines(TEN_REQUESTS, full)[-1]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (PlannedEnd(duration_s=60.0), "╌{24}  1:00 left"),
        (PlannedEnd(), "^ +0.0 s  1 in flight"),
        (PlannedEnd(requests=100, tokens=154), "━{12}╌{12}  91 of 100 left"),
    ],
)
def test_the_bar_shows_what_ends_the_run(end: PlannedEnd, text: str) -> None:
    """The bar shows the share of the time, of the requests, or of the tokens; without a known end there is no bar."""
    assert re.search(text, drawn_lines(end, COUNTS)[0])


def test_a_plan_states_what_ends_its_run() -> None:
    """The number of tokens is known if every response has the same length."""
    assert planned_end(Plan(server="vllm", n=10, output_tokens=128)) == PlannedEnd(10, None, 1280)
    assert planned_end(Plan(server="vllm", n=10, output_tokens="uniform:1..9")) == PlannedEnd(10, None, None)
    assert planned_end(None) == PlannedEnd()


def test_prompts_that_are_built_before_the_run_are_counted() -> None:
    """Both kinds of lines show how many prompts have been built while their number grows, and then the phase again."""
    counts = [LiveCounters(prepared=number) for number in (11_000, 12_300)]
    many = PlannedEnd(requests=100_000)
    assert drawn_lines(many, *counts, phase="building prompts")[-1].endswith("building prompts: 12,300 of 100,000")
    assert drawn_lines(PlannedEnd(duration_s=60.0), *counts, phase="connecting")[-1].endswith("prompts: 12,300")
    assert drawn_lines(PlannedEnd(), *counts, counts[-1], phase="connecting")[-1].endswith("connecting")
    stream = StringIO()
    with show_progress(many, stream) as show:
        show("connecting", counts[0])
    assert stream.getvalue().endswith("s  building prompts: 11,000 of 100,000\n")


@pytest.mark.parametrize(("columns", "lines"), [(20, 24), (40, 24), (59, 24), (60, 24), (80, 24), (120, 50), (80, 8)])
def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> None:
    """Large numbers do not break lines. A small terminal gets a single line."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    large = LiveCounters(**dict.fromkeys(COUNTER_NAMES, 10**6), tokens_per_s=1e12)
    large.set_server_gauges({"running": 10**9, "waiting": 10**9, "kv_used": 1.0})
    large.ttft.add(10**18)
    large.tpot.add(10**18)
    drawn = drawn_lines(PlannedEnd(requests=4 * 10**6), large)
    assert max(map(len, drawn)) < columns
    assert (len(drawn) == 1) == (columns < 60 or lines < 12)


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar and the sparklines use ASCII characters if the terminal's encoding has no others."""
    monkeypatch.setattr(Terminal, "encoding", "ascii")
    assert "\n".join(drawn_lines(TEN_REQUESTS, SERVER)).isascii()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot move the cursor gets plain lines."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with show_progress(TEN_REQUESTS, stream) as show:
        show("ended", COUNTS)
    assert "\x1b" not in stream.getvalue()
    assert "ended: 9/10 sent" in stream.getvalue()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "    "),
        ([0, 0], "▁▁  "),
        ([0.0, 1.0], "▁█  "),
        ([None, 7.0], " █  "),
        ([0, 0, 1, 1, 2, 2, 7, 7], "▁▂▃█"),
        ([1, None, 1, 1], "█ ██"),
    ],
)
def test_a_sparkline_shows_means_of_equal_parts(values: list[float | None], expected: str) -> None:
    """The highest mean is a full block, and values that were not measured are blank."""
    assert sparkline(values, 4, BLOCKS) == expected


@pytest.mark.parametrize("kind", [StringIO, Terminal])
@pytest.mark.parametrize(("quiet", "plain"), [(True, True), (False, False)])
def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, kind: type[StringIO], quiet: bool, plain: bool) -> None:
    """--quiet shows nothing on any stream. A matrix shows nothing if the stream is not a terminal."""
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    with Output(as_json=False, quiet=quiet).progress(Plan(server="vllm", n=10), plain=plain) as show:
        show("ended", COUNTS)
    assert (stream.getvalue() == "") == (quiet or not stream.isatty())
