"""The files that a user installs are complete, from a checkout and from the source distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LINKED = ("workloads", "servers", "analysis")
"""Folders at the top of the repository that are imported as loadgen.workloads, loadgen.servers and loadgen.analysis."""


def build(source: Path, target: str, folder: Path) -> Path:
    """Build a distribution (`wheel` or `sdist`) of a source tree into an empty folder and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=60)
    (file,) = folder.iterdir()
    return file


def installed_names(wheel: Path) -> set[str]:
    """Return the files that a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree as it is."""
    return build(root, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_one_package_with_every_file(root: Path, wheel: Path) -> None:
    """`loadgen` is the only top-level package. It contains the linked folders, and the Compose file for `servers`."""
    own = {
        str(file.relative_to(root))
        for file in (root / "loadgen").rglob("*")
        if file.is_file() and not set(file.relative_to(root / "loadgen").parts) & {"__pycache__", *LINKED}
    }
    linked = {
        f"loadgen/{file.relative_to(root)}"
        for name in LINKED
        for file in (root / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert installed_names(wheel) == own | linked | {"loadgen/servers/launch/docker-compose.yml"}


def test_the_source_distribution_builds_the_same_wheel(root: Path, wheel: Path, tmp_path: Path) -> None:
    """An installation from the sdist has the same files, although an archive stores links in its own way."""
    folders = {name: tmp_path / name for name in ("sdist", "unpacked", "wheel")}
    for folder in folders.values():
        folder.mkdir()
    archive = build(root, "sdist", folders["sdist"])
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(folders["unpacked"])], check=True, timeout=60)
    (source,) = folders["unpacked"].iterdir()
    assert installed_names(build(source, "wheel", folders["wheel"])) == installed_names(wheel)


def test_the_licence_and_the_command_are_in_the_wheel(wheel: Path) -> None:
    """The wheel carries the licence text and the `loadgen` command."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)


def test_a_plain_installation_measures_memory(wheel: Path) -> None:
    """The wheel requires the libraries that read GPUs, host memory and server metrics, without an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"llm_loadgen[^/]*/METADATA", name)]
        fields = archive.read(name).decode().splitlines()
    plain = {re.split("[<>=]", line)[0] for line in fields if line.startswith("Requires-Dist") and ";" not in line}
    assert {f"Requires-Dist: {name}" for name in ("nvidia-ml-py", "prometheus-client", "psutil")} <= plain
