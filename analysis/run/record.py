"""The Record: the raw facts of one request. Anything derived from it is computed in `analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from loadgen.workloads.spec_syntax import TOKENS_LIMIT

if TYPE_CHECKING:
    from loadgen.workloads.request import Request

State = Literal["complete", "truncated", "failed", "rejected", "dropped"]

ErrorKind = Literal[
    "connect",  # no connection (refused, unreachable, TLS), or closed before any answer
    "client_limit",  # this machine could not open a connection: no free port or file, no route, no permission
    "timeout",  # the request's own time limit ran out
    "http_status",  # the server answered, but not with 200
    "rejected",  # the server or a proxy was too busy (loadgen.servers.backends.error_messages)
    "in_band_error",  # a 200, and then an error inside the stream
    "protocol",  # bytes that are not what HTTP or the dialect allows
    "truncated",  # the stream ended before its end marker, or shorter than asked
    "wrong_length",  # more tokens than asked
    "dropped",  # never sent: past the limit on requests in flight
    "session_ended",  # never sent: a turn of a session that ended before it
    "cancelled",  # never sent or cut off, because the run was interrupted
    "not_encoded",  # never sent: a value in the request cannot be written as JSON or HTTP
    "worker_lost",  # the process that drove it died; what happened to it is unknown
]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
if TYPE_CHECKING:
    NoneOrKind = ErrorKind | Literal[""]
else:  # what writes Records must use a kind of the list; what reads them takes a newer version's as it is
    NoneOrKind = str

Integer = Annotated[int, msgspec.Meta(ge=-(1 << 61), le=1 << 61)]  # so that the difference of two has 64 bits
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_LIMIT)]


class Record(msgspec.Struct, tag_field="type", tag="request", kw_only=True, omit_defaults=True, gc=False):
    """The raw facts of one request. Every `_ns` field is an instant in nanoseconds on CLOCK_MONOTONIC, counted from the
    run's `start_ns` (in the header), so the burst's due instant is 0 and connections are opened at negative instants.
    None means it never happened."""

    id: Integer
    state: State
    session: Integer | None = None
    """A turn of a session: the id of the session's first turn. None: a request on its own."""
    turn: Count = 0
    """Which turn of its session, from 0."""
    worker: Count = 0
    phase: Literal["measured", "warmup"] = "measured"
    """Warm-up requests are sent before the run's instant 0 and are in no figure."""
    due_ns: Integer = 0
    connected_ns: Integer | None = None
    sent_ns: Integer | None = None
    """Immediately before the first `send`; of a request that was sent again, before that of the second attempt."""
    first_sent_ns: Integer | None = None
    """Immediately before the first attempt, of a request that was sent again: the server had closed an idle connection
    as the request was sent on it, and no byte of a response had come. None: the request was not sent again."""
    sent_end_ns: Integer | None = None
    """After the kernel had accepted the last byte of the request."""
    first_byte_ns: Integer | None = None
    """Arrival of the first byte of the response head."""
    chunk_ns: list[Integer] = []
    """Arrival of each chunk that holds at least one generated token."""
    chunk_tokens: list[Tokens] = []
    """Generated tokens in each of those chunks."""
    end_ns: Integer | None = None
    """Arrival of the dialect's end marker, or of the instant the request was given up."""
    error_kind: NoneOrKind = ""
    """Why it is not complete, a word of ERROR_KINDS."""
    error_detail: str = ""
    http_status: Count | None = None
    finish_reason: str = ""
    prompt_tokens_asked: Count = 0
    """0: not known beforehand, as a later turn of a session holds answers."""
    prompt_tokens: Tokens | None = None
    """As the server reported it; None when it did not."""
    output_tokens_asked: Count = 0
    output_tokens: Tokens | None = None
    counted_by: Literal["server", "wire", "chunks", "tokenizer", ""] = ""
    """`wire`: token ids or one-token events. `chunks`: events of unknown length, so perhaps more tokens."""
    chunk_counts: Literal["ids", "usage", "event", "chunk", ""] = ""
    """Where `chunk_tokens` comes from: token ids, growth of the server's running total, one event per token, or one
    token taken for each chunk with text. Empty: unknown."""
    hidden_tokens: Tokens = 0
    """Generated tokens that were never streamed, as the server states them (hidden reasoning)."""
    text_bytes: Count = 0
    """UTF-8 bytes of the streamed text, where `chunk_counts` is `chunk` and the server's total is larger than the
    number of chunks; else 0."""
    phrase_chunks: Count = 0
    """Chunks of more than one word, likewise."""
    refuted_total: Tokens | None = None
    """The server's total where its own stream refutes it: 0 tokens, although text came."""
    stamps: str = ""
    """Name of the source of its arrival instants (loadgen.servers.wire.timestamps): `ring`, `socket`, `user`."""
    late_ns_max: Count = 0
    """Largest delay between the kernel's receive stamp and the instant this process had read the bytes."""
    reads: Count = 0
    coalesced_reads: Count = 0
    """Reads that held more than one event: the later stamp stands for all of them."""
    first_token_merged: bool = False
    """The read with the first token held later ones too, and has the stamp of the last: TTFT is an upper bound, too
    large by no more than this process was away."""
    reopened: Count = 0
    """Pre-opened connections that the server had closed and that were opened again."""


def record_for(request: Request, state: State, **facts: Any) -> Record:
    """The Record of this request: what was asked, and the facts of what became of it."""
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
    """The Record of a request of which no byte was sent."""
    state: State = "dropped" if kind in {"dropped", "session_ended"} else "failed"
    return record_for(request, state, error_kind=kind, error_detail=detail)


def encoding_problem(error: Exception) -> str:
    """Return the error detail of a request that could not be turned into bytes."""
    return f"not sent, the request could not be encoded: {type(error).__name__}: {error}"[:300]


INSTANTS = ("due_ns", "connected_ns", "first_sent_ns", "sent_ns", "sent_end_ns", "first_byte_ns", "end_ns")


def shift_record(record: Record, by_ns: int) -> Record:
    """The same record with every instant moved, for a run whose instant 0 becomes known later."""
    moved = {name: value + by_ns for name in INSTANTS if (value := getattr(record, name)) is not None}
    return msgspec.structs.replace(record, **moved, chunk_ns=[instant + by_ns for instant in record.chunk_ns])
