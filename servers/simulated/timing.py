"""When a simulated server's tokens leave: the shape of a token clock, and the clock that follows a script.

A clock never reads the time. Every instant is in nanoseconds on the caller's monotonic clock and is given by the
caller, so tests drive a clock through hours in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from random import Random
from typing import Any, Protocol


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the simulated server. Compared by identity; finished when `emitted == output_tokens`."""

    prompt_tokens: int
    output_tokens: int
    """At least 1."""
    arrived_ns: int
    emitted: int = 0
    """Tokens that the clock has handed out so far. Only the clock writes it."""
    owner: Any = None
    """Whatever the caller wants back with each emission. The clock does not look at it."""


Emission = tuple[Job, int, int]
"""(job, tokens, due_ns): so many tokens of this job are due at this instant."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a server's metrics page says about its scheduler."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache in use, 0..1."""
    preemptions: int
    """Since the start."""


class TokenClock(Protocol):
    """Decides when each token of each job is due. Instants passed in must not go backwards."""

    def submit(self, job: Job, now_ns: int) -> None:
        """Takes a job in. Its tokens count from `job.arrived_ns`, which is not after `now_ns`."""

    def cancel(self, job: Job, now_ns: int) -> None:
        """Forgets a job whose client went away. A job that is finished or unknown is ignored."""

    def next_ns(self) -> int | None:
        """The instant at which to call `emissions` next; None while there is nothing to do.

        That call may return nothing: an engine step can consist of unfinished prefill alone.
        """

    def emissions(self, now_ns: int) -> list[Emission]:
        """Everything due up to and including `now_ns` that was not handed out before, in due order."""

    def gauges(self) -> Gauges:
        """The scheduler's state after the last call."""


class ScriptClock:
    """Token event k of a job is due at `arrived_ns + ttft_ns + k * itl_ns`, exactly: the reference of calibration.

    Due instants are absolute, so a late caller shifts nothing. `jitter_ns` moves each event by a uniform draw from
    [-jitter_ns, jitter_ns] around that instant, without accumulating and without reordering a job's own events; the
    draws depend only on `seed`, the job's place in the order of submission, and k.
    """

    def __init__(self, ttft_ns: int, itl_ns: int, jitter_ns: int = 0, tokens_per_event: int = 1, seed: int = 0) -> None:
        assert min(ttft_ns, itl_ns, jitter_ns) >= 0
        assert tokens_per_event >= 1
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns
        self._jitter_ns = jitter_ns
        self._tokens_per_event = tokens_per_event
        self._seed = seed
        self._submitted = 0
        self._live: set[Job] = set()
        # (due, place in the order of submission, job, due without jitter, the job's jitter). The second is unique, so
        # that comparisons never reach the job. One entry per job; a cancelled job's entry stays until it surfaces.
        self._heap: list[tuple[int, int, Job, int, Callable[[], int] | None]] = []

    def submit(self, job: Job, now_ns: int) -> None:
        """See TokenClock."""
        assert job.output_tokens >= 1
        assert job.arrived_ns <= now_ns
        jitter = _jitter(self._jitter_ns, self._seed, self._submitted) if self._jitter_ns else None
        base_ns = job.arrived_ns + self._ttft_ns
        due_ns = max(job.arrived_ns, base_ns + jitter()) if jitter else base_ns
        heappush(self._heap, (due_ns, self._submitted, job, base_ns, jitter))
        self._submitted += 1
        self._live.add(job)

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the script does not depend on it
        """See TokenClock."""
        self._live.discard(job)
        self._drop_cancelled()

    def next_ns(self) -> int | None:
        """See TokenClock. Here the call always has something to return."""
        return self._heap[0][0] if self._heap else None

    def emissions(self, now_ns: int) -> list[Emission]:
        """See TokenClock. The hot path: about a microsecond per emission with 1000 jobs."""
        heap, live, itl_ns, step = self._heap, self._live, self._itl_ns, self._tokens_per_event
        due: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due_ns, place, job, base_ns, jitter = heap[0]
            if job not in live:
                heappop(heap)
                continue
            left = job.output_tokens - job.emitted
            if left <= step:
                job.emitted += left
                due.append((job, left, due_ns))
                live.discard(job)
                heappop(heap)
                continue
            job.emitted += step
            due.append((job, step, due_ns))
            base_ns += itl_ns
            next_ns = base_ns if jitter is None else max(due_ns, base_ns + jitter())
            heapreplace(heap, (next_ns, place, job, base_ns, jitter))
        self._drop_cancelled()
        return due

    def gauges(self) -> Gauges:
        """Every job runs from the instant it arrives; a script has no KV cache."""
        return Gauges(running=len(self._live), waiting=0, kv_usage=0.0, preemptions=0)

    def _drop_cancelled(self) -> None:
        """Keeps a live job at the top, so that `next_ns` never names an instant at which nothing is due."""
        while self._heap and self._heap[0][2] not in self._live:
            heappop(self._heap)


def _jitter(jitter_ns: int, seed: int, place: int) -> Callable[[], int]:
    """Uniform integers from [-jitter_ns, jitter_ns], one stream per job."""
    random = Random(f"{seed}/{place}").random  # noqa: S311 - timing noise, not a secret
    span = 2 * jitter_ns + 1
    return lambda: int(random() * span) - jitter_ns
