"""Prompts of exactly N tokens by the server's own count, all different from their first tokens on.

    token ids   where the API takes them: N ids are N tokens, and nothing can go wrong
    text        words that cost N tokens together. The first words number the text, as digits, random words fill it up;
                it is counted as a whole, and where that is not the sum of its words its end is drawn anew

    number  random words                      a text of its own
    stretch  stretch  number  random words    one that begins as others do

The same seed gives the same prompts, byte for byte, on any machine: prompt i is drawn from a generator of its own
seeded with the text "seed:i", and only through `Random.random`, the one method whose sequence Python promises to keep.
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

BLOCK_TOKENS = 16  # the granularity of vLLM's prefix cache; prompts must differ within their first block
SPANS_LIMIT = 4096  # shared stretches kept for the next prompt: 16 MiB at 512 tokens each

Item = TypeVar("Item", int, str)
SharedSpan = tuple[int, int]
"""(number below zero, tokens): a stretch of tokens that prompts may share. The same pair is the same tokens."""
CountTokens = Callable[[Sequence[str]], list[int]]  # as Tokenizer.count

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
TOKENIZER_BYTES = 1 << 28  # ten times the largest known
BATCH = 256  # texts counted together: a tokenizer's encodings are far larger than the texts
ROUNDS_LIMIT = 64  # attempts to mend a text whose count is off
MEND_TOKENS = 8  # how much of the end of a text one attempt replaces
LEAD_LIMIT = 4  # words at the start of a text that number it
CANDIDATES_LIMIT = 1024
MARKED_WORD = re.compile("[\u0120\u2581]([A-Za-z]{2,12})")
"""A vocabulary's word after a blank, which byte-level BPE and SentencePiece write as these marks."""


class PromptError(WorkloadError):
    """Prompts of the length asked for cannot be made; the message says why, `hint` what to do."""


class Tokenizer(Protocol):
    """Who can say how long a text is: a tokenizer file, or the server itself."""

    @property
    def words(self) -> Sequence[str]:
        """Different plain words, most of them one token each; empty when it knows none."""

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text when it is sent as a prompt, special tokens and chat template included."""

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens; empty when they cannot be known."""


class ServerTokenCounter(Tokenizer, Protocol):
    """The server: what it counts is what the length is."""

    @property
    def generates(self) -> bool:
        """Whether counting makes the server run the text, and so leaves it in the server's prefix cache."""

    @property
    def plain(self) -> Tokenizer | None:
        """Where counting a prompt generates: the server's count of text alone, without running it."""


class LocalTokenizer(msgspec.Struct, frozen=True):
    """Counts tokens as the model does. `count` includes the special tokens that the file's post-processor adds."""

    tokenizer: tokenizers.Tokenizer
    words: tuple[str, ...]

    def count(self, texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizer_file(named: Path) -> Path:
    """The tokenizer.json that is meant: a file, one in a folder, or that of a model by its name, such as
    Qwen/Qwen3-0.6B, in the local Hugging Face cache. Nothing is downloaded. Raises PromptError when there is none."""
    if named.exists() and not named.is_dir():
        try:
            check_input(named)
        except OSError as error:
            raise PromptError(
                f"cannot read {named}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json"
            ) from None
        return named
    folders, of = [named], f"the folder {named}"
    if not named.is_dir():
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home, "hub")).expanduser()
        model = hub / f"models--{str(named).replace('/', '--')}"
        newest = model / "refs" / "main"
        revision = newest.read_text(encoding="ascii").strip() if newest.is_file() else ""
        folders = sorted(model.glob("snapshots/*"), key=lambda folder: folder.name != revision)
        of = f"the cached model {named}"
        if not folders:
            problem = f"there is no file {named}, no folder, and no model of that name in {hub}"
            raise PromptError(problem, "pass --tokenizer PATH/tokenizer.json")
    result = next((file for folder in folders if (file := folder / "tokenizer.json").is_file()), None)
    if result is None:
        problem = f"{of} holds no tokenizer.json: transformers' AutoTokenizer writes one, by save_pretrained"
        raise PromptError(problem, "pass another --tokenizer")
    return result


def load_tokenizer(named: Path) -> LocalTokenizer:
    """Read what `tokenizer_file` finds. Raises PromptError when it cannot be read or is no tokenizer."""
    import tokenizers

    path = tokenizer_file(named)
    # Threads of the tokenizers library do not survive a fork, and counting is short.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(read_input(path, TOKENIZER_BYTES).decode())
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json") from error
    except Exception as error:  # the library raises plain Exception for everything that is wrong with a file
        problem = f"{path} is not a tokenizer.json: {str(error)[:200]}"
        raise PromptError(problem, "pass a Hugging Face tokenizer.json") from error
    # A file may ask for texts to be cut or padded to a length; the servers ignore that, and so do we.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LocalTokenizer(tokenizer, tuple(_plain_words(tokenizer)))


def _plain_words(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Words that are one token each after a blank, most frequent first, then common words for other vocabularies."""
    tokens = (tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.get_vocab_size()))
    marked = (match[1] for match in map(MARKED_WORD.fullmatch, tokens) if match)
    candidates = list(dict.fromkeys([*islice(marked, CANDIDATES_LIMIT), *COMMON_WORDS]))
    encodings = tokenizer.encode_batch_fast(candidates, add_special_tokens=False)
    added = tokenizer.get_added_tokens_decoder().keys()
    # A word with letters unknown to the model would become its special token for that.
    return (word for word, encoding in zip(candidates, encodings, strict=True) if added.isdisjoint(encoding.ids))


class Prompt(Protocol):
    """Makes prompt number `number`. Different numbers differ from their first tokens on, or from the first behind
    what they share. Calling it again, in any order and any process, gives the same prompt."""

    def __call__(self, number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> str | tuple[int, ...]:
        """Text or token ids of exactly `input_tokens`, beginning with the stretches, cut where they are longer."""


def id_prompts(
    alphabet: Sequence[int], seed: int, *, numbers: int, shared: int = 0, shortest: int = BLOCK_TOKENS
) -> Prompt:
    """Prompts of ids from the alphabet: numbers 0 to `numbers` - 1, and stretches -1 to -`shared`. They differ from
    their first id or two on. One that is shorter than that is its number cut short, and may have an equal; where all
    are at least `shortest` tokens long, none has. Raises PromptError when the ids cannot number them."""
    size, total, room = len(alphabet), numbers + shared, min(shortest, BLOCK_TOKENS)
    depth = next((d for d in range(1, room + 1) if size**d >= total), 0)
    if not depth:
        raise PromptError(
            f"{size} token ids make only {size**room} different prompts of {room} tokens, not {total}",
            "ask for longer prompts or fewer of them",
        )
    order = shuffled(alphabet, seed)
    pick = item_picker(order)

    def own(number: int, tokens: int) -> list[int]:
        lead = counter_digits(number + shared if number >= 0 else -1 - number, [order] * depth)
        return [*lead[:tokens], *pick(prompt_random(seed, number), max(0, tokens - depth))]

    stretch = lru_cache(SPANS_LIMIT)(own)

    def prompt(number: int, input_tokens: int, shared: Sequence[SharedSpan] = ()) -> tuple[int, ...]:
        ids: list[int] = []
        for name, tokens in shared:
            if len(ids) >= input_tokens:
                break
            ids += stretch(name, tokens)
        return (*ids[:input_tokens], *own(number, max(0, input_tokens - len(ids))))

    return prompt


def prompt_random(seed: int, number: int) -> Random:
    """Of one prompt or stretch. A text is hashed with SHA-512: neighbouring numbers have nothing in common."""
    return Random(f"{seed}:{number}")  # noqa: S311


def shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    """The items in an order that the seed fixes."""
    random = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: random.random())


def counter_digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    """A number as a counter with these wheels shows it, the fastest first."""
    shown = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        shown.append(wheel[position])
    return shown


class Words(msgspec.Struct, frozen=True):
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
        everything, maximum = list(self.costs), max(self.costs.values(), default=1)
        draw, size = random.random, len(everything)
        picked: list[str] = []
        while tokens >= MIX_TOKENS:
            some = [everything[int(draw() * size)] for _ in range((tokens - MIX_TOKENS) // maximum + 1)]
            tokens -= sum([self.costs[word] for word in some])
            picked += some
        while tokens:
            choices = self.fits[tokens]
            picked.append(choices[int(draw() * len(choices))])
            tokens -= self.costs[picked[-1]]
        return picked

    def cost(self, words: Iterable[str]) -> int:
        """Tokens of these words where others precede them."""
        return sum(self.costs[word] for word in words)

    def cheapest(self) -> tuple[int, list[str]]:
        """The least cost of a word, and the words that have it."""
        minimum = min(self.costs.values(), default=1)
        return minimum, [word for word, tokens in self.costs.items() if tokens == minimum]

    def too_short(self, tokens: int, n: int = 1, most: int = 0) -> PromptError:
        """Why there are no `n` texts of so many tokens, but `most`."""
        shortest = min(self.opening, default=0)
        if shortest > tokens:
            return PromptError(
                f"the shortest prompt of text counts {shortest} tokens with the special tokens that the server adds, "
                f"so none can count {tokens}",
                f"ask for at least {shortest} input tokens; min={shortest} where they are drawn",
            )
        return PromptError(
            f"{len(self.costs)} known words make only {most} different prompts of {tokens} tokens, not {n}",
            "ask for longer prompts or fewer of them",
        )


def measure_words(count: CountTokens, candidates: Sequence[str]) -> Words:
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
    fits: list[list[str]] = [[]]
    for tokens in range(1, MIX_TOKENS):
        fits.append([word for word, cost in costs.items() if cost == tokens or (cost < tokens and fits[tokens - cost])])
    return Words(opening, costs, fits)


class TextSpec(msgspec.Struct, frozen=True):
    """One text to build: its number, its tokens in all, and the stretches that it begins with."""

    number: int
    tokens: int
    shared: tuple[SharedSpan, ...] = ()


class PromptDraft(msgspec.Struct):
    """A text in the making."""

    words: list[str]
    keep: int  # words at its start that mending leaves alone
    tokens: int
    random: Random


def text_prompts(count: CountTokens, candidates: Sequence[str], wanted: Sequence[TextSpec], seed: int) -> list[str]:
    """Build the texts, each of exactly the tokens wanted by `count`, different from their first word or two on. The
    cost of words is learnt once. Raises PromptError when a length cannot be reached, or when there are not enough
    different texts of it."""
    words = measure_words(count, candidates)
    _, wheel = words.cheapest()
    depth = next((depth for depth in range(1, LEAD_LIMIT) if len(wheel) ** depth >= len(wanted)), LEAD_LIMIT)
    writer = Writer(words, seed, openings(words, wanted, seed), [shuffled(wheel, seed)] * depth)
    heads = list(dict.fromkeys(want.shared[0] for want in wanted if want.shared))
    drafts = (writer.draft(TextSpec(*head)) for head in heads)
    for head, text in zip(heads, _exact(count, words, drafts), strict=True):
        writer.stretches[head, True] = text.split()
    return _exact(count, words, map(writer.draft, wanted))


def openings(words: Words, wanted: Sequence[TextSpec], seed: int) -> dict[SharedSpan, tuple[list[str], int]]:
    """The first words of every text that begins anew, and how many tokens are then left to fill. Texts are numbered
    through, whatever their length. Those too short to hold such a number are numbered among themselves; their length
    sets them apart from the others."""
    starts = dict.fromkeys(want.shared[0] if want.shared else (want.number, want.tokens) for want in wanted)
    alike: dict[int, list[tuple[int, int]]] = {}
    for number, (name, tokens) in enumerate(starts):
        alike.setdefault(tokens, []).append((number, name))
    made = {}
    for tokens, those in alike.items():
        wheels, left, is_short = _wheels(words, len(starts), len(those), tokens, seed)
        for rank, (number, name) in enumerate(those):
            made[name, tokens] = counter_digits(rank if is_short else number, wheels), left
    return made


class Writer(msgspec.Struct, frozen=True):
    """Writes drafts whose words cost what is wanted, one by one."""

    words: Words
    seed: int
    openings: dict[SharedSpan, tuple[list[str], int]]
    counter: list[list[str]]
    """The wheels that number what follows shared words."""
    stretches: dict[tuple[SharedSpan, bool], list[str]] = {}
    """Those written so far; true where one begins a text: it then was counted as one, special tokens included."""

    def draft(self, want: TextSpec) -> PromptDraft:
        """Stretches first, then the text's own words, numbered as far as there is room for that."""
        random = prompt_random(self.seed, want.number)
        begun: list[str] = []
        if want.shared:
            begun, left = self._begun(want)
            lead = counter_digits(want.number, self.counter)
            while not self.words.can_fill(left - self.words.cost(lead)):
                lead.pop()
            left -= self.words.cost(lead)
            # What is shared to its end has no words of its own, and only its end can be mended.
            keep = len(begun) + len(lead) if left else 1
        else:
            lead, left = self.openings[want.number, want.tokens]
            keep = len(lead)
        return PromptDraft([*begun, *lead, *self.words.fill(left, random)], keep, want.tokens, random)

    def _begun(self, want: TextSpec) -> tuple[list[str], int]:
        """The stretches, cut where they are longer than the text, and the tokens left to fill."""
        begun: list[str] = []
        left = want.tokens
        for stretch in want.shared:
            if left <= 0:
                break
            key = stretch, not begun
            if key not in self.stretches:
                name, tokens = stretch
                if not self.words.can_fill(tokens):
                    raise self.words.too_short(tokens)
                self.stretches[key] = self.words.fill(tokens, prompt_random(self.seed, name))
            begun += self.stretches[key]
            left -= stretch[1]
        while not self.words.can_fill(left):
            if len(begun) == 1:
                raise self.words.too_short(want.tokens)
            left += self.words.costs[begun.pop()]
        return begun, left


def _exact(count: CountTokens, words: Words, drafts: Iterable[PromptDraft]) -> list[str]:
    """Count the drafts, and mend those that are off until none is."""
    texts: list[str] = []
    waiting = iter(drafts)
    while batch := list(islice(waiting, BATCH)):
        pending = batch
        for _ in range(ROUNDS_LIMIT):
            counts = count([" ".join(draft.words) for draft in pending])
            off = [(draft, missing) for draft, n in zip(pending, counts, strict=True) if (missing := draft.tokens - n)]
            for draft, missing in off:
                _mend(draft, missing, words)
            pending = [draft for draft, _ in off]
            if not pending:
                break
        else:
            raise PromptError(
                f"{len(pending)} texts could not be brought to their length, the first to {pending[0].tokens} tokens, "
                f"in {ROUNDS_LIMIT} attempts: this tokenizer's count of a text is not the sum of its words",
                "use an endpoint that takes token ids, or pass the model's own --tokenizer",
            )
        texts += [" ".join(draft.words) for draft in batch]
    return texts


def _mend(draft: PromptDraft, missing: int, words: Words) -> None:
    """Replace the end of a draft by words that cost `missing` tokens more."""
    freed = 0
    while len(draft.words) > draft.keep:
        freed += words.costs[draft.words.pop()]
        if freed >= MEND_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft.words += words.fill(freed + missing, draft.random)


def _wheels(words: Words, n: int, alike: int, tokens: int, seed: int) -> tuple[list[list[str]], int, bool]:
    """The wheels of the counter that opens texts of so many tokens: an opening word, then words of the least cost. They
    number all `n` texts, or where there is no room for that the `alike` ones of this length. All words of a wheel cost
    the same, so each such text has the same number of tokens left to fill: the second value. The third says whether
    there was no room."""
    cost, wheel = words.cheapest()
    maximum = 0
    for needed in (n, alike):
        for depth in range(LEAD_LIMIT):
            for opening, first in sorted(words.opening.items(), key=lambda item: (-len(item[1]), item[0])):
                left = tokens - opening - depth * cost
                if not words.can_fill(left):
                    continue
                maximum = max(maximum, len(first) * len(wheel) ** depth)
                if len(first) * len(wheel) ** depth >= needed:
                    return [shuffled(column, seed) for column in (first, *[wheel] * depth)], left, needed < n
    raise words.too_short(tokens, alike, maximum)
