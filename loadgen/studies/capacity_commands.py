"""Command lines for a configuration: `loadgen limits`, `loadgen simulate`, and the server's own command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.plan import Plan
from loadgen.servers.hardware.inference import NODE_GPUS
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.configurations import ENGINES

SIMULATED_REQUESTS = 2000
"""Number of requests in the command `loadgen simulate`."""
DRAFT = "DRAFT_MODEL"
"""Stands for the model that drafts tokens, which the user must name."""
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's setting for separate prefill and decode workers."""
FLAG_FORMATS = ("fp8",)
"""Formats in which engines can load 16-bit weights. Other formats need a checkpoint in this format."""


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Values that the command lines of all configurations share, such as the plan and the model."""

    plan: Plan
    model: str
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    acceptance: float | None = None
    node_gpus: int = NODE_GPUS
    hardware: Path | None = None
    cache_hit_rate: float = 0.0
    chunked_prefill: str = ""
    step_tokens: int | None = None


def commands_of(option: CapacityOption, context: CommandContext, in_flight: float) -> dict[str, str]:
    """Return the command lines of an option by name.

    `in_flight` is the expected number of requests in flight of all replicas together.
    """
    commands = {"limits": _limits(option, context, in_flight)}
    if ENGINES[option.engine].simulated:
        commands["simulate"] = _simulate(option, context)
    return commands | _server(option, context)


def _options(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line. None leaves an option out, and True stands for a flag."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return words


def _if_above(value: int, smallest: int = 1) -> int | None:
    return value if value > smallest else None


def _hardware(option: CapacityOption, context: CommandContext) -> dict[str, object]:
    """Return the options that the commands `loadgen limits` and `loadgen simulate` have in common."""
    return {
        "--gpu": option.gpu,
        "--model": context.model,
        "--tp": option.tensor_parallel,
        "--pp": _if_above(option.pipeline_parallel),
        "--ep": _if_above(option.expert_parallel),
        "--dp-attention": _if_above(option.attention_parallel),
        "--gpus-per-node": None if context.node_gpus == NODE_GPUS else context.node_gpus,
        "--format": option.format,
        "--draft-tokens": _if_above(option.draft_tokens, 0),
        "--acceptance": context.acceptance if option.draft_tokens else None,
        "--cache-hit-rate": context.cache_hit_rate or None,
        "--chunked-prefill": context.chunked_prefill or None,
        "--step-tokens": context.step_tokens,
        "--hardware": context.hardware,
    }


def _limits(option: CapacityOption, context: CommandContext, in_flight: float) -> str:
    replicas = option.decode_workers or option.pools[0].replicas
    options = _hardware(option, context) | {
        "--framework": ENGINES[option.engine].framework,
        "--prefill-workers": option.prefill_workers,
        "--dp": _if_above(replicas),
        "--input": context.prompt_tokens,
        "--output": context.output_tokens,
        "--in-flight": max(replicas, round(in_flight)),
    }
    return shlex.join(["loadgen", "limits", *_options(options)])


def _simulate(option: CapacityOption, context: CommandContext) -> str:
    """Return the command that simulates an option.

    The command simulates one replica at its share of the request rate. If the option has separate prefill and decode
    workers, the command simulates all workers at the whole rate.
    """
    plan = context.plan
    replicas = 1 if option.prefill_workers is not None else max(1, option.pools[0].replicas)
    options = {"--server": option.engine} | _hardware(option, context)
    options |= {
        "--prefill-workers": option.prefill_workers,
        "--decode-workers": option.decode_workers,
        "--workload": None if plan.workload == "synthetic" else plan.workload,
        "--input-tokens": plan.input_tokens,
        "--output-tokens": plan.output_tokens,
        "--arrivals": f"poisson:{context.rate_per_s / replicas:.4g}",
        "--n": SIMULATED_REQUESTS,
    }
    return shlex.join(["loadgen", "simulate", *_options(options)])


def _server(option: CapacityOption, context: CommandContext) -> dict[str, str]:
    """Return the commands that start the engine: one, or one for each kind of worker."""
    if option.prefill_workers is None:
        return {"server": _server_command(option, context, "")}
    prefill, decode = (_server_command(option, context, worker) for worker in ("prefill", "decode"))
    if prefill == decode:
        return {"prefill and decode workers": prefill}
    return {"prefill worker": prefill, "decode worker": decode}


def _server_command(option: CapacityOption, context: CommandContext, worker: str) -> str:
    write = {"vllm": _vllm, "sglang": _sglang, "tgi": _tgi, "trtllm": _trtllm}[option.engine]
    return " ".join(word if word.startswith("<(") else shlex.quote(word) for word in write(option, context, worker))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _vllm(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    draft = {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": option.draft_tokens}
    options = {
        "--tensor-parallel-size": option.tensor_parallel,
        "--pipeline-parallel-size": _if_above(option.pipeline_parallel),
        "--data-parallel-size": _if_above(option.attention_parallel),
        "--enable-expert-parallel": option.expert_parallel > 1,
        "--quantization": option.format if option.format in FLAG_FORMATS else None,
        "--speculative-config": _json(draft) if option.draft_tokens else None,
        "--kv-transfer-config": _json(KV_TRANSFER) if worker else None,
    }
    return ["vllm", "serve", context.model, *_options(options)]


def _sglang(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    options = {
        "--model-path": context.model,
        "--tp-size": option.tensor_parallel * option.attention_parallel,
        "--pp-size": _if_above(option.pipeline_parallel),
        "--ep-size": _if_above(option.expert_parallel),
        "--dp-size": _if_above(option.attention_parallel),
        "--enable-dp-attention": option.attention_parallel > 1,
        "--quantization": option.format if option.format in FLAG_FORMATS else None,
        "--speculative-algorithm": "EAGLE3" if option.draft_tokens else None,
        "--speculative-draft-model-path": DRAFT if option.draft_tokens else None,
        "--speculative-num-steps": _if_above(option.draft_tokens, 0),
        "--disaggregation-mode": worker or None,
    }
    return ["python", "-m", "sglang.launch_server", *_options(options)]


def _tgi(option: CapacityOption, context: CommandContext, _worker: str) -> Sequence[str]:
    options = {
        "--model-id": context.model,
        "--num-shard": option.tensor_parallel,
        "--quantize": option.format if option.format in FLAG_FORMATS else None,
        "--speculate": _if_above(option.draft_tokens, 0),
    }
    return ["text-generation-launcher", *_options(options)]


def _trtllm(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    settings = {
        "enable_attention_dp: true": option.attention_parallel > 1,
        "cache_transceiver_config: {backend: DEFAULT}": worker,
        f"speculative_config: {{decoding_type: Eagle, max_draft_len: {option.draft_tokens}, "
        f"speculative_model_dir: {DRAFT}}}": option.draft_tokens,
    }
    written = "\\n".join(setting for setting, applies in settings.items() if applies)
    options = {
        "--tp_size": option.tensor_parallel * option.attention_parallel,
        "--pp_size": _if_above(option.pipeline_parallel),
        "--ep_size": _if_above(option.expert_parallel),
        "--extra_llm_api_options": f"<(printf '{written}')" if written else None,
    }
    return ["trtllm-serve", context.model, *_options(options)]
