"""Handles the signals that end a run: SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handle_signals(numbers: Iterable[signal.Signals], handler: Callable[..., None]) -> Iterator[None]:
    """Call `handler` for the signals `numbers` until the `with` block ends. Then restore the previous handlers.

    There are two exceptions:

    - A SIGHUP that was ignored before (nohup) remains ignored.
    - A signal that `handler` has set to be ignored remains ignored.
    """
    handled = [
        number for number in numbers if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, before in previous.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, before)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP during a run, instead of raising KeyboardInterrupt or ending the process."""

    def __init__(self) -> None:
        self.count = 0

    def counting(self) -> AbstractContextManager[None]:
        """Return a context manager in which SIGINT, SIGTERM and SIGHUP are only counted."""
        return handle_signals(INTERRUPTS, self._count)

    def _count(self, number: int, _frame: object) -> None:
        """Count a signal. After the first SIGHUP, further SIGHUPs are ignored.

        When a terminal closes, the kernel and the shell both send SIGHUP. Both together must count as one interrupt,
        because a second interrupt kills the workers.
        """
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.count += 1
