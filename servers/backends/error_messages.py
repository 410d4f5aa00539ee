"""Finds the error message in a server's response and returns the message as one line.

Servers report errors in these forms:

    {"error":{"message":..,"type":..,"code":..}}     vLLM 0.10 and later, LightLLM 1.2, OpenAI; TGI 2.4.1 in streams.
    {"object":"error","message":..,"type":..}        vLLM up to 0.6.6; SGLang.
    {"error":"..","error_type":".."}                 TGI. vLLM without `error_type`: {"error":"Unauthorized"}.
    {"message":".."}                                 LightLLM up to 1.1.
    {"detail":".."}, {"detail":[{"loc":..,"msg":..}]}    FastAPI.
    plain text, HTML                                 axum, uvicorn, proxies.
"""

from __future__ import annotations

import html
import json
import re
from itertools import islice
from typing import Any

import msgspec

from loadgen.servers.backends.lenient import parse
from loadgen.servers.errors import DECODE_ERRORS

LIMIT_CHARACTERS = 300
ERROR_FIELDS = ("error", "errors", "exception", "error_message", "error_msg")
CONTENT_FIELDS = ("choices", "token", "usage", "generated_text", "meta_info")
"""Fields with content. An event in which one of them is not empty is an error only if it also has an error field."""
CODE_FIELDS = ("code", "status", "status_code", "http_status_code", "statusCode")
SUCCESS_CODES = ("", "ok", "success", "none", "null", "false")
"""Codes that do not mean an error."""
FIRST_ERROR_STATUS = 400
ERRORS_INSIDE_MAX = 8

REJECTION_STATUSES = frozenset({429, 503, 529})
"""HTTP statuses of a server or proxy that is too busy: Too Many Requests, Service Unavailable, and 529, which hosted
servers use for "overloaded"."""
UNSPECIFIC_STATUS = 422
"""TGI's OpenAI routes state this code for every error in a stream, so only the message identifies an overload."""
_REJECTION_TYPES = frozenset(
    {
        *("overloaded", "overloadederror", "serviceunavailable", "serviceunavailableerror"),
        *("ratelimit", "ratelimiterror", "ratelimitexceeded", "toomanyrequests", "toomanyrequestserror"),
    }
)
"""Types of errors with which a server rejects a request, in lower case and without punctuation."""
_REJECTION_MESSAGE = re.compile(
    r"\b(is (currently )?overloaded|queue is full|too many (queued |concurrent )?requests)\b", re.IGNORECASE
)
_STATUS_FIELDS = ("code", "status", "status_code", "http_status_code")
_TYPE_FIELDS = ("error_type", "type", "code")

_LIMIT_BYTES = 4_096  # Text and HTML are cut to this size, because the patterns below are quadratic on hostile bytes
_MARKUP = re.compile(r"<(head|script|style)\b.*?</\1\s*>|<!--.*?-->|<[^>]*>", re.DOTALL | re.IGNORECASE)
_MAY_BE_AN_ERROR = re.compile(rb"error|exception|detail|message|msg|success|\\\\", re.IGNORECASE)
"""Matches in every event that may be an error. An escape may hide one of the words."""
_ERROR_OBJECT = re.compile(r'\{\s*"error')
_TITLE = re.compile(r"<title[^>]*>([^<]*)", re.IGNORECASE)


def error_text(status: int, body: bytes) -> str:
    """Return the error message in a response body, as one line of at most 300 characters.

    The body may be JSON, HTML or any other bytes. If the body contains no text, the message states the HTTP status."""
    try:
        message = _message(msgspec.json.decode(body))
    except DECODE_ERRORS:
        message = body[:_LIMIT_BYTES].decode("utf-8", "replace")
        title = _TITLE.search(message)
        if title or "<html" in message.lower():
            message = _page_text(title[1] if title else "", _MARKUP.sub(" ", message))
    return one_line(message) or f"HTTP {status} with nothing readable in the body"


def _page_text(title: str, body: str) -> str:
    """Return the title and the text of an HTML page as one line.

    If the text begins with the title, the title is not repeated."""
    title, body = one_line(html.unescape(title)), one_line(html.unescape(body), LIMIT_CHARACTERS * 4)
    if body.casefold().startswith(title.casefold()):
        return body
    return f"{title}: {body}" if title and body else title or body


def error_in(payload: bytes) -> str:
    """Return the error message of a stream event as one line, or "" if the event is not an error.

    `payload` is the data of the event. Only a JSON object can be an error. It is always an error if it has an error
    field, such as `error`, that is not empty.

    An event without such a field is an error if it has no content (`choices`, `token`, `usage`, `generated_text`,
    `meta_info`) and one of these properties:

    - It has an error field that contains an empty object or list.
    - Its type or status ends in "error", or its `success` is false.
    - It has an HTTP error status or an error code, together with a message.
    - It has FastAPI's field `detail`.
    """
    if not _MAY_BE_AN_ERROR.search(payload):
        return ""
    event = parse(payload)
    return _error_text(event) if isinstance(event, dict) else ""


def error_inside(payload: bytes) -> str:
    """Return the message of a JSON error object anywhere inside an unreadable payload, or "" if there is none."""
    text = payload.decode("utf-8", "replace")
    for start in islice(_ERROR_OBJECT.finditer(text), ERRORS_INSIDE_MAX):
        try:
            event, _ = json.JSONDecoder().raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        message = _error_text(event)
        if message:
            return message
    return ""


def is_rejection(status: int, body: bytes) -> bool:
    """Return True if the server, or a proxy in front of the server, was too busy to take the request.

    `status` is the HTTP status. `body` is the body of the response, or one event of a stream with status 200. The
    response is a rejection in these cases:

    - The HTTP status, or a status code in the error, is one of REJECTION_STATUSES.
    - The type of the error is one that means overload, such as `rate_limit_error`.
    - The message of the error says that the server is overloaded, and the error has no status code or the code 422
      (TGI).
    """
    if status in REJECTION_STATUSES:
        return True
    try:
        answer = msgspec.json.decode(body)
    except DECODE_ERRORS:
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
    """Return the HTTP status in a field as an integer, or 0 if the field contains none.

    The field may contain the status as a number or as digits."""
    if isinstance(value, str) and re.fullmatch(r"[1-5]\d\d", value):
        return int(value)
    return value if type(value) is int and 100 <= value <= 599 else 0


def _bare_type(value: object) -> str:
    """Return the type of an error in lower case and without punctuation.

    For example, `SERVICE_UNAVAILABLE` and `ServiceUnavailable` both become `serviceunavailable`. The result is "" if
    the value is not text or has more than 100 characters."""
    return re.sub(r"[^a-z]", "", value.lower()) if isinstance(value, str) and len(value) <= 100 else ""


def _error_text(event: dict[str, Any]) -> str:
    """Return the error message of a decoded event as one line, or "" if the event is not an error."""
    has_content = any(event.get(field) for field in CONTENT_FIELDS)
    error = next((event[field] for field in ERROR_FIELDS if event.get(field)), None)
    response = event.get("response")  # The Responses API puts the error into this field
    if error is None and isinstance(response, dict) and response.get("error"):
        return _error_text(response)
    if error is None and not has_content:
        error = next((event[field] for field in ERROR_FIELDS if event.get(field) in ({}, [])), None)
    if error is None and (has_content or not _calls_itself_an_error(event)):
        return ""
    if error in ({}, []):
        return "an error without a message"
    return one_line(_message(event)) or "an error without a message"


def _calls_itself_an_error(event: dict[str, Any]) -> bool:
    types = [str(event.get(field) or "").lower() for field in ("object", "type", "event", "status")]
    if any(word.endswith("error") for word in types) or event.get("detail") or event.get("success") is False:
        return True
    codes = [str(event.get(field) or "").lower() for field in CODE_FIELDS]
    has_error_code = any(
        int(code[:6]) >= FIRST_ERROR_STATUS if code.isdecimal() else code not in SUCCESS_CODES for code in codes
    )
    return has_error_code and any(event.get(field) for field in ("message", "msg"))


def one_line(text: str, max_length: int = LIMIT_CHARACTERS) -> str:
    """Return the text as one line of at most `max_length` characters.

    Each run of white space and control characters becomes one space. If the text is too long, its middle is cut out,
    because the end of a message often names the type of the error."""
    if len(text) > 8 * max_length:
        text = f"{text[: 4 * max_length]} {text[-4 * max_length :]}"
    line = " ".join("".join(character if character.isprintable() else " " for character in text).split())
    if len(line) <= max_length:
        return line
    end_length = max_length // 3
    return f"{line[: max_length - end_length - 3]} … {line[-end_length:]}"


def _message(answer: Any) -> str:
    """Return the message in a decoded JSON error, with the type or code of the error in parentheses."""
    if isinstance(answer, list):
        return "; ".join(_message(item) for item in answer[:3])
    if not isinstance(answer, dict):
        return str(answer)
    inner = next((answer[field] for field in ERROR_FIELDS if answer.get(field)), answer.get("error"))
    if isinstance(inner, dict | list) and inner:
        return _message(inner)
    if isinstance(inner, str):
        message = inner
        types = [answer.get("error_type")]
    elif "message" in answer:
        message = answer["message"]
        types = [answer.get("type"), answer.get("code")]
    elif "msg" in answer:  # a mistake that FastAPI found in the schema, or a code and its message
        message = answer["msg"]
        location = answer.get("loc")
        types = [".".join(map(str, location)) if isinstance(location, list) else answer.get("code")]
    elif "detail" in answer:
        return _message(answer["detail"])
    else:
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    details = ", ".join(str(word) for word in types if word)
    return f"{message} ({details})" if details else str(message)
