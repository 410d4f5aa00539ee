"""Small tokenizers of the types that loadgen must support, trained on invented words within a few milliseconds."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SYLLABLES = ["".join(pair) for pair in product("bcdfglmnprstvwz", "aeiou")]


def save(kind: str, folder: Path) -> Path:
    """Write the tokenizer with the name `kind` (a key of KINDS) to a JSON file in a folder, and return its path."""
    path = folder / f"{kind}.json"
    KINDS[kind]().save(str(path))
    return path


@cache
def corpus() -> list[str]:
    """Return the training text: lines of invented words, such as `zanu wozubaviboho ...`."""
    draw = random.Random(7)
    words = ["".join(draw.choices(SYLLABLES, k=draw.choice([1, 2, 2, 3, 4, 6]))) for _ in range(1500)]
    return [" ".join(draw.choices(words, k=12)) for _ in range(800)]


def byte_level() -> Tokenizer:
    """Return a byte-level BPE tokenizer like that of GPT-2.

    A space belongs to the token of the following word. No special tokens are added.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=2048, show_progress=False, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        ),
    )
    return tokenizer


def byte_level_with_bos() -> Tokenizer:
    """Return a byte-level BPE tokenizer that adds a BOS token to each text.

    The file also enables truncation and padding, which loadgen must ignore as a server does.
    """
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a BPE tokenizer like that of Llama 2.

    The character `▁` stands for a space, and is also added to the start of the text, after a BOS token. There is no
    pre-tokenizer, so a token may span words.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, show_progress=False, special_tokens=["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def across_words() -> Tokenizer:
    """Return a tokenizer with tokens that span two words.

    A text can therefore have fewer tokens than its words have separately.
    """
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=1024, show_progress=False, special_tokens=["<s>"], initial_alphabet=[])
    tokenizer.train_from_iterator([line[:40] for line in corpus()], trainer)
    return tokenizer


def letters() -> Tokenizer:
    """Return a tokenizer with one token per character, so that only words of one letter are single tokens."""
    vocabulary = {letter: number for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def with_special_word() -> Tokenizer:
    """Return a byte-level tokenizer with the special token `cu`, which also matches inside other words."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("cu", special=True)])
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_level_with_bos": byte_level_with_bos,
    "metaspace": metaspace,
    "across_words": across_words,
    "letters": letters,
    "with_special_word": with_special_word,
}
