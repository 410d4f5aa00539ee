"""What a simulated TGI refuses, in the words and the order of 3.3.7 (router/src/validation.rs), and how long its
responses become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadgen.servers.simulated import protocol
from loadgen.servers.simulated.protocol import ErrorReply, Headers, Reply
from loadgen.servers.simulated.state import ServerState

DEFAULT_GENERATION_LENGTH = 1024
"""Since 3.0 a longer response is generated in pieces of this size (`DEFAULT_GENERATION_LENGTH`)."""
MAX_STOP_SEQUENCES, MAX_CLIENT_BATCH_SIZE, MAX_BEST_OF, MAX_TOP_N_TOKENS = 4, 4, 2, 5
STREAM_TYPE: Headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
OVERLOADED = ("Model is overloaded", "overloaded")
COMPUTE_TYPE = "gpu+optimized"  # the router's default

Refuse = Callable[[str], ErrorReply]


def compute_headers(characters: int) -> Headers:
    """The headers that every answer of a route that generates has, refusals in an event stream included."""
    return (("x-compute-type", COMPUTE_TYPE), ("x-compute-characters", str(characters)))


def stream_headers(characters: int) -> Headers:
    """The headers of an event stream behind its content type."""
    return (*compute_headers(characters), ("x-accel-buffering", "no"))


def flat_error(message: str, kind: str, status: int = 500) -> Reply:
    """An error as a JSON body."""
    return Reply(protocol.dumps({"error": message, "error_type": kind}), status)


def error_payloads(message: str, kind: str, *, openai: bool) -> tuple[bytes, ...]:
    """An error as events. On the OpenAI routes the code is 422 whatever happened."""
    if openai:
        return protocol.dumps({"error": {"message": message, "http_status_code": 422}}), b"[DONE]"
    return (flat_error(message, kind).body,)


def refusal(message: str, kind: str, status: int, head: Headers, *, streamed: bool, openai: bool) -> Reply:
    """A refusal with that status. Once a response is a stream, it is an event under status 200."""
    if streamed:
        return protocol.events_reply(*error_payloads(message, kind, openai=openai), headers=STREAM_TYPE + head)
    return flat_error(message, kind, status)


def is_sampled(parameters: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn at random."""
    names = ("temperature", "top_k", "top_p", "typical_p")
    return bool(parameters.get("do_sample")) or any(parameters.get(name) is not None for name in names)


# Name, the values that are allowed, and the words for others.
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value > 0, "`temperature` must be strictly positive"),
    ("repetition_penalty", lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", lambda value: 0 < value < 1, "`top_p` must be > 0.0 and < 1.0"),
    ("typical_p", lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
    ("top_k", lambda value: value > 0, "`top_k` must be strictly positive"),
    ("max_new_tokens", lambda value: value != 0, "`max_new_tokens` must be strictly positive"),
)


def check_parameters(parameters: Mapping[str, Any], text: str, refuse: Refuse, longest: int) -> None:
    """Raises the refusal of values that the router does not take."""
    best_of = parameters.get("best_of") or 1
    if best_of > 1 and not is_sampled(parameters):
        raise refuse("you must use sampling when `best_of` is > 1")
    for name, allows, message in _RULES:
        value = parameters.get(name)
        if value is not None and not allows(value):
            raise refuse(message)
    stops = parameters.get("stop") or []
    if len(stops) > MAX_STOP_SEQUENCES:
        raise refuse(f"`stop` supports up to {MAX_STOP_SEQUENCES} stop sequences. Given: {len(stops)}")
    if best_of > 1 and parameters.get("seed") is not None:
        raise refuse("`seed` must not be set when `best_of` > 1")
    if (top := parameters.get("top_n_tokens") or 0) > MAX_TOP_N_TOKENS:
        raise refuse(f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {top}")
    if not text:
        raise refuse("`inputs` cannot be empty")
    truncate = parameters.get("truncate")
    if truncate is not None and not 0 < truncate < longest:
        raise refuse(f"`truncate` must be strictly positive and less than {longest - 1}. Given: {truncate}")


def output_pieces(state: ServerState, prompt_tokens: int, asked: int | None, refuse: Refuse) -> list[int]:
    """The lengths of the pieces in which a response is generated, if the model does not end it before. Raises the
    refusal of a prompt or of a first piece that does not fit.

    The router asks every piece for the full number again, so a response ends with the piece that reaches this number,
    or before a piece that does not fit. Without a number the response fills the context. TGI 1.x has no pieces.
    """
    longest = state.max_model_len
    size = DEFAULT_GENERATION_LENGTH if state.config.vintage == "current" else longest
    room = max(0, longest - prompt_tokens)
    first = min(room if asked is None else asked, size)
    if prompt_tokens + first > longest:
        limit = f"`inputs` tokens + `max_new_tokens` must be <= {longest}."
        raise refuse(f"{limit} Given: {prompt_tokens} `inputs` tokens and {first} `max_new_tokens`")
    if prompt_tokens > longest - 1:
        raise refuse(f"`inputs` must have less than {longest - 1} tokens. Given: {prompt_tokens}")
    pieces, total = [first], first
    while total < (room if asked is None else asked):
        piece = min(room - total, size) if asked is None else first
        if not piece or total + piece > room:
            break
        pieces.append(piece)
        total += piece
    return pieces
