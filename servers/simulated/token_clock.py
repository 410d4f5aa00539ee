"""The clocks that decide when tokens leave a simulated server: one follows a script, one batches like an engine.

Both have the same methods, and neither reads the time. Every instant is in ns of the caller's monotonic clock and comes
from the caller, never backwards. Tests can therefore run hours of a clock within microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random

from loadgen.servers.simulated.scheduler import Batch, Gauges, Job, Policy, Scheduler

Emission = tuple[Job, int, int]
"""(job, tokens, due_ns): the tokens of the job that are due at this instant."""


class ScriptClock:
    """Token event k of a job is due at exactly `arrived_ns + ttft_ns + k * itl_ns`: the reference for calibration.

    `jitter_ns` moves each event by a uniform random offset in [-jitter_ns, jitter_ns]. Offsets do not add up, and the
    events of a job keep their order. They depend only on `seed`, the job's position in the order of submission, and k.
    """

    def __init__(self, ttft_ns: int, itl_ns: int, jitter_ns: int = 0, tokens_per_event: int = 1, seed: int = 0) -> None:
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns
        self._jitter_ns = jitter_ns
        self._tokens_per_event = tokens_per_event
        self._seed = seed
        self._numbers = count()
        self._live: set[Job] = set()
        # (due, number of the job, job, due without jitter, source of the job's jitter), one entry per job. The number
        # is unique, so that comparisons never reach the job. The entry of a cancelled job stays until it is at the top.
        self._heap: list[tuple[int, int, Job, int, Callable[[], int] | None]] = []

    def submit(self, job: Job, now_ns: int) -> None:
        """Add a job. Its tokens count from `job.arrived_ns`, which must not be after `now_ns`."""
        assert job.output_tokens >= 1
        assert job.arrived_ns <= now_ns
        number = next(self._numbers)
        base_ns = job.arrived_ns + self._ttft_ns
        jitter = self._jitter(number) if self._jitter_ns else None
        due_ns = max(job.arrived_ns, base_ns + jitter()) if jitter else base_ns
        heappush(self._heap, (due_ns, number, job, base_ns, jitter))
        self._live.add(job)

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the script does not depend on it
        """Remove a job whose client went away. Finished and unknown jobs are ignored."""
        self._live.discard(job)
        self._drop_cancelled()

    def next_ns(self) -> int | None:
        """Return the instant for the next call of `emissions`; None if there is nothing to do."""
        return self._heap[0][0] if self._heap else None

    def emissions(self, now_ns: int) -> list[Emission]:
        """Return everything due up to and including `now_ns`, in due order. Every emission is returned once.

        Hot path: an emission takes about a microsecond with 1000 jobs.
        """
        heap, live = self._heap, self._live
        itl_ns, tokens_per_event = self._itl_ns, self._tokens_per_event
        due: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due_ns, number, job, base_ns, jitter = heap[0]
            if job not in live:
                heappop(heap)
                continue
            tokens = min(tokens_per_event, job.output_tokens - job.emitted)
            job.emitted += tokens
            due.append((job, tokens, due_ns))
            if job.emitted == job.output_tokens:
                live.discard(job)
                heappop(heap)
                continue
            base_ns += itl_ns
            next_ns = base_ns if jitter is None else max(due_ns, base_ns + jitter())
            heapreplace(heap, (next_ns, number, job, base_ns, jitter))
        self._drop_cancelled()
        return due

    def gauges(self) -> Gauges:
        """Return the gauges: every job runs from its arrival, and a script has no KV cache."""
        return Gauges(running=len(self._live), waiting=0, kv_usage=0.0, preemptions=0)

    def _drop_cancelled(self) -> None:
        """Keep a live job at the top of the heap, so that something is due at every instant that `next_ns` returns."""
        while self._heap and self._heap[0][2] not in self._live:
            heappop(self._heap)

    def _jitter(self, number: int) -> Callable[[], int]:
        """Return a source of uniform integers in [-jitter_ns, jitter_ns] for one job."""
        random = Random(f"{self._seed}/{number}").random  # noqa: S311 - noise, not a secret
        limit_ns = self._jitter_ns
        return lambda: int(random() * (2 * limit_ns + 1)) - limit_ns


class BatchingClock:
    """A clock that runs a Scheduler in the time of its caller.

    A step lasts `step_ns(batch) / speed`, and at its end each sequence that took part emits one token. A step begins
    where the previous one ended and admits only jobs that had arrived by then. The result therefore does not depend on
    when the caller asks.
    """

    def __init__(self, policy: Policy, kv_tokens: int, step_ns: Callable[[Batch], int], speed: float = 1.0) -> None:
        self._scheduler = Scheduler(policy, kv_tokens)
        self._step_ns = step_ns
        self._speed = speed
        self._end_ns: int | None = None  # end of the current step; None when idle
        self._idle_from_ns = 0
        # Steps without a pause between them are added up at speed 1 and divided once: rounding never accumulates.
        self._busy_from_ns = 0
        self._busy_ns = 0

    def submit(self, job: Job, now_ns: int) -> None:
        """Add a job. Raises ValueError if even an empty KV cache could not hold it."""
        assert job.arrived_ns <= now_ns
        self._scheduler.submit(job)
        if self._end_ns is None:
            self._start_after_pause()

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the KV cache of the job is free at once
        """Remove a job. The current step keeps its length."""
        self._scheduler.cancel(job)

    def next_ns(self) -> int | None:
        """Return the instant for the next call of `emissions`; None if there is nothing to do.

        That call can return nothing, because a step may consist of unfinished prefill only.
        """
        return self._end_ns

    def emissions(self, now_ns: int) -> list[Emission]:
        """Return everything due up to and including `now_ns`, in due order. Every emission is returned once.

        A step of 256 sequences takes well under 0.1 ms.
        """
        scheduler = self._scheduler
        due: list[Emission] = []
        while self._end_ns is not None and self._end_ns <= now_ns:
            end_ns = self._end_ns
            if scheduler.step_decodes:
                for job in scheduler.decoding:
                    job.emitted += 1
                    due.append((job, 1, end_ns))
            started, _ = scheduler.finish()
            due += [(job, 1, end_ns) for job in started]
            if scheduler.running or (scheduler.waiting and scheduler.waiting[0].arrived_ns < end_ns):
                self._start_step(end_ns)
                continue
            self._end_ns = None
            self._idle_from_ns = end_ns
            if scheduler.waiting:
                self._start_after_pause()
        return due

    def gauges(self) -> Gauges:
        """Return the gauges of the scheduler."""
        return self._scheduler.gauges()

    def _start_after_pause(self) -> None:
        """Start a step when the first waiting job arrives, but not before the engine became idle."""
        self._busy_from_ns = max(self._scheduler.waiting[0].arrived_ns, self._idle_from_ns)
        self._busy_ns = 0
        self._start_step(self._busy_from_ns)

    def _start_step(self, now_ns: int) -> None:
        self._busy_ns += self._step_ns(self._scheduler.plan(now_ns))
        self._end_ns = self._busy_from_ns + int(self._busy_ns / self._speed)


TokenClock = ScriptClock | BatchingClock
