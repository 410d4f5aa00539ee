"""vLLM's side of the wire, as 0.32.0 speaks it (tests/contract has recordings of the real one)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servers.simulated import metrics_pages, tokenizer
from servers.simulated.bodies import chat_text, integer, mapping, number, ok
from servers.simulated.vllm_answers import error_body, generation
from servers.simulated.wire import EVENT_STREAM_TYPE, Generation, Question, Refused, Reply, Site, Wire, events_reply

VERSION = "0.32.0"
_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where nothing is asked (entrypoints/openai/completion/protocol.py)."""
_TOKEN_CHARACTERS = 9
"""A text with more than so many characters per token of the context is refused unread (err_toolong_text)."""


def completions(site: Site, question: Question) -> Generation:
    """POST /v1/completions."""
    body = question.body
    _check(site, body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not prompt:
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
    ids = _prompt_ids(site, prompt, add_bos=body.get("add_special_tokens", True))
    asked = _asked(site, body.get("max_tokens"), _COMPLETION_TOKENS, len(ids))
    return generation(site, question, ids, asked, chat=False)


def chat(site: Site, question: Question) -> Generation:
    """POST /v1/chat/completions."""
    body = question.body
    if "messages" not in body:
        raise _invalid("body.messages", {"type": "missing", "msg": "Field required", "input": _dict_of(body)})
    _check(site, body)
    ids = _prompt_ids(site, chat_text(body["messages"]), add_bos=True)
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    asked = _asked(site, asked, site.config.max_model_len - len(ids), len(ids))
    return generation(site, question, ids, asked, chat=True)


def _check(site: Site, body: Mapping[str, Any]) -> None:
    """What vLLM refuses, in its words and its order: types, the model, values."""
    for name in ("max_tokens", "max_completion_tokens", "n", "logprobs"):
        if name == "logprobs" and isinstance(body.get(name), bool):
            continue
        if integer(body.get(name)) is None and body.get(name) is not None:
            why = "Input should be a valid integer, unable to parse string as an integer"
            raise _invalid(f"body.{name}", {"type": "int_parsing", "msg": why, "input": body[name]})
    if not isinstance(body.get("stream_options") or {}, Mapping):
        why = "Input should be a valid dictionary or instance of StreamOptions"
        raise _invalid("body.stream_options", {"type": "model_attributes_type", "msg": why})
    if body.get("model") not in (None, site.config.model):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {site.config.model}."
        raise Refused(Reply(error_body(message, "NotFoundError", 404, "model"), 404))
    if body.get("stream_options") and not body.get("stream"):
        raise _bad(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
        )
    temperature = number(body.get("temperature"))
    if temperature is not None and temperature < 0:
        raise _bad_value("temperature", f"temperature must be non-negative, got {temperature}.", temperature)
    logprobs = integer(body.get("logprobs"))
    if logprobs is not None and logprobs > 20:
        raise _bad_value(
            "logprobs", f"Requested sample logprobs of {logprobs}, which is greater than max allowed: 20", logprobs
        )
    if (integer(body.get("n")) or 1) != 1:
        raise _bad_value("n", "The simulated server gives one answer per request.", body["n"])


def _asked(site: Site, asked: Any, default: int, prompt_tokens: int) -> int:
    """The limit on new tokens, clamped to what the context has left (`get_max_tokens`)."""
    longest = site.config.max_model_len
    wanted = integer(asked)
    wanted = default if wanted is None else wanted
    if wanted < 1:
        raise _bad_value("max_tokens", f"max_tokens must be at least 1, got {wanted}.", wanted)
    if wanted > longest:
        raise _bad_value("max_tokens", f"max_tokens={wanted} cannot be greater than max_model_len={longest}.", wanted)
    return min(wanted, longest - prompt_tokens)


def _prompt_ids(site: Site, prompt: Any, *, add_bos: bool) -> Sequence[int]:
    longest = site.config.max_model_len
    limit = f"This model's maximum context length is {longest} tokens. However, your prompt contains "
    ending = "Please reduce the length of the input prompt."
    if isinstance(prompt, str):
        most = _TOKEN_CHARACTERS * longest
        if len(prompt) > most:
            bound = f"(more than {most} characters, which is the upper bound for {longest} input tokens)"
            raise _bad_value("input_text", f"{limit}{len(prompt)} characters {bound}. {ending}", len(prompt))
        ids: Sequence[int] = [tokenizer.BOS_ID] * bool(add_bos) + tokenizer.encode(prompt)
    else:
        ids = _checked_ids(prompt)
    if len(ids) >= longest:
        why = "which exceeds this limit even without any output tokens."
        raise _bad_value("input_tokens", f"{limit}{len(ids)} input tokens, {why} {ending}", len(ids))
    return ids


def _checked_ids(prompt: Any) -> Sequence[int]:
    """Token ids as they are: [int], or [[int]] with one prompt."""
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        outside = next((token for token in prompt if not 0 <= token < tokenizer.VOCABULARY_SIZE), None)
        if outside is not None:
            raise _bad(f"Token id {outside} is out of vocabulary", None)
        return prompt
    raise _bad("The simulated server takes one prompt per request. (parameter=prompt)", "prompt")


def _bad(message: str, parameter: str | None) -> Refused:
    return Refused(Reply(error_body(message, "BadRequestError", 400, parameter), 400))


def _bad_value(parameter: str, message: str, value: Any) -> Refused:
    return _bad(f"{message} (parameter={parameter}, value={value})", parameter)


def _invalid(where: str, problem: dict[str, Any]) -> Refused:
    """What pydantic says about a body that does not fit the schema."""
    kind = problem.pop("type")
    shown = {"type": kind, "loc": where} | problem
    message = f"1 validation error:\n  {shown}"
    return Refused(Reply(error_body(message, "Bad Request", 400, where), 400))


def _bad_json(message: str, position: int) -> Reply:
    problem = {"type": "json_invalid", "msg": "JSON decode error", "input": _dict_of({}), "ctx": {"error": message}}
    return _invalid(f"body.{position}", problem).reply


def _dict_of(body: Mapping[str, Any]) -> str:
    return f"<dict of {len(body)} items>"


def _empty(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return Reply(headers=(("content-length", "0"),))


def _version(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return ok({"version": VERSION})


def _load(site: Site, body: bytes) -> Reply:  # noqa: ARG001 - counts only with --enable-server-load-tracking
    return ok({"server_load": 0})


def _models(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    allowed = ("sampling", "logprobs", "view")
    permission = {"id": f"modelperm-{site.started_s:016x}", "object": "model_permission", "created": site.started_s}
    for right in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning"):
        permission[f"allow_{right}"] = right in allowed
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    model = site.config.model
    card = {
        "id": model,
        "object": "model",
        "created": site.started_s,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
    }
    card |= {"max_model_len": site.config.max_model_len, "permission": [permission]}
    return ok({"object": "list", "data": [card]})


def _tokenize(site: Site, body: bytes) -> Reply:
    asked = mapping(body)
    is_chat = "messages" in asked
    text = chat_text(asked["messages"]) if is_chat else asked.get("prompt")
    if not isinstance(text, str):
        raise _invalid("body.prompt", {"type": "missing", "msg": "Field required", "input": _dict_of(asked)})
    add_bos = is_chat or asked.get("add_special_tokens", True)
    ids = [tokenizer.BOS_ID] * bool(add_bos) + tokenizer.encode(text)
    strings = [tokenizer.decode([token]) for token in ids] if asked.get("return_token_strs") else None
    limit = site.config.max_model_len
    return ok({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


def _detokenize(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return ok({"prompt": tokenizer.decode(_checked_ids(mapping(body).get("tokens")))})


def _metrics(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    kind = "text/plain; version=1.0.0; charset=utf-8"
    return Reply(metrics_pages.vllm(site).encode(), headers=(("content-type", kind),))


def _failure(status: int) -> Reply:
    """503 and 429 in the words of the queue limits (v1/engine/async_llm.py); vLLM itself has no 429."""
    if status == 500:
        return Reply(error_body("Internal server error", "InternalServerError", 500), 500)
    kind = "ServiceUnavailableError" if status == 503 else "RateLimitError"
    return Reply(error_body("The server is overloaded, please try again later.", kind, status), status)


def _overloaded(refused: Generation) -> Reply:
    """Past max_num_queued_reqs. A streamed request has its 200 by then, so the refusal is an event."""
    reply = _failure(503)
    return events_reply(reply.body, b"[DONE]") if refused.streamed else reply


WIRE = Wire(
    before="date: {date}\r\nserver: uvicorn\r\n",
    after="vary: Origin\r\n",
    stream_headers=EVENT_STREAM_TYPE,
    keep_alive_s=5,
    body_limit=64 << 20,
    generate={"/v1/completions": completions, "/v1/chat/completions": chat},
    pages={
        ("GET", "/health"): _empty,
        ("GET", "/ping"): _empty,
        ("POST", "/ping"): _empty,
        ("GET", "/version"): _version,
        ("GET", "/load"): _load,
        ("GET", "/v1/models"): _models,
        ("GET", "/metrics"): _metrics,
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/detokenize"): _detokenize,
    },
    bad_type=Reply(
        error_body(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request", 400
        ),
        400,
    ),
    bad_json=_bad_json,
    too_large=_failure(500),
    not_found=Reply(b'{"detail":"Not Found"}', 404),
    not_allowed=lambda methods: Reply(
        b'{"detail":"Method Not Allowed"}', 405, (("allow", methods), ("content-type", "application/json"))
    ),
    failure=_failure,
    overloaded=_overloaded,
    guarded=lambda path: path.startswith(("/v1", "/v2", "/inference")),
    unauthorized=Reply(b'{"error":"Unauthorized"}', 401),
    default_limit=None,
)
