"""Checks that text and values from a user can be sent in the JSON body of a request.

Python accepts values that JSON cannot represent: `NaN`, `1e999` (an infinity), halves of surrogate pairs (`"\\ud83d"`)
and integers of any size. All code that reads prompts or body fields calls this module. An invalid value therefore
causes an error that names its location, before any request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from loadgen.workloads.spec_syntax import WorkloadError

INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
"""Range of the integers that the JSON encoder and common servers support."""
NESTING_LIMIT = 64
BYTE_ESCAPES = range(0xDC80, 0xDD00)
"""Code points to which `surrogateescape` decodes bytes that are not UTF-8."""


def check_text(text: str, name: str) -> None:
    """Raise WorkloadError if the text cannot be encoded in UTF-8. `name` is the text's name in the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise WorkloadError(
            f"{name} cannot be sent: it holds half of a surrogate pair, \\u{half:04x}, at character {error.start + 1}",
            "a string was cut inside a character such as an emoji: write the whole character, or remove the half",
        ) from None


def check_value(value: Any, name: str, depth: int = 0) -> None:
    """Raise WorkloadError if JSON cannot represent the value or a value nested in it.

    `name` is the path of the value in messages, such as `body.stop[0]`. `depth` is the nesting depth of the value."""
    if isinstance(value, str):
        check_text(value, name)
    elif isinstance(value, float):
        if not isfinite(value):
            raise WorkloadError(
                f"{name} is {_as_written(value)}, which is no JSON number", "write a finite number, or leave it out"
            )
    elif isinstance(value, int):  # true and false included
        if not INT_MIN <= value <= INT_MAX:
            raise WorkloadError(
                f"{name} is an integer of {value.bit_length()} bits", f"write one from {INT_MIN} to {INT_MAX}"
            )
    elif isinstance(value, Mapping | list | tuple):
        _check_members(value, name, depth)
    elif value is not None:
        raise WorkloadError(
            f"{name} is of the type {type(value).__name__}, which JSON does not have", "write it as text, in quotes"
        )


def check_file_text(text: str) -> None:
    """Raise WorkloadError if text from a file contains a byte that is not UTF-8.

    The text must have been decoded with `surrogateescape`, which turns such bytes into surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        byte = f"the byte 0x{half - 0xDC00:02x}" if half in BYTE_ESCAPES else "half of a surrogate pair"
        raise WorkloadError(
            f"{byte} at character {error.start + 1} is not UTF-8", "save the file as UTF-8, or remove the bytes"
        ) from None


def _check_members(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...], name: str, depth: int) -> None:
    """Raise WorkloadError if a member of the object or list `value` is invalid. Nested members are checked too.

    `name` is the path of the object or list in messages, such as `body.stop`, or "" for the outermost object of an
    option. `depth` is its nesting depth.
    """
    if depth == NESTING_LIMIT:
        raise WorkloadError(f"{name[:20]}... is nested more than {NESTING_LIMIT} levels deep", "send a flatter object")
    if not isinstance(value, Mapping):
        for index, item in enumerate(value):
            check_value(item, f"{name}[{index}]", depth + 1)
        return
    owner = name or "the object"
    for key, item in value.items():
        if not isinstance(key, str):
            raise WorkloadError(f"{owner} has the name {key!r}, which is not text", "write names in quotes")
        check_text(key, f"a name in {owner}")
        check_value(item, f"{name}.{key}" if name else key, depth + 1)


def _as_written(value: float) -> str:
    """Return NaN or an infinity as JavaScript and Python's `json` write it, such as `Infinity`."""
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
