"""Decides during a run whether the server keeps up or its queue grows. The run has a constant mean request rate.

Every run begins with an empty server, which fills with requests. The number of requests in flight therefore grows at
first, even if the server keeps up. The test uses three facts to tell a filling server from a growing queue:

- Filling slows down. The growth rate of a filling server falls by half within a few response times, while a queue grows
  at a constant rate.
- A server that keeps up fills to fewer requests in flight than a closed loop needs for the full throughput. A growing
  queue exceeds this number.
- Arrival times and the work per request are random, so the number of requests in flight can also grow by chance. The
  test measures growth relative to the request rate: 0.1 means one more request in flight per ten requests sent. If n
  requests arrive in a window, the growth in this window has the standard deviation `variation / sqrt(n)` by chance
  alone. `variation` is the coefficient of variation of the arriving work.

The thresholds of the test were chosen with simulated servers at 80 to 150% of their capacity. `benchmarks.sweep` checks
them.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import numpy as np

from loadgen.analysis.frame import Floats

MIN_ENDED = 20
"""Minimum number of ended requests before a verdict."""
MIN_S = 2.0
"""Minimum duration of a run before a verdict, in s."""
CHECK_EVERY_S = 0.25
"""Time between two checks, in s."""
STEADY_RESPONSES = 5.0
"""Minimum duration of a run in response times before the server can be said to keep up."""
FULL_RESPONSES = 2.0
"""Minimum duration of a run in current response times before the server can be said to keep up."""
GROWS_RESPONSES = 8.0
"""Minimum duration of a run in response times before a queue can be said to grow."""
STEADY_GROWTH = 0.06
"""Maximum growth at which the server keeps up, relative to the rate. The growth is that of the requests in flight."""
QUEUE_GROWTH = 0.12
"""Minimum growth of a queue, relative to the rate, while the server still fills. A server near its capacity that keeps
up grows more slowly by then."""
LONG_RESPONSES = 14.0
"""Duration of a run in response times after which a server has filled, so that a slower growth is that of a queue."""
LONG_GROWTH = 0.04
"""Minimum growth of a queue after LONG_RESPONSES response times, relative to the rate."""
LONG_BEYOND = 2.0
"""Factor by which the requests in flight must exceed those of the saturated closed loop after LONG_RESPONSES."""
LASTING = 0.5
"""Minimum growth in the last quarter of the run, relative to that in the quarter before it."""
BEYOND_FULL = 1.5
"""Factor by which the requests in flight must exceed those of the saturated closed loop."""
UNLIKELY_GROWTH = 0.14
"""Growth, relative to the rate, that must be ruled out before the server is said to keep up. Chance may hide growth."""
DOUBTS = 2.0
"""Number of standard deviations by which a growth must differ from its limit."""
UNCLEAR = {"steady": 0.15, "grows": 0.85, "": 0.5}
"""Probability that the load is above the capacity, by the tendency of a run that ended without a verdict."""
CLEAR = {"steady": 0.01, "grows": 0.99}
"""Probability that the load is above the capacity, by the verdict."""

Verdict = Literal["", "steady", "grows"]


class FlightSample(NamedTuple):
    """The number of requests that were in flight at one instant of a run."""

    at_s: float
    """Time since the start of the run, in s."""
    in_flight: int


class Growth(NamedTuple):
    """Growth of the number of requests in flight, as a fraction of the request rate.

    For example, 0.1 means that the number of requests in flight grows by one for every ten requests that are sent.
    """

    half: float
    """Growth over the second half of the run so far."""
    third_quarter: float
    last_quarter: float
    deviation: float
    """Standard deviation of `half` that chance alone causes."""


class GrowthTest:
    """A sequential test of whether the number of requests in flight keeps growing in a run at a constant mean rate.

    The arguments are:

    - `rate`: request rate of the run, in requests per second.
    - `response_s`: response time in seconds near the full throughput.
    - `full_in_flight`: number of requests in flight at which the server reaches the full throughput.
    - `variation`: coefficient of variation of the arriving work, see `loadgen.studies.sweep.measure.work_variation`.

    `response_s` and `full_in_flight` come from a pilot, which measured the server with closed loops before the run.
    """

    def __init__(self, rate: float, *, response_s: float, full_in_flight: float, variation: float) -> None:
        self._rate = rate
        self._response_s = response_s
        self._full_in_flight = full_in_flight
        self._variation = variation
        self._samples: deque[FlightSample] = deque()
        self._checked_s = 0.0
        self._tendency: Verdict = ""
        self.verdict: Verdict = ""

    def add(self, at_s: float, sent: int, ended: int) -> Verdict:
        """Add an observation that was made `at_s` seconds after the start of the run, and return the verdict so far.

        `sent` is the number of requests sent until then, and `ended` is the number of those that ended. The verdict is
        `steady`, `grows`, or empty if the test has not decided yet.
        """
        self._samples.append(FlightSample(at_s, sent - ended))
        while self._samples[0].at_s < at_s / 2:
            self._samples.popleft()
        if self.verdict or at_s < self._checked_s + CHECK_EVERY_S or at_s < MIN_S or ended < MIN_ENDED:
            return self.verdict
        self._checked_s = at_s
        growth = self._growth(at_s)
        self._tendency = self._direction(growth)
        if self._is_steady(at_s, growth):
            self.verdict = "steady"
        elif self._is_growing(at_s, growth):
            self.verdict = "grows"
        return self.verdict

    @property
    def chance_over(self) -> float:
        """Return the probability that the request rate of the run is above the capacity of the server."""
        return CLEAR[self.verdict] if self.verdict else UNCLEAR[self._tendency]

    def _growth(self, at_s: float) -> Growth:
        times = np.array([sample.at_s for sample in self._samples])
        in_flight = np.array([sample.in_flight for sample in self._samples], float)
        late = times >= 0.75 * at_s
        deviation = self._variation / (self._rate * at_s / 2) ** 0.5
        return Growth(
            half=_slope(times, in_flight) / self._rate,
            third_quarter=_slope(times[~late], in_flight[~late]) / self._rate,
            last_quarter=_slope(times[late], in_flight[late]) / self._rate,
            deviation=deviation,
        )

    def _direction(self, growth: Growth) -> Verdict:
        """Return what the latest growth of the number of requests in flight suggests.

        The result is `steady`, `grows`, or an empty string if the growth suggests neither. It is not a verdict yet,
        because the growth may be due to chance.
        """
        if growth.half < STEADY_GROWTH and growth.last_quarter < STEADY_GROWTH:
            return "steady"
        beyond = self._samples[-1].in_flight > self._full_in_flight
        return "grows" if beyond and growth.last_quarter > QUEUE_GROWTH else ""

    def _is_steady(self, at_s: float, growth: Growth) -> bool:
        current_response_s = self._samples[-1].in_flight / self._rate  # Little's law
        if at_s < max(STEADY_RESPONSES * self._response_s, FULL_RESPONSES * current_response_s):
            return False
        if self._samples[-1].in_flight > BEYOND_FULL * self._full_in_flight:
            return False
        unlikely = growth.half + DOUBTS * growth.deviation < UNLIKELY_GROWTH
        return unlikely and growth.half < STEADY_GROWTH and growth.last_quarter < STEADY_GROWTH

    def _is_growing(self, at_s: float, growth: Growth) -> bool:
        if at_s < GROWS_RESPONSES * self._response_s:
            return False
        filled = at_s >= LONG_RESPONSES * self._response_s
        beyond = self._samples[-1].in_flight / self._full_in_flight
        for applies, least_growth, least_beyond in (
            (True, QUEUE_GROWTH, BEYOND_FULL),
            (filled, LONG_GROWTH, LONG_BEYOND),
        ):
            lasting = growth.last_quarter > max(least_growth, LASTING * growth.third_quarter)
            clear = growth.half - DOUBTS * growth.deviation > least_growth
            if applies and lasting and clear and beyond > least_beyond:
                return True
        return False


def _slope(times: Floats, values: Floats) -> float:
    """Return the slope of the least-squares line through the points (time, value), or 0 for fewer than two points."""
    if len(times) < 2:
        return 0.0
    centred = times - times.mean()
    square = float(centred @ centred)
    return float(centred @ values) / square if square else 0.0
