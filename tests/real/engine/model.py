"""Make the model that the engines serve: a tokenizer trained on invented words and a Llama of random weights.

    .engine/vllm/bin/python tests/real/engine/model.py .engine/model

0.8 million parameters in bf16, everything seeded: the same versions make the same files. It says nothing sensible,
and costs so little that what is left to measure is the server around it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20231107
VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(folder: Path) -> None:
    tokenizer = trained_tokenizer()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    random_llama(tokenizer).save_pretrained(folder)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text has token ids; it adds no special token to a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(invented_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def invented_sentences() -> Iterator[str]:
    source = random.Random(SEED)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(4000)]
    for _ in range(4000):
        yield " ".join(source.choices(words, k=12))


def random_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
