"""The Messages API of Anthropic: `/v1/messages` of any server that implements it.

A response is a stream of named events. Each event repeats its name in the field `type`:

    message_start           The response begins. `usage` has the length of the prompt.
    content_block_start     A block of text, thinking or a tool call begins.
    content_block_delta     Content of the block: text, thinking, or a part of the tool's JSON input.
    content_block_stop      The block has ended.
    message_delta           The stop reason. `usage` has the number of generated tokens.
    message_stop            The end of the response.
    ping, error             A heartbeat, and an error of the server.

The API key is sent as `x-api-key`. The header `anthropic-version` names the version of the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.dialect import REFUSABLE, Answer, Dialect, Encode, Route, TokenCount, encode_body
from loadgen.servers.backends.stream_events import decode_events, note_finish
from loadgen.servers.backends.tool_calls import messages_calls
from loadgen.servers.backends.typed_events import (
    GeneratedPiece,
    Totals,
    answer_text,
    build_answer,
    finish_answer,
    without_fields,
)
from loadgen.workloads.request import Request

PATH = "/v1/messages"
VERSION_HEADER = {"anthropic-version": "2023-06-01"}
"""Version of the protocol. Anthropic's server refuses a request without it."""
FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "refusal": "content_filter"}
"""Stop reasons of this API, with the finish reason that the chat endpoint has for them."""
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)


class MessagesUsage(msgspec.Struct, gc=False):
    """A `usage` object. `input_tokens` excludes the prompt tokens that were read from or written to the cache."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    cache_read_input_tokens: TokenCount | None = None
    cache_creation_input_tokens: TokenCount | None = None


class StartedMessage(msgspec.Struct, gc=False):
    """The object `message` in the event that begins a stream."""

    usage: MessagesUsage | None = None


class ContentBlock(msgspec.Struct, gc=False):
    """The content block of a `content_block_start` event: the beginning of a text, of reasoning or of a tool call.

    For a tool call, `name` is the name of the tool. The model generated this name, so the name counts as content.
    """

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    name: str | None = None


class BlockDelta(msgspec.Struct, gc=False):
    """New content of a block, or the stop reason of the response."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class MessagesEvent(msgspec.Struct, gc=False):
    """A stream event, with the fields that loadgen reads."""

    type: str | None = None
    message: StartedMessage | None = None
    content_block: ContentBlock | None = None
    delta: BlockDelta | None = None
    usage: MessagesUsage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(MessagesEvent)


def bearer_headers(key: str | None) -> dict[str, str]:
    """Return the headers for a server that takes the API key as a bearer token on every route."""
    return VERSION_HEADER | ({"Authorization": f"Bearer {key}"} if key else {})


def api_key_headers(key: str | None) -> dict[str, str]:
    """Return the headers of Anthropic's protocol: its version, and the API key if there is one."""
    return VERSION_HEADER | ({"x-api-key": key} if key else {})


def decode(payloads: Sequence[bytes]) -> Answer:
    """Decode the events of a stream of the Messages API into an Answer."""
    events, broken = _read_events(payloads)
    pieces = [*map(_piece, events)]
    totals = _totals(events)
    answer = build_answer(payloads, pieces, totals)
    answer.end_event = next((index for index, event in enumerate(events) if event.type == "message_stop"), None)
    for index, event in enumerate(events):
        if event.type == "message_delta" and event.delta and event.delta.stop_reason:
            reason = event.delta.stop_reason
            note_finish(answer, FINISH_REASONS.get(reason, reason), payloads[index])
    return finish_answer(answer, pieces, totals, broken)


def text(payloads: Sequence[bytes]) -> str:
    """Return the text of a response, without thinking and tool calls."""
    return answer_text([*map(_piece, _read_events(payloads)[0])])


def messages_dialect(server: str, **others: Any) -> Dialect:
    """Return the dialect (the request and response format) of a server's Messages API.

    `others` sets further fields of the Dialect.
    """

    def request_form(dropped: tuple[str, ...], test_tokens: int) -> tuple[Encode, Route[int]]:
        def one_token(prompt: str, model: str) -> dict[str, Any]:
            messages = [{"role": "user", "content": prompt}]
            fields = {"model": model, "messages": messages, "max_tokens": test_tokens, "temperature": 0}
            return without_fields(fields, dropped)

        def encode(request: Request, model: str) -> bytes:
            return encode_body(without_fields(_standard_fields(request, model), dropped), request)

        return encode, Route(PATH, one_token, _prompt_tokens_of_response, generates=True)

    encode, counting = request_form((), 1)
    used = msgspec.json.decode(encode(Request(0, "", 0, 1), ""))
    return Dialect(
        server,
        "messages",
        PATH,
        encode=encode,
        decode=decode,
        text=text,
        calls=messages_calls,
        count_by_running=counting,
        fixed_output=True,
        refusable_fields=tuple(field for field in REFUSABLE if field in used and field != "max_tokens"),
        request_form=request_form,
        chat=True,
        **others,
    )


def _standard_fields(request: Request, model: str) -> dict[str, Any]:
    """Return the fields of a request for a stream of at most `request.output_tokens` tokens.

    System messages of a chat become the field `system`, because a message can only have the role `user` or `assistant`.
    """
    assert isinstance(request.prompt, str), "the Messages API accepts only text"
    history = request.messages or (("user", request.prompt),)
    system = "\n\n".join(content for role, content in history if role == "system")
    messages: list[dict[str, Any]] = [
        {"role": role, "content": content} for role, content in history if role != "system"
    ]
    if request.images:
        images = ({"type": "image", "source": _image_source(str(image))} for image in request.images)
        messages[-1]["content"] = [{"type": "text", "text": request.prompt}, *images]
    fields = {"model": model, "messages": messages} | ({"system": system} if system else {})
    return {**fields, "max_tokens": request.output_tokens, "temperature": 0.0, "stream": True}


def _image_source(url: str) -> dict[str, str]:
    """Return the `source` of an image: the content of a data URL, or the URL."""
    data = _DATA_URL.fullmatch(url)
    if data:
        return {"type": "base64", "media_type": data[1], "data": data[2]}
    return {"type": "url", "url": url}


def _prompt_tokens_of_response(answer: Any) -> int:
    """Return the number of prompt tokens that a response states. The response was not streamed.

    Raises LookupError, TypeError or ValueError if the response does not state this number.
    """
    usage = answer["usage"]
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return int(usage["input_tokens"]) + int(cached)


def _read_events(payloads: Sequence[bytes]) -> tuple[list[MessagesEvent], str]:
    """Decode each of the `payloads` as an event. Return the events, and a description of the first unreadable event.

    The unreadable event and all later events are left out. If every event is readable, the description is "". A
    `content_block_delta` event is unreadable if its `delta` is not an object.
    """
    events, broken = decode_events(payloads, _EVENTS)
    for index, event in enumerate(events):
        if event.type == "content_block_delta" and event.delta is None:
            return events[:index], f"event {index} is not of this dialect (no `delta`): {payloads[index][:100]!r}"
    return events, broken


def _totals(events: Sequence[MessagesEvent]) -> Totals:
    """Return the token counts of a response, from `message_start` and `message_delta`.

    `message_start` has the prompt length, and the number of tokens that were generated so far. Counts in
    `message_delta` are totals, and replace those of `message_start`.
    """
    prompt = output = None
    cached: int | None = None
    written = 0
    for event in events:
        usage = event.usage
        if event.type == "message_start":
            usage = event.message.usage if event.message else None
        elif event.type != "message_delta":
            continue
        if usage is None:
            continue
        prompt = usage.input_tokens or prompt
        cached = cached if usage.cache_read_input_tokens is None else usage.cache_read_input_tokens
        written = written if usage.cache_creation_input_tokens is None else usage.cache_creation_input_tokens
        if event.type == "message_delta" and usage.output_tokens is not None:
            output = usage.output_tokens
    length = (prompt or 0) + (cached or 0) + written
    return Totals(prompt=length or None, output=output, cached=cached)


def _piece(event: MessagesEvent) -> GeneratedPiece | None:
    """Return the generated content of an event, or None if the event has no generated content."""
    if event.error:
        return None
    if event.type == "content_block_start" and event.content_block:
        return _first_piece(event.content_block)
    if event.type == "content_block_delta" and event.delta:
        return _next_piece(event.delta)
    return None


def _first_piece(block: ContentBlock) -> GeneratedPiece | None:
    """Return the content with which a block starts, or None if the block starts without content.

    Most blocks start without content. A tool call starts with the name of the tool.
    """
    if block.name:
        return GeneratedPiece(block.name, tool_call=True)
    content = block.thinking or block.text
    return GeneratedPiece(content, reasoning=bool(block.thinking)) if content else None


def _next_piece(delta: BlockDelta) -> GeneratedPiece | None:
    """Return the new content of a block, or None if there is none.

    The signature of a thinking block does not count as content.
    """
    if delta.thinking is not None:
        return GeneratedPiece(delta.thinking, reasoning=True)
    if delta.partial_json is not None:
        return GeneratedPiece(delta.partial_json, tool_call=True)
    return None if delta.text is None else GeneratedPiece(delta.text)
