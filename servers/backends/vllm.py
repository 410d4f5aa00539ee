"""The vLLM backend, checked with versions 0.2.0 to 0.33.0.

The main endpoints are `/v1/completions` (native, accepts token ids) and `/v1/chat/completions`. Requests contain the
following fields. A version that does not support a field ignores it.

- `ignore_eos` and `min_tokens` fix the output length.
- `continuous_usage_stats` adds token counts to each chunk. Under load, a chunk contains several tokens.
- `include_usage` adds an event with the total token counts.

`/v1/responses` accepts `ignore_eos`. `/v1/messages` has no such field, so a model may end its response early there.

Two fields are never sent. `return_token_ids` makes the first event repeat the prompt's token ids, and `stop` makes the
server hold text back. Every response ends with `[DONE]`, even a failed one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loadgen.servers.backends import base, pooling
from loadgen.servers.backends.audio import speech_dialect, transcription_dialect
from loadgen.servers.backends.dialect import Route, VersionRule
from loadgen.servers.backends.messages import bearer_headers, messages_dialect
from loadgen.servers.backends.openai import RUNNING_USAGE, answer_text, decode, messages, openai_dialect, unless_marker
from loadgen.servers.backends.responses import responses_dialect
from loadgen.servers.ladder import LADDER_ARCHITECTURE, PLUGIN_FOLDER
from loadgen.workloads.request import Request


def _exact(request: Request) -> dict[str, Any]:
    exact = {"min_tokens": request.output_tokens, "ignore_eos": True} if request.ignore_eos else {}
    return exact | RUNNING_USAGE


def _ignore_eos(request: Request) -> dict[str, Any]:
    # The Responses API of vLLM has no `min_tokens`.
    return {"ignore_eos": True} if request.ignore_eos else {}


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    # Version 0.2.0 has no /version, but every version names itself as the owner of its models.
    status, models = get_json("/v1/models")
    card = base.first_model_card(models)
    if status != 200 or card.get("owned_by") != "vllm":
        return None
    version = base.version_text(base.as_dict(get_json("/version")[1]).get("version"))
    routes = ("/tokenize",) if base.route_exists(get_json, "/tokenize") else ()
    return base.ServerFacts("vllm", url, version, str(card.get("id", "")), base.known_limits(VLLM.limits, card), routes)


def _cache_config(samples: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return the KV-cache capacity of all engines in tokens, and the fraction of GPU memory that vLLM reserves.

    `samples` contains the labels of the metric `vllm:cache_config_info`, one mapping per engine. A value that is not
    among the labels is left out of the result."""
    result: dict[str, float] = {}
    for labels in samples:
        # vLLM writes Python's repr into labels: `16384`, `0.92` or `None`.
        values = {name: float(text) for name, text in labels.items() if re.fullmatch(r"\d+(\.\d+)?", text)}
        if "num_gpu_blocks" in values and "block_size" in values:
            values.setdefault("kv_cache_size_tokens", values["num_gpu_blocks"] * values["block_size"])
        if "kv_cache_size_tokens" in values:
            result["kv_tokens"] = result.get("kv_tokens", 0.0) + values["kv_cache_size_tokens"]
        if "gpu_memory_utilization" in values:
            result["taken_share"] = values["gpu_memory_utilization"]
    return result


# The server adds a BOS to a text prompt, as completions do by default, and applies the chat template to `messages`.
_COUNT_TEXT = Route(
    "/tokenize", lambda text, model: {"model": model, "prompt": text}, lambda answer: int(answer["count"])
)
_COUNT_CHAT = Route(
    "/tokenize", lambda text, model: {"model": model, "messages": messages(text)}, lambda answer: int(answer["count"])
)
# A gateway may publish only the OpenAI routes, so a missing version is no sign of an old server.
_UNKNOWN_VERSION = VersionRule(
    lambda version: not version,
    caution="its version is unknown. Chat streams of vLLM before 0.6 contain no token counts",
)

_dialect = partial(
    openai_dialect, "vllm", extra_fields=_exact, empty_rule=unless_marker, always_done=True, fixed_output=True
)

VLLM = base.Backend(
    name="vllm",
    title="vLLM",
    request_times="Start vLLM with --enable-per-request-metrics, for completions, chat and responses.",
    native="completions",
    dialects={
        "completions": _dialect("completions", count=_COUNT_TEXT, token_ids=True),
        "chat": _dialect("chat", count=_COUNT_CHAT, versions=(_UNKNOWN_VERSION,)),
        "responses": responses_dialect("vllm", extra_fields=_ignore_eos, count=_COUNT_CHAT),
        "messages": messages_dialect("vllm", headers=bearer_headers, count=_COUNT_CHAT),
        "transcriptions": transcription_dialect(
            "vllm",
            partial(decode, empty_is_token=unless_marker, always_done=True),
            answer_text,
            {"stream_include_usage": True, "stream_continuous_usage_stats": True},
        ),
        "speech": speech_dialect("vllm", {"stream": True}),
        "embeddings": pooling.pooling_dialect("vllm", "embeddings", count=_COUNT_TEXT, token_ids=True),
        "rerank": pooling.pooling_dialect("vllm", "rerank", count_text=_COUNT_TEXT),
        "score": pooling.pooling_dialect("vllm", "score", count_text=_COUNT_TEXT),
        "classify": pooling.pooling_dialect("vllm", "classify", count=_COUNT_TEXT),
    },
    identify=_identify,
    probe_paths=("/version", "/tokenize"),
    limits={"max_model_len": base.ServerLimit("--max-model-len", "total")},
    port=8001,
    ids=Route(
        "/tokenize",
        lambda text, model: {"model": model, "prompt": text, "add_special_tokens": False},
        lambda answer: [int(number) for number in answer["tokens"]],
    ),
    metrics=base.MetricNames(
        prefix="vllm:",
        names={
            "running": ("vllm:num_requests_running",),
            "waiting": ("vllm:num_requests_waiting",),
            "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            "prompt_tokens": ("vllm:prompt_tokens_total",),
            "output_tokens": ("vllm:generation_tokens_total",),
            "cached_prompt_tokens": (
                "vllm:prompt_tokens_cached_total",
                "vllm:prefix_cache_hits_total",
                "vllm:gpu_prefix_cache_hits_total",
            ),
            "preemptions": ("vllm:num_preemptions_total",),
            "rejections": ("vllm:admission_rejections_total",),
            "draft_steps": ("vllm:spec_decode_num_drafts_total",),
            "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
            "accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
            "requests_finished": ("vllm:request_success_total{finished_reason=stop|length|repetition}",),
            "requests_failed": ("vllm:request_success_total{finished_reason=abort|error}",),
            "queue_s_sum": ("vllm:request_queue_time_seconds_sum",),
            "queue_s_count": ("vllm:request_queue_time_seconds_count",),
            "prefill_s_sum": ("vllm:request_prefill_time_seconds_sum",),
            "prefill_s_count": ("vllm:request_prefill_time_seconds_count",),
            "decode_s_sum": ("vllm:request_decode_time_seconds_sum",),
            "decode_s_count": ("vllm:request_decode_time_seconds_count",),
        },
        labels=("vllm:cache_config_info", _cache_config),
    ),
    # The limits allow a burst of 1000. Every version has the module; the program was added in 0.5.
    process=base.ProcessCommand(
        program=("vllm", "serve", "{model}"),
        module=("vllm.entrypoints.openai.api_server", "--model", "{model}"),
        arguments=(
            "--served-model-name",
            "{name}",
            "--host",
            "{host}",
            "--port",
            "{port}",
            "--max-num-seqs",
            "1024",
            "--generation-config",
            "vllm",
            "--no-enable-prefix-caching",
            "--disable-uvicorn-access-log",
        ),
        parallel=("--tensor-parallel-size", "{tensor_parallel}"),
        env={"VLLM_NO_USAGE_STATS": "1"},
        ladder=str(PLUGIN_FOLDER),
    ),
    cache_reset=base.CacheReset(
        "/reset_prefix_cache", "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
    ),
    faults=(
        base.KnownFault(
            r"(Available memory on node \d+ \([^)]*\)) on startup is less than desired CPU memory utilization",
            "the host has not enough free memory for vLLM on its CPU: {0}",
            "limit its KV cache, in GiB: set VLLM_CPU_KVCACHE_SPACE=1 in the environment",
        ),
        base.KnownFault(
            rf"Model architectures \['{LADDER_ARCHITECTURE}'\] are not supported",
            "the model is a ladder, and this vLLM has no plugin for it",
            "the plugin is in the model's folder: set VLLM_PYTHONPATH=/models/MODEL/plugin in the environment",
        ),
    ),
    simulated="loadgen.servers.simulated.vllm:PROTOCOL",
    simulated_models={"transcriptions": "qwen3-asr-1.7b", "speech": "qwen3-tts-1.7b"},
    simulated_shapes={"transcriptions": "Qwen3-1.7B", "speech": "Qwen3-1.7B"},
    notes={
        "memory_option": "--gpu-memory-utilization",
        "memory_taken": "90 to 92% by default",  # 0.90 up to version 0.10.2, 0.92 in later versions
        "counts_inputs": True,
        "split_endpoint": "rerank",  # embedding models process query and document separately, other models together
    },
)
