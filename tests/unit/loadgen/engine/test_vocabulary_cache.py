"""The stored vocabulary of a server: found again by the same server only, and never trusted blindly."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loadgen.engine.vocabulary_cache import FILES_LIMIT, VocabularyCache, vocabulary_cache
from loadgen.servers.backends.base import ServerFacts
from loadgen.workloads.prompts import COMMON_WORDS
from loadgen.workloads.texts import WordCosts

FACTS = ServerFacts("tgi", "http://127.0.0.1:8002", version="3.3.6", model="llama")
WORDS = WordCosts({"the": 2, "of": 3}, {"the": 1, "of": 2}, adds_up=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llm-loadgen" / "vocabularies"


def cache(facts: ServerFacts = FACTS, path: str = "/tokenize") -> VocabularyCache:
    return vocabulary_cache(facts, path, COMMON_WORDS)


def test_a_vocabulary_is_found_again_by_the_same_server_only(folder: Path) -> None:
    """Another version, model, address or counting route has another vocabulary."""
    assert cache().load() is None
    cache().save(WORDS)
    assert cache().load() == WORDS
    assert len(list(folder.iterdir())) == 1
    others = [
        replace(FACTS, version="3.3.7"),
        replace(FACTS, model="qwen"),
        replace(FACTS, url="http://127.0.0.1:8003"),
        replace(FACTS, name="lightllm"),
    ]
    assert [cache(facts).load() for facts in others] == [None] * 4
    assert cache(path="/chat_tokenize").load() is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        msgspec.json.encode(replace(WORDS, costs={})),
        msgspec.json.encode(replace(WORDS, costs={"the": 0})),
        msgspec.json.encode(replace(WORDS, costs={"the": 1, "two words": 1})),
        msgspec.json.encode(replace(WORDS, alone={"the": -5, "of": 3})),
        msgspec.json.encode(replace(WORDS, alone={"the": 2})),
        msgspec.json.encode(replace(WORDS, costs={f"w{number}": 1 for number in range(1000)})),
    ],
)
def test_a_damaged_file_is_ignored(folder: Path, content: bytes) -> None:
    """The vocabulary is then learned again, and the next run finds it."""
    cache().save(WORDS)
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert cache().load() is None
    cache().save(WORDS)
    assert cache().load() == WORDS


def test_a_cache_that_cannot_be_written_costs_only_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file in the way of the folder is no error."""
    (tmp_path / "llm-loadgen").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache().save(WORDS)
    assert cache().load() is None
    VocabularyCache(None).save(WORDS)
    assert VocabularyCache(None).load() is None


def test_old_files_are_removed(folder: Path) -> None:
    """The folder keeps a limited number of vocabularies."""
    folder.mkdir(parents=True)
    for number in range(FILES_LIMIT + 5):
        (folder / f"{number}.json").write_text("{}")
    cache().save(WORDS)
    assert len(list(folder.iterdir())) == FILES_LIMIT
    assert cache().load() == WORDS
