"""What every dialect does alike: payloads to typed events, and the facts of an Answer that follow the same way."""

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
"""Parts of finish reasons with which a server says that it gave up."""


def decode_events(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], number: int = 0
) -> tuple[list[Event], str]:
    """Decode one event per payload, up to the first that is unreadable (loadgen.servers.backends.lenient says which
    is).

    The second value says what is wrong with that one ("" when none is). `[DONE]` becomes an event with nothing in it,
    so that event i stays payload i. The first event has this number."""
    events: list[Event] = []
    try:
        events.extend(map(decoder.decode, payloads))  # keeps the events before the one that raises
        return events, ""
    except DECODE_ERRORS as error:
        return _decode_leniently(payloads, decoder, events, number, error)


def _decode_leniently(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], events: list[Event], number: int, error: Exception
) -> tuple[list[Event], str]:
    """Go on with the event that raised this error, which is the one after `events`."""
    remaining = islice(payloads, len(events) + 1, None)
    while True:
        payload = payloads[len(events)]
        event = read(payload, decoder.type)
        if event is None:
            later = payloads[len(events) + 1 :]
            said = error_inside(payload) or next(filter(None, map(error_in, later)), "")
            broken = f"event {number + len(events)} is not of this dialect ({error}): {payload[:100]!r}"
            return events, one_line(f"{said}; {broken}" if said else broken)
        events.append(event)
        try:
            events.extend(map(decoder.decode, remaining))
            return events, ""
        except DECODE_ERRORS as another:
            error = another


def join_halves(text: str) -> str:
    """Return the text with the halves of a character that came in two chunks joined. A half without its partner becomes
    U+FFFD, so that the next turn of a session can quote the text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def finalise(answer: Answer, total: int | None, broken: str) -> Answer:
    """Set the answer's length: the server's total where it gave one, else the sum over its events.

    `broken` says which event could not be read: everything after it is unknown, the end included. No token may come
    after the end."""
    streamed = sum(answer.tokens)
    if total == 0 and streamed:
        total, answer.refuted_total = None, 0
    answer.output_tokens = streamed if total is None else total
    answer.counted_by = "wire" if total is None else "server"
    if not broken and answer.end_event is not None and any(answer.tokens[answer.end_event + 1 :]):
        broken = "tokens came after the end marker"
    if broken:
        answer.end_event = None
        if answer.error_kind == "":
            answer.error_kind, answer.error_detail = "protocol", broken
    return answer


def note_error(answer: Answer, payload: bytes) -> None:
    """Store the error of this event in the answer, if the event is an error. The first error of a stream counts."""
    if answer.error_kind == "" and (said := error_in(payload)):
        answer.error_kind = "rejected" if is_rejection(200, payload) else "in_band_error"
        answer.error_detail = said


def note_finish(answer: Answer, reason: str, payload: bytes) -> None:
    """Keep the server's finish reason. Some mean that the server gave up, such as `error` and `abort`."""
    answer.finish_reason = reason
    if answer.error_kind == "" and any(word in reason.lower() for word in GAVE_UP):
        answer.error_kind = "in_band_error"
        answer.error_detail = error_in(payload) or f"the server ended the answer with finish reason {reason!r}"
