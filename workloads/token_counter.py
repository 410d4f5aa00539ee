"""Chooses how the tokens of a text are counted, before the text is sent.

There are three exact methods. With them, generated prompts have exactly the requested lengths:

- The user names a tokenizer file. The tokens that the server adds to a prompt, such as those of a chat template, are
  measured and added to the count.
- The server has a route that counts the tokens of a prompt without running the model.
- The server has a route that counts the tokens of plain text. The tokens that the server adds to a prompt are measured
  and added to the count.

If no exact method is available, lengths are estimated in one of three ways. The assumption is shown with every result:

- `server`: the server runs short requests (samples). Their token counts show which words are one token each. A prompt
  of these words is assumed to have one token per word.
- `tokenizer`: the tokenizer file counts the tokens. The server is assumed to add only the tokens that the file itself
  adds.
- `approximate`: six letters, three digits or one other character are assumed to be one token.

The user may choose a `CountingMethod`. By default, estimates use the tokenizer file if there is one, otherwise samples
(`server`). If the samples show too few words of one token, or if the server does not report token counts, lengths are
`approximate`. With `exact`, an error is raised instead of an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from loadgen.workloads.prompts import COMMON_WORDS, CountTokens, PromptError, ServerTokenCounter, Tokenizer
from loadgen.workloads.spec_syntax import UnknownCountError
from loadgen.workloads.texts import VocabularyStore, WordCosts

CountingMethod = Literal["server", "tokenizer", "approximate", "exact"]
APPROXIMATE = "six letters, three digits or one other character are counted as one token"
SAMPLE_WORDS = 200
MIN_PLAIN_WORDS = 16
ANOTHER_MODEL = "pass the tokenizer of the model that is being served"
COUNTING_HINT = (
    "pass the model's tokenizer: --tokenizer with a file, a folder or the name of a model in the local cache; or "
    "leave out --lengths exact: lengths are then about right"
)
ABOUT_ONE_TOKEN = re.compile(r"[A-Za-z]{1,6}|\d{1,3}|[^\sA-Za-z\d]")


class TokenCounter(msgspec.Struct, frozen=True):
    """A function that counts the tokens of texts (`count`), with its properties.

    For example, `exact` says whether prompts have exactly the requested length. `offline` says whether the function
    works without requests to the server.
    """

    count: CountTokens
    counting_method: str
    words: Sequence[str] = COMMON_WORDS
    frame: str = ""
    """Word that is added at the start and end of each text. A chat template touches the first and last word and may
    change their token counts: `[user]` and a blank before a word give another token than the word alone."""
    exact: bool = True
    """False: prompts have about the requested length, under the assumption in `counting_method`."""
    any_text: bool = True
    """True if the counter can count any text, including text from files. False: the length of text from files is
    unknown."""
    offline: bool = True
    """True if counting needs no request to the server."""

    def framed(self, texts: Sequence[str]) -> list[str]:
        """Return the texts as they are sent to the server.

        If the attribute `frame` contains a word, this word is added at the beginning and at the end of each text.
        Otherwise the texts are returned unchanged.
        """
        return [f"{self.frame} {text} {self.frame}" for text in texts] if self.frame else list(texts)


def choose_counter(
    local: Tokenizer | None,
    server: ServerTokenCounter | None,
    method: CountingMethod | None,
    *,
    drawn: bool,
    store: VocabularyStore | None = None,
) -> TokenCounter:
    """Return the best available token counter, or the token counter that `method` selects.

    - `local` is the tokenizer file, or None if there is none.
    - `server` is the server's token counter, or None if the server has none.
    - `drawn` is True if prompts are generated, and False if they come from a file.
    - `store` saves the measured words of the server's vocabulary with their token counts. Later runs with the same
      store send fewer test requests. If `store` is None, no words are saved.

    Raises PromptError if `method` is `exact` and the lengths of generated prompts cannot be exact. Also raises
    PromptError if the tokenizer file and the server count differently.
    """
    if method == "approximate":
        return _approximate_counter()
    if method == "tokenizer" and local:
        return _unchecked_counter(local)
    strict = method == "exact"
    try:
        exact = _exact_counter(None if method == "server" else local, server, verify=not strict)
    except UnknownCountError:
        if strict:
            raise
        exact = None
        if local:
            return _unchecked_counter(local)
    if exact:
        return exact
    if not drawn:
        return TokenCounter(approximate, "text of the file, not counted before the run", exact=False, any_text=False)
    if strict:
        raise PromptError("the server does not report the tokens of a text without running it", COUNTING_HINT)
    return (server and _sampling_counter(server, store)) or _approximate_counter()


def _unchecked_counter(local: Tokenizer) -> TokenCounter:
    description = "text, counted with the tokenizer file, not compared with the server's count"
    return TokenCounter(local.count, description, local.words or COMMON_WORDS, exact=False)


def _approximate_counter() -> TokenCounter:
    return TokenCounter(approximate, f"text, approximate: {APPROXIMATE}", exact=False, any_text=False)


def approximate(texts: Sequence[str]) -> list[int]:
    """Return a rough estimate of the number of tokens of each text, without a tokenizer."""
    return [len(ABOUT_ONE_TOKEN.findall(text)) for text in texts]


def _exact_counter(local: Tokenizer | None, server: ServerTokenCounter | None, *, verify: bool) -> TokenCounter | None:
    """Return a token counter whose counts are exact, or None if there is no such counter.

    `local` is the tokenizer file, and `server` counts tokens by requests to the server. The first of these cases that
    applies determines the result:

    1. There is a tokenizer file: it counts the tokens of a text. If `server` is not None, the tokens that only the
       server adds to a prompt are measured and added.
    2. A route of the server counts the tokens of a prompt without running the model: this route is used.
    3. A route of the server counts the tokens of plain text: this route is used. The tokens that the endpoint adds to a
       prompt are measured and added.
    4. Otherwise: the result is None.

    `verify` is True if the caller uses estimated counts when there are no exact ones. This changes two cases:

    - In case 2, the route is tested with one word, because a gateway may block it. If the test fails, UnknownCountError
      tells the caller to use estimates. Without a test, the error would occur when the prompts are built, which is too
      late for estimates.
    - In case 3, the result is None if the route uses the tokenizer of another model. With `verify=False`, PromptError
      is raised.

    Raises UnknownCountError if the server does not report a count that is needed here. Raises PromptError if the
    tokenizer file belongs to another model (case 1), even if `verify` is True.
    """
    source = local or server
    words = (source and source.words) or COMMON_WORDS
    if local:
        return _corrected(local, server, words, "text, counted with the tokenizer file")
    if server and not server.generates:
        if verify:
            server.count([words[0]])
        return TokenCounter(server.count, "text, counted by the server", words, offline=False)
    if server and server.plain:
        try:
            counter = _corrected(
                server.plain, server, words, "text, counted by the server, plus what the endpoint adds"
            )
        except PromptError:
            if not verify:
                raise
            return None  # the route counts with the tokenizer of another model
        return replace(counter, offline=False)
    return None


def _corrected(
    tokenizer: Tokenizer, server: ServerTokenCounter | None, words: Sequence[str], description: str
) -> TokenCounter:
    """Return a token counter that counts with `tokenizer`, and then adds the tokens that only the server adds.

    A server adds, for example, a chat template or a BOS token. To find the number of added tokens, a short and a long
    text of `words` are counted by both the tokenizer and the server. If the difference is not the same for the two
    texts, PromptError is raised, because the tokenizer belongs to another model. If `server` is None, nothing is added.
    `description` describes the counting method in the output of a run.
    """
    if server is None:
        return TokenCounter(tokenizer.count, description, words)
    texts = [f"{words[0]} {text} {words[0]}" for text in (words[-1], " ".join(words[:SAMPLE_WORDS]))]
    ours = tokenizer.count(texts)
    theirs = server.count(texts)
    difference = theirs[0] - ours[0]
    if theirs[1] - ours[1] != difference:
        raise PromptError(
            f"two texts have {ours[0]} and {ours[1]} tokens by the tokenizer file, but {theirs[0]} and {theirs[1]} by "
            "the server: the server uses another tokenizer",
            ANOTHER_MODEL,
        )

    def count(texts: Sequence[str]) -> list[int]:
        return [tokens + difference for tokens in tokenizer.count(texts)]

    return TokenCounter(count, description, words, frame=words[0] if difference else "")


def _sampling_counter(server: ServerTokenCounter, store: VocabularyStore | None) -> TokenCounter | None:
    """Return a token counter for texts whose words are one token each, or None if too few such words are found.

    To find such words, a text of candidate words is sent to the server. If the server counts as many tokens as the text
    has words, every candidate is one token. Otherwise, both halves of the text are tested in the same way.

    `store` holds the words that an earlier run found. These words are the first candidates, so that usually one test is
    enough. The result is also None if the server does not report token counts.
    """
    words = server.words or COMMON_WORDS
    frame = words[0]
    known = store.load() if store else None
    candidates = tuple(known.costs) if known else words
    try:
        frame_tokens, tokens = server.count([f"{frame} {frame}", _sample(candidates, frame)])
        if known and tokens - frame_tokens != len(candidates):  # the server has another vocabulary now
            candidates = words
            (tokens,) = server.count([_sample(candidates, frame)])
        usable = _one_token_words(server, candidates, frame, frame_tokens, tokens)
    except UnknownCountError:
        return None
    if len(usable) < MIN_PLAIN_WORDS:
        return None
    if store and len(usable) < len(candidates):  # if every word is usable, a later run needs no more samples either
        # A word alone is assumed to have one token less than two frame words.
        store.save(WordCosts(dict.fromkeys(usable, frame_tokens - 1), dict.fromkeys(usable, 1), adds_up=True))

    def count(texts: Sequence[str]) -> list[int]:
        return [len(text.split()) - 2 + frame_tokens for text in texts]

    description = "text of words that are one token each; a prompt is assumed to have the sum of its words"
    return TokenCounter(count, description, usable, frame, exact=False)


def _one_token_words(
    server: ServerTokenCounter, words: Sequence[str], frame: str, frame_tokens: int, tokens: int
) -> list[str]:
    """Return those of `words` that are one token each.

    Words are tested in groups. The text of a group consists of the word `frame`, all words of the group, and the word
    `frame` again. The server counts the tokens of this text, and the `frame_tokens` tokens of the two frame words are
    subtracted. If the result equals the number of words in the group, every word of the group is one token. Otherwise
    the group is halved, and both halves are tested. A single word that fails is left out.

    The first group contains all of `words`. The caller has already counted the tokens of its text (`tokens`).
    """
    usable: set[str] = set()
    groups = [words]
    counts = [tokens]
    while groups:
        halves: list[Sequence[str]] = []
        for group, group_tokens in zip(groups, counts, strict=True):
            middle = len(group) // 2
            if group_tokens - frame_tokens == len(group):
                usable.update(group)
            elif middle:
                halves += group[:middle], group[middle:]
        groups = halves
        counts = server.count([_sample(group, frame) for group in groups]) if groups else []
    return [word for word in words if word in usable]


def _sample(words: Sequence[str], frame: str) -> str:
    return " ".join((frame, *words, frame))
