"""What a simulated vLLM refuses before it makes a token, in the words and the order of 0.32.0: what a body may say
(entrypoints/openai/*/protocol.py), its types, and the values of sampling (sampling_params.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from loadgen.servers.simulated import protocol, tokenizer
from loadgen.servers.simulated.protocol import ErrorReply
from loadgen.servers.simulated.state import ServerState

MAX_LOGPROBS, _MOST_PROMPTS = 20, 1024
# A text with more than so many characters per token of the context is refused unread (err_toolong_text).
_TOKEN_CHARACTERS = 9

_INTEGERS = ("logprobs", "max_tokens", "max_completion_tokens", "n", "seed", "top_k", "min_tokens", "prompt_logprobs")
_NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_p", "min_p", "repetition_penalty")
_FLAGS = ("echo", "logprobs", "stream", "ignore_eos", "include_stop_str_in_output", "return_token_ids")
_NEVER_NULL = ("min_tokens", "ignore_eos", "include_stop_str_in_output")

# Name, what is allowed, the words for the rest, and whether the parameter and its value stand behind them.
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
    """All that needs neither prompt nor engine."""
    if not chat:
        _check_prompt(body)
    else:
        _check_tools(body)
    _check_counts(body, chat=chat)
    if body.get("stream_options") and not body.get("stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if problems := _schema(body, chat=chat):
        raise validation_error(*problems)
    check_model(state, body)


def _check_counts(body: Mapping[str, Any], *, chat: bool) -> None:
    logprobs = "top_logprobs" if chat else "logprobs"
    for name in ("prompt_logprobs", logprobs):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise bad_request(f"`{name}` must be an integer.", name, value)
    if (prompt_logprobs := body.get("prompt_logprobs")) is not None:
        if body.get("stream") and (prompt_logprobs > 0 or prompt_logprobs == -1):
            raise bad_request("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if prompt_logprobs < 0 and prompt_logprobs != -1:
            raise bad_request("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", prompt_logprobs)
    if (top := body.get(logprobs)) is not None:
        if top < 0 and top != -1:
            raise bad_request(f"`{logprobs}` must be a positive value or -1.", logprobs, top)
        if chat and top and not body.get("logprobs"):
            raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", logprobs)


def _check_prompt(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > _MOST_PROMPTS and not all(type(token) is int for token in prompt):
        raise bad_request(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {_MOST_PROMPTS}. To increase this "
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
        why = "Either provide at least one tool or omit the field entirely."
        raise bad_request(f"`tools` must not be an empty array. {why}", "tools")
    if choice not in ("none", None):
        if body.get("tools") is None:
            raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if choice not in ("auto", "required") and not isinstance(choice, dict):
            kinds = 'Only named tools, "none", "auto" or "required" are supported.'
            raise bad_request(f"Invalid value for `tool_choice`: {choice}! {kinds}", "tool_choice")


def check_chat(state: ServerState, body: Mapping[str, Any]) -> None:
    """What has no parser, no template, or no pictures here."""
    choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
    if choice == "auto":
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if choice not in ("none", None):
        function = choice.get("function") if isinstance(choice, Mapping) else None
        named = function.get("name") if isinstance(function, Mapping) else None
        named = f'"{choice}"' if named is None else f'function "{named}"'
        raise bad_request(f"tool_choice={named} requires --tool-call-parser to be set")
    options = body.get("chat_template_kwargs")
    if body.get("chat_template") is not None or (isinstance(options, Mapping) and options.get("chat_template")):
        why = "Chat template is passed with request, but --trust-request-chat-template is not set."
        raise bad_request(f"{why} Refused request with untrusted chat template.")
    if not body["messages"]:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    contents = (each.get("content") for each in body["messages"])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    if any(isinstance(part, Mapping) and part.get("type", "text") != "text" for part in parts):
        raise bad_request(f"{state.config.model} is not a multimodal model")


def check_model(state: ServerState, body: Mapping[str, Any]) -> None:
    """Raises ErrorReply for a name that is not served."""
    if body.get("model") not in (None, state.config.model):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {state.config.model}."
        raise ErrorReply(protocol.openai_error(message, "NotFoundError", 404, "model"))


def check_sampling(body: Mapping[str, Any], asked: int) -> None:
    """`SamplingParams._verify_args`; `asked` is `max_tokens` after clamping."""
    for name, allows, words, named in _SAMPLING:
        value = protocol.number(body.get(name))
        if value is not None and not allows(value):
            shown = int(value) if name in _INTEGERS else value
            raise bad_request(words.format(shown), *((name, shown) if named else ()))
    if asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    minimum = protocol.integer(body.get("min_tokens")) or 0
    if minimum < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {minimum}.")
    if minimum > asked:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={asked}, got {minimum}.")
    if not all(stop_strings(body)):
        raise bad_request("stop cannot contain an empty string.")
    temperature, answers = protocol.number(body.get("temperature")), protocol.integer(body.get("n")) or 1
    if temperature is not None and temperature < 1e-5 and answers > 1:
        raise bad_request(f"n must be 1 when using greedy sampling, got {answers}.")


def check_engine(body: Mapping[str, Any], prompts: Iterable[Sequence[int]], logprobs: int | None) -> None:
    """What only the engine refuses: a stream has its 200 by then, and gets an event."""
    try:
        for ids in prompts:
            checked_ids(ids)
        _check_logprobs(logprobs)
        _check_logprobs(protocol.integer(body.get("prompt_logprobs")), "prompt", "prompt_logprobs")
    except ErrorReply as problem:
        if not body.get("stream"):
            raise
        raise ErrorReply(protocol.events_reply(problem.reply.body, b"[DONE]")) from None


def _check_logprobs(logprobs: int | None, of: str = "sample", name: str = "logprobs") -> None:
    logprobs = tokenizer.VOCABULARY_SIZE if logprobs == -1 else logprobs  # all of them
    if logprobs is not None and logprobs > MAX_LOGPROBS:
        why = f"Requested {of} logprobs of {logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise bad_request(why, name, logprobs)


def stop_strings(body: Mapping[str, Any]) -> Sequence[str]:
    """Strings at which the answer ends."""
    given = body.get("stop")
    return [given] if isinstance(given, str) else given if isinstance(given, list) else []


def requested_tokens(state: ServerState, asked: Any, default: int) -> int:
    """The limit on new tokens as asked; past the context it is refused before the prompt is looked at."""
    tokens = default if (given := protocol.integer(asked)) is None else given
    if tokens > state.max_model_len:
        why = f"max_tokens={tokens} cannot be greater than max_model_len={state.max_model_len}."
        why += " Please request fewer output tokens."
        raise bad_request(why, "max_tokens", tokens)
    return tokens


def prompt_ids(state: ServerState, prompt: Any, *, add_bos: bool) -> Sequence[int]:
    """A text, or token ids as they are."""
    longest = state.max_model_len
    limit = f"This model's maximum context length is {longest} tokens. However, your prompt contains "
    ending = "Please reduce the length of the input prompt."
    if isinstance(prompt, str):
        maximum = _TOKEN_CHARACTERS * longest
        if len(prompt) > maximum:
            bound = f"(more than {maximum} characters, which is the upper bound for {longest} input tokens)"
            raise bad_request(f"{limit}{len(prompt)} characters {bound}. {ending}", "input_text", len(prompt))
        ids: Sequence[int] = [tokenizer.BOS_ID] * bool(add_bos) + tokenizer.encode(prompt)
    else:
        ids = prompt if isinstance(prompt, list) else [prompt]
    if not ids:
        raise bad_request("The decoder prompt cannot be empty")
    if len(ids) >= longest:
        why = "which exceeds this limit even without any output tokens."
        raise bad_request(f"{limit}{len(ids)} input tokens, {why} {ending}", "input_tokens", len(ids))
    return ids


def checked_ids(prompt: Sequence[int]) -> Sequence[int]:
    """Token ids of the vocabulary, or ErrorReply."""
    outside = next(
        (token for token in prompt if type(token) is not int or not 0 <= token < tokenizer.VOCABULARY_SIZE), None
    )
    if outside is not None:
        raise bad_request(f"Token id {outside} is out of vocabulary")
    return prompt


def bad_request(message: str, parameter: str | None = None, value: Any = None) -> ErrorReply:
    """The parameter stands behind the message, and the value where that is at fault."""
    shown = f"parameter={parameter}" if value is None else f"parameter={parameter}, value={value}"
    return request_error(f"{message} ({shown})" if parameter else message, parameter)


def request_error(message: str, parameter: str | None) -> ErrorReply:
    """With nothing behind the message."""
    return ErrorReply(protocol.openai_error(message, "BadRequestError", 400, parameter))


# What pydantic says about a body that does not fit the schema.

_MOST_PROBLEMS, _MOST_CHARACTERS = 10, 200
_KINDS = {
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
    """The first of them by name."""
    what, more = f"validation error{'s' * (len(problems) > 1)}", len(problems) - _MOST_PROBLEMS
    said = "\n".join([f"{len(problems)} {what}:", *(f"  {problem}" for problem in problems[:_MOST_PROBLEMS])])
    said += f"\n  ...and {more} more errors" if more > 0 else ""
    return ErrorReply(protocol.openai_error(said, "Bad Request", 400, problems[0]["loc"]))


def missing_fields(body: Mapping[str, Any], *names: str) -> ErrorReply:
    """Fields of which one has to be there."""
    return validation_error(*(_problem(f"body.{name}", "missing", body) for name in names))


def _problem(where: str, kind: str, value: Any, **more: Any) -> Problem:
    if isinstance(value, list | dict):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    else:
        shown = str(value)
        shown = f"{shown[:_MOST_CHARACTERS]}...[truncated]" if len(shown) > _MOST_CHARACTERS else shown
    return {"type": kind, "loc": where, "msg": _KINDS[kind], "input": shown, **more}


def _schema(body: Mapping[str, Any], *, chat: bool) -> list[Problem]:
    """In the order of kinds, where pydantic has that of its fields."""
    result = _messages(body) if chat else _prompts("body.prompt", body.get("prompt"))
    integers = [name for name in _INTEGERS if name != "logprobs" or not chat]
    flags = [name for name in _FLAGS if name != "logprobs" or chat]
    for names, check in ((integers, _integer), (_NUMBERS, _number), (flags, _flag)):
        for name in (name for name in names if name in body):
            if body[name] is not None or name in _NEVER_NULL or (name == "n" and not chat):
                result += check(f"body.{name}", body[name])
    if not isinstance(options := body.get("stream_options") or {}, Mapping):
        result.append(_problem("body.stream_options", "model_attributes_type", options))
    stop = body.get("stop") or []
    if isinstance(stop, list):
        result += [each for index, value in enumerate(stop) for each in _string(f"body.stop.{index}", value)]
    elif not isinstance(stop, str):
        result += [_problem("body.stop", "string_type", stop), _problem("body.stop", "list_type", stop)]
    return result


def _messages(body: Mapping[str, Any]) -> list[Problem]:
    if "messages" not in body:
        return [_problem("body.messages", "missing", body)]
    if not isinstance(messages := body["messages"], list):
        return [_problem("body.messages", "list_type", messages)]
    for index, each in enumerate(messages):
        if not isinstance(each, Mapping):
            return [_problem(f"body.messages.{index}", "dict_type", each)]
        if not isinstance(each.get("role"), str):
            return [_problem(f"body.messages.{index}.role", "missing", each)]
    return []


def _prompts(where: str, prompt: Any) -> list[Problem]:
    """A prompt is ids, a list of ids, a text or a list of texts; what is none of them is refused as each of them."""
    if prompt is None or isinstance(prompt, str):
        return []
    if not isinstance(prompt, list):
        return [_problem(where, kind, prompt) for kind in ("list_type", "list_type", "string_type", "list_type")]
    if all(type(each) is int and each >= 0 for each in prompt):  # most prompts, and long ones
        return []
    ids, many, texts = list[Problem](), list[Problem](), list[Problem]()
    for index, each in enumerate(prompt):
        at = f"{where}.{index}"
        ids += _token(at, each)
        if isinstance(each, list):
            many += [result for spot, token in enumerate(each) for result in _token(f"{at}.{spot}", token)]
        else:
            many.append(_problem(at, "list_type", each))
        texts += _string(at, each)
    return [*ids, *many, _problem(where, "string_type", prompt), *texts] if ids and many and texts else []


def _token(where: str, value: Any) -> list[Problem]:
    if type(value) is int and value < 0:
        return [_problem(where, "greater_than_equal", value, ctx={"ge": 0})]
    return _integer(where, value)


def _string(where: str, value: Any) -> list[Problem]:
    return [] if isinstance(value, str) else [_problem(where, "string_type", value)]


def _integer(where: str, value: Any) -> list[Problem]:
    if protocol.integer(value) is not None or isinstance(value, bool):
        return []
    kinds = {str: "int_parsing", float: "int_from_float"}
    return [_problem(where, kinds.get(type(value), "int_type"), value)]


def _number(where: str, value: Any) -> list[Problem]:
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return []
        return [_problem(where, "float_parsing", value)]
    return [] if isinstance(value, int | float) else [_problem(where, "float_type", value)]


def _flag(where: str, value: Any) -> list[Problem]:
    if isinstance(value, str | int | float):
        return [] if value in (0, 1, "0", "1", "true", "false") else [_problem(where, "bool_parsing", value)]
    return [_problem(where, "bool_type", value)]
