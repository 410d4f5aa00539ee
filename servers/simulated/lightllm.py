"""The HTTP API of a simulated LightLLM 1.2.0 (lightllm/server/api_*.py at that tag)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, exponential_buckets

_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
# Default output lengths (core/objs/sampling_params.py, api_models.py).
_NATIVE_MAX_TOKENS = 65_535
_OPENAI_MAX_TOKENS = 65_536
_MAX_BEST_OF = 8
_MAX_STOPS = 10
_MAX_CHARACTERS_PER_TOKEN = 8
"""A text of more than this many characters per token of the context is refused without tokenizing it
(httpserver/manager.py, `_encode`)."""
_FAILURE = (
    protocol.json_event({"error": {"message": "simulated failure", "type": "server_error", "code": "stream_error"}}),
)
"""The last event of a stream that fails (api_openai.py, `_safe_stream_wrapper`)."""


def native(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to a POST request on a native route (`NATIVE_ROUTES`).

    The format differs from the OpenAI routes:

    - Events have no space after `data:`.
    - A stream does not end with `[DONE]`.
    - A non-streamed response has no content type, and its `generated_text` is a list.
    """
    body = request.body
    for name in ("inputs", "parameters"):
        if name not in body:
            raise _error(f"'{name}'", 417)
    parameters = body["parameters"]
    if not isinstance(parameters, Mapping):
        raise _error("'parameters' must be an object", 417)
    _check_values(parameters)
    completion = _completion(
        state,
        request,
        body["inputs"],
        parameters.get("max_new_tokens", _NATIVE_MAX_TOKENS),
        stops=_stop_strings(parameters.get("stop_sequences")),
        add_bos=bool(parameters.get("add_special_tokens", True)),
    )
    ids = completion.ids
    texts = completion.texts
    prompt_tokens = completion.prompt_tokens
    reason = completion.finish_reason
    input_usage = {"input_text_tokens": prompt_tokens, "input_audio_tokens": 0, "input_image_tokens": 0}
    counts = b'"prompt_tokens":%d,"logprobs":{}},"generated_text":null,' % prompt_tokens
    usage = b'"details":null,"input_usage":%b' % protocol.dumps(input_usage)
    unfinished = b'%b"finished":false,"finish_reason":null,%b' % (counts, usage)
    finished = b'%b"finished":true,"finish_reason":"%b",%b' % (counts, reason.encode(), usage)
    first_event_end = b",%b}\n\n" % protocol.dumps(state.mark)[1:-1]

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        token = b'data:{"token":{"id":%d,"text":"%b","logprob":-1.5,"special":false,"count_output_tokens":%d,'
        event = token % (ids[first], texts[first], first + 1) + (finished if last else unfinished)
        return event + (b"}\n\n" if first else first_event_end)

    def answer(_duration_s: float) -> Reply:
        response: dict[str, Any] = {
            "generated_text": [completion.text],
            "count_output_tokens": completion.output_tokens,
            "finish_reason": reason,
            "prompt_tokens": prompt_tokens,
        }
        if parameters.get("return_details"):
            response["tokens"] = [
                {
                    "id": token,
                    "logprob": -1.5,
                    "special": False,
                    "count_output_tokens": index,
                    "prompt_tokens": prompt_tokens,
                    "text": texts[index - 1].decode(),
                }
                for index, token in enumerate(ids, 1)
            ]
        response |= {"logprobs": [{}] * completion.output_tokens, "input_usage": input_usage}
        return protocol.json_reply(response | state.mark, headers=())

    return Encoding(completion, encode, answer, _FAILURE)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/chat/completions.

    In a stream, a separate event with the role is sent together with the first token.
    """
    body = request.body
    if not isinstance(body.get("messages"), list):
        raise _schema_error(body, "messages")
    requested = body.get("max_completion_tokens") or body.get("max_tokens")
    completion = _openai_completion(state, request, tokenizer.chat_text(body["messages"]), requested, add_bos=True)
    identity = _identity(state, request, "chatcmpl-{:032x}", "chat.completion.chunk")
    reason = completion.finish_reason
    usage = {**completion.usage, **_CACHED}

    def chunk(delta: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {**identity, "choices": [{"index": 0, "delta": delta, **fields}]}

    def answer(_duration_s: float) -> Reply:
        message = {
            "role": "assistant",
            "content": completion.text,
            "reasoning": "",
            "reasoning_content": None,
            "tool_calls": None,
        }
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole_identity = _identity(state, request, "{}", "chat.completion")
        return protocol.json_reply({**whole_identity, "choices": [choice], "usage": usage})

    text = {"content": protocol.TEXT}
    inner = chunk(text, logprobs=None, token_ids=None, finish_reason=None)
    final = chunk(text, finish_reason=reason, logprobs=None, token_ids=None, stop_reason=None)
    role = chunk({"role": "assistant", "content": ""}, logprobs=None, finish_reason=None) | {"prompt_token_ids": None}
    return Encoding(
        completion,
        protocol.text_events(completion.texts, inner, final),
        answer,
        _FAILURE,
        opening=(protocol.json_event(role),),
        closing=(protocol.json_event({**identity, "choices": [], "usage": usage}), protocol.DONE),
    )


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/completions.

    No special tokens are added to the prompt. In a stream, a separate event before `[DONE]` contains the usage.
    """
    body = request.body
    for name in ("model", "prompt"):
        if name not in body:
            raise _schema_error(body, name)
    for name in ("suffix", "logit_bias"):
        if body.get(name):
            raise _error(f"The {name} parameter is not currently supported")
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise _error("The simulated server takes one prompt per request")
        prompt = prompt[0]
    completion = _openai_completion(state, request, prompt, body.get("max_tokens"), add_bos=False)
    identity = _identity(state, request, "{}", "text_completion")
    reason = completion.finish_reason
    usage = {**completion.usage, **_CACHED}

    def chunk(text: str, finish_reason: str | None, usage: object = None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}
        return {**identity, "choices": [choice], "usage": usage}

    def answer(_duration_s: float) -> Reply:
        whole_identity = _identity(state, request, "cmpl-{:08x}", "text_completion")
        return protocol.json_reply(chunk(completion.text, reason, usage) | whole_identity)

    return Encoding(
        completion,
        protocol.text_events(completion.texts, chunk(protocol.TEXT, None), chunk(protocol.TEXT, reason)),
        answer,
        _FAILURE,
        closing=(protocol.json_event({**identity, "choices": [], "usage": usage}), protocol.DONE),
    )


def _openai_completion(
    state: ServerState, request: CompletionRequest, prompt: Any, max_tokens: Any, *, add_bos: bool
) -> Completion:
    """Check the parameters of a request to an OpenAI route, and generate a completion.

    The OpenAI parameters are first converted to LightLLM's native parameters, as in the real server. Raises ErrorReply
    for an invalid parameter.
    """
    body = request.body
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty")
    values = {name: body[name] for name in (*names, "n", "best_of") if body.get(name) is not None}
    if max_tokens is not None:
        values["max_new_tokens"] = max_tokens
    _check_values(values)
    return _completion(state, request, prompt, max_tokens, stops=_stop_strings(body.get("stop")), add_bos=add_bos)


def _completion(
    state: ServerState, request: CompletionRequest, prompt: Any, max_tokens: Any, *, stops: list[str], add_bos: bool
) -> Completion:
    """Check the lengths of prompt and output, and generate a completion. Raises ErrorReply for an invalid length.

    As in the real server, the error of a streamed request is an event in a response with status 200.
    """
    try:
        prompt_tokens = _prompt_tokens(state, prompt, add_bos=add_bos)
        requested = protocol.integer(max_tokens) or _OPENAI_MAX_TOKENS
        room = state.max_model_len - prompt_tokens
        if room <= 0:
            sizes = f"the input prompt token len {prompt_tokens} + max_new_tokens {requested}"
            raise ValueError(f"{sizes} > {state.max_model_len}")
    except ValueError as problem:
        if not request.streamed:
            raise _error(str(problem)) from None
        # A refusal after status 200 is one event, without an end marker (`_safe_stream_wrapper`).
        payload = protocol.dumps({"error": {"message": str(problem), "type": "invalid_request_error"}})
        raise ErrorReply(protocol.events_reply(payload)) from None
    completion = state.complete(request, prompt_tokens, min(requested, room), "stop")
    # LightLLM compares stop strings token by token and keeps them in the text.
    return completion.cut_at_stop(stops, "stop", anywhere=False)[0]


def _prompt_tokens(state: ServerState, prompt: Any, *, add_bos: bool) -> int:
    """Return the number of tokens of a prompt. Raises ValueError with LightLLM's message if the prompt is invalid."""
    if isinstance(prompt, str):
        max_characters = state.max_model_len * _MAX_CHARACTERS_PER_TOKEN
        if len(prompt) > max_characters:
            raise ValueError(
                f"prompt text length {len(prompt)} exceeds the character limit {max_characters}, "
                "the request is rejected before tokenization."
            )
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


# (name, allowed values, message of `SamplingParams.verify` for other values)
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: 0 < value <= _MAX_BEST_OF, "need 0 < best_of <= 8, but got {}"),
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
            raise _error(message.format(parameters[name]))
    minimum = protocol.integer(parameters.get("min_new_tokens"))
    maximum = protocol.integer(parameters.get("max_new_tokens"))
    if minimum is not None and maximum is not None and minimum > maximum:
        raise _error(f"min_new_tokens must <= max_new_tokens, but got min {minimum}, max {maximum}.")


def _stop_strings(value: Any) -> list[str]:
    """Return the stop strings of a request. Raises ErrorReply if their number exceeds LightLLM's limit."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        return []
    if len(stops) > _MAX_STOPS:
        raise _error("Too many stop sequence groups.")
    return [stop for stop in stops if isinstance(stop, str) and stop]


def error_reply(status: int, message: str) -> Reply:
    """Return an error response in LightLLM's format (`create_error_response` in api_errors.py)."""
    error_types = {404: "NotFoundError", 429: "RateLimitError"}
    error_type = "InternalServerError" if status >= 500 else error_types.get(status, "BadRequestError")
    return protocol.openai_error(message, error_type, status)


def _error(message: str, status: int = 400) -> ErrorReply:
    return ErrorReply(error_reply(status, message))


def _schema_error(body: Mapping[str, Any], name: str) -> ErrorReply:
    """Return FastAPI's validation error for a body that lacks the field `name`."""
    detail = [{"type": "missing", "loc": ["body", name], "msg": "Field required", "input": dict(body)}]
    return ErrorReply(Reply(protocol.dumps({"detail": detail}), 422))


def _identity(state: ServerState, request: CompletionRequest, id_format: str, object_name: str) -> dict[str, Any]:
    """Return the first fields of a response: id, object, created and model.

    `id_format` is the format of the id with a placeholder for its number. As in the real server, successive numbers
    differ by eight (`req_id_generator.py`).
    """
    prefix, dash, number = id_format.format(8 * (request.index + 1)).rpartition("-")
    return {
        "id": f"{prefix}{dash}{state.mark_word}-{number}",
        "object": object_name,
        "created": request.created_s,
        "model": request.body.get("model", state.config.model),
    }


def _server_info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    return protocol.json_reply(
        {
            "run_mode": "normal",
            "host": config.host,
            "port": config.port,
            "model_name": config.model,
            "max_req_total_len": state.max_model_len,
            "running_max_req_size": config.max_concurrent_requests,
            "tp": 1,
            "dp": 1,
            **state.mark,
        }
    )


def _tokens(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    text = fields.get("text")
    if not isinstance(text, str):
        raise _error("error: 'text'", 417)
    parameters = fields.get("parameters") or {}
    add_bos = bool(parameters.get("add_special_tokens", True))
    return protocol.json_reply({"ntokens": add_bos + tokenizer.count(text)})


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the metrics page (LightLLM's server/metrics/metrics.py), without the metrics that are not simulated."""
    page = state.metrics("lightllm_", state.metric_labels) + state.process_metrics() + state.mark_metrics()
    return Reply(page, headers=())


def _bad_json(message: str, position: int) -> Reply:
    return error_reply(400, f"{message}: line 1 column {position + 1} (char {position})")


_LOADS = ("current_load", "logical_max_load", "dynamic_max_load")
_HEALTHY = protocol.json_reply({"message": "Ok"})
_GET_AND_POST_PAGES: dict[str, Page | Reply] = {
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
    generate={
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
        **dict.fromkeys(protocol.NATIVE_ROUTES, native),
    },
    pages={
        **{(method, path): page for path, page in _GET_AND_POST_PAGES.items() for method in ("GET", "POST")},
        ("GET", "/health"): _HEALTHY,
        ("HEAD", "/health"): _HEALTHY,
        ("GET", "/healthz"): _HEALTHY,
        ("GET", "/v1/models"): lambda state, _: state.models("lightllm", max_model_len=state.max_model_len),
        ("GET", "/token_load"): lambda state, _: protocol.json_reply(dict.fromkeys(_LOADS, state.gauges().kv_usage)),
        ("GET", "/metrics"): _metrics,
    },
    read_body=partial(protocol.json_fields, _bad_json),
    too_large=error_reply(400, "body too large"),
    unhealthy=Reply(b'{"message":"Error"}', 503),
    failure=lambda status: error_reply(status, HTTPStatus(status).phrase),
    needs_api_key=lambda _path: False,
    unauthorized=Reply(status=401),
    default_limit=256,
    limit_is_batch_size=True,  # `--running_max_req_size` sets both
    buckets=partial(exponential_buckets, 0.001),
)
