"""The shape every dialect has: a Request becomes a body, and an event stream becomes an Answer.

Dialects do no I/O. The asyncio driver, the interactive users and the tests call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workloads.request import Request


@dataclass(slots=True)
class Answer:
    """What one event stream said: the Chunks as columns, one entry per event, and what followed from them.

    Columns and not objects, because building an object per event costs more than decoding it.
    """

    tokens: list[int]
    """Generated tokens in event i; 0 for events that hold none (role-only, usage, keep-alive, end marker)."""
    end_event: int | None = None
    """Index of the event that is the dialect's end marker; None when none was seen."""
    prompt_tokens: int | None = None
    """Prompt length as the server reported it."""
    output_tokens: int | None = None
    """Generated tokens; `counted_by` says by whose count."""
    counted_by: Literal["server", "wire", ""] = ""
    """`server`: a count the server reported. `wire`: token ids or one-token events, counted here."""
    finish_reason: str = ""
    """The server's own word: `length`, `stop`, `eos_token`, ..."""
    error_kind: Literal["", "in_band_error", "protocol"] = ""
    """Empty, `in_band_error` (the server said so after a 200) or `protocol` (not what the dialect allows)."""
    error_detail: str = ""
    """The server's words or ours, cut to 300 characters."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One server's protocol on one endpoint, as pure functions."""

    server: str
    endpoint: str
    """`completions`, `chat` or `generate`."""
    path: str
    token_ids: bool
    """The prompt may be token ids."""
    fixed_output: bool
    """The server can be made to generate exactly the length asked. Where it cannot, a shorter answer is complete."""
    encode: Callable[[Request, str], bytes]
    """(request, model) to the JSON body of the POST."""
    decode: Callable[[Sequence[bytes]], Answer]
    """The `data` payloads of one response's events, in order, to its Answer. Never raises on server bytes."""
    text: Callable[[Sequence[bytes]], str]
    """The `data` payloads of a complete answer to the text that a next turn quotes: no reasoning, no special tokens.
    Payloads that cannot be read add nothing."""
    error_text: Callable[[int, bytes], str]
    """(HTTP status, body) of an answer that is not a stream to one line that says what the server said."""
