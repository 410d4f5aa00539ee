"""The content of one request (`Request`), without the server's URL and the due time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from loadgen.workloads.images import SyntheticImage
from loadgen.workloads.recordings import Recording


class ParentEdge(msgspec.Struct, frozen=True, array_like=True):
    """A condition for a request: the start or end of another request of the session, and a delay after it."""

    id: int
    """Id of the other request, the parent."""
    after: str
    """`end`: the end of the parent's response. `start`: the time at which the parent was sent."""
    delay_ns: int


class Request(msgspec.Struct, frozen=True):
    """The content of one request: its prompt, the requested output length and additional fields."""

    id: int
    prompt: str | tuple[int, ...]  # Text, or token ids if the server's API accepts them
    input_tokens: int
    """Length of the prompt in tokens as the server counts it, including special tokens. 0: unknown before the run,
    because the prompt contains a response or an image."""
    output_tokens: int  # Requested length of the response
    messages: tuple[tuple[str, str], ...] = ()
    """Role and content of each chat message. The last message is `prompt`. Empty: `prompt` is the only message."""
    session: int | None = None
    """If the request is a turn of a session: the request id of the session's first turn."""
    turn: int = 0
    body: Mapping[str, Any] = {}
    """Fields from the user, merged into the request body that the server's `Dialect` builds."""
    images: tuple[str | SyntheticImage, ...] = ()
    """URLs of images in the last chat message."""
    recording: Recording | None = None
    """The recording to transcribe. None: the request is not one for a transcription."""
    batch: tuple[str | tuple[int, ...], ...] = ()
    """Further inputs after `prompt`. Only requests to pooling endpoints, such as embeddings, have further inputs."""
    inputs: int = 1
    """Number of inputs: `prompt` and those in `batch`. `input_tokens` covers all of them."""
    ignore_eos: bool = True
    """True if the server should continue past the end-of-text token up to the requested length."""
    model: str = ""
    """Model to request. Empty: the model of the run."""
    path: str = ""
    """Path of the request's URL, such as `/v1/chat/completions`. Empty: the path of the run's dialect."""
    headers: Mapping[str, str] = {}
    """HTTP headers of this request. They replace headers of the run that have the same name in any spelling."""
    raw: bytes = b""
    """The exact bytes of the request's body. Empty: the server's `Dialect` encodes the body."""
    role: str = ""
    """Role of the request in a session that is a graph, such as `root` or `sub-agent`."""
    agent: int | None = None
    """Id of the first request of the agent that makes this request. None or the session's first request: the main agent
    of the session."""
    parent_agent: int | None = None
    """For a request of a sub-agent: id of the first request of the agent that has started the sub-agent."""
    parents: tuple[ParentEdge, ...] = ()
    """Conditions of a request in a session that is a graph. The request is due when all of them are met."""
    tool_ns: int = 0
    """Time in ns before the request during which tools run, as part of the delays of `parents`."""
    expect: str = ""
    """Text that the response must contain, which the file with the request states. Empty: any text."""
    expected: Any = None
    """Tools and JSON schema that the response is checked against, which loadgen.servers.backends.output_check reads
    from the encoded body. None: the response is not checked."""


def merged_headers(*headers: Mapping[str, str]) -> dict[str, str]:
    """Merge several sets of headers. If two sets have a header of the same name, the later set wins.

    Header names that differ only in upper and lower case count as the same name.
    """
    result: dict[str, tuple[str, str]] = {}
    for fields in headers:
        for name, value in fields.items():
            result[name.lower()] = name, value
    return dict(result.values())


def new_id_prefix() -> str:
    """Return a random prefix for the request ids of a run. Two runs practically never get the same prefix."""
    return secrets.token_hex(6)


def wire_id(prefix: str, number: int) -> str:
    """Return the id that a request has on the wire, such as `5f0c9a1be2d4-17` for request 17.

    A warm-up request has a negative number. Its id ends in `w1` for -1, `w2` for -2, and so on."""
    return f"{prefix}-{number}" if number >= 0 else f"{prefix}-w{-number}"


def number_of_wire_id(text: str) -> int:
    """Return the request number that an id contains, for example 17 for `5f0c9a1be2d4-17`.

    `text` is the id that the request has on the wire. The id of a warm-up request contains a negative number, for
    example -2 in `5f0c9a1be2d4-w2`. Raises ValueError if `text` contains no number in this form.
    """
    last = text.rpartition("-")[2]
    return -int(last[1:]) if last.startswith("w") else int(last)


def merged(fields: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `fields` updated with `patch`, as defined by JSON Merge Patch (RFC 7396).

    Nested objects are merged. A field whose value in `patch` is null is removed."""
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
