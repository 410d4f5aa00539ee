"""A deterministic tokenizer for servers without a model: every text becomes tokens, and the tokens the same text again.

Words are cut greedily into the longest pieces of a fixed vocabulary, as WordPiece does; anything else becomes bytes. So
a text cut at the end of a token keeps the tokens it had, on which prompts of an exact length rely. The ids:

    0 <unk>  1 <s>  2 </s>  3..258 bytes  then one to three letters, common words, and invented words up to the end
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, islice, product
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

VOCABULARY_SIZE = 32_000  # as Llama 2's
BOS_ID, EOS_ID, EOS_TEXT = 1, 2, "</s>"
PERIOD = 8192  # power of two: how many drawn words repeat

SPECIALS = ("<unk>", "<s>", EOS_TEXT)
_FIRST_BYTE = len(SPECIALS)
_UNITS = re.compile(r" ?[A-Za-z]+|.", re.DOTALL)
_WORDS = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
_LONGEST = 1 + max(map(len, _WORDS))  # characters of a piece, with the blank before it


def encode(text: str) -> list[int]:
    """Token ids of `text`, without special tokens."""
    return list(chain.from_iterable(map(_unit_ids, _UNITS.findall(text))))


@lru_cache(maxsize=4096)
def count(text: str) -> int:
    """`len(encode(text))`. Remembered, because a client that checks a prompt's length sends the same prompt next."""
    return sum(map(len, map(_unit_ids, _UNITS.findall(text))))


def offsets(text: str) -> list[tuple[int, int, int]]:
    """(id, start, stop) of every token, in characters. The bytes of one character share its place."""
    found = []
    for unit in _UNITS.finditer(text):
        start, single = unit.start(), len(unit[0]) == 1
        for token in _unit_ids(unit[0]):
            stop = start + (1 if single else len(pieces()[token]))
            found.append((token, start, stop))
            start = start if single else stop
    return found


def decode(ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens left out. Bytes that are no UTF-8 become the replacement character."""
    return b"".join(pieces()[token] for token in ids if token >= _FIRST_BYTE).decode("utf-8", "replace")


def chat_text(messages: Any) -> str:
    """Messages in the model's chat template: on lines of their own, so that none's tokens depend on its neighbours."""
    found = [each for each in messages if isinstance(each, Mapping)] if isinstance(messages, list) else []
    rendered = [f"{_message_text(each.get('role'))}:\n{_message_text(each.get('content'))}\n" for each in found]
    return "".join(rendered) + "assistant:\n"


def _message_text(value: Any) -> str:
    """Text, or the texts of a list of parts."""
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, Mapping))
    return value if isinstance(value, str) else ""


class Vocabulary:
    """What a simulated model says: common words, one token each, as `ids` and as `texts` fit for a JSON string. There
    are enough for a request that starts anywhere below PERIOD and runs for `longest` tokens: none wraps around."""

    def __init__(self, seed: int, longest: int) -> None:
        random = Random(f"babble/{seed}")  # noqa: S311 - words, not secrets
        drawn = [_ids()[f" {word}"] for word in random.choices(_WORDS, k=PERIOD)]
        self.ids = (drawn * (1 + -(-longest // PERIOD)))[: PERIOD + longest]
        self.texts = [pieces()[token] for token in self.ids]

    def start(self, index: int) -> int:
        """Where request number `index` begins: neighbours say different things (Knuth's multiplicative hash)."""
        return index * 2_654_435_761 % PERIOD


@lru_cache(maxsize=65_536)
def _unit_ids(unit: str) -> tuple[int, ...]:
    if len(unit) == 1:
        return tuple(_FIRST_BYTE + byte for byte in unit.encode("utf-8", "surrogatepass"))
    ids, found, start = _ids(), [], 0
    while start < len(unit):
        stop = min(len(unit), start + _LONGEST)
        while unit[start:stop] not in ids:
            stop -= 1
        found.append(ids[unit[start:stop]])
        start = stop
    return tuple(found)


@cache
def pieces() -> tuple[bytes, ...]:
    """Bytes of every token, by id."""
    single = [bytes([byte]) for byte in range(256)]
    return (*(text.encode() for text in SPECIALS), *single, *(text.encode() for text in _texts()))


@cache
def _ids() -> dict[str, int]:
    """Id of every piece that is text. One ASCII character is its byte."""
    ids = {chr(byte): _FIRST_BYTE + byte for byte in range(128)}
    return ids | {text: _FIRST_BYTE + 256 + place for place, text in enumerate(_texts())}


@cache
def _texts() -> tuple[str, ...]:
    """Every piece of more than one byte, in order of id."""
    pairs, triples = (["".join(letters) for letters in product(ascii_lowercase, repeat=size)] for size in (2, 3))
    short = [f" {text}" for text in chain(ascii_lowercase, pairs)] + pairs + triples
    syllables = ["".join(sounds) for sounds in product("bdfgklmnprstvz", "aeiou")]
    invented = (f" {''.join(parts)}" for length in (2, 3) for parts in product(syllables, repeat=length))
    known = dict.fromkeys(chain(short, (f" {word}" for word in _WORDS)))
    new = (text for text in invented if text not in known)
    return (*known, *islice(new, VOCABULARY_SIZE - _FIRST_BYTE - 256 - len(known)))
