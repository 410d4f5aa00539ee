"""The signals that end a run: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handle_signals(numbers: Iterable[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """Within this block these signals call `handler`. SIGHUP is left alone if it is ignored (nohup). Afterwards the
    old handlers are restored, except for signals that the handler has decided to ignore from now on."""
    heard = [
        number for number in numbers if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, before in previous.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP while the run is on, instead of raising, or ending, in the middle of it."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self) -> AbstractContextManager[None]:
        """Within this block the signals only count."""
        return handle_signals(INTERRUPTS, self._counted)

    def _counted(self, number: int, _frame: object) -> None:
        """Count a signal. A terminal that goes away is one interrupt, although both the kernel and the shell send
        SIGHUP; the results are written in peace after it."""
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.count += 1
