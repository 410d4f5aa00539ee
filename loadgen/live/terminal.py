"""Shows the progress of a run on a terminal as a panel with sparklines, and elsewhere as plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from loadgen.live.snapshot import PREPARING, History, LiveSnapshot, PlannedEnd, SnapshotTaker

if TYPE_CHECKING:
    from rich.console import Console

    from loadgen.engine.client_health import LiveCounters

PLAIN_LINE_INTERVAL_S = 5.0
"""Time between two plain lines."""
REDRAW_INTERVAL_S = 0.5
"""Minimum time between two drawings of the panel."""
PANEL_SNAPSHOTS = 240
"""Maximum number of snapshots behind the sparklines: a few for each of their characters."""
MANY_PROMPTS = 1_000
"""Number of prompts from which on the progress of building them is shown. Fewer take no time."""
MIN_PANEL_COLUMNS, MIN_PANEL_LINES = 60, 12
"""Minimum size of a terminal that shows the panel. A smaller one shows a single line."""
MAX_SPARKLINE_COLUMNS = 40
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 6, 24
"""Minimum and maximum width of the progress bar. Without room for the minimum, there is no bar."""
LABEL_COLUMNS, VALUE_COLUMNS, NOTE_COLUMNS = 10, 9, 30
"""Widths of the panel's columns: the name of a figure, its value, and the note after its sparkline."""
OUTCOMES = ("complete", "truncated", "failed", "rejected", "dropped")
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
"""Characters of a sparkline from the lowest to the highest value, for terminals with Unicode and without it."""
STOPPING = "Stopping. The results so far are kept. Press Ctrl-C again to stop at once."
RUNNING = "Ctrl-C stops the run and keeps the results so far."
COMPRESSING = "Compressing the files of records. Ctrl-C leaves the rest as they are."
UNWRITTEN = "wait in memory: is the disk full?"
LAST_LINES = {"stopping": STOPPING, "compressing": COMPRESSING}
"""The last line of the panel in each phase. It is RUNNING in other phases."""

Show = Callable[[str, "LiveCounters"], None]
"""Shows the progress of a run. Takes the phase and the live counters."""


class PanelRow(NamedTuple):
    """One row of the progress panel: a figure with its earlier values."""

    label: str
    value: str
    history: Sequence[float | None]
    """Earlier values of the figure, oldest first. None where it was not measured."""
    note: str = ""
    alert: bool = False
    """True if the row shows a problem and is coloured."""


@contextmanager
def show_progress(end: PlannedEnd, stream: TextIO, *, raw: TextIO | None = None) -> Iterator[Show]:
    """Yield a function that shows progress on `stream`.

    A terminal shows a panel that is redrawn in place. Other streams get a plain line every few seconds. The panel is
    written to `raw` if it is given, otherwise to `stream`.
    """
    taker = SnapshotTaker(end, time.monotonic)
    if not stream.isatty():
        yield _plain_lines(taker, stream)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(file=raw or stream, highlight=False)
    if console.is_dumb_terminal:
        yield _plain_lines(taker, stream)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _panel(taker, console, lambda text: live.update(text, refresh=True))


def _plain_lines(taker: SnapshotTaker, stream: TextIO) -> Show:
    """Return a function that prints the progress of a run to `stream` as plain lines.

    The function prints a line every few seconds, and one at the end of the run.
    """
    printed_s = 0.0
    prompts = PromptCount(taker.end.requests)

    def show(phase: str, counts: LiveCounters) -> None:
        nonlocal printed_s
        preparing = prompts.text(phase, counts.prepared)
        now_s = time.monotonic()
        if now_s - printed_s >= PLAIN_LINE_INTERVAL_S or phase == "ended":
            printed_s = now_s
            print(plain_line(taker.take(phase, counts), preparing), file=stream, flush=True)

    return show


def _panel(taker: SnapshotTaker, console: Console, draw: Callable[[Any], None]) -> Show:
    """Return a function that draws the progress of a run as a panel on a terminal, a few times per second."""
    from rich.segment import Segment, Segments
    from rich.style import Style
    from rich.text import Text

    alert_style = Style(color="red")
    unicode = console.encoding.startswith("utf")
    history = History(PANEL_SNAPSHOTS)
    prompts = PromptCount(taker.end.requests)
    drawn_s, drawn_phase = 0.0, ""

    def show(phase: str, counts: LiveCounters) -> None:
        nonlocal drawn_s, drawn_phase
        preparing = prompts.text(phase, counts.prepared)
        now_s = time.monotonic()
        if phase == drawn_phase and phase not in (*PREPARING, "ended") and now_s - drawn_s < REDRAW_INTERVAL_S:
            return
        drawn_s, drawn_phase = now_s, phase
        snapshot = taker.take(phase, counts)
        size = console.size
        if phase in PREPARING or size.width < MIN_PANEL_COLUMNS or size.height < MIN_PANEL_LINES:
            draw(Text(status_line(snapshot, size.width, preparing, unicode=unicode), no_wrap=True))
            return
        history.add(snapshot)
        # Segments need no wrapping, which takes longer than everything else in a drawing.
        segments = []
        for line, alert in panel_lines(snapshot, history.snapshots, size.width, unicode=unicode):
            segments += [Segment.line(), Segment(line, alert_style if alert else None)]
        draw(Segments(segments[1:]))

    return show


class PromptCount:
    """Chooses the text that the terminal shows before a run starts.

    While many prompts are being built, the text is the number of prompts built so far, such as `building prompts:
    1,000`. Otherwise, the text is the phase of the run, such as `connecting`.
    """

    def __init__(self, planned: int | None) -> None:
        self._planned = planned
        self._prepared = 0

    def text(self, phase: str, prepared: int) -> str:
        """Return `building prompts: 1,000` if prompts are being built, and the text `phase` otherwise.

        `prepared` is the number of prompts built so far. Prompts are being built if this number has changed since the
        last call. Numbers below MANY_PROMPTS are not shown.
        """
        grows = prepared != self._prepared
        self._prepared = prepared
        if not grows or prepared < MANY_PROMPTS:
            return phase
        total = "" if self._planned is None else f" of {self._planned:,}"
        return f"building prompts: {prepared:,}{total}"


def plain_line(snapshot: LiveSnapshot, preparing: str) -> str:
    """Return all figures of a snapshot in one line, or the text `preparing` before the run starts."""
    time_text = f"{snapshot.elapsed_s:6.1f} s  "
    if snapshot.phase in PREPARING:
        return time_text + preparing
    total = "" if snapshot.planned is None else f"/{snapshot.planned}"
    counts = [
        f"{snapshot.sent}{total} sent",
        f"{snapshot.in_flight} in flight",
        f"{snapshot.streaming} streaming",
        *(
            f"{getattr(snapshot, state)} {state}"
            for state in ("complete", "truncated", "failed", "rejected", "dropped")
        ),
        *([f"{snapshot.abandoned} abandoned"] if snapshot.abandoned else []),
        *([f"{_size(snapshot.unwritten_bytes)} of records {UNWRITTEN}"] if snapshot.unwritten_bytes else []),
    ]
    return f"{time_text}{snapshot.phase}: {', '.join([*counts, *_figures(snapshot).values(), *_server(snapshot)])}"


def status_line(snapshot: LiveSnapshot, width: int, preparing: str, *, unicode: bool) -> str:
    """Return the most important figures in one line that is shorter than `width` characters.

    Before the run starts, the line shows the text `preparing` instead of figures. Without `unicode`, the progress bar
    consists of ASCII characters. If there is little room, the TPOT and the progress bar are left out, and the end of
    the line is cut off.
    """
    time_text = f"{snapshot.elapsed_s:6.1f} s  "
    if snapshot.phase in PREPARING:
        return f"{time_text}{preparing}"[: width - 1]
    room = width - 3 - len(time_text)
    figures = _figures(snapshot)
    incomplete = [f"{snapshot.incomplete:,} incomplete"] if snapshot.incomplete else []
    if snapshot.unwritten_bytes:
        incomplete.insert(0, "disk full?")
    if snapshot.phase == "compressing":
        incomplete.insert(0, snapshot.phase)
    text = "  ".join([snapshot.remaining_text, *figures.values(), *incomplete])
    if len(text) + MIN_BAR_COLUMNS > room and figures.pop("TPOT", ""):
        text = "  ".join([snapshot.remaining_text, *figures.values(), *incomplete])
    bar = progress_bar(snapshot, min(MAX_BAR_COLUMNS, room - len(text)), unicode=unicode)
    return f"{time_text}{bar}{text}"[: width - 1]


def panel_lines(
    snapshot: LiveSnapshot, snapshots: Sequence[LiveSnapshot], width: int, *, unicode: bool
) -> list[tuple[str, bool]]:
    """Return the lines of the progress panel as pairs: the text, and True if the line shows a problem.

    `snapshot` is the current state of the run, and `snapshots` is the history for the sparklines. Every line is shorter
    than `width` characters. Without `unicode`, the lines consist of ASCII characters.
    """
    sparkline_columns = min(MAX_SPARKLINE_COLUMNS, width - LABEL_COLUMNS - VALUE_COLUMNS - NOTE_COLUMNS - 6)
    blocks = BLOCKS if unicode else ASCII_BLOCKS
    bar = progress_bar(snapshot, MAX_BAR_COLUMNS, unicode=unicode)
    lines = [(f"{snapshot.elapsed_s:6.1f} s  {bar}{snapshot.remaining_text}", False)]
    for row in panel_rows(snapshot, snapshots):
        # A long note leaves less room for the sparkline.
        room = width - LABEL_COLUMNS - VALUE_COLUMNS - len(row.note) - 7
        plot = sparkline(row.history, min(sparkline_columns, room), blocks)
        lines.append((f"  {row.label:<{LABEL_COLUMNS}}{row.value:>{VALUE_COLUMNS}}  {plot}  {row.note}", row.alert))
    lines.append((f"  {LAST_LINES.get(snapshot.phase, RUNNING)}", False))
    return [(line.rstrip()[: width - 1], alert) for line, alert in lines]


def panel_rows(snapshot: LiveSnapshot, snapshots: Sequence[LiveSnapshot]) -> list[PanelRow]:
    """Return the figures of the panel. Figures that are not measured have no row."""
    from loadgen.analysis.format import duration, percent

    def history(name: str) -> list[float | None]:
        return [getattr(earlier, name) for earlier in snapshots]

    rows = [
        PanelRow("in flight", f"{snapshot.in_flight:,}", history("in_flight"), f"{snapshot.streaming:,} streaming"),
        PanelRow("tokens/s", f"{snapshot.tokens_per_s:,.0f}", history("tokens_per_s")),
    ]
    if snapshot.server_waiting is not None:
        running = "" if snapshot.server_running is None else f"server runs {snapshot.server_running:,}"
        rows.insert(1, PanelRow("waiting", f"{snapshot.server_waiting:,}", history("server_waiting"), running))
    if snapshot.ttft_p50_s is not None:
        note = f"p99 {duration(snapshot.ttft_p99_s)}"
        rows.append(PanelRow("TTFT p50", duration(snapshot.ttft_p50_s), history("ttft_p50_s"), note))
    if snapshot.ttfa_p50_s is not None:
        note = f"p99 {duration(snapshot.ttfa_p99_s)}"
        rows.append(PanelRow("TTFA p50", duration(snapshot.ttfa_p50_s), history("ttfa_p50_s"), note))
    if snapshot.tpot_p50_s is not None:
        note = f"p99 {duration(snapshot.tpot_p99_s)}"
        rows.append(PanelRow("TPOT p50", duration(snapshot.tpot_p50_s), history("tpot_p50_s"), note))
    if snapshot.kv_used is not None:
        rows.append(PanelRow("KV cache", percent(snapshot.kv_used), history("kv_used")))
    incomplete = snapshot.incomplete
    note = snapshot.incomplete_text
    rows.append(PanelRow("incomplete", f"{incomplete:,}", history("incomplete"), note, alert=bool(incomplete)))
    if snapshot.unwritten_bytes:
        rows.append(PanelRow("records", _size(snapshot.unwritten_bytes), (), UNWRITTEN, alert=True))
    return rows


def sparkline(values: Sequence[float | None], columns: int, blocks: str) -> str:
    """Return a line of `columns` characters that shows how `values` develop over time.

    `blocks` contains the characters for the heights, from the lowest to the highest. The highest one stands for the
    maximum. If there are more values than columns, each character shows the mean of several consecutive values. If
    there are fewer, spaces are appended to the line.
    """
    if columns < 1:
        return ""
    count = len(values)
    used = min(columns, count)
    parts = [values[index * count // used : (index + 1) * count // used] for index in range(used)]
    means = [_mean([value for value in part if value is not None]) for part in parts]
    maximum = max((mean for mean in means if mean is not None), default=0.0) or 1.0
    highest = len(blocks) - 1
    characters = [" " if mean is None else blocks[round(mean / maximum * highest)] for mean in means]
    return "".join(characters).ljust(columns)


def progress_bar(snapshot: LiveSnapshot, columns: int, *, unicode: bool) -> str:
    """Return a progress bar of `columns` characters, followed by two spaces.

    The bar shows `snapshot.done`, the completed share of the run. Return an empty string if this share is unknown or
    there is no room for a bar. Without `unicode`, the bar consists of ASCII characters.
    """
    if snapshot.done is None or columns < MIN_BAR_COLUMNS:
        return ""
    completed, remaining = "━╌" if unicode else "#-"
    full = round(snapshot.done * columns)
    return f"{completed * full}{remaining * (columns - full)}  "


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figures(snapshot: LiveSnapshot) -> dict[str, str]:
    """Return the figures of a snapshot as texts, by name: the latencies so far and the current token rate.

    For example, the text with the name `TTFT` is `TTFT p50 80 ms p99 120 ms`. A latency that is not known yet is left
    out.
    """
    from loadgen.analysis.format import duration

    figures = {}
    for name, p50_s, p99_s in (
        ("TTFT", snapshot.ttft_p50_s, snapshot.ttft_p99_s),
        ("TTFA", snapshot.ttfa_p50_s, snapshot.ttfa_p99_s),
        ("TPOT", snapshot.tpot_p50_s, snapshot.tpot_p99_s),
    ):
        if p50_s is not None:
            figures[name] = f"{name} p50 {duration(p50_s)} p99 {duration(p99_s)}"
    return {**figures, "rate": f"{snapshot.tokens_per_s:,.0f} tokens/s"}


def _server(snapshot: LiveSnapshot) -> list[str]:
    """Return short texts with the figures that the server's own metrics report, such as `KV cache 40%`.

    Figures that are not measured are left out.
    """
    from loadgen.analysis.format import percent

    figures = []
    if snapshot.server_running is not None:
        figures.append(f"server runs {snapshot.server_running}")
    if snapshot.server_waiting is not None:
        figures.append(f"server queues {snapshot.server_waiting}")
    if snapshot.kv_used is not None:
        figures.append(f"KV cache {percent(snapshot.kv_used)}")
    return figures
