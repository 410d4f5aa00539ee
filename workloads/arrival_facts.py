"""The base class of arrival processes (`Arrivals`), and their properties in the header of a run file (`LoadFacts`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Self

import msgspec


class LoadFacts(msgspec.Struct, kw_only=True, frozen=True):
    """Properties of an arrival process, as the header of a run file stores them.

    Code that reads a run uses these fields instead of parsing the canonical text, such as `poisson:20`. Headers of
    older versions of loadgen lack these fields. The reader of such a run derives them from the text."""

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
    """Number of clients of a closed loop. 0 for an open loop."""
    concurrency: int = 0
    """Maximum number of requests in flight in an open loop. Further requests wait. 0: requests never wait."""
    sessions: bool = False
    """True if arrivals, clients and n count sessions instead of requests."""
    turns: int = 1
    """Turns per session, if the plan states them."""
    recorded: bool = False
    """True if the arrivals also define the lengths of the requests, as a trace does."""


class Arrivals(msgspec.Struct, frozen=True):
    """Base class of arrival processes. `str()` returns the canonical text, such as `poisson:20`."""

    SYNTAX: ClassVar[str]
    """Syntax of the text, for error messages."""

    @classmethod
    @abstractmethod
    def parse(cls, rest: str) -> Self:
        """Create the arrivals that a text such as `poisson:20` describes.

        `rest` is the part of the text after the colon, such as `20`, or "" if there is no colon. Raises WorkloadError
        if `rest` is invalid.
        """

    def due_ns(self, _seed: int) -> Iterator[int]:
        """Yield the time at which each request should be sent, in ns after the start of the run, in ascending order.

        A closed loop yields nothing, because each of its requests is sent after an earlier response has ended."""
        return iter(())

    @property
    @abstractmethod
    def facts(self) -> LoadFacts:
        """Properties of the arrival process, for the header of a run file."""

    def ends(self, n: int | None, duration: float | None) -> bool:
        """Return True if a run with this arrival process has a finite number of requests.

        `n` is the maximum number of requests, and `duration` is the length of the run. None means no limit. The number
        is finite in each of these cases:

        - `n` is not None.
        - `duration` is not None, and the process is not a burst with all requests at time 0.
        - The arrival process has an end, as a trace does.
        """
        return n is not None or self.facts.finite or (duration is not None and not self.facts.burst)
