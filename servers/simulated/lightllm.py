"""A simulated LightLLM, as 1.2.0 speaks (lightllm/server/api_*.py at that tag) and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, exponential_buckets

_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
# Output length where nothing is asked (core/objs/sampling_params.py, api_models.py).
_NATIVE_TOKENS, _OPENAI_TOKENS = 65_535, 65_536
_MOST_BEST_OF, _MOST_STOPS = 8, 10
# A text with more characters per token of the context is refused unread (httpserver/manager.py, `_encode`).
_TOKEN_CHARACTERS = 8
# An error after the stream has begun, and the last there is (api_openai.py, `_safe_stream_wrapper`).
_FAILURE = (
    protocol.json_event({"error": {"message": "simulated failure", "type": "server_error", "code": "stream_error"}}),
)


def native(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST on NATIVE: no blank after `data:`, no [DONE]; a whole answer has no content type, and its text is a list."""
    body = request.body
    if missing := [name for name in ("inputs", "parameters") if name not in body]:
        raise _bad(f"'{missing[0]}'", 417)
    parameters = body["parameters"]
    if not isinstance(parameters, Mapping):
        raise _bad("'parameters' must be an object", 417)
    _check_values(parameters)
    requested, add_bos = (
        parameters.get("max_new_tokens", _NATIVE_TOKENS),
        bool(parameters.get("add_special_tokens", True)),
    )
    completion = _completion(
        state, request, body["inputs"], requested, _stops(parameters.get("stop_sequences")), add_bos
    )
    ids, texts, prompt_tokens, reason = (
        completion.ids,
        completion.texts,
        completion.prompt_tokens,
        completion.finish_reason,
    )
    used = {"input_text_tokens": prompt_tokens, "input_audio_tokens": 0, "input_image_tokens": 0}
    counts = b'"prompt_tokens":%d,"logprobs":{}},"generated_text":null,' % prompt_tokens
    usage = b'"details":null,"input_usage":%b' % protocol.dumps(used)
    inner = b'%b"finished":false,"finish_reason":null,%b' % (counts, usage)
    final = b'%b"finished":true,"finish_reason":"%b",%b' % (counts, reason.encode(), usage)
    marked = b",%b}\n\n" % protocol.dumps(state.mark)[1:-1]  # in the first event

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        begin = b'data:{"token":{"id":%d,"text":"%b","logprob":-1.5,"special":false,"count_output_tokens":%d,'
        event = begin % (ids[first], texts[first], first + 1) + (final if last else inner)
        return event + (b"}\n\n" if first else marked)

    def answer(_: float) -> Reply:
        output = completion.output_tokens
        whole: dict[str, Any] = {"generated_text": [completion.text], "count_output_tokens": output}
        whole |= {"finish_reason": reason, "prompt_tokens": prompt_tokens}
        if parameters.get("return_details"):
            same = {"logprob": -1.5, "special": False, "count_output_tokens": 0, "prompt_tokens": prompt_tokens}
            whole["tokens"] = [
                {"id": token, **same, "count_output_tokens": index, "text": texts[index - 1].decode()}
                for index, token in enumerate(ids, 1)
            ]
        whole |= {"logprobs": [{}] * output, "input_usage": used}
        return protocol.json_reply(whole | state.mark, headers=())

    return Encoding(completion, encode, answer, _FAILURE)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/chat/completions. The role comes first in an event of its own, together with the first token."""
    body = request.body
    if not isinstance(body.get("messages"), list):
        raise _schema_error(body, "messages")
    requested = body.get("max_completion_tokens") or body.get("max_tokens")
    completion = _openai(state, request, tokenizer.chat_text(body["messages"]), requested, add_bos=True)
    identity = _identity(state, request, "chatcmpl-{:032x}", "chat.completion.chunk")
    reason, usage = completion.finish_reason, {**completion.usage, **_CACHED}

    def chunk(delta: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
        return {**identity, "choices": [{"index": 0, "delta": delta, **rest}]}

    def answer(_: float) -> Reply:
        message = {"role": "assistant", "content": completion.text, "reasoning": "", "reasoning_content": None}
        choice = {"index": 0, "message": message | {"tool_calls": None}, "finish_reason": reason}
        made = _identity(state, request, "{}", "chat.completion")
        return protocol.json_reply({**made, "choices": [choice], "usage": usage})

    text = {"content": protocol.TEXT}
    inner = chunk(text, logprobs=None, token_ids=None, finish_reason=None)
    final = chunk(text, finish_reason=reason, logprobs=None, token_ids=None, stop_reason=None)
    role = chunk({"role": "assistant", "content": ""}, logprobs=None, finish_reason=None) | {"prompt_token_ids": None}
    closing = (protocol.json_event({**identity, "choices": [], "usage": usage}), protocol.DONE)
    opening, encode = (protocol.json_event(role),), protocol.text_events(completion.texts, inner, final)
    return Encoding(completion, encode, answer, _FAILURE, opening=opening, closing=closing)


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/completions. No special tokens are added here; usage comes in a chunk of its own before [DONE]."""
    body = request.body
    if missing := [name for name in ("model", "prompt") if name not in body]:
        raise _schema_error(body, missing[0])
    if unknown := [name for name in ("suffix", "logit_bias") if body.get(name)]:
        raise _bad(f"The {unknown[0]} parameter is not currently supported")
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise _bad("The simulated server takes one prompt per request")
        prompt = prompt[0]
    completion = _openai(state, request, prompt, body.get("max_tokens"), add_bos=False)
    identity = _identity(state, request, "{}", "text_completion")

    def chunk(text: str, reason: str | None, usage: object = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
        return {**identity, "choices": [choice], "usage": usage}

    reason, usage = completion.finish_reason, {**completion.usage, **_CACHED}
    named = _identity(state, request, "cmpl-{:08x}", "text_completion")
    closing = (protocol.json_event({**identity, "choices": [], "usage": usage}), protocol.DONE)
    encode = protocol.text_events(completion.texts, chunk(protocol.TEXT, None), chunk(protocol.TEXT, reason))
    return Encoding(
        completion,
        encode,
        lambda _: protocol.json_reply(chunk(completion.text, reason, usage) | named),
        _FAILURE,
        closing=closing,
    )


def _openai(state: ServerState, request: CompletionRequest, prompt: Any, asked: Any, *, add_bos: bool) -> Completion:
    """With the native parameters that the OpenAI routes make."""
    body = request.body
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "n")
    values = {name: body[name] for name in (*names, "best_of") if body.get(name) is not None}
    _check_values(values if asked is None else values | {"max_new_tokens": asked})
    return _completion(state, request, prompt, asked, _stops(body.get("stop")), add_bos)


def _completion(
    state: ServerState, request: CompletionRequest, prompt: Any, asked: Any, stops: list[str], add_bos: bool
) -> Completion:
    """Length checks happen when the body is first read: a stream has its 200 by then, and gets an event."""
    try:
        prompt_tokens = _prompt_tokens(state, prompt, add_bos=add_bos)
        wanted = protocol.integer(asked) or _OPENAI_TOKENS
        room = state.max_model_len - prompt_tokens
        if room <= 0:
            raise ValueError(
                f"the input prompt token len {prompt_tokens} + max_new_tokens {wanted} > {state.max_model_len}"
            )
    except ValueError as problem:
        if not request.streamed:
            raise _bad(str(problem)) from None
        # A refusal after status 200: one event, and no end marker (`_safe_stream_wrapper`).
        said = protocol.dumps({"error": {"message": str(problem), "type": "invalid_request_error"}})
        raise ErrorReply(protocol.events_reply(said)) from None
    made = state.complete(request, prompt_tokens, min(wanted, room), "stop")
    return made.cut_at_stop(stops, "stop", anywhere=False)[0]  # compared token by token; what stopped it stays


def _prompt_tokens(state: ServerState, prompt: Any, *, add_bos: bool) -> int:
    """Raises ValueError with LightLLM's words."""
    if isinstance(prompt, str):
        maximum, why = state.max_model_len * _TOKEN_CHARACTERS, "the request is rejected before tokenization."
        if len(prompt) > maximum:
            raise ValueError(f"prompt text length {len(prompt)} exceeds the character limit {maximum}, {why}")
        tokens = add_bos + tokenizer.count(prompt)
    elif isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
        if any(token >= tokenizer.VOCABULARY_SIZE for token in prompt):
            raise ValueError("prompt List[int] format contain id > vocab_size")
        tokens = len(prompt)
    else:
        raise ValueError(f"prompt format error, get type{type(prompt)}")
    if not tokens:
        raise ValueError("prompt_ids is empty")
    return tokens


# Name, what is allowed, and the words of `SamplingParams.verify` for the rest.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: 0 < value <= _MOST_BEST_OF, "need 0 < best_of <= 8, but got {}"),
    ("best_of", lambda value: value == 1, "the simulated server only supports best_of == 1"),
    ("n", lambda value: value == 1, "current only supported n == best_of"),
    ("presence_penalty", lambda value: value >= 0, "presence_penalty must >= 0.0, got {}"),
    ("frequency_penalty", lambda value: value >= 0, "frequency_penalty must >= 0.0, got {}"),
    ("repetition_penalty", lambda value: value >= 1, "repetition_penalty must >= 1.0, got {}"),
    ("temperature", lambda value: value >= 0, "temperature must > 0.0, got {}"),  # 0 means greedy
    ("top_p", lambda value: 0 < value <= 1, "top_p must be in (0.0, 1.0], got {}"),
    ("top_k", lambda value: value >= 1 or value == -1, "top_k must be -1 (disable), or at least 1, got {}."),
    ("max_new_tokens", lambda value: value >= 1, "max_new_tokens must be at least 1 , got {}."),
    ("min_new_tokens", lambda value: value >= 1, "min_new_tokens must be at least 1 , got {}."),
)


def _check_values(parameters: Mapping[str, Any]) -> None:
    for name, allows, message in _RULES:
        value = protocol.number(parameters.get(name))
        if value is not None and not allows(value):
            raise _bad(message.format(parameters[name]))
    minimum, maximum = (protocol.integer(parameters.get(name)) for name in ("min_new_tokens", "max_new_tokens"))
    if minimum is not None and maximum is not None and minimum > maximum:
        raise _bad(f"min_new_tokens must <= max_new_tokens, but got min {minimum}, max {maximum}.")


def _stops(given: Any) -> list[str]:
    """Raises ErrorReply for too many (`StopSequenceGroups`)."""
    stops = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if len(stops) > _MOST_STOPS:
        raise _bad("Too many stop sequence groups.")
    return [stop for stop in stops if isinstance(stop, str) and stop]


def error_reply(status: int, message: str) -> Reply:
    """`create_error_response` (api_errors.py)."""
    kinds = {404: "NotFoundError", 429: "RateLimitError"}
    kind = "InternalServerError" if status >= 500 else kinds.get(status, "BadRequestError")
    return protocol.openai_error(message, kind, status)


def _bad(message: str, status: int = 400) -> ErrorReply:
    return ErrorReply(error_reply(status, message))


def _schema_error(body: Mapping[str, Any], name: str) -> ErrorReply:
    """FastAPI's words for a body that does not fit the schema."""
    detail = [{"type": "missing", "loc": ["body", name], "msg": "Field required", "input": dict(body)}]
    return ErrorReply(Reply(protocol.dumps({"detail": detail}), 422))


def _identity(state: ServerState, request: CompletionRequest, name: str, kind: str) -> dict[str, Any]:
    """With a request id in the name: they count up in steps of eight (`req_id_generator.py`)."""
    model = request.body.get("model", state.config.model)
    number = name.format(8 * (request.index + 1))
    prefix, dash, rest = number.rpartition("-")
    return {
        "id": f"{prefix}{dash}{state.mark_word}-{rest}",
        "object": kind,
        "created": request.created_s,
        "model": model,
    }


def _server_info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    names = {"run_mode": "normal", "host": config.host, "port": config.port, "model_name": config.model}
    limits = {"max_req_total_len": state.max_model_len, "running_max_req_size": config.max_concurrent_requests}
    return protocol.json_reply({**names, **limits, "tp": 1, "dp": 1, **state.mark})


def _tokens(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    if not isinstance(fields.get("text"), str):
        raise _bad("error: 'text'", 417)
    parameters = fields.get("parameters") or {}
    return protocol.json_reply(
        {"ntokens": bool(parameters.get("add_special_tokens", True)) + tokenizer.count(fields["text"])}
    )


def _bad_json(message: str, position: int) -> Reply:
    return error_reply(400, f"{message}: line 1 column {position + 1} (char {position})")


_LOADS = ("current_load", "logical_max_load", "dynamic_max_load")
_HEALTHY = protocol.json_reply({"message": "Ok"})
_PAGES: dict[str, Page | Reply] = {  # by GET and by POST
    "/liveness": protocol.json_reply({"status": "ok"}),
    "/readiness": protocol.json_reply({"status": "ok"}),
    "/get_model_name": lambda state, _: protocol.json_reply({"model_name": state.config.model, **state.mark}),
    "/get_server_info": _server_info,
    "/tokens": _tokens,
}

PROTOCOL = ServerProtocol(
    head_suffix="date: {date}\r\nserver: hypercorn-h11\r\n",
    keep_alive_s=10,
    body_limit=64 << 20,
    generate={"/v1/chat/completions": chat, "/v1/completions": completions}
    | dict.fromkeys(protocol.NATIVE_ROUTES, native),
    pages={
        **{(method, path): page for path, page in _PAGES.items() for method in ("GET", "POST")},
        ("GET", "/health"): _HEALTHY,
        ("HEAD", "/health"): _HEALTHY,
        ("GET", "/healthz"): _HEALTHY,
        ("GET", "/v1/models"): lambda state, _: state.models("lightllm", max_model_len=state.max_model_len),
        ("GET", "/token_load"): lambda state, _: protocol.json_reply(dict.fromkeys(_LOADS, state.gauges().kv_usage)),
        # server/metrics/metrics.py; what we do not know is left out.
        ("GET", "/metrics"): lambda state, _: Reply(
            state.metrics("lightllm_", state.metric_labels) + state.mark_metrics(), headers=()
        ),
    },
    read_body=partial(protocol.json_fields, _bad_json),
    too_large=error_reply(400, "body too large"),
    unhealthy=Reply(b'{"message":"Error"}', 503),
    failure=lambda status: error_reply(status, HTTPStatus(status).phrase),
    needs_api_key=lambda _path: False,
    unauthorized=Reply(status=401),
    default_limit=256,
    limit_is_batch_size=True,  # `--running_max_req_size` is both
    buckets=partial(exponential_buckets, 0.001),
)
