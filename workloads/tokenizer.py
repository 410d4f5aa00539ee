"""A model's own tokenizer, from its tokenizer.json."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from workloads.prompts import COMMON_WORDS, PromptError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CANDIDATES_LIMIT = 1024
WORD_MARKS = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece write the blank before a word
WORD_LETTERS_MAX = 12


@dataclass(frozen=True, slots=True)
class LocalTokenizer:
    """Counts tokens as the model does. `count` includes the special tokens that the file's post-processor adds."""

    tokenizer: Tokenizer
    words: tuple[str, ...]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, special tokens included."""
        return [len(encoding) for encoding in self.tokenizer.encode_batch_fast(texts)]

    def ids(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def load(path: Path) -> LocalTokenizer:
    """Read a tokenizer.json. Raises PromptError when it cannot be read or is not one."""
    from tokenizers import Tokenizer

    # Threads of the tokenizers library do not survive a fork, and counting is short.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error.strerror}", "pass --tokenizer PATH/tokenizer.json") from error
    except Exception as error:  # the library raises plain Exception for everything that is wrong with a file
        reason = str(error)[:200]
        raise PromptError(f"{path} is not a tokenizer.json: {reason}", "pass a Hugging Face tokenizer.json") from error
    # A file may ask for texts to be cut or padded to a length; the servers ignore that, and so do we.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LocalTokenizer(tokenizer, tuple(_words(tokenizer)))


def _words(tokenizer: Tokenizer) -> Iterator[str]:
    """Words that are one token each after a blank, most frequent first, then common words for other vocabularies."""
    added = tokenizer.get_added_tokens_decoder().keys()
    candidates = list(dict.fromkeys([*islice(_marked(tokenizer), CANDIDATES_LIMIT), *COMMON_WORDS]))
    encodings = tokenizer.encode_batch_fast(candidates, add_special_tokens=False)
    # A word with letters unknown to the model would become its special token for that.
    return (word for word, encoding in zip(candidates, encodings, strict=True) if added.isdisjoint(encoding.ids))


def _marked(tokenizer: Tokenizer) -> Iterator[str]:
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id) or ""
        word = token[1:]
        if token.startswith(WORD_MARKS) and word.isascii() and word.isalpha() and 2 <= len(word) <= WORD_LETTERS_MAX:
            yield word
