"""Dockerfile, judged without a container engine: what it copies is there and enough, and what runs has no rights."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

Line = tuple[str, str]
"""An instruction and its arguments."""


@pytest.fixture(scope="module")
def lines(root: Path) -> list[Line]:
    """The instructions, continued lines joined."""
    text = (root / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    said = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, rest in said]


def of(lines: list[Line], name: str) -> list[str]:
    return [rest for each, rest in lines if each == name]


def copied(lines: list[Line]) -> list[str]:
    """What is copied from the checkout."""
    return [word for rest in of(lines, "COPY") if not rest.startswith("--from") for word in rest.split()[:-1]]


def test_the_image_is_small_and_pinned(lines: list[Line]) -> None:
    """Two stages from one slim Python of an exact version that the project supports: no checkout in the last,
    and nothing is run there but what lets its Python open packet rings and raise its priority."""
    assert of(lines, "FROM") == ["python:${PYTHON} AS build", "python:${PYTHON}"]
    (default,) = of(lines, "ARG")
    assert re.fullmatch(r"PYTHON=3\.1[1-4]\.\d+-slim-\w+", default)
    last = lines[[name for name, _ in lines].index("FROM", 2) :]
    assert [rest for name, rest in last if name == "COPY"] == ["--from=build /opt/loadgen /opt/loadgen"]
    (run,) = [rest for name, rest in last if name == "RUN"]
    assert "security.capability" in run
    assert "ADD" not in [name for name, _ in lines]


def test_nothing_runs_as_root(lines: list[Line]) -> None:
    """By number, so that no engine has to look a name up; and signals reach the program itself."""
    user, group = of(lines, "USER")[-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert of(lines, "ENTRYPOINT") == ['["loadgen"]']


def test_no_secret_and_no_odd_source_goes_into_the_build(root: Path, lines: list[Line]) -> None:
    """Everything copied is listed for the build context, which holds nothing else."""
    allowed = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied(lines)) == allowed
    assert "*" in (root / ".dockerignore").read_text().splitlines()
    assert all((root / name).exists() for name in allowed)
    assert not [line for line in lines if re.search(r"(?i)token|password|secret|index-url|https?://", line[1])]


def test_what_is_copied_is_enough_to_build(root: Path, lines: list[Line], tmp_path: Path) -> None:
    """The wheel that `pip install .` makes in the image can be made from the files copied, and from nothing else."""
    for name in copied(lines):
        place = root / name
        if place.is_dir():
            shutil.copytree(place, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, tmp_path / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "dist").glob("llm_loadgen-*.whl"))


def test_compose_names_the_image_by_this_version(root: Path) -> None:
    """The image of the simulated servers is called after the version that it is built from."""
    version = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    services = yaml.safe_load((root / "docker-compose.yml").read_text("utf-8"))["services"]
    images = {each["image"] for each in services.values() if "build" in each}
    assert images == {f"llm-loadgen:{version}"}
