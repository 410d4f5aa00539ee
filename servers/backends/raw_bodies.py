"""Adds missing fields to request bodies that the user wrote, and chooses the dialect that decodes each response.

A field is added only if the response could not be measured without it. These fields are `stream` and, on the OpenAI
endpoints, `stream_options`, which requests the token counts. They are added at the end of the body, so that all bytes
before them stay as the user wrote them.

A body with `"stream": false` is not changed. Its response arrives in one piece, so it has no TTFT and no TPOT.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from loadgen.servers.backends import whole_response
from loadgen.servers.backends.dialect import Dialect

STREAM = b'"stream":true'
USAGE = b'"stream_options":{"include_usage":true}'
ADDED_FIELDS: dict[str, tuple[bytes, ...]] = {
    "completions": (STREAM, USAGE),
    "chat": (STREAM, USAGE),
    "responses": (STREAM,),
    "messages": (STREAM,),
}
"""Fields that a raw body needs, by endpoint. TGI and LightLLM stream on a separate path, so they need no field."""


class _StreamFields(msgspec.Struct):
    """The fields of a request body that decide whether the response is streamed, and what the stream contains."""

    stream: Any = None
    stream_options: Any = None


_FIELDS = msgspec.json.Decoder(_StreamFields)


def added_fields(body: bytes, dialect: Dialect) -> tuple[bytes, ...]:
    """Return the JSON fields that must be added to a request body so that its response can be measured.

    For example, the field `"stream":true` is added to a chat request that does not have it. The result is empty if the
    body turns streaming off.
    """
    present = _FIELDS.decode(body)
    if present.stream is False:
        return ()
    needed = ADDED_FIELDS.get(dialect.endpoint, ())
    if dialect.server == "sglang" and dialect.endpoint == "generate":
        needed = (STREAM,)
    has = {STREAM: present.stream is not None, USAGE: present.stream_options is not None}
    return tuple(field for field in needed if not has[field])


def complete_body(body: bytes, dialect: Dialect) -> tuple[bytes, Dialect]:
    """Return the body with the fields that the measurement needs, and the dialect that decodes the response.

    `dialect` is the dialect of the request's path. Normally it is returned unchanged. The response arrives in one piece
    if the body has `"stream": false`. In this case, the body is returned unchanged, with a dialect that decodes such a
    response.
    """
    if dialect.streams and _FIELDS.decode(body).stream is False:
        return body, in_one_piece(dialect)
    fields = added_fields(body, dialect) if dialect.streams else ()
    if not fields:
        return body, dialect
    begin = body[:-1]
    separator = b"" if begin.strip() == b"{" else b","
    return begin + separator + b",".join(fields) + b"}", dialect


@lru_cache(64)
def in_one_piece(dialect: Dialect) -> Dialect:
    """Return a copy of `dialect` for responses that arrive in one piece, as one JSON object instead of a stream.

    For example, a server answers in one piece if the request has `"stream": false`.
    """
    return replace(
        dialect,
        streams=False,
        generates_in_one_piece=True,
        decode=whole_response.decode,
        text=whole_response.text,
        fixed_output=False,
    )


def dialect_for_path(dialects: Mapping[str, Dialect], path: str) -> Dialect | None:
    """Return the dialect for requests to `path`, or None if no endpoint has such a path.

    `dialects` contains the dialect of each endpoint of a backend. The endpoint is the one whose path is the end of
    `path`. For example, `/openai/deployments/gpt/chat/completions` belongs to the chat endpoint. The returned dialect
    sends requests to exactly `path`.
    """
    route = path.partition("?")[0].rstrip("/")
    for dialect in sorted(dialects.values(), key=lambda dialect: -len(dialect.path)):
        if route.endswith(dialect.path.removeprefix("/v1")):
            return dialect.at(path)
        if f"{route}_stream" == dialect.path:  # TGI and LightLLM answer in one piece on /generate
            return in_one_piece(dialect).at(path)
    return None
