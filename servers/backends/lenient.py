"""Reads events that differ from what a typed decoder expects.

Typed decoding is fast and strict, and handles nearly every event. The events that it refuses are read here, by these
rules:

* Text is UTF-8. Invalid bytes and halves of surrogate pairs (a character split over two chunks) are accepted.
* A payload of white space is a heartbeat. `[DONE]` may have white space or quotation marks around it.
* A field of another type than expected counts as absent. Unknown fields are always skipped.
* Three mistakes make an event unreadable and so fail the response: a payload that is not a JSON object; another type in
  a field that holds the tokens (`choices`, `token`, `data`, `results`); and an impossible count (negative, above
  10,000,000, fractional, or a boolean).
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
TOKEN_FIELDS = frozenset({"choices", "token", "data", "results"})
"""Fields that hold the tokens or the results. An event in which one of them has another type is unreadable."""


class TypeMismatchError(ValueError):
    """The value has another type than its field."""


class UnreadableEventError(Exception):
    """The value makes its whole event unreadable."""


def plain(payload: bytes) -> bytes:
    """Return the payload without white space around it. Every form of `[DONE]` becomes DONE."""
    payload = payload.strip()
    return DONE if payload == b'"[DONE]"' else payload


def end_marker(payloads: Sequence[bytes]) -> int | None:
    """Return the index of the first `[DONE]`, preferring the usual form to others; None if there is none."""
    if DONE in payloads:
        return payloads.index(DONE)
    if min(map(len, payloads), default=END_MARKER_MAX_BYTES) >= END_MARKER_MAX_BYTES:
        return None
    return next((index for index, payload in enumerate(payloads) if plain(payload) == DONE), None)


def parse(payload: bytes) -> Any:
    """Return the JSON value of a payload; None if it is not JSON."""
    try:
        return json.loads(payload.decode("utf-8", "replace"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def read(payload: bytes, event_type: type[Event]) -> Event | None:
    """Return the event with every field that has the expected type; None if the event is unreadable."""
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
    """Return the module msgspec.inspect, which is slow to import and rarely needed."""
    from msgspec import inspect

    return inspect


def _fit(value: Any, info: Any) -> Any:
    """Return the value without the parts that do not match the type.

    Raises TypeMismatchError if no part matches, and UnreadableEventError."""
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
        return [value]  # a single part in place of a list of parts
    raise TypeMismatchError


def _fit_count(value: Any, info: Any) -> int:
    """Return a count that may be written as text or as `12.0`. Raises UnreadableEventError for an impossible count."""
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
    """Return a finish reason as text. Some servers send an object with a type (`{"type": "length"}`), or a number."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("reason") or ("unknown" if value else None)
    return str(value) if value and not isinstance(value, str) else value or None
