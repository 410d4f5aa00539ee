"""What a server says when it refuses, in whatever form, as one line.

{"error":{"message":..,"type":..,"code":..}}     vLLM 0.10 and later, LightLLM 1.2, OpenAI; TGI 2.4.1 in streams
{"object":"error","message":..,"type":..}        vLLM up to 0.6.6
{"error":"..","error_type":".."}                 TGI; vLLM's {"error":"Unauthorized"}
{"message":".."}                                 LightLLM up to 1.1
{"detail":".."}, {"detail":[{"loc":..,"msg":..}]}    FastAPI
plain text, HTML                                 axum, uvicorn, proxies
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from servers.errors import NOT_READABLE

LIMIT_CHARACTERS = 300

REJECTION_STATUSES = frozenset({429, 503, 529})
"""HTTP statuses of a server or proxy that is too busy to take a request: Too Many Requests, Service Unavailable, and
529, which hosted servers use for "overloaded"."""
UNSPECIFIC_STATUS = 422
"""TGI's OpenAI routes state this code for every error in a stream, so only the message tells an overload."""
_REJECTION_TYPES = frozenset(
    {
        *("overloaded", "overloadederror", "serviceunavailable", "serviceunavailableerror"),
        *("ratelimit", "ratelimiterror", "ratelimitexceeded", "toomanyrequests", "toomanyrequestserror"),
    }
)
"""Types of errors that mean the same, in lower case and without punctuation."""
_REJECTION_MESSAGE = re.compile(
    r"\b(is (currently )?overloaded|queue is full|too many (queued |concurrent )?requests)\b", re.IGNORECASE
)
_STATUS_FIELDS = ("code", "status", "status_code", "http_status_code")
_TYPE_FIELDS = ("error_type", "type", "code")

_LIMIT_BYTES = 4_096  # of text and HTML; the patterns below are quadratic on hostile bytes
_HIDDEN = re.compile(r"<(head|script|style)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.DOTALL | re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]*>([^<]*)", re.IGNORECASE)


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
    if b"error" not in payload and b"\\" not in payload:
        return ""
    try:
        event = msgspec.json.decode(payload)
        if isinstance(event, dict) and (event.get("error") not in (None, "", False) or event.get("object") == "error"):
            return one_line(_said(event)) or "an error without a message"
    except NOT_READABLE:
        pass
    return ""


def is_rejection(status: int, body: bytes) -> bool:
    """Return whether a response says that the server, or a proxy in front of it, was too busy to take the request.

    `status` is the HTTP status. `body` is the body of a response, or one event of a stream with status 200. The status
    decides if it is one of REJECTION_STATUSES. Otherwise the error in the body decides: by its status code, by its
    type, and, where it has no code or only TGI's 422, by its message.
    """
    if status in REJECTION_STATUSES:
        return True
    try:
        answer = msgspec.json.decode(body)
    except NOT_READABLE:
        return False
    if not isinstance(answer, dict):
        return False
    inner = answer.get("error")
    errors = [answer, inner] if isinstance(inner, dict) else [answer]
    codes = {code for error in errors for name in _STATUS_FIELDS if (code := _status_code(error.get(name)))}
    types = {_bare_type(error.get(name)) for error in errors for name in _TYPE_FIELDS}
    if codes & REJECTION_STATUSES or types & _REJECTION_TYPES:
        return True
    if codes - {UNSPECIFIC_STATUS}:
        return False
    message = inner if isinstance(inner, str) else errors[-1].get("message")
    return isinstance(message, str) and _REJECTION_MESSAGE.search(message) is not None


def _status_code(value: object) -> int:
    """Return the HTTP status that a field holds as a number or as digits; 0 if it holds none."""
    if isinstance(value, str) and re.fullmatch(r"[1-5]\d\d", value):
        return int(value)
    return value if type(value) is int and 100 <= value <= 599 else 0


def _bare_type(value: object) -> str:
    """Return the type of an error in lower case and without punctuation: `SERVICE_UNAVAILABLE` and
    `ServiceUnavailable` are one."""
    return re.sub(r"[^a-z]", "", value.lower()) if isinstance(value, str) and len(value) <= 100 else ""


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
