"""Arrivals: when requests are due. A seeded iterator of offsets in ns (open loop), or a Concurrency (closed loop).

Due instants are absolute: a pure function of (seed, i), or a sum kept in exact integers. Nothing is clipped and
nothing rescaled: the mean and the coefficient of variation are those of the name.

One class per process answers every question about it; a run's header keeps what it says of itself, as data.
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
"""What stands for arrivals in the header of `loadgen ui`: no plan can name it."""


class Burst(Arrivals, frozen=True):
    """All at once; or `size` requests at 0, at `every_ns`, at 2 `every_ns`, ..."""

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
"""What parse reads, by first word."""


def parse(text: str) -> Arrivals:
    """Read arrivals as their SYNTAX says; `str()` of the result is their canonical text. Raises WorkloadError that
    names the bad part; its hint is the right spec_syntax."""
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
    """The facts of canonical arrivals. A process that is not known here, as of a newer version, promises nothing."""
    try:
        result = parse(text).facts
    except WorkloadError:
        interactive = text == INTERACTIVE
        words = "by users that came and went by hand" if interactive else f"arriving as {text}"
        result = LoadFacts(text=words, open_loop=not interactive)
    return msgspec.structs.replace(result, kind=text.partition(":")[0])


def due_instants(arrivals: Arrivals, seed: int, *, n: int | None = None, until_ns: int | None = None) -> Iterator[int]:
    """The due offsets in ns that a run needs: at most `n`, and those before `until_ns`. Raises WorkloadError when
    nothing would end them."""
    if not arrivals.ends(n, until_ns):
        raise WorkloadError(f"arrivals {str(arrivals)!r} never end", "say how many requests, or for how long")
    instants = arrivals.due_ns(seed)
    if until_ns is not None:
        instants = takewhile(lambda due_ns: due_ns < until_ns, instants)
    return islice(instants, n)
