"""Stores the token counts of words in the user's cache folder, so that later runs on the same server start sooner.

A run asks the server how many tokens each word has. It stores the answers in a file. The file is valid only for the
same server, server version, model, URL, words and counting route. A later run that finds the file checks some of the
stored numbers before it uses them. If there is no usable file, the run asks the server again.

Files contain no secrets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from loadgen.machine import cache_folder
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.workloads.texts import COST_LIMIT, OPENINGS, WORDS_LIMIT, WordCosts

FILE_BYTES = 1 << 16
FILES_LIMIT = 200
"""Maximum number of files. The oldest files are removed."""
LENGTH_LIMIT = 1 << 20
"""Maximum length in tokens of a prompt of one word. A chat template adds much less."""


class VocabularyCache(msgspec.Struct, frozen=True):
    """The stored vocabulary of one server."""

    file: Path | None
    """File of the vocabulary. None if the user has no cache folder."""

    def load(self) -> WordCosts | None:
        """Return the stored vocabulary, or None if no usable file exists."""
        if self.file is None:
            return None
        try:
            with self.file.open("rb") as file:
                vocabulary = msgspec.json.decode(file.read(FILE_BYTES), type=WordCosts)
        except (OSError, *DECODE_ERRORS):
            return None
        return vocabulary if _is_usable(vocabulary) else None

    def save(self, vocabulary: WordCosts) -> None:
        """Store the vocabulary. If it cannot be written, no error is raised, and later runs learn it again."""
        if self.file is None:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(vocabulary))
            temporary.replace(self.file)  # atomic: a run that starts now reads either the old or the new file
            files = sorted(self.file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in files[FILES_LIMIT:]:
                file.unlink(missing_ok=True)


def vocabulary_cache(facts: ServerFacts, counting_path: str, candidates: Sequence[str]) -> VocabularyCache:
    """Return the cache for the vocabulary of this server.

    `counting_path` is the server's route that counts tokens, and `candidates` are the words that are counted with it.
    """
    identity = [facts.name, facts.version, facts.model, facts.url, counting_path, *candidates]
    name = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]
    try:
        return VocabularyCache(cache_folder() / "vocabularies" / f"{name}.json")
    except OSError:
        return VocabularyCache(None)


def _is_usable(vocabulary: WordCosts) -> bool:
    """Return True if a vocabulary that was read from a file is valid, so that texts can be built with it."""
    costs = vocabulary.costs
    return (
        0 < len(costs) <= WORDS_LIMIT
        and all(0 < cost <= COST_LIMIT for cost in costs.values())
        and all(0 < tokens <= LENGTH_LIMIT for tokens in vocabulary.alone.values())
        and all(word in vocabulary.alone for word in list(costs)[:OPENINGS])
        and all(word.split() == [word] for word in costs)
    )
