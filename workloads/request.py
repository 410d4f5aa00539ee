"""The Request: what is asked, without a URL and without a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One question for a server. `prompt` is text, or token ids where the server's API takes them. `input_tokens` is
    its exact length as the server counts it, special tokens included; 0 where an answer is part of it, which nobody can
    count beforehand. `output_tokens` is the length asked for."""

    id: int
    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    temperature: float = 0.0
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of a chat so far, the last one `prompt`. Empty: a chat of `prompt` alone."""
    session: int | None = None
    """Where this is a turn of a session: the id of its first turn."""
    turn: int = 0
    ignore_eos: bool = True
    """Whether the answer shall have its whole length even where the model would end it, if the server can do that."""
