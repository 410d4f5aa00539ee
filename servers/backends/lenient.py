"""Decodes events that a typed decoder refuses.

Typed decoding is fast and strict, and handles nearly every event. This module decodes the remaining events by these
rules:

- Text is UTF-8. Invalid bytes and unpaired surrogates (halves of a character split over two chunks) are accepted.
- A payload of white space is a heartbeat. `[DONE]` may be surrounded by white space or quotation marks.
- A field whose value has an unexpected type counts as absent. Unknown fields are always skipped.

An event is unreadable, and its response fails, in three cases:

- The payload is not a JSON object.
- A field that holds the tokens (`choices`, `token`, `data`, `results`) has an unexpected type.
- A count is impossible: negative, above 10,000,000, fractional or a boolean.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

Event = TypeVar("Event")

DONE = b"[DONE]"
"""End marker of OpenAI streams, the only payload that is not JSON."""
END_MARKER_MAX_BYTES = 64
"""Maximum size of an end marker, including white space around `[DONE]`."""
TOKEN_FIELDS = frozenset({"choices", "token", "data", "results", "meta_info"})
"""Fields that hold the tokens or the results. If one of them has an unexpected type, the event is unreadable."""


class TypeMismatchError(ValueError):
    """A JSON value does not have the type that its field requires."""


class UnreadableEventError(Exception):
    """An event that cannot be read because of one invalid JSON value, for example an impossible token count."""


def plain(payload: bytes) -> bytes:
    """Return the payload without surrounding white space. A payload `"[DONE]"` in quotation marks becomes `[DONE]`."""
    payload = payload.strip()
    return DONE if payload == b'"[DONE]"' else payload


def end_marker(payloads: Sequence[bytes]) -> int | None:
    """Return the index of the first `[DONE]` payload, or None if there is none.

    An exact `[DONE]` takes precedence over one with white space or quotation marks."""
    if DONE in payloads:
        return payloads.index(DONE)
    if min(map(len, payloads), default=END_MARKER_MAX_BYTES) >= END_MARKER_MAX_BYTES:
        return None
    return next((index for index, payload in enumerate(payloads) if plain(payload) == DONE), None)


def parse(payload: bytes) -> Any:
    """Return the decoded JSON value of a payload, or None if the payload is not JSON."""
    try:
        return json.loads(payload.decode("utf-8", "replace"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def read(payload: bytes, event_type: type[Event]) -> Event | None:
    """Decode a payload leniently into an event, or return None if the event is unreadable.

    A field whose value has an unexpected type is left out. A heartbeat or `[DONE]` becomes an empty event."""
    if plain(payload) in (b"", DONE):
        return event_type()
    value = parse(payload)
    if not isinstance(value, dict):
        return None
    try:
        return msgspec.convert(_fit(value, _type_info(cast("Hashable", event_type))), event_type)
    except (UnreadableEventError, TypeMismatchError, msgspec.ValidationError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _type_info(event_type: Hashable) -> Any:
    return _inspect().type_info(event_type)


def _inspect() -> Any:
    """Import and return the module msgspec.inspect, which is slow to import and rarely needed."""
    from msgspec import inspect

    return inspect


def _fit(value: Any, info: Any) -> Any:
    """Return a decoded JSON value without the fields that have an unexpected type.

    `info` is the expected type of the value, as described by msgspec.inspect. Raises TypeMismatchError if the value
    itself has another type, and UnreadableEventError if the value makes the whole event unreadable."""
    types = _inspect()
    if isinstance(info, types.UnionType):
        return _fit_union(value, info)
    if isinstance(info, types.IntType):
        return _fit_count(value, info)
    if isinstance(info, types.StructType) and isinstance(value, dict):
        return _fit_struct(value, info)
    if isinstance(info, types.ListType) and isinstance(value, list):
        return [_fit(item, info.item_type) for item in value]
    plain_types = ((types.StrType, str), (types.BoolType, bool), (types.NoneType, type(None)), (types.AnyType, object))
    if not any(isinstance(info, kind) and isinstance(value, python_type) for kind, python_type in plain_types):
        raise TypeMismatchError
    return value


def _fit_struct(value: dict[str, Any], info: Any) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    for field in info.fields:
        name = field.encode_name
        if name not in value:
            continue
        member = _finish_reason(value[name]) if name == "finish_reason" else value[name]
        try:
            fitting[name] = _fit(member, field.type)
        except TypeMismatchError:
            if name in TOKEN_FIELDS:
                raise UnreadableEventError from None
    return fitting


def _fit_union(value: Any, info: Any) -> Any:
    for kind in info.types:
        try:
            return _fit(value, kind)
        except TypeMismatchError:
            continue
    if isinstance(value, dict) and any(isinstance(kind, _inspect().ListType) for kind in info.types):
        return [value]  # the server sent a single part instead of a list of parts
    raise TypeMismatchError


def _fit_count(value: Any, info: Any) -> int:
    """Return a token count as an integer. The server may write the count as `12`, `"12"` or `12.0`.

    Raises UnreadableEventError for an impossible count, and TypeMismatchError for a value that is not a number."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int | float):
        raise TypeMismatchError
    if isinstance(value, bool):
        raise UnreadableEventError
    if isinstance(value, float) and not value.is_integer():  # infinities and NaN included
        raise UnreadableEventError
    minimum = -(1 << 63) if info.ge is None else info.ge
    maximum = (1 << 63) - 1 if info.le is None else info.le
    if not minimum <= value <= maximum:
        raise UnreadableEventError
    return int(value)


def _finish_reason(value: Any) -> Any:
    """Return a finish reason as text, or None if the value is empty.

    Some servers send a number, or an object such as `{"type": "length"}`."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("reason") or ("unknown" if value else None)
    return str(value) if value and not isinstance(value, str) else value or None
