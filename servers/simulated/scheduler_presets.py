"""By which rules engines fill their steps, and what these take beside their kernels: now, and those of autumn 2023.

Each rule names its source file. The constants of `current` are those of vLLM in servers/hardware/frameworks.csv, also
for TGI and LightLLM, which nobody has published the like of: an assumption. Those of `2023` are fitted to
github.com/L1aoXingyu/llm-infer-bench (a13f639: 13B on one A800, bursts of 1000 and Poisson arrivals), one set per
server for all its loads: `python -m benchmarks.schedulers` says how far off they leave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loadgen.servers.hardware import HardwareError
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.roofline import deploy
from loadgen.servers.simulated.scheduler import UNLIMITED, Policy
from loadgen.servers.simulated.step_time import StepTime

CURRENT = "current"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One generation of a server's engine."""

    version: str
    policy: Policy
    kv_share_of_step: float = 0.0
    """Where `step_tokens` follows from the KV cache: so much of it, but at least as much as the policy says."""
    framework: str = "vLLM"
    """Of frameworks.csv; what follows takes the place of its figures where it is more than 0."""
    launch_s: float = 0.0
    """To launch the kernels of one layer from Python, without CUDA graphs: the GPU cannot be faster."""
    step_s: float = 0.0
    sequence_s: float = 0.0
    kv_share: float = 0.0
    prefill_share: float = 0.0
    nccl: float = 0.0

    def deployment(self, gpu_name: str, model_name: str, **more: Any) -> Deployment:
        """A model on GPUs under this engine; keywords as those of `deploy`. Raises HardwareError."""
        return deploy(gpu_name, model_name, framework_name=self.framework, **more)

    def step_time(self, deployment: Deployment) -> StepTime:
        """What its steps take on that deployment."""
        figures = {name: getattr(self, name) for name in ("step_s", "sequence_s", "kv_share", "prefill_share", "nccl")}
        known = {name: figure for name, figure in figures.items() if figure}
        own = replace(deployment, framework=replace(deployment.framework, **known))
        return StepTime(own, self.launch_s)

    def kv_tokens(self, deployment: Deployment) -> int:
        """Tokens that its KV cache holds beside the weights. Raises HardwareError for no room."""
        tokens = deployment.kv_tokens(self.policy.memory_fraction)
        if tokens <= self.policy.block_size:
            raise HardwareError(f"{deployment.model.name} leaves room for {tokens} tokens on {deployment.gpu.name}")
        return tokens

    def policy_for(self, kv_tokens: int, running_limit: int | None = None, step_tokens: int | None = None) -> Policy:
        """Its policy on so large a cache, with other limits where they are given."""
        maximum = step_tokens or max(self.policy.step_tokens, int(self.kv_share_of_step * kv_tokens))
        return replace(self.policy, step_tokens=maximum, running_limit=running_limit or self.policy.running_limit)


ENGINES: Mapping[str, Mapping[str, Engine]] = {
    "vllm": {
        # Running before waiting, a budget of tokens for both, chunks; preemption of the newest; no admission in a step
        # that preempted; the whole known sequence must fit: vllm/v1/core/sched/scheduler.py (`schedule`,
        # `_preempt_request`, `scheduler_reserve_full_isl`). Known blocks: vllm/v1/core/kv_cache_manager.py.
        # Limits of a card with 70 GiB or more that is not an A100: `get_batch_defaults` in vllm/engine/arg_utils.py.
        # Memory fraction and the block of 16: vllm/config/cache.py.
        CURRENT: Engine(
            version="0.32.0",
            policy=Policy(
                running_limit=1024,
                step_tokens=8192,
                prefill="mixed",
                block_size=16,
                prefix_cache=True,
                memory_fraction=0.92,
            ),
        ),
        # Prompts first, whole, in steps of their own; recomputation of the newest: vllm/core/scheduler.py (`_schedule`,
        # `_preempt_by_recompute`). 1 % of the blocks left at admission: vllm/core/block_manager.py. 256 sequences, 256
        # tokens of padding: vllm/config.py, vllm/engine/arg_utils.py. Budget: that of Llama-2, its longest sequence.
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
            prefill_share=0.765,
            nccl=1,
        ),
    },
    "tgi": {
        # Reservation of prompt + output - 1, first come first served, the prefill budget: backends/v3/src/queue.rs.
        # Prefill pauses decoding; it comes once `max_waiting_tokens` (20) have been decoded, or sooner where it is
        # `waiting_served_ratio` (0.3) of the batch: `batching_task` in backends/v3/src/backend.rs. No limit of
        # sequences, 4096 prefill tokens: launcher/src/main.rs (3.x derives them). Blocks of one token (flashinfer):
        # router/src/lib.rs. Fraction: TGI_WIGGLE_ROOM, server/text_generation_server/models/globals.py.
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
        # The same with a ratio of 1.2: router/src/infer.rs (`batching_task`), router/src/queue.rs and
        # launcher/src/main.rs. Blocks of 16: server/text_generation_server/models/flash_causal_lm.py.
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
            prefill_share=0.68,
            nccl=1,
        ),
    },
    "lightllm": {
        # Prompts and decoding together, token by token, twice the chunked_prefill_size of 4096; admission by the peak
        # that all running will reach: lightllm/server/router/req_queue/chunked_prefill/impl.py (`_can_add_new_req`),
        # lightllm/server/api_start.py. running_max_req_size and mem_fraction: lightllm/server/api_cli.py.
        CURRENT: Engine(
            version="1.2.0",
            policy=Policy(running_limit=256, step_tokens=8192, prefill="mixed", reserve="peak", memory_fraction=0.8),
        ),
        # Prefill once ten steps have decoded: lightllm/server/router/manager.py (`_step`, max_wait_tokens). By the
        # peak: lightllm/server/router/req_queue.py. A sixth of the cache per prefill, 1000 sequences:
        # lightllm/server/api_server.py (commit 718e6d6).
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
            prefill_share=0.845,
            nccl=1,
        ),
    },
}
"""By server kind, then by generation."""


def find_engine(server: str, vintage: str = CURRENT) -> Engine:
    """The engine of that server and generation. Raises HardwareError for one that is not known."""
    if server not in ENGINES:
        raise HardwareError(f"the scheduler of {server} is not modelled: choose {', '.join(ENGINES)}")
    if vintage not in (known := ENGINES[server]):
        raise HardwareError(f"vintage {vintage!r} is not known: choose {' or '.join(known)}")
    return known[vintage]
