"""Small tokenizers of every kind that matters, trained on invented words; a few milliseconds each."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SYLLABLES = ["".join(pair) for pair in product("bcdfglmnprstvwz", "aeiou")]


def save(kind: str, folder: Path) -> Path:
    """Write the tokenizer.json of one kind into a folder."""
    path = folder / f"{kind}.json"
    KINDS[kind]().save(str(path))
    return path


@cache
def corpus() -> list[str]:
    """Lines of invented words: `zanu wozubaviboho ...`."""
    draw = random.Random(7)
    words = ["".join(draw.choices(SYLLABLES, k=draw.choice([1, 2, 2, 3, 4, 6]))) for _ in range(1500)]
    return [" ".join(draw.choices(words, k=12)) for _ in range(800)]


def byte_level() -> Tokenizer:
    """As Llama 3 and GPT-2: bytes, the blank belongs to the word after it, nothing is added."""
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
    """The same with a BOS before each text, and with truncation and padding that a server would ignore."""
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def metaspace() -> Tokenizer:
    """As Llama 2: a mark for the blank, one put before the text, a BOS, merges that no pre-tokenizer keeps apart."""
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
    """A vocabulary with tokens that span two words, so that a text is shorter than the sum of its words."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=1024, show_progress=False, special_tokens=["<s>"], initial_alphabet=[])
    tokenizer.train_from_iterator([line[:40] for line in corpus()], trainer)
    return tokenizer


def letters() -> Tokenizer:
    """One token per character: no word is a single token."""
    vocabulary = {letter: number for number, letter in enumerate(" abcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def with_special_word() -> Tokenizer:
    """A special token that reads like a plain word, and is taken out of any word that contains it."""
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
