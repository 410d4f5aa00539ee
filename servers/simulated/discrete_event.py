"""An engine in virtual time: nobody waits, and what decodes alike from step to step is counted together."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadgen.servers.simulated.scheduler import Job, Scheduler
from loadgen.servers.simulated.step_time import StepDurations

FOREVER_NS = 1 << 62
MAX_STEP_ENDS = 1 << 18
"""Ends of steps in memory before those that nobody needs are dropped."""


class FrontEnd:
    """The way from a socket to the scheduler: an event loop that takes in, together, all requests that came while it
    was busy with those before, `request_ns` for each, and hands them on at once, `path_ns` later."""

    def __init__(self, request_ns: int = 0, path_ns: int = 0) -> None:
        self._request_ns, self._path_ns = request_ns, path_ns
        self._busy_with: list[Job] = []
        self._came: list[Job] = []
        self.busy_until_ns = FOREVER_NS
        """When those it is busy with are through."""

    def accept(self, job: Job, now_ns: int) -> None:
        """Takes in a job, in order of time and not before `ends_ns`."""
        if self._busy_with:
            self._came.append(job)
        else:
            self._busy_with, self.busy_until_ns = [job], now_ns + self._request_ns

    def release(self) -> list[Job]:
        """Those who are through at `ends_ns`."""
        through, self._busy_with, self._came = self._busy_with, self._came, []
        for job in through:
            job.arrived_ns = self.busy_until_ns + self._path_ns
        self.busy_until_ns = (
            self.busy_until_ns + self._request_ns * len(self._busy_with) if self._busy_with else FOREVER_NS
        )
        return through

    def cancel(self, job: Job) -> bool:
        """Forgets a job; False for one that is not here."""
        for each in (self._busy_with, self._came):
            if job in each:
                each.remove(job)
                return True
        return False


@dataclass(slots=True)
class TokenTimes:
    """What a job has got: of each token when, in nanoseconds, as far as it is settled."""

    job: Job
    instants: list[int] = field(default_factory=list)
    begun: int = -1
    """How many steps had decoded when it last got a first token."""


class VirtualEngine:
    """A Scheduler whose steps last as long as `step_time` says. `run` goes on until something has to be told."""

    def __init__(self, scheduler: Scheduler, step_time: StepDurations) -> None:
        self.scheduler, self.step_time = scheduler, step_time
        self.now_ns = 0
        self._live: dict[Job, TokenTimes] = {}
        self._ends: list[int] = []  # of each step that decoded
        self._dropped = 0  # of those, how many are no longer in the list

    def submit(self, job: Job) -> None:
        """Takes in a job that arrives at `job.arrived_ns`, not before those it was given already. Raises ValueError for
        one that the KV cache can never hold."""
        self.scheduler.submit(job)
        self._live[job] = TokenTimes(job)

    def cancel(self, job: Job) -> list[int]:
        """Forgets a job; the instants of the tokens that it got."""
        answer = self._live.pop(job)
        if answer.begun >= 0:
            decoding = job in self.scheduler.decoding
            self.scheduler.cancel(job)
            self._settle(answer, job.emitted if decoding or answer.instants else 0)
        else:
            self.scheduler.cancel(job)
        return answer.instants

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def run(self, until_ns: int) -> list[TokenTimes]:
        """Goes on until answers have ended, which are returned, or a step begins later than `until_ns`."""
        scheduler, step_time, ends = self.scheduler, self.step_time, self._ends
        while self._live:
            if not scheduler.running and scheduler.waiting[0].arrived_ns > self.now_ns:
                self.now_ns = scheduler.waiting[0].arrived_ns
            if self.now_ns > until_ns:
                return []
            batch = scheduler.plan(self.now_ns)
            alike = scheduler.alike()
            if alike == 1:
                self.now_ns += step_time(batch)
                if scheduler.decodes:
                    ends.append(self.now_ns)
            else:
                first_s, more_s, holds = step_time.decode_trend(batch.decoding, batch.context)
                step_ns, more_ns, now_ns, before = 1e9 * first_s, 1e9 * more_s, float(self.now_ns), len(ends)
                for _ in range(min(alike, holds)):
                    now_ns += step_ns
                    step_ns += more_ns
                    ends.append(int(now_ns))
                    if now_ns > until_ns:
                        break
                self.now_ns, alike = ends[-1], len(ends) - before
            if result := self._finish(alike):
                return result
        return []

    def _finish(self, steps: int) -> list[TokenTimes]:
        begun, ended = self.scheduler.finish(steps)
        for job in begun:
            answer = self._live[job]
            self._settle(answer, job.emitted - 1)
            answer.instants.append(self.now_ns)
            answer.begun = self.scheduler.decoded
        answers = [self._live.pop(job) for job in ended]
        for answer in answers:
            self._settle(answer, answer.job.output_tokens)
        if len(self._ends) > MAX_STEP_ENDS:
            self._drop()
        return answers

    def _settle(self, answer: TokenTimes, emitted: int) -> None:
        """A job has got so many tokens in all, the last of them in steps that decoded one after the other."""
        begin = answer.begun - self._dropped
        answer.instants += self._ends[begin : begin + emitted - len(answer.instants)]

    def _drop(self) -> None:
        """Forgets the ends of steps that all answers have settled."""
        first = min((each.begun for each in self._live.values() if each.begun >= 0), default=self.scheduler.decoded)
        del self._ends[: first - self._dropped]
        self._dropped = first
