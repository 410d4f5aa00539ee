"""Reads events that are not exactly what a decoder expects.

Typed decoding is fast and strict, and does nearly all of the work. An event that it refuses is read here. The rule:

* Text is UTF-8; bytes that are none, and halves of surrogate pairs (a character split over two chunks), are accepted.
* A payload of white space is a heartbeat, and `[DONE]` may have white space or quotation marks around it.
* A field of another type than expected is read as absent. Unknown fields are always skipped.
* Three kinds of mistakes make an event unreadable, and so fail the response: a payload that is no JSON object, a field
  that holds the tokens themselves (`choices`, `token`, `data`, `results`) of another type, and a count that cannot be
  (negative, above 10,000,000, not whole, or true or false).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

Event = TypeVar("Event")

DONE = b"[DONE]"
"""The end marker of OpenAI streams, the one payload that is not JSON."""
END_MARKER_MAX_BYTES = 64
"""White space around `[DONE]` included."""
TOKEN_FIELDS = frozenset({"choices", "token", "data", "results"})
"""Fields that hold the tokens, or what takes their place; an event in which one has another type is unreadable."""


class UnfitError(ValueError):
    """A value is of another type than its field."""


class ImpossibleError(Exception):
    """A value makes its whole event unreadable."""


def plain(payload: bytes) -> bytes:
    """Return the payload without white space around it; every form of `[DONE]` as DONE."""
    payload = payload.strip()
    return DONE if payload == b'"[DONE]"' else payload


def end_marker(payloads: Sequence[bytes]) -> int | None:
    """Return the index of the first `[DONE]` in any form, the usual form first; None where there is none."""
    if DONE in payloads:
        return payloads.index(DONE)
    if min(map(len, payloads), default=END_MARKER_MAX_BYTES) >= END_MARKER_MAX_BYTES:
        return None
    return next((index for index, payload in enumerate(payloads) if plain(payload) == DONE), None)


def parse(payload: bytes) -> Any:
    """Return the JSON value of a payload; None where it is not JSON."""
    try:
        return json.loads(payload.decode("utf-8", "replace"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def read(payload: bytes, kind: type[Event]) -> Event | None:
    """Return the event of this struct type, as far as its fields fit; None where it is unreadable."""
    if plain(payload) in (b"", DONE):
        return kind()
    value = parse(payload)
    if not isinstance(value, dict):
        return None
    try:
        return msgspec.convert(_fit(value, _type_info(cast("Hashable", kind))), kind)
    except (ImpossibleError, UnfitError, msgspec.ValidationError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _type_info(kind: Hashable) -> Any:
    return _inspect().type_info(kind)


def _inspect() -> Any:
    """The module, which takes long to import and is seldom needed."""
    from msgspec import inspect

    return inspect


def _fit(value: Any, info: Any) -> Any:
    """Return the value without what does not fit the type. Raises UnfitError where nothing of it does, and
    ImpossibleError."""
    kinds = _inspect()
    if isinstance(info, kinds.UnionType):
        return _fit_union(value, info)
    if isinstance(info, kinds.IntType):
        return _fit_count(value, info)
    if isinstance(info, kinds.StructType) and isinstance(value, dict):
        return _fit_struct(value, info)
    if isinstance(info, kinds.ListType) and isinstance(value, list):
        return [_fit(item, info.item_type) for item in value]
    plain_types = ((kinds.StrType, str), (kinds.BoolType, bool), (kinds.NoneType, type(None)), (kinds.AnyType, object))
    if not any(isinstance(info, kind) and isinstance(value, python_type) for kind, python_type in plain_types):
        raise UnfitError
    return value


def _fit_struct(value: dict[str, Any], info: Any) -> dict[str, Any]:
    fitting: dict[str, Any] = {}
    for field in info.fields:
        name = field.encode_name
        if name not in value:
            continue
        given = _reason(value[name]) if name == "finish_reason" else value[name]
        try:
            fitting[name] = _fit(given, field.type)
        except UnfitError:
            if name in TOKEN_FIELDS:
                raise ImpossibleError from None
    return fitting


def _fit_union(value: Any, info: Any) -> Any:
    for kind in info.types:
        try:
            return _fit(value, kind)
        except UnfitError:
            continue
    if isinstance(value, dict) and any(isinstance(kind, _inspect().ListType) for kind in info.types):
        return [value]  # one part, where a list of parts is allowed
    raise UnfitError


def _fit_count(value: Any, info: Any) -> int:
    """A number in digits is one, `12.0` too. Any other number that is not a count cannot be."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int | float):
        raise UnfitError
    if isinstance(value, bool):
        raise ImpossibleError
    if isinstance(value, float) and not value.is_integer():  # infinities and NaN included
        raise ImpossibleError
    minimum = -(1 << 63) if info.ge is None else info.ge
    maximum = (1 << 63) - 1 if info.le is None else info.le
    if not minimum <= value <= maximum:
        raise ImpossibleError
    return int(value)


def _reason(value: Any) -> Any:
    """A finish reason as text: some servers send an object with a type (`{"type": "length"}`), or a number."""
    if isinstance(value, dict):
        value = value.get("type") or value.get("reason") or ("unknown" if value else None)
    return str(value) if value and not isinstance(value, str) else value or None
