"""Decoding steps that all dialects share: decoding payloads into typed events, and finishing an Answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.error_messages import error_in, error_inside, is_rejection, one_line
from loadgen.servers.backends.lenient import read
from loadgen.servers.errors import DECODE_ERRORS

Event = TypeVar("Event")

GAVE_UP = ("error", "abort", "fail", "cancel", "timeout", "exception", "insufficient_system_resource")
"""Parts of finish reasons which mean that the server aborted the response."""


def decode_events(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], number: int = 0
) -> tuple[list[Event], str]:
    """Decode one event per payload, up to the first unreadable event.

    Return the events and a description of the unreadable event ("" if there is none). If `decoder` refuses an event,
    the event is decoded leniently (see loadgen.servers.backends.lenient). `[DONE]` becomes an empty event, so that
    event i belongs to payload i. `number` is the index of the first payload in the whole response, which the
    description needs.
    """
    events: list[Event] = []
    try:
        events.extend(map(decoder.decode, payloads))  # if one raises, the events before it are kept
        return events, ""
    except DECODE_ERRORS as error:
        return _decode_leniently(payloads, decoder, events, number, error)


def _decode_leniently(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], events: list[Event], number: int, error: Exception
) -> tuple[list[Event], str]:
    """Decode the rest of a stream after the typed decoder has refused an event.

    The refused event is decoded leniently (see loadgen.servers.backends.lenient). `events` holds the events before it,
    and `error` is the decoder's error. `number` is the index of `payloads[0]` in the whole response.

    Return all events up to the first unreadable one, and a description of the unreadable event ("" if there is none).
    """
    remaining = islice(payloads, len(events) + 1, None)
    while True:
        payload = payloads[len(events)]
        event = read(payload, decoder.type)
        if event is None:
            later = payloads[len(events) + 1 :]
            message = error_inside(payload) or next(filter(None, map(error_in, later)), "")
            broken = f"event {number + len(events)} is not of this dialect ({error}): {payload[:100]!r}"
            return events, one_line(f"{message}; {broken}" if message else broken)
        events.append(event)
        try:
            events.extend(map(decoder.decode, remaining))
            return events, ""
        except DECODE_ERRORS as another:
            error = another


def join_halves(text: str) -> str:
    """Return the text with each surrogate pair joined into one character. The halves may come from separate chunks.

    A half without its counterpart becomes U+FFFD, because the next request of a session could not contain the half."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finalise(answer: Answer, total: int | None, broken: str) -> Answer:
    """Set the number of output tokens of an answer, and check how its stream ended.

    `total` is the number of output tokens that the server reported. If it is None, the tokens of all events are added
    up instead. The tokens are also added up if `total` is 0 although tokens were streamed.

    `broken` describes an unreadable event ("" if there is none). The answer gets an error, and its `end_event` becomes
    None, in two cases: an event is unreadable, or tokens follow the end marker.
    """
    streamed = sum(answer.tokens)
    if total == 0 and streamed:
        total = None
        answer.refuted_total = 0
    answer.output_tokens = streamed if total is None else total
    answer.counted_by = "wire" if total is None else "server"
    if not broken and answer.end_event is not None and any(answer.tokens[answer.end_event + 1 :]):
        broken = "tokens came after the end marker"
    if broken:
        answer.end_event = None
        if answer.error_kind == "":
            answer.error_kind = "protocol"
            answer.error_detail = broken
    return answer


def note_error(answer: Answer, payload: bytes) -> None:
    """Store the error of a stream event in the answer, if the event is an error. Only the first error is stored."""
    if answer.error_kind:
        return
    message = error_in(payload)
    if message:
        answer.error_kind = "rejected" if is_rejection(200, payload) else "in_band_error"
        answer.error_detail = message


def note_finish(answer: Answer, reason: str, payload: bytes) -> None:
    """Store the server's finish reason in the answer.

    A reason such as `error` or `abort` also sets the error of the answer."""
    answer.finish_reason = reason
    if answer.error_kind == "" and any(word in reason.lower() for word in GAVE_UP):
        answer.error_kind = "in_band_error"
        answer.error_detail = error_in(payload) or f"the server ended the response with finish reason {reason!r}"
