"""Converts a Llama checkpoint to a model with Ladder Residual (arXiv 2501.06589), here called a ladder model.

The weights and their names are unchanged. Only config.json changes: it names another architecture.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from msgspec import json

from loadgen.servers.errors import DECODE_ERRORS, LaunchError, read_settings
from loadgen.servers.ladder import LADDER_ARCHITECTURE, PLUGIN_FOLDER

STANDARD = "LlamaForCausalLM"
_WEIGHTS = (".safetensors", ".bin")


def convert_checkpoint(source: Path, target: Path) -> None:
    """Write a ladder model with the weights of the Llama checkpoint `source` to the new folder `target`.

    Weight files become hard links if the file system supports them, otherwise copies. The vLLM plugin is copied to
    `target/plugin`. Raises LaunchError if `source` is not a Llama checkpoint or `target` cannot be created.
    """
    config = _read_config(source)
    architecture = _architecture(config)
    if architecture != STANDARD:
        raise LaunchError(
            f"{source} is not a {STANDARD}", f"its config.json says {architecture!r}: choose another model"
        )
    try:
        target.mkdir(parents=True)
        for file in source.iterdir():
            if not file.is_file() or file.name == "config.json":
                continue
            copy = _link_or_copy if file.suffix in _WEIGHTS else shutil.copy
            copy(file.resolve(), target / file.name)
        shutil.copytree(PLUGIN_FOLDER, target / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
        text = json.format(json.encode(config | {"architectures": [LADDER_ARCHITECTURE]}), indent=2)
        (target / "config.json").write_bytes(text + b"\n")
    except FileExistsError:
        raise LaunchError(f"{target} already exists", "name a new folder") from None
    except OSError as problem:
        raise LaunchError(f"cannot write {target}: {problem.strerror}", "name another folder") from None


def is_ladder(folder: Path) -> bool:
    """Return True if config.json in the folder names the ladder architecture, otherwise False.

    The result is also False if config.json is missing or invalid.
    """
    try:
        return _architecture(_read_config(folder)) == LADDER_ARCHITECTURE
    except LaunchError:
        return False


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.decode(read_settings(folder / "config.json"), type=dict[str, Any])
    except (OSError, ValueError, *DECODE_ERRORS) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise LaunchError(f"cannot read {folder / 'config.json'}: {reason}", "name the folder of a model") from None


def _architecture(config: dict[str, Any]) -> str:
    """Return the architecture in a config.json of Hugging Face's transformers, or "" if there is none."""
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return ""


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as problem:
        if problem.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        shutil.copy(source, target)
