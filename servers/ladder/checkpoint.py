"""A Llama's checkpoint as a ladder's: the weights and their names are the same, config.json names the architecture."""

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
    """`source` once more, as a ladder, with the plugin in its folder `plugin`. Weights are hard links where the file
    system has them. Raises LaunchError."""
    told = _config(source)
    if _named(told) != STANDARD:
        raise LaunchError(f"{source} is no {STANDARD}", f"its config.json says {_named(told)!r}: choose another")
    try:
        target.mkdir(parents=True)
        for each in (path for path in source.iterdir() if path.is_file() and path.name != "config.json"):
            (_linked if each.suffix in _WEIGHTS else shutil.copy)(each.resolve(), target / each.name)
        shutil.copytree(PLUGIN_FOLDER, target / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
        config = json.format(json.encode(told | {"architectures": [LADDER_ARCHITECTURE]}), indent=2)
        (target / "config.json").write_bytes(config + b"\n")
    except FileExistsError:
        raise LaunchError(f"{target} is there already", "name a folder that is not there yet") from None
    except OSError as problem:
        raise LaunchError(f"cannot write {target}: {problem.strerror}", "name another folder") from None


def is_ladder(folder: Path) -> bool:
    """Whether its config.json says so."""
    try:
        return _named(_config(folder)) == LADDER_ARCHITECTURE
    except LaunchError:
        return False


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.decode(read_settings(folder / "config.json"), type=dict[str, Any])
    except (OSError, ValueError, *DECODE_ERRORS) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise LaunchError(f"cannot read {folder / 'config.json'}: {why}", "name the folder of a model") from None


def _named(config: dict[str, Any]) -> str:
    """The architecture, as Hugging Face's transformers write it; empty where there is none."""
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return ""


def _linked(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as problem:
        if problem.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        shutil.copy(source, target)
