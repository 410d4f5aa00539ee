"""The signals that end a run: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while the run is on, instead of raising, or ending, in the middle of it."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this block the signals only count."""

        def on_signal(*_: object) -> None:
            self.count += 1

        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [each for each in INTERRUPTS if each is not signal.SIGHUP or not nohup]
        previous = {number: signal.signal(number, on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
