"""The tree as the house rules see it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("workloads", "servers", "loadgen", "analysis")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "docs", "examples")


@pytest.fixture(scope="session")
def package_files() -> list[Path]:
    """Every Python file of the four packages."""
    return _python_files(PACKAGES)


@pytest.fixture(scope="session")
def all_files() -> list[Path]:
    """Every Python file of ours, tests and scripts included."""
    return _python_files(FOLDERS)


def _python_files(folders: tuple[str, ...]) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
