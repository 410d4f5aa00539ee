"""Checks the requests to a simulated vLLM in the same order and with the same error messages as vLLM 0.32.0.

In vLLM, these files contain the checks:

- entrypoints/openai/*/protocol.py: the types of fields, and combinations of fields.
- sampling_params.py: the values of sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer
from loadgen.servers.simulated.protocol import ErrorReply
from loadgen.servers.simulated.state import ServerState

MAX_LOGPROBS = 20
_MAX_PROMPTS = 1024
_MAX_CHARACTERS_PER_TOKEN = 9
"""A text of more than this many characters per token of the context is refused without tokenizing it
(err_toolong_text)."""

_INTEGERS = ("logprobs", "max_tokens", "max_completion_tokens", "n", "seed", "top_k", "min_tokens", "prompt_logprobs")
_NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_p", "min_p", "repetition_penalty")
_FLAGS = ("echo", "logprobs", "stream", "ignore_eos", "include_stop_str_in_output", "return_token_ids")
_NEVER_NULL = ("min_tokens", "ignore_eos", "include_stop_str_in_output")

# (name, allowed values, message for other values, whether the parameter and its value follow the message)
_SAMPLING: tuple[tuple[str, Callable[[float], bool], str, bool], ...] = (
    ("n", lambda value: value >= 1, "n must be at least 1, got {}.", False),
    ("presence_penalty", lambda value: -2 <= value <= 2, "presence_penalty must be in [-2, 2], got {}.", False),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "frequency_penalty must be in [-2, 2], got {}.", False),
    ("repetition_penalty", lambda value: value > 0, "repetition_penalty must be greater than zero, got {}.", False),
    ("temperature", lambda value: value >= 0, "temperature must be non-negative, got {}.", True),
    ("temperature", lambda value: value <= 2, "temperature must be in [0, 2], got {}.", True),
    ("top_p", lambda value: 0 < value <= 1, "top_p must be in (0, 1], got {}.", True),
    ("top_k", lambda value: value >= -1, "top_k must be 0 (disable), or at least 1, got {}.", False),
    ("min_p", lambda value: 0 <= value <= 1, "min_p must be in [0, 1], got {}.", False),
)


def check_body(state: ServerState, body: Mapping[str, Any], *, chat: bool) -> None:
    """Check the fields of a request and the name of its model, before the prompt is tokenized.

    Raises ErrorReply if a check fails.
    """
    if chat:
        _check_tools(body)
    else:
        _check_prompt(body)
    _check_logprobs_fields(body, chat=chat)
    if body.get("stream_options") and not body.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    problems = _schema_problems(body, chat=chat)
    if problems:
        raise validation_error(*problems)
    check_model(state, body)


def _check_logprobs_fields(body: Mapping[str, Any], *, chat: bool) -> None:
    name = "top_logprobs" if chat else "logprobs"
    logprobs = body.get(name)
    prompt_logprobs = body.get("prompt_logprobs")
    for field, value in (("prompt_logprobs", prompt_logprobs), (name, logprobs)):
        if value is not None and not isinstance(value, int | float):
            raise bad_request(f"`{field}` must be an integer.", field, value)
    if prompt_logprobs is not None:
        if body.get("stream") and (prompt_logprobs > 0 or prompt_logprobs == -1):
            raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt_logprobs < 0 and prompt_logprobs != -1:
            raise bad_request("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", prompt_logprobs)
    if logprobs is not None:
        if logprobs < 0 and logprobs != -1:
            raise bad_request(f"`{name}` must be a positive value or -1.", name, logprobs)
        if chat and logprobs and not body.get("logprobs"):
            raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", name)


def _check_prompt(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > _MAX_PROMPTS and not all(type(token) is int for token in prompt):
        raise bad_request(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {_MAX_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    if prompt in (None, "") and body.get("prompt_embeds") in (None, []):
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def _check_tools(body: Mapping[str, Any]) -> None:
    choice = body.get("tool_choice", "none")
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if body.get("tools") == []:
        advice = "Either provide at least one tool or omit the field entirely."
        raise bad_request(f"`tools` must not be an empty array. {advice}", "tools")
    if choice not in ("none", None):
        if body.get("tools") is None:
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if choice not in ("auto", "required") and not isinstance(choice, dict):
            supported = 'Only named tools, "none", "auto" or "required" are supported.'
            raise bad_request(f"Invalid value for `tool_choice`: {choice}! {supported}", "tool_choice")


def check_chat(state: ServerState, body: Mapping[str, Any]) -> None:
    """Raise ErrorReply for a chat request that the simulated server cannot answer.

    The server cannot answer a request that needs a tool parser, contains a chat template or an image, or has no
    messages.
    """
    choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
    if state.config.structured:  # as with --enable-auto-tool-choice and --tool-call-parser
        choice = "none"
    if choice == "auto":
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if choice not in ("none", None):
        function = choice.get("function") if isinstance(choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        shown = f'"{choice}"' if name is None else f'function "{name}"'
        raise bad_request(f"tool_choice={shown} requires --tool-call-parser to be set")
    options = body.get("chat_template_kwargs")
    if body.get("chat_template") is not None or (isinstance(options, Mapping) and options.get("chat_template")):
        reason = "Chat template is passed with request, but --trust-request-chat-template is not set."
        raise bad_request(f"{reason} Refused request with untrusted chat template.")
    if not body["messages"]:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for message in body["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                raise bad_request(f"{state.config.model} is not a multimodal model")


def check_model(state: ServerState, body: Mapping[str, Any]) -> None:
    """Raise ErrorReply if the request names a model that this server does not serve."""
    served = (state.config.model, *state.config.adapters)
    if body.get("model") not in (None, *served):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {', '.join(served)}."
        raise ErrorReply(protocol.openai_error(message, "NotFoundError", 404, "model"))


def check_sampling(body: Mapping[str, Any], max_tokens: int) -> None:
    """Check the sampling parameters as vLLM's `SamplingParams._verify_args` does. Raises ErrorReply if a check fails.

    `max_tokens` is the maximum number of output tokens, after it was reduced to fit the context.
    """
    for name, allows, message, shows_parameter in _SAMPLING:
        value = protocol.number(body.get(name))
        if value is not None and not allows(value):
            shown = int(value) if name in _INTEGERS else value
            if shows_parameter:
                raise bad_request(message.format(shown), name, shown)
            raise bad_request(message.format(shown))
    if max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    min_tokens = protocol.integer(body.get("min_tokens")) or 0
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    if not all(stop_strings(body)):
        raise bad_request("stop cannot contain an empty string.")
    temperature = protocol.number(body.get("temperature"))
    answers = protocol.integer(body.get("n")) or 1
    if temperature is not None and temperature < 1e-5 and answers > 1:
        raise bad_request(f"n must be 1 when using greedy sampling, got {answers}.")


def check_engine(body: Mapping[str, Any], prompts: Iterable[Sequence[int]], logprobs: int | None) -> None:
    """Raise ErrorReply if a token id is not in the vocabulary, or if the request asks for too many log probabilities.

    `prompts` contains the token ids of the prompts. `logprobs` is the requested number of log probabilities for each
    generated token. The number for each prompt token is read from `body`.

    For a stream, the error is sent as an event after status 200. The reason is that vLLM makes these checks in its
    engine, after it has already sent the status.
    """
    try:
        for ids in prompts:
            checked_ids(ids)
        _check_logprobs(logprobs)
        _check_logprobs(protocol.integer(body.get("prompt_logprobs")), "prompt", "prompt_logprobs")
    except ErrorReply as problem:
        if not body.get("stream"):
            raise
        raise ErrorReply(protocol.events_reply(problem.reply.body, b"[DONE]")) from None


def _check_logprobs(logprobs: int | None, subject: str = "sample", name: str = "logprobs") -> None:
    if logprobs == -1:  # the request asks for all tokens of the vocabulary
        logprobs = tokenizer.VOCABULARY_SIZE
    if logprobs is not None and logprobs > MAX_LOGPROBS:
        message = f"Requested {subject} logprobs of {logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise bad_request(message, name, logprobs)


def stop_strings(body: Mapping[str, Any]) -> Sequence[str]:
    """Return the stop strings of a request."""
    stop = body.get("stop")
    if isinstance(stop, str):
        return [stop]
    return stop if isinstance(stop, list) else []


def requested_tokens(state: ServerState, value: Any, default: int, name: str = "max_tokens") -> int:
    """Return the requested maximum number of output tokens, or `default` if the request has none.

    `name` is the name of the parameter in error messages. Raises ErrorReply if the number exceeds the context. vLLM
    checks this before it tokenizes the prompt.
    """
    tokens = protocol.integer(value)
    if tokens is None:
        tokens = default
    if tokens > state.max_model_len:
        message = f"{name}={tokens} cannot be greater than max_model_len={state.max_model_len}."
        raise bad_request(f"{message} Please request fewer output tokens.", name, tokens)
    return tokens


def prompt_ids(state: ServerState, prompt: Any, *, add_bos: bool) -> Sequence[int]:
    """Return the token ids of `prompt`, which is a text, a list of token ids or one token id.

    With `add_bos`, the ids of a text begin with the token BOS. Raises ErrorReply if the prompt is empty, or if it
    leaves no room for a response in the context.
    """
    max_model_len = state.max_model_len
    limit = f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
    advice = "Please reduce the length of the input prompt."
    if isinstance(prompt, str):
        max_characters = _MAX_CHARACTERS_PER_TOKEN * max_model_len
        if len(prompt) > max_characters:
            bound = (
                f"(more than {max_characters} characters, which is the upper bound for {max_model_len} input tokens)"
            )
            raise bad_request(f"{limit}{len(prompt)} characters {bound}. {advice}", "input_text", len(prompt))
        ids: Sequence[int] = tokenizer.encode(prompt)
        if add_bos:
            ids = [tokenizer.BOS_ID, *ids]
    else:
        ids = prompt if isinstance(prompt, list) else [prompt]
    if not ids:
        raise bad_request("The decoder prompt cannot be empty")
    if len(ids) >= max_model_len:
        reason = "which exceeds this limit even without any output tokens."
        raise bad_request(f"{limit}{len(ids)} input tokens, {reason} {advice}", "input_tokens", len(ids))
    return ids


def checked_ids(prompt: Sequence[int]) -> Sequence[int]:
    """Return `prompt` unchanged. Raises ErrorReply if one of its token ids is not in the vocabulary."""
    for token in prompt:
        if type(token) is not int or not 0 <= token < tokenizer.VOCABULARY_SIZE:
            raise bad_request(f"Token id {token} is out of vocabulary")
    return prompt


def bad_request(message: str, parameter: str | None = None, value: Any = None) -> ErrorReply:
    """Return an error with status 400. Its message ends with the parameter's name and value if they are not None."""
    if parameter is None:
        return request_error(message, None)
    details = f"parameter={parameter}" if value is None else f"parameter={parameter}, value={value}"
    return request_error(f"{message} ({details})", parameter)


def request_error(message: str, parameter: str | None) -> ErrorReply:
    """Return an error with status 400 and exactly this message. `parameter` becomes the error's field `param`."""
    return ErrorReply(protocol.openai_error(message, "BadRequestError", 400, parameter))


# Validation errors of pydantic, for a body that does not fit the schema.

_MAX_PROBLEMS = 10
_MAX_SHOWN_CHARACTERS = 200
_MESSAGES = {
    "int_type": "Input should be a valid integer",
    "int_parsing": "Input should be a valid integer, unable to parse string as an integer",
    "int_from_float": "Input should be a valid integer, got a number with a fractional part",
    "float_type": "Input should be a valid number",
    "float_parsing": "Input should be a valid number, unable to parse string as a number",
    "bool_type": "Input should be a valid boolean",
    "bool_parsing": "Input should be a valid boolean, unable to interpret input",
    "string_type": "Input should be a valid string",
    "list_type": "Input should be a valid list",
    "dict_type": "Input should be a valid dictionary",
    "missing": "Field required",
    "greater_than_equal": "Input should be greater than or equal to 0",
    "model_attributes_type": "Input should be a valid dictionary or object to extract fields from",
}
Problem = Mapping[str, Any]


def validation_error(*problems: Problem) -> ErrorReply:
    """Return an error response with status 400 that lists validation problems.

    The error's field `param` contains the location of the first problem.
    """
    shown = problems[:_MAX_PROBLEMS]
    lines = [f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}:"]
    lines += [f"  {problem}" for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"  ...and {len(problems) - len(shown)} more errors")
    return ErrorReply(protocol.openai_error("\n".join(lines), "Bad Request", 400, problems[0]["loc"]))


def wrong_type(location: str, value: Any, *error_types: str) -> ErrorReply:
    """Return the validation error for a field whose `value` has none of the allowed types.

    `location` is the path of the field, such as `body.messages`. pydantic reports a separate problem for each allowed
    type. `error_types` contains the error types of these problems, such as `list_type`.
    """
    return validation_error(*(_problem(location, error_type, value) for error_type in error_types))


def missing_fields(body: Mapping[str, Any], *names: str) -> ErrorReply:
    """Return the validation error for a body that lacks the required fields `names`.

    The error lists every one of these fields as missing.
    """
    return validation_error(*(_problem(f"body.{name}", "missing", body) for name in names))


def _problem(location: str, error_type: str, value: Any, **extra: Any) -> Problem:
    if isinstance(value, list | dict):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    else:
        shown = str(value)
        if len(shown) > _MAX_SHOWN_CHARACTERS:
            shown = f"{shown[:_MAX_SHOWN_CHARACTERS]}...[truncated]"
    return {"type": error_type, "loc": location, "msg": _MESSAGES[error_type], "input": shown, **extra}


def _schema_problems(body: Mapping[str, Any], *, chat: bool) -> list[Problem]:
    """Return the validation problems of a request body.

    The problems of integer fields come before those of other numbers and of flags. This differs from the real server,
    which lists the problems in the order of the fields in its schema.
    """
    problems = _message_problems(body) if chat else _prompt_problems("body.prompt", body.get("prompt"))
    # `logprobs` is a flag of a chat, and a number on /v1/completions.
    integers = [name for name in _INTEGERS if name != "logprobs" or not chat]
    flags = [name for name in _FLAGS if name != "logprobs" or chat]
    for names, check in ((integers, _integer_problems), (_NUMBERS, _number_problems), (flags, _flag_problems)):
        for name in names:
            if name not in body:
                continue
            if body[name] is not None or name in _NEVER_NULL or (name == "n" and not chat):
                problems += check(f"body.{name}", body[name])
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        problems.append(_problem("body.stream_options", "model_attributes_type", options))
    stop = body.get("stop") or []
    if isinstance(stop, list):
        for index, value in enumerate(stop):
            problems += _string_problems(f"body.stop.{index}", value)
    elif not isinstance(stop, str):
        problems += [_problem("body.stop", "string_type", stop), _problem("body.stop", "list_type", stop)]
    return problems


def _message_problems(body: Mapping[str, Any]) -> list[Problem]:
    if "messages" not in body:
        return [_problem("body.messages", "missing", body)]
    messages = body["messages"]
    if not isinstance(messages, list):
        return [_problem("body.messages", "list_type", messages)]
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return [_problem(f"body.messages.{index}", "dict_type", message)]
        if not isinstance(message.get("role"), str):
            return [_problem(f"body.messages.{index}.role", "missing", message)]
    return []


def _prompt_problems(location: str, prompt: Any) -> list[Problem]:
    """Return the validation problems of a prompt.

    A valid prompt has one of four types: a text, a list of texts, a list of token ids or a list of lists of token ids.
    For an invalid prompt, the result contains the problems of all four types, as in pydantic.
    """
    if prompt is None or isinstance(prompt, str):
        return []
    if not isinstance(prompt, list):
        types = ("list_type", "list_type", "string_type", "list_type")
        return [_problem(location, error_type, prompt) for error_type in types]
    if all(type(token) is int and token >= 0 for token in prompt):  # the usual case, also for long prompts
        return []
    as_ids: list[Problem] = []
    as_lists: list[Problem] = []
    as_texts: list[Problem] = []
    for index, item in enumerate(prompt):
        item_location = f"{location}.{index}"
        as_ids += _token_problems(item_location, item)
        if isinstance(item, list):
            for token_index, token in enumerate(item):
                as_lists += _token_problems(f"{item_location}.{token_index}", token)
        else:
            as_lists.append(_problem(item_location, "list_type", item))
        as_texts += _string_problems(item_location, item)
    if not (as_ids and as_lists and as_texts):
        return []
    return [*as_ids, *as_lists, _problem(location, "string_type", prompt), *as_texts]


def _token_problems(location: str, value: Any) -> list[Problem]:
    if type(value) is int and value < 0:
        return [_problem(location, "greater_than_equal", value, ctx={"ge": 0})]
    return _integer_problems(location, value)


def _string_problems(location: str, value: Any) -> list[Problem]:
    return [] if isinstance(value, str) else [_problem(location, "string_type", value)]


def _integer_problems(location: str, value: Any) -> list[Problem]:
    if protocol.integer(value) is not None or isinstance(value, bool):
        return []
    error_types = {str: "int_parsing", float: "int_from_float"}
    return [_problem(location, error_types.get(type(value), "int_type"), value)]


def _number_problems(location: str, value: Any) -> list[Problem]:
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return []
        return [_problem(location, "float_parsing", value)]
    return [] if isinstance(value, int | float) else [_problem(location, "float_type", value)]


def _flag_problems(location: str, value: Any) -> list[Problem]:
    if isinstance(value, str | int | float):
        return [] if value in (0, 1, "0", "1", "true", "false") else [_problem(location, "bool_parsing", value)]
    return [_problem(location, "bool_type", value)]
