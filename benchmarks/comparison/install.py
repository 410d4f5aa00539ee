"""Puts clients where they can be started from, once per version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.comparison.client import Client

_STAMP = "installed-version"


def ensure(client: Client, environments: Path) -> Path:
    """The client's folder, made now unless this version was made before. Raises what its `install` does."""
    folder = environments / client.name.replace(" ", "-")
    stamp = folder / _STAMP
    if not stamp.exists() or stamp.read_text("utf-8") != client.version:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        client.install(folder)
        stamp.write_text(client.version, "utf-8")
    return folder


def environment_with(folder: Path, *requirements: str) -> None:
    """A virtual environment with these packages from the package index. Raises CalledProcessError."""
    run(sys.executable, "-m", "venv", str(folder))
    run(str(folder / "bin/python"), "-m", "pip", "install", "-q", *requirements)


def run(*command: str) -> None:
    """Runs it quietly. Raises CalledProcessError, with all that the command said."""
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def nothing(folder: Path) -> None:
    """For clients that are here already."""
