"""A deterministic tokenizer for servers without a model: every text becomes tokens, and the tokens the same text again.

Words are cut greedily into the longest pieces of a fixed vocabulary, as WordPiece does; anything else becomes bytes. So
a text cut at the end of a token keeps the tokens it had, on which prompts of an exact length rely. The ids:

    0 <unk>  1 <s>  2 </s>  3..258 bytes  then one to three letters, common words, and invented words up to the end
"""

from __future__ import annotations

import json
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
# 30 letters at a time: WordPiece takes the square of a word's length, and some tools make words of thousands.
_UNITS = re.compile(r" ?[A-Za-z]{1,30}|[\s\S]")
_WORDS = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
_LONGEST = 1 + max(map(len, _WORDS))  # characters of a piece, with the blank before it
# A message on lines of its own, as `chat_text` writes it. The servers put BOS before a chat.
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def encode(text: str) -> list[int]:
    """Token ids of `text`, without special tokens."""
    return list(chain.from_iterable(map(_unit_ids, _UNITS.findall(text))))


@lru_cache(maxsize=4096)
def count(text: str) -> int:
    """`len(encode(text))`. Remembered, because a client that checks a prompt's length sends the same prompt next."""
    return sum(map(len, map(_unit_ids, _UNITS.findall(text))))


def offsets(text: str) -> list[tuple[int, int, int]]:
    """(id, start, stop) of every token, in characters. The bytes of one character share its place."""
    result = []
    for unit in _UNITS.finditer(text):
        start, single = unit.start(), len(unit[0]) == 1
        for token in _unit_ids(unit[0]):
            stop = start + (1 if single else len(pieces()[token]))
            result.append((token, start, stop))
            start = start if single else stop
    return result


def decode(ids: Sequence[int]) -> str:
    """The text of `ids`, special tokens left out. Bytes that are no UTF-8 become the replacement character."""
    return b"".join(pieces()[token] for token in ids if token >= _FIRST_BYTE).decode("utf-8", "replace")


def chat_text(messages: Any) -> str:
    """Messages in the model's chat template: on lines of their own, so that none's tokens depend on its neighbours."""
    result = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    rendered = [f"{_message_text(each.get('role'))}:\n{_message_text(each.get('content'))}\n" for each in result]
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
    ids, result, start = _ids(), [], 0
    while start < len(unit):
        stop = min(len(unit), start + _LONGEST)
        while unit[start:stop] not in ids:
            stop -= 1
        result.append(ids[unit[start:stop]])
        start = stop
    return tuple(result)


@cache
def pieces() -> tuple[bytes, ...]:
    """Bytes of every token, by id."""
    single = [bytes([byte]) for byte in range(256)]
    return (*(text.encode() for text in SPECIALS), *single, *(text.encode() for text in _texts()))


@cache
def _ids() -> dict[str, int]:
    """Id of every piece that is text. One ASCII character is its byte."""
    ids = {chr(byte): _FIRST_BYTE + byte for byte in range(128)}
    return ids | {text: _FIRST_BYTE + 256 + index for index, text in enumerate(_texts())}


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


def write_model(folder: Path, longest: int) -> None:
    """The folder that other load testers take for the simulated servers' model, in the shape that `transformers` and
    `tokenizers` read, without weights; `longest` is the context. Raises OSError."""
    unknown, begin, end = SPECIALS
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": longest,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        # Some tools read a shape before they ask for weights; nobody multiplies with it.
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "torch_dtype": "bfloat16"},
    }
    names = {"bos_token": begin, "eos_token": end, "unk_token": unknown}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **names,
        "chat_template": _CHAT,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (folder / "tokenizer.json").write_text(_tokenizer_file(), "utf-8")


def _tokenizer_file() -> str:
    """Longest pieces first, as WordPiece does it, over bytes that have a visible character each, as in GPT-2."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    shown = _visible_bytes()
    texts = ["".join(shown[byte] for byte in piece) for piece in pieces()]
    texts[: len(SPECIALS)] = SPECIALS
    vocabulary = {text: token for token, text in enumerate(texts)}
    model = models.WordPiece(vocabulary, unk_token=SPECIALS[0], continuing_subword_prefix="")
    made = Tokenizer(model)
    units = pre_tokenizers.Split(Regex(_UNITS.pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([units, letters])
    made.decoder = decoders.ByteLevel()
    begin = SPECIALS[BOS_ID]
    made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, BOS_ID)])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made.to_str(pretty=False)


def _visible_bytes() -> dict[int, str]:
    """GPT-2's character of each byte: itself where it can be seen, else one from U+0100 on, in order."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + index) for index, byte in enumerate(rest)}
