"""The bridge from the kernel's realtime stamps to the monotonic clock."""

from loadgen.engine.clock import ClockPairs


class FakeClocks:
    """A monotonic clock moved by the test, and a realtime clock at a settable offset from it."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000
        self.ahead = 700_000_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now

    def realtime_ns(self) -> int:
        return self.now + self.ahead


def test_stamps_convert_exactly_while_the_clocks_agree() -> None:
    """With a constant offset a stamp maps to the instant it was taken at, to the nanosecond."""
    clocks = FakeClocks()
    pairs = ClockPairs(clocks.realtime_ns, clocks.monotonic_ns)
    stamp = clocks.realtime_ns() + 123_456_789
    assert pairs.to_monotonic([stamp]) == [clocks.now + 123_456_789]
    assert pairs.disagreement_ns == 0


def test_a_slewed_clock_is_interpolated_between_readings() -> None:
    """The realtime clock gains 500 us in a second: half-way through, half of that is taken off."""
    clocks = FakeClocks()
    pairs = ClockPairs(clocks.realtime_ns, clocks.monotonic_ns)
    begin, stamp = clocks.now, clocks.realtime_ns() + 500_250_000
    clocks.now += 1_000_000_000
    clocks.ahead += 500_000
    pairs.take()
    assert pairs.disagreement_ns == 500_000
    (instant,) = pairs.to_monotonic([stamp])
    assert abs(instant - (begin + 500_000_000)) < 300


def test_stamps_outside_the_readings_use_the_nearest() -> None:
    """Before the first and after the last pair there is nothing to interpolate with."""
    clocks = FakeClocks()
    pairs = ClockPairs(clocks.realtime_ns, clocks.monotonic_ns)
    early = clocks.realtime_ns() - 1_000
    clocks.now += 1_000_000_000
    clocks.ahead += 5_000_000
    pairs.take()
    late = clocks.realtime_ns() + 1_000
    assert pairs.to_monotonic([early, late]) == [1_000_000_000_000 - 1_000, clocks.now + 1_000]


def test_the_tightest_of_several_readings_counts() -> None:
    """A reading that was interrupted between the two clocks is passed over for a tighter one."""
    ticks = iter([0, 900, 1000, 1010, 1020, 1500, 1600, 2200, 2300, 2900])
    reals = iter([450, 1005, 1300, 1900, 2600])
    pairs = ClockPairs(lambda: next(reals), lambda: next(ticks))
    assert pairs.to_monotonic([1005]) == [1005]
