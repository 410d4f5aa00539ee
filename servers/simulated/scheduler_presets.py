"""Presets for the simulated schedulers of vLLM, TGI, LightLLM, SGLang and TEI.

A preset describes one version of an engine: `current`, or `2023` (autumn 2023). SGLang and TEI have only the preset
`current`. A preset has two parts:

- The batching policy: the rules by which the engine forms batches. A comment names the source files of the engine that
  contain these rules.
- The overheads: numbers that say how much longer a step takes than its kernels.

The overheads have these sources:

- `current`: the rows of vLLM and SGLang in servers/hardware/frameworks.csv. The other engines are assumed to have the
  overheads of vLLM, because no measurements of them are published.
- `2023`: a fit to the measurements in github.com/L1aoXingyu/llm-infer-bench (commit a13f639: a 13B model on one A800,
  with bursts of 1000 requests and with Poisson arrivals). An engine has the same overheads at every load. `python -m
  benchmarks.schedulers` reports the remaining errors. The times of worker processes were measured separately, without
  GPUs: see docs/concepts/simulated-timing.md. No engine of 2023 was compared with a server with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loadgen.servers.hardware import HardwareError, ModelShape
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.roofline import make_deployment
from loadgen.servers.simulated.scheduler import UNLIMITED, Policy
from loadgen.servers.simulated.step_time import NO_TIME, HostTime, StepTime

CURRENT = "current"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The batching policy and the overheads of one version of a server's engine."""

    version: str
    policy: Policy
    kv_share_of_step: float = 0.0
    """Minimum of `policy.step_tokens` as a share of the KV cache, for engines that derive this limit from the cache
    size."""
    framework: str = "vLLM"
    """Row of frameworks.csv with the overheads of the engine. Each field below replaces a value of this row if the
    field is greater than 0."""
    launch_s: float = 0.0
    """Time to launch the kernels of one layer from Python, without CUDA graphs. A step takes at least this time per
    layer."""
    step_s: float = 0.0
    sequence_s: float = 0.0
    kv_share: float = 0.0
    prefill_share: float = 0.0
    nccl: float = 0.0
    kv_per_query_head: float = 0.0
    worker_each: HostTime = NO_TIME
    """Time on the host per step and worker process, if the engine sends the batch to one worker after another. Only a
    deployment with tensor parallelism has worker processes, one per GPU."""
    worker_once: HostTime = NO_TIME
    """Time on the host per step that the exchange with the worker processes takes once, whatever their number."""

    def deployment(self, gpu_name: str, model_name: str | ModelShape, **options: Any) -> Deployment:
        """Return a deployment of this engine with a model on a GPU.

        `options` are further keyword arguments of `make_deployment`. Raises HardwareError for an unknown name or an
        invalid value.
        """
        return make_deployment(gpu_name, model_name, framework_name=self.framework, **options)

    def step_time(self, deployment: Deployment) -> StepTime:
        """Return a predictor for the step durations of this engine on a deployment."""
        overheads: dict[str, Any] = {}
        for name in ("step_s", "sequence_s", "kv_share", "prefill_share", "nccl", "kv_per_query_head"):
            value = getattr(self, name)
            if value:
                overheads[name] = value
        framework = replace(deployment.framework, **overheads)
        tensor = deployment.tensor
        workers = self.worker_once.plus(self.worker_each, tensor) if tensor > 1 else NO_TIME
        return StepTime(replace(deployment, framework=framework), self.launch_s, workers)

    def kv_tokens(self, deployment: Deployment) -> int:
        """Return the size of the KV cache in tokens.

        Raises HardwareError if the weights leave no memory for the cache.
        """
        tokens = deployment.kv_tokens(self.policy.memory_fraction)
        if tokens <= self.policy.block_size:
            raise HardwareError(
                f"{deployment.model.name} leaves room for only {tokens} tokens of KV cache on {deployment.gpu.name}: "
                "choose a larger GPU, more GPUs or a smaller model"
            )
        return tokens

    def policy_for(self, kv_tokens: int, running_limit: int | None = None, step_tokens: int | None = None) -> Policy:
        """Return the batching policy for a KV cache of `kv_tokens` tokens.

        If `running_limit` or `step_tokens` is given, the value replaces the limit of the preset.
        """
        default_step_tokens = max(self.policy.step_tokens, int(self.kv_share_of_step * kv_tokens))
        return replace(
            self.policy,
            step_tokens=step_tokens or default_step_tokens,
            running_limit=running_limit or self.policy.running_limit,
        )


ENGINES: Mapping[str, Mapping[str, Engine]] = {
    "vllm": {
        # Running requests come before waiting requests. They share one token budget, with chunked prefill. The newest
        # request is preempted. A step with a preemption admits no request. A request is admitted only if its prompt and
        # its output so far fit the cache. Source: vllm/v1/core/sched/scheduler.py (`schedule`, `_preempt_request`,
        # `scheduler_reserve_full_isl`).
        # Prefix cache: vllm/v1/core/kv_cache_manager.py. Limits for a GPU with at least 70 GiB that is not an A100:
        # `get_batch_defaults` in vllm/engine/arg_utils.py. Memory fraction and block size: vllm/config/cache.py.
        # A step is planned while the step before it runs: `step_with_batch_queue` in vllm/v1/engine/core.py, which is
        # the default (`async_scheduling` in vllm/config/scheduler.py).
        CURRENT: Engine(
            version="0.32.0",
            policy=Policy(
                running_limit=1024,
                step_tokens=8192,
                prefill="mixed",
                plans_ahead=True,
                block_size=16,
                prefix_cache=True,
                memory_fraction=0.92,
            ),
        ),
        # Whole prompts come first, in separate steps, and the newest request is preempted and recomputed:
        # vllm/core/scheduler.py (`_schedule`, `_preempt_by_recompute`). Admission leaves 1% of the blocks free:
        # vllm/core/block_manager.py. 256 sequences and 256 tokens of padding: vllm/config.py,
        # vllm/engine/arg_utils.py. The token budget is the longest sequence of Llama-2. Decode attention has one thread
        # block per sequence and query head, and each block reads the KV cache of its head:
        # csrc/attention/attention_kernels.cu (`single_query_cached_kv_attention_kernel`).
        # With tensor parallelism, the workers are actors of Ray. In every step, `_run_workers` in
        # vllm/engine/llm_engine.py calls one actor after another. Ray serialises the arguments again for each call:
        # all prompt and output token ids, block tables and sampling parameters (`SequenceGroupMetadata` in
        # vllm/sequence.py). `worker_each` is the time of one call. `worker_once` is the time from the last call to its
        # result.
        "2023": Engine(
            version="0.2.0",
            policy=Policy(
                running_limit=256,
                step_tokens=4096,
                prefill="separate",
                decode_steps_per_prefill=0,
                max_paddings=256,
                block_size=16,
                watermark=0.01,
                memory_fraction=0.9,
            ),
            framework="kernels",
            launch_s=300e-6,
            step_s=2e-3,
            sequence_s=100e-6,
            kv_share=0.65,
            prefill_share=0.788,
            nccl=1,
            kv_per_query_head=1,
            worker_each=HostTime(0.4e-3, 13e-6, 30e-9),
            worker_once=HostTime(1.2e-3, 17e-6, 55e-9),
        ),
    },
    "tgi": {
        # Admission reserves prompt + output - 1 tokens, first come first served, within the prefill budget:
        # backends/v3/src/queue.rs. Prefill pauses decoding. A prefill comes after `max_waiting_tokens` (20) decode
        # steps, or earlier if the waiting requests are at least `waiting_served_ratio` (0.3) of the batch:
        # `batching_task` in backends/v3/src/backend.rs. No limit on sequences, and 4096 prefill tokens:
        # launcher/src/main.rs (3.x derives these limits from the hardware). Blocks of one token
        # (flashinfer): router/src/lib.rs. Memory fraction: TGI_WIGGLE_ROOM in
        # server/text_generation_server/models/globals.py.
        CURRENT: Engine(
            version="3.3.7",
            policy=Policy(
                running_limit=UNLIMITED,
                step_tokens=4096,
                prefill="separate",
                decode_steps_per_prefill=19,
                waiting_served_ratio=0.3,
                reserve="output",
                memory_fraction=0.9,
            ),
        ),
        # The current rules, with a waiting_served_ratio of 1.2: router/src/infer.rs (`batching_task`),
        # router/src/queue.rs and launcher/src/main.rs. Blocks of 16 tokens:
        # server/text_generation_server/models/flash_causal_lm.py. Decode attention is vLLM's kernel of 2023, which
        # reads the cache once per query head (`single_query_cached_kv_attention` in
        # server/text_generation_server/models/custom_modeling/flash_llama_modeling.py). Shards of tensor parallelism
        # keep their batches. The router sends only ids, to all shards at once (`decode` in
        # router/client/src/sharded_client.rs). A single shard needs the same call, so there is no additional time.
        "2023": Engine(
            version="1.0.2",
            policy=Policy(
                running_limit=UNLIMITED,
                step_tokens=4096,
                prefill="separate",
                decode_steps_per_prefill=19,
                waiting_served_ratio=1.2,
                reserve="output",
                block_size=16,
                memory_fraction=0.9,
            ),
            framework="kernels",
            launch_s=480e-6,
            step_s=0.7e-3,
            sequence_s=20e-6,
            kv_share=0.68,
            prefill_share=0.7,
            nccl=1,
            kv_per_query_head=1,
        ),
    },
    "lightllm": {
        # Chunked prefill together with decoding, up to twice the chunked_prefill_size of 4096 tokens. A request is
        # admitted if the future peak of all running requests fits the cache:
        # lightllm/server/router/req_queue/chunked_prefill/impl.py (`_can_add_new_req`), lightllm/server/api_start.py.
        # running_max_req_size and mem_fraction: lightllm/server/api_cli.py.
        CURRENT: Engine(
            version="1.2.0",
            policy=Policy(running_limit=256, step_tokens=8192, prefill="mixed", reserve="peak", memory_fraction=0.8),
        ),
        # A prefill comes after ten decode steps: lightllm/server/router/manager.py (`_step`, max_wait_tokens).
        # Admission by the peak: lightllm/server/router/req_queue.py. A sixth of the cache per prefill and 1000
        # sequences: lightllm/server/api_server.py (commit 718e6d6). Decode attention has one program per sequence,
        # query head and block: lightllm/models/llama2/triton_kernel/token_attention_nopad_att1.py.
        # With tensor parallelism, the router calls one process per GPU through rpyc, all at once, with the id of the
        # batch, and fetches the new tokens from the first (`_decode_batch` in lightllm/server/router/manager.py). If
        # requests have ended, it also sends the ids of the others (`_filter_batch`). `worker_once` assumes that this
        # happens in every step.
        "2023": Engine(
            version="718e6d6",
            policy=Policy(
                running_limit=1000,
                step_tokens=4096,
                prefill="separate",
                decode_steps_per_prefill=10,
                reserve="peak",
                memory_fraction=0.9,
            ),
            kv_share_of_step=1 / 6,
            framework="kernels",
            launch_s=500e-6,
            step_s=8.5e-3,
            kv_share=0.82,
            prefill_share=0.87,
            nccl=1,
            kv_per_query_head=1,
            worker_once=HostTime(3.5e-3, 6e-6),
        ),
    },
    "sglang": {
        # Prompts come before decoding whenever a waiting request fits, in separate steps of at most
        # `chunked_prefill_size` tokens, and a longer prompt is computed in chunks: managers/scheduler.py
        # (`get_next_batch_to_run`, `get_new_batch_prefill`). Chunks share steps with decoding only with
        # --enable-mixed-chunk. Admission: managers/schedule_policy.py (`PrefillAdder`, `new_token_ratio`, 0.7 at first,
        # times --schedule-conservativeness of 1). Requests are retracted if the share was too small:
        # managers/schedule_batch.py (`retract_decode`). The overlap scheduler prepares the next step while the GPU
        # computes, so its own time is hidden: managers/scheduler.py (`event_loop_overlap`). Limits for a GPU with more
        # than 60 GB, and the memory fraction: server_args.py. The default number of running requests follows from the
        # size of the cache and is at most 4096: model_executor/model_runner.py. The prefix cache has pages of one token
        # there (mem_cache/radix_cache.py). Blocks of 16 tokens save most of the time for hashing prompts.
        CURRENT: Engine(
            version="0.5.23",
            policy=Policy(
                running_limit=4096,
                step_tokens=8192,
                prefill="chunked-first",
                plans_ahead=True,
                decode_steps_per_prefill=0,
                reserve="share",
                block_size=16,
                prefix_cache=True,
                memory_fraction=0.88,
            ),
            framework="SGLang",
        ),
    },
    "tei": {
        # Whole inputs in order of arrival, up to `max_batch_tokens` per step: core/src/queue.rs
        # (`queue_blocking_task`) and router/src/main.rs. No request decodes. In this model, the inputs of a request are
        # computed in the same step.
        CURRENT: Engine(
            version="1.9.3",
            policy=Policy(running_limit=UNLIMITED, step_tokens=16384, prefill="separate", memory_fraction=0.9),
        ),
    },
}
"""Presets by server, then by version (`current` or `2023`)."""
TENSORRT_LLM = Engine(
    # In-flight batching: whole prompts share steps with decoding, as chunked context is off by default. The default
    # capacity policy GUARANTEED_NO_EVICT admits a request if its whole output fits
    # (tensorrt_llm/_torch/pyexecutor/scheduler.py). Defaults of `trtllm-serve` and of
    # the LLM API: max_batch_size 2048, max_num_tokens 8192, free_gpu_memory_fraction 0.9, tokens_per_block 32, block
    # reuse on.
    version="1.0",
    policy=Policy(
        running_limit=2048,
        step_tokens=8192,
        prefill="mixed",
        chunked=False,
        reserve="output",
        block_size=32,
        prefix_cache=True,
        memory_fraction=0.9,
    ),
    framework="TensorRT-LLM",
)
"""Preset of TensorRT-LLM for `loadgen plan-capacity` and for replayed closed loops. No command simulates its HTTP
server."""


def find_engine(server: str, vintage: str = CURRENT) -> Engine:
    """Return the preset of a server's engine in the version `vintage`: `current` or `2023`.

    Raises HardwareError for an unknown server or version.
    """
    if server not in ENGINES:
        raise HardwareError(f"the scheduler of {server} is not modelled: choose {', '.join(ENGINES)}")
    vintages = ENGINES[server]
    if vintage not in vintages:
        raise HardwareError(f"unknown vintage {vintage!r}: choose {' or '.join(vintages)}")
    return vintages[vintage]
