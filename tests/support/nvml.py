"""Compiles nvml.c, a stand-in for the NVML library of the NVIDIA driver. The real nvidia-ml-py calls the stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
"""File name of the library that nvidia-ml-py loads."""

A800 = "0 A800 73000 600 81920 97 312000 1410 4711:72000"
LOST = "15 A800 - - - - - -"


def compiled(folder: Path, *flags: str) -> Path:
    """Compile the shared library into `folder`, for LD_LIBRARY_PATH, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    strict = ("-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}")
    subprocess.run(["cc", *strict, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library


def state(file: Path, *gpus: str, init: int = 0, driver: str = "535.129.03") -> dict[str, str]:
    """Write the state that the stand-in reports from now on into `file`, and return the environment variables to use.

    An entry of `gpus` is the state of one GPU, such as A800. `init` is the error code of nvmlInit (0: no error).
    """
    fresh = file.with_suffix(".new")
    fresh.write_text("\n".join([f"{init} {driver}", *gpus]) + "\n")
    fresh.replace(file)  # atomically, because the library may be reading the file
    return {"NVML_STATE": str(file), "LD_LIBRARY_PATH": str(file.parent)}


def environment(asked: dict[str, str]) -> dict[str, str]:
    """Return the environment of this process, updated with the variables that `state` returned."""
    return os.environ | asked
