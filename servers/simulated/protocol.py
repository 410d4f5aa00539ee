"""Types and helpers that all simulated protocols share: requests, completions and their encoding as bytes.

Bodies are read leniently, as the real servers read them. JSON is written compactly, as all three servers write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec

from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.simulated import tokenizer

Headers = tuple[tuple[str, str], ...]
Events = tuple[bytes, ...]  # server-sent events, each with its blank line

JSON_TYPE: Headers = (("content-type", "application/json"),)
EVENTS_TYPE: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
TEXT_TYPE: Headers = (("content-type", "text/plain; charset=utf-8"),)

NATIVE_ROUTES = ("/", "/generate", "/generate_stream")
"""Routes of TGI's and LightLLM's native APIs."""
dumps = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP response."""

    body: bytes = b""
    status: int = 200
    headers: Headers = JSON_TYPE
    chunked: bool = False
    """Use chunked transfer coding, as every event stream does."""
    cut: bool = False
    """Close the connection after the head: the server failed after it had started the response."""
    outermost: bool = False
    """The response comes from a layer of the server outside the one that adds `ServerProtocol.head_suffix`."""


class ErrorReply(Exception):  # noqa: N818 - not our error: the response to a request that the server refuses
    """Raised to refuse a request with a Reply."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request for tokens."""

    index: int  # number among all requests for tokens, from 0
    path: str
    body: Mapping[str, Any]
    created_s: int
    stop_after: int | None = None
    """Number of tokens after which the model stops by itself. None: it never does."""

    @property
    def streamed(self) -> bool:
        """True if the response is streamed. Two native routes imply it; on the others the body decides."""
        return self.path == "/generate_stream" or (self.path != "/generate" and bool(self.body.get("stream")))


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's output for one accepted request."""

    streamed: bool
    prompt_tokens: int
    requested_tokens: int
    """Maximum number of new tokens, after the server has limited it. 0: nothing is generated."""
    ids: Sequence[int]
    """Token ids, at least one. For responses without tokens the one entry stands for the whole response."""
    texts: Sequence[bytes]
    """The text of each token, escaped for a JSON string."""
    finish_reason: str  # in the server's own words
    prompt: Sequence[int] = ()
    """Token ids of the prompt, if the prefix cache uses them."""
    cache_salt: str = ""
    siblings: tuple[Completion, ...] = ()
    """Further answers to the same request. They are sent together with this one."""
    metric_requests: tuple[tuple[int, int], ...] = ()
    """(prompt tokens, maximum new tokens) of each request that the server's metrics count for this one. Empty: one
    request, with the values above."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens of this answer, at least 1."""
        return len(self.ids)

    @property
    def steps(self) -> int:
        """Number of tokens of the longest answer."""
        return max([self.output_tokens, *(sibling.output_tokens for sibling in self.siblings)])

    def generated_tokens(self, steps: int) -> int:
        """Return the number of tokens of all answers after `steps` decode steps."""
        if not self.requested_tokens:
            return 0
        return sum(min(steps, answer.output_tokens) for answer in (self, *self.siblings))

    @property
    def usage(self) -> dict[str, int]:
        """Token counts in the form of TGI and LightLLM."""
        prompt_tokens = self.prompt_tokens
        output_tokens = self.output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }

    @property
    def text(self) -> str:
        """The whole output, without special tokens."""
        texts = (text for token, text in zip(self.ids, self.texts, strict=True) if token != tokenizer.EOS_ID)
        decoded: str = msgspec.json.decode(b'"%b"' % b"".join(texts))
        return decoded

    def cut_at_stop(self, stops: Sequence[str], reason: str, *, anywhere: bool) -> tuple[Completion, str, int]:
        """Return the completion up to the first token that completes one of `stops`.

        If a token completes several of them, the first in the list counts. By default the stop string must be at the
        end of the token; with `anywhere` the token may continue after it. Also returns the stop string, which is empty
        if there is none, and where it starts in the text. Texts of the vocabulary are letters and blanks, so a byte is
        a character.
        """
        whole = b"".join(self.texts)
        for index, end in enumerate(accumulate(map(len, self.texts))):
            for stop in stops:
                earliest = max(0, end - len(self.texts[index]) - len(stop) + 1)
                start = whole.find(stop.encode(), earliest, end) if anywhere else end - len(stop)
                if start >= 0 and whole.startswith(stop.encode(), start):
                    ids = self.ids[: index + 1]
                    texts = self.texts[: index + 1]
                    return replace(self, ids=ids, texts=texts, finish_reason=reason), stop, start
        return self, "", len(whole)


EventEncoder = Callable[[int, int, bool], bytes]
"""From (tokens sent before, tokens in this event, whether the answer ends with it) to the bytes of the event."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The bytes of a completion, streamed or whole."""

    completion: Completion
    encode: EventEncoder
    answer: Callable[[float], Reply]
    """The response without streaming, from its duration in seconds."""
    failure: Events
    """The server's error after a stream has started, up to the end of the stream."""
    merges: bool = False
    """Several tokens can share one event. Otherwise each token has an event, and they leave in one send."""
    opening: Events = ()
    """Events sent together with the first token."""
    closing: Events = ()
    """Events sent together with the last token."""
    role_only: Events = ()
    """Chat: the events that announce the role before any token, if these are not `opening`."""
    head: Headers = ()
    """Headers of the stream that depend on the request."""
    silent: bool = False
    """Some tokens have no event; `encode` returns nothing for them."""


def json_fields(bad_json: Callable[[str, int], Reply], _path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the JSON object in a body, or an empty one for any other value.

    Raises ErrorReply for a body that is not JSON. `bad_json` makes the reply from the message and the position of
    Python's json module.
    """
    try:
        result = msgspec.json.decode(body)
    except DECODE_ERRORS:
        message = "not JSON"
        position = 0
        try:
            json.loads(body)
        except ValueError as problem:
            message = getattr(problem, "msg", str(problem))
            position = getattr(problem, "pos", 0)
        except RecursionError:
            message = "nested too deeply"
        raise ErrorReply(bad_json(message, position)) from None
    return result if isinstance(result, dict) else {}


def merge_events(
    completions: Sequence[Completion], encoders: Sequence[EventEncoder], first: int, tokens: int, _last: bool
) -> bytes:
    """Encode one event of each answer that still has tokens."""
    events = []
    for completion, encode in zip(completions, encoders, strict=True):
        remaining = completion.output_tokens - first
        if remaining > 0:
            events.append(encode(first, min(tokens, remaining), remaining <= tokens))
    return b"".join(events)


def sse_event(payload: bytes) -> bytes:
    """Return a server-sent event, with one blank after the colon."""
    return b"data: %b\n\n" % payload


DONE = sse_event(b"[DONE]")
TEXT = "\0text"
"""Placeholder for the text of a token in `text_events`."""


def json_event(value: Any) -> bytes:
    """Return a server-sent event of a JSON value."""
    return sse_event(dumps(value))


def text_events(texts: Sequence[bytes], inner: Mapping[str, Any], final: Mapping[str, Any]) -> EventEncoder:
    """Encode one event per token: `inner`, or `final` for the last, with the token's text in place of TEXT."""
    placeholder = dumps(TEXT)[1:-1]
    start, _, end = json_event(inner).rpartition(placeholder)
    final_start, _, final_end = json_event(final).rpartition(placeholder)

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        return final_start + texts[first] + final_end if last else start + texts[first] + end

    return encode


def events_reply(*payloads: bytes, headers: Headers = EVENTS_TYPE) -> Reply:
    """Return a complete event stream, such as a refusal after status 200."""
    return Reply(b"".join(map(sse_event, payloads)), headers=headers, chunked=True)


def json_reply(value: Any, headers: Headers = JSON_TYPE) -> Reply:
    """Return a response with status 200 and a JSON body."""
    return Reply(dumps(value), headers=headers)


def openai_error(message: str, kind: str, code: int, parameter: str | None = None) -> Reply:
    """Return an error in the form of vLLM and LightLLM."""
    return Reply(dumps({"error": {"message": message, "type": kind, "param": parameter, "code": code}}), code)


def integer(value: Any) -> int | None:
    """Return an integer as pydantic's lax mode reads it, from a number without fraction or a string; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if isinstance(value, str) or value == int(value) else None
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """Return a number as a float, and None for any other value."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
