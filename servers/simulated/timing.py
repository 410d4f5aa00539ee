"""When a simulated server's tokens leave: a clock that follows a script, and one that batches like an engine.

Both have the same methods and never read the time: every instant is in nanoseconds of the caller's monotonic clock and
is given by the caller, never backwards, so tests drive a clock through hours in microseconds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from random import Random
from typing import Any, Literal

from servers.hardware import Work

UNLIMITED = sys.maxsize


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the simulated server. Compared by identity; finished when `emitted == output_tokens`."""

    prompt_tokens: int
    output_tokens: int  # at least 1
    arrived_ns: int
    emitted: int = 0  # tokens that the clock has handed out so far; only the clock writes it, and the next two
    held: int = 0  # KV cache taken, in tokens
    computed: int = 0  # tokens of the known sequence, prompt and what was emitted, that prefill has been through
    owner: Any = None  # whatever the caller wants back with each emission; the clock does not look at it
    prompt: Sequence[int] = ()  # token ids, where they are known: what the prefix cache knows a prompt by
    salt: str = ""  # prompts of different salts share nothing
    prefix: list[int] = field(default_factory=list)  # the clock's: a key for each whole block of the prompt


Emission = tuple[Job, int, int]  # (job, tokens, due_ns): so many tokens of this job are due at this instant


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a server's metrics page says about its scheduler."""

    running: int
    waiting: int
    kv_usage: float  # share of the KV cache in use, 0..1
    preemptions: int  # since the start
    prefix_hits: int = 0  # prompt tokens since the start that the prefix cache had already


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
        place, base_ns = next(self._places), job.arrived_ns + self._ttft_ns
        jitter = self._jitter(place) if self._jitter_ns else None
        due_ns = max(job.arrived_ns, base_ns + jitter()) if jitter else base_ns
        heappush(self._heap, (due_ns, place, job, base_ns, jitter))
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
            due_ns, place, job, base_ns, jitter = heap[0]
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

    def _jitter(self, place: int) -> Callable[[], int]:
        """Uniform integers from [-jitter_ns, jitter_ns], one stream per job."""
        random, limit_ns = Random(f"{self._seed}/{place}").random, self._jitter_ns  # noqa: S311 - noise, not a secret
        return lambda: int(random() * (2 * limit_ns + 1)) - limit_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one server kind fills the steps of its engine."""

    running_limit: int  # sequences in one step
    step_tokens: int
    """Prompt tokens in one step; with `mixed` prefill the decoding sequences count too, one token each."""
    prefill: Literal["mixed", "alone"]
    """`mixed`: prompts are cut into chunks that share steps with decoding. `alone`: whole prompts in steps of their
    own, between which decoding gets one step; a prompt longer than `step_tokens` gets a step to itself."""
    reserve_output: bool = False
    """Admission takes KV cache for prompt and output at once. Otherwise for the prompt, and more as the output grows;
    when there is no more, the newest sequence is preempted and later computed again."""
    block_tokens: int = 1  # KV cache is handed out in blocks of so many tokens
    prefix_cache: bool = False  # whole blocks that an earlier prompt began with are not computed again
    memory_fraction: float  # share of the GPU's memory that weights and KV cache may fill


class BatchingClock:
    """Batches per iteration, after Orca (OSDI 2022) and vLLM (SOSP 2023), on a cache of `kv_tokens`: before a step it
    admits waiting jobs, first come first served, as far as running limit, KV cache and the step's token budget allow;
    after `step_ns(work) / speed` every sequence that took part emits one token.

        waiting ──admit──> prefilling ──prompt computed, first token──> decoding ──last token──> gone
           ^                   │                                            │
           └────────────────── preempted: the KV cache is full ─────────────┘

    A step's members are fixed at its start. Asking late changes nothing: a step begins where the one before it ended,
    and admits only jobs that had arrived before.
    """

    def __init__(self, policy: Policy, kv_tokens: int, step_ns: Callable[[Work], int], speed: float = 1.0) -> None:
        assert min(kv_tokens, policy.running_limit, policy.step_tokens, policy.block_tokens) >= 1
        self._kv_tokens = self._free = kv_tokens
        self._policy, self._step_ns, self._speed = policy, step_ns, speed
        self._waiting: deque[Job] = deque()
        # Both in order of admission, so that the newest job is the last of `_prefilling`, else of `_decoding`.
        self._prefilling: dict[Job, None] = {}
        self._decoding: dict[Job, None] = {}
        self._decoding_tokens = 0  # known tokens of all decoding sequences, kept as a running sum
        self._chunks: list[tuple[Job, int]] = []  # prompt tokens that the current step computes
        self._decodes = False  # the current step decodes
        self._end_ns: int | None = None  # end of the current step; None when idle
        self._idle_from_ns = 0
        # Steps without a pause between them are added up at speed 1 and divided once: rounding never accumulates.
        self._busy_from_ns = self._busy_ns = 0
        self._preemptions = self._prefix_hits = 0
        # Keys of the blocks in the prefix cache, the least recently used first. Sharing saves computing alone: a job
        # still takes cache for its whole prompt, and what outputs push out is not modelled.
        self._cached: dict[int, None] = {}

    def submit(self, job: Job, now_ns: int) -> None:
        """Raises ValueError for a job that the whole KV cache could not hold."""
        assert job.output_tokens >= 1
        assert job.arrived_ns <= now_ns
        if self._blocks(job.prompt_tokens + job.output_tokens - 1) > self._kv_tokens:
            what = f"{job.prompt_tokens} prompt and {job.output_tokens} output tokens"
            why = f"never fit a KV cache of {self._kv_tokens} tokens: limit the model's length to the cache"
            raise ValueError(f"{what} {why}")
        if self._policy.prefix_cache:
            key, size = hash(job.salt), self._policy.block_tokens
            for start in range(0, len(job.prompt) - size + 1, size):
                key = hash((key, *job.prompt[start : start + size]))
                job.prefix.append(key)
        self._waiting.append(job)
        if self._end_ns is None:
            self._start_after_pause()

    def cancel(self, job: Job, now_ns: int) -> None:  # noqa: ARG002 - what a job holds is free at once
        """The step under way keeps its length."""
        if job in self._prefilling:
            del self._prefilling[job]
            self._free += job.held
        elif job in self._decoding:
            self._leave_decoding(job)
        elif job in self._waiting:
            self._waiting.remove(job)

    def next_ns(self) -> int | None:
        """As ScriptClock; the call may return nothing, as a step can consist of unfinished prefill alone."""
        return self._end_ns

    def emissions(self, now_ns: int) -> list[Emission]:
        """As ScriptClock. A step of 256 sequences costs well under 0.1 ms."""
        due: list[Emission] = []
        while self._end_ns is not None and self._end_ns <= now_ns:
            end_ns = self._end_ns
            self._finish_step(end_ns, due)
            if self._prefilling or self._decoding or (self._waiting and self._waiting[0].arrived_ns < end_ns):
                self._start_step(end_ns)
                continue
            self._end_ns, self._idle_from_ns = None, end_ns
            if self._waiting:
                self._start_after_pause()
        return due

    def gauges(self) -> Gauges:
        running, usage = len(self._prefilling) + len(self._decoding), (self._kv_tokens - self._free) / self._kv_tokens
        return Gauges(running, len(self._waiting), usage, self._preemptions, self._prefix_hits)

    def _start_after_pause(self) -> None:
        self._busy_from_ns, self._busy_ns = max(self._waiting[0].arrived_ns, self._idle_from_ns), 0
        self._start_step(self._busy_from_ns)

    def _start_step(self, now_ns: int) -> None:
        if self._policy.prefill == "mixed":
            self._grow()
            budget = self._policy.step_tokens - len(self._decoding)
            for job in self._prefilling:  # prompts that are partly computed get their next chunks
                chunk = min(job.prompt_tokens + job.emitted - job.computed, budget)
                if chunk <= 0:
                    break
                self._take(job, chunk)
                budget -= chunk
            self._admit(now_ns, budget)
            self._decodes = True
        else:
            if self._decodes or not self._decoding:  # else the step before was a prefill
                self._admit(now_ns, self._policy.step_tokens)
            self._decodes = not self._chunks
        self._busy_ns += self._step_ns(self._work())
        self._end_ns = self._busy_from_ns + int(self._busy_ns / self._speed)

    def _work(self) -> Work:
        tokens = logits = len(self._decoding) if self._decodes else 0
        pairs = kv_tokens = self._decoding_tokens if self._decodes else 0
        for job, chunk in self._chunks:
            tokens += chunk
            logits += 1
            pairs += chunk * job.computed + chunk * (chunk + 1) // 2
            kv_tokens += job.computed + chunk
        return Work(tokens, logits, pairs, kv_tokens)

    def _finish_step(self, end_ns: int, due: list[Emission]) -> None:
        """Hands out the step's tokens, except to those that were cancelled while it ran."""
        if self._decodes:
            for job in self._decoding:
                job.emitted += 1
                due.append((job, 1, end_ns))
            self._decoding_tokens += len(self._decoding)
            for job in [job for job in self._decoding if job.emitted == job.output_tokens]:
                self._leave_decoding(job)
        for job, chunk in self._chunks:
            if job not in self._prefilling:
                continue
            job.computed += chunk
            if job.computed < job.prompt_tokens + job.emitted:
                continue
            del self._prefilling[job]
            job.emitted += 1
            due.append((job, 1, end_ns))
            self._decoding[job] = None
            self._decoding_tokens += job.prompt_tokens + job.emitted
            if job.emitted == job.output_tokens:
                self._leave_decoding(job)
        self._chunks.clear()

    def _admit(self, now_ns: int, budget: int) -> None:
        """Moves jobs from the head of the queue into the step. The first that does not fit blocks those behind it."""
        whole = self._policy.prefill == "alone"
        while self._waiting and budget > 0 and len(self._prefilling) + len(self._decoding) < self._policy.running_limit:
            job = self._waiting[0]
            known = job.prompt_tokens + job.emitted
            held = self._blocks(job.prompt_tokens + job.output_tokens - 1 if self._policy.reserve_output else known)
            # An arrival at this very instant ends a pause, but joins no batch, or asking late would change the batch.
            too_late = job.arrived_ns >= now_ns and (self._prefilling or self._decoding)
            if too_late or held > self._free or (whole and known > budget and self._chunks):
                return
            self._waiting.popleft()
            self._free -= held
            job.held, job.computed = held, self._cached_tokens(job, known)
            self._prefilling[job] = None
            chunk = known if whole else min(known - job.computed, budget)
            self._take(job, chunk)
            budget -= chunk

    def _take(self, job: Job, chunk: int) -> None:
        """Computes so many tokens of a job in this step; their blocks can be shared from now on, as in vLLM."""
        self._chunks.append((job, chunk))
        size, cached = self._policy.block_tokens, self._cached
        for key in job.prefix[job.computed // size : (job.computed + chunk) // size]:
            cached.pop(key, None)
            cached[key] = None
        while len(cached) > self._kv_tokens // size:
            del cached[next(iter(cached))]

    def _cached_tokens(self, job: Job, known: int) -> int:
        """How many of the first tokens are in the prefix cache: whole blocks, and never all that is known, as the last
        token has to be computed for its successor."""
        size, hits = self._policy.block_tokens, 0
        for key in job.prefix[: (known - 1) // size]:
            if key not in self._cached:
                break
            self._cached[key] = self._cached.pop(key)
            hits += size
        self._prefix_hits += hits * (not job.emitted)  # a job that was preempted is not counted again
        return hits

    def _grow(self) -> None:
        """Makes room for the token that each decoding sequence is about to add, by preemption where there is none. The
        oldest sequence always gets its room, because no job is larger than the cache: the engine cannot lock up. A step
        that preempts admits nobody: the job now in front of the queue needs all that it gave up, and of that an older
        sequence has taken some."""
        block_tokens = self._policy.block_tokens
        for job in list(self._decoding):
            if job.prompt_tokens + job.emitted <= job.held:
                continue
            while self._free < block_tokens and job in self._decoding:
                newest = next(reversed(self._prefilling or self._decoding))
                self.cancel(newest, now_ns=0)  # its cache is free; its job will be computed again, before all others
                self._waiting.appendleft(newest)
                self._preemptions += 1
            if job in self._decoding:
                job.held += block_tokens
                self._free -= block_tokens

    def _leave_decoding(self, job: Job) -> None:
        del self._decoding[job]
        self._free += job.held
        self._decoding_tokens -= job.prompt_tokens + job.emitted

    def _blocks(self, tokens: int) -> int:
        """`tokens`, rounded up to whole blocks."""
        return -(-tokens // self._policy.block_tokens) * self._policy.block_tokens


TokenClock = ScriptClock | BatchingClock
