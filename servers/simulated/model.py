"""The folder that other load testers take for the simulated servers' model: their tokenizer and a configuration, in the
shape that `transformers` and `tokenizers` read. It has no weights."""

from __future__ import annotations

import json
from pathlib import Path

from servers.simulated import tokenizer as simulated

# A message on lines of its own, as `tokenizer.chat_text` writes it. The servers put BOS before a chat.
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def write_model(folder: Path, longest: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and config.json; `longest` is the context. Raises OSError."""
    unknown, begin, end = simulated.SPECIALS
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": simulated.VOCABULARY_SIZE,
        "max_position_embeddings": longest,
        "bos_token_id": simulated.BOS_ID,
        "eos_token_id": simulated.EOS_ID,
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
    (folder / "tokenizer.json").write_text(_tokenizer(), "utf-8")


def _tokenizer() -> str:
    """Longest pieces first, as WordPiece does it, over bytes that have a visible character each, as in GPT-2."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    shown = _visible()
    texts = ["".join(shown[byte] for byte in piece) for piece in simulated.pieces()]
    texts[: len(simulated.SPECIALS)] = simulated.SPECIALS
    vocabulary = {text: token for token, text in enumerate(texts)}
    model = models.WordPiece(vocabulary, unk_token=simulated.SPECIALS[0], continuing_subword_prefix="")
    model.max_input_chars_per_word = 1 << 20
    made = Tokenizer(model)
    units = pre_tokenizers.Split(Regex(" ?[A-Za-z]+|[\\s\\S]"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([units, letters])
    made.decoder = decoders.ByteLevel()
    begin = simulated.SPECIALS[simulated.BOS_ID]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, simulated.BOS_ID)]
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in simulated.SPECIALS])
    return made.to_str(pretty=False)


def _visible() -> dict[int, str]:
    """GPT-2's character of each byte: itself where it can be seen, else one from U+0100 on, in order."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(rest)}
