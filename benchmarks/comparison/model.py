"""The model folder for other load testers, as `loadgen mock-server --write-model` writes it.

With this tokenizer, client and server count the same number of tokens in a prompt. Load testers that check their
prompts with `/tokenize` find nothing to correct."""

from __future__ import annotations

from pathlib import Path

from loadgen.servers.simulated.tokenizer import write_model

NAME = "benchmark"
"""Name of the model on the simulated server. Other load testers look up a name with a slash on a hub."""
CONTEXT_TOKENS = 16_384


def make(folder: Path) -> Path:
    """Write the model folder and return it."""
    write_model(folder, CONTEXT_TOKENS)
    return folder
