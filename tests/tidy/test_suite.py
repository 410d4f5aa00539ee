"""The suite itself."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest


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
