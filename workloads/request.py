"""The Request: what is asked, without a URL and without a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One question for a server.

    `prompt` is text, or token ids where the server's API takes them. `input_tokens` is its exact
    length as the server counts it, special tokens included. `output_tokens` is the length asked for.
    """

    id: int
    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    temperature: float = 0.0
