"""The command lines of servers that are installed in a Python environment, with limits that admit a burst of 1000."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from servers.errors import LaunchError
from servers.launch.base import Wanted, gpus_of, tensor_parallel


class Command(NamedTuple):
    """What to start."""

    words: tuple[str, ...]
    env: dict[str, str]
    """What is added to the environment."""


def command_of(wanted: Wanted, host: str, port: int) -> Command:
    """How to start the server wanted on this machine, listening at `host` and `port`.

    Raises LaunchError when it is not installed, or is no Python package.
    """
    build = _COMMANDS.get(wanted.server)
    if build is None:
        raise LaunchError(
            f"{wanted.server} cannot be started as a process: it is not a Python package",
            "start it in a container (--launch compose), or start it yourself and pass --url",
        )
    folder = _folder(wanted)
    command = build(replace(wanted, model=str(folder)) if folder else wanted, host, port)
    gpus = gpus_of(wanted)
    chosen = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    return Command(
        (*command.words, *map(str, wanted.options.get("arguments", ()))),
        command.env
        | ({"HF_HUB_OFFLINE": "1"} if folder else {})
        | chosen
        | dict(wanted.host.env)
        | dict(wanted.options.get("env", {})),
    )


def simulated(wanted: Wanted, host: str, port: int) -> Command:
    """The simulated server as `loadgen sim` starts it."""
    names: dict[str, Any] = {"server": wanted.server, "host": host, "port": port, "model": _served_name(wanted)}
    options = (word for name, value in names.items() for word in (f"--{name}", str(value)))
    return Command((sys.executable, "-m", "loadgen", "sim", *options, *_arguments(wanted)), {})


def _vllm(wanted: Wanted, host: str, port: int) -> Command:
    python = _python(wanted)
    script = python.parent / "vllm" if python else None
    first: tuple[str, ...]
    if script and script.exists():
        first = (str(script), "serve", wanted.model)
    elif python:  # every version has this module
        first = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", wanted.model)
    elif found := shutil.which("vllm"):
        first = (found, "serve", wanted.model)
    else:
        raise LaunchError(
            "vllm is not installed: there is no program of that name on PATH",
            "install it (`pip install vllm`) or name the Python that has it: --python PATH",
        )
    fixed: tuple[str, ...] = ("--served-model-name", _served_name(wanted), "--host", host, "--port", str(port))
    limits = ("--max-num-seqs", "1024", "--generation-config", "vllm", "--no-enable-prefix-caching")
    if (count := tensor_parallel(wanted)) > 1:
        fixed += ("--tensor-parallel-size", str(count))
    return Command((*first, *fixed, *limits, "--disable-uvicorn-access-log"), {"VLLM_NO_USAGE_STATS": "1"})


def _lightllm(wanted: Wanted, host: str, port: int) -> Command:
    python = _python(wanted) or shutil.which("python3")
    if python is None:
        raise LaunchError("there is no python3 on PATH", "name the Python that has lightllm: --python PATH")
    fixed = ("--model_dir", wanted.model, "--model_name", _served_name(wanted), "--host", host, "--port", str(port))
    limits = ("--running_max_req_size", "1024", "--disable_dynamic_prompt_cache", "--tp", str(tensor_parallel(wanted)))
    return Command((str(python), "-m", "lightllm.server.api_server", *fixed, *limits), {})


_COMMANDS: dict[str, Callable[[Wanted, str, int], Command]] = {"vllm": _vllm, "lightllm": _lightllm}


def _python(wanted: Wanted) -> Path | None:
    """The interpreter named, not resolved: that of a virtual environment is a link."""
    named = wanted.options.get("python")
    if not named:
        return None
    path = Path(named).expanduser().absolute()
    if not path.is_file():
        raise LaunchError(f"{path} does not exist", "--python names an interpreter, such as .venv/bin/python")
    return path


def _folder(wanted: Wanted) -> Path | None:
    """The model's folder, below the host's model_dir or as it is named; None for a name on the Hub.

    Absolute, because a relative one can be taken for a name on the Hub.
    """
    below = [Path(wanted.host.model_dir) / wanted.model] if wanted.host.model_dir else []
    return next((each.absolute() for each in (*below, Path(wanted.model)) if each.is_dir()), None)


def _served_name(wanted: Wanted) -> str:
    return str(wanted.options.get("name") or wanted.model.rstrip("/").rpartition("/")[2])


def _arguments(wanted: Wanted) -> Sequence[str]:
    return tuple(map(str, wanted.options.get("arguments", ())))
