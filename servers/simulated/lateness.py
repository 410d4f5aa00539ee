"""How late tokens leave: a histogram of microseconds that costs the sending path one addition."""

from __future__ import annotations

LIMIT_NS = 5_000_000
"""The server falls behind when more than one send in a hundred is later than this: a quarter of the 20 ms between two
tokens of a stream at 50 tokens/s, so that no stream's pace is what was asked any more."""

_BIN_NS = 1_000
_BINS = 100_000


class Lateness:
    """Sends counted by their delay, in bins of a microsecond; those above 100 ms share the last bin."""

    __slots__ = ("bins", "max_ns")

    def __init__(self) -> None:
        self.bins = [0] * (_BINS + 1)
        self.max_ns = 0

    def add(self, late_ns: int) -> None:
        """Counts one send. Hot path."""
        if late_ns > self.max_ns:  # noqa: PLR1730 - max() costs four times as much
            self.max_ns = late_ns
        self.bins[late_ns // _BIN_NS if late_ns < _BINS * _BIN_NS else _BINS] += 1

    def events(self) -> int:
        """All sends."""
        return sum(self.bins)

    def percentile_ns(self, percent: float) -> int:
        """The upper edge of the bin that holds this percentile, at most the maximum; 0 when nothing was sent."""
        rank = self.events() * percent / 100
        seen = 0
        for place, number in enumerate(self.bins):
            seen += number
            if number and seen >= rank:
                return min(self.max_ns, (place + 1) * _BIN_NS) if place < _BINS else self.max_ns
        return 0

    def late_events(self) -> int:
        """Sends later than LIMIT_NS."""
        return sum(self.bins[LIMIT_NS // _BIN_NS :])

    def falling_behind(self) -> bool:
        """See LIMIT_NS."""
        return self.late_events() > self.events() / 100
