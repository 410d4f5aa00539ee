"""Checks the requests to a simulated SGLang 0.5.23, and builds its error responses.

The format of an error depends on the route. The OpenAI routes report `{"object": "error", ...}`. The native route
`/generate` reports `{"error": {...}}`. If the request to `/generate` is streamed, the response has status 200, and the
error is an event of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer
from loadgen.servers.simulated.protocol import CompletionRequest, ErrorReply, Reply
from loadgen.servers.simulated.state import ServerState

UNUSABLE_TOKENS = 2
"""The scheduler ends a response this many tokens before the end of the context (managers/scheduler.py)."""
RESERVED_PROMPT_TOKENS = 6
"""A prompt must be shorter than the context less this number of tokens."""
_HANDLERS = {
    "/v1/completions": (1860, "openai_v1_completions"),
    "/v1/chat/completions": (1870, "openai_v1_chat_completions"),
    "/generate": (928, "generate_request"),
}
"""Line and name of the function that handles a route in http_server.py. The server shows both in its refusals."""
_SAMPLING_PARAMETERS = (
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex"),
    *("ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("stream_interval", "logit_bias", "sampling_seed", "custom_params", "beam_width", "watermark", "choice"),
)
"""Fields of `sampling_params`, in the order in which a refusal lists them."""


def error_body(message: str, error_type: str, code: int) -> bytes:
    """Return the error object of the OpenAI routes as JSON."""
    return protocol.dumps({"object": "error", "message": message, "type": error_type, "param": None, "code": code})


def bad_request(message: str) -> ErrorReply:
    """Return the refusal of a request to an OpenAI route."""
    return ErrorReply(Reply(error_body(message, "BadRequestError", 400), 400))


def native_error(request: CompletionRequest, message: str) -> ErrorReply:
    """Return the error response to a refused request to `/generate`.

    If the request asks for a stream, the response is a stream: one event with the error, followed by `[DONE]`.
    """
    if not request.streamed:
        return ErrorReply(Reply(protocol.dumps({"error": {"message": message}}), 400))
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    return ErrorReply(protocol.events_reply(protocol.dumps({"error": error}), b"[DONE]"))


def refusal(request: CompletionRequest, message: str) -> ErrorReply:
    """Return the refusal of a request in the format of its route."""
    return native_error(request, message) if request.path == "/generate" else bad_request(message)


def validation_error(path: str, *problems: str) -> ErrorReply:
    """Return the error response to a body that does not fit the schema.

    Each of `problems` is one problem, as the `repr` of a Python dict.
    """
    line, function = _HANDLERS.get(path, (0, "unknown"))
    listed = f"POST {path} [{', '.join(problems)}]"
    place = f'File "sglang/srt/entrypoints/http_server.py", line {line}, in {function}\n    {listed}'
    title = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
    message = "\n  ".join((f"{title}:", *problems)) + f"\n\n  {place}"
    return ErrorReply(Reply(error_body(message, "Bad Request", 400), 400))


def missing_field(path: str, name: str, shown_body: Mapping[str, Any]) -> ErrorReply:
    """Return the error response to a request body that lacks the required field `name`.

    `shown_body` is the body as the error shows it.
    """
    problem = {"type": "missing", "loc": ("body", name), "msg": "Field required", "input": dict(shown_body)}
    return validation_error(path, repr(problem))


def read_body(path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the JSON object in a request body. Raises ErrorReply if the body is not JSON."""

    def bad_json(message: str, position: int) -> Reply:
        cause = "unexpected end of data" if position >= len(body) else message
        problem = {"type": "json_invalid", "loc": ("body", position), "msg": "JSON decode error", "input": {}}
        return validation_error(path, repr({**problem, "ctx": {"error": cause}})).reply

    return protocol.json_fields(bad_json, path, body)


def check_openai(state: ServerState, path: str, body: Mapping[str, Any], *, chat: bool) -> None:
    """Check the fields of a request to an OpenAI route, except its prompt. Raises ErrorReply if a check fails."""
    required = "messages" if chat else "prompt"
    if required not in body:
        shown = {**body, "tool_choice": "none"} if chat else body
        raise missing_field(path, required, shown)
    max_tokens = body.get("max_tokens")
    if max_tokens is not None and protocol.integer(max_tokens) is None:
        message = "Input should be a valid integer, unable to parse string as an integer"
        problem = {"type": "int_parsing", "loc": ("body", "max_tokens"), "msg": message, "input": max_tokens}
        raise validation_error(path, repr(problem))
    if not chat and max_tokens is not None and (protocol.integer(max_tokens) or 0) < 1:
        reason = "max_tokens must be positive"
        problem = {"type": "value_error", "loc": ("body", "max_tokens"), "msg": f"Value error, {reason}"}
        raise validation_error(path, repr({**problem, "input": max_tokens, "ctx": {"error": ValueError(reason)}}))
    _check_stop(path, body.get("stop"))
    _check_stream_options(path, body.get("stream_options"))
    model = body.get("model")
    if isinstance(model, str) and ":" in model and model not in (state.config.model, *state.config.adapters):
        adapter = model.partition(":")[2]
        raise bad_request(
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )
    if protocol.integer(body.get("n")) not in (None, 1):
        raise bad_request("The simulated server gives one answer per request")


def _check_stop(path: str, stop: Any) -> None:
    """Raise ErrorReply if the parameter `stop` of a request is not a string, a list of strings or null.

    As in SGLang, the error says both why `stop` is not a string and why it is not a list of strings. `path` is the path
    of the request.
    """
    if stop is None or isinstance(stop, str):
        return

    def problem(value_type: str, loc: tuple[str | int, ...], value: Any) -> str:
        message = f"Input should be a valid {value_type}"
        return repr({"type": f"{value_type}_type", "loc": ("body", "stop", *loc), "msg": message, "input": value})

    if isinstance(stop, list):
        items = [
            problem("string", ("list[str]", index), item)
            for index, item in enumerate(stop)
            if not isinstance(item, str)
        ]
    else:
        items = [problem("list", ("list[str]",), stop)]
    if items:
        raise validation_error(path, problem("string", ("str",), stop), *items)


def _check_stream_options(path: str, options: Any) -> None:
    """Raise ErrorReply if `stream_options` is neither an object nor null."""
    if options is not None and not isinstance(options, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        problem = {"type": "model_attributes_type", "loc": ("body", "stream_options"), "msg": message, "input": options}
        raise validation_error(path, repr(problem))


def sampling_parameters(request: CompletionRequest) -> Mapping[str, Any]:
    """Return the field `sampling_params` of a request to `/generate`. Raises ErrorReply for an unknown parameter."""
    parameters = request.body.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise native_error(request, "The simulated server takes one object of sampling parameters")
    unknown = next((name for name in parameters if name not in _SAMPLING_PARAMETERS), None)
    if unknown is not None:
        known = ", ".join(f"`{name}`" for name in _SAMPLING_PARAMETERS)
        raise ErrorReply(Reply(protocol.dumps({"error": f"unknown field `{unknown}`, expected one of {known}"}), 400))
    value = parameters.get("max_new_tokens")
    if isinstance(value, str):
        message = f'invalid type: string "{value}", expected i64'
        raise ErrorReply(Reply(protocol.dumps({"error": message}), 400))
    if protocol.integer(parameters.get("n")) not in (None, 1):
        raise native_error(request, "The simulated server gives one answer per request")
    stops = parameters.get("stop") or []
    if not isinstance(stops, str | list) or not all(isinstance(stop, str) for stop in stops):
        raise native_error(request, "`stop` must be a text or a list of texts")
    return parameters


def prompt_ids(request: CompletionRequest, prompt: Any) -> Sequence[int]:
    """Return the token ids of a prompt, which is a text or a list of token ids. Raises ErrorReply if it is empty."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise refusal(request, "The simulated server takes one prompt per request")
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return [tokenizer.BOS_ID, *tokenizer.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        return [protocol.integer(token) or 0 for token in prompt]
    raise refusal(request, "Prompt cannot be empty")


def output_limit(state: ServerState, request: CompletionRequest, prompt_tokens: int, requested: int | None) -> int:
    """Return the maximum number of output tokens. Raises ErrorReply if prompt and output do not fit the context.

    `requested` is the maximum in the request, or None. SGLang's scheduler can use slightly fewer tokens than the
    context has. If the output fits the context but not the scheduler, the result is reduced without an error.
    """
    context = state.max_model_len
    if prompt_tokens >= context:
        raise refusal(
            request, f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        )
    total = prompt_tokens + (requested or 0)
    if total > context:
        raise refusal(
            request,
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {prompt_tokens} tokens from the input messages and {requested} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within the "
            "limit.",
        )
    longest_prompt = max(1, context - RESERVED_PROMPT_TOKENS)
    if prompt_tokens >= longest_prompt:
        raise refusal(
            request,
            f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length ({longest_prompt} tokens). "
            "Use a shorter input or enable --allow-auto-truncate.",
        )
    usable = context - UNUSABLE_TOKENS - prompt_tokens
    return usable if requested is None else min(requested, usable)


def check_sampling(
    request: CompletionRequest, parameters: Mapping[str, Any], requested: int | None, minimum_name: str
) -> None:
    """Check the sampling parameters, as SGLang's `SamplingParams.verify` does. Raises ErrorReply if a check fails.

    `requested` is the requested maximum number of output tokens. `minimum_name` is the name of the parameter that
    states the minimum number of output tokens.
    """
    temperature = protocol.number(parameters.get("temperature"))
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        shown = f"{temperature:g}" if request.path == "/generate" else str(temperature)
        raise refusal(request, f"temperature must be a non-negative finite number, got {shown}.")
    if requested is not None and requested < 0:
        raise refusal(request, f"max_new_tokens must be at least 0, got {requested}.")
    minimum = protocol.integer(parameters.get(minimum_name)) or 0
    if requested is not None and not 0 <= minimum <= requested:
        raise refusal(request, f"min_new_tokens must be in [0, max_new_tokens({requested})], got {minimum}.")
