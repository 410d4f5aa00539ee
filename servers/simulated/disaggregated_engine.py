"""A simulated engine with separate workers for prompts and for decoding, in virtual time (DistServe, arXiv 2401.09670).

    job ──> prefill worker ──first token──> transfer of the KV cache ──> decode worker ──last token──> finished

Each worker is a `VirtualEngine` with a separate scheduler. A job goes to the worker with the fewest jobs. The steps of
all workers are simulated in the order of their start times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

from loadgen.servers.simulated.discrete_event import FOREVER_NS, TokenTimes, VirtualEngine
from loadgen.servers.simulated.scheduler import UNLIMITED, Batch, Gauges, Job, Policy, Scheduler
from loadgen.servers.simulated.step_time import StepDurations


@dataclass(frozen=True, slots=True)
class WorkerPools:
    """Numbers of workers in disaggregated serving. All workers have the same GPUs."""

    prefill: int
    decode: int


class DecodeStepTime:
    """Computes the durations of the steps of a decode worker.

    A decode worker computes no prompts, because a prefill worker has computed them and sent their KV cache. However,
    the scheduler of the decode worker plans each new job as if its prompt had to be computed. This class therefore
    counts a new job in a step like a job that is already decoding.
    """

    def __init__(self, step_time: StepDurations) -> None:
        self._step_time = step_time
        self.decode_trend = step_time.decode_trend

    def __call__(self, batch: Batch) -> int:
        """Return the duration of a step in ns."""
        sequences = batch.prompts + batch.decoding
        if not sequences:
            return 0
        return round(1e9 * self.decode_trend(sequences, batch.context + batch.prompt_tokens)[0])


class DisaggregatedEngine:
    """A simulated engine with separate workers for prompts (prefill) and for decoding.

    This class has the methods of VirtualEngine. After prefill, the KV cache of a job is sent to a decode worker. The
    function `transfer_s` returns the time in s that this takes for a number of prompt tokens. The first token of the
    job counts as generated when its KV cache has arrived. A job with a single token needs no decode worker.

    A decode worker starts a job only if its free KV cache has room for the whole output of the job. A job is therefore
    never preempted.
    """

    def __init__(
        self,
        pools: WorkerPools,
        policy: Policy,
        kv_tokens: int,
        step_time: StepDurations,
        transfer_s: Callable[[int], float],
    ) -> None:
        decode_policy = replace(
            policy, prefill="mixed", reserve="output", step_tokens=UNLIMITED, prefix_cache=False, max_paddings=None
        ).with_serving(cache_hit_rate=0.0, chunked_prefill="mixed")
        decode_time = DecodeStepTime(step_time)
        self._prefill = [VirtualEngine(Scheduler(policy, kv_tokens), step_time) for _ in range(pools.prefill)]
        self._decode = [VirtualEngine(Scheduler(decode_policy, kv_tokens), decode_time) for _ in range(pools.decode)]
        self._all = (*self._prefill, *self._decode)
        self._starts = [FOREVER_NS] * len(self._all)
        """Time at which the next step of each worker begins; FOREVER_NS for an idle worker."""
        self._numbers_of = {worker: number for number, worker in enumerate(self._all)}
        self._transfer_s = transfer_s
        self._longest = decode_policy.max_sequence_tokens(kv_tokens)
        self.kv_tokens = kv_tokens * (pools.prefill + pools.decode)
        self._workers: dict[Job, tuple[VirtualEngine, Job] | None] = {}
        """For each job in the engine, its worker and the job that the worker has for it. None during the transfer."""
        self._arriving: list[tuple[int, int, Job]] = []
        """Heap of jobs whose KV cache is being sent: time of arrival, unique number, job."""
        self._first_ns: dict[Job, int] = {}
        """For each job that is past its prefill, the time of its first token."""
        self._numbers = count()

    def submit(self, job: Job) -> None:
        """Submit a job that arrives at `job.arrived_ns`. Jobs must be submitted in order of arrival.

        Raises ValueError if the job does not fit even an empty KV cache.
        """
        if job.prompt_tokens + job.output_tokens + job.unsent_tokens > self._longest:
            raise ValueError(
                f"{job.prompt_tokens} prompt and {job.output_tokens} output tokens never fit the KV cache of a decode "
                f"worker, {self._longest} tokens: limit the model's length to the cache"
            )
        prefill = Job(job.prompt_tokens, 1, job.arrived_ns, owner=job, prompt=job.prompt, cache_salt=job.cache_salt)
        self._place(job, prefill, self._prefill)

    def cancel(self, job: Job) -> list[int]:
        """Remove `job` from the engine. Return the times in ns at which the job's tokens so far were generated."""
        placed = self._workers.pop(job)
        first_ns = self._first_ns.pop(job, None)
        if placed is None:
            self._arriving = [entry for entry in self._arriving if entry[2] is not job]
            heapify(self._arriving)
            return []
        worker, placed_job = placed
        later = worker.cancel(placed_job)
        self._update_start(worker)
        return [] if first_ns is None else [first_ns, *later]

    @property
    def busy(self) -> bool:
        return bool(self._workers)

    @property
    def now_ns(self) -> int:
        """Time in ns up to which all workers are simulated: the time of the next event in the engine.

        An event is the start of a step, or the end of a transfer. If no event follows, this is the latest time of any
        worker.
        """
        start_ns = min(self._starts)
        if self._arriving:
            start_ns = min(start_ns, self._arriving[0][0])
        return start_ns if start_ns < FOREVER_NS else max(worker.now_ns for worker in self._all)

    def gauges(self) -> Gauges:
        """Return the current values for the metrics page.

        The use of KV cache is the mean over all workers. Every other value is the sum over all workers. Jobs whose KV
        cache is being sent to another worker count as waiting.
        """
        workers = [worker.scheduler.gauges() for worker in self._all]
        usage = sum(each.kv_usage for each in workers) / len(workers)
        return Gauges(
            sum(each.running for each in workers),
            sum(each.waiting for each in workers) + len(self._arriving),
            usage,
            sum(each.preemptions for each in workers),
            sum(each.cached_prompt_tokens for each in workers),
        )

    def run(self, until_ns: int) -> list[TokenTimes]:
        """Run steps until at least one job ends, and return the token times of the jobs that ended.

        Return an empty list if no job is left, or if the next step would begin after `until_ns`.
        """
        starts = self._starts
        while self._workers:
            start_ns = min(starts)
            arrival_ns = self._arriving[0][0] if self._arriving else FOREVER_NS
            if min(start_ns, arrival_ns) > until_ns:
                return []
            if arrival_ns <= start_ns:
                self._start_decoding()
                continue
            number = starts.index(start_ns)
            worker = self._all[number]
            starts[number] = FOREVER_NS
            times = worker.run(min(until_ns, arrival_ns, *starts))
            self._update_start(worker)
            if number < len(self._prefill):
                ended = list(self._prefilled(times))
            else:
                ended = [self._finished(each) for each in times]
            if ended:
                return ended
        return []

    def _place(self, job: Job, worker_job: Job, workers: Iterable[VirtualEngine]) -> None:
        worker = min(workers, key=lambda each: each.scheduler.running + len(each.scheduler.waiting))
        worker.submit(worker_job)
        self._update_start(worker)
        self._workers[job] = worker, worker_job

    def _update_start(self, worker: VirtualEngine) -> None:
        """Update the stored time at which the next step of a worker begins.

        The caller has just run a step of the worker, or has added or removed a job.
        """
        start_ns = FOREVER_NS
        if worker.busy:
            scheduler = worker.scheduler
            start_ns = worker.now_ns
            if not scheduler.running and scheduler.waiting:
                start_ns = max(start_ns, scheduler.waiting[0].arrived_ns)
        self._starts[self._numbers_of[worker]] = start_ns

    def _prefilled(self, ended: Iterable[TokenTimes]) -> Iterable[TokenTimes]:
        """Send the KV caches of jobs to decode workers. The prompts of these jobs have just been computed.

        `ended` contains the token times of these jobs on their prefill worker. A job with a single output token is
        already finished, and needs no decode worker. The token times of such jobs are yielded.
        """
        for times in ended:
            job: Job = times.job.owner
            job.admitted_ns = times.job.admitted_ns
            job.cached_tokens = times.job.cached_tokens
            if job.output_tokens == 1:
                del self._workers[job]
                yield TokenTimes(job, times.instants)
            else:
                arrival_ns = times.instants[-1] + round(1e9 * self._transfer_s(job.prompt_tokens))
                self._workers[job] = None
                heappush(self._arriving, (arrival_ns, next(self._numbers), job))

    def _start_decoding(self) -> None:
        """Assign the job whose KV cache arrives first to a decode worker."""
        arrival_ns, _, job = heappop(self._arriving)
        self._first_ns[job] = arrival_ns
        remaining = Job(
            job.prompt_tokens + 1,
            job.output_tokens - 1,
            arrival_ns,
            owner=job,
            unsent_tokens=job.unsent_tokens,
        )
        self._place(job, remaining, self._decode)

    def _finished(self, times: TokenTimes) -> TokenTimes:
        """Return the token times of a whole job.

        `times` contains the times of the tokens that a decode worker generated. The result begins with the time of the
        first token, which a prefill worker generated.
        """
        job: Job = times.job.owner
        del self._workers[job]
        return TokenTimes(job, [self._first_ns.pop(job), *times.instants])
