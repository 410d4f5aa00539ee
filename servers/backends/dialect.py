"""Defines `Dialect`, the protocol of one server on one endpoint.

A dialect encodes a Request as bytes, and decodes the events of a response into an Answer. Dialects consist of data and
pure functions without I/O. The asyncio driver, the interactive mode and the tests use the same dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from loadgen.workloads.request import Request, merged

ResultT = TypeVar("ResultT")
ChunkCounts = Literal["ids", "usage", "event", "chunk", ""]
"""Source of the token count of each chunk, best evidence first:

- `ids`: token ids in the chunk.
- `usage`: growth of the server's running total of tokens.
- `event`: the server sends one event per token.
- `chunk`: each chunk with text is counted as one token, because the server does not report the number.
- Empty: unknown, in run files of earlier versions.
"""
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
"""A number of tokens that a server reports. An event with a number out of this range counts as malformed."""

Inputs = Literal["one", "several", "pairs", "recording"]
"""Which inputs a request takes: one prompt (`one`), several independent inputs (`several`), several documents that
share a query (`pairs`), or a recording of speech (`recording`)."""

Encode = Callable[[Request, str], bytes]
SplitBody = Callable[[bytes, bool], Sequence[bytes]]
"""Function that splits the body of a response into payloads. Together, the payloads are the body. The second argument
is True if HTTP proves that the body is complete. A body that ends with the connection may have been cut off."""
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"

REFUSABLE = {
    "continuous_usage_stats": "",  # before `stream_options`, the field that contains it, because refusals name both
    "stream_options": "",
    "ignore_eos": "",
    "min_tokens": "",
    "do_sample": "",
    "temperature": "",
    "store": "",
    "max_tokens": "max_completion_tokens",
}
"""Fields that some servers or gateways refuse, with the newer name that they accept. Empty: the field is left out."""


def no_calls(_payloads: Sequence[bytes]) -> Sequence[Any]:
    """Return no tool calls. Dialects of an API without tools use this function."""
    return ()


def nothing_to_complete(_answer: Answer, _request: Request) -> None:
    """Do nothing. Dialects use this function if the response alone contains everything that an Answer needs."""


def bearer_header(key: str | None) -> dict[str, str]:
    """Return the Authorization header for an API key, or an empty dict if there is no key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def azure_header(key: str | None) -> dict[str, str]:
    """Return the header for an API key of Azure OpenAI, or an empty dict if there is no key."""
    return {"api-key": key} if key else {}


@dataclass(slots=True)
class Answer:
    """The decoded content of one response.

    The token counts of all events are in one list, because an object per event would cost more than decoding the event.
    """

    tokens: list[int]  # Tokens generated in event i; 0 for an event without (role only, usage, keep-alive, end marker)
    end_event: int | None = None  # Index of the event that is the dialect's end marker. None: there was none.
    prompt_tokens: int | None = None  # Prompt length that the server reported
    output_tokens: int | None = None  # Generated tokens, from the source in `counted_by`
    counted_by: Literal["server", "wire", "chunks", ""] = ""  # As in Record
    finish_reason: str = ""  # As the server reports it: `length`, `stop`, `eos_token`, ...
    error_kind: Literal["", "in_band_error", "rejected", "protocol"] = ""  # Error in a stream with status 200
    error_detail: str = ""  # Message of the server or of loadgen, at most 300 characters
    chunk_counts: ChunkCounts = ""  # Source of `tokens`
    hidden_tokens: int = 0  # Tokens that the server generated and counted, but never streamed
    reasoning_reported: bool = False  # The server reports the number of reasoning tokens, 0 included; as `text_bytes`.
    text_bytes: int = 0  # UTF-8 bytes of the text. Only set if `tokens` counts chunks and the server's total is larger.
    phrase_chunks: int = 0  # Chunks of more than one word. Set like `text_bytes`.
    refuted_total: int | None = None  # The server's total of 0, if tokens were streamed nevertheless
    counts: dict[str, int] = field(default_factory=dict)
    """Counts for `Record.marks`, by name. `cached_prompt_tokens` is the number of prompt tokens in the prefix cache.
    `reasoning_tokens` is the number of reasoning tokens that the server reports, if it is not 0. `reasoning_chunks` is
    the number of chunks before the answer, if the response begins with reasoning. `inputs` is the number of results in
    the response of a pooling endpoint, and in the Record the number of inputs. `draft_steps`, `draft_tokens` and
    `accepted_draft_tokens` are the counts of speculative decoding (loadgen.servers.backends.draft_counts). `audio_us`
    is the length of the recording or of the speech in microseconds, and `audio_bytes` the size of the speech."""
    events: dict[str, int] = field(default_factory=dict)
    """Indices of events whose arrival time is stored in `Record.marks`, by name. `first_answer_ns` is the first chunk
    with text that is not reasoning, if the response begins with reasoning. `first_audio_ns` is the first sample of
    speech."""


class Route(msgspec.Struct, Generic[ResultT], frozen=True):
    """A server route that answers a question about a text, such as its number of tokens.

    It consists of the path and body of the POST request, and of the function that reads the response.
    """

    path: str
    body: Callable[[str, str], dict[str, Any]]  # (text, model) to the body of the POST
    read: Callable[[Any], ResultT]  # JSON of the response to the number of tokens or their ids
    generates: bool = False  # The server generates one token for the text and keeps the text in its prefix cache
    header: str = ""  # `read` takes the value of this response header, in lower case, instead of the JSON


class VersionRule(msgspec.Struct, frozen=True):
    """A rule for some versions of a server on one endpoint, such as a different decoder or a warning.

    A rule describes behaviour that cannot be detected from the server's responses.
    """

    applies_to: Callable[[str], bool]  # Takes a version as in ServerFacts
    decode: Callable[[Sequence[bytes]], Answer] | None = None
    misleading_reason: str = ""  # Why figures of these versions would be misleading. `{version}` is filled in.
    caution: str = ""  # What to keep in mind about figures of these versions, which are measured all the same
    piece_tokens: int = 0  # As in Dialect


class Dialect(msgspec.Struct, frozen=True):
    """The protocol of one server on one endpoint, as data and pure functions."""

    server: str
    endpoint: str  # `completions`, `chat`, `generate`, `embeddings`, `rerank`, ...
    path: str
    encode: Encode  # (request, model) to the body of the POST
    decode: Callable[[Sequence[bytes]], Answer]  # Decodes the events' `data` payloads. Never raises on server bytes.
    text: Callable[[Sequence[bytes]], str]  # Text for the next turn, without reasoning and special tokens
    count_by_running: Route[int] | None
    """Route that requests one token; the response states the length of the prompt. None: requests have no tokens."""
    count: Route[int] | None = None  # Route that counts a prompt without a response
    count_text: Route[int] | None = None  # If `count` is None: route that counts without the chat template
    token_ids: bool = False  # The prompt may be token ids
    fixed_output: bool = False  # Responses shorter than requested count as truncated. False: they may be complete.
    versions: tuple[VersionRule, ...] = ()
    piece_tokens: int = 0
    """Longer responses are generated in pieces of this size and end with a whole piece. 0: no pieces."""
    streams: bool = True  # The response is a stream of tokens. False: one JSON object, the only payload of `decode`.
    may_be_whole: bool = False  # A stream may also be one JSON object, because not every server streams
    split: SplitBody | None = None  # Splits a body that consists neither of events nor of JSON. None: it does.
    complete: Callable[[Answer, Request], None] = nothing_to_complete
    """Adds to a decoded answer what only its request states, and checks the answer against the request."""
    content_type: str = JSON_TYPE  # Media type of the body of a request
    accept: str = ""  # Media types of a response. Empty: events or JSON, as `streams` states.
    inputs: Inputs = "one"
    prompt_tokens_header: str = ""
    """Response header that reports the number of prompt tokens, in lower case. Empty: the body reports it."""
    refusable_fields: tuple[str, ...] = ()
    """Fields of its requests that some servers refuse. A nested field stands before the field that contains it."""
    request_form: Callable[[tuple[str, ...], int], tuple[Encode, Route[int]]] | None = None
    """Function that takes refused fields and the number of tokens of a test request. It returns `encode` and
    `count_by_running` without these fields, or with newer names for them. None: requests cannot be changed."""
    dropped_fields: tuple[str, ...] = ()  # Fields that this server refuses
    test_tokens: int = 1  # Output tokens of a test request. Some servers refuse to generate a single token.
    generates_in_one_piece: bool = False  # The response has generated text, but is not streamed
    calls: Callable[[Sequence[bytes]], Sequence[Any]] = (
        no_calls  # Tool calls of a response, each an output_check.ToolCall
    )
    chat: bool = False  # The request is a list of messages, which may have images, and a chat template is applied to it
    headers: Callable[[str | None], dict[str, str]] = bearer_header  # API key or None to additional headers

    @property
    def has_output_length(self) -> bool:
        """True if a request states how many tokens to generate, which is not possible for transcripts, speech and
        embeddings.
        """
        return self.streams and self.inputs != "recording"

    @property
    def media_headers(self) -> dict[str, str]:
        """The request headers Content-Type and Accept, if they differ from the default headers of a request.

        By default, the request body is JSON, and the response is a stream of events.
        """
        accept = self.accept or (EVENTS_TYPE if self.streams else JSON_TYPE)
        headers = {"Content-Type": self.content_type} if self.content_type != JSON_TYPE else {}
        return headers if accept == EVENTS_TYPE else headers | {"Accept": accept}

    def misleading_reason(self, version: str) -> str | None:
        """Return the reason why measurements of this server version are misleading, or None if they are valid."""
        rules = (rule for rule in self.versions if rule.misleading_reason and rule.applies_to(version))
        return next((rule.misleading_reason.format(version=version) for rule in rules), None)

    def caution(self, version: str) -> str:
        """Return a warning about the figures of this server version, or an empty string if there is none."""
        return next((rule.caution for rule in self.versions if rule.caution and rule.applies_to(version)), "")

    def variant(self, version: str) -> Dialect:
        """Return a copy of this dialect that is adapted to a server version, or the dialect itself if no version rule
        applies.
        """
        rules = [rule for rule in self.versions if rule.applies_to(version)]
        decode = next((rule.decode for rule in rules if rule.decode), self.decode)
        piece_tokens = max((rule.piece_tokens for rule in rules), default=0)
        return replace(self, decode=decode, piece_tokens=piece_tokens) if rules else self

    def without(self, dropped_fields: tuple[str, ...], test_tokens: int) -> Dialect:
        """Return a copy of the dialect that omits `dropped_fields` from requests, because the server refuses them.

        Test requests of the copy generate `test_tokens` tokens.
        """
        assert self.request_form is not None, "the requests of this dialect cannot be changed"
        encode, counting = self.request_form(dropped_fields, test_tokens)
        path = self.count_by_running.path if self.count_by_running else counting.path
        return replace(
            self,
            encode=encode,
            count_by_running=replace(counting, path=path),
            dropped_fields=dropped_fields,
            test_tokens=test_tokens,
        )

    def without_usage(self) -> Dialect:
        """Return a copy of the dialect that ignores the token counts which the responses report.

        A gateway may report counts of its own tokenizer instead of the server's counts."""
        return replace(self, decode=partial(_decode_without_usage, self.decode))

    def at(self, path: str) -> Dialect:
        """Return a copy of the dialect that sends its requests to `path`."""
        counting = self.count_by_running
        return replace(self, path=path, count_by_running=counting and replace(counting, path=path))

    @property
    def max_piece_tokens(self) -> int:
        """The largest `piece_tokens` of any version of the server, or 0 if no version generates responses in pieces.

        A server that works in pieces generates a long response in parts of `piece_tokens` tokens each. The last part is
        always complete, so the response may be longer than requested.
        """
        return max((rule.piece_tokens for rule in self.versions), default=0)


def _decode_without_usage(decode: Callable[[Sequence[bytes]], Answer], payloads: Sequence[bytes]) -> Answer:
    """Decode the events of a response with `decode`, but ignore the token counts that the server reports.

    The number of output tokens is then the sum over the events. The length of the prompt is unknown.
    """
    answer = decode(payloads)
    answer.prompt_tokens = None
    if answer.counted_by == "server":
        answer.output_tokens = sum(answer.tokens)
        answer.counted_by = "chunks" if answer.chunk_counts == "chunk" else "wire"
    return answer


def round_up_to_pieces(tokens: int, piece_tokens: int) -> int:
    """Return the largest number of output tokens that a request for `tokens` tokens can produce.

    Some servers generate long responses in whole pieces of `piece_tokens` tokens. With pieces of 100 tokens, a request
    for 250 tokens produces up to 300. A request that needs only one piece is not rounded up. `piece_tokens` is 0 for
    other servers, whose requests produce at most `tokens` tokens.
    """
    if not piece_tokens or tokens <= piece_tokens:
        return tokens
    return -(-tokens // piece_tokens) * piece_tokens


def request_body(request: Request, dialect: Dialect, model: str) -> bytes:
    """Return the body of a request as bytes. If the request states its exact body, return this body.

    Otherwise the dialect encodes the request. The body then names the model of the request, or `model` if the request
    names no model.
    """
    return request.raw or dialect.encode(request, request.model or model)


def encode_body(fields: Mapping[str, Any], request: Request) -> bytes:
    """Return the JSON body of a request: the dialect's `fields`, merged with the user's fields in `request.body`."""
    return msgspec.json.encode(merged(fields, request.body) if request.body else fields)
