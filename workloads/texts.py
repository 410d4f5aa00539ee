"""Builds text prompts of exactly N tokens from words whose number of tokens (cost) is known.

Every text has a number. The first words of a text encode this number, so that texts differ, and random words follow. If
several prompts must begin alike, the words that they share (the shared spans) come first.

`measure_words` counts the tokens of each word. For most tokenizers, it also proves that token counts are additive: two
words in a row have as many tokens as both words have separately. The token count of a text is then the sum over its
words, and the text itself need not be counted.

Other tokenizers have tokens that span words. With such a tokenizer, each complete text is counted, and the last words
of the text are replaced until the count is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import gcd
from random import Random
from typing import Protocol

import msgspec
from msgspec.structs import replace

from loadgen.workloads.prompts import (
    SPANS_LIMIT,
    CountTokens,
    PromptError,
    SharedSpan,
    counter_digits,
    prompt_random,
    shuffled,
)
from loadgen.workloads.random_streams import item_picker

COST_LIMIT = 8  # Words of more tokens are not used, because they rarely fit into the last few tokens
WORDS_LIMIT = 256
"""Maximum number of words. They have 65,536 pairs, all of which are counted, and number 256**3 different prompts from
the second word on."""
OPENINGS = 16
"""Number of words that are counted at the start of a prompt. More are counted only if short prompts need them."""
MIN_WORDS = 16
"""Minimum number of usable words if some of the candidate words are left out."""
REPETITIONS, PROOFS = 12, 6
"""Number of times that a word is repeated to find its cost, and maximum number of sets of words that are tried."""
MIX_TOKENS = COST_LIMIT * COST_LIMIT
"""If at least this many tokens remain to be filled, any word may come next. Word costs of at most c without a common
divisor can form every sum from `(c - 1)**2` on (Frobenius and Schur). `c**2` tokens leave room for one more word."""
BATCH = 256  # Texts that are counted together; a tokenizer's encodings are much larger than the texts
ROUNDS_LIMIT = 64  # Maximum number of attempts to fix a text with a wrong count
REPLACED_TOKENS = 8  # Tokens at the end of a text that one attempt replaces
LEAD_LIMIT = 6  # Maximum number of words at the start of a text that encode its number

Progress = Callable[[int], None]
"""Callback that is called with the number of texts built so far."""


class WordCosts(msgspec.Struct, frozen=True):
    """Words and their numbers of tokens (costs), as measured by `measure_words` for one tokenizer.

    WordCosts can be stored for later runs on the same server.
    """

    alone: dict[str, int]
    """Length in tokens of the prompt that consists of the word alone."""
    costs: dict[str, int]
    """Number of tokens that each word adds after another word and a space."""
    adds_up: bool
    """True if every pair of words was counted, and has as many tokens as its two words together."""


class VocabularyStore(Protocol):
    """Interface of a store for the vocabulary of a server: words and their token counts, measured by earlier runs."""

    def load(self) -> WordCosts | None:
        """Return the stored vocabulary of this server, or None if there is none."""

    def save(self, vocabulary: WordCosts) -> None:
        """Store the vocabulary for later runs."""


class Words(msgspec.Struct, frozen=True):
    """Words with the number of tokens (cost) of each, and tables for building texts of an exact length from them."""

    opening: dict[int, list[str]]
    """Words by the length of the prompt that consists of the word alone, in tokens."""
    costs: dict[str, int]
    """Number of tokens that each word adds after another word and a space."""
    fits: list[list[str]]
    """Entry t lists the words that may come next if t tokens remain. Other words can fill the tokens that remain after
    them."""
    pick: Callable[[Random, int], list[str]] | None
    """Picks this number of words faster than one at a time. None unless each word costs one token."""

    def can_fill(self, tokens: int) -> bool:
        """Return True if a text of exactly `tokens` tokens can be built from these words. Words may be repeated."""
        if tokens < MIX_TOKENS:
            return tokens == 0 or (tokens > 0 and bool(self.fits[tokens]))
        return bool(self.costs) and tokens % gcd(*self.costs.values()) == 0

    def fill(self, tokens: int, random: Random) -> list[str]:
        """Return random words that together have exactly `tokens` tokens. `can_fill(tokens)` must be True."""
        if self.pick is not None:
            return self.pick(random, tokens)
        all_words = list(self.costs)
        max_cost = max(self.costs.values(), default=1)
        draw = random.random
        size = len(all_words)
        picked: list[str] = []
        while tokens >= MIX_TOKENS:
            batch = [all_words[int(draw() * size)] for _ in range((tokens - MIX_TOKENS) // max_cost + 1)]
            tokens -= sum([self.costs[word] for word in batch])
            picked += batch
        while tokens:
            choices = self.fits[tokens]
            picked.append(choices[int(draw() * len(choices))])
            tokens -= self.costs[picked[-1]]
        return picked

    def cost(self, words: Iterable[str]) -> int:
        """Return the number of tokens that `words` add to the end of a text."""
        return sum(self.costs[word] for word in words)

    def cheapest(self) -> tuple[int, list[str]]:
        """Return the number of tokens of the words with the fewest tokens, and a list of these words."""
        minimum = min(self.costs.values(), default=1)
        return minimum, [word for word, tokens in self.costs.items() if tokens == minimum]

    def too_short(self, tokens: int, n: int = 1, possible: int = 0) -> PromptError:
        """Return the error to raise if no text has `tokens` tokens, or if too few different texts have this length.

        `n` is the number of different texts that are needed, and `possible` is the number that exist.
        """
        shortest = min(self.opening, default=0)
        if shortest > tokens:
            return PromptError(
                f"the shortest text prompt has {shortest} tokens with the special tokens that the server adds, "
                f"so a prompt cannot have {tokens}",
                f"request at least {shortest} input tokens; use min={shortest} for a distribution",
            )
        return PromptError(
            f"{len(self.costs)} known words make only {possible} different prompts of {tokens} tokens, not {n}",
            "request longer prompts or fewer of them",
        )


def measure_words(count: CountTokens, candidates: Sequence[str], *, openings: int = OPENINGS) -> WordCosts:
    """Return the usable words among `candidates`, with their numbers of tokens (costs).

    `count` counts the tokens of texts. Up to three attempts are made to find words whose costs add up: the token count
    of every text is the sum of the costs of its words.

    1. The first WORDS_LIMIT candidates are assumed to be one token each, as in most tokenizers. To check this
       assumption, the function counts texts that together contain every pair of these candidates.
    2. If the assumption is wrong, each candidate is counted as the second word of a text of two words. Words of more
       than COST_LIMIT tokens are left out.
    3. If the cost of some words depends on the words next to them, these words are left out too. This attempt fails if
       fewer than MIN_WORDS words remain. The result is then that of the second attempt, with `adds_up=False`.

    The first `openings` words are also counted at the start of a prompt, where a word may have a different cost.
    """
    first = candidates[0]
    starts = list(candidates[:openings])
    usable = list(candidates[:WORDS_LIMIT])
    pieces = pair_texts(first, usable)
    counts = count([*starts, *pieces])
    alone = dict(zip(starts, counts, strict=False))
    costs = dict.fromkeys(usable, 1)
    if _add_up(pieces, counts[len(starts) :], alone[first], costs):
        return WordCosts(alone, costs, adds_up=True)
    vocabulary = _measure_one_by_one(count, candidates, alone, openings)
    if vocabulary.adds_up:
        return vocabulary
    return _words_that_add_up(count, candidates, openings) or vocabulary


def _measure_one_by_one(
    count: CountTokens, candidates: Sequence[str], alone: Mapping[str, int], openings: int
) -> WordCosts:
    """Return the usable words among `candidates`, and for each the number of tokens that it adds to a text (its cost).

    Each candidate is measured as the second word of a text of two words. A word is usable if its cost is from 1 to
    COST_LIMIT tokens. If more than WORDS_LIMIT words are usable, only the cheapest ones are returned. The result also
    states whether token counts are additive, so that the cost of a text is the sum over its words.

    - `count` counts the tokens of texts.
    - `alone` maps a word to the token count of the text that consists of this word alone. It must contain the first
      candidate, which is the first word of all measured texts.
    - `openings` is a number of words. The cheapest `openings` words of the result are also counted at the start of a
      text, because a word may have a different cost there.
    """
    first = candidates[0]
    after = count([f"{first} {word}" for word in candidates])
    added = sorted(
        (tokens - alone[first], position)
        for position, tokens in enumerate(after)
        if 1 <= tokens - alone[first] <= COST_LIMIT
    )
    return _prove(count, {candidates[position]: cost for cost, position in added[:WORDS_LIMIT]}, openings)[0]


def _words_that_add_up(count: CountTokens, candidates: Sequence[str], openings: int) -> WordCosts | None:
    """Return the words in `candidates` whose token counts are additive, with these counts.

    Token counts are additive if two words in a row have as many tokens as they have separately. For example, if a
    server counts every four characters as one token, only words of three letters (with a space) are additive.

    `count` counts the tokens of texts. The first `openings` words are also counted at the start of a text, where a word
    may have another count. Return None if fewer than MIN_WORDS words are additive.
    """
    first = candidates[0]
    repeated = count([" ".join((first, *[word] * REPETITIONS)) for word in candidates])
    (first_tokens,) = count([first])
    costs: dict[str, int] = {}
    for word, tokens in zip(candidates, repeated, strict=True):
        cost, rest = divmod(tokens - first_tokens, REPETITIONS)
        if not rest and 1 <= cost <= COST_LIMIT and len(costs) < WORDS_LIMIT:
            costs[word] = cost
    for _ in range(PROOFS):
        if len(costs) < MIN_WORDS:
            return None
        vocabulary, wrong = _prove(count, costs, openings)
        if vocabulary.adds_up:
            return vocabulary
        costs = {word: cost for word, cost in costs.items() if word not in wrong}
    return None


def _prove(count: CountTokens, costs: dict[str, int], openings: int) -> tuple[WordCosts, set[str]]:
    """Test whether the token counts of words are additive. Return a WordCosts, and the set of words that fail the test.

    Token counts are additive if two words in a row have as many tokens as they have separately. To test this, the
    function counts the tokens of texts that together contain every pair of words. The WordCosts contains all words of
    `costs`. Its field `adds_up` is True if no word fails the test and `costs` is not empty.

    - `count` is the function that counts the tokens of texts.
    - `costs` maps each word to its number of tokens after another word.
    - `openings` is the number of words whose tokens are also counted at the start of a text, where this number may
      differ. These are the first words in `costs`.
    """
    if not costs:
        return WordCosts({}, {}, adds_up=False), set()
    words = list(costs)
    starts = words[:openings]
    pieces = pair_texts(words[0], words)
    counts = count([*starts, *pieces])
    alone = dict(zip(starts, counts, strict=False))
    wrong = {
        word
        for word, piece, tokens in zip(words, pieces, counts[len(starts) :], strict=True)
        if not _add_up([piece], [tokens], alone[words[0]], costs)
    }
    return WordCosts(alone, costs, adds_up=not wrong), wrong


def measure_openings(count: CountTokens, vocabulary: WordCosts) -> WordCosts:
    """Return `vocabulary` with the number of tokens that each word has at the start of a prompt.

    `count` is the function that counts the tokens of texts. It is called only for words whose number at the start is
    not known yet.
    """
    missing = [word for word in vocabulary.costs if word not in vocabulary.alone]
    alone = vocabulary.alone | dict(zip(missing, count(missing), strict=True))
    return replace(vocabulary, alone=alone) if missing else vocabulary


def pair_texts(first: str, words: Sequence[str]) -> list[str]:
    """Return texts that together contain every pair of `words`, including each word twice in a row.

    For example, the texts for the words a, b and c are `first a a b a c a`, `first b b c b` and `first c c`. Each text
    begins with the word `first`.
    """
    texts = []
    for position, word in enumerate(words):
        pairs = [f"{other} {word}" for other in words[position + 1 :]]
        texts.append(" ".join((first, word, word, *pairs)))
    return texts


def _add_up(texts: Sequence[str], counts: Sequence[int], first_tokens: int, costs: Mapping[str, int]) -> bool:
    """Return True if the token count of each text is the sum of the token counts of its words.

    `counts` contains the token counts of the texts, in the same order. `costs` maps each word to its number of tokens.
    All texts begin with the same word. At the start of a text, this word has `first_tokens` tokens, which can differ
    from its entry in `costs`.
    """
    return all(
        tokens == first_tokens + sum([costs[word] for word in text.split()[1:]])
        for text, tokens in zip(texts, counts, strict=True)
    )


def words_of(vocabulary: WordCosts, openings: int = OPENINGS) -> Words:
    """Return the words of a vocabulary, with the tables for building texts of an exact length.

    Only the first `openings` words can be the first word of a text."""
    costs = vocabulary.costs
    opening: dict[int, list[str]] = {}
    for word in list(costs)[:openings]:
        opening.setdefault(vocabulary.alone[word], []).append(word)
    fits: list[list[str]] = [[]]
    for tokens in range(1, MIX_TOKENS):
        fits.append([word for word, cost in costs.items() if cost == tokens or (cost < tokens and fits[tokens - cost])])
    one_token_each = set(costs.values()) == {1}
    return Words(opening, costs, fits, item_picker(list(costs)) if one_token_each else None)


class TextSpec(msgspec.Struct, frozen=True):
    """The description of a text to build: its number, its length in tokens, and its shared spans.

    A shared span is a sequence of tokens with which several texts begin.
    """

    number: int
    tokens: int
    shared: tuple[SharedSpan, ...] = ()


class PromptDraft(msgspec.Struct):
    """A text whose words may still be replaced until its token count is exact."""

    words: list[str]
    keep: int  # Number of words at the start that are not replaced later
    tokens: int
    random: Random


class TextSurvey:
    """Counts the different beginnings (prefixes) of the prompts of a run, by their length in tokens.

    A server can reuse the prefixes of earlier prompts, which are in its prefix cache. To prevent this, each prompt
    normally begins with different words. Only some workloads have groups of prompts that begin with the same text,
    which is called a shared span.

    - A prompt without a shared span counts as one prefix. This prefix is the whole prompt.
    - All prompts that begin with the same shared span together count as one prefix. This prefix is the span.

    The method `note` adds a prompt. The survey is complete if `note` is called for every prompt that the run generates.
    Otherwise, for example in a run without end, the number of prefixes of each length is unknown. `group_size` then
    returns the number of prefixes of all lengths together, which is an upper limit.
    """

    def __init__(self, texts: int, spans: int = 0, *, complete: bool = True) -> None:
        """Create an empty survey for a run. The method `note` adds the prompts of the run.

        - `texts` is the number of texts in the run. They have the numbers 0, 1, 2 and so on.
        - `spans` is the number of shared spans. A shared span is a text with which several prompts begin. The spans
          have the numbers -1, -2 and so on. With 0, the survey itself counts the shared spans of the prompts that are
          added.
        - `complete` is False if `note` will be called for only a part of the prompts.
        """
        self.complete = complete
        self.lengths = Counter[int]()
        """Number of different beginnings of prompts, by their length in tokens."""
        self._texts = texts
        self._spans = spans
        self._span_positions: dict[SharedSpan, int] = {}

    @property
    def total(self) -> int:
        """Number of texts in the run, plus the number of shared spans.

        A shared span is a text with which several prompts begin. If the number of shared spans was not stated when the
        survey was created, the different spans that `note` has received so far are counted.
        """
        return self._texts + (self._spans or len(self._span_positions))

    def note(self, number: int, tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
        """Add one prompt to the survey, and return an empty string.

        The method has the parameters of a prompt builder (`Prompt`). It can therefore be passed in place of a prompt
        builder, to count all prompts of a run in advance without building them.
        """
        start = shared[0] if shared else (number, tokens)
        if start[0] >= 0:
            self.lengths[start[1]] += 1
        elif start not in self._span_positions:
            self._span_positions[start] = -1 - start[0] if self._spans else len(self._span_positions)
            self.lengths[start[1]] += 1
        return ""

    def position(self, number: int, tokens: int) -> int:
        """Return the position of one prefix among all prefixes of the run, counted from 0.

        A prefix is a text with which prompts begin. It is either a shared span, with which several prompts begin, or
        the whole text of a prompt. The shared spans have the first positions, and the whole texts follow.

        - `number` is the number of the prefix. Whole texts have the numbers 0, 1, 2, ..., and shared spans have
          negative numbers.
        - `tokens` is the length of the prefix. It is needed for shared spans, because several spans can have the same
          number but different lengths. For a whole text, the length does not matter.
        """
        if number >= 0:
            return self.total - self._texts + number
        return self._span_positions.get((number, tokens), -1 - number)

    def group_size(self, tokens: int) -> int:
        """Return the number of different prompt beginnings (prefixes) that are `tokens` tokens long.

        If the survey is not complete, this number is unknown. The result is then an upper limit: the number of prefixes
        of all lengths together.
        """
        return self.lengths[tokens] if self.complete else self.total


class Openings:
    """Chooses the opening words of each text, so that all texts differ.

    The opening words encode a number, as the digits of a counter do. Which number this is depends on the text:

    - Normally it is the position of the text among all texts of the run (see `TextSurvey.position`).
    - A short text has too few words for its position. It encodes its rank among the texts of the same length instead.
      This is sufficient, because texts of different lengths differ anyway.
    - A shared span is a text with which several prompts begin. It has a number like any other text. All of these
      prompts have the opening words of their shared span.
    """

    def __init__(self, words: Words, survey: TextSurvey, seed: int) -> None:
        """Prepare the opening words of the texts of a run.

        `survey` contains the number of texts of each length, and `words` contains the words that texts may consist of.
        Raises PromptError if there are not enough different texts of one of these lengths, or none at all.
        """
        self._words = words
        self._survey = survey
        self._seed = seed
        self._wheels: dict[int, tuple[list[list[str]], int, bool]] = {}
        self._ranks: dict[SharedSpan, int] = {}
        self._next_ranks = Counter[int]()
        self.short = {tokens for tokens in survey.lengths if self._of_length(tokens)[2]}
        """Lengths of texts that are too short to encode their position. `rank` must be called for each such text."""

    def rank(self, number: int, tokens: int, shared: Sequence[SharedSpan] = ()) -> str:
        """Assign a rank to the text with which a prompt begins, if this text is short.

        The short texts of one length get the ranks 0, 1, 2, ... A text that several prompts share gets only one rank. A
        text is short if the attribute `short` contains its length.

        - `number` is the number of the prompt, and `tokens` is its length.
        - `shared` contains the shared spans (texts of several prompts) with which the prompt begins. The first span
          gets the rank. Without spans, the whole prompt gets the rank.

        The method is called instead of a prompt builder (`Prompt`) when all prompts of a run are counted in advance.
        For this reason, it has the parameters of a prompt builder and returns a text, which is always empty.
        """
        start = shared[0] if shared else (number, tokens)
        if start[1] in self.short and start not in self._ranks:
            self._ranks[start] = self._next_ranks[start[1]]
            self._next_ranks[start[1]] += 1
        return ""

    def words(self, number: int, tokens: int) -> tuple[list[str], int]:
        """Return the opening words of a text, and the number of tokens that remain for random words.

        `number` identifies the text, and `tokens` is its length. A negative number stands for a shared span, which is a
        text with which several prompts begin. Raises PromptError if no text can have this length.
        """
        wheels, remaining, is_short = self._of_length(tokens)
        position = self._ranks[number, tokens] if is_short else self._survey.position(number, tokens)
        return counter_digits(position, wheels), remaining

    def _of_length(self, tokens: int) -> tuple[list[list[str]], int, bool]:
        if tokens not in self._wheels:
            survey = self._survey
            self._wheels[tokens] = _wheels(self._words, survey.total, survey.group_size(tokens), tokens, self._seed)
        return self._wheels[tokens]


class TextWriter(msgspec.Struct, frozen=True):
    """Writes texts with an exact number of tokens.

    Equal specs (`TextSpec`) give equal texts in every call and in every process.
    """

    words: Words
    seed: int
    openings: Openings
    counter: list[list[str]]
    """Wheels of the counter (see `counter_digits`) whose words number a text after its shared spans."""
    count: CountTokens | None
    """Counts whole texts, which are then fixed. None if the words of every text add up."""
    spans: dict[tuple[SharedSpan, bool], list[str]]
    """Words of the spans written so far. The key contains True if the span starts a text: its tokens then include the
    special tokens."""

    def text(self, spec: TextSpec) -> str:
        """Return one text with exactly the length in `spec`. Raises PromptError if that is impossible."""
        return self.texts([spec])[0]

    def texts(self, specs: Iterable[TextSpec], progress: Progress = lambda _: None) -> list[str]:
        """Return texts with exactly the lengths in `specs`. Raises PromptError if that is impossible."""
        if self.count is None:
            return [" ".join(self._draft(spec).words) for spec in specs]
        return _build_exact(self.count, self.words, map(self._draft, specs), progress)

    def write_first_spans(self, spans: Iterable[SharedSpan]) -> None:
        """Write the texts of all shared spans in `spans`. Store their words for the methods `text` and `texts`.

        A shared span is a text with which several prompts begin. If the server must count tokens, writing all spans
        together takes fewer requests than writing them one by one.
        """
        wanted = list(dict.fromkeys(spans))
        for span, text in zip(wanted, self.texts(TextSpec(*span) for span in wanted), strict=True):
            self.spans[span, True] = text.split()

    def _draft(self, spec: TextSpec) -> PromptDraft:
        """Return a draft of the text that `spec` describes. It has up to three parts, in this order:

        - The words of the shared spans. A shared span is a sequence of words with which several texts begin.
        - Words that encode a number, so that texts differ.
        - Random words.

        If the shared spans leave too few tokens, the second part is shortened or omitted.
        """
        random = prompt_random(self.seed, spec.number)
        shared: list[str] = []
        if spec.shared:
            shared, remaining = self._shared_words(spec)
            lead = counter_digits(spec.number, self.counter)
            while not self.words.can_fill(remaining - self.words.cost(lead)):
                lead.pop()
            remaining -= self.words.cost(lead)
            # If a text consists only of shared spans, its token count can only be fixed by replacing the last words of
            # the spans.
            keep = len(shared) + len(lead) if remaining else 1
        else:
            lead, remaining = self.openings.words(spec.number, spec.tokens)
            keep = len(lead)
        words = [*shared, *lead, *self.words.fill(remaining, random)]
        return PromptDraft(words, keep, spec.tokens, random)

    def _shared_words(self, spec: TextSpec) -> tuple[list[str], int]:
        """Return the words of the shared spans of a text, and the number of tokens that are left for other words.

        A shared span is a text with which several texts begin. `spec` lists the shared spans of this text. If they are
        longer than the text, they are cut. Raises PromptError if the length of the text cannot be reached.
        """
        shared: list[str] = []
        remaining = spec.tokens
        for span in spec.shared:
            if remaining <= 0:
                break
            shared += self._span_words(span, starts=not shared)
            remaining -= span[1]
        while not self.words.can_fill(remaining):
            if len(shared) == 1:
                raise self.words.too_short(spec.tokens)
            remaining += self.words.costs[shared.pop()]
        return shared, remaining

    def _span_words(self, span: SharedSpan, *, starts: bool) -> list[str]:
        if (span, starts) in self.spans:
            return self.spans[span, starts]
        number, tokens = span
        if starts:
            words = self.text(TextSpec(number, tokens)).split()
        elif self.words.can_fill(tokens):
            words = self.words.fill(tokens, prompt_random(self.seed, number))
        else:
            raise self.words.too_short(tokens)
        if len(self.spans) < SPANS_LIMIT:
            self.spans[span, starts] = words
        return words


def text_writer(words: Words, survey: TextSurvey, seed: int, count: CountTokens | None = None) -> TextWriter:
    """Return a writer for the texts of the prompts that `survey` has counted. The texts consist of words in `words`.

    The texts differ in their first words, so that the server does not find them in its prefix cache. Only prompts that
    are meant to share a beginning begin alike. They differ in the words after this beginning, as far as their length
    leaves room for these words.

    - `seed` determines which texts are written.
    - `count` counts the tokens of whole texts. It is required if the tokens of a text are not the sum of the tokens of
      its words.

    Raises PromptError if no text has the length of a prompt, or if there are not enough different texts of this length.
    """
    _, wheel = words.cheapest()
    depth = next((depth for depth in range(1, LEAD_LIMIT) if len(wheel) ** depth >= survey.total), LEAD_LIMIT)
    return TextWriter(words, seed, Openings(words, survey, seed), [shuffled(wheel, seed)] * depth, count, {})


def _build_exact(count: CountTokens, words: Words, drafts: Iterable[PromptDraft], progress: Progress) -> list[str]:
    """Return the texts of the drafts. Each text has exactly the token count that its draft requires.

    `count` counts the tokens of complete texts. If a text has too many or too few tokens, its last words are replaced,
    and the text is counted again. `progress` is called with the number of finished texts. Raises PromptError if the
    token count of a text is still wrong after ROUNDS_LIMIT attempts.
    """
    texts: list[str] = []
    waiting = iter(drafts)
    while batch := list(islice(waiting, BATCH)):
        pending = batch
        for _ in range(ROUNDS_LIMIT):
            counts = count([" ".join(draft.words) for draft in pending])
            missing = [(draft, draft.tokens - n) for draft, n in zip(pending, counts, strict=True)]
            pending = [draft for draft, tokens in missing if tokens]
            for draft, tokens in missing:
                if tokens:
                    _replace_end(draft, tokens, words)
            if not pending:
                break
        else:
            raise PromptError(
                f"{len(pending)} texts could not be built with their exact length in {ROUNDS_LIMIT} attempts, the "
                f"first with {pending[0].tokens} tokens: this tokenizer's count of a text is not the sum of its words",
                "use an endpoint that accepts token ids, or pass the model's own --tokenizer",
            )
        texts += [" ".join(draft.words) for draft in batch]
        progress(len(texts))
    return texts


def _replace_end(draft: PromptDraft, missing: int, words: Words) -> None:
    """Replace the last words of a draft, so that the draft has `missing` more tokens. `missing` may be negative."""
    freed = 0
    while len(draft.words) > draft.keep:
        freed += words.costs[draft.words.pop()]
        if freed >= REPLACED_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft.words += words.fill(freed + missing, draft.random)


def _wheels(words: Words, n: int, group_size: int, tokens: int, seed: int) -> tuple[list[list[str]], int, bool]:
    """Choose the words that number the texts of `tokens` tokens, so that all texts of a run begin differently.

    Each text has a number, and its first words are the digits of this number. A wheel is a list of words that can stand
    for one digit (see `counter_digits`). The run has `n` texts, and `group_size` of them have `tokens` tokens.

    The result has three values:

    - The wheels, one per digit. All words of a wheel have the same number of tokens. The words of the first wheel can
      start a prompt. The other wheels contain the words with the fewest tokens.
    - The number of tokens that remain for random words after the digits.
    - True if a text of this length is too short for `n` different numbers. The texts of this length must then be
      numbered separately, from 0 to `group_size` - 1.

    Raises PromptError if fewer than `group_size` different texts of this length exist.
    """
    cost, wheel = words.cheapest()
    possible = 0
    for needed in (n, group_size):
        for depth in range(LEAD_LIMIT):
            for opening, first in sorted(words.opening.items(), key=lambda item: (-len(item[1]), item[0])):
                remaining = tokens - opening - depth * cost
                if not words.can_fill(remaining):
                    continue
                texts = len(first) * len(wheel) ** depth
                possible = max(possible, texts)
                if texts >= needed:
                    return [shuffled(column, seed) for column in (first, *[wheel] * depth)], remaining, needed < n
    raise words.too_short(tokens, group_size, possible)
