"""A simulated LightLLM, as 0.0.1 speaks (lightllm/server/api_*.py of the package on PyPI, August 2024)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from loadgen.servers.simulated import lightllm, protocol, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, exponential_buckets

_DEFAULT_TOKENS, _MOST_BEST_OF = 16, 8
_LOGPROB = -1.5
_PARAMETERS = (
    *("best_of", "n", "do_sample", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("exponential_decay_length_penalty", "temperature", "top_p", "top_k", "ignore_eos", "max_new_tokens"),
    *("min_new_tokens", "stop_sequences", "skip_special_tokens", "add_spaces_between_special_tokens"),
    *("print_eos_token", "input_penalty"),
)
# Parameters of TGI that `--use_tgi_api` takes and leaves out (api_tgi.py).
_TGI_ALONE = (
    "typical_p",
    "return_full_text",
    "stop",
    "truncate",
    "watermark",
    "details",
    "decoder_input_details",
    "seed",
)
# Name, the values that are allowed, and the words of `SamplingParams.verify` for others.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: 0 < value <= _MOST_BEST_OF, f"need 0 < best_of <= {_MOST_BEST_OF}, but get {{}}"),
    ("presence_penalty", lambda value: value >= 0, "presence_penalty must >= 0.0, got {}"),
    ("frequency_penalty", lambda value: value >= 0, "frequency_penalty must >= 0.0, got {}"),
    ("repetition_penalty", lambda value: value >= 1, "repetition_penalty must >= 1.0, got {}"),
    ("temperature", lambda value: value >= 0, "temperature must > 0.0, got {}"),  # 0 means greedy
    ("top_p", lambda value: 0 < value <= 1, "top_p must in (0.0, 1.0], got {}"),
    ("top_k", lambda value: value >= 1 or value == -1, "top_k must be -1 (disable), or at least 1, got {}."),
    ("max_new_tokens", lambda value: value >= 1, "max_new_tokens must be at least 1 , got {}."),
    ("min_new_tokens", lambda value: value >= 1, "min_new_tokens must be at least 1 , got {}."),
)
_ONLY_SAMPLED = ("temperature", "top_p", "top_k")
# Names that later versions have on their pages of metrics.
_LATER = ("request_failure_total", "num_running_reqs", "prompt_tokens_total", "generation_tokens_total")


def error(message: str, status: int = 417) -> Reply:
    """Every error of a route that generates."""
    return Reply(protocol.dumps({"message": message}), status)


def native(state: ServerState, request: CompletionRequest, *, tgi_api: bool) -> Encoding:
    """`/generate` and `/generate_stream`, in LightLLM's own form or in one that is like TGI's."""
    body = request.body
    for name in ("inputs", "parameters"):
        if name not in body:
            raise ErrorReply(error(f"'{name}'"))
    parameters, details = _parameters(body["parameters"], tgi_api=tgi_api)
    if request.streamed and parameters.get("best_of", 1) != 1:
        raise ErrorReply(error("stream api only support best_of == 1"))
    if parameters.get("best_of", 1) != 1:
        raise ErrorReply(error("the simulated server only supports best_of == 1"))
    completion = _completion(state, request, body["inputs"], parameters)
    encode = partial(_event, completion, state.mark, tgi_api=tgi_api, details=details)
    whole = _whole_tgi if tgi_api else _whole
    return Encoding(completion, encode, lambda _: whole(completion, state.mark, details=details), ())


def _parameters(given: Any, *, tgi_api: bool) -> tuple[dict[str, Any], bool]:
    """The parameters, and whether the details of the tokens are wanted. Raises ErrorReply for wrong ones."""
    if not isinstance(given, Mapping):
        raise ErrorReply(error("argument after ** must be a mapping"))
    parameters = dict(given)
    if tgi_api:
        parameters.setdefault("return_details", parameters.get("details", False))
        parameters.setdefault("stop_sequences", parameters.get("stop"))
        parameters = {name: value for name, value in parameters.items() if name not in _TGI_ALONE}
    details = bool(parameters.pop("return_details", False))
    for name in parameters:
        if name not in _PARAMETERS:
            raise ErrorReply(error(f"SamplingParams.__init__() got an unexpected keyword argument '{name}'"))
    for name, allows, words in _RULES:
        value = protocol.number(parameters.get(name))
        ignored = name in _ONLY_SAMPLED and not parameters.get("do_sample")
        if value is not None and not ignored and not allows(value):
            raise ErrorReply(error(words.format(parameters[name])))
    return parameters, details


def _completion(
    state: ServerState, request: CompletionRequest, prompt: Any, parameters: Mapping[str, Any]
) -> Completion:
    """Raises ErrorReply for a prompt or an output that does not fit: a stream has begun by then, and breaks off."""
    tokens = 1 + tokenizer.count(prompt) if isinstance(prompt, str) else 0
    requested = protocol.integer(parameters.get("max_new_tokens", _DEFAULT_TOKENS)) or _DEFAULT_TOKENS
    problem = ""
    if not tokens:
        problem = "text input must be of type `str`"  # this version takes no token ids
    elif tokens > state.max_model_len - 1:
        problem = f"the input prompt token len {tokens} is too long > {state.max_model_len - 1}"
    elif tokens + requested > state.max_model_len:
        problem = f"the req total len (input len + output len) is too long > max_req_total_len:{state.max_model_len}"
    if problem and request.streamed:
        raise ErrorReply(Reply(headers=protocol.EVENTS_TYPE, chunked=True, cut=True))
    if problem:
        raise ErrorReply(error(problem))
    made = state.complete(request, tokens, requested, "stop")
    stops = parameters.get("stop_sequences")
    listed = [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []
    return made.cut_at_stop([stop for stop in listed if isinstance(stop, str) and stop], "stop", anywhere=False)[0]


def _event(
    completion: Completion,
    mark: Mapping[str, Any],
    first: int,
    _tokens: int,
    last: bool,
    *,
    tgi_api: bool,
    details: bool,
) -> bytes:
    """One event, in the spelling of Python's json module, with the mark in the first."""
    token = {"id": completion.ids[first], "text": completion.texts[first].decode(), "logprob": _LOGPROB}
    told: dict[str, Any] = {"token": {**token, "special": False, "count_output_tokens": first + 1}}
    reason = completion.finish_reason if last else None
    told |= {"generated_text": None, "finished": last, "finish_reason": reason, "details": None}
    if last and tgi_api:
        told["generated_text"] = completion.text
        if details:
            told["details"] = {"generated_tokens": completion.output_tokens, "finish_reason": reason}
    text = json.dumps(told | ({} if first else dict(mark)), ensure_ascii=False)
    return b"data:%b\n\n" % text.encode()


def _tokens_of(completion: Completion) -> list[dict[str, Any]]:
    same = {"logprob": _LOGPROB, "special": False}
    pairs = enumerate(zip(completion.ids, completion.texts, strict=True), 1)
    counted = completion.prompt_tokens
    return [
        {"id": token, **same, "count_output_tokens": index, "prompt_tokens": counted, "text": text.decode()}
        for index, (token, text) in pairs
    ]


def _whole(completion: Completion, mark: Mapping[str, Any], *, details: bool) -> Reply:
    """A whole response: no content type, and the spelling of Python's json module."""
    output = completion.output_tokens
    told = {"generated_text": [completion.text], "count_output_tokens": output}
    told |= {"finish_reason": completion.finish_reason}
    told |= {"tokens": _tokens_of(completion)} if details else {}
    return Reply(json.dumps(told | dict(mark), ensure_ascii=False).encode(), headers=())


def _whole_tgi(completion: Completion, mark: Mapping[str, Any], *, details: bool) -> Reply:
    """A whole response in the form of `--use_tgi_api`: a list of one."""
    reason, output = completion.finish_reason, completion.output_tokens
    told: dict[str, Any] = {"generated_text": completion.text, "count_output_tokens": output, "finish_reason": reason}
    if details:
        told["details"] = {"tokens": _tokens_of(completion), "generated_tokens": output, "finish_reason": reason}
    return protocol.json_reply([told | dict(mark)])


def _bad_json(message: str, position: int) -> Reply:
    return error(f"{message}: line 1 column {position + 1} (char {position})")


def chat(_: ServerState, _request: CompletionRequest) -> Encoding:
    """The recorded server failed on this route whatever was asked."""
    raise ErrorReply(Reply(b"Internal Server Error", 500, protocol.TEXT_TYPE))


_ALIVE = protocol.json_reply({"status": "ok"})
_HEALTHY = protocol.json_reply({"message": "Ok"})
_LOADS = ("current_load", "logical_max_load", "dynamic_max_load")


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    page = state.metrics("lightllm_", state.metric_labels, without=_LATER)
    return Reply(page + state.mark_metrics(), headers=())


_PAGES: dict[tuple[str, str], Page | Reply] = {
    **{(method, path): _ALIVE for path in ("/liveness", "/readiness") for method in ("GET", "POST")},
    ("GET", "/health"): _HEALTHY,
    ("HEAD", "/health"): _HEALTHY,
    ("GET", "/healthz"): _HEALTHY,
    ("GET", "/token_load"): lambda state, _: protocol.json_reply(dict.fromkeys(_LOADS, state.gauges().kv_usage)),
    ("GET", "/metrics"): _metrics,
}


def _speaking(*, tgi_api: bool) -> ServerProtocol:
    generate = partial(native, tgi_api=tgi_api)
    return ServerProtocol(
        head_prefix="date: {date}\r\nserver: uvicorn\r\n",
        head_suffix="",
        keep_alive_s=5,
        body_limit=64 << 20,
        generate={"/generate": generate, "/generate_stream": generate, "/v1/chat/completions": chat},
        pages=_PAGES,
        read_body=partial(protocol.json_fields, _bad_json),
        too_large=error("body too large"),
        failure=lambda status: lightllm.error_reply(status, "simulated failure"),
        generation_failure=error("simulated failure"),
        unhealthy=Reply(b'{"message":"Error"}', 404),
        needs_api_key=lambda _path: False,
        unauthorized=Reply(status=401),
        default_limit=1000,
        limit_is_batch_size=True,
        buckets=partial(exponential_buckets, 0.001),
    )


PROTOCOL, TGI_PROTOCOL = _speaking(tgi_api=False), _speaking(tgi_api=True)
