"""Arrivals: when requests are due. A seeded iterator of offsets in ns (open loop), or a Concurrency (closed loop).

    burst                    all at once                     constant:R        one every 1/R seconds
    burst:N/T                N every T                       poisson:R         exponential gaps of mean 1/R
    ramp:A..B/T              rate from A to B within T       gamma:R,cv=C      gamma gaps of mean 1/R
    steps:R1@T1,R2@T2,...    rate R1 for T1, then R2 ...     trace:FILE        as recorded
    closed:N[,think=S]       N clients, each waits for its answer and then thinks for S

Due instants are absolute: a pure function of (seed, i), or a sum kept in exact integers. Nothing is clipped and
nothing rescaled: the mean and the coefficient of variation are those of the name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice, repeat, takewhile
from pathlib import Path
from typing import TypeAlias

from workloads import draws
from workloads.syntax import (
    NS_PER_S,
    WorkloadError,
    duration_ns,
    nearest,
    number,
    options,
    path_and_options,
    rate,
    show,
    show_duration,
    whole,
)
from workloads.traces import Trace

CLIENTS_LIMIT = 100_000
BURST_LIMIT = 1_000_000
STEPS_LIMIT = 1_000
SPEED_LIMIT = 1_000_000
CV_LOW, CV_HIGH = Fraction(1, 100), 100
"""Below 0.01 gamma gaps are constant for every purpose; above 100 no run is long enough to show its mean."""

ROOT_PRECISION = 10**30
"""Square roots are taken in integers scaled by this, so that a ramp's instants are right to the nanosecond."""


@dataclass(frozen=True, slots=True)
class Burst:
    """All at once; or `size` requests at 0, at `every_ns`, at 2 `every_ns`, ..."""

    size: int | None = None
    every_ns: int = 0

    def due_ns(self, seed: int) -> Iterator[int]:  # noqa: ARG002 - all arrivals are called alike
        """Due offsets in ns, without end."""
        size = self.size
        if size is None:
            return repeat(0)
        return (index // size * self.every_ns for index in count())

    def __str__(self) -> str:
        return "burst" if self.size is None else f"burst:{self.size}/{show_duration(self.every_ns)}"


@dataclass(frozen=True, slots=True)
class Constant:
    """Request i is due at i / rate, rounded to the nanosecond: no error accumulates."""

    rate: Fraction

    def due_ns(self, seed: int) -> Iterator[int]:  # noqa: ARG002
        """Due offsets in ns, without end."""
        return _every(self.rate)

    def __str__(self) -> str:
        return f"constant:{show(self.rate)}"


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson process: independent exponential gaps of mean 1 / rate, the first of them before request 0."""

    rate: Fraction

    def due_ns(self, seed: int) -> Iterator[int]:
        """Due offsets in ns, without end."""
        draw = draws.stream(seed, "arrivals")
        mean_ns = NS_PER_S / self.rate
        return draws.sums(lambda: draws.exponential(draw), mean_ns)

    def __str__(self) -> str:
        return f"poisson:{show(self.rate)}"


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps of mean 1 / rate and coefficient of variation `cv`, the first before request 0.

    Shape 1 / cv**2. cv = 1 has the distribution of Poisson gaps; above 1 requests come in clumps.
    """

    rate: Fraction
    cv: Fraction

    def due_ns(self, seed: int) -> Iterator[int]:
        """Due offsets in ns, without end."""
        draw = draws.stream(seed, "arrivals")
        shape = float(1 / self.cv**2)
        return draws.sums(lambda: draws.gamma(draw, shape), NS_PER_S / self.rate * self.cv**2)

    def __str__(self) -> str:
        return f"gamma:{show(self.rate)},cv={show(self.cv)}"


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes linearly from `first` to `last` within `length_ns`; then it ends.

    Request i is due when the integral of the rate reaches i, evenly spaced and without chance.
    """

    first: Fraction
    last: Fraction
    length_ns: int

    def due_ns(self, seed: int) -> Iterator[int]:  # noqa: ARG002
        """Due offsets in ns; as many as the area under the rate.

        A t + D t**2 / 2 = i with D = (B - A) / T is solved as t = 2 i / (A + sqrt(A**2 + 2 D i)), the form that
        loses no digits when D is negative, over the common denominator `scale`.
        """
        slope = (self.last - self.first) * NS_PER_S / self.length_ns
        area = (self.first + self.last) / 2 * self.length_ns / NS_PER_S
        scale = math.lcm((self.first**2).denominator, slope.denominator)
        start, square, growth = (int(term * scale) for term in (self.first, self.first**2, 2 * slope))
        yield 0
        for index in range(1, math.ceil(area)):
            root = math.isqrt((square + index * growth) * scale * ROOT_PRECISION**2)
            yield nearest(2 * index * NS_PER_S * scale * ROOT_PRECISION, start * ROOT_PRECISION + root)

    def __str__(self) -> str:
        return f"ramp:{show(self.first)}..{show(self.last)}/{show_duration(self.length_ns)}"


@dataclass(frozen=True, slots=True)
class Steps:
    """One constant rate after another, each for its length; then it ends. A rate of 0 is a pause.

    Request i is due when the integral of the rate reaches i, as for Ramp.
    """

    steps: tuple[tuple[Fraction, int], ...]
    """(rate per second, length in ns) each."""

    def due_ns(self, seed: int) -> Iterator[int]:  # noqa: ARG002
        """Due offsets in ns; as many as the area under the rate."""
        begin_ns, area = 0, Fraction(0)
        for per_s, length_ns in self.steps:
            after = area + per_s * length_ns / NS_PER_S
            for index in range(math.ceil(area), math.ceil(after)):
                offset = (index - area) * NS_PER_S / per_s
                yield begin_ns + nearest(offset.numerator, offset.denominator)
            begin_ns, area = begin_ns + length_ns, after

    def __str__(self) -> str:
        return "steps:" + ",".join(f"{show(per_s)}@{show_duration(length_ns)}" for per_s, length_ns in self.steps)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Closed loop: each of `clients` sends, waits for its answer, thinks for `think_ns`, and sends again."""

    clients: int
    think_ns: int = 0

    def __str__(self) -> str:
        return f"closed:{self.clients}" + (f",think={show_duration(self.think_ns)}" if self.think_ns else "")


OpenLoop: TypeAlias = Burst | Constant | Poisson | Gamma | Ramp | Steps | Trace
Arrivals: TypeAlias = OpenLoop | Concurrency


def parse(text: str) -> Arrivals:
    """Read arrivals as in the table above; `str()` of the result is their canonical text.

    Raises WorkloadError that names the bad part; its hint is the right syntax.
    """
    kind, colon, rest = text.strip().partition(":")
    if kind not in KINDS:
        raise WorkloadError(f"arrivals {text!r}: there is no {kind!r}", f"choose {', '.join(KINDS)}")
    read, syntax = KINDS[kind]
    try:
        if bool(colon) != bool(rest) or not (rest or kind == "burst"):
            raise WorkloadError(f"nothing follows {kind!r}")
        return read(rest)
    except WorkloadError as error:
        raise WorkloadError(f"arrivals {text!r}: {error}", f"write {syntax}") from None


def due_instants(arrivals: OpenLoop, seed: int, *, n: int | None = None, until_ns: int | None = None) -> Iterator[int]:
    """The due offsets in ns that a run needs: at most `n`, and those before `until_ns`.

    Raises WorkloadError when nothing would end them.
    """
    instants = arrivals.due_ns(seed)
    endless = isinstance(arrivals, Burst | Constant | Poisson | Gamma)
    if n is None and endless and (until_ns is None or arrivals == Burst()):
        raise WorkloadError(f"arrivals {str(arrivals)!r} never end", "say how many requests, or for how long")
    if until_ns is not None:
        instants = takewhile(lambda due_ns: due_ns < until_ns, instants)
    return islice(instants, n)


def _every(per_s: Fraction) -> Iterator[int]:
    step, divisor = per_s.denominator * NS_PER_S, per_s.numerator
    return (nearest(index * step, divisor) for index in count())


def _burst(rest: str) -> Burst:
    if not rest:
        return Burst()
    size, slash, every = rest.partition("/")
    if not slash:
        raise WorkloadError("the time between bursts is missing")
    return Burst(whole(size, "burst size", 1, BURST_LIMIT), duration_ns(every, "time between bursts"))


def _gamma(rest: str) -> Gamma:
    first, *more = rest.split(",")
    found = options(more, ("cv",))
    if "cv" not in found:
        raise WorkloadError("the coefficient of variation is missing")
    return Gamma(rate(first), number(found["cv"], "cv", CV_LOW, CV_HIGH))


def _ramp(rest: str) -> Ramp:
    rates, slash, length = rest.rpartition("/")
    first, dots, last = rates.partition("..")
    if not (slash and dots):
        raise WorkloadError("two rates with .. between them and a length after / are needed")
    ramp = Ramp(rate(first, zero=True), rate(last, zero=True), duration_ns(length, "length"))
    if not ramp.first + ramp.last:
        raise WorkloadError("both rates are 0, so nothing would be sent")
    return ramp


def _steps(rest: str) -> Steps:
    parts = rest.split(",")
    if len(parts) > STEPS_LIMIT:
        raise WorkloadError(f"{len(parts)} steps are more than {STEPS_LIMIT}")
    steps = []
    for part in parts:
        per_s, at, length = part.partition("@")
        if not at:
            raise WorkloadError(f"step {part!r} has no @ between its rate and its length")
        steps.append((rate(per_s, zero=True), duration_ns(length, "length")))
    if not any(per_s for per_s, _ in steps):
        raise WorkloadError("every rate is 0, so nothing would be sent")
    return Steps(tuple(steps))


def _closed(rest: str) -> Concurrency:
    clients, *more = rest.split(",")
    think = options(more, ("think",)).get("think", "0s")
    return Concurrency(whole(clients, "number of clients", 1, CLIENTS_LIMIT), duration_ns(think, "think", zero=True))


def _trace(rest: str) -> Trace:
    path, found = path_and_options(rest, ("speed", "start", "limit"))
    return Trace(
        Path(path),
        number(found.get("speed", "1"), "speed", Fraction(1, SPEED_LIMIT), SPEED_LIMIT),
        duration_ns(found.get("start", "0s"), "start", zero=True),
        whole(found["limit"], "limit", 1, 10**9) if "limit" in found else None,
    )


KINDS: dict[str, tuple[Callable[[str], Arrivals], str]] = {
    "burst": (_burst, "burst or burst:N/T, such as burst:100/5s"),
    "constant": (lambda rest: Constant(rate(rest)), "constant:R, such as constant:20"),
    "poisson": (lambda rest: Poisson(rate(rest)), "poisson:R, such as poisson:20"),
    "gamma": (_gamma, "gamma:R,cv=C, such as gamma:20,cv=2"),
    "ramp": (_ramp, "ramp:A..B/T, such as ramp:1..50/60s"),
    "steps": (_steps, "steps:R1@T1,R2@T2,..., such as steps:5@30s,20@30s"),
    "closed": (_closed, "closed:N or closed:N,think=S, such as closed:64,think=2s"),
    "trace": (_trace, "trace:FILE[,speed=X][,start=T][,limit=N]"),
}
"""What parse reads, by first word: the reader of what follows the colon, and the syntax as errors quote it."""
