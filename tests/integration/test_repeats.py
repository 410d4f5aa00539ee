"""`--repeats` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.cli.report import report
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst
from tests.support.simulated import running


def test_repeats_share_a_folder_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its own run file and summary and another seed; the folder has the interval between them and one page,
    and `loadgen report` on the folder makes the same again."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        code, out, err = burst(
            tmp_path,
            *("--server", "tgi", "--url", server.url, "--n", "12", "--output-tokens", "4", "--repeats", "2"),
            report=True,
        )
    assert code in {0, 5}, err
    assert "95% CI" in out
    folder = tmp_path / "run"
    together = json.loads((folder / "summary.json").read_text())
    assert together["runs"] == ["repeat-1", "repeat-2"]
    assert together["repeats"]["state"] == ["cold", "warm"]
    plans = [runfile.read(folder / name).header.plan for name in together["runs"]]
    assert [(plan["repeat"], plan["seed"]) for plan in plans] == [(1, 0), (2, 1)]
    for place, name in enumerate(together["runs"]):
        own = json.loads((folder / name / "summary.json").read_text())
        assert together["repeats"]["figures"]["ttft.p50"]["values"][place] == own["latency"]["ttft_s"]["p50"]
    assert 'id="between-runs"' in (folder / "report.html").read_text()
    report([folder], None, as_json=True, quiet=False)
    again = json.loads(capsys.readouterr().out)
    assert again["repeats"] == together["repeats"]
    assert len(again["runs"]) == 2
