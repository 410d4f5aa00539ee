"""Which requests share a step of an engine: the rules of vLLM, TGI and LightLLM, as a state machine that knows no time.

    waiting ──admit──> prefilling ──prompt computed, first token──> decoding ──last token──> gone
       ^                   │                                            │
       └────────────────── preempted: the KV cache is full ─────────────┘

Before a step, `plan` admits waiting jobs, first come first served, as far as the rules allow, and says what the step
computes; `finish` is told when it has. How long it took is somebody else's: servers/simulated/token_clock.py for
servers that answer over HTTP, servers/simulated/discrete_event.py where nobody waits. Batching per iteration is Orca's
(OSDI 2022).
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal, NamedTuple

UNLIMITED = sys.maxsize


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the simulated server. Compared by identity; finished when `emitted == output_tokens`."""

    prompt_tokens: int
    output_tokens: int  # at least 1
    arrived_ns: int
    emitted: int = 0  # tokens that it has got; while it decodes only a clock that hands out each keeps it up to date
    held: int = 0  # KV cache taken at admission, in tokens
    computed: int = 0  # tokens of the known sequence, prompt and what was emitted, that prefill has been through
    owner: Any = None  # whatever the caller wants back; the scheduler does not look at it
    prompt: Sequence[int] = ()  # token ids, where they are known: what the prefix cache knows a prompt by
    salt: str = ""  # prompts of different salts share nothing
    prefix: list[int] = field(default_factory=list)  # the scheduler's: a key for each whole block of the prompt
    ends: int = 0  # the scheduler's, as the next: how many steps will have decoded when it has its last token
    grows: int = 0  # before which of these steps it first needs another block


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a server's metrics page says about its scheduler."""

    running: int
    waiting: int
    kv_usage: float  # share of the KV cache in use, 0..1
    preemptions: int  # since the start
    cached_prompt_tokens: int = 0  # prompt tokens since the start that the prefix cache had already


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How one server kind fills the steps of its engine; which numbers are whose:
    servers/simulated/scheduler_presets.py."""

    running_limit: int  # sequences in one step
    step_tokens: int
    """Prompt tokens in one step; with `mixed` prefill the decoding sequences count too, one token each."""
    prefill: Literal["mixed", "separate"]
    """`mixed`: prompts are cut into chunks that share steps with decoding. `alone`: whole prompts in steps of their
    own; a prompt longer than `step_tokens` gets a step to itself."""
    decode_steps_per_prefill: int = 1
    """`alone`: so many steps decode after a prefill before the next, while anybody decodes."""
    waiting_served_ratio: float | None = None
    """`alone`: sooner than that where at least so many times the running number can be admitted at once."""
    max_paddings: int | None = None
    """`alone`: prompts of a step count as the longest of them; so many tokens of padding at most."""
    reserve: Literal["nothing", "output", "peak"] = "nothing"
    """What admission takes of the KV cache beside the prompt: `nothing`, and more as the output grows, and when there
    is no more, the newest sequence is preempted and later computed again; the whole `output`; or nothing, but only
    while the `peak` that all running will ever hold together fits, were all prompts computed at once: with chunks some
    last longer, and a cache that is full after all preempts too, as LightLLM pauses requests."""
    block_size: int = 1  # KV cache is handed out in blocks of so many tokens
    watermark: float = 0.0  # share of the cache that admission leaves free
    prefix_cache: bool = False  # whole blocks that an earlier prompt began with are not computed again
    memory_fraction: float  # share of the GPU's memory that weights and KV cache may fill

    def longest(self, kv_tokens: int) -> int:
        """Prompt and output of a job for which so large a cache has room."""
        return kv_tokens - int(self.watermark * kv_tokens) - self.block_size


class Batch(NamedTuple):
    """What one step computes, in totals."""

    prompts: int
    prompt_tokens: int  # of them, in this step
    pairs: int  # (token of a prompt, earlier token or itself)
    decoding: int  # sequences that get one more token
    context: int  # tokens that these hold together


class Scheduler:
    """The jobs of one engine on a KV cache of `kv_tokens`. What all decoding jobs share, a token per step and a block
    every so many, is counted once for all of them: a step costs the same however many decode."""

    def __init__(self, policy: Policy, kv_tokens: int) -> None:
        assert min(kv_tokens, policy.running_limit, policy.step_tokens, policy.block_size) >= 1
        self.policy, self.kv_tokens = policy, kv_tokens
        self.waiting: deque[Job] = deque()
        # Both in order of admission, so that the newest job is the last of `_prefilling`, else of `decoding`.
        self._prefilling: dict[Job, None] = {}
        self.decoding: dict[Job, None] = {}
        self.decodes = False  # the planned step decodes
        self.decoded = 0  # steps that did, since the start
        self._grown = 0  # steps for which room was made
        self._free = kv_tokens
        self._margin = int(policy.watermark * kv_tokens)
        self._most, self._longest = kv_tokens - self._margin, policy.longest(kv_tokens)
        self._grows = policy.reserve != "output"
        self._context = 0  # known tokens of all decoding jobs
        self._ends: list[tuple[int, int, Job]] = []  # a heap: (`Job.ends`, unique, job); of some that have left, too
        self._places = count()
        self._growing = [0] * policy.block_size  # decoding jobs by `Job.grows`, modulo the size of a block
        self._chunks: list[tuple[Job, int]] = []  # prompt tokens that the planned step computes
        self._since = UNLIMITED  # steps that decoded since the last prefill
        self._late = False  # the head of the queue may be admitted to the next step, without anybody's end
        self._preemptions = self._prefix_hits = 0
        # Keys of the blocks in the prefix cache, the least recently used first. Sharing saves computing alone: a job
        # still takes cache for its whole prompt, and what outputs push out is not modelled.
        self._cached = OrderedDict[int, None]()  # of a dict that loses its first keys, the next takes ever longer

    def submit(self, job: Job) -> None:
        """Raises ValueError for a job that the whole KV cache could not hold."""
        assert job.output_tokens >= 1
        tokens = job.prompt_tokens + job.output_tokens
        if tokens > self._longest and (self.policy.reserve == "peak" or self._blocks(tokens - 1) > self._most):
            what = f"{job.prompt_tokens} prompt and {job.output_tokens} output tokens"
            why = f"never fit a KV cache of {self.kv_tokens} tokens: limit the model's length to the cache"
            raise ValueError(f"{what} {why}")
        if self.policy.prefix_cache:
            key, size = hash(job.salt), self.policy.block_size
            for start in range(0, len(job.prompt) - size + 1, size):
                key = hash((key, *job.prompt[start : start + size]))
                job.prefix.append(key)
        self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """Forgets a job; what it holds is free at once. One that is finished or unknown is ignored."""
        if job in self._prefilling:
            del self._prefilling[job]
            self._free += job.held
        elif job in self.decoding:
            self._leave(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    @property
    def running(self) -> int:
        """Jobs that are admitted."""
        return len(self._prefilling) + len(self.decoding)

    def gauges(self) -> Gauges:
        """As they are now."""
        usage = (self.kv_tokens - self._free) / self.kv_tokens
        return Gauges(self.running, len(self.waiting), usage, self._preemptions, self._prefix_hits)

    def plan(self, now_ns: int) -> Batch:
        """Fixes the step that begins now, and says what it computes."""
        self._chunks.clear()
        self._late = False
        if self.policy.prefill == "mixed":
            self.decodes = True
            self._late = preempted = self._grow()
            budget = self.policy.step_tokens - len(self.decoding)
            for job in self._prefilling:  # prompts that are partly computed get their next chunks
                chunk = min(job.prompt_tokens + job.emitted - job.computed, budget)
                if chunk <= 0:
                    break
                self._take(job, chunk)
                budget -= chunk
            if self.waiting and not preempted:  # who was needs what it gave up, of which an older one has taken some
                self._admit(now_ns, budget)
        else:
            self._prefill_alone(now_ns)
            self.decodes = not self._chunks
            if self.decodes:
                self._grow()
        decoding, context = (len(self.decoding), self._context) if self.decodes else (0, 0)
        if not self._chunks:
            return Batch(0, 0, 0, decoding, context)
        tokens = pairs = 0
        for job, chunk in self._chunks:
            tokens += chunk
            pairs += chunk * job.computed + chunk * (chunk + 1) // 2
        return Batch(len(self._chunks), tokens, pairs, decoding, context)

    def alike(self) -> int:
        """How many steps, the planned one among them, are the same but for the context: all decode, nobody's last token
        comes before the last of them, and of those who wait nobody can be admitted meanwhile."""
        if self._chunks or not self.decoding:
            return 1
        self._drop_gone()
        steps, policy = self._ends[0][0] - self.decoded, self.policy
        if self.waiting:
            if self._late or (policy.reserve == "peak" and self._since >= policy.decode_steps_per_prefill):
                return 1
            if policy.waiting_served_ratio is not None and not self._since:
                return 1
            if policy.prefill == "separate" and self._since < policy.decode_steps_per_prefill:
                steps = min(steps, policy.decode_steps_per_prefill - self._since)
        size = policy.block_size
        if self._grows and self._free < len(self.decoding) * (steps + size):
            left = self._free  # the planned step has its room already
            for step in range(1, steps):
                left -= self._growing[(self.decoded + step) % size] * size
                if left < 0:
                    return step
        return steps

    def finish(self, steps: int = 1) -> tuple[list[Job], list[Job]]:
        """The planned step is over, and those `alike` behind it, `steps` in all. Returns the jobs that got their first
        token, or their first since a preemption, and those that got their last; a job can be in both."""
        begun: list[Job] = []
        ended: list[Job] = []
        if self.decodes:
            size = self.policy.block_size
            if self._grows:
                for step in range(self.decoded + 1, self.decoded + steps):
                    self._free -= self._growing[step % size] * size
            self.decoded += steps
            self._grown = self.decoded
            self._since += steps
            self._context += steps * len(self.decoding)
            while self._drop_gone() and self._ends[0][0] == self.decoded:
                job = self._ends[0][2]
                self._leave(job)
                ended.append(job)
        for job, chunk in self._chunks:
            if job not in self._prefilling:  # cancelled while the step ran
                continue
            job.computed += chunk
            if job.computed < job.prompt_tokens + job.emitted:
                continue
            del self._prefilling[job]
            self._join(job)
            begun.append(job)
            if job.emitted == job.output_tokens:
                self._leave(job)
                ended.append(job)
        if self._chunks and not self.decodes:
            self._since = 0
        self._chunks.clear()
        return begun, ended

    def _join(self, job: Job) -> None:
        """A prompt is computed: its first token, and more from the next step on."""
        job.emitted += 1
        job.ends = self.decoded + job.output_tokens - job.emitted
        self.decoding[job] = None
        self._context += job.prompt_tokens + job.emitted
        heappush(self._ends, (job.ends, next(self._places), job))
        if self._grows:
            job.grows = self.decoded + job.held + 1 - job.prompt_tokens - job.emitted
            self._growing[job.grows % self.policy.block_size] += 1

    def _leave(self, job: Job) -> None:
        """A job decodes no longer."""
        del self.decoding[job]
        job.emitted = job.output_tokens - (job.ends - self.decoded)
        self._context -= job.prompt_tokens + job.emitted
        if self._grows:
            size = self.policy.block_size
            self._growing[job.grows % size] -= 1
            self._free += max(0, (self._grown - 1 - job.grows) // size + 1) * size
        self._free += job.held

    def _drop_gone(self) -> bool:
        """Keeps a job that decodes at the top of the heap; False for none."""
        ends = self._ends
        while ends and (ends[0][2] not in self.decoding or ends[0][2].ends != ends[0][0]):
            heappop(ends)
        return bool(ends)

    def _grow(self) -> bool:
        """Makes room for the token that each decoding job is about to add, by preemption of the newest where there is
        none. The oldest always gets its room, because no job is larger than the cache: the engine cannot lock up."""
        size, index, preempted = self.policy.block_size, self.decoded % self.policy.block_size, False
        while self._grows and self._free < self._growing[index] * size:
            newest = next(reversed(self._prefilling or self.decoding))
            self.cancel(newest)  # its cache is free; its job will be computed again, before all others
            self.waiting.appendleft(newest)
            self._preemptions += 1
            preempted = True
        if self._grows:
            self._free -= self._growing[index] * size
        self._grown = self.decoded + 1
        return preempted

    def _prefill_alone(self, now_ns: int) -> None:
        """Whole prompts, if it is their turn."""
        policy = self.policy
        if not self.decoding or self._since >= policy.decode_steps_per_prefill:
            self._admit(now_ns, policy.step_tokens)
        elif policy.waiting_served_ratio is not None and self._since >= 1:
            minimum = int(len(self.decoding) * policy.waiting_served_ratio)
            if len(self.waiting) >= minimum:
                self._admit(now_ns, policy.step_tokens)
            if len(self._chunks) < minimum:
                for job, _ in reversed(self._chunks):
                    self.cancel(job)
                    self.waiting.appendleft(job)
                self._chunks.clear()

    def _admit(self, now_ns: int, budget: int) -> None:
        """Moves jobs from the head of the queue into the step. The first that does not fit blocks those behind it."""
        policy, whole, longest = self.policy, self.policy.prefill == "separate", 0
        while self.waiting and budget > 0 and self.running < policy.running_limit:
            job = self.waiting[0]
            known = job.prompt_tokens + job.emitted
            held = self._blocks(job.prompt_tokens + job.output_tokens - 1 if policy.reserve == "output" else known)
            # An arrival at this very instant ends a pause, but joins no batch, or asking late would change the batch.
            if job.arrived_ns >= now_ns and self.running:
                self._late = True
                return
            if held > self._free - self._margin or (whole and self._chunks and known > budget):
                return
            if policy.reserve == "peak" and self._peak(job) >= self.kv_tokens:
                return
            if whole and policy.max_paddings is not None and self._chunks:
                longest = max(longest, known)
                padded = longest * (len(self._chunks) + 1)
                padding = padded - known - sum(chunk for _, chunk in self._chunks)
                if padded > policy.step_tokens or padding > policy.max_paddings:
                    return
            longest = max(longest, known)
            self.waiting.popleft()
            self._free -= held
            job.held, job.computed = held, self._cached_tokens(job, known)
            self._prefilling[job] = None
            chunk = known if whole else min(known - job.computed, budget)
            self._take(job, chunk)
            budget -= chunk

    def _peak(self, candidate: Job) -> int:
        """Tokens that all running and this one will hold at most, each until its last: whoever ends k-th from last
        frees its cache before those that stay reach theirs."""
        known = [(job.ends - self.decoded, job.prompt_tokens + job.output_tokens) for job in self.decoding]
        known += [
            (job.output_tokens - job.emitted - 1, job.prompt_tokens + job.output_tokens) for job in self._prefilling
        ]
        known.append(
            (candidate.output_tokens - candidate.emitted - 1, candidate.prompt_tokens + candidate.output_tokens)
        )
        held = maximum = 0
        for index, (left, whole) in enumerate(sorted(known, reverse=True), 1):
            held += whole - left
            maximum = max(maximum, held + left * index)
        return maximum

    def _take(self, job: Job, chunk: int) -> None:
        """Computes so many tokens of a job in this step; their blocks can be shared from now on, as in vLLM."""
        self._chunks.append((job, chunk))
        size, cached = self.policy.block_size, self._cached
        for key in job.prefix[job.computed // size : (job.computed + chunk) // size]:
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > self.kv_tokens // size:
            cached.popitem(last=False)

    def _cached_tokens(self, job: Job, known: int) -> int:
        """How many of the first tokens are in the prefix cache: whole blocks, and never all that is known, as the last
        token has to be computed for its successor."""
        size, hits = self.policy.block_size, 0
        for key in job.prefix[: (known - 1) // size]:
            if key not in self._cached:
                break
            self._cached.move_to_end(key)
            hits += size
        self._prefix_hits += hits * (not job.emitted)  # a job that was preempted is not counted again
        return hits

    def _blocks(self, tokens: int) -> int:
        """`tokens`, rounded up to whole blocks."""
        return -(-tokens // self.policy.block_size) * self.policy.block_size
