"""LightLLM's side of the wire, as 1.2.0 speaks it (lightllm/server/api_*.py at that tag)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from servers.simulated import lightllm_answers, metrics_pages, tokenizer
from servers.simulated.bodies import chat_text, dumps, integer, mapping, number, ok
from servers.simulated.lightllm_answers import Said
from servers.simulated.wire import EVENT_STREAM_TYPE, Generation, Question, Refused, Reply, Site, Wire, events_reply

_NATIVE_TOKENS = 65_535
_OPENAI_TOKENS = 65_536
"""Output length where nothing is asked (core/objs/sampling_params.py, api_models.py)."""
_TOKEN_CHARACTERS = 8
"""A text with more characters per token of the context is refused unread (httpserver/manager.py, `_encode`)."""


def generate(site: Site, question: Question) -> Generation:
    """POST /generate."""
    return _native(site, question, streamed=False)


def generate_stream(site: Site, question: Question) -> Generation:
    """POST /generate_stream."""
    return _native(site, question, streamed=True)


def compatible(site: Site, question: Question) -> Generation:
    """POST /: the body says whether to stream."""
    return _native(site, question, streamed=bool(question.body.get("stream")))


def chat(site: Site, question: Question) -> Generation:
    """POST /v1/chat/completions."""
    body = question.body
    if not isinstance(body.get("messages"), list):
        raise _schema_error(body, "messages")
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    _check_values(_openai_values(body, asked))
    streamed = bool(body.get("stream"))
    return lightllm_answers.chat(
        _said(site, question, chat_text(body["messages"]), asked, streamed=streamed, add_bos=True)
    )


def completions(site: Site, question: Question) -> Generation:
    """POST /v1/completions. No special tokens are added here."""
    body = question.body
    for name in ("model", "prompt"):
        if name not in body:
            raise _schema_error(body, name)
    for name in ("suffix", "logit_bias"):
        if body.get(name):
            raise _bad(f"The {name} parameter is not currently supported")
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise _bad("The simulated server takes one prompt per request")
        prompt = prompt[0]
    _check_values(_openai_values(body, body.get("max_tokens")))
    streamed = bool(body.get("stream"))
    said = _said(site, question, prompt, body.get("max_tokens"), streamed=streamed, add_bos=False)
    return lightllm_answers.completions(said)


def _native(site: Site, question: Question, *, streamed: bool) -> Generation:
    body = question.body
    for name in ("inputs", "parameters"):
        if name not in body:
            raise Refused(error_reply(417, f"'{name}'"))
    parameters = body["parameters"]
    if not isinstance(parameters, Mapping):
        raise Refused(error_reply(417, "'parameters' must be an object"))
    _check_values(parameters)
    asked, add_bos = parameters.get("max_new_tokens", _NATIVE_TOKENS), bool(parameters.get("add_special_tokens", True))
    return lightllm_answers.native(_said(site, question, body["inputs"], asked, streamed=streamed, add_bos=add_bos))


def longest(site: Site) -> int:
    """Prompt and output together. /v1/models says it as `max_model_len`."""
    return site.config.max_model_len


def _said(site: Site, question: Question, prompt: Any, asked: Any, *, streamed: bool, add_bos: bool) -> Said:
    """Length checks happen when the body is first read: a stream has its 200 by then, and gets an event."""
    try:
        prompt_tokens = _prompt_tokens(site, prompt, add_bos=add_bos)
        wanted = integer(asked) or _OPENAI_TOKENS
        room = longest(site) - prompt_tokens
        if room <= 0:
            raise ValueError(f"the input prompt token len {prompt_tokens} + max_new_tokens {wanted} > {longest(site)}")
    except ValueError as problem:
        if not streamed:
            raise _bad(str(problem)) from None
        raise Refused(_error_event(str(problem))) from None
    wanted = min(wanted, room)
    output = min(wanted, question.stop_after or wanted)
    return Said(site, question, streamed, prompt_tokens, wanted, output, "length" if output == wanted else "stop")


def _prompt_tokens(site: Site, prompt: Any, *, add_bos: bool) -> int:
    """Raises ValueError with LightLLM's words."""
    if isinstance(prompt, str):
        most = longest(site) * _TOKEN_CHARACTERS
        if len(prompt) > most:
            raise ValueError(
                f"prompt text length {len(prompt)} exceeds the character limit {most}, "
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


# Name, what is allowed, and the words of `SamplingParams.verify` for the rest.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
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
        value = number(parameters.get(name))
        if value is not None and not allows(value):
            raise _bad(message.format(parameters[name]))


def _openai_values(body: Mapping[str, Any], asked: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "n")
    values = {name: body[name] for name in (*names, "best_of") if body.get(name) is not None}
    return values if asked is None else values | {"max_new_tokens": asked}


def error_reply(status: int, message: str) -> Reply:
    """`create_error_response` (api_errors.py)."""
    kinds = {404: "NotFoundError", 429: "RateLimitError"}
    kind = "InternalServerError" if status >= 500 else kinds.get(status, "BadRequestError")
    return Reply(dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}), status)


def _bad(message: str) -> Refused:
    return Refused(error_reply(400, message))


def _schema_error(body: Mapping[str, Any], name: str) -> Refused:
    """FastAPI's words for a body that does not fit the schema."""
    detail = [{"type": "missing", "loc": ["body", name], "msg": "Field required", "input": dict(body)}]
    return Refused(Reply(dumps({"detail": detail}), 422))


def _error_event(message: str) -> Reply:
    """A refusal after status 200: one event, and no end marker (`_safe_stream_wrapper`)."""
    return events_reply(dumps({"error": {"message": message, "type": "invalid_request_error"}}))


def _page(value: Mapping[str, Any]) -> Any:
    return lambda _site, _body: ok(value)


def _model_name(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return ok({"model_name": site.config.model})


def _server_info(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    config = site.config
    limit = config.max_concurrent_requests or WIRE.default_limit
    names = {"run_mode": "normal", "host": config.host, "port": config.port, "model_name": config.model}
    return ok(names | {"max_req_total_len": longest(site), "running_max_req_size": limit, "tp": 1, "dp": 1})


def _models(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    card = {"id": site.config.model, "object": "model", "created": site.started_s, "owned_by": "lightllm"}
    return ok({"object": "list", "data": [card | {"max_model_len": longest(site)}]})


def _tokens(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    asked = mapping(body)
    if not isinstance(asked.get("text"), str):
        raise Refused(error_reply(417, "error: 'text'"))
    parameters = asked.get("parameters") or {}
    return ok({"ntokens": bool(parameters.get("add_special_tokens", True)) + tokenizer.count(asked["text"])})


def _token_load(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    load = site.gauges().kv_usage
    return ok({"current_load": load, "logical_max_load": load, "dynamic_max_load": load})


def _metrics(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return Reply(metrics_pages.lightllm(site).encode(), headers=())


_STATUS_OK = _page({"status": "ok"})
_HEALTHY = _page({"message": "Ok"})

WIRE = Wire(
    before="",
    after="date: {date}\r\nserver: hypercorn-h11\r\n",
    stream_headers=EVENT_STREAM_TYPE,
    keep_alive_s=10,
    body_limit=64 << 20,
    generate={
        "/": compatible,
        "/generate": generate,
        "/generate_stream": generate_stream,
        "/v1/chat/completions": chat,
        "/v1/completions": completions,
    },
    pages={
        ("GET", "/health"): _HEALTHY,
        ("HEAD", "/health"): _HEALTHY,
        ("GET", "/healthz"): _HEALTHY,
        ("GET", "/liveness"): _STATUS_OK,
        ("POST", "/liveness"): _STATUS_OK,
        ("GET", "/readiness"): _STATUS_OK,
        ("POST", "/readiness"): _STATUS_OK,
        ("GET", "/get_model_name"): _model_name,
        ("POST", "/get_model_name"): _model_name,
        ("GET", "/get_server_info"): _server_info,
        ("POST", "/get_server_info"): _server_info,
        ("GET", "/v1/models"): _models,
        ("GET", "/tokens"): _tokens,
        ("POST", "/tokens"): _tokens,
        ("GET", "/token_load"): _token_load,
        ("GET", "/metrics"): _metrics,
    },
    bad_type=None,
    bad_json=lambda message, position: error_reply(400, f"{message}: line 1 column {position + 1} (char {position})"),
    too_large=error_reply(400, "body too large"),
    not_found=Reply(b'{"detail":"Not Found"}', 404),
    not_allowed=lambda methods: Reply(
        b'{"detail":"Method Not Allowed"}', 405, (("allow", methods), ("content-type", "application/json"))
    ),
    failure=lambda status: error_reply(status, HTTPStatus(status).phrase),
    overloaded=None,
    guarded=lambda _path: False,
    unauthorized=Reply(status=401),
    default_limit=256,
)
