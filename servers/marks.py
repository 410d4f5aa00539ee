"""The mark that identifies a simulated server, and the functions that write and find this mark.

A gateway may hide the server's status page, remove headers or rewrite ids. A simulated server therefore repeats its
mark in the headers, the model card, the version pages, the metrics page and every response to a request for tokens. The
mark states the speed of the server's clock relative to real time.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from loadgen.servers.errors import DECODE_ERRORS

HEADER = "x-simulated-speed"
FIELD = "simulated_speed"
"""Name of the field in JSON bodies and of the gauge on the metrics page."""
_IN_HEAD = re.compile(rb"^x-simulated-speed:[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"(?:^|-)simulated(?:-x(?P<speed>[0-9.]+(?:e[+-]?[0-9]+)?))?(?:-|$)")
_NAMES = ("id", "system_fingerprint", "docker_label")
"""Fields of a response that may contain the mark. Model names are ignored, because users choose them."""


class Mark(NamedTuple):
    """The mark in a response which says that the server is simulated."""

    speed: float | None
    """Speed of the server's clock relative to real time. None: the mark does not state the speed."""


def header(speed: float) -> tuple[str, str]:
    """Return the name and value of the HTTP header that marks a response as simulated."""
    return HEADER, f"{speed:g}"


def fields(speed: float) -> dict[str, float]:
    """Return the JSON field that marks a response body as simulated."""
    return {FIELD: speed}


def word(speed: float) -> str:
    """Return the text that marks an id or a version as simulated, such as `simulated-x5`."""
    return f"simulated-x{speed:g}"


def in_header(value: str | None) -> Mark | None:
    """Return the mark in the response header `x-simulated-speed`, which identifies a simulated server.

    `value` is the value of the header. If the response has no such header, `value` is None, and so is the result.
    """
    return None if value is None else Mark(_speed(value))


def in_head(head: bytes) -> Mark | None:
    """Return the mark in the raw head of an HTTP response, or None if the head contains no mark."""
    result = _IN_HEAD.search(head)
    return Mark(_speed(result[1].decode("latin-1"))) if result else None


def in_payload(payload: bytes) -> Mark | None:
    """Return the mark of a simulated server in `payload`, which is a stream event or a response body.

    Return None if the payload contains no mark or is not JSON.
    """
    if b"simulated" not in payload:
        return None
    try:
        return in_value(msgspec.json.decode(payload))
    except DECODE_ERRORS:
        return None


def in_value(value: Any) -> Mark | None:
    """Return the mark of a simulated server in a decoded JSON response, or None if the response contains no mark.

    The mark is a field of the response, a field of the first model in a list of models, or part of an id."""
    if isinstance(value, list):
        value = value[0] if value else None
    if not isinstance(value, dict):
        return None
    if FIELD in value:
        return Mark(_speed(value[FIELD]))
    for name in _NAMES:
        text = value.get(name)
        if isinstance(text, str) and (result := _WORD.search(text)):
            return Mark(_speed(result["speed"]))
    cards = value.get("data")
    card = cards[0] if isinstance(cards, list) and cards else None
    return Mark(_speed(card[FIELD])) if isinstance(card, dict) and FIELD in card else None


def _speed(value: Any) -> float | None:
    """Return a clock speed from a number or text, or None if the value is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        speed = float(value)
    except ValueError:
        return None
    return speed if 0 < speed < float("inf") else None
