"""Arrival processes except bursts: constant and random gaps, changing rates, closed loops and traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from loadgen.workloads import random_streams, raw_requests, spec_syntax, traces
from loadgen.workloads.arrival_facts import Arrivals, LoadFacts
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import NS_PER_S, WorkloadError

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

CLIENTS_LIMIT = 100_000
STEPS_LIMIT = 1_000
SPEED_LIMIT = 1_000_000
ROOT_PRECISION = 10**30
"""Scale of integer square roots, large enough for a ramp's due times to be exact to the nanosecond."""
REPLAY_LIMIT_NS = 10 * 366 * 86_400 * NS_PER_S


class FixedRate(Arrivals, frozen=True):
    """Base class of arrival processes with a constant mean rate in requests per second."""

    rate: Fraction

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(spec_syntax.parse_rate(rest))

    def _steady_facts(self, manner: str, **other_facts: Any) -> LoadFacts:
        text = f"{spec_syntax.format_number(self.rate)} per second{manner}"
        return LoadFacts(text=text, steady=True, rate_per_s=float(self.rate), **other_facts)

    def __str__(self) -> str:
        return f"{self.SYNTAX.partition(':')[0]}:{spec_syntax.format_number(self.rate)}"


class Constant(FixedRate, frozen=True):
    """Evenly spaced arrivals: request i is due at i / rate seconds.

    Each due time is rounded to the nanosecond separately, so rounding errors do not accumulate."""

    SYNTAX = "constant:R, such as constant:20"

    @property
    def facts(self) -> LoadFacts:
        return self._steady_facts(", evenly", cv=0.0)

    def due_ns(self, _seed: int) -> Iterator[int]:
        step = self.rate.denominator * NS_PER_S
        divisor = self.rate.numerator
        return (spec_syntax.round_ratio(index * step, divisor) for index in count())


class Poisson(FixedRate, frozen=True):
    """A Poisson process: the gaps between requests are independent and exponential with mean 1 / rate.

    Request 0 is due after the first gap, not at time 0."""

    SYNTAX = "poisson:R, such as poisson:20"

    @property
    def facts(self) -> LoadFacts:
        # The exponential distribution is the gamma distribution with a coefficient of variation of 1.
        return self._steady_facts(" (Poisson)", cv=1.0, law="gamma")

    def due_ns(self, seed: int) -> Iterator[int]:
        draw = random_streams.random_stream(seed, "arrivals")
        return random_streams.running_sums(lambda: random_streams.exponential(draw), NS_PER_S / self.rate)


class Gamma(FixedRate, frozen=True):
    """Independent gamma-distributed gaps with mean 1 / rate and coefficient of variation `cv`.

    The shape parameter is `1 / cv**2`. A `cv` of 1 gives a Poisson process. With a larger `cv`, requests arrive in
    clusters. Request 0 is due after the first gap, not at time 0."""

    cv: Fraction

    SYNTAX = "gamma:R,cv=C, such as gamma:20,cv=2"

    @classmethod
    def parse(cls, rest: str) -> Self:
        first, *more = rest.split(",")
        result = spec_syntax.parse_options(more, ("cv",))
        if "cv" not in result:
            raise WorkloadError("cv= (the coefficient of variation) is missing")
        return cls(
            spec_syntax.parse_rate(first),
            spec_syntax.parse_number(result["cv"], "cv", spec_syntax.CV_LOW, spec_syntax.CV_HIGH),
        )

    def due_ns(self, seed: int) -> Iterator[int]:
        draw = random_streams.random_stream(seed, "arrivals")
        shape = float(1 / self.cv**2)
        return random_streams.running_sums(lambda: random_streams.gamma(draw, shape), NS_PER_S / self.rate * self.cv**2)

    @property
    def facts(self) -> LoadFacts:
        return self._steady_facts(
            f" (gamma gaps, CV {spec_syntax.format_number(self.cv)})", cv=float(self.cv), law="gamma"
        )

    def __str__(self) -> str:
        return f"gamma:{spec_syntax.format_number(self.rate)},cv={spec_syntax.format_number(self.cv)}"


class Ramp(Arrivals, frozen=True):
    """Arrivals whose rate changes linearly from `first` to `last` within `length_ns`. The arrivals end after this time.

    Request i, counted from 0, is due when the integral of the rate over time reaches i. The due times do not depend on
    the seed.
    """

    first: Fraction
    last: Fraction
    length_ns: int

    SYNTAX = "ramp:A..B/T, such as ramp:1..50/60s"

    @classmethod
    def parse(cls, rest: str) -> Self:
        rates, slash, duration = rest.rpartition("/")
        first, dots, last = rates.partition("..")
        if not (slash and dots):
            raise WorkloadError("write two rates with .. between them, and a duration after /")
        ramp = cls(
            spec_syntax.parse_rate(first, zero=True),
            spec_syntax.parse_rate(last, zero=True),
            spec_syntax.parse_duration_ns(duration, "duration"),
        )
        if not ramp.first + ramp.last:
            raise WorkloadError("both rates are 0, so nothing would be sent")
        return ramp

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Yield the due time of each request in ns. The number of requests is the integral of the rate, rounded up."""
        # A t + D t**2 / 2 = i with D = (B - A) / T is solved as t = 2 i / (A + sqrt(A**2 + 2 D i)). This form loses no
        # digits if D is negative. All terms have the common denominator `scale`.
        slope = (self.last - self.first) * NS_PER_S / self.length_ns
        area = (self.first + self.last) / 2 * self.length_ns / NS_PER_S
        scale = math.lcm((self.first**2).denominator, slope.denominator)
        start, square, growth = (int(term * scale) for term in (self.first, self.first**2, 2 * slope))
        yield 0
        for index in range(1, math.ceil(area)):
            root = math.isqrt((square + index * growth) * scale * ROOT_PRECISION**2)
            yield spec_syntax.round_ratio(2 * index * NS_PER_S * scale * ROOT_PRECISION, start * ROOT_PRECISION + root)

    @property
    def facts(self) -> LoadFacts:
        rates = f"{spec_syntax.format_number(self.first)} to {spec_syntax.format_number(self.last)} per second"
        return LoadFacts(text=f"{rates} within {spec_syntax.format_duration(self.length_ns)}", finite=True)

    def __str__(self) -> str:
        rates = f"{spec_syntax.format_number(self.first)}..{spec_syntax.format_number(self.last)}"
        return f"ramp:{rates}/{spec_syntax.format_duration(self.length_ns)}"


class Steps(Arrivals, frozen=True):
    """Arrivals with a sequence of constant rates, such as 5/s for 30 s and then 20/s for 30 s.

    While the rate is 0, no requests are sent. Request i, counted from 0, is due when the integral of the rate over time
    reaches i. The due times do not depend on the seed.
    """

    steps: tuple[tuple[Fraction, int], ...]
    """Rate per second and duration in ns of each step."""

    SYNTAX = "steps:R1@T1,R2@T2,..., such as steps:5@30s,20@30s"

    @classmethod
    def parse(cls, rest: str) -> Self:
        parts = rest.split(",")
        if len(parts) > STEPS_LIMIT:
            raise WorkloadError(f"{len(parts)} steps are more than {STEPS_LIMIT}")
        steps = []
        for part in parts:
            per_s, separator, duration = part.partition("@")
            if not separator:
                raise WorkloadError(f"step {part!r} has no @ between its rate and its duration")
            steps.append(
                (spec_syntax.parse_rate(per_s, zero=True), spec_syntax.parse_duration_ns(duration, "duration"))
            )
        if not any(per_s for per_s, _ in steps):
            raise WorkloadError("every rate is 0, so nothing would be sent")
        return cls(tuple(steps))

    def due_ns(self, _seed: int) -> Iterator[int]:
        begin_ns = 0
        area = Fraction(0)
        for per_s, length_ns in self.steps:
            area_after = area + per_s * length_ns / NS_PER_S
            for index in range(math.ceil(area), math.ceil(area_after)):
                offset = (index - area) * NS_PER_S / per_s
                yield begin_ns + spec_syntax.round_ratio(offset.numerator, offset.denominator)
            begin_ns += length_ns
            area = area_after

    @property
    def facts(self) -> LoadFacts:
        steps = (
            f"{spec_syntax.format_number(per_s)} per second for {spec_syntax.format_duration(length_ns)}"
            for per_s, length_ns in self.steps
        )
        return LoadFacts(text=", ".join(steps), finite=True)

    def __str__(self) -> str:
        return "steps:" + ",".join(
            f"{spec_syntax.format_number(per_s)}@{spec_syntax.format_duration(length_ns)}"
            for per_s, length_ns in self.steps
        )


class ClosedLoopArrivals(Arrivals, frozen=True):
    """A closed loop with `clients` concurrent clients.

    Each client sends a request, waits for the response, pauses for `think_ns` nanoseconds and sends the next request.
    """

    clients: int
    think_ns: int = 0

    SYNTAX = "closed:N or closed:N,think=S, such as closed:64,think=2s"

    @classmethod
    def parse(cls, rest: str) -> Self:
        clients, *more = rest.split(",")
        think = spec_syntax.parse_options(more, ("think",)).get("think", "0s")
        return cls(
            spec_syntax.parse_integer(clients, "number of clients", 1, CLIENTS_LIMIT),
            spec_syntax.parse_duration_ns(think, "think", zero=True),
        )

    @property
    def facts(self) -> LoadFacts:
        waits = "clients that wait for each response" if self.clients != 1 else "client that waits for each response"
        think = f" and think for {spec_syntax.format_duration(self.think_ns)}" if self.think_ns else ""
        text = f"from {self.clients:,} {waits}{think}"
        return LoadFacts(text=text, open_loop=False, steady=True, clients=self.clients)

    def __str__(self) -> str:
        return f"closed:{self.clients}" + (
            f",think={spec_syntax.format_duration(self.think_ns)}" if self.think_ns else ""
        )


class Trace(Arrivals, frozen=True):
    """Arrival times and token counts recorded in a file, replayed at `speed` times the recorded speed."""

    path: Path
    speed: Fraction = Fraction(1)
    start_ns: int = 0
    """Offset in ns from the trace's first request at which the replay starts. Earlier requests are left out."""
    limit: int | None = None  # Maximum number of requests
    unit: str | None = None
    """Unit of the file's timestamps, a key of traces.UNITS_NS. None: the unit of the file's layout, if plausible."""
    block_tokens: int | None = None
    """Tokens per hash id. None: the number that the layout of the file defines."""

    SYNTAX = "trace:FILE[,speed=X][,start=T][,limit=N][,unit=s|ms|us|ns][,block=N]"

    @classmethod
    def parse(cls, rest: str) -> Self:
        path, result = spec_syntax.parse_path_and_options(rest, ("speed", "start", "limit", "unit", "block"))
        unit = result.get("unit")
        if unit is not None and unit not in traces.UNITS_NS:
            raise WorkloadError(f"unit {unit!r} is not one of {', '.join(traces.UNITS_NS)}")
        return cls(
            Path(path),
            spec_syntax.parse_number(result.get("speed", "1"), "speed", Fraction(1, SPEED_LIMIT), SPEED_LIMIT),
            spec_syntax.parse_duration_ns(result.get("start", "0s"), "start", zero=True),
            spec_syntax.parse_integer(result["limit"], "limit", 1, 10**9) if "limit" in result else None,
            unit,
            spec_syntax.parse_integer(result["block"], "block", 1, traces.BLOCK_TOKENS_MAX)
            if "block" in result
            else None,
        )

    def entries(self) -> Iterator[traces.Entry]:
        """Yield the recorded requests to replay, at most `limit` of them.

        Rows without input or output tokens are skipped. Raises WorkloadError if the trace is invalid (see
        `traces.trace`), or if there is no request to replay."""
        entry = None
        for entry in islice((row for row in self._rows() if row.has_tokens), self.limit):
            yield entry
        if entry is None:
            raise WorkloadError(
                f"{self}: no request to replay", "every row lacks tokens, or start= is after the end of the trace"
            )

    def _rows(self) -> Iterator[traces.Entry]:
        """Return the rows of the trace that are not earlier than `start_ns`.

        The result includes rows without tokens, which cannot be replayed.
        """
        rows = traces.trace(self.path, self.unit, self.block_tokens)
        return (row for row in rows if row.at_ns >= self.start_ns)

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield one `Request` per recorded request, with the recorded numbers of input and output tokens.

        A trace may contain a hash id for each block of tokens in a prompt. Blocks with equal hash ids get equal tokens.
        If two recorded prompts began with the same hash ids, the generated prompts therefore share a prefix.
        """
        for number, entry in enumerate(self.entries()):
            shared = [(-1 - block, entry.block_tokens) for block in entry.blocks]
            prompt = prompts.prompt(number, entry.input_tokens, shared)
            yield Request(number, prompt, entry.input_tokens, entry.output_tokens)

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Yield the due time of each request in ns after the start of the replay, rounded to the nanosecond.

        Raises WorkloadError if the trace is invalid (see `entries`), or if the replay takes longer than
        REPLAY_LIMIT_NS."""
        for entry in self.entries():
            due_ns = spec_syntax.round_ratio(
                (entry.at_ns - self.start_ns) * self.speed.denominator, self.speed.numerator
            )
            if due_ns > REPLAY_LIMIT_NS:
                raise WorkloadError(f"{self}: its replay takes more than ten years", "replay it faster, with speed=")
            yield due_ns

    def describe(self, due_ns: Sequence[int], *, whole: bool = True) -> str:
        """Return a sentence about the replay of this trace: number of requests, duration, rate, and unit of the
        timestamps.

        The sentence is shown before the run starts, so that users notice a wrong unit. `due_ns` contains the due times
        of all requests to replay. `whole` is False if a setting of the plan, such as a duration, may end the replay
        before the end of the trace. The setting `limit` of this trace has no effect on `whole`.
        """
        trace_format = traces.format_of(self.path, self.unit, self.block_tokens)
        count = len(due_ns)
        span_ns = due_ns[-1] - due_ns[0] if due_ns else 0
        sentence = f"Trace {self.path.name}: {count:,} {'request' if count == 1 else 'requests'}"
        if span_ns:
            sentence += f" over {_span_text(span_ns)} ({traces.rate_text((count - 1) * NS_PER_S / span_ns)})"
        elif count > 1:
            sentence += " at one instant"
        if self.speed != 1:
            sentence += f", replayed at {spec_syntax.format_number(self.speed)} times the recorded speed"
        left_out = self._left_out(count, whole=whole and self.limit is None)
        if left_out:
            sentence += f", {left_out:,} {'row' if left_out == 1 else 'rows'} without tokens left out"
        return f"{sentence}; {trace_format.layout} layout, {trace_format.text}"

    def _left_out(self, count: int, *, whole: bool) -> int:
        """Return the number of rows that the replay skips, because they have no input or output tokens.

        `count` is the number of replayed requests. If `whole` is True, all rows from `start_ns` on are counted. If
        `whole` is False, rows after the last replayed request are not counted.
        """
        left_out = seen = 0
        for row in self._rows():
            left_out += not row.has_tokens
            seen += row.has_tokens
            if seen == count and not whole:
                break
        return left_out

    @property
    def facts(self) -> LoadFacts:
        text = ",".join([f"as recorded in {self.path.name}", *self._options()])
        return LoadFacts(text=text, finite=True, recorded=True)

    def _options(self) -> list[str]:
        extra = [f"speed={spec_syntax.format_number(self.speed)}"] if self.speed != 1 else []
        extra += [f"start={spec_syntax.format_duration(self.start_ns)}"] if self.start_ns else []
        extra += [f"limit={self.limit}"] if self.limit is not None else []
        extra += [f"unit={self.unit}"] if self.unit is not None else []
        return extra + ([f"block={self.block_tokens}"] if self.block_tokens is not None else [])

    def __str__(self) -> str:
        return ",".join([f"trace:{self.path}", *self._options()])


def _span_text(span_ns: int) -> str:
    """Return a duration in a readable unit, such as `59 min`."""
    for unit_ns, name in ((86_400 * NS_PER_S, "days"), (3_600 * NS_PER_S, "h"), (60 * NS_PER_S, "min")):
        if span_ns >= 2 * unit_ns:
            return f"{span_ns / unit_ns:.3g} {name}"
    if span_ns >= NS_PER_S:
        return f"{span_ns / NS_PER_S:.3g} s"
    return f"{span_ns / 1_000_000:.3g} ms"


class RecordedTimes(Arrivals, frozen=True):
    """The arrival times in a file for the workload `requests:FILE` (the field `at` of its lines).

    Each time belongs to a request. If `sessions` is True, each time belongs to the first request of a session.
    """

    path: Path
    sessions: bool = False

    SYNTAX = 'at:FILE[,sessions=yes], a file whose lines have a time in seconds: {"at": 1.25, ...}'

    @classmethod
    def parse(cls, rest: str) -> Self:
        source = raw_requests.raw_requests(rest)
        return cls(source.path, source.sessions)

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Yield the time of each request or session, in ns after the time of the first line in the file.

        Raises WorkloadError for a file without times.
        """
        source = raw_requests.RawRequests(self.path, self.sessions)
        groups = source.grouped() if self.sessions else ([entry] for entry in source.entries())
        for group in groups:
            if group[0].at_ns is None:
                raise WorkloadError(f'{self.path}: its requests have no "at"', "leave --arrivals out")
            yield group[0].at_ns

    @property
    def facts(self) -> LoadFacts:
        return LoadFacts(text="at the times in the file", finite=True)

    def __str__(self) -> str:
        return f"at:{self.path}" + (",sessions=yes" if self.sessions else "")
