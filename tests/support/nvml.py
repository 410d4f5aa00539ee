"""The driver's library as a stand-in (nvml.c), compiled here, so that nvidia-ml-py itself is what runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
"""The name under which nvidia-ml-py asks the loader for it."""

A800 = "0 A800 73000 600 81920 97 312000 1410 4711:72000"
LOST = "15 A800 - - - - - -"


def compiled(folder: Path, *flags: str) -> Path:
    """The shared library, in a folder of its own that LD_LIBRARY_PATH can name."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    strict = ("-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}")
    subprocess.run(["cc", *strict, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return library


def state(file: Path, *gpus: str, init: int = 0, driver: str = "535.129.03") -> dict[str, str]:
    """Write what the driver says from now on; the environment in which it is asked."""
    fresh = file.with_suffix(".new")
    fresh.write_text("\n".join([f"{init} {driver}", *gpus]) + "\n")
    fresh.replace(file)  # at one blow: it may be being read
    return {"NVML_STATE": str(file), "LD_LIBRARY_PATH": str(file.parent)}


def environment(asked: dict[str, str]) -> dict[str, str]:
    """This process's environment with that of a driver."""
    return os.environ | asked
