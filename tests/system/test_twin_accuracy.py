"""A twin's predictions compared with a run that it was not fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import in_process
from tests.support.twins import fit_twin


@pytest.mark.alone
def test_the_predicted_tpot_is_that_of_another_run(tmp_path: Path) -> None:
    """The median TPOT of a run at another load lies within half of its prediction."""
    fit_twin(tmp_path, "burst", "closed", "poisson")
    code, out, _ = in_process(tmp_path, "twin", "check", "twin.json", "poisson/run", "--json")
    (rows,) = json.loads(out).values()
    tpot = next(row for row in rows if row["figure"] == "tpot.p50")
    assert code == 0
    assert tpot["predicted"] == pytest.approx(tpot["measured"], rel=0.5)
