"""A simulated TGI, as 3.3.7 speaks (router/src/server.rs and validation.rs at that tag) and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil, log
from random import Random
from typing import Any

from servers.simulated import protocol, tokenizer
from servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from servers.simulated.state import ServerProtocol, ServerState, steps_of_half

VERSION, DOCKER_LABEL = "3.3.6-dev0", "sha-dfb3fbe"  # what the tag v3.3.7 calls itself
_MOST_STOPS = _MOST_PROMPTS = 4
_MOST_BEST_OF, _MOST_TOP = 2, 5
_STREAM_TYPE: protocol.Headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
_OVERLOADED = ("Model is overloaded", "overloaded")
_FAILED = ("Request failed during generation: Server error: simulated failure", "generation")
_OPENAI_REASONS = {"eos_token": "stop", "length": "length", "stop_sequence": "stop_sequence"}
Whole = Callable[[], Any]
_EOS_TEXT = tokenizer.EOS_TEXT.encode()


def native(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST on NATIVE; on / a whole answer is a list of one."""
    body = request.body
    if not isinstance(body.get("inputs"), str):
        raise _untyped("missing field `inputs`" if "inputs" not in body else "inputs: invalid type, expected a string")
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise _untyped("parameters: invalid type, expected struct GenerateParameters")
    if request.streamed and parameters.get("decoder_input_details"):
        raise _refusal(request, "`decoder_input_details` == true is not supported when streaming tokens")
    prompt = body["inputs"]
    completion = _completion(state, request, prompt, parameters)
    full = f"{prompt}{completion.text}" if parameters.get("return_full_text") else completion.text
    seed = parameters.get("seed") if parameters.get("do_sample") else None
    details = {"finish_reason": completion.finish_reason, "generated_tokens": completion.output_tokens, "seed": seed}
    shown = {**details, "input_length": completion.prompt_tokens} if parameters.get("details") else None
    final = protocol.dumps({"generated_text": full, "details": shown})[1:] + b"\n\n"
    ids, texts = completion.ids, completion.texts

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        token = ids[first]
        special = b"true" if token == tokenizer.EOS_ID else b"false"
        begin = b'data: {"index":%d,"token":{"id":%d,"text":"%b","logprob":-1.5,"special":%b},'
        end = final if last else b'"generated_text":null,"details":null}\n\n'
        return begin % (first + 1, token, texts[first], special) + end

    def whole() -> Any:
        answer: dict[str, Any] = {"generated_text": full}
        if parameters.get("details") or parameters.get("decoder_input_details"):
            tokens = [
                {"id": token, "text": text.decode(), "logprob": -1.5, "special": token == tokenizer.EOS_ID}
                for token, text in zip(ids, texts, strict=True)
            ]
            answer["details"] = {**details, "prefill": [], "tokens": tokens}
        return [answer] if request.path == "/" else answer

    return _encoding(completion, prompt, encode, whole)


def chat(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/chat/completions. Every chunk has role and content, so there is no chunk with the role alone."""
    body = request.body
    if not isinstance(body.get("messages"), list):
        raise _untyped("missing field `messages`")
    if not isinstance(body.get("stream_options", {}), Mapping):  # null is refused too, since v3.2.0
        raise _untyped("stream_options: invalid type, expected struct StreamOptions")
    prompt = tokenizer.chat_text(body["messages"])
    completion = _openai(state, request, prompt, body.get("max_tokens", body.get("max_completion_tokens")))
    identity, ended = _identity(state, request, "chat.completion.chunk"), _OPENAI_REASONS[completion.finish_reason]

    def said(text: str, reason: str | None, key: str) -> dict[str, Any]:
        message = {key: {"role": "assistant", "content": text}}
        return {"choices": [{"index": 0, **message, "logprobs": None, "finish_reason": reason}]}

    def chunk(text: str, reason: str | None) -> dict[str, Any]:
        return {**identity, **said(text, reason, "delta"), "usage": None}

    def whole() -> dict[str, Any]:
        shown = said(completion.text, ended, "message")
        return {**identity, "object": "chat.completion", **shown, "usage": completion.usage}

    usage = protocol.json_event({**identity, "choices": [], "usage": completion.usage})
    closing = (usage, protocol.DONE) if body.get("stream_options", {}).get("include_usage") else (protocol.DONE,)
    texts = [b"" if text == _EOS_TEXT else text for text in completion.texts]
    encode = protocol.text_events(texts, chunk(protocol.TEXT, None), chunk(protocol.TEXT, ended))
    role_only = (protocol.json_event(chunk("", None)),)
    return replace(_encoding(completion, prompt, encode, whole, closing), role_only=role_only)


def completions(state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/completions. The chunk with the last token always has usage, and only that one."""
    body = request.body
    if body.get("suffix") is not None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise ErrorReply(flat_error(message, "suffix not supported", 422))
    prompt = body.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise _untyped("prompt: data did not match any variant of untagged enum PromptInput")
    if len(prompts) > 1:
        most = 1 if len(prompts) <= _MOST_PROMPTS else _MOST_PROMPTS  # one is our limit, not TGI's
        message = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise ErrorReply(flat_error(message, "batch size exceeded", 422))
    completion = _openai(state, request, prompts[0], body.get("max_tokens"))
    identity, ended = _identity(state, request, "text_completion"), _OPENAI_REASONS[completion.finish_reason]

    def choices(text: str, reason: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}

    def whole() -> dict[str, Any]:
        return identity | choices(completion.text, ended) | {"usage": completion.usage}

    inner = {name: identity[name] for name in ("object", "id", "created")} | choices(protocol.TEXT, "") | identity
    final = identity | choices(protocol.TEXT, completion.finish_reason) | {"usage": completion.usage}
    encode = protocol.text_events(completion.texts, inner, final)
    return _encoding(completion, prompts[0], encode, whole, (protocol.DONE,))


def _completion(state: ServerState, request: CompletionRequest, text: str, values: Mapping[str, Any]) -> Completion:
    """Checks what validation.rs checks, in its order, and settles the output's length."""
    refuse = partial(_refusal, request)
    _check_values(values, refuse, state.longest, streamed=request.streamed)
    if not text:
        raise refuse("`inputs` cannot be empty")
    prompt_tokens = 1 + tokenizer.count(text)  # the server puts one before every text
    if truncate := values.get("truncate"):
        prompt_tokens = min(prompt_tokens, ceil(truncate))
    longest = state.longest
    asked = values.get("max_new_tokens")
    asked = max(0, longest - prompt_tokens) if asked is None else ceil(asked)
    # Only the first 1024 of a long output count here: the rest is queued again, `DEFAULT_GENERATION_LENGTH`.
    first = min(asked, 1024)
    if prompt_tokens + first > longest:
        limit = f"`inputs` tokens + `max_new_tokens` must be <= {longest}."
        raise refuse(f"{limit} Given: {prompt_tokens} `inputs` tokens and {first} `max_new_tokens`")
    if prompt_tokens > longest - 1:
        raise refuse(f"`inputs` must have less than {longest - 1} tokens. Given: {prompt_tokens}")
    asked = min(asked, longest - prompt_tokens)
    if (mean := state.config.eos_mean_tokens) is not None:
        # Where the model ends by itself: geometric, as if each token were the last with the same probability.
        uniform = Random(f"eos/{state.config.seed}/{request.index}").random()  # noqa: S311 - not secret
        ends = 1 if mean <= 1 else 1 + int(log(1 - uniform) / log(1 - 1 / mean))
        request = replace(request, stop_after=min(ends, request.stop_after or ends))
    said = state.complete(request, prompt_tokens, asked, "eos_token")
    if said.finish_reason != "length":
        said = replace(said, ids=[*said.ids[:-1], tokenizer.EOS_ID], texts=[*said.texts[:-1], _EOS_TEXT])
    stops = [stop for stop in values.get("stop") or [] if stop]
    return said.stopped(stops, "stop_sequence", anywhere=False)[0]  # it stays in the text (tokens.py)


# Name, what is allowed, and validation.rs's words for the rest.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: value == 1, "`best_of` != 1 is not supported by the simulated server"),
    ("temperature", lambda value: value > 0, "`temperature` must be strictly positive"),
    ("repetition_penalty", lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", lambda value: 0 < value < 1, "`top_p` must be > 0.0 and < 1.0"),
    ("typical_p", lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
    ("top_k", lambda value: value > 0, "`top_k` must be strictly positive"),
    ("max_new_tokens", lambda value: value > 0, "`max_new_tokens` must be strictly positive"),
    ("truncate", lambda _: True, ""),  # its type; what it may be depends on the limit
)


def _check_values(
    parameters: Mapping[str, Any], refuse: Callable[[str], ErrorReply], longest: int, *, streamed: bool
) -> None:
    best_of = protocol.number(parameters.get("best_of"))
    if best_of is not None and not 0 < best_of <= _MOST_BEST_OF:
        raise refuse(f"`best_of` must be > 0 and <= {_MOST_BEST_OF}. Given: {ceil(best_of)}")
    if best_of == 2 and streamed:
        raise refuse("`best_of` != 1 is not supported when streaming tokens")
    truncate = protocol.number(parameters.get("truncate"))
    if truncate is not None and not 0 < truncate < longest:
        limit = f"`truncate` must be strictly positive and less than {longest - 1}."
        raise refuse(f"{limit} Given: {ceil(truncate)}")
    for name, allows, message in _RULES:
        value = protocol.number(parameters.get(name))
        if value is None and parameters.get(name) is not None:
            raise _untyped(f"{name}: invalid type, expected a number")
        if value is not None and not allows(value):
            raise refuse(message)
    if (top := protocol.number(parameters.get("top_n_tokens")) or 0) > _MOST_TOP:
        raise refuse(f"`top_n_tokens` must be >= 0 and <= {_MOST_TOP}. Given: {ceil(top)}")
    stops = parameters.get("stop") or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _untyped("stop: invalid type, expected a sequence")
    if len(stops) > _MOST_STOPS:
        raise refuse(f"`stop` supports up to {_MOST_STOPS} stop sequences. Given: {len(stops)}")


def _openai(state: ServerState, request: CompletionRequest, prompt: str, asked: Any) -> Completion:
    """With the native parameters that the OpenAI routes make; zero is the legal way to ask for greedy here."""
    body = request.body
    names = ("top_p", "frequency_penalty", "stop", "seed", "repetition_penalty")
    parameters = {name: body[name] for name in names if body.get(name) is not None} | {"max_new_tokens": asked}
    if protocol.number(body.get("temperature")):
        parameters["temperature"] = body["temperature"]
    return _completion(state, request, prompt, parameters)


def _untyped(message: str) -> ErrorReply:
    """What axum says about JSON that does not fit: plain text."""
    said = f"Failed to deserialize the JSON body into the target type: {message}"
    return ErrorReply(Reply(said.encode(), 422, protocol.TEXT_TYPE))


def flat_error(message: str, kind: str, status: int = 500) -> Reply:
    """Every error, and as an event that of the native routes."""
    return Reply(protocol.dumps({"error": message, "error_type": kind}), status)


def _error_payloads(message: str, kind: str, openai: bool) -> tuple[bytes, ...]:
    """An error as events; on the OpenAI routes the code is 422 whatever happened."""
    if openai:
        return protocol.dumps({"error": {"message": message, "http_status_code": 422}}), b"[DONE]"
    return (flat_error(message, kind).body,)


def _refusal(request: CompletionRequest, message: str) -> ErrorReply:
    said, openai = f"Input validation error: {message}", request.path.startswith("/v1/")
    return ErrorReply(_refused(said, "validation", 422, request.streamed, openai))


def _refused(message: str, kind: str, status: int, streamed: bool, openai: bool) -> Reply:
    """With that status, but as an event under status 200 once the answer is a stream."""
    if streamed:
        return protocol.events_reply(*_error_payloads(message, kind, openai), headers=_STREAM_TYPE)
    return flat_error(message, kind, status)


def _failure(status: int) -> Reply:
    said = {500: ("Incomplete generation", "incomplete_generation"), 503: ("unhealthy", "healthcheck")}
    return flat_error(*said.get(status, _OVERLOADED), status)


def _encoding(
    completion: Completion, prompt: str, encode: protocol.EventEncoder, whole: Whole, closing: protocol.Events = ()
) -> Encoding:
    computed: protocol.Headers = (("x-compute-type", "1-a800-80gb"), ("x-compute-characters", str(len(prompt))))
    failure = tuple(map(protocol.event, _error_payloads(*_FAILED, bool(closing))))

    def answer(total_s: float) -> Reply:
        """Milliseconds, rounded down; what the simulated server does not know apart counts as inference."""
        total_ms, output = int(total_s * 1e3), completion.output_tokens
        spent = {"compute-time": f"{total_s:.9f}", "total-time": total_ms, "validation-time": 0, "queue-time": 0}
        spent |= {"inference-time": total_ms, "time-per-token": total_ms // output}
        spent |= {"prompt-tokens": completion.prompt_tokens, "generated-tokens": output}
        timed = tuple((f"x-{name}", str(value)) for name, value in spent.items())
        return protocol.ok(whole(), computed + timed + protocol.JSON_TYPE)

    head = (*computed, ("x-accel-buffering", "no"))
    return Encoding(completion, encode, answer, failure, closing=closing, head=head)


def _identity(state: ServerState, request: CompletionRequest, kind: str) -> dict[str, Any]:
    made = {"object": kind, "id": "", "created": request.created_s, "model": state.config.model}
    return made | {"system_fingerprint": f"{VERSION}-{DOCKER_LABEL}"}


def _info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    names = {"model_id": config.model, "model_sha": None, "model_pipeline_tag": "text-generation"}
    limits = {"max_concurrent_requests": config.max_concurrent_requests, "max_best_of": _MOST_BEST_OF}
    limits |= {"max_stop_sequences": _MOST_STOPS, "max_input_tokens": state.longest - 1}  # launcher/src/main.rs
    limits |= {"max_total_tokens": state.longest, "validation_workers": 2, "max_client_batch_size": _MOST_PROMPTS}
    version = {"version": VERSION, "sha": "dfb3fbe7", "docker_label": DOCKER_LABEL}
    return protocol.ok({**names, **limits, "router": "text-generation-router", **version})


def _tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    if not isinstance(fields.get("inputs"), str):
        raise _untyped("missing field `inputs`")
    return protocol.ok(_token_list(fields["inputs"]))


def _chat_tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    if not isinstance(fields.get("messages"), list):
        raise _untyped("missing field `messages`")
    text = tokenizer.chat_text(fields["messages"])
    return protocol.ok({"tokenize_response": _token_list(text), "templated_text": text})


def _token_list(text: str) -> list[dict[str, Any]]:
    """With the token that the server puts before every text; it has no place in it."""
    places = ((tokenizer.BOS_ID, 0, 0), *tokenizer.offsets(text))
    return [{"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in places]


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Counters carry no `_total`, and nothing carries a model name. What we do not know is left out."""
    failures = {**state.refused, "dropped": state.by_reason["abort"]}
    failed = {("err", kind): times for kind, times in failures.items() if times}
    return Reply(state.metrics("tgi_", {}, failed_by_kind=failed), headers=protocol.TEXT_TYPE)


_NOT_JSON = "Failed to parse the request body as JSON: {} at line 1 column {}"
_EMPTY = Reply(headers=())

PROTOCOL = ServerProtocol(
    after=(
        "access-control-allow-origin: *\r\n"
        "vary: origin, access-control-request-method, access-control-request-headers\r\n"
        "date: {date}\r\n"
    ),
    stream_headers=_STREAM_TYPE,
    keep_alive_s=3600,
    body_limit=2_000_000,
    generate={"/v1/chat/completions": chat, "/v1/completions": completions} | dict.fromkeys(protocol.NATIVE, native),
    pages={
        ("GET", "/"): _EMPTY,
        ("GET", "/health"): _EMPTY,
        ("GET", "/ping"): _EMPTY,
        ("GET", "/info"): _info,
        ("GET", "/v1/models"): lambda state, _: state.models(state.config.model, created=0),
        ("GET", "/metrics"): _metrics,
        ("POST", "/tokenize"): _tokenize,
        ("POST", "/chat_tokenize"): _chat_tokenize,
    },
    bad_type=Reply(b"Expected request with `Content-Type: application/json`", 415, protocol.TEXT_TYPE),
    bad_json=lambda message, place: Reply(_NOT_JSON.format(message, place + 1).encode(), 400, protocol.TEXT_TYPE),
    too_large=Reply(b"length limit exceeded", 413, protocol.TEXT_TYPE),
    not_found=Reply(status=404, headers=()),
    not_allowed=lambda methods: Reply(status=405, headers=(("allow", methods),)),
    failure=_failure,
    overloaded=lambda refused: _refused(*_OVERLOADED, 429, refused.completion.streamed, bool(refused.closing)),
    guarded=lambda path: path not in ("/health", "/ping", "/info", "/metrics", "/v1/models"),
    unauthorized=Reply(status=401, headers=()),
    default_limit=128,  # --max-concurrent-requests (launcher/src/main.rs)
    buckets=partial(steps_of_half, 0.0001),
)
