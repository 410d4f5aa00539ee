"""The shapes that every simulated protocol fills in: what was asked for, and its answer in bytes.

Bodies are read the way lenient servers do, and JSON is written compactly, as all three write it.
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
Events = tuple[bytes, ...]  # server-sent events, each complete with its blank line

JSON_TYPE: Headers = (("content-type", "application/json"),)
EVENTS_TYPE: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
TEXT_TYPE: Headers = (("content-type", "text/plain; charset=utf-8"),)

NATIVE = ("/", "/generate", "/generate_stream")  # TGI's and LightLLM's own routes
dumps = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer that is known as a whole."""

    body: bytes = b""
    status: int = 200
    headers: Headers = JSON_TYPE
    chunked: bool = False  # sent with the chunked transfer coding, as every event stream is
    cut: bool = False  # the connection ends behind the head: the server failed after it had begun the response
    outermost: bool = False  # sent by a layer of the server outside the one that adds the headers behind all others


class ErrorReply(Exception):  # noqa: N818 - not a mistake of ours: the server's answer to a request it does not take
    """A request that gets a Reply instead of tokens."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request for tokens, as it came in."""

    index: int  # its place among all requests for tokens
    path: str
    body: Mapping[str, Any]
    created_s: int
    stop_after: int | None = None  # the model ends its answer by itself after so many tokens; None: it does not

    @property
    def streamed(self) -> bool:
        """Two of the native routes say so themselves; elsewhere the body does."""
        return self.path == "/generate_stream" or (self.path != "/generate" and bool(self.body.get("stream")))


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model says to one accepted request."""

    streamed: bool
    prompt_tokens: int
    requested_tokens: int  # the limit on new tokens, after the server's clamping; 0: nothing is generated
    ids: Sequence[int]  # at least one, which of an answer without tokens stands for all of it
    texts: Sequence[bytes]  # of each token, as it can stand inside a JSON string
    finish_reason: str  # the server's own word
    prompt: Sequence[int] = ()  # token ids, where the prefix cache is to know them
    salt: str = ""
    others: tuple[Completion, ...] = ()  # further answers of the same request, which leave together with this one
    counted: tuple[tuple[int, int], ...] = ()
    """(prompt tokens, maximum of new tokens) as often as the server's metrics count them. Empty: once, as above."""

    @property
    def output_tokens(self) -> int:
        """At least one."""
        return len(self.ids)

    @property
    def steps(self) -> int:
        """Tokens of the longest answer."""
        return (
            max(self.output_tokens, *(other.output_tokens for other in self.others)) if self.others else len(self.ids)
        )

    def generated(self, steps: int) -> int:
        """Tokens of all answers after so many steps."""
        return sum(min(steps, each.output_tokens) for each in (self, *self.others)) if self.requested_tokens else 0

    @property
    def usage(self) -> dict[str, int]:
        """As TGI and LightLLM count it."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    @property
    def text(self) -> str:
        """The whole answer, without special tokens."""
        shown = (text for token, text in zip(self.ids, self.texts, strict=True) if token != tokenizer.EOS_ID)
        said: str = msgspec.json.decode(b'"%b"' % b"".join(shown))
        return said

    def stopped(self, stops: Sequence[str], reason: str, *, anywhere: bool) -> tuple[Completion, str, int]:
        """Ends with the first token that completes one of `stops`, the first of them where several do; `anywhere`: also
        where the token goes on behind it. With that stop, empty where there is none, and where in the text it begins.
        Texts of the vocabulary are letters and blanks: a byte is a character."""
        whole = b"".join(self.texts)
        for index, end in enumerate(accumulate(map(len, self.texts))):
            for stop in stops:
                begun = max(0, end - len(self.texts[index]) - len(stop) + 1)
                result = whole.find(stop.encode(), begun, end) if anywhere else end - len(stop)
                if result >= 0 and whole.startswith(stop.encode(), result):
                    retained = replace(self, ids=self.ids[: index + 1], texts=self.texts[: index + 1])
                    return replace(retained, finish_reason=reason), stop, result
        return self, "", len(whole)


EventEncoder = Callable[[int, int, bool], bytes]
"""(tokens sent before, tokens in this event, whether the answer ends with it) to the event's bytes."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A completion on the wire: every byte of it, streamed or whole."""

    completion: Completion
    event: EventEncoder
    answer: Callable[[float], Reply]  # where it is not streamed: all of it, from the seconds that it took
    failure: Events  # an error after the stream has begun, in the server's words, up to the end of the stream
    merges: bool = False  # several tokens can share one event; else each has its own, and they leave in one send
    opening: Events = ()  # sent together with the first token
    closing: Events = ()  # sent together with the last token
    role_only: Events = ()  # chat: what announces the role before a token, where it is not `opening`
    head: Headers = ()  # headers of the stream that depend on the request
    silent: bool = False  # some tokens have no event: theirs is empty


def json_fields(bad_json: Callable[[str, int], Reply], _path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """The JSON object in a body, empty for another value. `bad_json` makes the answer to a body that is no JSON, from
    the message of Python's json module and its position. Raises ErrorReply."""
    try:
        result = msgspec.json.decode(body)
    except DECODE_ERRORS:
        message, index = "not JSON", 0
        try:
            json.loads(body)
        except ValueError as problem:
            message, index = getattr(problem, "msg", str(problem)), getattr(problem, "pos", 0)
        except RecursionError:
            message = "nested too deeply"
        raise ErrorReply(bad_json(message, index)) from None
    return result if isinstance(result, dict) else {}


def together(
    made: Sequence[Completion], encoders: Sequence[EventEncoder], first: int, tokens: int, _last: bool
) -> bytes:
    """Events of several answers: one of each answer that has a token here."""
    events = []
    for completion, encode in zip(made, encoders, strict=True):
        left = completion.output_tokens - first
        if left > 0:
            events.append(encode(first, min(tokens, left), left <= tokens))
    return b"".join(events)


def event(payload: bytes) -> bytes:
    """One server-sent event, with one blank after the colon."""
    return b"data: %b\n\n" % payload


DONE = event(b"[DONE]")
TEXT = "\0text"  # stands for the text of an event's tokens in `text_events`


def json_event(value: Any) -> bytes:
    """One server-sent event of a JSON value."""
    return event(dumps(value))


def text_events(texts: Sequence[bytes], inner: Mapping[str, Any], final: Mapping[str, Any]) -> EventEncoder:
    """Events of one token each: `inner`, or `final` for the last, with the token's text in place of TEXT."""
    mark = dumps(TEXT)[1:-1]
    begin, _, end = json_event(inner).rpartition(mark)
    final_begin, _, final_end = json_event(final).rpartition(mark)

    def encode(first: int, _tokens: int, last: bool) -> bytes:
        return final_begin + texts[first] + final_end if last else begin + texts[first] + end

    return encode


def events_reply(*payloads: bytes, headers: Headers = EVENTS_TYPE) -> Reply:
    """An event stream that is known as a whole, as a refusal after status 200 is."""
    return Reply(b"".join(map(event, payloads)), headers=headers, chunked=True)


def ok(value: Any, headers: Headers = JSON_TYPE) -> Reply:
    """200 with a JSON body."""
    return Reply(dumps(value), headers=headers)


def openai_error(message: str, kind: str, code: int, parameter: str | None = None) -> Reply:
    """An error as vLLM and LightLLM say it."""
    return Reply(dumps({"error": {"message": message, "type": kind, "param": parameter, "code": code}}), code)


def integer(value: Any) -> int | None:
    """A number without fraction, or a string of one, as pydantic's lax mode takes it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if isinstance(value, str) or value == int(value) else None
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """A number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
