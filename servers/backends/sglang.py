"""The SGLang backend, checked with version 0.5.23.

- Endpoints: a server with `--is-embedding` has `/v1/embeddings`, `/v1/rerank`, `/v1/classify` and `/v1/score`. Any
  other server has `/v1/completions`, `/v1/chat/completions`, SGLang's `/generate` and `/v1/score`.
- Default endpoint: `/v1/completions`, which accepts token ids. `/generate` accepts them too, but each of its events
  repeats the whole text and all token ids so far. The size of a response with N tokens then grows with N * N.
- Tokens: they are counted by the server's running total, not by events. An event may contain several tokens, because of
  the server option `--stream-interval` or because the server's HTTP process is busy. A chat stream has no event for a
  token without text.
- End: every stream ends with `[DONE]`, even a failed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from loadgen.servers.backends import base, pooling
from loadgen.servers.backends.dialect import Answer, Dialect, Route, TokenCount
from loadgen.servers.backends.draft_counts import note_drafts
from loadgen.servers.backends.lenient import end_marker
from loadgen.servers.backends.openai import RUNNING_USAGE, messages, openai_dialect, unless_marker
from loadgen.servers.backends.stream_events import decode_events, finalise, join_halves, note_error, note_finish
from loadgen.servers.errors import UnauthorizedError
from loadgen.workloads.request import Request, merged


class MetaInfo(msgspec.Struct, gc=False):
    """The object `meta_info` of an event. The counts are running totals.

    `finish_reason` is an object such as `{"type": "length", "length": 8}`, and None before the last event."""

    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    cached_tokens: TokenCount | None = None
    finish_reason: Any = None


class GenerateEvent(msgspec.Struct, gc=False):
    """An event of `/generate`, without the text."""

    meta_info: MetaInfo | None = None
    error: Any = None


class TextEvent(msgspec.Struct, gc=False):
    """An event of `/generate`, with the fields that are needed for the text.

    The text and the token ids contain everything generated so far. With the server option
    `--incremental-streaming-output`, they contain only what is new in this event."""

    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: MetaInfo | None = None


class RerankInfo(msgspec.Struct, gc=False):
    """The object `meta_info` of a document in a response of `/v1/rerank`."""

    prompt_tokens: TokenCount | None = None


class RankedDocument(msgspec.Struct, gc=False):
    """A document in a response of `/v1/rerank`. A decoder-only reranker sends no `meta_info`."""

    meta_info: RerankInfo | None = None


_EVENTS = msgspec.json.Decoder(GenerateEvent)
_RANKED = msgspec.json.Decoder(list[RankedDocument])
_TEXT_EVENTS = msgspec.json.Decoder(TextEvent)
_TOP_LEVEL_FIELDS = frozenset(
    {
        *("stream", "text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data", "modalities"),
        *("rid", "priority", "extra_key", "session_params", "lora_path", "custom_logit_processor", "log_metrics"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"),
        *("return_hidden_states", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    }
)
"""Fields of a request to `/generate` outside `sampling_params`. The server ignores unknown fields there, but refuses
unknown fields inside `sampling_params`."""


def _generate_body(request: Request, _model: str) -> bytes:
    """Return the JSON body of a request to `/generate`.

    The user's fields are put into `sampling_params`, except for those in _TOP_LEVEL_FIELDS. The server refuses unknown
    fields in `sampling_params`, so a misspelled field causes an error. It ignores unknown fields elsewhere.
    """
    top_level = {name: value for name, value in request.body.items() if name in _TOP_LEVEL_FIELDS}
    sampling = {name: value for name, value in request.body.items() if name not in top_level}
    sampling |= sampling.pop("sampling_params", None) or {}
    defaults = {"max_new_tokens": request.output_tokens, "temperature": 0.0, "ignore_eos": request.ignore_eos}
    prompt = {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": request.prompt}
    fields = {**prompt, "sampling_params": merged(defaults, sampling), "stream": True}
    return msgspec.json.encode(merged(fields, top_level))


def _decode_generate(payloads: Sequence[bytes]) -> Answer:
    events, broken = decode_events(payloads, _EVENTS)
    answer = Answer([0] * len(payloads), end_event=end_marker(payloads), chunk_counts="usage")
    total = 0
    for index, event in enumerate(events):
        info = event.meta_info
        if event.error or info is None:
            note_error(answer, payloads[index])
        if info is None:
            continue
        if info.completion_tokens:
            answer.tokens[index] = max(0, info.completion_tokens - total)
            total = max(total, info.completion_tokens)
        elif total:
            answer.tokens[index] = 1  # an event without a count: add its token to the last count
            total += 1
        answer.prompt_tokens = info.prompt_tokens or answer.prompt_tokens
        if info.cached_tokens is not None:
            answer.counts["cached_prompt_tokens"] = info.cached_tokens
        if info.finish_reason:
            _note_finish(answer, info.finish_reason, payloads[index])
    finalise(answer, total or None, broken)
    note_drafts(answer, payloads)
    return answer


def _decode_rerank(payloads: Sequence[bytes]) -> Answer:
    """Decode a response of `/v1/rerank`, which is a list with one object per document."""
    rankings, broken = decode_events(payloads, _RANKED)
    answer = Answer([0] * len(payloads))
    for index, documents in enumerate(rankings):
        counts = [document.meta_info.prompt_tokens if document.meta_info else None for document in documents]
        known = [count for count in counts if count is not None]
        answer.prompt_tokens = sum(known) if known and len(known) == len(counts) else None
        pooling.note_results(answer, documents, index, payloads[index])
    if broken:  # an error is an object
        note_error(answer, payloads[len(rankings)])
    return finalise(answer, 0, "" if answer.error_kind else broken)


def _ranked_tokens(documents: Any) -> int:
    return sum(int(document["meta_info"]["prompt_tokens"]) for document in documents)


def _note_finish(answer: Answer, reason: Any, payload: bytes) -> None:
    """Store the finish reason in the answer, and the error if the server aborted the request.

    The finish reason of an aborted request has a message and a status code. The code is 503 if the server was busy."""
    details = base.as_dict(reason)
    if details.get("message"):
        error = {"message": details["message"], "code": details.get("status_code")}
        note_error(answer, msgspec.json.encode({"error": error}))
    note_finish(answer, str(details.get("type") or reason), payload)


def _text(payloads: Sequence[bytes]) -> str:
    """Return the text of a response of `/generate`."""
    events, _ = decode_events(payloads, _TEXT_EVENTS)
    with_text = [event for event in events if event.meta_info is not None]
    if not with_text:
        return ""
    last = with_text[-1]
    total = last.meta_info.completion_tokens if last.meta_info else None
    if last.output_ids is not None and total is not None and len(last.output_ids) < total:
        return join_halves("".join(event.text or "" for event in with_text))
    return join_halves(last.text or "")


EMBEDDING_ENDPOINTS = ("embeddings", "rerank", "classify", "score")
"""Endpoints of a server with `--is-embedding`, the default first. A server without this option has all other endpoints,
and also `score`."""


def _exact(request: Request) -> dict[str, Any]:
    return {"ignore_eos": request.ignore_eos} | RUNNING_USAGE


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    status, models = get_json("/v1/models")
    card = base.first_model_card(models)
    if status != 200 or card.get("owned_by") != "sglang":
        return None
    info = _server_info(get_json)
    limits = base.known_limits(SGLANG.limits, info | card)
    routes = ("/tokenize",) if base.route_exists(get_json, "/tokenize") else ()
    version = str(info.get("version") or "")
    endpoints = EMBEDDING_ENDPOINTS if info.get("is_embedding") is True else ()
    return base.ServerFacts("sglang", url, version, str(card.get("id", "")), limits, routes, endpoints=endpoints)


def _server_info(get_json: base.GetJson) -> dict[str, Any]:
    """Return the server's facts about itself, or an empty dict if the server or a gateway does not publish them.

    The route is `/server_info`. Earlier versions have only `/get_server_info`."""
    for path in ("/server_info", "/get_server_info"):
        with suppress(UnauthorizedError):  # this route may need an administrator's key
            status, answer = get_json(path)
            if status == 200:
                return base.as_dict(answer)
    return {}


# The server adds special tokens to a text prompt, as completions do, and applies the chat template to `messages`.
_COUNT_TEXT = Route(
    "/tokenize", lambda text, model: {"model": model, "prompt": text}, lambda answer: int(answer["count"])
)
_COUNT_CHAT = Route(
    "/tokenize", lambda text, model: {"model": model, "messages": messages(text)}, lambda answer: int(answer["count"])
)
_dialect = partial(openai_dialect, "sglang", extra_fields=_exact, always_done=True, fixed_output=True)

SGLANG = base.Backend(
    name="sglang",
    title="SGLang",
    request_times="SGLang states them on its own route only: use --endpoint generate, and --enable-metrics of SGLang.",
    native="completions",
    dialects={
        "completions": _dialect("completions", empty_rule=unless_marker, count=_COUNT_TEXT, token_ids=True),
        "chat": _dialect("chat", empty_rule=None, count=_COUNT_CHAT),
        "generate": Dialect(
            server="sglang",
            endpoint="generate",
            path="/generate",
            encode=_generate_body,
            decode=_decode_generate,
            text=_text,
            count=_COUNT_TEXT,
            count_by_running=Route(
                "/generate",
                lambda text, _: {"text": text, "sampling_params": {"max_new_tokens": 1}},
                lambda answer: int(answer["meta_info"]["prompt_tokens"]),
                generates=True,
            ),
            token_ids=True,
            fixed_output=True,
        ),
        "embeddings": pooling.pooling_dialect("sglang", "embeddings", count=_COUNT_TEXT, token_ids=True),
        "rerank": pooling.pooling_dialect(
            "sglang",
            "rerank",
            pooling.PoolingFormat(
                "/v1/rerank", ("query", "documents"), decode=_decode_rerank, prompt_tokens=_ranked_tokens
            ),
            count_text=_COUNT_TEXT,
        ),
        # A model that generates text returns the probabilities of these tokens after query and item. The ids do not
        # change the work.
        "score": pooling.pooling_dialect(
            "sglang",
            "score",
            pooling.PoolingFormat("/v1/score", ("query", "items"), {"label_token_ids": [0, 1]}),
            count_text=_COUNT_TEXT,
        ),
        "classify": pooling.pooling_dialect(
            "sglang", "classify", pooling.PoolingFormat("/v1/classify"), count=_COUNT_TEXT
        ),
    },
    identify=_identify,
    port=8004,
    limits={
        # The scheduler ends every response two tokens before the end of the context, and refuses a prompt that has
        # max_req_input_len tokens (managers/scheduler.py, managers/utils.py).
        "max_model_len": base.ServerLimit("--context-length", "total", reserved=2),
        "max_req_input_len": base.ServerLimit("--context-length", "prompt", reserved=1),
        "max_total_num_tokens": base.ServerLimit("--mem-fraction-static"),  # KV cache in tokens
        "max_running_requests": base.ServerLimit("--max-running-requests"),  # requests above this limit wait
        "max_queued_requests": base.ServerLimit("--max-queued-requests"),  # waiting requests above it are rejected
    },
    ids=Route(
        "/tokenize",
        lambda text, model: {"model": model, "prompt": text, "add_special_tokens": False},
        lambda answer: [int(number) for number in answer["tokens"]],
    ),
    metrics=base.MetricNames(
        prefix="sglang:",
        names={
            "running": ("sglang:num_running_reqs",),
            "waiting": ("sglang:num_queue_reqs",),
            "kv_used": ("sglang:token_usage",),
            "kv_tokens": ("sglang:max_total_num_tokens",),
            "prompt_tokens": ("sglang:prompt_tokens_total",),
            "output_tokens": ("sglang:generation_tokens_total",),
            "cached_prompt_tokens": ("sglang:cached_tokens_total",),
            # The counters above grow when a request finishes, these two while it runs. The first output token of a
            # request is not among them, because the prefill generates it.
            "live_prompt_tokens": ("sglang:realtime_tokens_total{mode=prefill_compute|prefill_cache}",),
            "live_output_tokens": ("sglang:realtime_tokens_total{mode=decode}",),
            "requests_finished": ("sglang:num_requests_total",),
            "acceptance_length": ("sglang:spec_accept_length",),
            "acceptance_rate": ("sglang:spec_accept_rate",),
        },
    ),
    # The limit allows a burst of 1000.
    process=base.ProcessCommand(
        module=("sglang.launch_server",),
        arguments=(
            "--model-path",
            "{model}",
            "--served-model-name",
            "{name}",
            "--host",
            "{host}",
            "--port",
            "{port}",
            "--max-running-requests",
            "1024",
            "--disable-radix-cache",
            "--enable-metrics",
        ),
        parallel=("--tp-size", "{tensor_parallel}"),
    ),
    cache_reset=base.CacheReset("/flush_cache", "a gateway may not forward this route: name the server itself"),
    simulated="loadgen.servers.simulated.sglang:PROTOCOL",
    simulated_models={"embeddings": "embedding-model", "rerank": "reranker", "classify": "classifier"},
    notes={
        "memory_option": "--mem-fraction-static",
        "memory_taken": "80 to 90% by default, depending on the GPU",
        "counts_inputs": True,
    },
)
