"""Texts of exactly N tokens by any tokenizer, of many lengths in one batch.

The first words number the text, as digits; random words fill up the rest. Each text is counted as a whole, and where
the whole is not the sum of its words its end is drawn anew, a bounded number of times.

    number  random words                      a text of its own
    stretch  stretch  number  random words    one that begins as others do
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from workloads.prompts import PromptError, Stretch, digits, generator, shuffled
from workloads.words import Count, Words, learn

BATCH = 256  # texts counted together: a tokenizer's encodings are far larger than the texts
ROUNDS_LIMIT = 64  # attempts to mend a text whose count is off
MEND_TOKENS = 8  # how much of the end of a text one attempt replaces
LEAD_LIMIT = 4  # words at the start of a text that number it


@dataclass(frozen=True, slots=True)
class Wanted:
    """One text to build: its number, its tokens in all, and the stretches that it begins with."""

    number: int
    tokens: int
    shared: tuple[Stretch, ...] = ()

    @property
    def opening(self) -> Stretch:
        """What stands at its very beginning: number and tokens of its first stretch, or its own."""
        return self.shared[0] if self.shared else (self.number, self.tokens)


@dataclass(slots=True)
class Draft:
    """A text in the making."""

    words: list[str]
    keep: int
    """Words at its start that mending leaves alone."""
    tokens: int
    random: Random


def text_prompts(count: Count, candidates: Sequence[str], wanted: Sequence[Wanted], seed: int) -> list[str]:
    """Build the texts, each of exactly the tokens wanted by `count`, different from their first word or two on.

    The cost of words is learnt once. Raises PromptError when a length cannot be reached, or when there are not
    enough different texts of it.
    """
    words = learn(count, candidates)
    writer = Writer(words, seed, openings(words, wanted, seed), _counter(words, len(wanted), seed))
    heads = list(dict.fromkeys(want.shared[0] for want in wanted if want.shared))
    for stretch, text in zip(heads, _exact(count, words, map(writer.head, heads)), strict=True):
        writer.stretches[stretch, True] = text.split()
    return _exact(count, words, map(writer.draft, wanted))


def openings(words: Words, wanted: Sequence[Wanted], seed: int) -> dict[Stretch, tuple[list[str], int]]:
    """The first words of every text that begins anew, and how many tokens are then left to fill.

    Texts are numbered through, whatever their length. Those too short to hold such a number are numbered among
    themselves; their length sets them apart from the others.
    """
    starts = list(dict.fromkeys(want.opening for want in wanted))
    alike = Counter(tokens for _, tokens in starts)
    wheels: dict[int, tuple[list[list[str]], int, bool]] = {}
    ranks: Counter[int] = Counter()
    made = {}
    for number, (name, tokens) in enumerate(starts):
        if tokens not in wheels:
            wheels[tokens] = _wheels(words, len(starts), alike[tokens], tokens, seed)
        lead, left, is_short = wheels[tokens]
        made[name, tokens] = digits(ranks[tokens] if is_short else number, lead), left
        ranks[tokens] += 1
    return made


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes drafts whose words cost what is wanted, one by one."""

    words: Words
    seed: int
    openings: dict[Stretch, tuple[list[str], int]]
    counter: list[list[str]]
    """The wheels that number what follows shared words."""
    stretches: dict[tuple[Stretch, bool], list[str]] = field(default_factory=dict)
    """Those written so far; true where one begins a text: it then was counted as one, special tokens included."""

    def draft(self, want: Wanted) -> Draft:
        """Stretches first, then the text's own words, numbered."""
        if not want.shared:
            return self.head(want.opening)
        random = generator(self.seed, want.number)
        begun, left = self._begun(want)
        lead = self._lead(want.number, left)
        left -= sum(self.words.costs[word] for word in lead)
        # What is shared to its end has no words of its own, and only its end can be mended.
        keep = len(begun) + len(lead) if left else 1
        return Draft([*begun, *lead, *self.words.fill(left, random)], keep, want.tokens, random)

    def head(self, stretch: Stretch) -> Draft:
        """A text, or a stretch, that begins anew."""
        random = generator(self.seed, stretch[0])
        lead, left = self.openings[stretch]
        return Draft([*lead, *self.words.fill(left, random)], len(lead), stretch[1], random)

    def _begun(self, want: Wanted) -> tuple[list[str], int]:
        """The stretches, cut where they are longer than the text, and the tokens left to fill."""
        begun: list[str] = []
        left = want.tokens
        for stretch in want.shared:
            if left <= 0:
                break
            begun += self._stretch(stretch, first=not begun)
            left -= stretch[1]
        while not (left >= 0 and self.words.can_fill(left)):
            if len(begun) == 1:
                raise _too_short(self.words, 1, want.tokens, 0)
            left += self.words.costs[begun.pop()]
        return begun, left

    def _stretch(self, stretch: Stretch, *, first: bool) -> list[str]:
        if (stretch, first) not in self.stretches:
            name, tokens = stretch
            if not self.words.can_fill(tokens):
                raise _too_short(self.words, 1, tokens, 0)
            self.stretches[stretch, first] = self.words.fill(tokens, generator(self.seed, name))
        return self.stretches[stretch, first]

    def _lead(self, number: int, left: int) -> list[str]:
        """The number, as far as there is room for it."""
        lead = digits(number, self.counter)
        while lead and not self.words.can_fill(left - sum(self.words.costs[word] for word in lead)):
            lead.pop()
        return lead


def _exact(count: Count, words: Words, drafts: Iterable[Draft]) -> list[str]:
    """Count the drafts, and mend those that are off until none is."""
    texts: list[str] = []
    waiting = iter(drafts)
    while batch := list(islice(waiting, BATCH)):
        _settle(count, words, batch)
        texts += [" ".join(draft.words) for draft in batch]
    return texts


def _settle(count: Count, words: Words, pending: Sequence[Draft]) -> None:
    for _ in range(ROUNDS_LIMIT):
        counts = count([" ".join(draft.words) for draft in pending])
        off = [(draft, missing) for draft, n in zip(pending, counts, strict=True) if (missing := draft.tokens - n)]
        if not off:
            return
        for draft, missing in off:
            _mend(draft, missing, words)
        pending = [draft for draft, _ in off]
    raise PromptError(
        f"{len(pending)} texts could not be brought to their length, the first to {pending[0].tokens} tokens, in "
        f"{ROUNDS_LIMIT} attempts: this tokenizer's count of a text is not the sum of its words",
        "use an endpoint that takes token ids, or pass the model's own --tokenizer",
    )


def _mend(draft: Draft, missing: int, words: Words) -> None:
    """Replace the end of a draft by words that cost `missing` tokens more."""
    freed = 0
    while len(draft.words) > draft.keep:
        freed += words.costs[draft.words.pop()]
        if freed >= MEND_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft.words += words.fill(freed + missing, draft.random)


def _wheels(words: Words, n: int, alike: int, tokens: int, seed: int) -> tuple[list[list[str]], int, bool]:
    """The wheels of the counter that opens texts of so many tokens: an opening word, then words of the least cost.

    They number all `n` texts, or where there is no room for that the `alike` ones of this length. All words of a wheel
    cost the same, so each such text has the same number of tokens left to fill: the second value. The third says
    whether there was no room.
    """
    cost, wheel = _cheapest(words)
    most = 0
    for needed in (n, alike):
        for depth in range(LEAD_LIMIT):
            for opening, first in sorted(words.opening.items(), key=lambda item: (-len(item[1]), item[0])):
                left = tokens - opening - depth * cost
                if not words.can_fill(left):
                    continue
                most = max(most, len(first) * len(wheel) ** depth)
                if len(first) * len(wheel) ** depth >= needed:
                    return [shuffled(column, seed) for column in (first, *[wheel] * depth)], left, needed < n
    raise _too_short(words, alike, tokens, most)


def _counter(words: Words, n: int, seed: int) -> list[list[str]]:
    _, wheel = _cheapest(words)
    depth = next((depth for depth in range(1, LEAD_LIMIT) if len(wheel) ** depth >= n), LEAD_LIMIT)
    return [shuffled(wheel, seed)] * depth


def _cheapest(words: Words) -> tuple[int, list[str]]:
    """The least cost of a word, and the words that have it."""
    cost = min(words.costs.values(), default=1)
    return cost, [word for word, tokens in words.costs.items() if tokens == cost]


def _too_short(words: Words, n: int, tokens: int, most: int) -> PromptError:
    shortest = min(words.opening, default=0)
    if shortest > tokens:
        return PromptError(
            f"the shortest prompt of text counts {shortest} tokens with the special tokens that the server adds, "
            f"so none can count {tokens}",
            f"ask for at least {shortest} input tokens; min={shortest} where they are drawn",
        )
    return PromptError(
        f"{len(words.costs)} known words make only {most} different prompts of {tokens} tokens, not {n}",
        "ask for longer prompts or fewer of them",
    )
