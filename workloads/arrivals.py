"""Parses arrivals, and yields the times at which requests are due.

An open loop has due times, a seeded iterator of offsets in ns. In a closed loop requests follow responses. Due times
are absolute: a pure function of seed and index, or an exact integer sum. They are neither clipped nor rescaled, so that
their mean and coefficient of variation are the requested ones.

Each process is a class that implements `Arrivals`. Its facts are stored as data in a run's header.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice, repeat, takewhile
from typing import Self

import msgspec

from loadgen.workloads import spec_syntax
from loadgen.workloads.arrival_facts import Arrivals, LoadFacts
from loadgen.workloads.arrival_processes import ClosedLoopArrivals, Constant, Gamma, Poisson, Ramp, Steps, Trace
from loadgen.workloads.spec_syntax import WorkloadError

BURST_LIMIT = 1_000_000
INTERACTIVE = "interactive"
"""Arrivals in the header of `loadgen ui`. A plan cannot use this name."""


class Burst(Arrivals, frozen=True):
    """All requests at once; or `size` requests at 0, at `every_ns`, at 2 `every_ns` and so on."""

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
    "trace": Trace,
}
"""Arrival processes that `parse` accepts, by first word."""


def parse(text: str) -> Arrivals:
    """Parse arrivals. `str()` of the result is the canonical text.

    Raises WorkloadError, which names the invalid part and has the syntax as its hint."""
    kind, colon, rest = text.strip().partition(":")
    if kind not in ARRIVAL_PROCESSES:
        raise WorkloadError(f"arrivals {text!r}: there is no {kind!r}", f"choose {', '.join(ARRIVAL_PROCESSES)}")
    try:
        if bool(colon) != bool(rest) or not (rest or kind == "burst"):
            raise WorkloadError(f"nothing follows {kind!r}")
        return ARRIVAL_PROCESSES[kind].parse(rest)
    except WorkloadError as error:
        raise WorkloadError(f"arrivals {text!r}: {error}", f"write {ARRIVAL_PROCESSES[kind].SYNTAX}") from None


def facts_from_text(text: str) -> LoadFacts:
    """Return the facts of canonical arrivals. An unknown process, as of a newer version, gets default facts."""
    try:
        result = parse(text).facts
    except WorkloadError:
        interactive = text == INTERACTIVE
        description = "by users that came and went by hand" if interactive else f"arriving as {text}"
        result = LoadFacts(text=description, open_loop=not interactive)
    return msgspec.structs.replace(result, kind=text.partition(":")[0])


def due_instants(arrivals: Arrivals, seed: int, *, n: int | None = None, until_ns: int | None = None) -> Iterator[int]:
    """Yield the due times in ns of a run: at most `n`, and only those before `until_ns`.

    Raises WorkloadError if the arrivals would never end."""
    if not arrivals.ends(n, until_ns):
        raise WorkloadError(f"arrivals {str(arrivals)!r} never end", "set a number of requests or a duration")
    instants = arrivals.due_ns(seed)
    if until_ns is not None:
        instants = takewhile(lambda due_ns: due_ns < until_ns, instants)
    return islice(instants, n)
