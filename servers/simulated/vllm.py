"""The HTTP API of a simulated vLLM 0.32.0. Tests compare its responses with recordings of the real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loadgen.servers.simulated import pooling, protocol, tokenizer, vllm_answers, vllm_audio, vllm_checks, vllm_messages
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding, Reply
from loadgen.servers.simulated.state import (
    DURATION_HISTOGRAMS,
    LENGTH_HISTOGRAMS,
    MetricValue,
    ServerProtocol,
    ServerState,
)
from loadgen.servers.simulated.vllm_answers import Prompt
from loadgen.servers.simulated.vllm_checks import bad_request, request_error
from loadgen.servers.simulated.vllm_responses import responses

VERSION = "0.32.0"
_DEFAULT_MAX_TOKENS = 16
"""Default `max_tokens` of /v1/completions (entrypoints/openai/completion/protocol.py)."""


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/completions. Raises ErrorReply for an invalid request."""
    body = request.body
    vllm_checks.check_body(state, body, chat=False)
    prompt: Any = body.get("prompt")
    if body.get("suffix") is not None:
        only_texts = isinstance(prompt, str) or all(isinstance(item, str) for item in prompt)
        reason = "is only supported for models with" if only_texts else "requires text prompt input for"
        raise request_error(f"suffix {reason} FIM completion rendering", "suffix")
    if body.get("prompt_embeds") is not None:
        raise bad_request("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", "prompt_embeds")
    if not prompt:
        raise bad_request("You must pass at least one prompt")
    only_echo = bool(body.get("echo")) and protocol.integer(body.get("max_tokens")) == 0
    max_tokens = 1
    if not only_echo:
        max_tokens = vllm_checks.requested_tokens(state, body.get("max_tokens"), _DEFAULT_MAX_TOKENS)
    is_single = isinstance(prompt, str) or not isinstance(prompt[0], str | list)
    add_bos = body.get("add_special_tokens", True)
    prompts: list[Prompt] = []
    for item in [prompt] if is_single else prompt:
        ids = vllm_checks.prompt_ids(state, item, add_bos=add_bos)
        prompts.append((ids, item if isinstance(item, str) else None))
    return _encoding(state, request, prompts, max_tokens, chat=False)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/chat/completions. Raises ErrorReply for an invalid request."""
    body = request.body
    vllm_checks.check_body(state, body, chat=True)
    vllm_checks.check_chat(state, body)
    requested = body.get("max_completion_tokens") or body.get("max_tokens")
    max_tokens = state.max_model_len
    if requested is not None:
        max_tokens = vllm_checks.requested_tokens(state, requested, 0)
    text = tokenizer.chat_text(body["messages"])
    ids = vllm_checks.prompt_ids(state, text, add_bos=True)
    return _encoding(state, request, [(ids, text)], max_tokens, chat=True)


def _pooled_tokens(state: ServerState, body: Mapping[str, Any], prompt: Any) -> int:
    """Return the number of tokens of a prompt in a request for embeddings or reranking.

    Raises ErrorReply for an unknown model or an invalid prompt.
    """
    vllm_checks.check_model(state, body)
    return len(vllm_checks.prompt_ids(state, prompt, add_bos=True))


def _encoding(
    state: ServerState, request: CompletionRequest, prompts: list[Prompt], max_tokens: int, *, chat: bool
) -> Encoding:
    """Encode the response to a request whose prompts fit the context. Raises ErrorReply for an invalid request.

    The length of an answer is limited in two ways: to `max_tokens` tokens, and to the tokens that the prompt leaves
    free in the context (vLLM's `get_max_tokens`).
    """
    body = request.body
    limits = [min(max_tokens, state.max_model_len - len(ids)) for ids, _ in prompts]
    for limit in limits:
        vllm_checks.check_sampling(body, limit)
    logprobs = protocol.integer(body.get("top_logprobs" if chat else "logprobs"))
    vllm_checks.check_engine(body, [ids for ids, _ in prompts], logprobs)
    answers = vllm_answers.generate_answers(state, request, prompts, limits, chat=chat)
    return vllm_answers.encode_answers(state, request, answers, chat=chat)


def _bad_json(message: str, position: int) -> Reply:
    problem = {
        "type": "json_invalid",
        "loc": f"body.{position}",
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": message},
    }
    return vllm_checks.validation_error(problem).reply


def _read_body(path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the fields of a request body: a form on the route of transcriptions, and JSON on all other routes."""
    return (
        vllm_audio.read_form(body) if path == vllm_audio.TRANSCRIPTIONS else protocol.json_fields(_bad_json, path, body)
    )


def _models(state: ServerState, _: Mapping[str, Any]) -> Reply:
    allowed = ("sampling", "logprobs", "view")
    permission = {"id": f"modelperm-{state.started_s:016x}", "object": "model_permission", "created": state.started_s}
    for right in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning"):
        permission[f"allow_{right}"] = right in allowed
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    return state.models(
        "vllm", root=state.config.model, parent=None, max_model_len=state.max_model_len, permission=[permission]
    )


def _reset_prefix_cache(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Empty the prefix cache, unless requests are running or waiting.

    The response is always empty, so it does not say whether the cache was emptied. The real server has this route only
    with VLLM_SERVER_DEV_MODE=1.
    """
    state.flush_cache()
    return Reply(headers=())


def _tokenize(state: ServerState, fields: Mapping[str, Any]) -> Reply:
    vllm_checks.check_model(state, fields)
    is_chat = "messages" in fields
    text = tokenizer.chat_text(fields["messages"]) if is_chat else fields.get("prompt")
    if not isinstance(text, str):
        raise vllm_checks.missing_fields(fields, "prompt", "messages")
    ids = tokenizer.encode(text)
    if is_chat or fields.get("add_special_tokens", True):
        ids = [tokenizer.BOS_ID, *ids]
    texts = [tokenizer.decode([token]) for token in ids] if fields.get("return_token_strs") else None
    return protocol.json_reply(
        {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": texts}
    )


def _detokenize(state: ServerState, fields: Mapping[str, Any]) -> Reply:
    vllm_checks.check_model(state, fields)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise vllm_checks.missing_fields(fields, "tokens")
    return protocol.json_reply({"prompt": tokenizer.decode(vllm_checks.checked_ids(tokens))})


_DRAFT_METRICS = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
"""Metrics that only a server with speculative decoding has."""


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the /metrics page with those metrics of vLLM that are simulated.

    The names of counters end with `_total`. vLLM's source code contains the names without this suffix, because the
    Prometheus library adds it.
    """
    started_prompt_tokens = sum(stream.completion.prompt_tokens for stream in state.streams if stream.token_count)
    streaming_tokens = sum(stream.completion.generated_tokens(stream.token_count) for stream in state.streams)
    overloaded = state.refused_by_reason["overloaded"]
    reasons = ("stop", "length", "abort", "error", "repetition")
    figures: dict[str, MetricValue] = {
        "generated": state.output_tokens + streaming_tokens,
        "prefilled": state.prompt_tokens + started_prompt_tokens,
        "waiting_by_reason": {("reason", "capacity"): state.gauges().waiting, ("reason", "deferred"): 0},
        "ended_by_reason": {("finished_reason", reason): state.finished_by_reason[reason] for reason in reasons},
        "rejected_by_reason": {("reason", "max_num_queued_reqs"): overloaded, ("reason", "max_num_queued_tokens"): 0},
    }
    without = () if state.config.draft_tokens else _DRAFT_METRICS
    labels = {"engine": "0", **state.metric_labels}
    page = state.metrics("vllm:", labels, figures, rows=slice(-1), without=without)
    # The last metric has no engine label, because the front end rejects requests.
    page += state.metrics("vllm:", state.metric_labels, figures, rows=slice(-1, None))
    page += state.process_metrics() + state.mark_metrics()
    return Reply(page, headers=(("content-type", "text/plain; version=1.0.0; charset=utf-8"),))


def _buckets(max_model_len: int) -> dict[str, Sequence[float]]:
    """Return the bucket bounds of vLLM's histograms (v1/metrics/loggers.py and buckets.py).

    The bounds of durations are in seconds. The bounds of lengths are 1, 2, 5, 10, 20, 50, ... tokens, up to
    `max_model_len`.
    """
    latency = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
    ttft = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
    itl = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
    bounds = [float(digit * 10**power) for power in range(9) for digit in (1, 2, 5)]
    lengths = [bound for bound in bounds if bound <= max_model_len]
    durations = dict.fromkeys(DURATION_HISTOGRAMS, latency) | {"ttft_s": (*ttft, 2560), "itl_s": itl, "tpot_s": itl}
    return {**durations, **dict.fromkeys(LENGTH_HISTOGRAMS, lengths)}


def _overloaded(encoding: Encoding) -> Reply:
    """Return the error response to a request that exceeds vLLM's limit `max_num_queued_reqs`.

    `encoding` describes the response that the request would otherwise have received. If that response is a stream, vLLM
    has already sent status 200 when it detects the overload. The error is then sent as an event of the stream.
    Otherwise, the response has status 503.
    """
    reply = vllm_answers.failure(503)
    return protocol.events_reply(reply.body, b"[DONE]") if encoding.completion.streamed else reply


_NOT_JSON = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
_EMPTY = Reply(headers=())

PROTOCOL = ServerProtocol(
    head_prefix="date: {date}\r\nserver: uvicorn\r\n",
    head_suffix="vary: Origin\r\n",
    keep_alive_s=5,
    body_limit=64 << 20,
    generate={
        "/v1/completions": completions,
        "/v1/chat/completions": chat,
        "/v1/responses": responses,
        "/v1/messages": vllm_messages.messages,
        vllm_audio.TRANSCRIPTIONS: vllm_audio.transcriptions,
        vllm_audio.SPEECH: vllm_audio.speech,
        "/v1/embeddings": partial(pooling.embeddings, _pooled_tokens),
        "/classify": partial(pooling.classify, _pooled_tokens),
        **dict.fromkeys(("/score", "/v1/score"), partial(pooling.score, _pooled_tokens)),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), partial(pooling.rerank, _pooled_tokens)),
    },
    pages={
        ("GET", "/health"): _EMPTY,
        ("GET", "/ping"): _EMPTY,
        ("POST", "/ping"): _EMPTY,
        ("GET", "/version"): lambda state, _: protocol.json_reply({"version": VERSION, **state.mark}),
        ("GET", "/load"): protocol.json_reply({"server_load": 0}),  # needs --enable-server-load-tracking to count
        ("GET", "/v1/models"): _models,
        ("GET", "/metrics"): _metrics,
        ("POST", "/v1/messages/count_tokens"): vllm_messages.count_tokens,
        ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/detokenize"): _detokenize,
    },
    wrong_content_type=protocol.openai_error(_NOT_JSON, "Bad Request", 400),
    uploads=(vllm_audio.TRANSCRIPTIONS,),
    read_body=_read_body,
    too_large=vllm_answers.failure(500),
    failure=vllm_answers.failure,
    unhealthy=Reply(status=503, headers=()),
    overloaded=_overloaded,
    needs_api_key=lambda path: path.startswith(("/v1", "/v2", "/inference")),
    unauthorized=Reply(b'{"error":"Unauthorized"}', 401, outermost=True),
    default_limit=None,
    buckets=_buckets,
)
