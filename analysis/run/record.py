"""Defines Record, the raw facts of one request. The package `loadgen.analysis` computes every metric from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from loadgen.workloads.request import ParentEdge
from loadgen.workloads.spec_syntax import TOKENS_LIMIT

if TYPE_CHECKING:
    from loadgen.workloads.request import Request

State = Literal["complete", "truncated", "failed", "rejected", "dropped", "abandoned"]

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
    "abandoned",  # given up on purpose (--cancel), or never sent because its session was given up
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

    The fields `late_ns_max` and `tool_ns` are durations in ns. Every other `_ns` field is a timestamp in ns on
    CLOCK_MONOTONIC, relative to `start_ns` in the run's header. The requests of a burst are due at 0. Connections that
    were opened before the start of the run have negative timestamps. None means that the event never happened.
    """

    id: Integer
    state: State
    session: Integer | None = None
    """Id of the first turn of the session; None for a single request."""
    turn: Count = 0
    """Index of the turn in its session, from 0."""
    role: str = ""
    """Role of the request in a session that is a graph, such as `root` or `sub-agent`. Empty for other requests."""
    parents: list[ParentEdge] = []
    """Conditions of a request in a session that is a graph: the id of another request, `end` or `start`, and a delay in
    ns. The request is due when all conditions are met."""
    tool_ns: Count = 0
    """Time before the request during which tools ran, according to the file with the session."""
    model: str = ""
    """Model that the request named, or empty if it is the model of the run."""
    replica: str = ""
    """Replica that answered: the value of the response header that `--replica-header` names, the URL of the replica if
    the run has several, or the address of the connection if the server has several addresses. Empty if it is
    unknown."""
    worker: Count = 0
    phase: Literal["measured", "warmup"] = "measured"
    """Warm-up requests are sent before the start of the run and are excluded from all metrics."""
    due_ns: Integer = 0
    released_ns: Integer | None = None
    """Time at which a request that had waited because of `--concurrency` could be sent. None if it did not wait."""
    connected_ns: Integer | None = None
    sent_ns: Integer | None = None
    """Time immediately before the first `send`. For a request that was sent twice, the time of the second attempt."""
    first_sent_ns: Integer | None = None
    """Time immediately before the first of two attempts, or None if the request was sent once. A request is sent again
    if the server closes an idle connection during the first attempt, before any byte of a response."""
    sent_end_ns: Integer | None = None
    """Time immediately after the kernel accepted the last byte of the request."""
    first_byte_ns: Integer | None = None
    """Arrival time of the first byte of the response head."""
    chunk_ns: list[Integer] = []
    """Arrival time of each chunk that holds at least one generated token."""
    chunk_tokens: list[Tokens] = []
    """Generated tokens in each chunk of `chunk_ns`."""
    end_ns: Integer | None = None
    """Arrival time of the end marker of the stream, or the time at which the client gave up the request."""
    error_kind: NoneOrKind = ""
    """Why the request is not complete: one of ERROR_KINDS, or empty."""
    error_detail: str = ""
    http_status: Count | None = None
    finish_reason: str = ""
    prompt_tokens_asked: Count = 0
    """Requested prompt length in tokens. 0 if the length is not known in advance: later turns contain responses."""
    prompt_tokens: Tokens | None = None
    """Prompt length in tokens as reported by the server, or None if the server reported none."""
    output_tokens_asked: Count = 0
    output_tokens: Tokens | None = None
    counted_by: Literal["server", "wire", "chunks", "tokenizer", ""] = ""
    """Source of `output_tokens`: the server's total, the stream (`wire`: token ids or events of one token), the number
    of chunks (which may hold several tokens each), or a tokenizer. Empty if the count is unknown."""
    chunk_counts: Literal["ids", "usage", "event", "chunk", ""] = ""
    """Source of `chunk_tokens`: token ids (`ids`), the growth of the server's running total (`usage`), one token per
    event (`event`), or one assumed token per chunk with text (`chunk`). Empty if the source is unknown."""
    hidden_tokens: Tokens = 0
    """Generated tokens that were never streamed, as reported by the server (hidden reasoning)."""
    reasoning_reported: bool = False
    """True if the server reported how many tokens of reasoning it generated, 0 included. Never True if `text_bytes` is
    0."""
    text_bytes: Count = 0
    """UTF-8 bytes of the streamed text. 0 unless `chunk_counts` is `chunk` and the server's total exceeds the number of
    chunks."""
    phrase_chunks: Count = 0
    """Number of chunks that hold more than one word. 0 under the same condition as `text_bytes`."""
    refuted_total: Tokens | None = None
    """The server's total if the stream contradicts it, such as 0 tokens for a response with text; else None."""
    marks: dict[str, Integer] = {}
    """Further facts that the dialect found in the response, by name: instants (their names end in `_ns`) and counts.
    The names are listed in loadgen.servers.backends.dialect.Answer."""
    output_error: str = ""
    """Why the tool call or the JSON of a complete response is not valid, or why it could not be checked. The marks
    `valid_output`, `unchecked_output` and `uncalled_output` contain the result of the check."""
    stamps: str = ""
    """Name of the timestamp source (loadgen.servers.wire.timestamps): `ring`, `socket` or `user`."""
    late_ns_max: Count = 0
    """Maximum delay in ns between the kernel's receive timestamp and the time when the client had read the bytes."""
    reads: Count = 0
    coalesced_reads: Count = 0
    """Number of reads that returned more than one event. All events of a read have the timestamp of the last event."""
    first_token_merged: bool = False
    """True if the first token was read together with later tokens and has the timestamp of the last one. TTFT is then
    an upper bound. TTFT is too large by at most the time for which the client did not read."""
    min_rtt_us: Count | None = None
    """Minimum round-trip time of the request's connection in us, as the kernel measured it up to the end of the
    response. It covers the way to the first hop that ends the TCP connection, such as a proxy. None if unknown."""
    reopened: Count = 0
    """Number of times that a connection was reopened for this request because the server had closed it."""


def record_for(request: Request, state: State, **facts: Any) -> Record:
    """Return a Record with the id, session, turn and requested lengths of `request`. `facts` sets further fields."""
    if request.parents or request.role:
        facts |= {"role": request.role, "parents": list(request.parents), "tool_ns": request.tool_ns}
    return Record(
        id=request.id,
        session=request.session,
        turn=request.turn,
        model=request.model,
        state=state,
        prompt_tokens_asked=request.input_tokens,
        output_tokens_asked=request.output_tokens,
        **facts,
    )


def unsent_record(request: Request, kind: NoneOrKind, detail: str) -> Record:
    """Return the Record of a request that was never sent, with its error kind and error detail."""
    state: State = "dropped" if kind in {"dropped", "session_ended"} else "failed"
    if kind == "abandoned":
        state = "abandoned"
    return record_for(request, state, error_kind=kind, error_detail=detail)


def encoding_problem(error: Exception) -> str:
    """Return the `error_detail` for the Record of a request that was not sent, because it could not be encoded.

    `error` is the exception that was raised while the request was encoded as JSON or HTTP.
    """
    return f"not sent, the request could not be encoded: {type(error).__name__}: {error}"[:300]


INSTANTS = (
    *("due_ns", "released_ns", "connected_ns", "first_sent_ns"),
    *("sent_ns", "sent_end_ns", "first_byte_ns", "end_ns"),
)


def shift_record(record: Record, offset_ns: int) -> Record:
    """Return a copy of the record with `offset_ns` added to every timestamp.

    This converts a Record to another time origin, for example from the start of the warm-up to the start of the run."""
    instants = {name: getattr(record, name) for name in INSTANTS}
    shifted = {name: instant + offset_ns for name, instant in instants.items() if instant is not None}
    marks = {name: mark + offset_ns if name.endswith("_ns") else mark for name, mark in record.marks.items()}
    chunk_ns = [instant + offset_ns for instant in record.chunk_ns]
    return msgspec.structs.replace(record, **shifted, marks=marks, chunk_ns=chunk_ns)
