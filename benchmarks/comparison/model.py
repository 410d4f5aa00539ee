"""The folder that peers take for a model: what `loadgen mock-server --write-model` writes, so that 512 tokens are 512
on both sides and the peers that check their prompts against `/tokenize` find nothing to repair."""

from __future__ import annotations

from pathlib import Path

from loadgen.servers.simulated.tokenizer import write_model

NAME = "benchmark"
"""Under which the simulated server serves it. Peers read a name with a slash as one on a hub."""
CONTEXT_TOKENS = 16_384


def make(folder: Path) -> Path:
    """Writes the folder and returns it."""
    write_model(folder, CONTEXT_TOKENS)
    return folder
