"""Command lines for a configuration: `loadgen limits`, `loadgen simulate`, and the server's own command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.plan import Plan
from loadgen.plan_fields import changed_options
from loadgen.servers.hardware import framework, gpu, number_format
from loadgen.servers.hardware.inference import NODE_GPUS, default_kv_bytes
from loadgen.studies.capacity import CapacityOption
from loadgen.studies.configurations import ENGINES, SearchSpace

SIMULATED_REQUESTS = 2000
"""Number of requests in the command `loadgen simulate`."""
CHECKPOINT = "CHECKPOINT"
"""Stands for the weights in a command that starts a server. The user must name them: a folder or a Hugging Face id."""
DRAFT = "DRAFT_MODEL"
"""Stands for the EAGLE-3 model that drafts tokens, which the user must name."""
TGI_REQUESTS = 4096
"""Maximum requests in flight and in the queue of TGI. The simulated TGI has no limit. By default, TGI refuses more than
128 requests."""
LOAD_FIELDS = (
    "endpoint",
    "workload",
    "repeat_file",
    "audio_seconds",
    "batch_size",
    "ignore_eos",
    "tokenizer",
    "seed",
    "cancel",
    "concurrency",
    "max_in_flight",
    "timeout_s",
    "window_s",
)
"""Fields of the plan that change a simulated load. `loadgen simulate` gets those that differ from their defaults, in
addition to the lengths of prompts and responses and the rate."""
KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""vLLM's setting for separate prefill and decode workers."""
CONVERTED_FORMATS = {"vllm": ("fp8",), "sglang": ("fp8",), "tgi": ("fp8",)}
"""Formats to which an engine converts 16-bit weights when it starts. Other formats need a checkpoint in this format."""

CHUNKING: Mapping[str, Sequence[str]] = {
    "vllm": ("mixed", "off"),
    "sglang": ("mixed", "separate", "off"),
    "tgi": (),
    "trtllm": ("mixed", "off"),
}
"""Values of --chunked-prefill that the server of an engine has, by engine: as its default or as an option."""


@dataclass(frozen=True, slots=True)
class CommandContext:
    """Values that the command lines of all configurations share, such as the plan and the model."""

    plan: Plan
    model: str
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    space: SearchSpace


def commands_of(option: CapacityOption, context: CommandContext, in_flight: float) -> dict[str, str]:
    """Return the command lines for the configuration `option`, by name, such as `limits` and `simulate`.

    `in_flight` is the expected number of requests in flight on all replicas together.
    """
    commands = {"limits": _limits(option, context, in_flight)}
    if ENGINES[option.engine].simulated:
        commands["simulate"] = _simulate(option, context)
    return commands | _server(option, context)


def _options(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line. The value True stands for a flag. Options with the value None are left
    out.
    """
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
    """Return the options that the commands `loadgen limits` and `loadgen simulate` share."""
    return {
        "--gpu": option.gpu,
        "--model": context.model,
        "--tp": option.tensor_parallel,
        "--pp": _if_above(option.pipeline_parallel),
        "--ep": _if_above(option.expert_parallel),
        "--dp-attention": _if_above(option.attention_parallel),
        "--gpus-per-node": None if context.space.node_gpus == NODE_GPUS else context.space.node_gpus,
        "--format": option.format,
        "--draft-tokens": _if_above(option.draft_tokens, 0),
        "--acceptance": context.space.acceptance if option.draft_tokens else None,
        "--cache-hit-rate": context.space.cache_hit_rate or None,
        "--chunked-prefill": context.space.chunked_prefill or None,
        "--step-tokens": context.space.step_tokens,
        "--hardware": context.space.hardware,
    }


def _limits(option: CapacityOption, context: CommandContext, in_flight: float) -> str:
    replicas = option.decode_workers or option.pools[0].replicas
    options = _hardware(option, context)
    if option.prefill_workers is not None or option.pipeline_parallel > 1:
        del options["--chunked-prefill"]  # `loadgen limits` does not model chunks in these configurations
    options |= {
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

    For equal replicas, the command simulates one replica with its share of the request rate. For separate prefill and
    decode workers, the command simulates all workers with the whole rate.
    """
    plan = context.plan
    replicas = 1 if option.prefill_workers is not None else max(1, option.pools[0].replicas)
    options = {"--server": option.engine} | _hardware(option, context)
    if option.prefill_workers is not None:
        del options["--chunked-prefill"]  # separate workers compute prompts apart from decoding
    options |= {
        "--prefill-workers": option.prefill_workers,
        "--decode-workers": option.decode_workers,
        "--input-tokens": plan.input_tokens,
        "--output-tokens": plan.output_tokens,
        "--arrivals": f"poisson:{context.rate_per_s / replicas:.4g}",
        "--n": SIMULATED_REQUESTS,
    }
    return shlex.join(["loadgen", "simulate", *_options(options), *changed_options(plan, LOAD_FIELDS)])


def _server(option: CapacityOption, context: CommandContext) -> dict[str, str]:
    """Return the commands that start the engine, by name.

    There is one command, or one for each kind of worker if prefill and decode have separate workers.
    """
    if option.prefill_workers is None:
        return {"server": _server_command(option, context, "")}
    prefill, decode = (_server_command(option, context, worker) for worker in ("prefill", "decode"))
    if prefill == decode:
        return {"prefill and decode workers": prefill}
    return {"prefill worker": prefill, "decode worker": decode}


def _server_command(option: CapacityOption, context: CommandContext, worker: str) -> str:
    write = {"vllm": _vllm, "sglang": _sglang, "tgi": _tgi, "trtllm": _trtllm}[option.engine]
    return " ".join(word if word.startswith("<(") else shlex.quote(word) for word in write(option, context, worker))


def server_notes(option: CapacityOption, context: CommandContext) -> list[str]:
    """Return sentences about the server command of a configuration, which is `option`.

    They explain the placeholders of the command, name settings for which the engine has no command-line option, and
    state consequences that the user might not expect.
    """
    space = context.space
    converted = _converted_format(option)
    weights = f"{context.model} in {'a 16-bit format' if converted else option.format}"
    conversion = f", which the server converts to {converted}" if converted else ""
    notes = [f"{CHECKPOINT} stands for the folder or Hugging Face id of {weights}{conversion}."]
    if option.draft_tokens and option.engine == "tgi":
        notes.append("TGI drafts with the Medusa heads of the checkpoint, or else from repeated words.")
    elif option.draft_tokens:
        notes.append(f"{DRAFT} stands for an EAGLE-3 draft model of this model.")
    if option.engine == "vllm" and space.chunked_prefill == "off":
        notes.append(
            f"vLLM computes whole prompts only if a step has room for the longest request, so --max-model-len limits "
            f"requests to {_step_tokens(option, context):,} tokens."
        )
    lacking = []
    if space.chunked_prefill and space.chunked_prefill not in CHUNKING[option.engine]:
        lacking.append(f"--chunked-prefill {space.chunked_prefill}")
    if space.step_tokens and option.engine == "sglang" and space.chunked_prefill == "off":
        lacking.append(f"--step-tokens {space.step_tokens}")
    if lacking:
        notes.append(f"The server command lacks {' and '.join(lacking)}: {_title(option)} cannot be started this way.")
    return notes


def _title(option: CapacityOption) -> str:
    return ENGINES[option.engine].title


def _converted_format(option: CapacityOption) -> str | None:
    """Return the number format of an option if the engine itself converts 16-bit weights to this format, otherwise
    None.
    """
    return option.format if option.format in CONVERTED_FORMATS.get(option.engine, ()) else None


def _step_tokens(option: CapacityOption, context: CommandContext) -> int:
    """Return the maximum number of tokens per step in the simulation of `option`."""
    return context.space.step_tokens or ENGINES[option.engine].preset().policy.step_tokens


def _has_fp8_cache(option: CapacityOption, context: CommandContext) -> bool:
    """Return True if the configuration `option` was simulated with a KV cache in fp8.

    Its server command must then request this number format, because engines do not use it for the cache by default.
    """
    card = gpu(option.gpu, context.space.hardware)
    engine = framework(ENGINES[option.engine].preset().framework)
    return default_kv_bytes(card, number_format(option.format), engine) == number_format("fp8").weight_bytes


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _vllm(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    draft = {"method": "eagle3", "model": DRAFT, "num_speculative_tokens": option.draft_tokens}
    whole_prompts = context.space.chunked_prefill == "off"
    step_tokens = _step_tokens(option, context)
    running_limit = ENGINES[option.engine].preset().policy.running_limit
    options = {
        "--tensor-parallel-size": option.tensor_parallel,
        "--pipeline-parallel-size": _if_above(option.pipeline_parallel),
        "--data-parallel-size": _if_above(option.attention_parallel),
        "--enable-expert-parallel": option.expert_parallel > 1,
        "--quantization": _converted_format(option),
        "--kv-cache-dtype": "fp8" if _has_fp8_cache(option, context) else None,
        "--no-enable-chunked-prefill": whole_prompts,
        # The defaults of these limits depend on the GPU. vLLM refuses fewer tokens than sequences per step and, with
        # whole prompts, fewer than the longest request has.
        "--max-num-batched-tokens": step_tokens,
        "--max-num-seqs": min(running_limit, step_tokens),
        "--max-model-len": step_tokens if whole_prompts else None,
        "--speculative-config": _json(draft) if option.draft_tokens else None,
        "--kv-transfer-config": _json(KV_TRANSFER) if worker else None,
    }
    return ["vllm", "serve", CHECKPOINT, *_options(options)]


def _sglang(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    options = {
        "--model-path": CHECKPOINT,
        "--tp-size": option.tensor_parallel * option.attention_parallel,
        "--pp-size": _if_above(option.pipeline_parallel),
        "--ep-size": _if_above(option.expert_parallel),
        "--attn-dp-size": _if_above(option.attention_parallel),
        "--quantization": _converted_format(option),
        "--kv-cache-dtype": "fp8_e4m3" if _has_fp8_cache(option, context) else None,
        "--enable-mixed-chunk": context.space.chunked_prefill == "mixed",
        # The default depends on the GPU.
        "--chunked-prefill-size": -1 if context.space.chunked_prefill == "off" else _step_tokens(option, context),
        "--speculative-algorithm": "EAGLE3" if option.draft_tokens else None,
        "--speculative-draft-model-path": DRAFT if option.draft_tokens else None,
        "--speculative-num-steps": _if_above(option.draft_tokens, 0),
        # A chain of drafted tokens. SGLang refuses the number of steps without these two options.
        "--speculative-eagle-topk": 1 if option.draft_tokens else None,
        "--speculative-num-draft-tokens": option.draft_tokens + 1 if option.draft_tokens else None,
        "--disaggregation-mode": worker or None,
    }
    return ["python", "-m", "sglang.launch_server", *_options(options)]


def _tgi(option: CapacityOption, context: CommandContext, _worker: str) -> Sequence[str]:
    options = {
        "--model-id": CHECKPOINT,
        "--num-shard": option.tensor_parallel,
        "--quantize": _converted_format(option),
        "--kv-cache-dtype": "fp8_e4m3fn" if _has_fp8_cache(option, context) else None,
        "--max-concurrent-requests": TGI_REQUESTS,
        # The default depends on the GPU and the model.
        "--max-batch-prefill-tokens": _step_tokens(option, context),
        "--speculate": _if_above(option.draft_tokens, 0),
    }
    return ["text-generation-launcher", *_options(options)]


def _trtllm(option: CapacityOption, context: CommandContext, worker: str) -> Sequence[str]:
    settings = {
        "enable_chunked_prefill: true": context.space.chunked_prefill == "mixed",
        "enable_attention_dp: true": option.attention_parallel > 1,
        "kv_cache_config: {dtype: fp8}": _has_fp8_cache(option, context),
        "cache_transceiver_config: {backend: DEFAULT}": worker,
        # Workers that compute prompts do not support it.
        "disable_overlap_scheduler: true": worker == "prefill",
        f"speculative_config: {{decoding_type: Eagle, max_draft_len: {option.draft_tokens}, "
        f"speculative_model_dir: {DRAFT}}}": option.draft_tokens,
    }
    written = "\\n".join(setting for setting, applies in settings.items() if applies)
    options = {
        "--tp_size": option.tensor_parallel * option.attention_parallel,
        "--pp_size": _if_above(option.pipeline_parallel),
        "--ep_size": _if_above(option.expert_parallel),
        "--max_num_tokens": context.space.step_tokens,
        "--extra_llm_api_options": f"<(printf '{written}')" if written else None,
    }
    return ["trtllm-serve", CHECKPOINT, *_options(options)]
