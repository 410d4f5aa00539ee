"""What arrivals are: the questions that every process answers, and what a run's header keeps of the answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import msgspec


class LoadFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What the arrivals are, as data: nobody reads their text again. Of older runs it is filled in as they are read."""

    kind: str = ""
    """First word of their canonical text, a key of loadgen.workloads.arrivals.ARRIVAL_PROCESSES; or `interactive`."""
    text: str = ""
    """How they describe themselves, such as `all at once` or `20 per second (Poisson)`."""
    open_loop: bool = True
    """Whether instants were due that no answer moved."""
    burst: bool = False
    """Whether all requests were due at one instant."""
    finite: bool = False
    """Whether they end by themselves, as a ramp or a trace does."""
    steady: bool = False
    """Whether one rate or number of clients held throughout, so that the run can reach a steady state."""
    rate_per_s: float | None = None
    """Requests per second that were promised; None: no one rate was."""
    cv: float | None = None
    """The coefficient of variation of the gaps that was promised."""
    law: str = ""
    """What gaps are drawn from: `gamma` of that rate and variation. Empty: no chance in them."""
    clients: int = 0
    """Of a closed loop."""
    sessions: bool = False
    """Whether arrivals, clients and n count sessions."""
    turns: int = 1
    """Turns of each session, where the plan says it."""
    recorded: bool = False
    """Whether the arrivals brought the lengths of their requests, as a trace does."""


class Arrivals(msgspec.Struct, frozen=True):
    """The questions that every process answers."""

    SYNTAX: ClassVar[str]
    """How it is written, as errors quote it; `str()` of it is its canonical text."""

    @classmethod
    @abstractmethod
    def parse(cls, rest: str) -> Self:
        """Read what follows the colon; empty where there is none. Raises WorkloadError."""

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Due offsets in ns, in their order; none of a closed loop, where answers make requests due."""
        return iter(())

    @property
    @abstractmethod
    def facts(self) -> LoadFacts:
        """What it says of itself."""

    def ends(self, n: int | None, duration: float | None) -> bool:
        """Whether a number of requests or a duration, or it itself, ends it."""
        return n is not None or self.facts.finite or (duration is not None and not self.facts.burst)
