"""A deterministic, reversible tokenizer for simulated servers.

The tokenizer splits a word greedily into the longest pieces of a fixed vocabulary, as WordPiece does. All other
characters become one token per byte. If a text is cut at the end of a token, the tokens before the cut do not change.
Code that builds prompts of an exact length relies on this property. The vocabulary consists of:

    0 to 2      the special tokens <unk>, <s> and </s>
    3 to 258    single bytes
    from 259    groups of one to three letters, then common words, then invented words
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

VOCABULARY_SIZE = 32_000  # as in Llama 2
BOS_ID = 1
EOS_ID = 2
EOS_TEXT = "</s>"
PERIOD = 8192
"""Number of random words after which the output of the simulated model repeats. A power of two."""

SPECIALS = ("<unk>", "<s>", EOS_TEXT)
_FIRST_BYTE = len(SPECIALS)
# A word has at most 30 letters here, because the time of WordPiece is quadratic in the length of a word. Some load
# testers generate words with thousands of letters.
_UNITS = re.compile(r" ?[A-Za-z]{1,30}|[\s\S]")
_WORDS = tuple(Path(__file__).with_name("words.txt").read_text("utf-8").split())
_MAX_PIECE = 1 + max(map(len, _WORDS))  # characters, including the space before a word
# The chat template of `chat_text`: every message is on separate lines. The servers put BOS before a chat.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def encode(text: str) -> list[int]:
    """Return the token ids of a text. The result contains no special tokens such as <s>."""
    return list(chain.from_iterable(map(_unit_ids, _UNITS.findall(text))))


@lru_cache(maxsize=4096)
def count(text: str) -> int:
    """Return the number of tokens of a text. Special tokens such as <s> do not count.

    The results are cached, because a client often checks the length of a prompt and then sends the prompt.
    """
    return sum(map(len, map(_unit_ids, _UNITS.findall(text))))


def offsets(text: str) -> list[tuple[int, int, int]]:
    """Return (token id, start, stop) for every token of a text. `start` and `stop` are positions in characters.

    If a character consists of several byte tokens, each of these tokens gets the position of the character.
    """
    result = []
    for unit in _UNITS.finditer(text):
        start = unit.start()
        single = len(unit[0]) == 1
        for token in _unit_ids(unit[0]):
            stop = start + (1 if single else len(pieces()[token]))
            result.append((token, start, stop))
            start = start if single else stop
    return result


def decode(ids: Sequence[int]) -> str:
    """Return the text for a sequence of token ids.

    Special tokens such as <s> are skipped, and invalid UTF-8 becomes replacement characters.
    """
    return b"".join(pieces()[token] for token in ids if token >= _FIRST_BYTE).decode("utf-8", "replace")


def chat_text(messages: Any) -> str:
    """Return the prompt of a chat: its messages, rendered with the chat template of the simulated model.

    Every message is on separate lines, so the tokens of one message do not depend on the other messages.
    """
    rendered = []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, Mapping):
            role = _message_text(message.get("role"))
            content = _message_text(message.get("content"))
            rendered.append(f"{role}:\n{content}\n")
    return "".join(rendered) + "assistant:\n"


def _message_text(value: Any) -> str:
    """Return the text of a message field.

    A string is returned unchanged. For a list of content parts, the result is the joined texts of the parts. For any
    other value, the result is an empty string.
    """
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, Mapping))
    return value if isinstance(value, str) else ""


class Vocabulary:
    """The sequence of random words that the simulated model generates. Every word is one token.

    `ids` contains the token ids, and `texts` contains the words in UTF-8. The sequence repeats after PERIOD words. A
    response can start at any index below PERIOD, and have up to `max_tokens` tokens.
    """

    def __init__(self, seed: int, max_tokens: int) -> None:
        random = Random(f"babble/{seed}")  # noqa: S311 - words, not secrets
        words = [_ids()[f" {word}"] for word in random.choices(_WORDS, k=PERIOD)]
        repetitions = 1 + -(-max_tokens // PERIOD)
        self.ids = (words * repetitions)[: PERIOD + max_tokens]
        self.texts = [pieces()[token] for token in self.ids]

    def start(self, index: int) -> int:
        """Return the index in `ids` at which the response to request number `index` starts.

        The index is computed with Knuth's multiplicative hash, so consecutive requests start at different indices.
        """
        return index * 2_654_435_761 % PERIOD


@lru_cache(maxsize=65_536)
def _unit_ids(unit: str) -> tuple[int, ...]:
    """Return the token ids of one unit of text. A unit is a match of the pattern `_UNITS`: a word or one character."""
    if len(unit) == 1:
        return tuple(_FIRST_BYTE + byte for byte in unit.encode("utf-8", "surrogatepass"))
    ids = _ids()
    result = []
    start = 0
    while start < len(unit):
        stop = min(len(unit), start + _MAX_PIECE)
        while unit[start:stop] not in ids:
            stop -= 1
        result.append(ids[unit[start:stop]])
        start = stop
    return tuple(result)


@cache
def pieces() -> tuple[bytes, ...]:
    """Return the bytes of every token. The index in the result is the token id."""
    single = [bytes([byte]) for byte in range(256)]
    return (*(text.encode() for text in SPECIALS), *single, *(text.encode() for text in _texts()))


@cache
def _ids() -> dict[str, int]:
    """Return a mapping from the text of each token to its token id. An ASCII character has the id of its byte."""
    ids = {chr(byte): _FIRST_BYTE + byte for byte in range(128)}
    return ids | {text: _FIRST_BYTE + 256 + index for index, text in enumerate(_texts())}


@cache
def _texts() -> tuple[str, ...]:
    """Return the texts of all tokens with more than one byte, in order of the token ids."""
    pairs = ["".join(letters) for letters in product(ascii_lowercase, repeat=2)]
    triples = ["".join(letters) for letters in product(ascii_lowercase, repeat=3)]
    short = [f" {text}" for text in chain(ascii_lowercase, pairs)] + pairs + triples
    syllables = ["".join(sounds) for sounds in product("bdfgklmnprstvz", "aeiou")]
    invented = (f" {''.join(parts)}" for length in (2, 3) for parts in product(syllables, repeat=length))
    known = dict.fromkeys(chain(short, (f" {word}" for word in _WORDS)))
    new = (text for text in invented if text not in known)
    return (*known, *islice(new, VOCABULARY_SIZE - _FIRST_BYTE - 256 - len(known)))


def write_model(folder: Path, max_model_len: int) -> None:
    """Write a model folder that contains the configuration and the tokenizer of the simulated model, but no weights.

    The files have the formats of the libraries `transformers` and `tokenizers`. Raises OSError if a file cannot be
    written.
    """
    unknown, bos, eos = SPECIALS
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": max_model_len,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        # Some tools read the shape before they look for weights. It has no other use.
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "chat_template": _CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    (folder / "tokenizer.json").write_text(_tokenizer_file(), "utf-8")


def _tokenizer_file() -> str:
    """Return the content of a file tokenizer.json, for the library `tokenizers`.

    With this file, the library splits a text into the same tokens as `encode`. The file describes a WordPiece model.
    Its characters represent bytes, as in GPT-2 (see `_visible_bytes`).
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    visible = _visible_bytes()
    texts = ["".join(visible[byte] for byte in piece) for piece in pieces()]
    texts[: len(SPECIALS)] = SPECIALS
    vocabulary = {text: token for token, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIALS[0], continuing_subword_prefix=""))
    units = pre_tokenizers.Split(Regex(_UNITS.pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([units, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    bos = SPECIALS[BOS_ID]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS_ID)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer.to_str(pretty=False)


def _visible_bytes() -> dict[int, str]:
    """Return the character that represents each byte in GPT-2's vocabulary.

    A visible character represents its own byte. U+0100, U+0101, ... represent the other bytes.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    invisible = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(invisible)}
    return characters
