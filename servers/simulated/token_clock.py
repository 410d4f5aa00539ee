"""The clocks that decide when the tokens of a simulated server are due.

- ScriptClock: tokens are due at configured times.
- BatchingClock: tokens are due at the end of engine steps, which process requests in batches.

Both classes have the same methods. Neither class reads the system clock: the caller passes the time of a monotonic
clock in ns. A test can therefore simulate hours within microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random
from typing import NamedTuple

from loadgen.servers.simulated.scheduler import Batch, Gauges, Job, Policy, Scheduler

NS_PER_HOUR = 3600 * 1_000_000_000
Emission = tuple[Job, int, int]
"""(job, tokens, due_ns): the number of tokens of a job that are due at the time `due_ns`."""


class Drafting(NamedTuple):
    """Speculative decoding: the number of draft tokens per step, and the probability that a draft token is accepted."""

    tokens: int
    acceptance: float


NO_DRAFTING = Drafting(0, 0.0)


class Slowdown(NamedTuple):
    """Describes how the time to the first token of a scripted server grows during a run."""

    per_hour: float = 0.0
    """Growth per hour, as a share of the initial time to the first token."""
    after_ns: int | None = None
    """Time in ns after the arrival of the first request. From this time on, the time to the first token is also
    multiplied by `factor`. None: never."""
    factor: float = 2.0

    def ttft_ns(self, ttft_ns: int, since_first_ns: int) -> int:
        """Return the time to the first token of a request in ns, including the slowdown.

        `ttft_ns` is this time without a slowdown. `since_first_ns` is the time from the arrival of the server's first
        request to the arrival of this request.
        """
        factor = 1 + self.per_hour * since_first_ns / NS_PER_HOUR
        if self.after_ns is not None and since_first_ns >= self.after_ns:
            factor *= self.factor
        return round(ttft_ns * factor)


NO_SLOWDOWN = Slowdown()


class ScriptClock:
    """A token clock with configured times: it does not model an engine. It is the reference for calibration.

    A job is a request, and an event is one message of its stream. Event number `k` of a job, counted from 0, is due at
    this time:

        arrived_ns + ttft_ns + k * itl_ns + offset

    The offset is random and uniform in `[-jitter_ns, jitter_ns]`. It does not move later events, and the events of a
    job stay in order. The offsets depend only on `seed`, on the order in which jobs are submitted, and on `k`.

    With `drafting`, each event after the first is a step of speculative decoding. With `slowdown`, `ttft_ns` grows
    during the run (see `Slowdown`).
    """

    def __init__(
        self,
        ttft_ns: int,
        itl_ns: int,
        jitter_ns: int = 0,
        tokens_per_event: int = 1,
        seed: int = 0,
        drafting: Drafting = NO_DRAFTING,
        slowdown: Slowdown = NO_SLOWDOWN,
    ) -> None:
        self._drafting = drafting
        self._slowdown = slowdown
        self._first_arrival_ns: int | None = None
        self._drafts = Gauges(running=0, waiting=0, kv_usage=0.0, preemptions=0)
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
        """Add a job. Its token times count from `job.arrived_ns`, which must not be later than `now_ns`."""
        assert job.output_tokens >= 1
        assert job.arrived_ns <= now_ns
        number = next(self._numbers)
        if self._first_arrival_ns is None:
            self._first_arrival_ns = job.arrived_ns
        base_ns = job.arrived_ns + self._slowdown.ttft_ns(self._ttft_ns, job.arrived_ns - self._first_arrival_ns)
        jitter = self._jitter(number) if self._jitter_ns else None
        due_ns = max(job.arrived_ns, base_ns + jitter()) if jitter else base_ns
        heappush(self._heap, (due_ns, number, job, base_ns, jitter))
        self._live.add(job)

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the script does not depend on it
        """Remove a job whose client has disconnected. Finished and unknown jobs are ignored."""
        self._live.discard(job)
        self._drop_cancelled()

    def next_ns(self) -> int | None:
        """Return the time in ns at which the next tokens are due, or None if there is no job."""
        return self._heap[0][0] if self._heap else None

    def emissions(self, now_ns: int) -> list[Emission]:
        """Return all tokens that are due by `now_ns`, in order of their due times.

        Tokens are returned only once. With 1000 jobs, the method takes about 1 microsecond per entry of the result.
        """
        heap, live = self._heap, self._live
        itl_ns, tokens_per_event, drafting = self._itl_ns, self._tokens_per_event, self._drafting
        due: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due_ns, number, job, base_ns, jitter = heap[0]
            if job not in live:
                heappop(heap)
                continue
            tokens = min(tokens_per_event, job.output_tokens - job.emitted)
            if drafting.tokens and job.emitted:
                tokens = self._verify_drafts(number, job)
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
        """Return the values for the metrics page: running and waiting jobs, KV-cache use, preemptions, drafts.

        Every job counts as running from its arrival. The KV cache is always empty.
        """
        return replace(self._drafts, running=len(self._live))

    def flush_cache(self) -> None:
        """Do nothing, because this clock does not model a prefix cache."""

    def _verify_drafts(self, number: int, job: Job) -> int:
        """Simulate one step of speculative decoding for `job`, and return the number of tokens that the step generates.

        The step first proposes draft tokens. Each draft token is accepted with the same probability, but only if all
        draft tokens before it were accepted. The step generates the accepted draft tokens and one more token, but no
        tokens after the end of the response. `number` is the number of the job, which determines the random numbers.
        """
        drafting, drafts = self._drafting, self._drafts
        random = Random(f"{self._seed}/{number}/{job.emitted}").random  # noqa: S311 - not a secret
        accepted = 0
        while accepted < drafting.tokens and random() < drafting.acceptance:
            accepted += 1
        tokens = min(1 + accepted, job.output_tokens - job.emitted)
        self._drafts = replace(
            drafts,
            draft_steps=drafts.draft_steps + 1,
            draft_tokens=drafts.draft_tokens + drafting.tokens,
            accepted_draft_tokens=drafts.accepted_draft_tokens + tokens - 1,
        )
        return tokens

    def _drop_cancelled(self) -> None:
        """Remove cancelled jobs from the top of the heap of due times.

        Otherwise, `next_ns` could return the due time of a cancelled job.
        """
        while self._heap and self._heap[0][2] not in self._live:
            heappop(self._heap)

    def _jitter(self, number: int) -> Callable[[], int]:
        """Return a function that draws the random offsets of job `number`: uniform integers in [-jitter, jitter] ns."""
        random = Random(f"{self._seed}/{number}").random  # noqa: S311 - noise, not a secret
        limit_ns = self._jitter_ns
        return lambda: int(random() * (2 * limit_ns + 1)) - limit_ns


class BatchingClock:
    """A clock that processes jobs (requests) in steps, like an inference engine.

    A step is one run of the model over a batch. A step lasts `step_ns(batch) / speed`. At its end, one token is due for
    every decoding job, and for every job whose prompt this step has completed. A step begins when the previous step
    ends, and admits only jobs that arrived before its start. The token times therefore do not depend on when the caller
    calls the clock.
    """

    def __init__(self, policy: Policy, kv_tokens: int, step_ns: Callable[[Batch], int], speed: float = 1.0) -> None:
        self._scheduler = Scheduler(policy, kv_tokens)
        self._step_ns = step_ns
        self._speed = speed
        self._step_start_ns = 0  # start of the latest step
        self._end_ns: int | None = None  # end of the current step; None when idle
        self._idle_from_ns = 0
        # The durations of consecutive steps are added at speed 1, and only the sum is divided by the speed. Rounding
        # errors therefore do not accumulate.
        self._busy_from_ns = 0
        self._busy_ns = 0

    def submit(self, job: Job, now_ns: int) -> None:
        """Add a job. Raises ValueError if the job is too large for the whole KV cache."""
        assert job.arrived_ns <= now_ns
        self._scheduler.submit(job)
        if self._end_ns is None:
            self._start_after_pause()

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - the KV cache of the job is free at once
        """Remove a job. The duration of the current step does not change."""
        self._scheduler.cancel(job)

    def next_ns(self) -> int | None:
        """Return the time in ns at which the current step ends, or None if the engine is idle.

        `emissions` can return an empty list at this time, because a step that only processes a part of a prompt ends
        without a token.
        """
        return self._end_ns

    def emissions(self, now_ns: int) -> list[Emission]:
        """Return all tokens that are due by `now_ns`, in order of their due times.

        Tokens are returned only once. The method takes less than 0.1 ms for a step of 256 sequences.
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
        """Return the scheduler's values for the metrics page: running and waiting jobs, KV-cache use, preemptions."""
        return self._scheduler.gauges()

    def flush_cache(self) -> None:
        """Empty the prefix cache, unless a job is running or waiting."""
        gauges = self._scheduler.gauges()
        if not gauges.running and not gauges.waiting:
            self._scheduler.flush_prefix_cache()

    def _start_after_pause(self) -> None:
        """Start a step after the engine was idle.

        The step starts when the first waiting job arrived, or when the engine became idle if that was later.
        """
        self._busy_from_ns = max(self._scheduler.waiting[0].arrived_ns, self._idle_from_ns)
        self._busy_ns = 0
        self._start_step(self._busy_from_ns)

    def _start_step(self, now_ns: int) -> None:
        self._busy_ns += self._step_ns(self._scheduler.plan(now_ns, self._step_start_ns))
        self._step_start_ns = now_ns
        self._end_ns = self._busy_from_ns + int(self._busy_ns / self._speed)


TokenClock = ScriptClock | BatchingClock
