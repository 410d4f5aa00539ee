"""What a user installs is complete."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("workloads", "servers", "loadgen", "analysis")


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the tree as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=root, check=True, capture_output=True, timeout=60)
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return archive


def test_every_file_of_the_packages_is_in_the_wheel(root: Path, wheel: zipfile.ZipFile) -> None:
    """Code, tables, templates and scripts of the four packages are installed, the file that `loadgen servers` hands to
    Compose with them, and no other top-level package."""
    present = {
        str(file.relative_to(root))
        for package in PACKAGES
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    installed = {name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert installed == present | {"servers/launch/docker-compose.yml"}


def test_the_licence_and_the_command_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """The wheel carries the licence text and the `loadgen` command."""
    names = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
