"""Prompts of exactly N tokens by the server's own count, all different from their first tokens on.

    token ids        where the API takes them: N ids are N tokens, and nothing can go wrong (this module)
    text             words that cost N tokens together, and are counted as a whole (workloads.texts)

The same seed gives the same prompts, byte for byte, on any machine: prompt i is drawn from a generator of its own
seeded with the text "seed:i", and only through `Random.random`, the one method whose sequence Python promises to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Protocol, TypeVar

BLOCK_TOKENS = 16  # the granularity of vLLM's prefix cache; prompts must differ within their first block
STRETCHES_LIMIT = 4096  # shared stretches kept for the next prompt: 16 MiB at 512 tokens each

Item = TypeVar("Item", int, str)
Stretch = tuple[int, int]
"""(number below zero, tokens): a stretch of tokens that prompts may share. The same pair is the same tokens."""


class PromptError(Exception):
    """Prompts of the length asked for cannot be made; the message says why, `hint` what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Tokenizer(Protocol):
    """Who can say how long a text is: a tokenizer file, or the server itself."""

    @property
    def words(self) -> Sequence[str]:
        """Different plain words, most of them one token each; empty when it knows none."""
        ...

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text when it is sent as a prompt, special tokens and chat template included."""
        ...

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens; empty when they cannot be known."""
        ...


class Judge(Tokenizer, Protocol):
    """The server: what it counts is what the length is."""

    @property
    def generates(self) -> bool:
        """Whether counting makes the server run the text, and so leaves it in the server's prefix cache."""
        ...

    @property
    def plain(self) -> Tokenizer | None:
        """Where counting a prompt generates: the server's count of text alone, without running it."""
        ...


class Prompt(Protocol):
    """Makes prompt number `number`. Different numbers differ from their first tokens on, or from the first behind
    what they share. Calling it again, in any order and any process, gives the same prompt."""

    def __call__(self, number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> str | tuple[int, ...]:
        """Text or token ids of exactly `input_tokens`, beginning with the stretches, cut where they are longer."""
        ...


def id_prompts(
    alphabet: Sequence[int], seed: int, *, numbers: int, shared: int = 0, shortest: int = BLOCK_TOKENS
) -> Prompt:
    """Prompts of ids from the alphabet: numbers 0 to `numbers` - 1, and stretches -1 to -`shared`.

    They differ from their first id or two on. One that is shorter than that is its number cut short, and may have an
    equal; where all are at least `shortest` tokens long, none has. Raises PromptError when the ids cannot number them.
    """
    size, total, room = len(alphabet), numbers + shared, min(shortest, BLOCK_TOKENS)
    depth = next((d for d in range(1, room + 1) if size**d >= total), 0)
    if not depth:
        raise PromptError(
            f"{size} token ids make only {size**room} different prompts of {room} tokens, not {total}",
            "ask for longer prompts or fewer of them",
        )
    order = shuffled(alphabet, seed)

    def own(number: int, tokens: int) -> list[int]:
        draw = generator(seed, number).random
        lead = digits(number + shared if number >= 0 else -1 - number, [order] * depth)
        return [*lead[:tokens], *[order[int(draw() * size)] for _ in range(tokens - depth)]]

    stretch = lru_cache(STRETCHES_LIMIT)(own)

    def prompt(number: int, input_tokens: int, shared: Sequence[Stretch] = ()) -> tuple[int, ...]:
        ids: list[int] = []
        for name, tokens in shared:
            if len(ids) >= input_tokens:
                break
            ids += stretch(name, tokens)
        return (*ids[:input_tokens], *own(number, max(0, input_tokens - len(ids))))

    return prompt


def generator(seed: int, number: int) -> Random:
    """The generator of one prompt or stretch."""
    # A text seed is hashed with SHA-512, so generators of neighbouring numbers have nothing in common.
    return Random(f"{seed}:{number}")  # noqa: S311


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """The items in an order that the seed fixes."""
    random = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: random.random())


def digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    """A number as a counter with these wheels shows it, the fastest first."""
    shown = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        shown.append(wheel[position])
    return shown
