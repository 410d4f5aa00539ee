"""Plain words and what they cost in tokens: the material that text prompts are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from random import Random

Count = Callable[[Sequence[str]], list[int]]
"""Tokens of each text when it is sent as a prompt, special tokens and chat template included."""

_COMMON = (
    "the of and to in is that it was for on are as with they be at one have this from by but some what there we can "
    "out other all your when up use how each which do time if will way about many then them would so these long make "
    "see two has look more day could go come no most over know than call first people may down now find any new work "
    "part take get a b c d e f g h j k l m n o p q r s t u v w x y z"
)
COMMON_WORDS = tuple(_COMMON.split())
"""Short English words, one token each in most vocabularies, and letters for the vocabularies where they are not."""

COST_LIMIT = 8  # words of more tokens are left out: they make poor change for the last few tokens
WORDS_LIMIT = 512  # enough for 512 x 512 different prompts from the second word on
MIX_TOKENS = COST_LIMIT * COST_LIMIT
"""From here on any word may come next. Coins of at most c without a common divisor can pay every amount from
(c - 1)^2 on (Frobenius and Schur), which leaves room for one more word."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words with their costs by one tokenizer."""

    opening: dict[int, list[str]]
    """Prompt length in tokens to the words that make a prompt of that length when sent alone."""
    costs: dict[str, int]
    """Tokens that a word adds when it follows another word and a blank."""
    fits: list[list[str]]
    """Entry t holds the words that may come next when t tokens are left, so that the rest can still be filled."""

    def can_fill(self, tokens: int) -> bool:
        """Whether some words together cost exactly `tokens`."""
        if tokens < MIX_TOKENS:
            return tokens == 0 or (tokens > 0 and bool(self.fits[tokens]))
        return bool(self.costs) and tokens % gcd(*self.costs.values()) == 0

    def fill(self, tokens: int, random: Random) -> list[str]:
        """Random words that together cost exactly `tokens`, which `can_fill` has found possible."""
        everything, most = list(self.costs), max(self.costs.values(), default=1)
        draw, size = random.random, len(everything)
        picked: list[str] = []
        while tokens >= MIX_TOKENS:
            some = [everything[int(draw() * size)] for _ in range((tokens - MIX_TOKENS) // most + 1)]
            tokens -= sum([self.costs[word] for word in some])
            picked += some
        while tokens:
            choices = self.fits[tokens]
            picked.append(choices[int(draw() * len(choices))])
            tokens -= self.costs[picked[-1]]
        return picked


def learn(count: Count, candidates: Sequence[str]) -> Words:
    """Ask `count` what each of the candidates costs, at the start of a prompt and after another word."""
    alone = count(candidates)
    after = count([f"{candidates[0]} {word}" for word in candidates])
    added = sorted(
        (tokens - alone[0], position) for position, tokens in enumerate(after) if 1 <= tokens - alone[0] <= COST_LIMIT
    )
    costs = {candidates[position]: cost for cost, position in added[:WORDS_LIMIT]}
    opening: dict[int, list[str]] = {}
    for word, tokens in zip(candidates, alone, strict=True):
        if word in costs:
            opening.setdefault(tokens, []).append(word)
    return Words(opening, costs, _fits(costs))


def _fits(costs: dict[str, int]) -> list[list[str]]:
    fits: list[list[str]] = [[]]
    for tokens in range(1, MIX_TOKENS):
        fits.append([word for word, cost in costs.items() if cost == tokens or (cost < tokens and fits[tokens - cost])])
    return fits
