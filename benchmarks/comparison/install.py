"""Installs load generators, each version once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison.client import Client

_STAMP = "installed-version"


def ensure(client: Client, environments: Path) -> Path:
    """Return the folder in which the load generator is installed. Install it if this version is not there yet.

    Raises the errors of `client.install`.
    """
    folder = environments / client.name.replace(" ", "-")
    stamp = folder / _STAMP
    if not stamp.exists() or stamp.read_text("utf-8") != client.version:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        client.install(folder)
        stamp.write_text(client.version, "utf-8")
    return folder


def environment_with(folder: Path, *requirements: str) -> None:
    """Create a virtual environment with these packages from the package index. Raises CalledProcessError on failure."""
    run(sys.executable, "-m", "venv", str(folder))
    run(str(folder / "bin/python"), "-m", "pip", "install", "-q", *requirements)


def run(*command: str) -> None:
    """Run a command without showing its output. On failure, raises CalledProcessError with the output."""
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing(folder: Path) -> None:
    """Install nothing, for load generators that are already part of this repository."""
