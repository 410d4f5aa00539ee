"""`loadgen dissect` as a person runs it, in the environment that `make dissect` makes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Dissect = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in a process of its own."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "loadgen", "dissect", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    return run


@pytest.fixture(scope="session")
def dissect(command: Callable[..., subprocess.CompletedProcess[str]]) -> Dissect:
    """What it prints as JSON."""

    def run(*words: object) -> dict[str, Any]:
        ended = command(*words, "--json")
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The config.json of a Llama of this shape."""

    def made(hidden: int, intermediate: int, layers: int, vocabulary: int, kv_heads: int | None = None) -> Path:
        heads = hidden // 64
        shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads or heads, "vocab_size": vocabulary}
        file = tmp_path_factory.mktemp("model") / "config.json"
        file.write_text(json.dumps(shape | {"model_type": "llama"}), "utf-8")
        return file

    return made
