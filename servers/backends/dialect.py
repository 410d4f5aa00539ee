"""Defines a `Dialect`: one server's protocol on one endpoint.

A dialect encodes a Request as bytes and decodes the events of a response into an Answer. It consists of data and pure
functions without I/O, which the asyncio driver, the interactive users and the tests share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from loadgen.workloads.request import Request, merged

ResultT = TypeVar("ResultT")
ChunkCounts = Literal["ids", "usage", "event", "chunk", ""]
"""Source of the token count of each chunk, best evidence first: token ids in the chunk (`ids`), growth of the server's
running total (`usage`), a server that sends one event per token (`event`), or one token per chunk with text because
nothing states how many it holds (`chunk`). Empty: unknown, in runs of earlier versions."""
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
"""A number of tokens as a server states it. An event with a number out of range is unreadable."""


def bearer_header(key: str | None) -> dict[str, str]:
    """Return the Authorization header for an API key; an empty dict without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(slots=True)
class Answer:
    """The content of one event stream. Chunks are stored as columns, because an object per event would cost more than
    decoding it."""

    tokens: list[int]  # Tokens generated in event i; 0 for an event without (role only, usage, keep-alive, end marker)
    end_event: int | None = None  # Index of the event that is the dialect's end marker. None: there was none.
    prompt_tokens: int | None = None  # Prompt length that the server reported
    output_tokens: int | None = None  # Generated tokens, from the source in `counted_by`
    counted_by: Literal["server", "wire", "chunks", ""] = ""  # As in Record
    finish_reason: str = ""  # In the server's words: `length`, `stop`, `eos_token`, ...
    error_kind: Literal["", "in_band_error", "rejected", "protocol"] = ""  # Error in a stream with status 200
    error_detail: str = ""  # Message of the server or of loadgen, at most 300 characters
    chunk_counts: ChunkCounts = ""  # Source of `tokens`
    hidden_tokens: int = 0  # Tokens that the server generated and counted, but never streamed
    text_bytes: int = 0  # UTF-8 bytes of the text. Only set if `tokens` counts chunks and the server's total is larger.
    phrase_chunks: int = 0  # Chunks of more than one word. Set like `text_bytes`.
    refuted_total: int | None = None  # The server's total of 0, if tokens were streamed nevertheless
    counts: dict[str, int] = field(default_factory=dict)
    """Counts for `Record.marks`. `cached_prompt_tokens`: prompt tokens that the server had in its prefix cache."""
    events: dict[str, int] = field(default_factory=dict)
    """Indices of events whose arrival becomes an instant in `Record.marks`. `first_answer_ns`: the first chunk with
    text that is not reasoning, if reasoning came before it."""


class Route(msgspec.Struct, Generic[ResultT], frozen=True):
    """A query about a text: the path and body of a POST, and the function that reads the response."""

    path: str
    body: Callable[[str, str], dict[str, Any]]  # (text, model) to the body of the POST
    read: Callable[[Any], ResultT]  # JSON of the response to the number of tokens or their ids
    generates: bool = False  # The server generates one token for the text, and so keeps it in its prefix cache


class VersionRule(msgspec.Struct, frozen=True):
    """Behaviour of some server versions on one endpoint that responses do not show."""

    applies_to: Callable[[str], bool]  # Takes a version as in ServerFacts
    decode: Callable[[Sequence[bytes]], Answer] | None = None
    misleading_reason: str = ""  # Why figures of these versions would be misleading. `{version}` is filled in.
    piece_tokens: int = 0  # As in Dialect


class Dialect(msgspec.Struct, frozen=True):
    """One server's protocol on one endpoint, as pure functions."""

    server: str
    endpoint: str  # `completions`, `chat`, `generate`, `embeddings` or `rerank`
    path: str
    encode: Callable[[Request, str], bytes]  # (request, model) to the JSON body of the POST
    decode: Callable[[Sequence[bytes]], Answer]  # Decodes the events' `data` payloads. Never raises on server bytes.
    text: Callable[[Sequence[bytes]], str]  # Text of the payloads for the next turn, without reasoning, special tokens
    count_by_running: Route[int]  # Requests one token; the response states the length of the prompt
    count: Route[int] | None = None  # Route that counts a prompt without running it
    count_text: Route[int] | None = None  # Without such a route: one that counts without the chat template
    token_ids: bool = False  # The prompt may be token ids
    fixed_output: bool = False  # Shorter responses than requested are truncated. False: the server may end one itself.
    versions: tuple[VersionRule, ...] = ()
    piece_tokens: int = 0
    """Longer responses are generated in pieces of this size and end with a whole piece. 0: no pieces."""
    streams: bool = True  # The response is a stream of tokens. False: one JSON object, the only payload of `decode`.
    drop_refused_field: Callable[[str], Dialect | None] | None = None
    """Takes a server's refusal and returns the dialect without the first field that it names, or with the field's other
    name. Returns None for a refusal that names no field. None if all servers of this backend take the same fields."""
    dropped_fields: tuple[str, ...] = ()  # Fields that this server refuses
    chat: bool = False  # The request is a list of messages, which may have images, and a chat template is applied to it
    headers: Callable[[str | None], dict[str, str]] = bearer_header  # API key, if there is one, to additional headers

    def misleading_reason(self, version: str) -> str | None:
        """Return why figures of this version would be misleading; None if they are not."""
        rules = (rule for rule in self.versions if rule.misleading_reason and rule.applies_to(version))
        return next((rule.misleading_reason.format(version=version) for rule in rules), None)

    def variant(self, version: str) -> Dialect:
        """Return the dialect of this version; the dialect itself if no rule applies."""
        rules = [rule for rule in self.versions if rule.applies_to(version)]
        decode = next((rule.decode for rule in rules if rule.decode), self.decode)
        piece_tokens = max((rule.piece_tokens for rule in rules), default=0)
        return replace(self, decode=decode, piece_tokens=piece_tokens) if rules else self

    @property
    def max_piece_tokens(self) -> int:
        """The largest `piece_tokens` of any version; 0 if no version generates in pieces."""
        return max((rule.piece_tokens for rule in self.versions), default=0)


def round_up_to_pieces(tokens: int, piece_tokens: int) -> int:
    """Return the largest number of output tokens that a request for `tokens` can produce.

    It is a multiple of `piece_tokens` if the request needs more than one piece."""
    if not piece_tokens or tokens <= piece_tokens:
        return tokens
    return -(-tokens // piece_tokens) * piece_tokens


def encode_body(fields: Mapping[str, Any], request: Request) -> bytes:
    """Return the body of a POST: the dialect's fields, merged with those of the user."""
    return msgspec.json.encode(merged(fields, request.body) if request.body else fields)
