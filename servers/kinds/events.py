"""What every dialect does alike: payloads to typed events, and the facts of an Answer that follow the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from servers.errors import NOT_READABLE
from servers.kinds.dialect import Answer
from servers.kinds.refusals import error_in, is_rejection, one_line

Event = TypeVar("Event")

DONE = b"[DONE]"  # The end marker of OpenAI streams, the one payload that is not JSON


def decode_events(
    payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event], number: int = 0
) -> tuple[list[Event], str]:
    """One event per payload up to the first that is not one, and what is wrong with that one ("" when none is).
    `[DONE]` becomes an event with nothing in it, so that event i stays payload i. The first has this number."""
    if DONE in payloads:
        payloads = [b"{}" if payload == DONE else payload for payload in payloads]
    events: list[Event] = []
    try:
        events.extend(map(decoder.decode, payloads))  # keeps what came before the one that raises
    except NOT_READABLE as error:
        return events, one_line(
            f"event {number + len(events)} is not of this dialect ({error}): {payloads[len(events)][:100]!r}"
        )
    return events, ""


def settle(answer: Answer, total: int | None, broken: str) -> Answer:
    """Set the answer's length: the server's total where it gave one, else what its events held. `broken` is an event
    that could not be read: what came after it is unknown, the end included. Nothing may come after the end."""
    answer.output_tokens = sum(answer.tokens) if total is None else total
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
    """Keep the server's finish reason. `error` and `abort` (vLLM, LightLLM 1.2) mean that the server gave up."""
    answer.finish_reason = reason
    if reason in {"error", "abort"} and answer.error_kind == "":
        answer.error_kind = "in_band_error"
        answer.error_detail = error_in(payload) or f"the server ended the answer with finish reason {reason!r}"
