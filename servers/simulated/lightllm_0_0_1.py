"""The HTTP API of a simulated LightLLM 0.0.1 (lightllm/server/api_*.py of the package on PyPI, August 2024)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from loadgen.servers.simulated import lightllm, protocol, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import Page, ServerProtocol, ServerState, exponential_buckets

_DEFAULT_MAX_TOKENS = 16
_MAX_BEST_OF = 8
_LOGPROB = -1.5
_PARAMETERS = (
    "best_of",
    "n",
    "do_sample",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "exponential_decay_length_penalty",
    "temperature",
    "top_p",
    "top_k",
    "ignore_eos",
    "max_new_tokens",
    "min_new_tokens",
    "stop_sequences",
    "skip_special_tokens",
    "add_spaces_between_special_tokens",
    "print_eos_token",
    "input_penalty",
)
# Parameters of TGI that `--use_tgi_api` accepts and drops (api_tgi.py).
_TGI_PARAMETERS = (
    "typical_p",
    "return_full_text",
    "stop",
    "truncate",
    "watermark",
    "details",
    "decoder_input_details",
    "seed",
)
# (name, allowed values, message of `SamplingParams.verify` for other values)
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("best_of", lambda value: 0 < value <= _MAX_BEST_OF, f"need 0 < best_of <= {_MAX_BEST_OF}, but get {{}}"),
    ("presence_penalty", lambda value: value >= 0, "presence_penalty must >= 0.0, got {}"),
    ("frequency_penalty", lambda value: value >= 0, "frequency_penalty must >= 0.0, got {}"),
    ("repetition_penalty", lambda value: value >= 1, "repetition_penalty must >= 1.0, got {}"),
    ("temperature", lambda value: value >= 0, "temperature must > 0.0, got {}"),  # 0 means greedy
    ("top_p", lambda value: 0 < value <= 1, "top_p must in (0.0, 1.0], got {}"),
    ("top_k", lambda value: value >= 1 or value == -1, "top_k must be -1 (disable), or at least 1, got {}."),
    ("max_new_tokens", lambda value: value >= 1, "max_new_tokens must be at least 1 , got {}."),
    ("min_new_tokens", lambda value: value >= 1, "min_new_tokens must be at least 1 , got {}."),
)
# Parameters that are checked only if `do_sample` is true.
_SAMPLING_ONLY = ("temperature", "top_p", "top_k")
# Metrics that only later versions have.
_LATER_METRICS = ("request_failure_total", "num_running_reqs", "prompt_tokens_total", "generation_tokens_total")


def error(message: str, status: int = 417) -> Reply:
    """Return an error response in the format of the routes that generate tokens."""
    return Reply(protocol.dumps({"message": message}), status)


def native(state: ServerState, request: CompletionRequest, *, tgi_api: bool) -> Encoding:
    """Encode the response to POST /generate or /generate_stream.

    Without `tgi_api`, the response has LightLLM's native format. With `tgi_api`, it has the TGI-like format that
    LightLLM's option `--use_tgi_api` selects.
    """
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
    whole_reply = _whole_tgi_reply if tgi_api else _whole_reply
    return Encoding(completion, encode, lambda _: whole_reply(completion, state.mark, details=details), ())


def _parameters(value: Any, *, tgi_api: bool) -> tuple[dict[str, Any], bool]:
    """Check the parameters of a request, and return (parameters, details).

    `details` is True if the response must contain details of its tokens. Raises ErrorReply for an invalid parameter.
    """
    if not isinstance(value, Mapping):
        raise ErrorReply(error("argument after ** must be a mapping"))
    parameters = dict(value)
    if tgi_api:
        parameters.setdefault("return_details", parameters.get("details", False))
        parameters.setdefault("stop_sequences", parameters.get("stop"))
        parameters = {name: value for name, value in parameters.items() if name not in _TGI_PARAMETERS}
    details = bool(parameters.pop("return_details", False))
    for name in parameters:
        if name not in _PARAMETERS:
            raise ErrorReply(error(f"SamplingParams.__init__() got an unexpected keyword argument '{name}'"))
    for name, allows, message in _RULES:
        number = protocol.number(parameters.get(name))
        ignored = name in _SAMPLING_ONLY and not parameters.get("do_sample")
        if number is not None and not ignored and not allows(number):
            raise ErrorReply(error(message.format(parameters[name])))
    return parameters, details


def _completion(
    state: ServerState, request: CompletionRequest, prompt: Any, parameters: Mapping[str, Any]
) -> Completion:
    """Check the lengths of prompt and output, and generate a completion. Raises ErrorReply for an invalid length.

    As in the real server, the client of a streamed request gets no error message: the connection is closed after the
    response head.
    """
    prompt_tokens = 1 + tokenizer.count(prompt) if isinstance(prompt, str) else 0
    requested = protocol.integer(parameters.get("max_new_tokens", _DEFAULT_MAX_TOKENS)) or _DEFAULT_MAX_TOKENS
    problem = _length_problem(prompt_tokens, requested, state.max_model_len)
    if problem and request.streamed:
        raise ErrorReply(Reply(headers=protocol.EVENTS_TYPE, chunked=True, cut=True))
    if problem:
        raise ErrorReply(error(problem))
    completion = state.complete(request, prompt_tokens, requested, "stop")
    stops = parameters.get("stop_sequences")
    if isinstance(stops, str):
        stops = [stops]
    elif not isinstance(stops, list):
        stops = []
    usable_stops = [stop for stop in stops if isinstance(stop, str) and stop]
    return completion.cut_at_stop(usable_stops, "stop", anywhere=False)[0]


def _length_problem(prompt_tokens: int, requested: int, max_model_len: int) -> str:
    """Return the server's error message if the lengths of prompt and output are invalid, otherwise an empty string."""
    if not prompt_tokens:
        return "text input must be of type `str`"  # this version does not accept token ids
    if prompt_tokens > max_model_len - 1:
        return f"the input prompt token len {prompt_tokens} is too long > {max_model_len - 1}"
    if prompt_tokens + requested > max_model_len:
        return f"the req total len (input len + output len) is too long > max_req_total_len:{max_model_len}"
    return ""


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
    """Encode one event, with spaces in the JSON as `json.dumps` writes them.

    The first event also contains `mark`, the field that identifies a simulated server.
    """
    reason = completion.finish_reason if last else None
    event: dict[str, Any] = {
        "token": {
            "id": completion.ids[first],
            "text": completion.texts[first].decode(),
            "logprob": _LOGPROB,
            "special": False,
            "count_output_tokens": first + 1,
        },
        "generated_text": None,
        "finished": last,
        "finish_reason": reason,
        "details": None,
    }
    if last and tgi_api:
        event["generated_text"] = completion.text
        if details:
            event["details"] = {"generated_tokens": completion.output_tokens, "finish_reason": reason}
    if first == 0:
        event |= mark
    return b"data:%b\n\n" % json.dumps(event, ensure_ascii=False).encode()


def _token_details(completion: Completion) -> list[dict[str, Any]]:
    return [
        {
            "id": token,
            "logprob": _LOGPROB,
            "special": False,
            "count_output_tokens": index,
            "prompt_tokens": completion.prompt_tokens,
            "text": text.decode(),
        }
        for index, (token, text) in enumerate(zip(completion.ids, completion.texts, strict=True), 1)
    ]


def _whole_reply(completion: Completion, mark: Mapping[str, Any], *, details: bool) -> Reply:
    """Return the response to a request without streaming.

    Like a response of LightLLM 0.0.1, the response has no content type. Its JSON contains spaces, because `json.dumps`
    adds them. `mark` is the field that identifies a simulated server. `details` is True if the response must list its
    tokens.
    """
    response: dict[str, Any] = {
        "generated_text": [completion.text],
        "count_output_tokens": completion.output_tokens,
        "finish_reason": completion.finish_reason,
    }
    if details:
        response["tokens"] = _token_details(completion)
    return Reply(json.dumps(response | dict(mark), ensure_ascii=False).encode(), headers=())


def _whole_tgi_reply(completion: Completion, mark: Mapping[str, Any], *, details: bool) -> Reply:
    """Return the non-streamed response under the option `--use_tgi_api`: a list with one object."""
    reason = completion.finish_reason
    output_tokens = completion.output_tokens
    response: dict[str, Any] = {
        "generated_text": completion.text,
        "count_output_tokens": output_tokens,
        "finish_reason": reason,
    }
    if details:
        response["details"] = {
            "tokens": _token_details(completion),
            "generated_tokens": output_tokens,
            "finish_reason": reason,
        }
    return protocol.json_reply([response | dict(mark)])


def _bad_json(message: str, position: int) -> Reply:
    return error(f"{message}: line 1 column {position + 1} (char {position})")


def chat(_: ServerState, _request: CompletionRequest) -> Encoding:
    """Refuse POST /v1/chat/completions with status 500, as the real LightLLM 0.0.1 did for every request."""
    raise ErrorReply(Reply(b"Internal Server Error", 500, protocol.TEXT_TYPE))


_ALIVE = protocol.json_reply({"status": "ok"})
_HEALTHY = protocol.json_reply({"message": "Ok"})
_LOADS = ("current_load", "logical_max_load", "dynamic_max_load")


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    page = state.metrics("lightllm_", state.metric_labels, without=_LATER_METRICS)
    return Reply(page + state.mark_metrics(), headers=())


_PAGES: dict[tuple[str, str], Page | Reply] = {
    **{(method, path): _ALIVE for path in ("/liveness", "/readiness") for method in ("GET", "POST")},
    ("GET", "/health"): _HEALTHY,
    ("HEAD", "/health"): _HEALTHY,
    ("GET", "/healthz"): _HEALTHY,
    ("GET", "/token_load"): lambda state, _: protocol.json_reply(dict.fromkeys(_LOADS, state.gauges().kv_usage)),
    ("GET", "/metrics"): _metrics,
}


def _protocol(*, tgi_api: bool) -> ServerProtocol:
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


PROTOCOL = _protocol(tgi_api=False)
TGI_PROTOCOL = _protocol(tgi_api=True)
