"""When a simulated server's tokens leave: a clock that follows a script, and one that batches like an engine.

Both have the same methods and never read the time: every instant is in nanoseconds of the caller's monotonic clock and
is given by the caller, never backwards, so tests drive a clock through hours in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random

from loadgen.servers.simulated.scheduler import Batch, Gauges, Job, Policy, Scheduler

Emission = tuple[Job, int, int]  # (job, tokens, due_ns): so many tokens of this job are due at this instant


class ScriptClock:
    """Token event k of a job is due at `arrived_ns + ttft_ns + k * itl_ns`, exactly: the reference of calibration.
    `jitter_ns` moves each event by a uniform draw from [-jitter_ns, jitter_ns] around it, without adding up or
    reordering a job's own events; draws depend only on `seed`, the job's place in the order of submission, and k."""

    def __init__(self, ttft_ns: int, itl_ns: int, jitter_ns: int = 0, tokens_per_event: int = 1, seed: int = 0) -> None:
        self._ttft_ns, self._itl_ns, self._jitter_ns = ttft_ns, itl_ns, jitter_ns
        self._tokens_per_event, self._seed = tokens_per_event, seed
        self._places = count()
        self._live: set[Job] = set()
        # (due, place in the order of submission, job, due without jitter, the job's jitter). The second is unique, so
        # that comparisons never reach the job. One entry per job; a cancelled job's entry stays until it surfaces.
        self._heap: list[tuple[int, int, Job, int, Callable[[], int] | None]] = []

    def submit(self, job: Job, now_ns: int) -> None:
        """Takes a job in. Its tokens count from `job.arrived_ns`, which is not after `now_ns`."""
        assert job.output_tokens >= 1
        assert job.arrived_ns <= now_ns
        index, base_ns = next(self._places), job.arrived_ns + self._ttft_ns
        jitter = self._jitter(index) if self._jitter_ns else None
        due_ns = max(job.arrived_ns, base_ns + jitter()) if jitter else base_ns
        heappush(self._heap, (due_ns, index, job, base_ns, jitter))
        self._live.add(job)

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the script does not depend on it
        """Forgets a job whose client went away; one that is finished or unknown is ignored."""
        self._live.discard(job)
        self._drop_cancelled()

    def next_ns(self) -> int | None:
        """The instant at which to call `emissions` next; None while there is nothing to do."""
        return self._heap[0][0] if self._heap else None

    def emissions(self, now_ns: int) -> list[Emission]:
        """Everything due up to and including `now_ns`, once, in due order. Hot: about a microsecond with 1000 jobs."""
        heap, live, itl_ns, step = self._heap, self._live, self._itl_ns, self._tokens_per_event
        due: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due_ns, index, job, base_ns, jitter = heap[0]
            if job not in live:
                heappop(heap)
                continue
            tokens = min(step, job.output_tokens - job.emitted)
            job.emitted += tokens
            due.append((job, tokens, due_ns))
            if job.emitted == job.output_tokens:
                live.discard(job)
                heappop(heap)
                continue
            base_ns += itl_ns
            next_ns = base_ns if jitter is None else max(due_ns, base_ns + jitter())
            heapreplace(heap, (next_ns, index, job, base_ns, jitter))
        self._drop_cancelled()
        return due

    def gauges(self) -> Gauges:
        """Every job runs from the instant it arrives; a script has no KV cache."""
        return Gauges(running=len(self._live), waiting=0, kv_usage=0.0, preemptions=0)

    def _drop_cancelled(self) -> None:
        """Keeps a live job at the top, so that `next_ns` never names an instant at which nothing is due."""
        while self._heap and self._heap[0][2] not in self._live:
            heappop(self._heap)

    def _jitter(self, place: int) -> Callable[[], int]:
        """Uniform integers from [-jitter_ns, jitter_ns], one stream per job."""
        random, limit_ns = Random(f"{self._seed}/{place}").random, self._jitter_ns  # noqa: S311 - noise, not a secret
        return lambda: int(random() * (2 * limit_ns + 1)) - limit_ns


class BatchingClock:
    """A Scheduler in the time of its caller: a step lasts `step_ns(batch) / speed`, and at its end each sequence that
    took part emits one token. A step begins where the one before it ended, and admits only jobs that had arrived
    before: asking late changes nothing."""

    def __init__(self, policy: Policy, kv_tokens: int, step_ns: Callable[[Batch], int], speed: float = 1.0) -> None:
        self._scheduler = Scheduler(policy, kv_tokens)
        self._step_ns, self._speed = step_ns, speed
        self._end_ns: int | None = None  # end of the current step; None when idle
        self._idle_from_ns = 0
        # Steps without a pause between them are added up at speed 1 and divided once: rounding never accumulates.
        self._busy_from_ns = self._busy_ns = 0

    def submit(self, job: Job, now_ns: int) -> None:
        """Raises ValueError for a job that the whole KV cache could not hold."""
        assert job.arrived_ns <= now_ns
        self._scheduler.submit(job)
        if self._end_ns is None:
            self._start_after_pause()

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - what a job holds is free at once
        """The step under way keeps its length."""
        self._scheduler.cancel(job)

    def next_ns(self) -> int | None:
        """As ScriptClock; the call may return nothing, as a step can consist of unfinished prefill alone."""
        return self._end_ns

    def emissions(self, now_ns: int) -> list[Emission]:
        """As ScriptClock. A step of 256 sequences costs well under 0.1 ms."""
        scheduler = self._scheduler
        due: list[Emission] = []
        while self._end_ns is not None and self._end_ns <= now_ns:
            end_ns = self._end_ns
            if scheduler.decodes:
                for job in scheduler.decoding:
                    job.emitted += 1
                    due.append((job, 1, end_ns))
            begun, _ = scheduler.finish()
            due += [(job, 1, end_ns) for job in begun]
            if scheduler.running or (scheduler.waiting and scheduler.waiting[0].arrived_ns < end_ns):
                self._start_step(end_ns)
                continue
            self._end_ns, self._idle_from_ns = None, end_ns
            if scheduler.waiting:
                self._start_after_pause()
        return due

    def gauges(self) -> Gauges:
        return self._scheduler.gauges()

    def _start_after_pause(self) -> None:
        self._busy_from_ns, self._busy_ns = max(self._scheduler.waiting[0].arrived_ns, self._idle_from_ns), 0
        self._start_step(self._busy_from_ns)

    def _start_step(self, now_ns: int) -> None:
        self._busy_ns += self._step_ns(self._scheduler.plan(now_ns))
        self._end_ns = self._busy_from_ns + int(self._busy_ns / self._speed)


TokenClock = ScriptClock | BatchingClock
