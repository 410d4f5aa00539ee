"""What every dialect does alike: payloads to typed events, the facts of an Answer that follow the same way, and what a
server says when it refuses, in whatever form, as one line.

{"error":{"message":..,"type":..,"code":..}}     vLLM 0.10 and later, LightLLM 1.2, OpenAI; TGI 2.4.1 in streams
{"object":"error","message":..,"type":..}        vLLM up to 0.6.6
{"error":"..","error_type":".."}                 TGI; vLLM's {"error":"Unauthorized"}
{"message":".."}                                 LightLLM up to 1.1
{"detail":".."}, {"detail":[{"loc":..,"msg":..}]}    FastAPI
plain text, HTML                                 axum, uvicorn, proxies
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from servers.errors import NOT_READABLE
from servers.kinds.dialect import Answer

Event = TypeVar("Event")

DONE = b"[DONE]"  # The end marker of OpenAI streams, the one payload that is not JSON
LIMIT_CHARACTERS = 300

_LIMIT_BYTES = 4_096  # of text and HTML; the patterns below are quadratic on hostile bytes
_HIDDEN = re.compile(r"<(head|script|style)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.DOTALL | re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]*>([^<]*)", re.IGNORECASE)


def decode_events(payloads: Sequence[bytes], decoder: msgspec.json.Decoder[Event]) -> tuple[list[Event], str]:
    """One event per payload up to the first that is not one, and what is wrong with that one ("" when none is).
    `[DONE]` becomes an event with nothing in it, so that event i stays payload i."""
    if DONE in payloads:
        payloads = [b"{}" if payload == DONE else payload for payload in payloads]
    events: list[Event] = []
    try:
        events.extend(map(decoder.decode, payloads))  # keeps what came before the one that raises
    except NOT_READABLE as error:
        return events, one_line(
            f"event {len(events)} is not of this dialect ({error}): {payloads[len(events)][:100]!r}"
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
    """If this event is the server's error, say so in the answer. The first error counts."""
    if answer.error_kind == "" and (said := error_in(payload)):
        answer.error_kind, answer.error_detail = "in_band_error", said


def note_finish(answer: Answer, reason: str, payload: bytes) -> None:
    """Keep the server's finish reason. `error` and `abort` (vLLM, LightLLM 1.2) mean that the server gave up."""
    answer.finish_reason = reason
    if reason in {"error", "abort"} and answer.error_kind == "":
        answer.error_kind = "in_band_error"
        answer.error_detail = error_in(payload) or f"the server ended the answer with finish reason {reason!r}"


def error_text(status: int, body: bytes) -> str:
    """One line of at most 300 characters that says what the server said, whatever the form of its body."""
    try:
        said = _said(msgspec.json.decode(body))
    except NOT_READABLE:
        said = body[:_LIMIT_BYTES].decode("utf-8", "replace")
        title = _TITLE.search(said)
        if title or "<html" in said.lower():
            said = (f"{title[1]}: " if title else "") + _HIDDEN.sub(" ", said)
    return one_line(said) or f"HTTP {status} with nothing readable in the body"


def error_in(payload: bytes) -> str:
    """What the error in this event says, as one line; "" when the event is no error. The payload may be anything."""
    try:
        event = msgspec.json.decode(payload)
        if isinstance(event, dict) and (event.get("error") not in (None, "", False) or event.get("object") == "error"):
            return one_line(_said(event)) or "an error without a message"
    except NOT_READABLE:
        pass
    return ""


def one_line(text: str, most: int = LIMIT_CHARACTERS) -> str:
    """Runs of white space and control characters become one space. What is longer loses its middle: a reason's end
    says its kind."""
    if len(text) > 8 * most:
        text = f"{text[: 4 * most]} {text[-4 * most :]}"
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    return line if len(line) <= most else f"{line[: most - most // 3 - 3]} … {line[-(most // 3) :]}"


def _said(answer: Any) -> str:
    if isinstance(answer, list):
        return "; ".join(_said(item) for item in answer[:3])
    if not isinstance(answer, dict):
        return str(answer)
    inner = answer.get("error")
    if isinstance(inner, dict):
        return _said(inner)
    if isinstance(inner, str):
        message, kinds = inner, [answer.get("error_type")]
    elif "message" in answer:
        message, kinds = answer["message"], [answer.get("type"), answer.get("code")]
    elif "msg" in answer:  # one mistake of a FastAPI schema check
        message, kinds = answer["msg"], [".".join(map(str, answer.get("loc") or []))]
    else:
        return _said(answer["detail"]) if "detail" in answer else msgspec.json.encode(answer).decode()
    known = ", ".join(str(kind) for kind in kinds if kind)
    return f"{message} ({known})" if known else str(message)
