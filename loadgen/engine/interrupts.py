"""The signals that end a run: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """Within this block these signals call `handler`, SIGHUP not where it is ignored (nohup)."""
    heard = [each for each in numbers if each is not signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while the run is on, instead of raising, or ending, in the middle of it."""

    def __init__(self) -> None:
        self.count = 0

    def watched(self) -> AbstractContextManager[None]:
        """Within this block the signals only count."""
        return handled(INTERRUPTS, self._counted)

    def _counted(self, *_: object) -> None:
        self.count += 1
