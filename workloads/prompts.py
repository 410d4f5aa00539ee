"""Prompts of exactly N tokens by the server's own count, all different from their first tokens on.

    token ids        where the API takes them: N ids are N tokens, and nothing can go wrong
    tokenizer file   text built with a local tokenizer.json, which is held against the server's count
    server's count   text built and checked with the server's own tokenise route

The same seed gives the same prompts, byte for byte, on any machine: prompt i is drawn from a generator of its own
seeded with the text "seed:i", and only through `Random.random`, the one method whose sequence Python promises to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from workloads.words import COMMON_WORDS, Count, Words, learn

BLOCK_TOKENS = 16  # the granularity of vLLM's prefix cache; prompts must differ within their first block
ROUNDS_LIMIT = 64  # attempts to mend a text whose count is off
MEND_TOKENS = 8  # how much of the end of a text one attempt replaces
LEAD_LIMIT = 4  # words at the start of a text that number the prompts

Item = TypeVar("Item", int, str)


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


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of exact length, in order of request id, and how their length was made exact."""

    prompts: list[str] | list[tuple[int, ...]]
    how: str


def make_prompts(
    n: int, input_tokens: int, seed: int, *, token_ids: bool, local: Tokenizer | None, server: Judge | None
) -> Prompts:
    """Make `n` prompts that the server counts as exactly `input_tokens` tokens each.

    `token_ids` says that the endpoint takes token ids. Raises PromptError when the length cannot be made exact or
    when the tokenizer file and the server disagree.
    """
    source = local or server
    words = (source and source.words) or COMMON_WORDS
    if token_ids and source and (alphabet := sorted(set(source.ids(" ".join(words))))):
        if local and server:
            _shift(local, server, words)
        return Prompts(id_prompts(alphabet, n, input_tokens, seed), "token ids")
    if local:
        texts = _measured(n, input_tokens, seed, local, server, words)
        return Prompts(texts, "text, counted with the tokenizer file")
    if server and not server.generates:
        return Prompts(text_prompts(server.count, words, n, input_tokens, seed), "text, counted by the server")
    if server and server.plain:
        texts = _measured(n, input_tokens, seed, server.plain, server, words)
        return Prompts(texts, "text, counted by the server, plus its chat template")
    raise PromptError(
        "the server does not tell how many tokens a text has without running it",
        "pass the model's tokenizer file: --tokenizer PATH/tokenizer.json",
    )


def id_prompts(alphabet: Sequence[int], n: int, input_tokens: int, seed: int) -> list[tuple[int, ...]]:
    """Draw `n` prompts of `input_tokens` ids from the alphabet, different from their first id or two on."""
    size = len(alphabet)
    depth = next((d for d in range(1, min(input_tokens, BLOCK_TOKENS) + 1) if size**d >= n), 0)
    if not depth:
        raise PromptError(
            f"{size} token ids make only {size**input_tokens} different prompts of {input_tokens} tokens, not {n}",
            "ask for longer prompts or fewer of them",
        )
    order = _shuffled(alphabet, seed)
    prompts = []
    for number in range(n):
        draw = _generator(seed, number).random
        lead = _digits(number, [order] * depth)
        prompts.append((*lead, *[order[int(draw() * size)] for _ in range(input_tokens - depth)]))
    return prompts


def text_prompts(count: Count, candidates: Sequence[str], n: int, input_tokens: int, seed: int) -> list[str]:
    """Build `n` texts that `count` says have exactly `input_tokens` tokens, different from their first word or two on.

    The first words number the prompt, as digits; random words fill up the rest. Each text is counted as a whole, and
    where the whole is not the sum of its words its end is drawn anew, a bounded number of times.
    """
    words = learn(count, candidates)
    lead = _lead(words, n, input_tokens, seed)
    generators = [_generator(seed, number) for number in range(n)]
    drafts = [_digits(number, lead) for number in range(n)]
    opening_tokens = next(tokens for tokens, openings in words.opening.items() if lead[0][0] in openings)
    rest = input_tokens - opening_tokens - sum(words.costs[wheel[0]] for wheel in lead[1:])
    for draft, generator in zip(drafts, generators, strict=True):
        draft.extend(words.fill(rest, generator))

    pending = list(range(n))
    for _ in range(ROUNDS_LIMIT):
        counts = count([" ".join(drafts[number]) for number in pending])
        off = [(number, input_tokens - tokens) for number, tokens in zip(pending, counts, strict=True)]
        pending = [number for number, missing in off if missing]
        if not pending:
            return [" ".join(draft) for draft in drafts]
        for number, missing in off:
            if missing:
                _mend(drafts[number], len(lead), missing, words, generators[number])
    raise PromptError(
        f"{len(pending)} of {n} texts could not be brought to {input_tokens} tokens in {ROUNDS_LIMIT} attempts: this "
        "tokenizer's count of a text is not the sum of its words",
        "use an endpoint that takes token ids, or pass the model's own --tokenizer",
    )


def _lead(words: Words, n: int, input_tokens: int, seed: int) -> list[list[str]]:
    """The wheels of the counter that numbers the prompts: an opening word, then words of the least cost.

    All words of a wheel cost the same, so every prompt has the same number of tokens left to fill.
    """
    cost = min(words.costs.values(), default=1)
    wheel = [word for word, tokens in words.costs.items() if tokens == cost]
    most = 0
    for depth in range(LEAD_LIMIT):
        for tokens, openings in sorted(words.opening.items(), key=lambda item: (-len(item[1]), item[0])):
            if not words.can_fill(input_tokens - tokens - depth * cost):
                continue
            most = max(most, len(openings) * len(wheel) ** depth)
            if most >= n:
                return [_shuffled(column, seed) for column in (openings, *[wheel] * depth)]
    raise _too_short(words, n, input_tokens, most)


def _too_short(words: Words, n: int, input_tokens: int, most: int) -> PromptError:
    shortest = min(words.opening, default=0)
    if shortest > input_tokens:
        return PromptError(
            f"the shortest prompt of text counts {shortest} tokens with the special tokens that the server adds, "
            f"so none can count {input_tokens}",
            f"ask for at least {shortest} input tokens",
        )
    return PromptError(
        f"{len(words.costs)} known words make only {most} different prompts of {input_tokens} tokens, not {n}",
        "ask for longer prompts or fewer of them",
    )


def _mend(draft: list[str], keep: int, missing: int, words: Words, random: Random) -> None:
    """Replace the end of a draft by words that cost `missing` tokens more; the first `keep` words stay."""
    freed = 0
    while len(draft) > keep:
        freed += words.costs[draft.pop()]
        if freed >= MEND_TOKENS and words.can_fill(freed + missing):
            break
    if words.can_fill(freed + missing):
        draft += words.fill(freed + missing, random)


def _measured(
    n: int, input_tokens: int, seed: int, ruler: Tokenizer, server: Judge | None, words: Sequence[str]
) -> list[str]:
    """Count with `ruler`, plus what the server was found to add to it."""
    shift = _shift(ruler, server, words) if server else 0
    # A template touches the first and the last word, and may change what they cost: `[user]` and a blank before a
    # word make another token than the word alone. Hence all prompts begin and end as the measured samples do.
    frame = _framed if shift else _bare
    texts = text_prompts(
        lambda asked: [tokens + shift for tokens in ruler.count([frame(text, words) for text in asked])],
        words,
        n,
        input_tokens,
        seed,
    )
    prompts = [frame(text, words) for text in texts]
    if server and not server.generates:
        _check_first(prompts, input_tokens, server)
    return prompts


def _framed(text: str, words: Sequence[str]) -> str:
    return f"{words[0]} {text} {words[0]}"


def _bare(text: str, _: Sequence[str]) -> str:
    return text


def _shift(ruler: Tokenizer, server: Judge, words: Sequence[str]) -> int:
    """Tokens that the server counts on top of the ruler: the chat template, a BOS the tokenizer file does not know.

    A text of many words and a short one must show the same difference; otherwise the file is another model's.
    """
    texts = [_framed(words[-1], words), _framed(" ".join(words[:200]), words)]
    ours, theirs = ruler.count(texts), server.count(texts)
    shift = theirs[0] - ours[0]
    if theirs[1] - ours[1] != shift:
        raise PromptError(
            f"two texts count {ours[0]} and {ours[1]} tokens by the tokenizer file and {theirs[0]} and {theirs[1]} by "
            "the server: it is not the tokenizer that the server uses",
            "pass the tokenizer.json of the model that is being served",
        )
    return shift


def _check_first(prompts: list[str], input_tokens: int, server: Judge) -> None:
    for counted in server.count(prompts[:1]):
        if counted != input_tokens:
            raise PromptError(
                f"the first prompt was built to count {input_tokens} tokens and the server counts {counted}",
                "pass the tokenizer.json of the model that is being served",
            )


def _generator(seed: int, number: int) -> Random:
    # A text seed is hashed with SHA-512, so generators of neighbouring numbers have nothing in common.
    return Random(f"{seed}:{number}")  # noqa: S311


def _shuffled(items: Sequence[Item], seed: int) -> list[Item]:
    generator = Random(f"{seed}")  # noqa: S311
    return sorted(items, key=lambda _: generator.random())


def _digits(number: int, wheels: Sequence[Sequence[Item]]) -> list[Item]:
    digits = []
    for wheel in wheels:
        number, position = divmod(number, len(wheel))
        digits.append(wheel[position])
    return digits
