"""The HTTP API of a simulated SGLang 0.5.23. Tests compare its responses with recordings of the real server."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadgen.servers.simulated import protocol, segments, sglang_checks, sglang_pooling, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, EventEncoder, Reply
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.state import (
    DURATION_HISTOGRAMS,
    LENGTH_HISTOGRAMS,
    MetricValue,
    ServerProtocol,
    ServerState,
)

VERSION = "0.5.23"
_DEFAULT_MAX_TOKENS = 16
"""Default `max_tokens` of /v1/completions (entrypoints/openai/protocol.py)."""
_DEFAULT_MAX_NEW_TOKENS = 128
"""Default `max_new_tokens` of /generate (sampling/sampling_params.py)."""
_QUEUE_FULL = "The request queue is full."
_NO_DETAILS = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
_USAGE_FORMAT = (
    b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,' + protocol.dumps(_NO_DETAILS)[1:]
)
"""Running token totals of an event, with placeholders for the numbers."""


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/completions. Raises ErrorReply for an invalid request."""
    body = request.body
    sglang_checks.check_openai(state, request.path, body, chat=False)
    ids = sglang_checks.prompt_ids(request, body["prompt"])
    requested = protocol.integer(body.get("max_tokens")) or _DEFAULT_MAX_TOKENS
    completion, stop = _complete(state, request, ids, body, requested, "min_tokens")
    identity = _identity(state, request, "text_completion")

    def choice(text: str, finished: bool) -> dict[str, Any]:
        reason = completion.finish_reason if finished else None
        return {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "matched_stop": (stop or None) if finished else None,
        }

    def answer(_duration_s: float) -> Reply:
        return _whole_reply(identity, choice(completion.text, True), completion)

    inner = {**identity, "choices": [choice(protocol.TEXT, False)]}
    final = {**identity, "choices": [choice(protocol.TEXT, True)]}
    usage_event = {**identity, "choices": [], "usage": {**_counts(completion), "reasoning_tokens": 0}}
    return Encoding(
        completion,
        _text_encoder(completion, inner, final, "usage" if _has_running_usage(body) else "null"),
        answer,
        _FAILURE,
        merges=True,
        closing=_closing(body, usage_event),
    )


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/chat/completions. Raises ErrorReply for an invalid request.

    In a stream, the role and the finish reason are in two separate events without text.
    """
    body = request.body
    sglang_checks.check_openai(state, request.path, body, chat=True)
    if not body["messages"]:
        raise sglang_checks.bad_request("Messages cannot be empty.")
    ids = [tokenizer.BOS_ID, *tokenizer.encode(tokenizer.chat_text(body["messages"]))]
    requested = protocol.integer(body.get("max_completion_tokens") or body.get("max_tokens"))
    completion, stop = _complete(state, request, ids, body, requested, "min_tokens", chat=True)
    identity = _identity(state, request, "chat.completion.chunk")
    call_id = segments.call_ids(request)
    matched = stop or None

    def chunk(delta: Mapping[str, Any], reason: str | None = None, matched_stop: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"reasoning_content": None, **delta}, "logprobs": None}
        return {**identity, "choices": [{**choice, "finish_reason": reason, "matched_stop": matched_stop}]}

    def answer(_duration_s: float) -> Reply:
        message = {"role": "assistant", "content": completion.text, "reasoning_content": None}
        if completion.segments:
            message |= segments.openai_message(completion, "reasoning_content", call_id)
        reason = completion.finish_reason
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "matched_stop": matched}
        return _whole_reply(identity | {"object": "chat.completion"}, choice, completion)

    text = chunk({"content": protocol.TEXT})
    finish = protocol.json_event(chunk({}, completion.finish_reason, matched))
    usage_event = {**identity, "choices": [], "usage": _chat_usage(completion)}
    running_usage = "usage" if _has_running_usage(body) else ""
    encode = _text_encoder(completion, text, text, running_usage)
    if completion.segments:
        encode = _segment_encoder(completion, protocol.json_event(chunk({protocol.TEXT: 0})), running_usage, call_id)
    return Encoding(
        completion,
        encode,
        answer,
        _FAILURE,
        merges=True,
        opening=(protocol.json_event(chunk({"role": "assistant", "content": ""})),),
        closing=(finish, *_closing(body, usage_event)),
    )


def generate(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /generate. Raises ErrorReply for an invalid request.

    Each event contains the whole text and all token ids so far.
    """
    request = replace(request, generate_streams=True)
    body = request.body
    parameters = sglang_checks.sampling_parameters(request)
    prompt = body.get("text") or body.get("input_ids")
    if not prompt:
        raise sglang_checks.native_error(request, "Either text, input_ids or input_embeds should be provided.")
    ids = sglang_checks.prompt_ids(request, prompt)
    requested = protocol.integer(parameters.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS))
    completion, stop = _complete(state, request, ids, parameters, requested, "min_new_tokens")
    request_id = f"{state.mark_word}-{request.index:032x}"
    reason: dict[str, Any] = {"type": "stop", "matched": stop}
    if completion.finish_reason == "length":
        reason = {"type": "length", "length": completion.output_tokens}
    received_s = time.time()
    first_s = [0.0]
    jobs: list[Job] = []

    def response(count: int, finished: bool, text: str) -> dict[str, Any]:
        now_s = time.time()
        if not first_s[0]:
            first_s[0] = now_s
        queue_s = jobs[0].queue_ns / 1e9 if jobs else 0.0
        info: dict[str, Any] = {
            "id": request_id,
            "finish_reason": reason if finished else None,
            "prompt_tokens": completion.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "storage_prefetch_wait": 0.0,
            "storage_staging_wait": 0.0,
            "forward_entry_time": received_s + queue_s,
            "prefill_finished_time": first_s[0],
            "queue_time": queue_s,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": jobs[0].cached_tokens if jobs else 0,
        }
        info |= {"weight_versions": _weight_versions(count)} if finished else {}
        info |= {"cached_tokens_details": None, "dp_rank": None}
        if finished:
            decode_s = max(now_s - first_s[0], 1e-6)
            sent = {"response_sent_to_client_ts": first_s[0]}
            info |= {
                "e2e_latency": now_s - received_s,
                "request_received_ts": received_s,
                "first_token_latency": first_s[0] - received_s,
                "api_server_dispatch_finish_ts": received_s,
                **(sent if request.streamed else {}),
                "request_finished_ts": now_s,
                "decode_throughput": (count - 1) / decode_s,
                **({} if request.streamed else sent),
            }
        elif count == 1:
            info["response_sent_to_client_ts"] = now_s
        return {"text": text, "output_ids": list(completion.ids[:count]), "meta_info": info, **state.mark}

    def encode(first: int, tokens: int, last: bool) -> bytes:
        count = first + tokens
        text = replace(completion, ids=completion.ids[:count], texts=completion.texts[:count]).text
        return protocol.json_event(response(count, last, text))

    return Encoding(
        completion,
        encode,
        lambda _duration_s: protocol.json_reply(response(completion.output_tokens, True, completion.text)),
        _NATIVE_FAILURE,
        merges=True,
        closing=(protocol.DONE,),
        on_job=jobs.append,
    )


def _complete(
    state: ServerState,
    request: CompletionRequest,
    ids: Sequence[int],
    parameters: Mapping[str, Any],
    requested: int | None,
    minimum_name: str,
    *,
    chat: bool = False,
) -> tuple[Completion, str]:
    """Check the lengths and the sampling parameters of a request, and generate a completion.

    - `ids` contains the token ids of the prompt.
    - `requested` is the requested maximum number of output tokens.
    - `minimum_name` is the name of the parameter for the minimum number of output tokens, for error messages.
    - `chat` is True if the completion may contain reasoning and tool calls.

    Return the completion, and the stop string that ended it. The text of the completion ends before the stop string. If
    the completion ended in another way, the stop string is empty. Raises ErrorReply if a check fails.
    """
    limit = sglang_checks.output_limit(state, request, len(ids), requested)
    sglang_checks.check_sampling(request, parameters, requested, minimum_name)
    if chat:
        completion = segments.complete(state, request, len(ids), max(1, limit))
    else:
        completion = state.complete(request, len(ids), max(1, limit), "stop")
    stops = parameters.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    completion, stop, length = completion.cut_at_stop(stops, "stop", anywhere=True)
    if stop:
        *before, last = completion.texts
        kept = max(0, length - sum(map(len, before)))
        completion = replace(completion, texts=[*before, last[:kept]])
    if state.config.clock == "batching":
        completion = replace(completion, prompt=ids)
    return completion, stop


def _text_encoder(
    completion: Completion, inner: Mapping[str, Any], final: Mapping[str, Any], usage: str
) -> EventEncoder:
    """Return a function that encodes the events of a text response. Each event contains one or more tokens.

    `final` is the template of the last event, and `inner` is the template of all earlier events. Both contain
    protocol.TEXT in the place of the text. `usage` determines the field `usage` of each event:

    - "usage": the field contains the token counts so far.
    - "null": the field is null.
    - "": the event has no such field.
    """
    placeholder = protocol.dumps(protocol.TEXT)[1:-1]
    parts = [protocol.json_event(event).removesuffix(b"}\n\n").partition(placeholder) for event in (inner, final)]
    (start, _, end), (final_start, _, final_end) = parts
    texts = completion.texts
    prompt_tokens = completion.prompt_tokens

    def encode(first: int, tokens: int, last: bool) -> bytes:
        text = texts[first] if tokens == 1 else b"".join(texts[first : first + tokens])
        count = first + tokens
        counts = b""
        if usage == "usage":
            counts = _USAGE_FORMAT % (prompt_tokens, prompt_tokens + count, count)
        elif usage:
            counts = b',"usage":null'
        before, after = (final_start, final_end) if last else (start, end)
        return b"".join((before, text, after, counts, b"}\n\n"))

    return encode


def _segment_encoder(completion: Completion, event: bytes, usage: str, call_id: str) -> EventEncoder:
    """Return an encoder for the events of an answer that consists of segments, such as reasoning and text.

    `event` is an encoded event with a placeholder in its field `delta`. For each event, the encoder replaces the
    placeholder by the new content. If `usage` is not empty, the encoder also adds the token counts so far. `call_id` is
    the id of the tool call in the answer.
    """
    start, _, end = event.partition(protocol.dumps({"reasoning_content": None, protocol.TEXT: 0}))
    start = start.removesuffix(b'"delta":')

    def encode(first: int, tokens: int, _last: bool) -> bytes:
        delta = segments.openai_delta(completion, first, tokens, b"reasoning_content", call_id)
        count = first + tokens
        counts = b""
        if usage:
            counts = _USAGE_FORMAT % (completion.prompt_tokens, completion.prompt_tokens + count, count)
        return b"".join((start, delta, end.removesuffix(b"}\n\n"), counts, b"}\n\n"))

    return encode


def _chat_usage(completion: Completion) -> dict[str, Any]:
    """Return the usage of a chat response. SGLang reports the number of reasoning tokens."""
    return {**_counts(completion), **_NO_DETAILS, "reasoning_tokens": segments.reasoning_tokens(completion)}


def _has_running_usage(body: Mapping[str, Any]) -> bool:
    """Return True if the request asks for running token totals in its events."""
    options = body.get("stream_options") or {}
    return bool(options.get("continuous_usage_stats"))


def _closing(body: Mapping[str, Any], usage_event: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the last events of a stream: the usage if the request asks for it, and `[DONE]`."""
    options = body.get("stream_options") or {}
    usage = (protocol.json_event(usage_event),) if options.get("include_usage") else ()
    return (*usage, protocol.DONE)


def _counts(completion: Completion) -> dict[str, int]:
    """Return the token counts of a response. The fields have the order of SGLang."""
    usage = completion.usage
    return {name: usage[name] for name in ("prompt_tokens", "total_tokens", "completion_tokens")}


def _weight_versions(output_tokens: int) -> list[dict[str, Any]]:
    return [{"version": "default", "start": 0, "end": output_tokens}]


def _whole_reply(identity: Mapping[str, Any], choice: Mapping[str, Any], completion: Completion) -> Reply:
    """Return a non-streamed response of an OpenAI route."""
    metadata = {"weight_version": "default", "weight_versions": _weight_versions(completion.output_tokens)}
    usage = _chat_usage(completion)
    return protocol.json_reply({**identity, "choices": [choice], "usage": usage, "metadata": metadata})


def _identity(state: ServerState, request: CompletionRequest, object_name: str) -> dict[str, Any]:
    """Return the first fields of a response: id, object, created and model.

    As in the real SGLang, the model is copied from the request, even if the server has no model with this name.
    """
    return {
        "id": f"{state.mark_word}-{request.index:032x}",
        "object": object_name,
        "created": request.created_s,
        "model": request.body.get("model", "default"),
    }


def _overloaded(encoding: Encoding) -> Reply:
    """Return the response to a request when SGLang's queue is full (`--max-queued-requests`).

    A stream gets status 200 and one event with the error. The OpenAI routes then send a usage event with zeros if the
    request asked for it. On /generate, the error is in the finish reason.
    """
    if not encoding.completion.streamed:
        return failure(503)
    if encoding.failure is _NATIVE_FAILURE:
        reason = {"type": "abort", "message": _QUEUE_FULL, "status_code": 503, "err_type": None}
        info = {"finish_reason": reason, "prompt_tokens": encoding.completion.prompt_tokens, "completion_tokens": 0}
        return protocol.events_reply(protocol.dumps({"text": "", "output_ids": [], "meta_info": info}), b"[DONE]")
    closing = [event for event in encoding.closing if b'"usage":{' in event or event == protocol.DONE]
    zeros = [re.sub(rb'(_tokens":)\d+', rb"\g<1>0", event) for event in closing]
    error = _spaced_error_event(_QUEUE_FULL, "SERVICE_UNAVAILABLE", 503)
    return Reply(b"".join((error, *zeros)), headers=protocol.EVENTS_TYPE, chunked=True)


def _spaced_error_event(message: str, error_type: str, code: int) -> bytes:
    """Return an error event of the OpenAI routes.

    SGLang writes the JSON of this event with spaces, unlike the JSON of its other events.
    """
    body = sglang_checks.error_body(message, error_type, code).replace(b'":', b'": ').replace(b',"', b', "')
    return protocol.sse_event(b'{"error": %b}' % body)


def failure(status: int) -> Reply:
    """Return an error response with status 429, 500 or 503.

    The real server never sends status 429. A user can still request this status, to test a client with it."""
    if status == 500:
        return Reply(sglang_checks.error_body("Internal server error", "InternalServerError", 500), 500)
    return Reply(sglang_checks.error_body(_QUEUE_FULL, "SERVICE_UNAVAILABLE", status), status)


def _tokenize(state: ServerState, fields: Mapping[str, Any]) -> Reply:
    """Return the token ids of one text, of several texts, or of a chat with its template."""

    def ids_of(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        return [tokenizer.BOS_ID, *ids] if fields.get("add_special_tokens", True) else ids

    prompt = fields.get("prompt")
    if "messages" in fields:
        prompt = tokenizer.chat_text(fields["messages"])
    if isinstance(prompt, list) and all(isinstance(text, str) for text in prompt):
        tokens: Any = [ids_of(text) for text in prompt]
        count: Any = [*map(len, tokens)]
    elif isinstance(prompt, str):
        tokens = ids_of(prompt)
        count = len(tokens)
    else:
        raise sglang_checks.bad_request("Either `prompt` or `messages` must be provided.")
    return protocol.json_reply({"tokens": tokens, "count": count, "max_model_len": state.max_model_len})


def _detokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise sglang_checks.bad_request("`tokens` must be a list of integers.")
    return protocol.json_reply({"text": tokenizer.decode(tokens)})


def _server_info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the server's options and its version. The real server lists several hundred options."""
    config = state.config
    return protocol.json_reply(
        {
            "model_path": config.model,
            "served_model_name": config.model,
            "context_length": state.max_model_len,
            "max_running_requests": None,
            "max_queued_requests": config.max_concurrent_requests,
            "max_total_tokens": config.kv_tokens,
            "tp_size": config.tensor_parallel,
            "disable_radix_cache": False,
            "enable_cache_report": False,
            "is_embedding": sglang_pooling.is_embedding(state),
            "stream_interval": config.tokens_per_event,
            "host": config.host,
            "port": config.port,
            "max_req_input_len": max(1, state.max_model_len - sglang_checks.RESERVED_PROMPT_TOKENS),
            "version": VERSION,
            **state.mark,
        }
    )


def _model_info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    model = state.config.model
    info: dict[str, Any] = {"model_path": model, "served_model_name": model, "tokenizer_path": model}
    info["is_generation"] = not sglang_pooling.is_embedding(state)
    return protocol.json_reply({**info, "weight_version": "default", "model_type": "llama", **state.mark})


def _models(state: ServerState, _: Mapping[str, Any]) -> Reply:
    return state.models("sglang", root=state.config.model, parent=None, max_model_len=state.max_model_len)


def _flush_cache(state: ServerState, _: Mapping[str, Any]) -> Reply:
    state.flush_cache()
    return Reply(
        b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
        b"operation will not be performed.)\n",
        headers=(),
    )


_SCHEDULER_METRICS = 8  # first rows of sglang.csv, which the scheduler publishes
_CACHE_METRICS = 1  # rows after them, without labels of ranks


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the page /metrics of a simulated SGLang. It contains the metrics of SGLang that are simulated.

    Two types of token counters differ in when they grow:

    - `prompt_tokens_total` and `generation_tokens_total` grow when a request ends.
    - `realtime_tokens_total` grows while a request runs. The first generated token of a request is not counted as a
      decode token, because prefill generates this token.
    """
    started = [stream for stream in state.streams if stream.token_count]
    ended = sum(state.finished_by_reason.values())
    generated = state.output_tokens + sum(stream.completion.generated_tokens(stream.token_count) for stream in started)
    prefilled = state.prompt_tokens + sum(stream.completion.prompt_tokens for stream in started)
    gauges = state.gauges()
    cached = gauges.cached_prompt_tokens
    accepted, steps, drafted = gauges.accepted_draft_tokens, gauges.draft_steps, gauges.draft_tokens
    figures: dict[str, MetricValue] = {
        "context_tokens": state.max_model_len,
        "cache_hit_rate": cached / prefilled if prefilled else 0.0,
        "live_tokens": {
            ("mode", "prefill_compute"): max(0, prefilled - cached),
            ("mode", "decode"): max(0, generated - ended - len(started)),
            ("mode", "prefill_cache"): cached,
        },
        "cached_by_source": {("cache_source", "device"): cached},
        "ended": ended,
        # The real server shows the values of the latest steps. Here they are means since the start.
        "acceptance_length": 1 + accepted / steps if steps else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }
    engine = {"engine_type": "unified", **state.metric_labels}
    ranks = {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
    cache_rows = slice(_SCHEDULER_METRICS, _SCHEDULER_METRICS + _CACHE_METRICS)
    page = state.metrics("sglang:", engine | ranks, figures, rows=slice(_SCHEDULER_METRICS))
    page += state.metrics("sglang:", engine, figures, rows=cache_rows)
    front_end = engine | {"is_streaming": "true"}
    page += state.metrics("sglang:", front_end, figures, rows=slice(cache_rows.stop, None))
    page += state.mark_metrics()
    return Reply(page, headers=(("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),), chunked=True)


def _buckets(max_model_len: int) -> dict[str, Sequence[float]]:
    """Return the bucket bounds of each histogram. The bounds were recorded from a real SGLang server.

    Bounds of lengths are left out if they exceed `max_model_len`. If all of them do, the first bound stays.
    """
    ttft = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
    tpot = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6)
    lengths = (100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10_000, 20_000, 40_000)
    fitting = [bound for bound in lengths if bound <= max_model_len] or [100]
    durations: dict[str, Sequence[float]] = dict.fromkeys(DURATION_HISTOGRAMS, ttft)
    durations |= {"itl_s": tpot, "tpot_s": (*tpot, 0.8, 1, 2, 4, 6, 8), "e2e_s": (*ttft, 600, 1200, 1800, 2400)}
    return {**durations, **dict.fromkeys(LENGTH_HISTOGRAMS, fitting)}


_FAILURE = (_spaced_error_event("Internal server error", "InternalServerError", 500), protocol.DONE)
"""The events that end a stream of an OpenAI route when its generation fails."""
_NATIVE_FAILURE = (
    protocol.json_event({"error": {"message": "Internal server error", "type": "server_error", "code": 500}}),
    protocol.DONE,
)
"""The events that end a stream of /generate when its generation fails."""
_BAD_TYPE = (
    "{'loc': ['header', 'content-type'], "
    "'msg': \"Unsupported Media Type: Only 'application/json' is allowed\", 'type': 'value_error'}"
)
_EMPTY = Reply(headers=())
_PAGES = {
    "/server_info": _server_info,
    "/get_server_info": _server_info,
    "/model_info": _model_info,
    "/get_model_info": _model_info,
    "/v1/models": _models,
    "/metrics": _metrics,
}

PROTOCOL = ServerProtocol(
    head_prefix="date: {date}\r\nserver: uvicorn\r\n",
    head_suffix="vary: Origin\r\n",
    keep_alive_s=5,
    body_limit=64 << 20,
    generate={
        "/v1/completions": completions,
        "/v1/chat/completions": chat,
        "/generate": generate,
        "/v1/embeddings": sglang_pooling.embeddings,
        "/v1/rerank": sglang_pooling.rerank,
        "/v1/score": sglang_pooling.score,
        "/v1/classify": sglang_pooling.classify,
    },
    pages={
        **{("GET", path): page for path, page in _PAGES.items()},
        **{("GET", path): _EMPTY for path in ("/health", "/health_generate", "/ping", "/ready")},
        ("GET", "/"): protocol.json_reply("SGLang is running"),
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/v1/tokenize"): _tokenize,
        ("POST", "/detokenize"): _detokenize,
        ("GET", "/flush_cache"): _flush_cache,
        ("POST", "/flush_cache"): _flush_cache,
    },
    wrong_content_type=Reply(
        sglang_checks.error_body(f"1 validation error:\n  {_BAD_TYPE} [{_BAD_TYPE}]", "Bad Request", 400), 400
    ),
    read_body=sglang_checks.read_body,
    too_large=failure(500),
    failure=failure,
    unhealthy=Reply(status=503, headers=()),
    overloaded=_overloaded,
    needs_api_key=lambda path: not path.startswith(("/health", "/metrics", "/ping", "/simulated")),
    unauthorized=Reply(b'{"error":"Unauthorized"}', 401, outermost=True),
    default_limit=None,
    buckets=_buckets,
)
