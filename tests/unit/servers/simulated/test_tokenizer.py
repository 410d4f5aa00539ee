"""The folder that other load testers take for the simulated model: the same tokens, the same chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from loadgen.servers.simulated import tokenizer
from loadgen.servers.simulated.tokenizer import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once."""
    written = tmp_path_factory.mktemp("model") / "deeper"
    write_model(written, 4096)
    return written


@pytest.fixture(scope="module")
def read(folder: Path) -> Tokenizer:
    """As the `tokenizers` library, and so every tool, reads it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(
    text=st.text(max_size=40)
    | st.text(alphabet="abcdeT .,1\n", max_size=60)
    | st.text(alphabet="abcdeT ", min_size=60, max_size=300)
)
def test_any_text_has_the_tokens_that_the_servers_count(read: Tokenizer, text: str) -> None:
    """Bytes, blanks, line ends and words; and the text comes back. Only specials are special to a tokenizer."""
    text = text.encode("utf-8", "replace").decode()
    ids = read.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text)
    assert read.decode(ids) == text
    assert read.encode(text).ids == [tokenizer.BOS_ID, *ids]


def test_words_of_any_length_take_no_longer_than_others(read: Tokenizer) -> None:
    """WordPiece takes the square of a word's length. Tools that join neighbours in the vocabulary make words of
    thousands of letters, which stay the tokens that they are made of."""
    triples = range(read.token_to_id("aaa"), read.token_to_id("aaa") + 512)
    word = read.decode([*triples])
    assert (word.isalpha(), len(word), tokenizer.encode(word)) == (True, 3 * 512, [*triples])
    assert max(len(unit) for unit, _ in read.pre_tokenizer.pre_tokenize_str(word)) == 30


def test_every_token_is_in_it(read: Tokenizer) -> None:
    """32,000, and the three special ones are special."""
    assert read.get_vocab_size() == tokenizer.VOCABULARY_SIZE
    assert [read.token_to_id(text) for text in tokenizer.SPECIALS] == [0, 1, 2]
    assert read.decode([1, 2]) == ""


def test_the_chat_template_is_that_of_the_servers(folder: Path) -> None:
    """Rendered as transformers does it: BOS, every message, and whose turn it is."""
    told = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(told["chat_template"])
    parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
    said: list[object] = ["be", parts, None]
    messages = [{"role": "user", "content": each} for each in said]
    shown = template.render(messages=messages, bos_token=told["bos_token"], add_generation_prompt=True)
    assert shown == "<s>" + tokenizer.chat_text(messages)


def test_the_configuration_agrees(folder: Path) -> None:
    """Vocabulary, special ids and context are the tokenizer's and the server's."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (32_000, 1, 2)
    assert config["max_position_embeddings"] == 4096
