"""The folder that peers take for a model: a configuration, and the simulated servers' own tokenizer.

Every peer wants a tokenizer in the shape that transformers reads. With the server's own, 512 tokens are 512 on both
sides, so the peers that check their prompts against `/tokenize` find nothing to repair. Characters outside ASCII are
one unknown token each here and several bytes there; no peer sends any.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from servers.simulated import tokenizer as simulated

NAME = "benchmark"
"""Under which the simulated server serves it. Peers read a name with a slash as one on a hub."""
CONTEXT_TOKENS = 16_384
_PIECES = " ?[A-Za-z]+|."
"""What the simulated tokenizer cuts text into first (`servers/simulated/tokenizer.py`)."""
_SPECIALS = ["<unk>", "<s>", "</s>"]
_BYTES = 256
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONTEXT_TOKENS,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
}
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": simulated.VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "bos_token_id": simulated.BOS_ID,
    "eos_token_id": simulated.EOS_ID,
}


def make(folder: Path) -> Path:
    """Writes the three files into `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", _TOKENIZER), ("config.json", _MODEL)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """Longest pieces first, as WordPiece does it, with the same ids. A byte that is no character has a name instead."""
    texts = [simulated.decode([token]) for token in range(simulated.VOCABULARY_SIZE)]
    named = [chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>" for byte in range(_BYTES)]
    texts[: len(_SPECIALS) + _BYTES] = [*_SPECIALS, *named]
    vocabulary = {text: token for token, text in enumerate(texts)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=_SPECIALS[0], continuing_subword_prefix=""))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", simulated.BOS_ID)])
    # Peers draw random ids and leave out the special ones: no prompt is to hold a byte that is no text.
    special = [*_SPECIALS, *(name for name in named if len(name) > 1)]
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    return made
