"""Defines the Request: the content of one request, without a URL and without a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.workloads.images import SyntheticImage


class Request(msgspec.Struct, frozen=True):
    """The content of one request."""

    id: int
    prompt: str | tuple[int, ...]  # Text, or token ids if the server's API accepts them
    input_tokens: int
    """Length of the prompt in tokens as the server counts it, including special tokens. 0: unknown before the run,
    because the prompt contains a response or an image."""
    output_tokens: int  # Requested length of the response
    messages: tuple[tuple[str, str], ...] = ()
    """Role and content of each message of the chat. The last one is `prompt`. Empty: a chat of `prompt` alone."""
    session: int | None = None
    """For a turn of a session: the request id of its first turn."""
    turn: int = 0
    body: Mapping[str, Any] = {}
    """Fields of the user, merged into the body that the Dialect sends."""
    images: tuple[str | SyntheticImage, ...] = ()
    """URLs of images in the last message of a chat."""
    ignore_eos: bool = True
    """True if the server should continue past the end-of-text token up to the requested length."""


def merged(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the patch applied: objects are merged, and null removes a field (JSON Merge Patch, RFC
    7396)."""
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
