"""Who counts the tokens of a text before it is sent, and whether a prompt built by that count is exact.

    tokenizer              one is given; held against the server's count, and corrected by what the server adds
    server                 it counts without running the text
    server, plus endpoint  it can count text alone without running it, and what the endpoint adds is measured (a chat
                           template)

Where none of these can be had, an assumption has to be chosen (`CountingMethod`), and is stated with every figure:

    server       samples are run; a prompt of words that each cost one token in them is taken to cost their sum
    tokenizer    the tokenizer alone, without what the server adds
    approximate  nobody counts: six letters, three digits or one other character are taken for a token
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from loadgen.workloads.prompts import COMMON_WORDS, CountTokens, PromptError, ServerTokenCounter, Tokenizer

CountingMethod = Literal["server", "tokenizer", "approximate"]
APPROXIMATE = "six letters, three digits or one other character are taken for a token"
SAMPLE_WORDS = 200
MIN_PLAIN_WORDS = 16
ANOTHER_MODEL = "pass the tokenizer of the model that is being served"
COUNTING_HINT = (
    "pass the model's tokenizer: --tokenizer with a file, a folder or the name of a model in the local cache; or go on "
    "without exact lengths: --lengths server, which runs samples for one token each, or --lengths approximate"
)
_ABOUT_ONE_TOKEN = re.compile(r"[A-Za-z]{1,6}|\d{1,3}|[^\sA-Za-z\d]")


class TokenCounter(msgspec.Struct, frozen=True):
    """A count of texts, and what is known of it."""

    count: CountTokens
    counting_method: str
    words: Sequence[str] = COMMON_WORDS
    frame: str = ""
    """The word that texts must begin and end with: a template touches the first and the last word, and may change what
    they cost (`[user]` and a blank before a word make another token than the word alone)."""
    exact: bool = True
    """Else prompts have about the requested length, by the assumption in `how`."""
    any_text: bool = True
    """Whether it counts texts that we did not write; else their length is not known beforehand."""

    def framed(self, texts: Sequence[str]) -> list[str]:
        """As prompts are sent."""
        return [f"{self.frame} {text} {self.frame}" for text in texts] if self.frame else list(texts)


def choose_counter(
    local: Tokenizer | None, server: ServerTokenCounter | None, by: CountingMethod | None, *, drawn: bool
) -> TokenCounter:
    """The best there is, or what was chosen. `drawn`: prompts are made, not those of a file, which go as they are.
    Raises PromptError when prompts cannot be made exact and no assumption was chosen, or when tokenizer and server
    disagree."""
    if by == "approximate":
        return TokenCounter(approximate, f"text, approximate: {APPROXIMATE}", exact=False, any_text=False)
    if by == "tokenizer" and local:
        how = "text, counted with the tokenizer file, not held against the server's count"
        return TokenCounter(local.count, how, local.words or COMMON_WORDS, exact=False)
    if exact := _exact(None if by else local, server):
        return exact
    if not drawn:
        return TokenCounter(approximate, "text of the file, not counted before the run", exact=False, any_text=False)
    if by == "server" and server:
        return _of_samples(server)
    raise PromptError("the server does not tell how many tokens a text has without running it", COUNTING_HINT)


def approximate(texts: Sequence[str]) -> list[int]:
    """About how many tokens these have, by nobody's tokenizer."""
    return [len(_ABOUT_ONE_TOKEN.findall(text)) for text in texts]


def _exact(local: Tokenizer | None, server: ServerTokenCounter | None) -> TokenCounter | None:
    source = local or server
    words = (source and source.words) or COMMON_WORDS
    if local:
        return _corrected(local, server, words, "text, counted with the tokenizer file")
    if server and not server.generates:
        return TokenCounter(server.count, "text, counted by the server", words)
    if server and server.plain:
        return _corrected(server.plain, server, words, "text, counted by the server, plus what the endpoint adds")
    return None


def _corrected(ruler: Tokenizer, server: ServerTokenCounter | None, words: Sequence[str], how: str) -> TokenCounter:
    """With what the server counts on top: the chat template, a BOS the tokenizer does not know. A text of many words
    and a short one must show the same difference; otherwise the tokenizer is another model's."""
    if server is None:
        return TokenCounter(ruler.count, how, words)
    texts = [f"{words[0]} {text} {words[0]}" for text in (words[-1], " ".join(words[:SAMPLE_WORDS]))]
    ours, theirs = ruler.count(texts), server.count(texts)
    shift = theirs[0] - ours[0]
    if theirs[1] - ours[1] != shift:
        raise PromptError(
            f"two texts count {ours[0]} and {ours[1]} tokens by the tokenizer file and {theirs[0]} and {theirs[1]} by "
            "the server: it is not the tokenizer that the server uses",
            ANOTHER_MODEL,
        )
    frame = words[0] if shift else ""
    return TokenCounter(lambda texts: [tokens + shift for tokens in ruler.count(texts)], how, words, frame)


def _of_samples(server: ServerTokenCounter) -> TokenCounter:
    """Of the words that cost the server a token each, found by halves: most often one sample holds them all."""
    words = server.words or COMMON_WORDS
    (bare,) = server.count([f"{words[0]} {words[0]}"])

    def plain(some: Sequence[str]) -> list[str]:
        (tokens,) = server.count([" ".join((words[0], *some, words[0]))])
        if tokens - bare == len(some) or len(some) == 1:
            return list(some) if tokens - bare == len(some) else []
        return plain(some[: len(some) // 2]) + plain(some[len(some) // 2 :])

    if len(result := plain(words)) < MIN_PLAIN_WORDS:
        why = f"only {len(result)} of {len(words)} plain words cost the server one token each"
        raise PromptError(why, "pass the model's --tokenizer, or go on with --lengths approximate")
    how = "text of words that cost the server one token each; that a prompt counts their sum is assumed"
    return TokenCounter(
        lambda texts: [len(text.split()) - 2 + bare for text in texts], how, result, words[0], exact=False
    )
