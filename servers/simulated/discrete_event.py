"""A simulated inference engine that runs in virtual time.

Virtual time advances from step to step, so a simulation never sleeps. Consecutive decode steps of the same requests are
computed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loadgen.servers.simulated.scheduler import Gauges, Job, Scheduler
from loadgen.servers.simulated.step_time import StepDurations

FOREVER_NS = 1 << 62
MAX_STEP_ENDS = 1 << 18
"""If more step end times than this are in memory, the end times that no job needs any more are dropped."""


class FrontEnd:
    """The event loop of a simulated engine, through which requests (jobs) pass before they reach the scheduler.

    The loop handles requests in batches. All requests that arrive while it handles a batch form the next batch. A batch
    takes `request_ns` per request. All jobs of a batch reach the scheduler together, `path_ns` after the batch is done.
    """

    def __init__(self, request_ns: int = 0, path_ns: int = 0) -> None:
        self._request_ns = request_ns
        self._path_ns = path_ns
        self._batch: list[Job] = []
        self._next_batch: list[Job] = []
        self.busy_until_ns = FOREVER_NS
        """Time when the current batch will be done. FOREVER_NS: the front end is idle."""

    def accept(self, job: Job, now_ns: int) -> None:
        """Add a job that arrives at `now_ns`. Jobs must be added in order of arrival.

        The caller must first release every batch that is done by `now_ns`.
        """
        if self._batch:
            self._next_batch.append(job)
        else:
            self._batch = [job]
            self.busy_until_ns = now_ns + self._request_ns

    def release(self) -> list[Job]:
        """Return the jobs of the batch that is done at `busy_until_ns`, and start the next batch.

        The `arrived_ns` of each returned job is set to the time when the job reaches the scheduler.
        """
        released = self._batch
        for job in released:
            job.arrived_ns = self.busy_until_ns + self._path_ns
        self._batch = self._next_batch
        self._next_batch = []
        if self._batch:
            self.busy_until_ns += self._request_ns * len(self._batch)
        else:
            self.busy_until_ns = FOREVER_NS
        return released

    def cancel(self, job: Job) -> bool:
        """Remove a job. Return True if the job was in the front end, and False otherwise."""
        for batch in (self._batch, self._next_batch):
            if job in batch:
                batch.remove(job)
                return True
        return False


@dataclass(slots=True)
class TokenTimes:
    """The times in ns at which the tokens of a job were generated.

    `instants` is complete only when the job has ended. Until then, the times of its latest tokens may be missing.
    """

    job: Job
    instants: list[int] = field(default_factory=list)
    first_token_step: int = -1
    """Value of `Scheduler.decode_steps` at the job's first token, or at the first token after its last preemption; -1
    before that token."""


class VirtualEngine:
    """A simulated engine, which runs a Scheduler in virtual time. `step_time` predicts the duration of each step."""

    def __init__(self, scheduler: Scheduler, step_time: StepDurations) -> None:
        self.scheduler = scheduler
        self.step_time = step_time
        self.now_ns = 0
        self._step_start_ns = 0  # start of the latest step
        self._live: dict[Job, TokenTimes] = {}
        self._step_ends: list[int] = []  # ends of the decode steps
        self._dropped_steps = 0  # decode steps whose ends are no longer in `_step_ends`

    def submit(self, job: Job) -> None:
        """Add a job to the queue of the engine. Jobs must be added in the order of their arrival times,
        `job.arrived_ns`.

        Raises ValueError if the job does not fit into the KV cache, even if the cache is empty.
        """
        self.scheduler.submit(job)
        self._live[job] = TokenTimes(job)

    def cancel(self, job: Job) -> list[int]:
        """Remove `job`, and return the times in ns at which its tokens have been generated so far."""
        times = self._live.pop(job)
        if times.first_token_step >= 0:
            decoding = job in self.scheduler.decoding
            self.scheduler.cancel(job)
            self._settle(times, job.emitted if decoding or times.instants else 0)
        else:
            self.scheduler.cancel(job)
        return times.instants

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @property
    def kv_tokens(self) -> int:
        """Size of the KV cache in tokens."""
        return self.scheduler.kv_tokens

    def gauges(self) -> Gauges:
        """Return the current values for the metrics page."""
        return self.scheduler.gauges()

    def run(self, until_ns: int) -> list[TokenTimes]:
        """Run steps until at least one job ends, and return the token times of the jobs that ended.

        Return an empty list if no job is left, or if the next step would begin after `until_ns`.
        """
        scheduler = self.scheduler
        while self._live:
            if not scheduler.running and scheduler.waiting[0].arrived_ns > self.now_ns:
                self.now_ns = scheduler.waiting[0].arrived_ns
            if self.now_ns > until_ns:
                return []
            ended = self._finish(self._run_steps(until_ns))
            if ended:
                return ended
        return []

    def _run_steps(self, until_ns: int) -> int:
        """Advance virtual time by one step, or by several identical steps. Return the number of steps.

        No step begins after `until_ns`, but the last step may end after it.
        """
        scheduler = self.scheduler
        step_ends = self._step_ends
        batch = scheduler.plan(self.now_ns, self._step_start_ns)
        self._step_start_ns = self.now_ns
        identical_steps = scheduler.identical_steps()
        if identical_steps == 1:
            self.now_ns += self.step_time(batch)
            if scheduler.step_decodes:
                step_ends.append(self.now_ns)
            return 1
        first_s, growth_s, trend_steps = self.step_time.decode_trend(batch.decoding, batch.context)
        step_ns = 1e9 * first_s
        growth_ns = 1e9 * growth_s
        now_ns = float(self.now_ns)
        known_ends = len(step_ends)
        for _ in range(min(identical_steps, trend_steps)):
            now_ns += step_ns
            step_ns += growth_ns
            step_ends.append(int(now_ns))
            if now_ns > until_ns:
                break
        self.now_ns = step_ends[-1]
        steps = len(step_ends) - known_ends
        if steps > 1:
            self._step_start_ns = step_ends[-2]
        return steps

    def _finish(self, steps: int) -> list[TokenTimes]:
        """Account for `steps` steps that have ended, and return the token times of the jobs that ended in them.

        The scheduler is told that the steps have ended.
        """
        started, ended = self.scheduler.finish(steps)
        for job in started:
            times = self._live[job]
            self._settle(times, job.emitted - 1)
            times.instants.append(self.now_ns)
            times.first_token_step = self.scheduler.decode_steps
        ended_times = [self._live.pop(job) for job in ended]
        for times in ended_times:
            self._settle(times, times.job.output_tokens)
        if len(self._step_ends) > MAX_STEP_ENDS:
            self._drop_unneeded_step_ends()
        return ended_times

    def _settle(self, times: TokenTimes, emitted: int) -> None:
        """Add the times that are missing in `times` for the first `emitted` tokens of the job.

        The missing tokens were generated in consecutive decode steps. Their times are the end times of these steps.
        """
        start = times.first_token_step - self._dropped_steps
        times.instants += self._step_ends[start : start + emitted - len(times.instants)]

    def _drop_unneeded_step_ends(self) -> None:
        """Delete the end times of old decode steps, which no unfinished job needs any more.

        An unfinished job needs the end times of all steps since its first token.
        """
        first_tokens = [times.first_token_step for times in self._live.values() if times.first_token_step >= 0]
        first_needed = min(first_tokens, default=self.scheduler.decode_steps)
        del self._step_ends[: first_needed - self._dropped_steps]
        self._dropped_steps = first_needed
