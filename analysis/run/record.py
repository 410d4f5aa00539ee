"""The Record: the raw facts of one request. All derived figures are computed in `analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from loadgen.workloads.spec_syntax import TOKENS_LIMIT

if TYPE_CHECKING:
    from loadgen.workloads.request import Request

State = Literal["complete", "truncated", "failed", "rejected", "dropped"]

ErrorKind = Literal[
    "connect",  # no connection (refused, unreachable, TLS), or closed before any response
    "client_limit",  # this machine could not open a connection: no free port or file, no route, no permission
    "timeout",  # the timeout of the request expired
    "http_status",  # a response with a status other than 200
    "rejected",  # the server or a proxy was too busy (loadgen.servers.backends.error_messages)
    "in_band_error",  # status 200, and then an error inside the stream
    "protocol",  # bytes that violate HTTP or the dialect
    "truncated",  # the stream ended before its end marker, or shorter than requested
    "wrong_length",  # more tokens than requested
    "dropped",  # never sent: the maximum number of requests was in flight
    "session_ended",  # never sent: the session ended before this turn
    "cancelled",  # never sent or cut off, because the run was interrupted
    "not_encoded",  # never sent: a value in the request cannot be written as JSON or HTTP
    "worker_lost",  # the worker process died; the outcome is unknown
]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
if TYPE_CHECKING:
    NoneOrKind = ErrorKind | Literal[""]
else:  # Code that writes Records must use a kind of the list. Reading accepts the kinds of newer versions.
    NoneOrKind = str

Integer = Annotated[int, msgspec.Meta(ge=-(1 << 61), le=1 << 61)]  # so that a difference of two fits into 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_LIMIT)]


class Record(msgspec.Struct, tag_field="type", tag="request", kw_only=True, omit_defaults=True, gc=False):
    """The raw facts of one request.

    Every `_ns` field is an instant in ns on CLOCK_MONOTONIC, relative to the run's `start_ns` in the header. A burst is
    due at 0, and connections are opened at negative instants. None means that the event never happened."""

    id: Integer
    state: State
    session: Integer | None = None
    """Id of the first turn of the session; None for a single request."""
    turn: Count = 0
    """Index of the turn in its session, from 0."""
    worker: Count = 0
    phase: Literal["measured", "warmup"] = "measured"
    """Warm-up requests are sent before the run's instant 0 and are excluded from all figures."""
    due_ns: Integer = 0
    connected_ns: Integer | None = None
    sent_ns: Integer | None = None
    """Immediately before the first `send`. For a request that was sent twice: of the second attempt."""
    first_sent_ns: Integer | None = None
    """Immediately before the first attempt, for a request that was sent twice because the server closed the idle
    connection during the first attempt, before any byte of a response. None if the request was sent once."""
    sent_end_ns: Integer | None = None
    """Immediately after the kernel accepted the last byte of the request."""
    first_byte_ns: Integer | None = None
    """Arrival of the first byte of the response head."""
    chunk_ns: list[Integer] = []
    """Arrival of each chunk that holds at least one generated token."""
    chunk_tokens: list[Tokens] = []
    """Generated tokens in each of those chunks."""
    end_ns: Integer | None = None
    """Arrival of the dialect's end marker, or the instant at which the request was given up."""
    error_kind: NoneOrKind = ""
    """Why the request is not complete: one of ERROR_KINDS, or empty."""
    error_detail: str = ""
    http_status: Count | None = None
    finish_reason: str = ""
    prompt_tokens_asked: Count = 0
    """Requested prompt length. 0 if it is not known in advance, as for later turns, which contain responses."""
    prompt_tokens: Tokens | None = None
    """Prompt length reported by the server; None if it reported none."""
    output_tokens_asked: Count = 0
    output_tokens: Tokens | None = None
    counted_by: Literal["server", "wire", "chunks", "tokenizer", ""] = ""
    """Source of `output_tokens`. `wire`: token ids or one-token events. `chunks`: events of unknown length, which may
    hold several tokens."""
    chunk_counts: Literal["ids", "usage", "event", "chunk", ""] = ""
    """Source of `chunk_tokens`: token ids, growth of the server's running total, one event per token, or one token
    assumed per chunk with text. Empty if unknown."""
    hidden_tokens: Tokens = 0
    """Generated tokens that were never streamed, as reported by the server (hidden reasoning)."""
    text_bytes: Count = 0
    """UTF-8 bytes of the streamed text, if `chunk_counts` is `chunk` and the server's total is larger than the number
    of chunks; else 0."""
    phrase_chunks: Count = 0
    """Chunks of more than one word, under the same condition; else 0."""
    refuted_total: Tokens | None = None
    """The server's total, if the stream contradicts it: a total of 0 tokens for a response with text."""
    stamps: str = ""
    """Name of the timestamp source (loadgen.servers.wire.timestamps): `ring`, `socket` or `user`."""
    late_ns_max: Count = 0
    """Largest delay in ns from the kernel's receive timestamp until this process had read the bytes."""
    reads: Count = 0
    coalesced_reads: Count = 0
    """Reads that held more than one event. All of these events have the timestamp of the last one."""
    first_token_merged: bool = False
    """True if the first token was read together with later ones and has the timestamp of the last. TTFT is then an
    upper bound. It is too large by at most the time for which this process did not read."""
    reopened: Count = 0
    """Connections for this request that were reopened because the server had closed them."""


def record_for(request: Request, state: State, **facts: Any) -> Record:
    """Return the Record of this request, with its requested lengths and the given facts."""
    return Record(
        id=request.id,
        session=request.session,
        turn=request.turn,
        state=state,
        prompt_tokens_asked=request.input_tokens,
        output_tokens_asked=request.output_tokens,
        **facts,
    )


def unsent_record(request: Request, kind: NoneOrKind, detail: str) -> Record:
    """Return the Record of a request of which no byte was sent."""
    state: State = "dropped" if kind in {"dropped", "session_ended"} else "failed"
    return record_for(request, state, error_kind=kind, error_detail=detail)


def encoding_problem(error: Exception) -> str:
    """Return the error detail of a request that could not be turned into bytes."""
    return f"not sent, the request could not be encoded: {type(error).__name__}: {error}"[:300]


INSTANTS = ("due_ns", "connected_ns", "first_sent_ns", "sent_ns", "sent_end_ns", "first_byte_ns", "end_ns")


def shift_record(record: Record, offset_ns: int) -> Record:
    """Return the record with `offset_ns` added to every instant, for a run whose instant 0 is only known later."""
    instants = {name: getattr(record, name) for name in INSTANTS}
    shifted = {name: instant + offset_ns for name, instant in instants.items() if instant is not None}
    return msgspec.structs.replace(record, **shifted, chunk_ns=[instant + offset_ns for instant in record.chunk_ns])
