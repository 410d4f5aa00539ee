"""A Dialect: one server's protocol on one endpoint, from a Request to bytes and from an answer's events to an Answer.

All of it is data and pure functions, without I/O: the asyncio driver, the interactive users and the tests call the same
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from loadgen.workloads.request import Request, merged

ResultT = TypeVar("ResultT")
ChunkCounts = Literal["ids", "usage", "event", "chunk", ""]
"""Where the tokens of each chunk come from, the best evidence first: token ids in the chunk; growth of the server's
running total; a server that sends one event per token; or one token taken for each chunk with text, since nothing says
how many a chunk holds. Empty: unknown (runs of earlier versions)."""
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
"""A number of tokens as a server states it. An event with any other number is not of its dialect."""


@dataclass(slots=True)
class Answer:
    """What one event stream said: the Chunks as columns, because building an object per event costs more than decoding
    it, and what followed from them."""

    tokens: list[int]  # Generated in event i; 0 where it holds none (role-only, usage, keep-alive, end marker)
    end_event: int | None = None  # Index of the event that is the dialect's end marker; None when none was seen
    prompt_tokens: int | None = None  # Prompt length as the server reported it
    output_tokens: int | None = None  # Generated tokens; `counted_by` says by whose count
    counted_by: Literal["server", "wire", "chunks", ""] = ""  # As in Record
    finish_reason: str = ""  # The server's own word: `length`, `stop`, `eos_token`, ...
    error_kind: Literal["", "in_band_error", "rejected", "protocol"] = ""  # Of a stream with status 200
    error_detail: str = ""  # The server's words or ours, cut to 300 characters
    chunk_counts: ChunkCounts = ""  # Where `tokens` comes from
    hidden_tokens: int = 0  # Generated, stated by the server, and never streamed
    text_bytes: int = 0  # UTF-8 bytes of the text; only where `tokens` counts chunks and the server's total is larger
    phrase_chunks: int = 0  # Chunks of more than one word, likewise
    refuted_total: int | None = None  # The server's total of 0, where tokens came all the same


class Route(msgspec.Struct, Generic[ResultT], frozen=True):
    """One question about a text: where to POST what, and how to read the answer."""

    path: str
    body: Callable[[str, str], dict[str, Any]]  # (text, model) to the body of the POST
    read: Callable[[Any], ResultT]  # The answer's JSON to what was asked: how many tokens, or their ids
    generates: bool = False  # The server runs the text, for one token, and so keeps it in its prefix cache


class VersionRule(msgspec.Struct, frozen=True):
    """What some versions of a server do otherwise on one endpoint, and do not show in the answer itself."""

    applies_to: Callable[[str], bool]  # Of a version as in ServerFacts
    decode: Callable[[Sequence[bytes]], Answer] | None = None
    misleading_reason: str = ""  # Why figures taken so would not mean what they say; `{version}` is filled in
    piece_tokens: int = 0  # As in Dialect


class Dialect(msgspec.Struct, frozen=True):
    """One server's protocol on one endpoint, as pure functions."""

    server: str
    endpoint: str  # `completions`, `chat`, `generate`, `embeddings` or `rerank`
    path: str
    encode: Callable[[Request, str], bytes]  # (request, model) to the JSON body of the POST
    decode: Callable[[Sequence[bytes]], Answer]  # Of the events' `data` payloads; never raises on server bytes
    text: Callable[[Sequence[bytes]], str]  # Of the same: what a next turn quotes, no reasoning and no special tokens
    count_by_running: Route[int]  # A request for one token whose answer tells the length of the prompt
    count: Route[int] | None = None  # The route that counts a prompt without running it
    count_text: Route[int] | None = None  # Where there is none: the one that counts without the chat template
    token_ids: bool = False  # The prompt may be token ids
    fixed_output: bool = False  # Less than asked is truncated; else the server may end an answer itself
    versions: tuple[VersionRule, ...] = ()
    piece_tokens: int = 0
    """A response of more tokens is generated in pieces of this size and ends with a whole piece. 0: there are none."""
    streams: bool = True  # The answer is a stream of generated tokens; else one JSON object, `decode`'s one payload
    drop_refused_field: Callable[[str], Dialect | None] | None = None
    """(a server's words of a refusal) to the dialect without the first field they name, or under the field's other
    name; None where they name none. A kind of which every server takes the same fields has no such function."""
    dropped_fields: tuple[str, ...] = ()  # Fields that this server refuses

    def misleading_reason(self, version: str) -> str | None:
        """Why figures taken on this version would not mean what they say; None where they do."""
        rules = (rule for rule in self.versions if rule.misleading_reason and rule.applies_to(version))
        return next((rule.misleading_reason.format(version=version) for rule in rules), None)

    def variant(self, version: str) -> Dialect:
        """The dialect as this version speaks it; as it is where the version says nothing."""
        rules = [rule for rule in self.versions if rule.applies_to(version)]
        decode = next((rule.decode for rule in rules if rule.decode), self.decode)
        piece_tokens = max((rule.piece_tokens for rule in rules), default=0)
        return replace(self, decode=decode, piece_tokens=piece_tokens) if rules else self

    @property
    def max_piece_tokens(self) -> int:
        """The `piece_tokens` of a version that has pieces; 0 where no version has."""
        return max((rule.piece_tokens for rule in self.versions), default=0)


def round_up_to_pieces(tokens: int, piece_tokens: int) -> int:
    """The output tokens that a request for `tokens` can become: whole pieces, where it is more than one piece."""
    if not piece_tokens or tokens <= piece_tokens:
        return tokens
    return -(-tokens // piece_tokens) * piece_tokens


def encode_body(fields: Mapping[str, Any], request: Request) -> bytes:
    """The body of a POST: a dialect's fields, and those of the user's."""
    return msgspec.json.encode(merged(fields, request.body) if request.body else fields)
