"""Builds prompts of exactly N tokens by the server's count, which all differ from their first tokens on.

    token ids   If the API accepts ids, N ids are N tokens.
    text        Words that cost N tokens together. The first words number the text, and random words fill it. The whole
                text is counted, and if the count is not the sum of its words, its end is drawn again.

A prompt may begin with spans that it shares with other prompts:

    number  random words                a separate text
    span  span  number  random words    a text that shares its beginning

A seed gives the same prompts, byte for byte, on any machine. Prompt i has its own generator, seeded with the text
"seed:i". Only `Random.random` is used, the one method whose sequence Python guarantees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import gcd
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from loadgen.workloads.input_files import check_input, read_input
from loadgen.workloads.random_streams import item_picker
from loadgen.workloads.spec_syntax import WorkloadError

if TYPE_CHECKING:
    import tokenizers

BLOCK_TOKENS = 16  # Block size of vLLM's prefix cache. Prompts must differ within their first block.
SPANS_LIMIT = 4096  # Number of cached spans; they take 16 MiB at 512 tokens each

Item = TypeVar("Item", int, str)
SharedSpan = tuple[int, int]
"""A negative number and a length: a span of tokens that prompts may share. Equal pairs are equal tokens."""
CountTokens = Callable[[Sequence[str]], list[int]]  # The signature of Tokenizer.count

_COMMON = (
    "the of and to in is that it was for on are as with they be at one have this from by but some what there we can "
    "out other all your when up use how each which do time if will way about many then them would so these long make "
    "see two has look more day could go come no most over know than call first people may down now find any new work "
    "part take get a b c d e f g h j k l m n o p q r s t u v w x y z"
)
COMMON_WORDS = tuple(_COMMON.split())
"""Short English words, which are one token each in most vocabularies, and letters for other vocabularies."""

COST_LIMIT = 8  # Words of more tokens are not used, because they rarely fit into the last few tokens
WORDS_LIMIT = 512  # Enough for 512 x 512 different prompts from the second word on
MIX_TOKENS = COST_LIMIT * COST_LIMIT
"""If at least this many tokens remain, any word may come next. Coins of at most c without a common divisor can pay
every amount from (c - 1)^2 on (Frobenius and Schur), which leaves room for one more word."""
TOKENIZER_BYTES = 1 << 28  # Maximum size of a tokenizer file, ten times the largest known one
BATCH = 256  # Texts that are counted together; a tokenizer's encodings are much larger than the texts
ROUNDS_LIMIT = 64  # Maximum number of attempts to fix a text with a wrong count
REPLACED_TOKENS = 8  # Tokens at the end of a text that one attempt replaces
LEAD_LIMIT = 4  # Maximum number of words at the start of a text that number it
CANDIDATES_LIMIT = 1024
MARKED_WORD = re.compile("[\u0120\u2581]([A-Za-z]{2,12})")
"""Matches a word after a blank in a vocabulary. Byte-level BPE and SentencePiece write these characters for a blank."""


class PromptError(WorkloadError):
    """Prompts of the requested length cannot be built. The message says why, and `hint` what to do."""


class Tokenizer(Protocol):
    """Counts tokens: with a tokenizer file, or by asking the server."""

    @property
    def words(self) -> Sequence[str]:
        """Different plain words, most of them one token each. Empty: none are known."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text as a prompt, including special tokens and the chat template."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens; an empty list if they are unknown."""


class ServerTokenCounter(Tokenizer, Protocol):
    """Counts tokens by asking the server, whose count defines the length of a prompt."""

    @property
    def generates(self) -> bool:
        """True if counting makes the server run the text, which then stays in its prefix cache."""

    @property
    def plain(self) -> Tokenizer | None:
        """If counting a prompt generates: counts text alone, without running it."""


class LocalTokenizer(msgspec.Struct, frozen=True):
    """Counts tokens with a tokenizer file. `count` includes the special tokens that the file's post-processor adds."""

    tokenizer: tokenizers.Tokenizer
    words: tuple[str, ...]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_file(named: Path) -> Path:
    """Return the path of the tokenizer.json that `named` stands for.

    `named` is a file, a folder with a tokenizer.json, or the name of a model in the local Hugging Face cache, such as
    Qwen/Qwen3-0.6B. Nothing is downloaded. Raises PromptError if there is no such file."""
    if named.exists() and not named.is_dir():
        try:
            check_input(named)
        except OSError as error:
            raise PromptError(
                f"cannot read {named}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json"
            ) from None
        return named
    folders = [named]
    source = f"the folder {named}"
    if not named.is_dir():
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home, "hub")).expanduser()
        model = hub / f"models--{str(named).replace('/', '--')}"
        newest = model / "refs" / "main"
        revision = newest.read_text(encoding="ascii").strip() if newest.is_file() else ""
        folders = sorted(model.glob("snapshots/*"), key=lambda folder: folder.name != revision)
        source = f"the cached model {named}"
        if not folders:
            problem = f"there is no file {named}, no folder, and no model of that name in {hub}"
            raise PromptError(problem, "pass --tokenizer PATH/tokenizer.json")
    files = (folder / "tokenizer.json" for folder in folders)
    result = next((file for file in files if file.is_file()), None)
    if result is None:
        problem = f"{source} has no tokenizer.json: save_pretrained of transformers' AutoTokenizer writes one"
        raise PromptError(problem, "pass another --tokenizer")
    return result


def load_tokenizer(named: Path) -> LocalTokenizer:
    """Read the file that `tokenizer_file` returns. Raises PromptError if it is unreadable or not a tokenizer."""
    import tokenizers

    path = tokenizer_file(named)
    # Threads of the tokenizers library do not survive a fork, and counting is short.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_input(path, TOKENIZER_BYTES).decode())
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json") from error
    except Exception as error:  # the library raises plain Exception for every invalid file
        problem = f"{path} is not a tokenizer.json: {str(error)[:200]}"
        raise PromptError(problem, "pass a Hugging Face tokenizer.json") from error
    # A file may request truncation or padding to a length. Servers ignore that, and so must the count.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LocalTokenizer(tokenizer, tuple(_plain_words(tokenizer)))


def _plain_words(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield words that are one token each after a blank, most frequent first, then common words for other
    vocabularies."""
    tokens = (tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size()))
    marked = (match[1] for match in map(MARKED_WORD.fullmatch, tokens) if match)
    candidates = list(dict.fromkeys([*islice(marked, CANDIDATES_LIMIT), *COMMON_WORDS]))
    encodings = tokenizer.encode_batch_fast(candidates, add_special_tokens=False)
    added = tokenizer.get_added_tokens_decoder().keys()
    # A word with unknown letters would become the model's special token for unknown text.
    return (word for word, encoding in zip(candidates, encodings, strict=True) if added.isdisjoint(encoding.ids))


class Prompt(Protocol):
    """Builds prompt number `number`.

    Prompts with different numbers differ from their first tokens on, or from the first tokens after their shared spans.
    A number gives the same prompt in every call, in any order and any process."""

    def __call__(self, number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        """Return text or token ids of exactly `input_tokens`, beginning with the shared spans, which may be cut."""


def id_prompts(
    alphabet: Sequence[int], seed: int, *, numbers: int, shared: int = 0, shortest: int = BLOCK_TOKENS
) -> Prompt:
    """Return a Prompt of ids from the alphabet, for numbers 0 to `numbers` - 1 and spans -1 to -`shared`.

    Prompts differ from their first or second id on. A shorter prompt may equal another one. That does not happen if
    every prompt has at least `shortest` tokens. Raises PromptError if the alphabet is too small to number them."""
    size = len(alphabet)
    total = numbers + shared
    max_depth = min(shortest, BLOCK_TOKENS)
    depth = next((depth for depth in range(1, max_depth + 1) if size**depth >= total), 0)
    if not depth:
        raise PromptError(
            f"{size} token ids make only {size**max_depth} different prompts of {max_depth} tokens, not {total}",
            "request longer prompts or fewer of them",
        )
    order = shuffled(alphabet, seed)
    pick = item_picker(order)

    def numbered_ids(number: int, tokens: int) -> list[int]:
        lead = counter_digits(number + shared if number >= 0 else -1 - number, [order] * depth)
        return [*lead[:tokens], *pick(prompt_random(seed, number), max(0, tokens - depth))]

    span_ids = lru_cache(SPANS_LIMIT)(numbered_ids)

    def prompt(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> tuple[int, ...]:
        ids: list[int] = []
        for span_number, span_tokens in shared:
            if len(ids) >= input_tokens:
                break
            ids += span_ids(span_number, span_tokens)
        return (*ids[:input_tokens], *numbered_ids(number, max(0, input_tokens - len(ids))))

    return prompt


def prompt_random(seed: int, number: int) -> Random:
    """Return the generator of one prompt or span. A seed of text is hashed (SHA-512), so neighbours are independent."""
    return Random(f"{seed}:{number}")  # noqa: S311


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the items in an order that depends on the seed."""
    random = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: random.random())


def counter_digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    """Return a number as a counter with these wheels shows it. A wheel lists the symbols of a digit, lowest digit
    first."""
    symbols = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        symbols.append(wheel[position])
    return symbols


class Words(msgspec.Struct, frozen=True):
    """Words with their cost in tokens by one tokenizer."""

    opening: dict[int, list[str]]
    """Prompt length in tokens to the words that form a prompt of that length alone."""
    costs: dict[str, int]
    """Tokens that a word adds after another word and a blank."""
    fits: list[list[str]]
    """Entry t lists the words that may come next if t tokens remain, so that the rest can still be filled."""

    def can_fill(self, tokens: int) -> bool:
        """Return whether some words together cost exactly `tokens`."""
        if tokens < MIX_TOKENS:
            return tokens == 0 or (tokens > 0 and bool(self.fits[tokens]))
        return bool(self.costs) and tokens % gcd(*self.costs.values()) == 0

    def fill(self, tokens: int, random: Random) -> list[str]:
        """Return random words that together cost exactly `tokens`. `can_fill` must be True for this number."""
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
        """Return the tokens of these words after other words."""
        return sum(self.costs[word] for word in words)

    def cheapest(self) -> tuple[int, list[str]]:
        """Return the minimum cost of a word, and the words with that cost."""
        minimum = min(self.costs.values(), default=1)
        return minimum, [word for word, tokens in self.costs.items() if tokens == minimum]

    def too_short(self, tokens: int, n: int = 1, possible: int = 0) -> PromptError:
        """Return the error for `n` texts of this many tokens, of which only `possible` exist."""
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


def measure_words(count: CountTokens, candidates: Sequence[str]) -> Words:
    """Return the costs of the candidates, counted at the start of a prompt and after another word."""
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
    fits: list[list[str]] = [[]]
    for tokens in range(1, MIX_TOKENS):
        fits.append([word for word, cost in costs.items() if cost == tokens or (cost < tokens and fits[tokens - cost])])
    return Words(opening, costs, fits)


class TextSpec(msgspec.Struct, frozen=True):
    """A text to build: its number, its length in tokens, and the shared spans at its beginning."""

    number: int
    tokens: int
    shared: tuple[SharedSpan, ...] = ()


class PromptDraft(msgspec.Struct):
    """A text under construction."""

    words: list[str]
    keep: int  # Number of words at the start that later changes keep
    tokens: int
    random: Random


def text_prompts(count: CountTokens, candidates: Sequence[str], specs: Sequence[TextSpec], seed: int) -> list[str]:
    """Build the texts, each with exactly the requested tokens, different from their first or second word on.

    The costs of words are measured once. Raises PromptError if a length cannot be reached, or if there are not enough
    different texts of a length."""
    words = measure_words(count, candidates)
    _, wheel = words.cheapest()
    depth = next((depth for depth in range(1, LEAD_LIMIT) if len(wheel) ** depth >= len(specs)), LEAD_LIMIT)
    writer = Writer(words, seed, openings(words, specs, seed), [shuffled(wheel, seed)] * depth)
    first_spans = list(dict.fromkeys(spec.shared[0] for spec in specs if spec.shared))
    drafts = (writer.draft(TextSpec(*span)) for span in first_spans)
    for span, text in zip(first_spans, _build_exact(count, words, drafts), strict=True):
        writer.spans[span, True] = text.split()
    return _build_exact(count, words, map(writer.draft, specs))


def openings(words: Words, specs: Sequence[TextSpec], seed: int) -> dict[SharedSpan, tuple[list[str], int]]:
    """Return the first words of every text and span that starts a prompt, and the number of tokens left to fill.

    Texts are numbered in sequence, whatever their length. Texts too short for such a number are numbered separately
    among those of their length, which distinguishes them from the others."""
    starts = dict.fromkeys(spec.shared[0] if spec.shared else (spec.number, spec.tokens) for spec in specs)
    by_length: dict[int, list[tuple[int, int]]] = {}
    for position, (number, tokens) in enumerate(starts):
        by_length.setdefault(tokens, []).append((position, number))
    result = {}
    for tokens, group in by_length.items():
        wheels, remaining, is_short = _wheels(words, len(starts), len(group), tokens, seed)
        for rank, (position, number) in enumerate(group):
            lead = counter_digits(rank if is_short else position, wheels)
            result[number, tokens] = lead, remaining
    return result


class Writer(msgspec.Struct, frozen=True):
    """Writes drafts whose words together cost the requested tokens."""

    words: Words
    seed: int
    openings: dict[SharedSpan, tuple[list[str], int]]
    counter: list[list[str]]
    """Wheels of the counter that numbers the words after shared spans."""
    spans: dict[tuple[SharedSpan, bool], list[str]] = {}
    """Words of the spans written so far. True: the span starts a text, and was counted with special tokens."""

    def draft(self, spec: TextSpec) -> PromptDraft:
        """Return a draft: shared spans, then words that number the text if there is room, then random words."""
        random = prompt_random(self.seed, spec.number)
        shared: list[str] = []
        if spec.shared:
            shared, remaining = self._shared_words(spec)
            lead = counter_digits(spec.number, self.counter)
            while not self.words.can_fill(remaining - self.words.cost(lead)):
                lead.pop()
            remaining -= self.words.cost(lead)
            # A text of nothing but spans has no words of its own, so only the end of the spans can be replaced.
            keep = len(shared) + len(lead) if remaining else 1
        else:
            lead, remaining = self.openings[spec.number, spec.tokens]
            keep = len(lead)
        words = [*shared, *lead, *self.words.fill(remaining, random)]
        return PromptDraft(words, keep, spec.tokens, random)

    def _shared_words(self, spec: TextSpec) -> tuple[list[str], int]:
        """Return the words of the shared spans, cut if they are longer than the text, and the remaining tokens."""
        shared: list[str] = []
        remaining = spec.tokens
        for span in spec.shared:
            if remaining <= 0:
                break
            number, tokens = span
            key = span, not shared
            if key not in self.spans:
                if not self.words.can_fill(tokens):
                    raise self.words.too_short(tokens)
                self.spans[key] = self.words.fill(tokens, prompt_random(self.seed, number))
            shared += self.spans[key]
            remaining -= tokens
        while not self.words.can_fill(remaining):
            if len(shared) == 1:
                raise self.words.too_short(spec.tokens)
            remaining += self.words.costs[shared.pop()]
        return shared, remaining


def _build_exact(count: CountTokens, words: Words, drafts: Iterable[PromptDraft]) -> list[str]:
    """Count the drafts, and change their ends until every count is exact. Raises PromptError."""
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
    return texts


def _replace_end(draft: PromptDraft, missing: int, words: Words) -> None:
    """Replace the end of a draft by words that cost `missing` tokens more."""
    freed = 0
    while len(draft.words) > draft.keep:
        freed += words.costs[draft.words.pop()]
        if freed >= REPLACED_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft.words += words.fill(freed + missing, draft.random)


def _wheels(words: Words, n: int, group_size: int, tokens: int, seed: int) -> tuple[list[list[str]], int, bool]:
    """Return the wheels of the counter whose words open texts of this length.

    The first wheel has opening words, the others words of minimum cost. The words of a wheel cost the same, so all
    these texts have the same number of tokens left to fill, which is the second value. The wheels number all `n` texts,
    or, if there is no room for that, the `group_size` texts of this length. The third value is True in the second
    case."""
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
