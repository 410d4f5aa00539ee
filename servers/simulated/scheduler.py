"""Batch scheduling of an LLM engine: the rules of vLLM, TGI, LightLLM and SGLang as a state machine without a clock.

    waiting ──admit──> prefilling ──prompt computed, first token──> decoding ──last token──> finished
       ^                   │                                            │
       └────────────────── preempted: the KV cache is full ─────────────┘

A job is a request inside the engine. In a decode step of the engine, every decoding job gets one token. The caller of
the scheduler calls two methods for every step:

- `plan`, before the step, admits waiting jobs in order of arrival, as far as the policy allows. It returns the size of
  the step.
- `finish`, after the step, returns the jobs that got their first or their last token.

The caller also decides how long a step takes. The callers are token_clock.py, for servers that answer over HTTP, and
discrete_event.py, for simulations in virtual time. Orca (OSDI 2022) introduced scheduling per step.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal, NamedTuple

UNLIMITED = sys.maxsize
MIN_SHARE_FACTOR = 0.14
"""`reserve="share"`: the smallest share, relative to the share at the start (SGLang: min_new_token_ratio_factor)."""
SHARE_DECAY_STEPS = 600
"""`reserve="share"`: decode steps until the share is at its minimum (SGLang: new_token_ratio_decay_steps)."""
PREEMPTION_MARGIN_STEPS = 20
"""`reserve="share"`: decode steps that a preemption adds to the output of a job (SGLang: retract_decode_steps)."""
MAX_RESERVED_OUTPUT = 4096
"""`reserve="share"`: longer outputs count as this number of tokens (SGLang: clip_max_new_tokens_estimation)."""


@dataclass(slots=True, eq=False)
class Job:
    """A request inside the engine. The job is finished when `emitted == output_tokens`. Jobs compare by identity."""

    prompt_tokens: int
    output_tokens: int  # at least 1
    arrived_ns: int
    emitted: int = 0
    """Tokens generated so far. The scheduler updates this value when the job starts and stops decoding. While the job
    decodes, only a clock that returns every token updates the value."""
    reserved_tokens: int = 0
    """KV cache reserved at admission, in tokens."""
    computed_tokens: int = 0
    """Number of tokens that prefill has processed. After a preemption, prefill also processes earlier output tokens."""
    unsent_tokens: int = 0
    """Requested output tokens that will not be generated, because the client gives up the request."""
    owner: Any = None
    """A value for the caller. The scheduler does not use it."""
    prompt: Sequence[int] = ()
    """Token ids of the prompt, if known. The prefix cache identifies prompts by these ids."""
    cache_salt: str = ""
    """Prompts with different salts share no cached blocks."""
    block_hashes: list[int] = field(default_factory=list)
    """Set by the scheduler: one prefix cache key for each full block of the prompt."""
    last_decode_step: int = 0
    """Set by the scheduler: value of `Scheduler.decode_steps` when the job gets its last token."""
    admitted_ns: int | None = None
    """Set by the scheduler: start of the step in which the job left the queue. None while the job waits."""
    cached_tokens: int = 0
    """Set by the scheduler: number of prompt tokens that were in the prefix cache."""
    first_growth_step: int = 0
    """Set by the scheduler: value of `Scheduler.decode_steps` before the first step for which the job needs a new
    block."""

    @property
    def queue_ns(self) -> int:
        """Time in ns that the job spent in the queue. 0 for a job that was not admitted."""
        return 0 if self.admitted_ns is None else max(0, self.admitted_ns - self.arrived_ns)


@dataclass(frozen=True, slots=True)
class Gauges:
    """State of the scheduler, as a server's metrics page shows it."""

    running: int
    waiting: int
    kv_usage: float  # share of the KV cache in use, 0..1
    preemptions: int  # since the start
    cached_prompt_tokens: int = 0  # prompt tokens found in the prefix cache since the start
    draft_steps: int = 0  # decode steps with draft tokens since the start
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules that decide which jobs an engine processes in a step. scheduler_presets.py defines the policies."""

    running_limit: int
    """Maximum sequences in one step (vLLM: `max_num_seqs`, LightLLM: `running_max_req_size`)."""
    step_tokens: int
    """Maximum prompt tokens in one step (vLLM: `max_num_batched_tokens`, TGI: `max_batch_prefill_tokens`). With `mixed`
    prefill, each decoding sequence counts as one more token."""
    prefill: Literal["mixed", "separate", "chunked-first"]
    """How a step combines prompts and decoding.

    - `mixed`: chunked prefill, in which chunks of prompts share steps with decoding.
    - `separate`: whole prompts in steps without decoding. A prompt longer than `step_tokens` gets a separate step.
    - `chunked-first`: chunks of prompts in steps without decoding. No step decodes while a prompt can be computed.
    """
    decode_steps_per_prefill: int = 1
    """`separate`: minimum decode steps between two prefills while any sequence decodes (TGI: `max_waiting_tokens`)."""
    waiting_served_ratio: float | None = None
    """`separate`: prefill earlier if the number of jobs that can be admitted at once is at least this multiple of the
    number of decoding sequences (TGI's option of the same name)."""
    receive_steps: int = 1
    """`chunked-first`: decode steps between two checks for new requests (SGLang: `scheduler_recv_interval`)."""
    plans_ahead: bool = False
    """True: the engine plans each step while the step before it runs, so that the GPU does not wait for the scheduler
    (vLLM: `async_scheduling`, SGLang: the overlap scheduler). A job that arrives during a step cannot join the next
    step, which is planned already. It joins the step after that one."""
    batch_wait_steps: int = 0
    """`mixed` without chunks: maximum decode steps for which prompts wait for each other (TensorRT-LLM:
    `batch_wait_timeout_iters`)."""
    batch_wait_share: float = 0.9
    """`mixed` without chunks: share of `step_tokens` from which a step does not wait for more prompts (TensorRT-LLM:
    `batch_wait_max_tokens_ratio`)."""
    max_paddings: int | None = None
    """`separate`: maximum padding of a step in tokens, if every prompt is padded to the longest one (vLLM 0.2)."""
    reserve: Literal["nothing", "output", "peak", "share"] = "nothing"
    """KV cache that admission takes into account in addition to the prompt.

    - `nothing`: the cache of a sequence grows with its output. When the cache is full, the newest sequence is preempted
      and recomputed later.
    - `output`: the whole output is reserved at admission.
    - `peak`: nothing is reserved, but a job is admitted only if the largest future use of all running jobs fits the
      cache.
    - `share`: nothing is reserved, but a job is admitted only if its prompt and its whole output fit next to a share of
      the remaining output of all decoding jobs (SGLang's `new_token_ratio`). The share falls with every decode step,
      and is as at the start again when the engine becomes idle.

    The estimate for `peak` assumes that all prompts are computed at once. With chunked prefill, some jobs run longer
    than estimated, and the cache can still fill up. The newest sequence is then preempted, as LightLLM pauses requests.
    """
    block_size: int = 1
    """Tokens per block of KV cache."""
    watermark: float = 0.0
    """Share of the KV cache that admission leaves free."""
    chunked: bool = True
    """False: prompts are computed as a whole in one step, also with `mixed` and `chunked-first` prefill. A prompt
    longer than `step_tokens` gets a step without other prompts."""
    prefix_cache: bool = False
    """Full blocks of a prompt are not computed again if an earlier prompt begins with the same tokens."""
    cache_hit_rate: float = 0.0
    """Share of the tokens of each prompt that are found in the prefix cache, even if no earlier prompt had them."""
    output_share: float = 0.7
    """`share`: the share of the remaining output at the start (SGLang: 0.7 times `schedule_conservativeness`)."""
    memory_fraction: float
    """Share of the GPU memory that weights and KV cache may use (vLLM: `gpu_memory_utilization`)."""

    def with_serving(self, cache_hit_rate: float, chunked_prefill: str) -> Policy:
        """Return a copy of this policy with two options changed.

        - `cache_hit_rate` is the share of a prompt that is assumed to be in the prefix cache.
        - `chunked_prefill` decides whether prompts are split into chunks, and whether one step may both compute prompts
          and decode. It is a value of CHUNKED_PREFILL (loadgen.servers.hardware.inference), such as `mixed`. An empty
          string keeps the behaviour of this policy.
        """
        policy = replace(self, cache_hit_rate=cache_hit_rate)
        if chunked_prefill == "mixed":
            return replace(policy, prefill="mixed", chunked=True)
        if chunked_prefill == "separate":
            return replace(policy, prefill="chunked-first", chunked=True)
        if chunked_prefill == "off":
            return replace(policy, chunked=False)
        return policy

    def max_sequence_tokens(self, kv_tokens: int) -> int:
        """Return the maximum length of a job (prompt plus output, in tokens) in a KV cache of `kv_tokens` tokens."""
        return kv_tokens - int(self.watermark * kv_tokens) - self.block_size


class Batch(NamedTuple):
    """The work of one engine step, summed over all sequences that the step computes."""

    prompts: int
    prompt_tokens: int  # computed in this step
    pairs: int  # attention pairs of prefill: (prompt token, itself or an earlier token)
    decoding: int  # sequences that get one more token
    context: int  # tokens of all decoding sequences together


class Scheduler:
    """The waiting jobs, the running jobs and the KV cache of one engine.

    `kv_tokens` is the size of the KV cache in tokens. Each decoding job gets one token per step, and one block of cache
    every `block_size` steps. The scheduler does this bookkeeping for all decoding jobs together, so the time to
    schedule a step does not grow with the number of jobs.
    """

    def __init__(self, policy: Policy, kv_tokens: int) -> None:
        assert min(kv_tokens, policy.running_limit, policy.step_tokens, policy.block_size) >= 1
        self.policy = policy
        self.kv_tokens = kv_tokens
        self.waiting: deque[Job] = deque()
        # Both dicts are in order of admission. The newest job is the last of `_prefilling`. If `_prefilling` is empty,
        # the newest job is the last of `decoding`.
        self._prefilling: dict[Job, None] = {}
        self.decoding: dict[Job, None] = {}
        self.step_decodes = False  # the planned step decodes
        self.decode_steps = 0  # finished steps that decoded
        self._allocated_steps = 0  # decode steps for which blocks have been allocated
        self._free_tokens = kv_tokens
        self._watermark_tokens = int(policy.watermark * kv_tokens)
        self._max_sequence_tokens = policy.max_sequence_tokens(kv_tokens)
        self._allocates_while_decoding = policy.reserve != "output"
        self._context_tokens = 0  # prompt and output tokens of all decoding jobs
        # A heap of (`Job.last_decode_step`, unique number, job). Entries of removed jobs stay until they reach the top.
        self._completions: list[tuple[int, int, Job]] = []
        self._numbers = count()
        # Number of decoding jobs by `Job.first_growth_step` modulo the block size. Jobs of an entry grow in the same
        # steps.
        self._growing_jobs = [0] * policy.block_size
        self._chunks: list[tuple[Job, int]] = []  # (job, prompt tokens) of the planned step
        self._decode_steps_since_prefill = UNLIMITED
        self._min_share = policy.output_share * MIN_SHARE_FACTOR
        self._share = policy.output_share  # of the remaining output of decoding jobs, for admission
        self._admits_next_step = False  # the next step may admit the head of the queue although no job ends before it
        self._planned_ns = 0  # time at which the engine planned the step; later jobs cannot join the step
        self._batch_waited_steps = 0
        """Decode steps for which the first waiting prompt has waited for further prompts. TensorRT-LLM changes its
        counter only in steps with prompts and decoding jobs, so the counter keeps its value if no job decodes."""
        self._steps_since_receiving = policy.receive_steps
        self._preemptions = 0
        self._cached_prompt_tokens = 0
        # Hashes of the blocks in the prefix cache, least recently used first. Sharing saves computation only: a job
        # still reserves cache for its whole prompt, and eviction by outputs is not modelled. An OrderedDict, because
        # removing the first keys of a plain dict takes longer every time.
        self._prefix_cache = OrderedDict[int, None]()

    def submit(self, job: Job) -> None:
        """Add a job to the queue. Raises ValueError if the job does not fit even an empty KV cache."""
        assert job.output_tokens >= 1
        tokens = job.prompt_tokens + job.output_tokens + job.unsent_tokens
        usable_tokens = self.kv_tokens - self._watermark_tokens
        if tokens > self._max_sequence_tokens and (
            self.policy.reserve == "peak" or self._round_up_to_blocks(tokens - 1) > usable_tokens
        ):
            raise ValueError(
                f"{job.prompt_tokens} prompt and {job.output_tokens} output tokens never fit a KV cache of "
                f"{self.kv_tokens} tokens: limit the model's length to the cache"
            )
        if self.policy.prefix_cache:
            key = hash(job.cache_salt)
            size = self.policy.block_size
            for start in range(0, len(job.prompt) - size + 1, size):
                key = hash((key, *job.prompt[start : start + size]))
                job.block_hashes.append(key)
        self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """Remove a job and free its KV cache immediately. Finished and unknown jobs are ignored."""
        if job in self._prefilling:
            del self._prefilling[job]
            self._free_tokens += job.reserved_tokens
        elif job in self.decoding:
            self._stop_decoding(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache, so that later prompts are computed as a whole."""
        self._prefix_cache.clear()

    @property
    def running(self) -> int:
        """Number of admitted jobs, which are prefilling or decoding."""
        return len(self._prefilling) + len(self.decoding)

    def gauges(self) -> Gauges:
        """Return the current values for the metrics page."""
        usage = (self.kv_tokens - self._free_tokens) / self.kv_tokens
        return Gauges(self.running, len(self.waiting), usage, self._preemptions, self._cached_prompt_tokens)

    def plan(self, now_ns: int, previous_ns: int | None = None) -> Batch:
        """Decide which jobs the step that begins at `now_ns` processes, and return the size of the step.

        `previous_ns` is the start of the step before. The engine planned the step at that time if its policy has
        `plans_ahead`, and only jobs that arrived earlier can join. An engine that was idle plans the step at `now_ns`.
        """
        self._planned_ns = now_ns
        if self.policy.plans_ahead and self.running and previous_ns is not None:
            self._planned_ns = previous_ns
        self._chunks.clear()
        self._admits_next_step = False
        if not self.running and self.waiting and self.waiting[0].arrived_ns >= now_ns:
            self._share = self.policy.output_share  # the engine was idle until now, which resets SGLang's ratio
        if self.policy.prefill == "mixed":
            self._plan_mixed(now_ns)
        else:
            if self.policy.prefill == "separate":
                self._plan_prefill(now_ns)
            else:
                self._plan_chunks(now_ns)
            self.step_decodes = not self._chunks
            if self.step_decodes:
                self._allocate_for_decode()
        decoding = context = 0
        if self.step_decodes:
            decoding = len(self.decoding)
            context = self._context_tokens
        prompt_tokens = pairs = 0
        for job, chunk in self._chunks:
            prompt_tokens += chunk
            pairs += chunk * job.computed_tokens + chunk * (chunk + 1) // 2
        return Batch(len(self._chunks), prompt_tokens, pairs, decoding, context)

    def identical_steps(self) -> int:
        """Return how many consecutive steps can be computed at once, because they decode the same jobs.

        The planned step is the first of these steps. The result is 1 if the planned step computes prompts. Otherwise,
        the number of steps is limited by three conditions:

        - A job may get its last token only in the last of these steps.
        - A waiting job may be admitted only after the last of these steps.
        - The free KV cache must suffice for all of these steps.
        """
        if self._chunks or not self.decoding:
            return 1
        self._drop_stale_completions()
        steps = self._completions[0][0] - self.decode_steps
        if self.waiting:
            steps = self._steps_without_admission(steps)
        size = self.policy.block_size
        if self._allocates_while_decoding and self._free_tokens < len(self.decoding) * (steps + size):
            free_tokens = self._free_tokens  # blocks of the planned step are allocated already
            for step in range(1, steps):
                free_tokens -= self._growing_jobs[(self.decode_steps + step) % size] * size
                if free_tokens < 0:
                    return step
        return steps

    def finish(self, steps: int = 1) -> tuple[list[Job], list[Job]]:
        """End the planned step. If `steps` is larger than 1, also end the identical steps that follow it, `steps` steps
        in total.

        Return two lists. A job can be in both lists.

        - The jobs that got their first token. If a job was preempted, its first token after the preemption counts too.
        - The jobs that got their last token.
        """
        started: list[Job] = []
        ended: list[Job] = []
        if self.step_decodes:
            self._finish_decode(steps, ended)
        for job, chunk in self._chunks:
            if job not in self._prefilling:  # cancelled during the step
                continue
            job.computed_tokens += chunk
            if job.computed_tokens < job.prompt_tokens + job.emitted:
                continue
            del self._prefilling[job]
            self._start_decoding(job)
            started.append(job)
            if job.emitted == job.output_tokens:
                self._stop_decoding(job)
                ended.append(job)
        if self._chunks and not self.step_decodes:
            self._decode_steps_since_prefill = 0
        self._chunks.clear()
        return started, ended

    def _plan_mixed(self, now_ns: int) -> None:
        """Plan a step that serves decoding jobs and prompts together.

        All decoding jobs get a token. Prompts use the rest of the step's token budget. If a decoding job had to be
        preempted, no waiting job is admitted.
        """
        self.step_decodes = True
        preempted = self._allocate_for_decode()
        self._admits_next_step = preempted
        budget = self.policy.step_tokens - len(self.decoding)
        for job in self._prefilling:
            chunk = min(job.prompt_tokens + job.emitted - job.computed_tokens, budget)
            if chunk <= 0:
                break
            self._schedule_chunk(job, chunk)
            budget -= chunk
        if self.waiting and not preempted:  # after a preemption the freed blocks belong to older sequences
            self._admit(now_ns, budget)
            if self._waits_for_more_prompts():
                self._return_chunks()

    def _waits_for_more_prompts(self) -> bool:
        """Return True if the prompts of the planned step must wait for further prompts, so that a later step is larger.

        The method also counts the steps for which prompts have waited. They wait for at most `policy.batch_wait_steps`
        steps.
        """
        policy = self.policy
        if not (policy.batch_wait_steps and self._chunks and self.decoding):
            return False
        tokens = len(self.decoding) + sum(chunk for _, chunk in self._chunks)
        is_large = tokens >= policy.batch_wait_share * policy.step_tokens
        if is_large or self._batch_waited_steps >= policy.batch_wait_steps:
            self._batch_waited_steps = 0
            return False
        self._batch_waited_steps += 1
        self._admits_next_step = True
        return True

    def _return_chunks(self) -> None:
        """Return the jobs of the planned step to the queue."""
        for job, _ in reversed(self._chunks):
            if not job.emitted:  # the next admission counts the cached tokens again
                self._cached_prompt_tokens -= job.cached_tokens
                job.cached_tokens = 0
            self.cancel(job)
            self.waiting.appendleft(job)
        self._chunks.clear()

    def _plan_prefill(self, now_ns: int) -> None:
        """Plan a step that computes whole prompts, if the policy allows it now.

        The policy can require a number of decode steps since the last such step, or a number of waiting prompts.
        """
        policy = self.policy
        if not self.decoding or self._decode_steps_since_prefill >= policy.decode_steps_per_prefill:
            self._admit(now_ns, policy.step_tokens)
        elif policy.waiting_served_ratio is not None and self._decode_steps_since_prefill >= 1:
            min_prompts = int(len(self.decoding) * policy.waiting_served_ratio)
            if len(self.waiting) >= min_prompts:
                self._admit(now_ns, policy.step_tokens)
            if len(self._chunks) < min_prompts:
                self._return_chunks()

    def _plan_chunks(self, now_ns: int) -> None:
        """Plan a step that computes chunks of prompts, if any prompt has started or can be admitted."""
        budget = self.policy.step_tokens
        for job in self._prefilling:
            chunk = min(job.prompt_tokens + job.emitted - job.computed_tokens, budget)
            self._schedule_chunk(job, chunk)
            budget -= chunk
        if self._steps_since_receiving >= self.policy.receive_steps or not self.decoding:
            self._steps_since_receiving = 0
            if self.waiting:
                self._admit(now_ns, budget)
        if self._chunks:
            self._steps_since_receiving = self.policy.receive_steps  # new requests are received after every prompt

    def _admit(self, now_ns: int, budget: int) -> None:
        """Move jobs from the head of the queue into the planned step, in order of arrival.

        The prompts of these jobs can have at most `budget` tokens in this step. The admission ends at the first job
        that does not fit, even if a later job would fit. `now_ns` is the start of the step.
        """
        policy = self.policy
        whole_prompts = policy.prefill == "separate" or not policy.chunked
        longest = 0
        while self.waiting and budget > 0 and self.running < policy.running_limit:
            job = self.waiting[0]
            # A job that arrives exactly when the step is planned can start an idle engine but cannot join a running
            # batch. Otherwise the batch would depend on when the caller submits the job.
            if job.arrived_ns >= self._planned_ns and self.running:
                self._admits_next_step = True
                return
            known_tokens = job.prompt_tokens + job.emitted
            new_tokens = known_tokens - self._assumed_cached_tokens(job)
            if whole_prompts and self._chunks and new_tokens > budget:
                return
            reserved_tokens = self._tokens_to_reserve(job)
            if not self._has_room(job, reserved_tokens):
                return
            longest = max(longest, new_tokens)
            if whole_prompts and self._chunks and self._exceeds_padding(longest, new_tokens):
                return
            self.waiting.popleft()
            if not job.emitted:  # a preempted job was admitted before
                job.admitted_ns = now_ns
            self._free_tokens -= reserved_tokens
            job.reserved_tokens = reserved_tokens
            job.computed_tokens = self._find_cached_tokens(job, known_tokens)
            self._prefilling[job] = None
            chunk = known_tokens - job.computed_tokens
            if not whole_prompts:
                chunk = min(chunk, budget)
            self._schedule_chunk(job, chunk)
            budget -= chunk

    def _tokens_to_reserve(self, job: Job) -> int:
        """Return the number of tokens for which a job reserves KV cache at its admission.

        The policy decides whether this number includes the whole output or only the tokens that exist already.
        """
        if self.policy.reserve == "output":
            return self._round_up_to_blocks(job.prompt_tokens + job.output_tokens + job.unsent_tokens - 1)
        return self._round_up_to_blocks(job.prompt_tokens + job.emitted)

    def _has_room(self, job: Job, reserved_tokens: int) -> bool:
        """Return True if the KV cache has room for `job`, so that it can be admitted.

        The `reserved_tokens` tokens that the job reserves at its admission must always fit. Two policies also consider
        the tokens that `job` and the running jobs will generate later:

        - `share`: the free part of the cache must have room for the prompt of `job`, and for all tokens that the jobs
          are expected to generate.
        - `peak`: the whole cache must have room for the largest number of tokens that the jobs will have at one time.
        """
        if reserved_tokens > self._free_tokens - self._watermark_tokens:
            return False
        if self.policy.reserve == "share":
            return self._expected_tokens(job) < self._free_tokens
        return self.policy.reserve != "peak" or self._peak_tokens(job) < self.kv_tokens

    def _expected_tokens(self, candidate: Job) -> float:
        """Return the KV cache, in tokens, that the running jobs and `candidate` are still expected to take.

        - A decoding job is expected to generate only a share of its remaining output.
        - A job whose prompt is being computed is expected to generate its whole remaining output.
        - `candidate` is expected to take its prompt and its whole remaining output.

        The result is 0 if no job is running, because a job that fits the cache can always run alone.
        """
        if not self.running:
            return 0
        expected = candidate.prompt_tokens + candidate.emitted + float(_reserved_output(candidate, candidate.emitted))
        for job in self._prefilling:
            expected += _reserved_output(job, job.emitted)
        for job in self.decoding:
            expected += self._share * _reserved_output(
                job, job.output_tokens - job.last_decode_step + self.decode_steps
            )
        return expected

    def _exceeds_padding(self, longest: int, tokens: int) -> bool:
        """Return True if one more prompt of `tokens` tokens would make the planned step too large or too padded.

        All prompts of a step are padded to the length of the longest one, which is `longest` tokens with the additional
        prompt.
        """
        policy = self.policy
        if policy.max_paddings is None:
            return False
        padded_tokens = longest * (len(self._chunks) + 1)
        padding = padded_tokens - tokens - sum(chunk for _, chunk in self._chunks)
        return padded_tokens > policy.step_tokens or padding > policy.max_paddings

    def _peak_tokens(self, candidate: Job) -> int:
        """Return the maximum size of the KV cache that all running jobs and `candidate` will use together, in tokens.

        Let `f_i` be the final length of job `i`, and `r_i` the number of tokens that it will still generate. It uses
        `f_i - r_i` tokens now, or as soon as its prompt is computed. The jobs are sorted so that `r_1 >= r_2 >= ...`.
        The last job therefore ends first.

        The use is largest just before a job ends and frees its cache. Just before job `k` ends, jobs 1 to `k` are
        running, and each of them has grown by `r_k` tokens. The result is the maximum over these moments:

            max over k of (sum(f_i - r_i for i in 1..k) + k * r_k)
        """
        jobs = [  # (remaining tokens, final length)
            (
                job.last_decode_step - self.decode_steps + job.unsent_tokens,
                job.prompt_tokens + job.output_tokens + job.unsent_tokens,
            )
            for job in self.decoding
        ]
        jobs += [
            (
                job.output_tokens + job.unsent_tokens - job.emitted - 1,
                job.prompt_tokens + job.output_tokens + job.unsent_tokens,
            )
            for job in (*self._prefilling, candidate)
        ]
        jobs.sort(reverse=True)
        used = peak = 0
        for index, (remaining, final_length) in enumerate(jobs, 1):
            used += final_length - remaining
            peak = max(peak, used + remaining * index)
        return peak

    def _schedule_chunk(self, job: Job, chunk: int) -> None:
        """Add `chunk` tokens of a job's prompt to the planned step.

        The full blocks of these tokens enter the prefix cache immediately, before the step has computed them, as in
        vLLM. Other jobs can therefore reuse them at once.
        """
        self._chunks.append((job, chunk))
        size = self.policy.block_size
        cache = self._prefix_cache
        for key in job.block_hashes[job.computed_tokens // size : (job.computed_tokens + chunk) // size]:
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > self.kv_tokens // size:
            cache.popitem(last=False)

    def _assumed_cached_tokens(self, job: Job) -> int:
        """Return the number of prompt tokens of a job that the policy assumes to be in the prefix cache.

        The number is a fixed share of the prompt, `cache_hit_rate`. However, at least one token of the job is not in
        the cache, because the engine must compute a token to generate the next token.
        """
        return min(int(self.policy.cache_hit_rate * job.prompt_tokens), job.prompt_tokens + job.emitted - 1)

    def _find_cached_tokens(self, job: Job, known_tokens: int) -> int:
        """Return the number of a job's leading tokens that are in the prefix cache.

        Only full blocks count. The result is at least the number that `Policy.cache_hit_rate` assumes.

        `known_tokens` is the number of prompt tokens and output tokens of the job so far. The result is always lower,
        because the last of these tokens must be computed to generate the next token.
        """
        size = self.policy.block_size
        hits = 0
        for key in job.block_hashes[: (known_tokens - 1) // size]:
            if key not in self._prefix_cache:
                break
            self._prefix_cache.move_to_end(key)
            hits += size
        hits = max(hits, self._assumed_cached_tokens(job))
        if not job.emitted:  # a preempted job is counted once
            self._cached_prompt_tokens += hits
            job.cached_tokens = hits
        return hits

    def _steps_without_admission(self, limit: int) -> int:
        """Return how many steps the first waiting job certainly has to wait, from 1 to `limit`.

        The first of these steps is the planned step. The result is therefore 1 if the job might be admitted in the step
        after the planned step.
        """
        policy = self.policy
        since_prefill = self._decode_steps_since_prefill
        reserves_estimate = policy.reserve in ("peak", "share") and policy.receive_steps == 1
        if self._admits_next_step or (reserves_estimate and since_prefill >= policy.decode_steps_per_prefill):
            return 1
        if policy.waiting_served_ratio is not None and not since_prefill:
            return 1
        if policy.receive_steps > 1:
            return min(limit, max(1, policy.receive_steps - self._steps_since_receiving))
        if policy.prefill == "separate" and since_prefill < policy.decode_steps_per_prefill:
            return min(limit, policy.decode_steps_per_prefill - since_prefill)
        return limit

    def _finish_decode(self, steps: int, ended: list[Job]) -> None:
        """Record that `steps` decode steps have ended.

        Append the jobs that got their last token in these steps to `ended`.
        """
        size = self.policy.block_size
        if self._allocates_while_decoding:
            for step in range(self.decode_steps + 1, self.decode_steps + steps):
                self._free_tokens -= self._growing_jobs[step % size] * size
        self.decode_steps += steps
        self._share = max(
            self._min_share, self._share - steps * (self.policy.output_share - self._min_share) / SHARE_DECAY_STEPS
        )
        self._allocated_steps = self.decode_steps
        self._decode_steps_since_prefill += steps
        self._steps_since_receiving = 1 + (self._steps_since_receiving + steps - 1) % self.policy.receive_steps
        self._context_tokens += steps * len(self.decoding)
        while self._drop_stale_completions() and self._completions[0][0] == self.decode_steps:
            job = self._completions[0][2]
            self._stop_decoding(job)
            ended.append(job)

    def _start_decoding(self, job: Job) -> None:
        """Start the decoding of a job whose prompt has been computed.

        The job gets its first token now, and one more token in each later step.
        """
        job.emitted += 1
        job.last_decode_step = self.decode_steps + job.output_tokens - job.emitted
        self.decoding[job] = None
        self._context_tokens += job.prompt_tokens + job.emitted
        heappush(self._completions, (job.last_decode_step, next(self._numbers), job))
        if self._allocates_while_decoding:
            unused_tokens = job.reserved_tokens - job.prompt_tokens - job.emitted
            job.first_growth_step = self.decode_steps + unused_tokens + 1
            self._growing_jobs[job.first_growth_step % self.policy.block_size] += 1

    def _stop_decoding(self, job: Job) -> None:
        """Remove a decoding job, update its number of generated tokens (`emitted`) and free its KV cache."""
        del self.decoding[job]
        job.emitted = job.output_tokens - (job.last_decode_step - self.decode_steps)
        self._context_tokens -= job.prompt_tokens + job.emitted
        if self._allocates_while_decoding:
            size = self.policy.block_size
            self._growing_jobs[job.first_growth_step % size] -= 1
            new_blocks = max(0, (self._allocated_steps - 1 - job.first_growth_step) // size + 1)
            self._free_tokens += new_blocks * size
        self._free_tokens += job.reserved_tokens

    def _drop_stale_completions(self) -> bool:
        """Remove outdated entries from the top of the heap `_completions`.

        An entry states the step at which a job gets its last token. The entry is outdated if the job no longer decodes,
        or if it now ends at another step. Return True if the heap still has entries, and False if it is empty.
        """
        heap = self._completions
        while heap and (heap[0][2] not in self.decoding or heap[0][2].last_decode_step != heap[0][0]):
            heappop(heap)
        return bool(heap)

    def _allocate_for_decode(self) -> bool:
        """Allocate the KV-cache blocks for the next token of every decoding job. Return True if a job was preempted.

        If too few blocks are free, the newest jobs are preempted: their blocks are freed, and they wait to be computed
        again. No job is larger than the cache, so the oldest job always gets its blocks, and the engine cannot
        deadlock.
        """
        size = self.policy.block_size
        phase = self.decode_steps % size
        preempted = False
        while self._allocates_while_decoding and self._free_tokens < self._growing_jobs[phase] * size:
            newest = next(reversed(self._prefilling or self.decoding))
            self.cancel(newest)
            self.waiting.appendleft(newest)  # the preempted job is recomputed before all other waiting jobs
            self._preemptions += 1
            preempted = True
        if preempted and self.policy.reserve == "share" and self.decoding:
            jobs = self.decoding
            emitted = sum(job.output_tokens - job.last_decode_step + self.decode_steps for job in jobs)
            outputs = sum(job.output_tokens + job.unsent_tokens for job in jobs)
            self._share = min(1.0, (emitted + PREEMPTION_MARGIN_STEPS * len(jobs)) / outputs)
        if self._allocates_while_decoding:
            self._free_tokens -= self._growing_jobs[phase] * size
        self._allocated_steps = self.decode_steps + 1
        return preempted

    def _round_up_to_blocks(self, tokens: int) -> int:
        """Return `tokens`, rounded up to a multiple of the block size."""
        return -(-tokens // self.policy.block_size) * self.policy.block_size


def _reserved_output(job: Job, emitted: int) -> int:
    """Return the number of output tokens that `job` is expected to need from now on.

    This is its remaining output, but at most MAX_RESERVED_OUTPUT tokens. The scheduler uses the number to decide
    whether a further job fits into the KV cache. `emitted` is the number of tokens that `job` has generated so far.
    """
    return min(job.output_tokens + job.unsent_tokens - emitted, MAX_RESERVED_OUTPUT)
