"""The Request: what is asked, without a URL and without a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.workloads.images import SyntheticImage


class Request(msgspec.Struct, frozen=True):
    """One question for a server. `prompt` is text, or token ids where the server's API takes them. `input_tokens` is
    its exact length as the server counts it, special tokens included; 0 where an answer or a picture is part of it,
    which nobody can count beforehand. `output_tokens` is the length asked for."""

    id: int
    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of a chat so far, the last one `prompt`. Empty: a chat of `prompt` alone."""
    session: int | None = None
    """Where this is a turn of a session: the id of its first turn."""
    turn: int = 0
    body: Mapping[str, Any] = {}
    """Fields of the user's, merged into what the Dialect sends."""
    images: tuple[str | SyntheticImage, ...] = ()
    """URLs of pictures that go with a chat's last message."""
    ignore_eos: bool = True
    """Whether the answer shall have its whole length even where the model would end it, if the server can do that."""


def merged(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with those of the patch in their place: objects field by field, and null takes one out (JSON Merge
    Patch, RFC 7396)."""
    result = dict(fields)
    for name, value in patch.items():
        if isinstance(value, Mapping):
            before = result.get(name)
            result[name] = merged(before if isinstance(before, Mapping) else {}, value)
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result
