"""A simulated vLLM, as 0.32.0 speaks (tests/contract has recordings of the real one) and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from servers.simulated import pooling, protocol, tokenizer
from servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from servers.simulated.state import SECONDS, TOKENS, Figure, ServerProtocol, ServerState
from servers.simulated.timing import Policy

VERSION, FINGERPRINT = "0.32.0", "vllm-0.32.0-4465e90d"
# `max_tokens` of /v1/completions where nothing is asked (entrypoints/openai/completion/protocol.py).
_COMPLETION_TOKENS = 16
# A text with more than so many characters per token of the context is refused unread (err_toolong_text).
_TOKEN_CHARACTERS = 9


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/completions."""
    body = request.body
    _check(state, body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if not prompt:
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    ids = _prompt_ids(state, prompt, add_bos=body.get("add_special_tokens", True))
    asked = _asked(state, body.get("max_tokens"), _COMPLETION_TOKENS, len(ids))
    return _encoding(state, request, ids, asked, chat=False)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/chat/completions."""
    body = request.body
    if "messages" not in body:
        raise _missing("body.messages", body)
    _check(state, body)
    ids = _prompt_ids(state, tokenizer.chat_text(body["messages"]), add_bos=True)
    asked = body.get("max_completion_tokens") or body.get("max_tokens")
    asked = _asked(state, asked, state.longest - len(ids), len(ids))
    return _encoding(state, request, ids, asked, chat=True)


def _check(state: ServerState, body: Mapping[str, Any]) -> None:
    """What vLLM refuses, in its words and its order: types, the model, values."""
    for name in ("max_tokens", "max_completion_tokens", "n", "logprobs"):
        value = body.get(name)
        if (
            protocol.integer(value) is None
            and value is not None
            and not (name == "logprobs" and isinstance(value, bool))
        ):
            why = "Input should be a valid integer, unable to parse string as an integer"
            raise _invalid(f"body.{name}", "int_parsing", why, input=value)
    if not isinstance(body.get("stream_options") or {}, Mapping):
        why = "Input should be a valid dictionary or instance of StreamOptions"
        raise _invalid("body.stream_options", "model_attributes_type", why)
    if body.get("model") not in (None, state.config.model):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {state.config.model}."
        raise ErrorReply(protocol.openai_error(message, "NotFoundError", 404, "model"))
    if body.get("stream_options") and not body.get("stream"):
        why = "Stream options can only be defined when `stream=True`."
        raise _bad(why, "stream_options")
    if (temperature := protocol.number(body.get("temperature")) or 0) < 0:
        raise _bad(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if (logprobs := protocol.integer(body.get("logprobs")) or 0) > 20:
        why = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: 20"
        raise _bad(why, "logprobs", logprobs)
    if (protocol.integer(body.get("n")) or 1) != 1:
        raise _bad("The simulated server gives one answer per request.", "n", body["n"])


def _asked(state: ServerState, asked: Any, default: int, prompt_tokens: int) -> int:
    """The limit on new tokens, clamped to what the context has left (`get_max_tokens`)."""
    longest = state.longest
    wanted = default if (given := protocol.integer(asked)) is None else given
    if wanted < 1:
        raise _bad(f"max_tokens must be at least 1, got {wanted}.", "max_tokens", wanted)
    if wanted > longest:
        raise _bad(f"max_tokens={wanted} cannot be greater than max_model_len={longest}.", "max_tokens", wanted)
    return min(wanted, longest - prompt_tokens)


def _prompt_ids(state: ServerState, prompt: Any, *, add_bos: bool) -> Sequence[int]:
    longest = state.longest
    limit = f"This model's maximum context length is {longest} tokens. However, your prompt contains "
    ending = "Please reduce the length of the input prompt."
    if isinstance(prompt, str):
        most = _TOKEN_CHARACTERS * longest
        if len(prompt) > most:
            bound = f"(more than {most} characters, which is the upper bound for {longest} input tokens)"
            raise _bad(f"{limit}{len(prompt)} characters {bound}. {ending}", "input_text", len(prompt))
        ids: Sequence[int] = [tokenizer.BOS_ID] * bool(add_bos) + tokenizer.encode(prompt)
    else:
        ids = _checked_ids(prompt)
    if len(ids) >= longest:
        why = "which exceeds this limit even without any output tokens."
        raise _bad(f"{limit}{len(ids)} input tokens, {why} {ending}", "input_tokens", len(ids))
    return ids


def _checked_ids(prompt: Any) -> Sequence[int]:
    """Token ids as they are: [int], or [[int]] with one prompt."""
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        outside = next((token for token in prompt if not 0 <= token < tokenizer.VOCABULARY_SIZE), None)
        if outside is not None:
            raise _bad(f"Token id {outside} is out of vocabulary")
        return prompt
    raise _bad("The simulated server takes one prompt per request.", "prompt")


def _pooled_tokens(state: ServerState, body: Mapping[str, Any], prompt: Any) -> int:
    _check(state, body)
    return len(_prompt_ids(state, prompt, add_bos=True))


def _encoding(state: ServerState, request: CompletionRequest, ids: Sequence[int], asked: int, chat: bool) -> Encoding:
    """The answer to a prompt of `ids`, of `asked` tokens unless the model stops before."""
    body = request.body
    completion = state.complete(request, len(ids), asked, "stop")
    options = body.get("stream_options") or {}
    include_usage = bool(options.get("include_usage"))
    continuous = include_usage and bool(options.get("continuous_usage_stats"))
    returned = list(ids) if body.get("return_token_ids") else None
    name, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    number = f"{name}-{state.started_s:08x}{request.index:08x}"
    identity = {"id": number, "object": kind, "created": request.created_s, "model": state.config.model}
    stream = b"data: " + protocol.dumps(identity | {"object": "chat.completion.chunk"} if chat else identity)[:-1]
    fingerprint = b',"system_fingerprint":"%b"' % FINGERPRINT.encode()
    usage = _usage(len(ids), completion.output_tokens)
    opening: tuple[bytes, ...] = ()
    if chat:
        counted = b',"usage":' + _usage(len(ids), 0) if continuous else b""
        role = stream + b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        given = protocol.dumps(returned)
        role += b'"finish_reason":null}]%b,"prompt_token_ids":%b,"prompt_text":null}\n\n' % (counted, given)
        opening = (role,)
    end = b"" if include_usage else fingerprint
    counts = b'%b,"choices":[],"usage":%b%b}\n\n' % (stream, usage, fingerprint)
    closing = (counts, protocol.DONE) if include_usage else (protocol.DONE,)
    encode = _event_encoder(completion, stream, returned, end, continuous, chat=chat)
    failure = (protocol.event(_failure(500).body), protocol.DONE)
    answer = partial(_answer, completion, identity, returned, chat)
    return Encoding(completion, encode, answer, failure, merges=True, opening=opening, closing=closing)


def _event_encoder(
    completion: Completion, stream: bytes, returned: list[int] | None, end: bytes, continuous: bool, *, chat: bool
) -> protocol.EventEncoder:
    """Events, joined from pieces that are encoded once per request. `end`: what only the last has; with `continuous`
    every one carries usage."""
    ids, texts, prompt_tokens = completion.ids, completion.texts, completion.prompt_tokens
    head = stream + b',"choices":[{"index":0,%b' % (b'"delta":{"content":"' if chat else b'"text":"')
    given = protocol.dumps(returned)
    prompt_ids = b"" if chat else b'"prompt_token_ids":%b,'
    inner = b'"%b,"logprobs":null,"finish_reason":null,%b' % (b"}" * chat, b"" if chat else b'"stop_reason":null,')
    reason = completion.finish_reason.encode()
    final = b'"%b,"logprobs":null,"finish_reason":"%b","stop_reason":null,' % (b"}" * chat, reason)

    def encode(first: int, tokens: int, last: bool) -> bytes:
        text = texts[first] if tokens == 1 else b"".join(texts[first : first + tokens])
        shown = b"null" if returned is None else protocol.dumps(ids[first : first + tokens])
        before = prompt_ids and prompt_ids % (b"null" if first else given)
        counted = b',"usage":' + _usage(prompt_tokens, first + tokens) if continuous else b""
        pieces = (head, text, final if last else inner, before, b'"token_ids":', shown, b"}]", counted)
        return b"".join((*pieces, end if last else b"", b"}\n\n"))

    return encode


def _answer(
    completion: Completion, identity: dict[str, Any], returned: list[int] | None, chat: bool, _: float
) -> Reply:
    prompt: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": returned}
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    message = {"role": "assistant", "content": completion.text, **nothing}
    choice: dict[str, Any] = {"index": 0, **({"message": message} if chat else {"text": completion.text})}
    choice |= {"logprobs": None, "finish_reason": completion.finish_reason, "stop_reason": None}
    choice |= {"token_ids": None if returned is None else completion.ids}
    choice |= {} if chat else prompt
    details = b',"prompt_tokens_details":null,"completion_tokens_details":null}'
    usage = msgspec.Raw(_usage(completion.prompt_tokens, completion.output_tokens)[:-1] + details)
    rest: dict[str, Any] = {"service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage}
    rest |= {**prompt, "prompt_text": None} if chat else {}
    rest |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
    return protocol.ok({**identity, "choices": [choice | {"routed_experts": None}], **rest})


def _usage(prompt: int, output: int) -> bytes:
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (prompt, prompt + output, output)


def _bad(message: str, parameter: str | None = None, value: Any = None) -> ErrorReply:
    """The parameter stands behind the message, and the value where that is at fault."""
    shown = f"parameter={parameter}" if value is None else f"parameter={parameter}, value={value}"
    said = f"{message} ({shown})" if parameter else message
    return ErrorReply(protocol.openai_error(said, "BadRequestError", 400, parameter))


def _invalid(where: str, kind: str, message: str, **more: Any) -> ErrorReply:
    """What pydantic says about a body that does not fit the schema."""
    shown = {"type": kind, "loc": where, "msg": message, **more}
    return ErrorReply(protocol.openai_error(f"1 validation error:\n  {shown}", "Bad Request", 400, where))


def _missing(where: str, body: Mapping[str, Any]) -> ErrorReply:
    return _invalid(where, "missing", "Field required", input=f"<dict of {len(body)} items>")


def _bad_json(message: str, position: int) -> Reply:
    more = {"input": "<dict of 0 items>", "ctx": {"error": message}}
    return _invalid(f"body.{position}", "json_invalid", "JSON decode error", **more).reply


def _models(state: ServerState, _: Mapping[str, Any]) -> Reply:
    allowed = ("sampling", "logprobs", "view")
    permission = {"id": f"modelperm-{state.started_s:016x}", "object": "model_permission", "created": state.started_s}
    for right in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning"):
        permission[f"allow_{right}"] = right in allowed
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    rest = {"parent": None, "max_model_len": state.longest, "permission": [permission]}
    return state.models("vllm", root=state.config.model, **rest)


def _tokenize(state: ServerState, fields: Mapping[str, Any]) -> Reply:
    is_chat = "messages" in fields
    text = tokenizer.chat_text(fields["messages"]) if is_chat else fields.get("prompt")
    if not isinstance(text, str):
        raise _missing("body.prompt", fields)
    ids = [tokenizer.BOS_ID] * bool(is_chat or fields.get("add_special_tokens", True)) + tokenizer.encode(text)
    strings = [tokenizer.decode([token]) for token in ids] if fields.get("return_token_strs") else None
    return protocol.ok({"count": len(ids), "max_model_len": state.longest, "tokens": ids, "token_strs": strings})


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Names without `_total` in vLLM's code get it at export. Numbers that it has and we do not are left out."""
    begun = sum(stream.completion.prompt_tokens for stream in state.streams if stream.count)
    overloaded = state.refused["overloaded"]
    reasons = ("stop", "length", "abort", "error", "repetition")
    figures: dict[str, Figure] = {
        "generated": state.output_tokens + sum(stream.count for stream in state.streams),
        "prefilled": state.prompt_tokens + begun,
        "waiting_by_reason": {("reason", "capacity"): state.gauges().waiting, ("reason", "deferred"): 0},
        "ended_by_reason": {("finished_reason", reason): state.by_reason[reason] for reason in reasons},
        "rejected_by_reason": {("reason", "max_num_queued_reqs"): overloaded, ("reason", "max_num_queued_tokens"): 0},
    }
    page = state.metrics("vllm:", {"engine": "0", **state.served}, slice(-1), **figures)
    page += state.metrics("vllm:", state.served, slice(-1, None), **figures)  # its front end rejects, not an engine
    return Reply(page, headers=(("content-type", "text/plain; version=1.0.0; charset=utf-8"),))


def _buckets(longest: int) -> dict[str, Sequence[float]]:
    """v1/metrics/loggers.py and buckets.py: lengths go 1, 2, 5, 10, 20, 50, ... up to the model's."""
    latency = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
    ttft = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
    itl = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
    lengths = [float(digit * 10**power) for power in range(9) for digit in (1, 2, 5) if digit * 10**power <= longest]
    seconds = dict.fromkeys(SECONDS, latency) | {"ttft_s": (*ttft, 2560), "itl_s": itl, "tpot_s": itl}
    return {**seconds, **dict.fromkeys(TOKENS, lengths)}


def _failure(status: int) -> Reply:
    """503 and 429 in the words of the queue limits (v1/engine/async_llm.py); vLLM itself has no 429."""
    if status == 500:
        return protocol.openai_error("Internal server error", "InternalServerError", 500)
    kind = "ServiceUnavailableError" if status == 503 else "RateLimitError"
    return protocol.openai_error("The server is overloaded, please try again later.", kind, status)


def _overloaded(refused: Encoding) -> Reply:
    """Past max_num_queued_reqs. A streamed request has its 200 by then, so the refusal is an event."""
    reply = _failure(503)
    return protocol.events_reply(reply.body, b"[DONE]") if refused.completion.streamed else reply


_NOT_JSON = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
_EMPTY = Reply(headers=())

PROTOCOL = ServerProtocol(
    before="date: {date}\r\nserver: uvicorn\r\n",
    after="vary: Origin\r\n",
    keep_alive_s=5,
    body_limit=64 << 20,
    generate={
        "/v1/completions": completions,
        "/v1/chat/completions": chat,
        "/v1/embeddings": partial(pooling.embeddings, _pooled_tokens),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), partial(pooling.rerank, _pooled_tokens)),
    },
    pages={
        ("GET", "/health"): _EMPTY,
        ("GET", "/ping"): _EMPTY,
        ("POST", "/ping"): _EMPTY,
        ("GET", "/version"): protocol.ok({"version": VERSION}),
        ("GET", "/load"): protocol.ok({"server_load": 0}),  # counts only with --enable-server-load-tracking
        ("GET", "/v1/models"): _models,
        ("GET", "/metrics"): _metrics,
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/detokenize"): lambda _, sent: protocol.ok(
            {"prompt": tokenizer.decode(_checked_ids(sent.get("tokens")))}
        ),
    },
    bad_type=protocol.openai_error(_NOT_JSON, "Bad Request", 400),
    bad_json=_bad_json,
    too_large=_failure(500),
    failure=_failure,
    overloaded=_overloaded,
    guarded=lambda path: path.startswith(("/v1", "/v2", "/inference")),
    unauthorized=Reply(b'{"error":"Unauthorized"}', 401),
    default_limit=None,
    # Limits of a card with 70 GiB or more that is not an A100: `get_batch_defaults` in vllm/engine/arg_utils.py.
    # Running before waiting, preemption of the newest, no admission in a step that preempted, the whole known sequence
    # must fit: vllm/v1/core/sched/scheduler.py (`schedule`, `_preempt_request`, `scheduler_reserve_full_isl`).
    # Memory fraction of 0.33 and the block of 16: vllm/config/cache.py.
    policy=Policy(running_limit=1024, step_tokens=8192, prefill="mixed", block_tokens=16, memory_fraction=0.92),
    buckets=_buckets,
)
