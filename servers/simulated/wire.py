"""The shapes that every simulated protocol fills in: what was asked, its answer in bytes, and the pages beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from servers.simulated.config import SimulatedConfig
from servers.simulated.metrics import Metrics
from servers.simulated.timing import Gauges
from servers.simulated.tokenizer import Babble

Headers = tuple[tuple[str, str], ...]
Events = tuple[bytes, ...]
"""Server-sent events, each complete with its blank line."""

JSON_TYPE: Headers = (("content-type", "application/json"),)
EVENT_STREAM_TYPE: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
TEXT_TYPE: Headers = (("content-type", "text/plain; charset=utf-8"),)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer that is known as a whole."""

    body: bytes = b""
    status: int = 200
    headers: Headers = JSON_TYPE
    chunked: bool = False
    """The body is sent with the chunked transfer coding, as every event stream is."""


class Refused(Exception):  # noqa: N818 - not a mistake of ours: the server's answer to a request it does not take
    """A request that gets a Reply instead of tokens."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


class EventOf(Protocol):
    """(tokens sent before, tokens in this event, whether the answer ends with it) to the event's bytes."""

    def __call__(self, first: int, tokens: int, last: bool, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Question:
    """One request for tokens, as it came in."""

    index: int
    """Its place among all requests for tokens."""
    body: Mapping[str, Any]
    created_s: int
    stop_after: int | None
    """The model ends its answer by itself after so many tokens; None: it does not."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that was accepted, and every byte of its answer."""

    prompt_tokens: int
    output_tokens: int
    asked_tokens: int
    """The limit on new tokens, after the server's clamping."""
    finish_reason: str
    streamed: bool
    event: EventOf
    answer: Callable[[float], Reply]
    """The whole answer of a request that is not streamed, from the seconds that it took."""
    merges: bool
    """Several tokens can share one event. Otherwise each has its own, and the events leave in one send."""
    opening: Events = ()
    """Sent together with the first token."""
    closing: Events = ()
    """Sent together with the last token."""
    role_only: Events = ()
    """Chat: what a server sends that announces the role before it has generated anything."""
    failure: Events = ()
    """The server's own words for an error after the stream has begun, up to the end of the stream."""
    head: Headers = ()
    """Headers of the stream that depend on the request."""


class Live(Protocol):
    """An answer on its way, as far as pages want to know."""

    count: int
    """Tokens generated so far."""
    prompt_tokens: int


@dataclass(slots=True)
class Site:
    """What the pages of one running server know."""

    config: SimulatedConfig
    babble: Babble
    metrics: Metrics
    started_s: int
    gauges: Callable[[], Gauges]
    streams: set[Live] = field(default_factory=set)
    """Accepted requests that are not finished."""


Generate = Callable[[Site, Question], Generation]
"""Raises Refused."""
Page = Callable[[Site, bytes], Reply]
"""Raises Refused."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One server's side of HTTP."""

    before: str
    """Head lines of every answer, ahead of its own headers; `{date}` is filled in."""
    after: str
    """The same, behind them."""
    stream_headers: Headers
    keep_alive_s: float
    """An idle connection is closed after so long."""
    body_limit: int
    """In bytes; a larger body gets `too_large`."""
    generate: Mapping[str, Generate]
    """POST routes that make tokens."""
    pages: Mapping[tuple[str, str], Page]
    """(method, path) to everything else."""
    bad_type: Reply | None
    """Answer to a POST whose content type is not JSON; None: the server does not mind."""
    bad_json: Callable[[str, int], Reply]
    """(message, position) of what Python's json module says about a body."""
    too_large: Reply
    not_found: Reply
    not_allowed: Callable[[str], Reply]
    """The methods that the path has, to an answer for one that it has not."""
    failure: Callable[[int], Reply]
    """An answer with status 429, 500 or 503 in the server's own words."""
    overloaded: Callable[[Generation], Reply] | None
    """Refusal past the limit on concurrent requests; None: the server lets them wait."""
    guarded: Callable[[str], bool]
    """Paths that want the API key."""
    unauthorized: Reply
    default_limit: int | None
    """Concurrent requests, where nothing else is said."""


def event(payload: bytes) -> bytes:
    """One server-sent event, with one blank after the colon."""
    return b"data: %b\n\n" % payload


DONE = event(b"[DONE]")


def events_reply(*payloads: bytes, headers: Headers = EVENT_STREAM_TYPE) -> Reply:
    """An event stream that is known as a whole, as a refusal after status 200 is."""
    return Reply(b"".join(map(event, payloads)), headers=headers, chunked=True)
