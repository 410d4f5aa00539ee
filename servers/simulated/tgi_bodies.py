"""The types of TGI 3.3.7's request bodies (source: `router/src/lib.rs` of this version)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.servers.simulated.serde import (
    BodyError,
    Boolean,
    JsonType,
    ListOf,
    Number,
    Optional,
    Reader,
    Struct,
    Text,
    Untagged,
)

GRAMMARS = ("json", "json_object", "json_schema", "regex")


@dataclass(frozen=True, slots=True)
class Grammar:
    """The router's type `GrammarType`: an object with a `type`, and a `value` whose type depends on `type`."""

    def accepts(self, value: Any) -> bool:
        return not _grammar_problem(value)

    def read(self, reader: Reader) -> Any:
        if reader.peek() != b"{":
            raise reader.wrong_type("adjacently tagged enum GrammarType")
        value = reader.any()
        problem = _grammar_problem(value)
        if problem:
            raise reader.with_position(BodyError(problem))
        return value


def _grammar_problem(value: Any) -> str:
    if not isinstance(value, dict):
        return "invalid type"
    for name in ("type", "value"):
        if name not in value:
            return f"missing field `{name}`"
    grammar_type = value["type"]
    content = value["value"]
    if grammar_type not in GRAMMARS:
        return f"unknown variant `{grammar_type}`, expected one of {', '.join(f'`{name}`' for name in GRAMMARS)}"
    if grammar_type == "regex" and not isinstance(content, str):
        return "invalid type, expected a string"
    if grammar_type == "json_schema" and not (isinstance(content, dict) and "schema" in content):
        return "missing field `schema`"
    return ""


def _message_problem(message: Mapping[str, Any]) -> str:
    """Return the error message for an invalid chat message, or an empty string if the message is valid.

    A valid message contains a text, a list of content parts, or tool calls.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [None]
    if isinstance(content, str) or all(map(_PART.accepts, parts)) or _CALLS.accepts(message.get("tool_calls")):
        return ""
    return "data did not match any variant of untagged enum MessageBody"


def _prompt_problem(prompt: Any) -> str:
    return "Empty array detected. Do not use an empty array for the prompt." if prompt == [] else ""


def _part_problem(part: Mapping[str, Any]) -> str:
    valid_types = {"text": Text().accepts(part.get("text")), "image_url": _URL.accepts(part.get("image_url"))}
    return "" if valid_types.get(str(part["type"])) else "unknown part"


def _choice_problem(choice: Mapping[str, Any]) -> str:
    return "" if choice["type"] == "function" else "unknown type"


_U32 = Optional(Number("u32"))
_U64 = Optional(Number("u64"))
_USIZE = Optional(Number("usize"))
_F32 = Optional(Number("f32"))
_URL = Struct("Url", {"url": Text()}, ("url",))
_PART = Struct("MessageChunk", {"type": Text()}, ("type",), check=_part_problem)
_FUNCTION = Struct(
    "FunctionDefinition",
    {"description": Optional(Text()), "name": Text()},
    ("name", "arguments"),
    aliases={"parameters": "arguments"},
)
_CALL = Struct("ToolCall", {"id": Text(), "type": Text(), "function": _FUNCTION}, ("id", "type", "function"))
_CALLS = ListOf(_CALL)
_TOOL = Struct("Tool", {"type": Text(), "function": _FUNCTION}, ("type", "function"))
_MESSAGE = Struct("Message", {"role": Text(), "name": Optional(Text())}, ("role",), check=_message_problem)
_NAMED = Struct("FunctionName", {"name": Text()}, ("name",))
_CHOICE = Struct("TypedChoice", {"type": Text(), "function": _NAMED}, ("type", "function"), check=_choice_problem)

_PARAMETERS = Struct(
    "GenerateParameters",
    {
        "best_of": _USIZE,
        "temperature": _F32,
        "repetition_penalty": _F32,
        "frequency_penalty": _F32,
        "top_k": Optional(Number("i32")),
        "top_p": _F32,
        "typical_p": _F32,
        "do_sample": Boolean(),
        "max_new_tokens": _U32,
        "return_full_text": Optional(Boolean()),
        "stop": ListOf(Text()),
        "truncate": _USIZE,
        "watermark": Boolean(),
        "details": Boolean(),
        "decoder_input_details": Boolean(),
        "seed": _U64,
        "top_n_tokens": _U32,
        "grammar": Optional(Grammar()),
        "adapter_id": Optional(Text()),
    },
)
GENERATE = Struct("GenerateRequest", {"inputs": Text(), "parameters": _PARAMETERS}, ("inputs",))
COMPAT = Struct(
    "CompatGenerateRequest", {"inputs": Text(), "parameters": _PARAMETERS, "stream": Boolean()}, ("inputs",)
)
_OPENAI: Mapping[str, JsonType] = {
    "model": Optional(Text()),
    "max_tokens": _U32,
    "temperature": _F32,
    "top_p": _F32,
    "stream": Boolean(),
    "seed": _U64,
    "frequency_penalty": _F32,
    "stop": Optional(ListOf(Text())),
}
COMPLETION = Struct(
    "CompletionRequest",
    {
        **_OPENAI,
        "prompt": Untagged("PromptDeserializer", (Text(), ListOf(Text())), _prompt_problem),
        "suffix": Optional(Text()),
        "repetition_penalty": _F32,
    },
    ("prompt",),
)
CHAT = Struct(
    "ChatRequest",
    {
        **_OPENAI,
        "messages": ListOf(_MESSAGE),
        "logit_bias": Optional(ListOf(Number("f32"))),
        "logprobs": Optional(Boolean()),
        "top_logprobs": _U32,
        "n": _U32,
        "presence_penalty": _F32,
        "tools": Optional(ListOf(_TOOL)),
        "tool_prompt": Optional(Text()),
        "tool_choice": Optional(Untagged("ToolTypeDeserializer", (Text(), _CHOICE))),
        "response_format": Optional(Grammar()),
        "stream_options": Struct("StreamOptions", {"include_usage": Boolean()}),
    },
    ("messages",),
    aliases={"max_completion_tokens": "max_tokens"},
)
ROUTES: Mapping[str, Struct] = {
    "/": COMPAT,
    "/generate": GENERATE,
    "/generate_stream": GENERATE,
    "/tokenize": GENERATE,
    "/chat_tokenize": CHAT,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
}
