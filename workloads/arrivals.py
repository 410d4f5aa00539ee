"""Parses the text of arrival processes, such as `poisson:20`, and returns the due times of requests.

The due time of a request is the time in ns after the start of the run at which the request should be sent. In an open
loop, due times depend on the seed but not on responses. A closed loop has no due times, because each request is sent
when an earlier response ends.

Due times are computed without rounding errors that grow during a run. They are neither clipped nor rescaled, so the
gaps between them have the requested mean and coefficient of variation.

Each process is a subclass of `Arrivals`. The header of a run file stores its properties as `LoadFacts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, repeat, takewhile
from typing import Self

import msgspec

from loadgen.workloads import spec_syntax
from loadgen.workloads.arrival_facts import Arrivals, LoadFacts
from loadgen.workloads.arrival_processes import (
    ClosedLoopArrivals,
    Constant,
    Gamma,
    Poisson,
    Ramp,
    RecordedTimes,
    Steps,
    Trace,
)
from loadgen.workloads.session_files import SessionStarts
from loadgen.workloads.spec_syntax import WorkloadError

BURST_LIMIT = 1_000_000
INTERACTIVE = "interactive"
"""Name of the arrivals in run files of `loadgen ui`. A plan cannot use it."""


class Burst(Arrivals, frozen=True):
    """All requests at time 0, or `size` requests at each of the times 0, `every_ns`, 2 * `every_ns`, and so on."""

    size: int | None = None
    every_ns: int = 0

    SYNTAX = "burst or burst:N/T, such as burst:100/5s"

    @classmethod
    def parse(cls, rest: str) -> Self:
        if not rest:
            return cls()
        size, slash, every = rest.partition("/")
        if not slash:
            raise WorkloadError("the time between bursts is missing")
        return cls(
            spec_syntax.parse_integer(size, "burst size", 1, BURST_LIMIT),
            spec_syntax.parse_duration_ns(every, "time between bursts"),
        )

    def due_ns(self, _seed: int) -> Iterator[int]:
        size = self.size
        if size is None:
            return repeat(0)
        return (index // size * self.every_ns for index in count())

    @property
    def facts(self) -> LoadFacts:
        if self.size is None:
            return LoadFacts(text="all at once", burst=True)
        return LoadFacts(text=f"{self.size} at once every {spec_syntax.format_duration(self.every_ns)}")

    def __str__(self) -> str:
        return "burst" if self.size is None else f"burst:{self.size}/{spec_syntax.format_duration(self.every_ns)}"


ARRIVAL_PROCESSES: dict[str, type[Arrivals]] = {
    "burst": Burst,
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "ramp": Ramp,
    "steps": Steps,
    "closed": ClosedLoopArrivals,
    "at": RecordedTimes,
    "trace": Trace,
    "starts": SessionStarts,
}
"""Arrival processes that `parse` accepts, by the name before the colon."""


def parse(text: str) -> Arrivals:
    """Parse the text of an arrival process, such as `poisson:20`. `str()` of the result is the canonical text.

    Raises WorkloadError for invalid text. Its message names the invalid part, and its hint shows the syntax."""
    kind, colon, rest = text.strip().partition(":")
    if kind not in ARRIVAL_PROCESSES:
        raise WorkloadError(f"arrivals {text!r}: unknown process {kind!r}", f"choose {', '.join(ARRIVAL_PROCESSES)}")
    try:
        if bool(colon) != bool(rest) or not (rest or kind == "burst"):
            raise WorkloadError(f"no value follows {kind!r}")
        return ARRIVAL_PROCESSES[kind].parse(rest)
    except WorkloadError as error:
        raise WorkloadError(f"arrivals {text!r}: {error}", f"write {ARRIVAL_PROCESSES[kind].SYNTAX}") from None


def facts_from_text(text: str) -> LoadFacts:
    """Return the properties of an arrival process, given its text in a run file, such as `poisson:20`.

    If this version of loadgen cannot parse the text, for example because a newer version wrote it, most properties have
    default values.
    """
    try:
        result = parse(text).facts
    except WorkloadError:
        interactive = text == INTERACTIVE
        description = "by users that were added and removed by hand" if interactive else f"arriving as {text}"
        result = LoadFacts(text=description, open_loop=not interactive)
    return msgspec.structs.replace(result, kind=text.partition(":")[0])


def due_instants(arrivals: Arrivals, seed: int, *, n: int | None = None, until_ns: int | None = None) -> Iterator[int]:
    """Yield the due times of the requests of a run in ns after its start.

    At most `n` due times are yielded (None: no maximum), and all of them are before `until_ns` (None: no limit). Raises
    WorkloadError if neither these limits nor the arrival process end the run.
    """
    if not arrivals.ends(n, until_ns):
        raise WorkloadError(f"arrivals {str(arrivals)!r} never end", "set a number of requests or a duration")
    instants = arrivals.due_ns(seed)
    if until_ns is not None:
        instants = takewhile(lambda due_ns: due_ns < until_ns, instants)
    return islice(instants, n)
