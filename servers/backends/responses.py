"""The Responses API of OpenAI: `/v1/responses` of any server that implements it.

A response is a stream of named events. Each event repeats its name in the field `type`:

    response.created, response.in_progress           The server has accepted the request.
    response.output_item.added                       A message, a reasoning item or a tool call begins.
    response.output_text.delta                       Text of the answer, in the field `delta`.
    response.reasoning_text.delta                    Text of the reasoning.
    response.function_call_arguments.delta           Arguments of a tool call.
    response.output_text.done, ...                   Text that was already streamed, in one piece.
    response.completed, .incomplete, .failed         The end, with the response's status and usage.

A summary of the reasoning (`response.reasoning_summary_text.delta`) is not counted as tokens, because the model does
not generate its words one by one, and the server does not count them. The reasoning behind a summary is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.dialect import REFUSABLE, Answer, Dialect, Encode, Route, TokenCount, encode_body
from loadgen.servers.backends.stream_events import decode_events, note_finish
from loadgen.servers.backends.tool_calls import responses_calls
from loadgen.servers.backends.typed_events import (
    GeneratedPiece,
    Totals,
    answer_text,
    build_answer,
    finish_answer,
    without_fields,
)
from loadgen.workloads.request import Request

PATH = "/v1/responses"
FINAL_TYPES = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
FINISH_REASONS = {"completed": "stop", "max_output_tokens": "length"}
"""Statuses and reasons of this API, with the finish reason that the chat endpoint has for them."""
_REASONING_TYPES = ("response.reasoning_text.delta", "response.reasoning.delta")
_ANSWER_TYPES = ("response.output_text.delta", "response.refusal.delta")
_SUMMARY_TYPES = ("response.reasoning_summary_text.delta", "response.reasoning_summary.delta")
_NO_TEXT_TYPES = (*_SUMMARY_TYPES, "response.audio.delta")


class CachedTokens(msgspec.Struct, gc=False):
    """The object `input_tokens_details` within `usage`."""

    cached_tokens: TokenCount | None = None


class ReasoningTokens(msgspec.Struct, gc=False):
    """The object `output_tokens_details` within `usage`."""

    reasoning_tokens: TokenCount | None = None


class ResponsesUsage(msgspec.Struct, gc=False):
    """The `usage` object of a response. `output_tokens` includes reasoning."""

    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    input_tokens_details: CachedTokens | None = None
    output_tokens_details: ReasoningTokens | None = None

    @property
    def totals(self) -> Totals:
        """The token counts in this usage object."""
        reasoning = self.output_tokens_details.reasoning_tokens if self.output_tokens_details else None
        cached = self.input_tokens_details.cached_tokens if self.input_tokens_details else None
        return Totals(self.input_tokens, self.output_tokens, reasoning, cached)


class IncompleteDetails(msgspec.Struct, gc=False):
    """The reason why a response is incomplete, such as `max_output_tokens` or `content_filter`."""

    reason: str | None = None


class ResponseObject(msgspec.Struct, gc=False):
    """The object `response` in the first and last events of a stream."""

    status: str | None = None
    usage: ResponsesUsage | None = None
    incomplete_details: IncompleteDetails | None = None


class OutputItem(msgspec.Struct, gc=False):
    """One item in the output of a response, for example a message or a tool call.

    `name` is the name of the called tool, which counts as generated text. Items that are no tool calls have no name.
    """

    type: str | None = None
    name: str | None = None


class ResponsesEvent(msgspec.Struct, gc=False):
    """A stream event, with the fields that loadgen reads."""

    type: str | None = None
    delta: Any = None
    item: OutputItem | None = None
    response: ResponseObject | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(ResponsesEvent)


def decode(payloads: Sequence[bytes]) -> Answer:
    """Decode the events of a stream of the Responses API into an Answer.

    Some servers end every stream with `response.completed`, so the status inside the event decides how the response
    ended."""
    events, broken = _read_events(payloads)
    pieces = [*map(_piece, events)]
    final = next((index for index, event in enumerate(events) if event.type in FINAL_TYPES), None)
    response = None if final is None else events[final].response
    totals = response.usage.totals if response and response.usage else Totals()
    answer = build_answer(payloads, pieces, totals)
    answer.end_event = final
    if final is not None:
        note_finish(answer, _finish_reason(events[final]), payloads[final])
    return finish_answer(answer, pieces, totals, broken)


def text(payloads: Sequence[bytes]) -> str:
    """Return the text of a response, without reasoning and tool calls."""
    return answer_text([*map(_piece, _read_events(payloads)[0])])


def responses_dialect(server: str, extra_fields: Callable[[Request], dict[str, Any]], **others: Any) -> Dialect:
    """Return the dialect (the request and response format) of a server's Responses API.

    Requests contain the standard fields and those that `extra_fields` returns. `others` are further fields of
    Dialect."""

    def request_form(dropped: tuple[str, ...], test_tokens: int) -> tuple[Encode, Route[int]]:
        def one_token(prompt: str, model: str) -> dict[str, Any]:
            fields = {"model": model, "input": prompt, "max_output_tokens": test_tokens, "temperature": 0}
            return without_fields(fields | {"store": False}, dropped)

        def encode(request: Request, model: str) -> bytes:
            fields = _standard_fields(request, model) | extra_fields(request)
            return encode_body(without_fields(fields, dropped), request)

        return encode, Route(PATH, one_token, lambda answer: int(answer["usage"]["input_tokens"]), generates=True)

    encode, counting = request_form((), 1)
    used = msgspec.json.decode(encode(Request(0, "", 0, 1), ""))
    return Dialect(
        server,
        "responses",
        PATH,
        encode=encode,
        decode=decode,
        text=text,
        calls=responses_calls,
        count_by_running=counting,
        fixed_output=True,
        refusable_fields=tuple(field for field in REFUSABLE if field in used),
        request_form=request_form,
        chat=True,
        **others,
    )


def _standard_fields(request: Request, model: str) -> dict[str, Any]:
    """Return the standard fields of the request body, for a stream of at most `request.output_tokens` tokens.

    `model` is the name of the model. The field `store` is False, because otherwise the server would store every
    response, and a load test would fill its storage.
    """
    assert isinstance(request.prompt, str), "the Responses API accepts only text"
    if "messages" in request.body:
        raise ValueError("the Responses API has another form of messages with tool calls: use --endpoint chat")
    input_: str | list[dict[str, Any]] = request.prompt
    if request.messages or request.images:
        history = request.messages or (("user", request.prompt),)
        input_ = [{"role": role, "content": content} for role, content in history]
    if request.images and isinstance(input_, list):
        images = ({"type": "input_image", "image_url": str(image)} for image in request.images)
        input_[-1]["content"] = [{"type": "input_text", "text": request.prompt}, *images]
    limits = {"max_output_tokens": request.output_tokens, "temperature": 0.0}
    return {"model": model, "input": input_, **limits, "store": False, "stream": True}


def _read_events(payloads: Sequence[bytes]) -> tuple[list[ResponsesEvent], str]:
    """Decode one event per payload, up to the first event that cannot be read.

    Return the decoded events, and a description of the unreadable event ("" if all events are readable). An event with
    a part of the answer must have a text in `delta`. Otherwise, it counts as unreadable.
    """
    events, broken = decode_events(payloads, _EVENTS)
    for index, event in enumerate(events):
        if event.type in _ANSWER_TYPES and not isinstance(event.delta, str):
            return events[
                :index
            ], f"event {index} is not of this dialect (`delta` is not text): {payloads[index][:100]!r}"
    return events, broken


def _piece(event: ResponsesEvent) -> GeneratedPiece | None:
    """Return the generated content of an event, or None if the event has no generated content."""
    type_ = event.type or ""
    if event.error:
        return None
    if type_ == "response.output_item.added" and event.item and event.item.name:
        return GeneratedPiece(event.item.name, tool_call=True)
    if not type_.endswith(".delta") or type_ in _NO_TEXT_TYPES:
        return None
    delta = event.delta if isinstance(event.delta, str) else msgspec.json.encode(event.delta).decode()
    is_reasoning = type_ in _REASONING_TYPES
    return GeneratedPiece(delta, reasoning=is_reasoning, tool_call=not is_reasoning and type_ not in _ANSWER_TYPES)


def _finish_reason(event: ResponsesEvent) -> str:
    """Return the finish reason of the last event.

    If the chat endpoint has a word for this reason, the result is that word: `length`, `stop` or `content_filter`."""
    response = event.response or ResponseObject()
    ending = (event.type or "").removeprefix("response.")
    status = ending if ending in ("failed", "cancelled") else response.status or ending
    if status == "incomplete":
        status = (response.incomplete_details and response.incomplete_details.reason) or status
    return FINISH_REASONS.get(status, status)
