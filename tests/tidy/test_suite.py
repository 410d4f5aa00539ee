"""The suite itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

SYSTEM_HELPERS = ("busy_proxies", "delay", "namespaces", "network", "nvml", "tls_servers")
"""Modules of tests/support that need root, a compiler or another program."""


def test_make_test_needs_no_other_program(root: Path) -> None:
    """Only tests/system and the targets with programs of their own import these helpers. Only tests/system has tests
    that must run alone."""
    special = re.compile(rf"tests\.support\.({'|'.join(SYSTEM_HELPERS)})\b|pytest\.mark\.(alone|scale)\b")
    folders = ("unit", "property", "contract", "seams", "integration", "browser")
    files = [file for folder in folders for file in (root / "tests" / folder).rglob("*.py")]
    assert not [str(file.relative_to(root)) for file in files if special.search(file.read_text("utf-8"))]


@pytest.mark.xdist_group("one")
def test_groups_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """Where xdist is told to keep groups together it does: else each process would make what a group shares."""
    assert request.node.nodeid.endswith("@one") or not request.config.getoption("loadgroup", False)


def test_each_mutation_breaks_what_is_there(root: Path) -> None:
    """The text that it replaces stands once in its file, and the tests that should notice are files of the suite."""
    mutations = tomllib.loads((root / "tests/mutations/mutations.toml").read_text("utf-8"))["mutation"]
    stale = [each["name"] for each in mutations if (root / each["file"]).read_text("utf-8").count(each["old"]) != 1]
    missing = [each["name"] for each in mutations if not all((root / test).exists() for test in each["tests"])]
    assert (stale, missing) == ([], [])
