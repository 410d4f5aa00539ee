"""The suite itself."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("one")
def test_groups_stay_in_one_process(request: pytest.FixtureRequest) -> None:
    """Where xdist is told to keep groups together it does: else each process would make what a group shares."""
    assert request.node.nodeid.endswith("@one") or not request.config.getoption("loadgroup", False)
