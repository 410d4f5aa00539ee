"""How vLLM, TGI and LightLLM each fill the steps of their engine. File names are those of the servers' own sources."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True)
class Policy:
    """How one server fills its steps."""

    running_limit: int
    """Sequences in one step."""
    step_tokens: int
    """Prompt tokens in one step; with `mixed` prefill the decoding sequences count too, one token each."""
    prefill: Literal["mixed", "alone"]
    """`mixed`: prompts are cut into chunks that share steps with decoding. `alone`: whole prompts in steps of their
    own, between which decoding gets one step; a prompt longer than `step_tokens` gets a step to itself."""
    reserve_output: bool
    """Admission takes KV cache for prompt and output at once. Otherwise for the prompt, and more as the output grows;
    when there is no more, the newest sequence is preempted and later computed again."""
    block_tokens: int
    """KV cache is handed out in blocks of so many tokens."""
    memory_fraction: float
    """Share of the GPU's memory that weights and KV cache may fill."""


POLICIES = {
    # Limits of a card with 70 GiB or more that is not an A100: `get_batch_defaults` in vllm/engine/arg_utils.py.
    # Running before waiting, preemption of the newest, no admission in a step that preempted, the whole known sequence
    # must fit: vllm/v1/core/sched/scheduler.py (`schedule`, `_preempt_request`, `scheduler_reserve_full_isl`).
    # Memory fraction of 0.33 and the block of 16: vllm/config/cache.py.
    "vllm": Policy(
        running_limit=1024,
        step_tokens=8192,
        prefill="mixed",
        reserve_output=False,
        block_tokens=16,
        memory_fraction=0.92,
    ),
    # Reservation of prompt + output - 1, strict FIFO and the prefill budget: backends/v3/src/queue.rs. A prefill, then
    # a decode step for all: `batching_task` in backends/v3/src/backend.rs, without its waiting_served_ratio. No batch
    # size limit and 4096 prefill tokens: launcher/src/main.rs (1.x and 2.x; 3.x derives it). Blocks of one token
    # (flashinfer): router/src/lib.rs. Fraction: TGI_WIGGLE_ROOM, server/text_generation_server/models/globals.py.
    "tgi": Policy(
        running_limit=UNLIMITED,
        step_tokens=4096,
        prefill="alone",
        reserve_output=True,
        block_tokens=1,
        memory_fraction=0.9,
    ),
    # running_max_req_size 256 and mem_fraction 0.8: lightllm/server/api_cli.py (1.2.0). Twice the chunked_prefill_size
    # of 4096: lightllm/server/api_start.py. The budget covers prompts and decoding together, token by token:
    # lightllm/server/router/req_queue/chunked_prefill/impl.py. Its router estimates the peak that the batch will
    # reach; here the whole output is reserved, which admits somewhat less and never has to pause.
    "lightllm": Policy(
        running_limit=256,
        step_tokens=8192,
        prefill="mixed",
        reserve_output=True,
        block_tokens=1,
        memory_fraction=0.8,
    ),
}
