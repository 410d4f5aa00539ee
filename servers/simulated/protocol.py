"""Types and helpers that all simulated backends share: requests, completions and their encoding as bytes.

As in the real servers, request bodies are parsed leniently, and JSON is written without spaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.simulated import tokenizer
from loadgen.servers.simulated.scheduler import Job

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
    """Close the connection after the head, like a server that fails after it has started the response."""
    outermost: bool = False
    """The response lacks `ServerProtocol.head_suffix`, because an outer layer of the real server creates it."""


class ErrorReply(Exception):  # noqa: N818 - not our error: the response to a request that the server refuses
    """An exception that refuses a request. `reply` is the response that the client gets."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


class RequestTimes(NamedTuple):
    """Seconds that a request has spent in each phase so far: in the queue, in prefill and in decoding."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that generates tokens."""

    index: int  # number among all requests for tokens, from 0
    path: str
    body: Mapping[str, Any]
    created_s: int
    stop_after: int | None = None
    """Number of tokens after which the model stops by itself. None: the model never stops by itself."""
    fault: str = ""
    """Fault of the generated text, such as `invalid-json`. Empty: none."""
    generate_streams: bool = False
    """The body's field `stream` also decides on /generate, as on SGLang."""

    @property
    def streamed(self) -> bool:
        """True if the response is streamed.

        Responses on /generate_stream are always streamed. On any other path, the body's field `stream` decides. On
        /generate, the field is ignored unless `generate_streams` is set.
        """
        field_decides = self.path != "/generate" or self.generate_streams
        return self.path == "/generate_stream" or (field_decides and bool(self.body.get("stream")))


class Segment(NamedTuple):
    """A part of an answer: reasoning, text, or the arguments of a tool call."""

    kind: Literal["reasoning", "text", "tool_call"]
    end: int
    """Number of tokens of the answer up to the end of the segment."""
    name: str = ""
    """Name of the tool; empty for other segments."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of the simulated model for one accepted request."""

    streamed: bool
    prompt_tokens: int
    requested_tokens: int
    """Maximum number of new tokens, after the server has limited it. 0: the model generates no tokens."""
    ids: Sequence[int]
    """Token ids, at least one. A response without tokens has a single id that stands for the whole response."""
    texts: Sequence[bytes]
    """The text of each token, escaped for a JSON string."""
    finish_reason: str  # as this backend names it
    prompt: Sequence[int] = ()
    """Token ids of the prompt, if the prefix cache uses them."""
    cache_salt: str = ""
    segments: tuple[Segment, ...] = ()
    """The parts of the answer in order (loadgen.servers.simulated.segments). Empty: the whole answer is text."""
    inputs: int = 1
    """Number of inputs of a request for embeddings or scores."""
    finished_requests: int = 1
    """Number of finished requests that the server's metrics count for this completion."""
    siblings: tuple[Completion, ...] = ()
    """Further answers to the same request, which are sent together with this answer."""
    metric_requests: tuple[tuple[int, int], ...] = ()
    """(prompt tokens, maximum new tokens) of each request that the server's metrics count for this completion. Empty:
    the metrics count one request, with `prompt_tokens` and `requested_tokens`."""

    @property
    def output_tokens(self) -> int:
        """Number of tokens of this answer, at least 1. Tokens of `siblings` are not counted."""
        return len(self.ids)

    @property
    def steps(self) -> int:
        """Number of decode steps of the request, which is the number of tokens of its longest answer."""
        return max([self.output_tokens, *(sibling.output_tokens for sibling in self.siblings)])

    def generated_tokens(self, steps: int) -> int:
        """Return the total number of tokens of all answers after `steps` decode steps."""
        if not self.requested_tokens:
            return 0
        return sum(min(steps, answer.output_tokens) for answer in (self, *self.siblings))

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of this answer, in the format of the field `usage` in responses of TGI and LightLLM."""
        prompt_tokens = self.prompt_tokens
        output_tokens = self.output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }

    @property
    def text(self) -> str:
        """The text of this answer, without special tokens."""
        texts = (text for token, text in zip(self.ids, self.texts, strict=True) if token != tokenizer.EOS_ID)
        decoded: str = msgspec.json.decode(b'"%b"' % b"".join(texts))
        return decoded

    def cut_at_stop(self, stops: Sequence[str], reason: str, *, anywhere: bool) -> tuple[Completion, str, int]:
        """End the completion after the first token that completes one of the stop strings `stops`.

        Return three values: the shortened completion with the finish reason `reason`, the stop string, and its position
        in the text. If the text contains no stop string, return the unchanged completion, an empty string and the
        length of the text.

        - Without `anywhere`, a stop string counts only if it ends where a token ends. With `anywhere`, the token may
          continue after the stop string.
        - If a token completes several stop strings, the first of them in `stops` counts.

        The vocabulary consists of ASCII letters and spaces, so positions in bytes and in characters are equal.
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
"""Function that encodes one event, from (tokens sent before, tokens in this event, True if the event ends the
answer)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoders for the response to one request, both as a stream and as a non-streamed response."""

    completion: Completion
    encode: EventEncoder
    answer: Callable[[float], Reply]
    """Function that returns the non-streamed response, from the duration of the request in seconds."""
    failure: Events
    """Events that the server sends when a stream fails, up to the end of the stream."""
    merges: bool = False
    """True if several tokens can share one event. False: each token has an event, and the events of several tokens are
    sent in one write."""
    opening: Events = ()
    """Events sent together with the first token."""
    closing: Events = ()
    """Events sent together with the last token."""
    timed_closing: Callable[[RequestTimes], Events] | None = None
    """Function that returns the events sent together with the last token, for a stream that states its times. It is
    used instead of `closing`."""
    role_only: Events = ()
    """Chat: events that contain only the role, for the fault `role-first`. Empty: the fault uses `opening`."""
    head: Headers = ()
    """Headers of a streamed response that depend on the request."""
    media: Headers = ()
    """Content type of a streamed response that is not a stream of events. If the generation fails, such a response is
    cut off, because it cannot contain an error."""
    silent: bool = False
    """True if some tokens have no event. `encode` returns no bytes for these tokens."""
    on_job: Callable[[Job], object] | None = None
    """Called with the job of the request before it starts. None: the response does not depend on the job."""


def json_fields(bad_json: Callable[[str, int], Reply], _path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the JSON object in a request body, or an empty mapping if the body is another JSON value.

    Raises ErrorReply if the body is not JSON. `bad_json` creates the error response from two arguments: the message and
    the position that Python's json module reports.
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
    """Encode the next events of a request with several answers: one event for each answer that is not complete.

    `completions` contains the answers, and `encoders` contains the encoder of each answer. Each event contains `tokens`
    tokens, starting with token number `first`. The last event of an answer may have fewer.
    """
    events = []
    for completion, encode in zip(completions, encoders, strict=True):
        remaining = completion.output_tokens - first
        if remaining > 0:
            events.append(encode(first, min(tokens, remaining), remaining <= tokens))
    return b"".join(events)


def sse_event(payload: bytes) -> bytes:
    """Return `payload` as a server-sent event, with one space after `data:`."""
    return b"data: %b\n\n" % payload


DONE = sse_event(b"[DONE]")
TEXT = "\0text"
"""Placeholder for the text of a token in the events that are passed to `text_events`."""


def json_event(value: Any) -> bytes:
    """Return a server-sent event that contains `value` as JSON."""
    return sse_event(dumps(value))


def text_events(texts: Sequence[bytes], inner: Mapping[str, Any], final: Mapping[str, Any]) -> EventEncoder:
    """Return an encoder for events that contain one token each.

    In the events `inner` and `final`, the placeholder TEXT stands for the text of the token. `final` is the event of
    the last token, and `inner` that of all other tokens. `texts` contains the text of each token.
    """
    placeholder = dumps(TEXT)[1:-1]
    start, _, end = json_event(inner).rpartition(placeholder)
    final_start, _, final_end = json_event(final).rpartition(placeholder)

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        return final_start + texts[first] + final_end if last else start + texts[first] + end

    return encode


def events_reply(*payloads: bytes, headers: Headers = EVENTS_TYPE) -> Reply:
    """Return a complete event stream with status 200 that contains `payloads`.

    Servers send such a response if they have already chosen status 200 before they refuse the request.
    """
    return Reply(b"".join(map(sse_event, payloads)), headers=headers, chunked=True)


def json_reply(value: Any, headers: Headers = JSON_TYPE) -> Reply:
    """Return a response with status 200 and a JSON body."""
    return Reply(dumps(value), headers=headers)


def openai_error(message: str, kind: str, code: int, parameter: str | None = None) -> Reply:
    """Return an error response in OpenAI's format, which vLLM and LightLLM use.

    `kind` is the type of the error, and `code` is the HTTP status. `parameter` names the refused field.
    """
    return Reply(dumps({"error": {"message": message, "type": kind, "param": parameter, "code": code}}), code)


def integer(value: Any) -> int | None:
    """Return `value` as an integer, or None if `value` is not an integer.

    As in pydantic's lax mode, a float without a fraction and a string of digits also count as integers.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if isinstance(value, str) or value == int(value) else None
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """Return `value` as a float if it is an int or a float, and None otherwise."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
