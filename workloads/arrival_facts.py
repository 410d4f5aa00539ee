"""Defines the interface of arrival processes, and the facts about arrivals that a run's header stores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import msgspec


class LoadFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The properties of arrivals as data, so that their text is not parsed again. Older runs get them when read."""

    kind: str = ""
    """First word of the canonical text, a key of loadgen.workloads.arrivals.ARRIVAL_PROCESSES; or `interactive`."""
    text: str = ""
    """Description, such as `all at once` or `20 per second (Poisson)`."""
    open_loop: bool = True
    """True if due times are independent of responses."""
    burst: bool = False
    """True if all requests are due at the same time."""
    finite: bool = False
    """True if the arrivals end by themselves, as a ramp or a trace does."""
    steady: bool = False
    """True if the rate or the number of clients is constant, so that the run can reach a steady state."""
    rate_per_s: float | None = None
    """Requested rate in requests per second. None: there is no single rate."""
    cv: float | None = None
    """Requested coefficient of variation of the gaps between arrivals."""
    law: str = ""
    """Distribution of the gaps: `gamma`, with the rate and variation above. Empty: the gaps are not random."""
    clients: int = 0
    """Number of clients of a closed loop."""
    sessions: bool = False
    """True if arrivals, clients and n count sessions instead of requests."""
    turns: int = 1
    """Turns per session, if the plan states them."""
    recorded: bool = False
    """True if the arrivals define the lengths of their requests, as a trace does."""


class Arrivals(msgspec.Struct, frozen=True):
    """An arrival process. `str()` returns its canonical text."""

    SYNTAX: ClassVar[str]
    """Syntax of the text, for error messages."""

    @classmethod
    @abstractmethod
    def parse(cls, rest: str) -> Self:
        """Parse the text after the colon; "" if there is no colon. Raises WorkloadError."""

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Yield the due times in ns from the start, in order. A closed loop, driven by responses, yields none."""
        return iter(())

    @property
    @abstractmethod
    def facts(self) -> LoadFacts:
        """Properties of the process."""

    def ends(self, n: int | None, duration: float | None) -> bool:
        """Return whether the arrivals end: by a number of requests, by a duration in seconds, or by themselves."""
        return n is not None or self.facts.finite or (duration is not None and not self.facts.burst)
