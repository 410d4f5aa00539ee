"""Divides the answer of a simulated server into segments: reasoning, text and a tool call.

If the server was started with `--reasoning-tokens`, an answer begins with reasoning. If it was started with
`--structured`, the answer also depends on the request:

- A request with tools gets a call of the first permitted tool.
- Any other request with a JSON schema gets JSON that fits the schema.

The tools and the schema are read from the fields that the chat, Responses and Messages APIs of vLLM and SGLang use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.simulated import grammar, protocol, tokenizer
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, ErrorReply, Segment
from loadgen.servers.simulated.state import ServerState

SCHEMA_FAULTS = ("invalid-json", "wrong-json")
"""Faults of answers that follow a schema: JSON without its last character, and JSON that does not fit the schema."""
WRONG_JSON = '{"unexpected": null}'


class AnswerPiece(NamedTuple):
    """The part of a stream event that belongs to one segment of the answer.

    A segment is the reasoning, the text or the tool call of an answer. One event can contain the end of the reasoning
    and the beginning of the text, for example.
    """

    segment: Segment
    segment_index: int
    """Index of the segment in the answer."""
    text: bytes
    """Text of the piece, escaped for a JSON string."""
    begins: bool
    """True if the piece contains the first token of the segment."""
    ends: bool
    """True if the piece contains the last token of the segment."""


def complete(
    state: ServerState,
    request: CompletionRequest,
    prompt_tokens: int,
    limit: int,
    answer: int = 0,
) -> Completion:
    """Generate an answer with at most `limit` tokens, and divide it into segments, such as reasoning and text.

    `answer` is the index of the answer if the request has several answers. If the answer consists only of text, it is
    not divided, and `segments` is empty. Raises ErrorReply for a request that cannot be answered.
    """
    plain = state.complete(request, prompt_tokens, limit, "stop", answer)
    reasoning = min(state.config.reasoning_tokens, plain.output_tokens)
    kind, name, text = _structure(state, request)
    if not kind:
        if not reasoning:
            return plain
        return replace(plain, segments=_segments(reasoning, plain.output_tokens, "text", ""))
    ids, texts = encoded(text)
    if kind == "tool_call":  # the name of the tool is one token, which is no part of the arguments
        ids, texts = [*ids[:1], *ids], [b"", *texts]
    ends_by_itself = reasoning + len(ids) <= limit
    limit = min(limit, request.stop_after or limit)
    ids = [*plain.ids[:reasoning], *ids][:limit]
    texts = [*plain.texts[:reasoning], *texts][:limit]
    reason = "length"
    if ends_by_itself:
        reason = "tool_calls" if kind == "tool_call" else "stop"
    segments = _segments(reasoning, len(ids), kind, name)
    return replace(plain, ids=ids, texts=texts, finish_reason=reason, segments=segments)


def pieces(completion: Completion, first: int, tokens: int) -> Iterator[AnswerPiece]:
    """Yield the pieces of one event. A piece is the part of the event that belongs to one segment of the answer.

    The event contains `tokens` tokens of the answer `completion`, beginning with the token at index `first`. A segment
    is, for example, the reasoning.
    """
    start = 0
    for index, segment in enumerate(completion.segments):
        begin, end = max(start, first), min(segment.end, first + tokens)
        if begin < end:
            text = b"".join(completion.texts[begin:end])
            yield AnswerPiece(segment, index, text, begin == start, end == segment.end)
        start = segment.end


def whole_segments(completion: Completion) -> list[tuple[Segment, str]]:
    """Return the segments of an answer with their texts, for a response that is not streamed."""
    parts = pieces(completion, 0, completion.output_tokens)
    return [(part.segment, unescaped(part.text)) for part in parts]


def unescaped(text: bytes) -> str:
    """Decode the escape sequences of JSON in a text, and return the plain text."""
    decoded: str = msgspec.json.decode(b'"%b"' % text)
    return decoded


def reasoning_tokens(completion: Completion) -> int:
    """Return the number of reasoning tokens of an answer."""
    return sum(segment.end for segment in completion.segments[:1] if segment.kind == "reasoning")


def encoded(text: str) -> tuple[list[int], list[bytes]]:
    """Return the token ids of a text, and a list with the text of each token, escaped for a JSON string.

    A character may consist of several tokens. The last of these tokens then gets the character, and the others get an
    empty text.
    """
    ids = tokenizer.encode(text)
    texts = []
    pending = b""
    for token in ids:
        pending += tokenizer.pieces()[token]
        try:
            texts.append(protocol.dumps(pending.decode())[1:-1])
            pending = b""
        except UnicodeDecodeError:
            texts.append(b"")
    return ids, texts


def _segments(reasoning: int, end: int, kind: Literal["text", "tool_call"], name: str) -> tuple[Segment, ...]:
    result = [Segment("reasoning", reasoning)] if reasoning else []
    return (*result, Segment(kind, end, name)) if end > reasoning else tuple(result)


def _structure(state: ServerState, request: CompletionRequest) -> tuple[Literal["", "text", "tool_call"], str, str]:
    """Return the structured part of an answer as (kind, name of the tool, text).

    The kind is empty if the request asks for no structure, or if the server was not started with `--structured`.
    """
    if not state.config.structured:
        return "", "", ""
    word = tokenizer.decode(state.vocabulary.ids[:1]).strip()
    tool = _permitted_tool(request.body)
    if tool is not None:
        name, schema = tool
        return "tool_call", name, _json_text(schema, word, request.fault)
    found = _schema_of(request.body)
    return ("", "", "") if found is None else ("text", "", _json_text(found, word, request.fault))


def _json_text(schema: Any, word: str, fault: str) -> str:
    """Return a JSON document that fits the schema.

    If `fault` is `invalid-json`, the last character of the document is missing. If `fault` is `wrong-json`, the
    document does not fit the schema. Raises ErrorReply if the server does not support the schema.
    """
    if fault == "wrong-json":
        return WRONG_JSON
    try:
        document = json.loads(grammar.json_text(schema, word)) if isinstance(schema, Mapping) and schema else {}
    except grammar.GrammarError as problem:
        raise ErrorReply(protocol.openai_error(str(problem), "BadRequestError", 400)) from None
    text = json.dumps(document, ensure_ascii=False)
    return text[:-1] if fault == "invalid-json" else text


def _permitted_tool(body: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the name and the parameter schema of the tool that the model calls, or None if it may not call a tool."""
    choice = body.get("tool_choice")
    tools = body.get("tools")
    if choice in ("none", {"type": "none"}) or not isinstance(tools, list):
        return None
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    chosen = _chosen_name(choice)
    for function in functions:
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and chosen in (None, name):
            return name, function.get("parameters", function.get("input_schema"))
    return None


def _chosen_name(choice: Any) -> str | None:
    """Return the name of the tool that the field `tool_choice` requires, or None if it requires no specific tool."""
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    return name if isinstance(name, str) else None


def _schema_of(body: Mapping[str, Any]) -> Any:
    """Return the JSON schema to which a request restricts the answer, or None if the answer may be any text.

    Return `{}` if the request allows any JSON object.
    """
    response_format = _object(body.get("response_format")) or _object(_object(body.get("text")).get("format"))
    response_format = response_format or _object(_object(body.get("output_config")).get("format"))
    kind = response_format.get("type")
    if kind == "json_object":
        return {}
    if kind == "json_schema":
        return _object(response_format.get("json_schema")).get("schema") or response_format.get("schema") or {}
    schema = body.get("guided_json") or _object(body.get("structured_outputs")).get("json")
    if isinstance(schema, str):
        try:
            return msgspec.json.decode(schema)
        except DECODE_ERRORS:
            return {}
    return schema


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def openai_delta(completion: Completion, first: int, tokens: int, reasoning_field: bytes, call_id: str) -> bytes:
    """Return the field `delta` of a chat event with `tokens` tokens, from token `first` on.

    `reasoning_field` is the name of the field that contains reasoning.
    """
    parts = []
    for piece in pieces(completion, first, tokens):
        if piece.segment.kind == "reasoning":
            parts.append(b'"%b":"%b"' % (reasoning_field, piece.text))
        elif piece.segment.kind == "text":
            parts.append(b'"content":"%b"' % piece.text)
        else:
            named = protocol.dumps({"id": call_id, "type": "function", "index": 0})[:-1] if piece.begins else b""
            name = b'"name":%b,' % protocol.dumps(piece.segment.name) if piece.begins else b""
            start = named or b'{"index":0'
            parts.append(b'"tool_calls":[%b,"function":{%b"arguments":"%b"}}]' % (start, name, piece.text))
    return b'"delta":{%b}' % b",".join(parts)


def openai_message(completion: Completion, reasoning_field: str, call_id: str) -> dict[str, Any]:
    """Return the message of a non-streamed chat response: its reasoning, content and tool calls.

    `reasoning_field` is the name of the field with the reasoning.
    """
    message: dict[str, Any] = {"content": None}
    for segment, text in whole_segments(completion):
        if segment.kind == "reasoning":
            message[reasoning_field] = text
        elif segment.kind == "text":
            message["content"] = text
        else:
            function = {"name": segment.name, "arguments": text}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message


def call_ids(request: CompletionRequest) -> str:
    """Return the id of the tool call in the response to `request`. A simulated response has at most one tool call."""
    return f"call_{request.index:024x}"
