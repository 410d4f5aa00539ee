"""Checks the requests to a simulated TGI, and computes the lengths of its responses.

The error messages and the order of the checks are those of TGI 3.3.7 (router/src/validation.rs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadgen.servers.simulated import protocol
from loadgen.servers.simulated.protocol import ErrorReply, Headers, Reply
from loadgen.servers.simulated.state import ServerState

DEFAULT_GENERATION_LENGTH = 1024
"""Maximum tokens per piece of a response. Since 3.0, TGI generates longer responses in several pieces (the router's
constant of this name)."""
MAX_STOP_SEQUENCES = 4
MAX_CLIENT_BATCH_SIZE = 4
MAX_BEST_OF = 2
MAX_TOP_N_TOKENS = 5
STREAM_TYPE: Headers = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))
OVERLOADED = ("Model is overloaded", "overloaded")
COMPUTE_TYPE = "gpu+optimized"  # the router's default

Refuse = Callable[[str], ErrorReply]
"""Function that returns the validation error of a request, from its message."""


def compute_headers(characters: int) -> Headers:
    """Return the headers that all responses of a generation route share, including errors in a stream.

    `characters` is the total length of the prompts in characters.
    """
    return ("x-compute-type", COMPUTE_TYPE), ("x-compute-characters", str(characters))


def stream_headers(characters: int) -> Headers:
    """Return the headers that follow `content-type` and `cache-control` in the response head of an event stream.

    `characters` is the total length of the prompts in characters.
    """
    return (*compute_headers(characters), ("x-accel-buffering", "no"))


def flat_error(message: str, error_type: str, status: int = 500) -> Reply:
    """Return an error response with the JSON fields `error` and `error_type`."""
    return Reply(protocol.dumps({"error": message, "error_type": error_type}), status)


def error_payloads(message: str, error_type: str, *, openai: bool) -> tuple[bytes, ...]:
    """Return an error as the payloads of server-sent events.

    If `openai` is True, the payloads have the format of the OpenAI routes, and the status code in them is always 422.
    """
    if openai:
        return protocol.dumps({"error": {"message": message, "http_status_code": 422}}), b"[DONE]"
    return (flat_error(message, error_type).body,)


def refusal(message: str, error_type: str, status: int, head: Headers, *, streamed: bool, openai: bool) -> Reply:
    """Return the response to a refused request.

    If the request is streamed, the response is an event stream with status 200 that contains the error.
    """
    if streamed:
        payloads = error_payloads(message, error_type, openai=openai)
        return protocol.events_reply(*payloads, headers=STREAM_TYPE + head)
    return flat_error(message, error_type, status)


def is_sampled(parameters: Mapping[str, Any]) -> bool:
    """Return True if the parameters request sampling, and False if they request greedy decoding."""
    names = ("temperature", "top_k", "top_p", "typical_p")
    return bool(parameters.get("do_sample")) or any(parameters.get(name) is not None for name in names)


# (name, allowed values, message for other values)
_RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: value > 0, "`temperature` must be strictly positive"),
    ("repetition_penalty", lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ("top_p", lambda value: 0 < value < 1, "`top_p` must be > 0.0 and < 1.0"),
    ("typical_p", lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
    ("top_k", lambda value: value > 0, "`top_k` must be strictly positive"),
    ("max_new_tokens", lambda value: value != 0, "`max_new_tokens` must be strictly positive"),
)


def check_parameters(parameters: Mapping[str, Any], text: str, refuse: Refuse, max_model_len: int) -> None:
    """Check the parameters of a request as TGI's router does. `text` is the prompt.

    `refuse` takes a message and returns an error. If the router would not accept a parameter, this error is raised.
    """
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
    top_n_tokens = parameters.get("top_n_tokens") or 0
    if top_n_tokens > MAX_TOP_N_TOKENS:
        raise refuse(f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {top_n_tokens}")
    if not text:
        raise refuse("`inputs` cannot be empty")
    truncate = parameters.get("truncate")
    if truncate is not None and not 0 < truncate < max_model_len:
        raise refuse(f"`truncate` must be strictly positive and less than {max_model_len - 1}. Given: {truncate}")


def output_pieces(state: ServerState, prompt_tokens: int, max_new_tokens: int | None, refuse: Refuse) -> list[int]:
    """Return the lengths in tokens of the pieces in which TGI generates a response, if the model does not stop earlier.

    TGI 1.x generates every response in one piece. Since TGI 3.0, a piece has at most DEFAULT_GENERATION_LENGTH tokens,
    so a long response has several pieces:

    - With `max_new_tokens`, all pieces have the same length, so the last piece may exceed `max_new_tokens`. If a piece
      does not fit the context, the response ends before this piece.
    - Without `max_new_tokens`, pieces are generated until the context is full.

    `refuse` turns a message into an error. The function raises this error if the prompt or the first piece does not fit
    the context.
    """
    max_model_len = state.max_model_len
    max_piece = DEFAULT_GENERATION_LENGTH if state.config.vintage == "current" else max_model_len
    room = max(0, max_model_len - prompt_tokens)
    requested = room if max_new_tokens is None else max_new_tokens
    first = min(requested, max_piece)
    if prompt_tokens + first > max_model_len:
        limit = f"`inputs` tokens + `max_new_tokens` must be <= {max_model_len}."
        raise refuse(f"{limit} Given: {prompt_tokens} `inputs` tokens and {first} `max_new_tokens`")
    if prompt_tokens > max_model_len - 1:
        raise refuse(f"`inputs` must have less than {max_model_len - 1} tokens. Given: {prompt_tokens}")
    pieces = [first]
    total = first
    while total < requested:
        piece = min(room - total, max_piece) if max_new_tokens is None else first
        if not piece or total + piece > room:
            break
        pieces.append(piece)
        total += piece
    return pieces
