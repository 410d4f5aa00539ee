"""What is shown while a run is on: one live line in a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from loadgen.engine.health import Counts

PLAIN_EVERY_S = 5.0


class Display:
    """Shows phases and counts on `stream`. A context manager, so that the terminal is left tidy."""

    def __init__(self, requests: int | None, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._requests = requests
        self._stream = stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = stream.isatty() and not quiet
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._tokens = (self._started, 0)

    def __enter__(self) -> Display:
        if self._terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream, highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._live.stop()

    def show(self, phase: str, counts: Counts) -> None:
        """Take the newest counts; draws at its own pace."""
        if self._quiet:
            return
        now = time.monotonic()
        if self._terminal:
            self._live.update(self._line(phase, counts, now), refresh=True)
        elif now - self._shown_at >= PLAIN_EVERY_S or phase == "ended":
            self._shown_at = now
            print(self._line(phase, counts, now), file=self._stream, flush=True)

    def _line(self, phase: str, counts: Counts, now: float) -> str:
        since, before = self._tokens
        rate = (counts.tokens - before) / max(now - since, 1e-9)
        if now - since >= 1.0:
            self._tokens = (now, counts.tokens)
        of = "" if self._requests is None else f"/{self._requests}"
        return (
            f"{now - self._started:6.1f} s  {phase}: {counts.sent}{of} sent, "
            f"{counts.streaming} streaming, {counts.complete} complete, {counts.truncated} truncated, "
            f"{counts.failed} failed, {counts.dropped} dropped, {max(rate, 0):,.0f} tokens/s"
        )
