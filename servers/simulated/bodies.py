"""Reading and writing JSON bodies the way lenient servers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servers.simulated.wire import JSON_TYPE, Headers, Reply

dumps = msgspec.json.encode
"""Compact, as all three servers write."""


def ok(value: Any, headers: Headers = JSON_TYPE) -> Reply:
    """200 with a JSON body."""
    return Reply(dumps(value), headers=headers)


def mapping(body: bytes) -> dict[str, Any]:
    """The JSON object in a body; empty where it is something else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def integer(value: Any) -> int | None:
    """A number without fraction, or a string of one, as pydantic's lax mode takes it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if isinstance(value, str) or value == int(value) else None
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """A number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def chat_text(messages: Any) -> str:
    """Messages as the simulated model's chat template renders them.

    Every role and content stands on lines of its own, so that a message's tokens do not depend on its neighbours.
    """
    rendered = [f"{_said(message, 'role')}:\n{_said(message, 'content')}\n" for message in _messages(messages)]
    return "".join(rendered) + "assistant:\n"


def _messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    return [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []


def _said(message: Mapping[str, Any], name: str) -> str:
    """Text, or the texts of a list of parts."""
    value = message.get(name)
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, Mapping))
    return value if isinstance(value, str) else ""
