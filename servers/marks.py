"""The mark of a simulated server, which is in everything that the server says, and how a client finds the mark.

A gateway may hide the server's own page, remove headers or rewrite ids. A simulated server therefore repeats its mark
in the headers, the model card, the version pages, the metrics page and every response to a request for tokens. The mark
holds the speed of the server's clock, so that whoever finds one place knows both.
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
"""Fields of a response that can hold the word. The name of a model can hold it too and is not looked at."""


class Mark(NamedTuple):
    """A server said that it is simulated."""

    speed: float | None
    """How many times faster than real time its clock runs. None: the mark does not say."""


def header(speed: float) -> tuple[str, str]:
    """The header of every response."""
    return HEADER, f"{speed:g}"


def fields(speed: float) -> dict[str, float]:
    """The field of a JSON body."""
    return {FIELD: speed}


def word(speed: float) -> str:
    """The part of an id or of a version, such as `simulated-x5`."""
    return f"simulated-x{speed:g}"


def in_header(value: str | None) -> Mark | None:
    """The mark in the value of HEADER; None where there is no such header."""
    return None if value is None else Mark(_speed(value))


def in_head(head: bytes) -> Mark | None:
    """The mark in the head of a response."""
    result = _IN_HEAD.search(head)
    return Mark(_speed(result[1].decode("latin-1"))) if result else None


def in_payload(payload: bytes) -> Mark | None:
    """The mark in an event or a body, which may be anything."""
    if b"simulated" not in payload:
        return None
    try:
        return in_value(msgspec.json.decode(payload))
    except DECODE_ERRORS:
        return None


def in_value(value: Any) -> Mark | None:
    """The mark in a JSON value: its own field, the field of the first model of a list, or the word in an id."""
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
    """A speed as a number or as text; None for anything that is no speed."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        speed = float(value)
    except ValueError:
        return None
    return speed if 0 < speed < float("inf") else None
