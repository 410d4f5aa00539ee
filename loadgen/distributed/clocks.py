"""How far a worker machine's clock is ahead of the master's, and how well that is known.

Stamps are exchanged as in NTP (RFC 5905, section 8): the master notes t1, the worker machine t2 on arrival and t3 on
reply, the master t4, all on CLOCK_MONOTONIC.

    offset = ((t2 - t1) + (t3 - t4)) / 2        worker's clock minus master's
    round trip = (t4 - t1) - (t3 - t2)

If both directions took equally long, the offset is exact. How unequal they were cannot be seen from the two ends, but
neither can have taken less than nothing, so the truth is within half the round trip: that is the uncertainty. The
exchange with the smallest round trip counts. Clocks also drift, so there is one offset of before the start and one of
after it, and instants between them get what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from loadgen.record import Record, shifted


class ClockSample(msgspec.Struct, frozen=True):
    """One exchange."""

    at_ns: int
    """On the master's clock, half-way through."""
    offset_ns: int
    round_trip_ns: int

    @property
    def uncertainty_ns(self) -> int:
        """The truth is no further from `offset_ns` than this."""
        return (self.round_trip_ns + 1) // 2


def exchanged(t1: int, t2: int, t3: int, t4: int) -> ClockSample:
    """What one exchange tells."""
    return ClockSample((t1 + t4) // 2, ((t2 - t1) + (t3 - t4)) // 2, (t4 - t1) - (t3 - t2))


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A worker machine's clock against the master's, over a run."""

    before: ClockSample
    after: ClockSample
    """The same as `before` as long as nothing was exchanged since the start."""

    @property
    def drift_ns(self) -> int:
        """How much further ahead the clock was in the end."""
        return self.after.offset_ns - self.before.offset_ns

    def at(self, master_ns: int) -> int:
        """The offset at this instant of the master's clock; outside of the two samples the nearer one's."""
        span = self.after.at_ns - self.before.at_ns
        if span <= 0:
            return self.before.offset_ns
        passed = min(max(master_ns - self.before.at_ns, 0), span)
        return self.before.offset_ns + self.drift_ns * passed // span

    def correction(self, start_ns: int, instant_ns: int) -> int:
        """What to add to a worker machine's instant, counted from its own start, to count it from the master's
        `start_ns`: the worker's start was set with the offset of before, and its clock has drifted since."""
        return self.before.offset_ns - self.at(start_ns + instant_ns)


def offset_of(samples: Sequence[ClockSample], start_ns: int) -> ClockOffset:
    """The best exchange before the start and the best after it. Raises ValueError when there is none before."""
    round_trip = attrgetter("round_trip_ns")
    best = min((sample for sample in samples if sample.at_ns <= start_ns), key=round_trip)
    return ClockOffset(
        best, min((sample for sample in samples if sample.at_ns > start_ns), key=round_trip, default=best)
    )


def converted(offset: ClockOffset, start_ns: int, line: bytes, *, closed: bool = False) -> bytes:
    """A line of a worker machine's part, with its Record on the master's clock.

    The Record moves as a whole, by the drift until it was sent: durations stay as that machine's clock measured them.
    So does the due instant of an open loop, which is the plan's own.
    """
    try:
        record = msgspec.json.decode(line, type=Record)
    except msgspec.DecodeError:
        return line
    at_ns = record.due_ns if record.sent_ns is None else record.sent_ns
    moved = shifted(record, offset.correction(start_ns, at_ns))
    if not closed:
        moved.due_ns = record.due_ns
    return msgspec.json.encode(moved) + b"\n"
