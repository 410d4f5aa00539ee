"""Builds prompts of exactly N tokens by the server's count. All prompts differ in their first tokens.

    token ids   If the API accepts token ids, N ids are N tokens.
    text        Words that cost N tokens together. The first words encode the number of the text, and random words
                follow. The whole text is counted. If its count is not the sum of its words, its last words are
                replaced until the count is N.

A prompt may begin with spans of tokens that it shares with other prompts:

    number  random words                a prompt without shared spans.
    span  span  number  random words    a prompt that shares its beginning with other prompts.

A seed gives the same prompts, byte for byte, on any machine. Prompt i has a separate random generator, seeded with the
text "seed:i". Only the sequence of `Random.random` is used, the only one that Python guarantees.
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
"""A negative number and a length in tokens, which identify a span that prompts may share. Equal pairs stand for equal
tokens."""
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
"""If at least this many tokens remain to be filled, any word may come next. Word costs of at most c without a common
divisor can form every sum from `(c - 1)**2` on (Frobenius and Schur). `c**2` tokens leave room for one more word."""
TOKENIZER_BYTES = 1 << 28  # Maximum size of a tokenizer file, ten times the largest known one
BATCH = 256  # Texts that are counted together; a tokenizer's encodings are much larger than the texts
ROUNDS_LIMIT = 64  # Maximum number of attempts to fix a text with a wrong count
REPLACED_TOKENS = 8  # Tokens at the end of a text that one attempt replaces
LEAD_LIMIT = 4  # Maximum number of words at the start of a text that number it
CANDIDATES_LIMIT = 1024
MARKED_WORD = re.compile("[\u0120\u2581]([A-Za-z]{2,12})")
"""Matches a word after a space in a vocabulary. Byte-level BPE and SentencePiece write these characters for a space."""


class PromptError(WorkloadError):
    """Prompts of the requested length cannot be built. The message states the reason, and `hint` says what to do."""


class Tokenizer(Protocol):
    """Interface of objects that count tokens, either with a tokenizer file or by requests to the server."""

    @property
    def words(self) -> Sequence[str]:
        """Different plain words, most of which are one token each. Empty if no words are known."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text if it is sent as a prompt.

        The number includes special tokens and the chat template."""

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, or an empty list if the ids are unknown."""


class ServerTokenCounter(Tokenizer, Protocol):
    """Interface of objects that count tokens by requests to the server, whose count defines a prompt's length."""

    @property
    def generates(self) -> bool:
        """True if the server has to run a text to count it. The text then stays in the server's prefix cache."""

    @property
    def plain(self) -> Tokenizer | None:
        """Counter of text alone, without the tokens that the endpoint adds. It does not run the text.

        Needed only if `generates` is True. None if the server has no such counter."""


class LocalTokenizer(msgspec.Struct, frozen=True):
    """A tokenizer file. `count` includes the special tokens that the file's post-processor adds, `ids` does not."""

    tokenizer: tokenizers.Tokenizer
    words: tuple[str, ...]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_file(named: Path) -> Path:
    """Return the path of the tokenizer.json that `named` refers to.

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
            raise PromptError(problem, _download_hint(str(named)))
    files = (folder / "tokenizer.json" for folder in folders)
    result = next((file for file in files if file.is_file()), None)
    if result is None:
        problem = f"{source} has no tokenizer.json: save_pretrained of transformers' AutoTokenizer writes one"
        raise PromptError(problem, "pass another --tokenizer" if named.is_dir() else _download_hint(str(named)))
    return result


def _download_hint(named: str) -> str:
    """Return a hint with the command that downloads the tokenizer of a Hugging Face model into the local cache.

    `hf` is installed with loadgen, as a part of huggingface_hub, which the library tokenizers requires."""
    if not re.fullmatch(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", named) or named.endswith(".json"):
        return "pass --tokenizer PATH/tokenizer.json"
    return f"download it: hf download {named} tokenizer.json; or pass --tokenizer PATH/tokenizer.json"


def load_tokenizer(named: Path) -> LocalTokenizer:
    """Load the tokenizer that `named` refers to, as in `tokenizer_file`.

    Raises PromptError if there is no such file, or if it is unreadable or not a tokenizer."""
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
    """Yield plain words of the tokenizer's vocabulary, most frequent first, and then COMMON_WORDS.

    Words that the tokenizer encodes with a special token, such as the one for unknown text, are left out."""
    tokens = (tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size()))
    marked = (match[1] for match in map(MARKED_WORD.fullmatch, tokens) if match)
    candidates = list(dict.fromkeys([*islice(marked, CANDIDATES_LIMIT), *COMMON_WORDS]))
    encodings = tokenizer.encode_batch_fast(candidates, add_special_tokens=False)
    added = tokenizer.get_added_tokens_decoder().keys()
    # A word with unknown letters would become the model's special token for unknown text.
    return (word for word, encoding in zip(candidates, encodings, strict=True) if added.isdisjoint(encoding.ids))


class Prompt(Protocol):
    """Interface of functions that build a prompt from its number.

    Prompts with different numbers differ from their first tokens on, or from the first tokens after their shared spans.
    A number gives the same prompt in every call, in any order and in any process."""

    def __call__(self, number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        """Return text or token ids of exactly `input_tokens` tokens.

        The prompt begins with the shared spans, which are cut if they are longer than the prompt."""


def id_prompts(
    alphabet: Sequence[int], seed: int, *, numbers: int, shared: int = 0, shortest: int = BLOCK_TOKENS
) -> Prompt:
    """Return a `Prompt` that builds prompts of random token ids from `alphabet`.

    Its prompts have numbers from 0 to `numbers` - 1, and its shared spans have numbers from -1 to -`shared`. Prompts of
    at least `shortest` tokens differ from each other within their first tokens. Shorter prompts may be equal. Raises
    PromptError if the alphabet is too small for this many different prompts."""
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
    """Return the random generator of one prompt or span.

    The seed is a text, which Python hashes with SHA-512. Generators of consecutive numbers are therefore independent.
    """
    return Random(f"{seed}:{number}")  # noqa: S311


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """Return the items in a random order that depends only on the seed."""
    random = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: random.random())


def counter_digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the digits of `number` as a mechanical counter shows them, lowest digit first.

    A wheel lists the symbols of one digit, and there is one wheel per digit."""
    symbols = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        symbols.append(wheel[position])
    return symbols


class Words(msgspec.Struct, frozen=True):
    """Words with their cost in tokens, as one tokenizer counts them."""

    opening: dict[int, list[str]]
    """Words by the length of the prompt that consists of the word alone, in tokens."""
    costs: dict[str, int]
    """Number of tokens that each word adds after another word and a space."""
    fits: list[list[str]]
    """Entry t lists the words that may come next if t tokens remain. Other words can fill the tokens that remain after
    them."""

    def can_fill(self, tokens: int) -> bool:
        """Return True if there are words that together cost exactly `tokens` tokens, otherwise False."""
        if tokens < MIX_TOKENS:
            return tokens == 0 or (tokens > 0 and bool(self.fits[tokens]))
        return bool(self.costs) and tokens % gcd(*self.costs.values()) == 0

    def fill(self, tokens: int, random: Random) -> list[str]:
        """Return random words that together cost exactly `tokens` tokens. `can_fill(tokens)` must be True."""
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
        """Return the number of tokens that these words add to a text."""
        return sum(self.costs[word] for word in words)

    def cheapest(self) -> tuple[int, list[str]]:
        """Return the lowest cost of a word in tokens, and all words with that cost."""
        minimum = min(self.costs.values(), default=1)
        return minimum, [word for word, tokens in self.costs.items() if tokens == minimum]

    def too_short(self, tokens: int, n: int = 1, possible: int = 0) -> PromptError:
        """Return the error for `n` requested texts of `tokens` tokens, of which only `possible` exist."""
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
    """Count the tokens of the candidate words, and return the usable words with their costs.

    A word is counted at the start of a prompt and after another word. Words of more than COST_LIMIT tokens are left
    out."""
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
    """A text to build: its number, its length in tokens, and the shared spans at its start."""

    number: int
    tokens: int
    shared: tuple[SharedSpan, ...] = ()


class PromptDraft(msgspec.Struct):
    """A text under construction."""

    words: list[str]
    keep: int  # Number of words at the start that are not replaced later
    tokens: int
    random: Random


def text_prompts(count: CountTokens, candidates: Sequence[str], specs: Sequence[TextSpec], seed: int) -> list[str]:
    """Build one text per spec, each with exactly the requested number of tokens.

    All texts differ in their first or second word, or in the words after their shared spans. The costs of words are
    measured once. Raises PromptError if a length cannot be reached, or if there are not enough different texts of a
    length.
    """
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
    """Return the opening words of each text or span that starts a prompt, and the number of tokens left to fill.

    The opening words encode a consecutive number, which makes the texts different. A text may be too short for such a
    number. It is then numbered among the texts of its length, and differs from all other texts by its length."""
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
    """Writes drafts: texts whose words are expected to cost the requested number of tokens together."""

    words: Words
    seed: int
    openings: dict[SharedSpan, tuple[list[str], int]]
    counter: list[list[str]]
    """Wheels of the counter (see `counter_digits`) whose words number a text after its shared spans."""
    spans: dict[tuple[SharedSpan, bool], list[str]] = {}
    """Words of the spans written so far. The key contains True if the span starts a text: its tokens then include the
    special tokens."""

    def draft(self, spec: TextSpec) -> PromptDraft:
        """Return a draft: the words of the shared spans, words that encode the number of the text, and random words.

        Words of the number are left out if there are too few tokens for them."""
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
        """Return the words of the shared spans, and the number of tokens left to fill.

        Spans that are longer than the text are cut."""
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
    """Return the texts of the drafts, after changing their last words until every text has the exact token count.

    Raises PromptError if a text is not exact after ROUNDS_LIMIT attempts."""
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
    """Replace the last words of a draft by words that together cost `missing` tokens more (fewer if negative)."""
    freed = 0
    while len(draft.words) > draft.keep:
        freed += words.costs[draft.words.pop()]
        if freed >= REPLACED_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft.words += words.fill(freed + missing, draft.random)


def _wheels(words: Words, n: int, group_size: int, tokens: int, seed: int) -> tuple[list[list[str]], int, bool]:
    """Return the wheels of the counter that provides the first words of texts of `tokens` tokens.

    A wheel lists the words of one digit (see `counter_digits`). The first wheel has words that can start a prompt, and
    the other wheels have words of minimum cost. All words of a wheel have the same cost, so these texts have the same
    number of tokens left to fill. The result has three values:

    - the wheels.
    - the number of tokens left to fill.
    - False if the wheels number all `n` texts, True if they have room only for the `group_size` texts of this length.

    Raises PromptError if there are not enough different texts of this length.
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
