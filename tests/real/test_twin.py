"""A twin of a real vLLM: fitted to a burst and a closed loop, it predicts what it has not seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.twin import LOADS
from tests.real.conftest import ROOT

if TYPE_CHECKING:
    from tests.real.conftest import Engine

pytestmark = pytest.mark.timeout(400)  # four loads, and vLLM may have to start
THROUGHPUT, TTFT = 2.0, 3.0
"""By which factors predictions may be off on a busy machine, whose speed changes from run to run; on a quiet one they
are within 10 and 20% (docs/guides/twin.md)."""


def loadgen(*arguments: str) -> str:
    """What it prints."""
    command = [sys.executable, "-m", "loadgen", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in {0, 5}, done.stderr  # 5: the client shares the engine's cores
    return done.stdout


@pytest.fixture(scope="module")
def checked(vllm: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of the two loads that were not fitted to, what was measured and what was predicted, by figure."""
    folder = tmp_path_factory.mktemp("twin")
    for place, (name, load) in enumerate(LOADS.items()):
        options = ("--server", "vllm", "--url", vllm.url, "--output-tokens", "64", "--seed", str(77_000 + 1000 * place))
        loadgen(*load, *options, "--warmup", "8", "--quiet", "--no-report", "--out", f"{folder}/{name}")
    first, second, *others = (f"{folder}/{name}" for name in LOADS)
    loadgen("twin", "fit", first, second, "--out", f"{folder}/twin.json")
    told: dict[str, Any] = json.loads(loadgen("twin", "check", f"{folder}/twin.json", *others, "--json"))
    return {name: {row["figure"]: row for row in rows} for name, rows in told.items()} | {"folder": {"": folder}}


def test_a_poisson_load_and_a_larger_burst_are_predicted(checked: dict[str, dict[str, Any]]) -> None:
    """Throughput and median TTFT, within what a busy machine leaves of it."""
    for load in ("poisson", "burst-200"):
        for figure, most in (("output_tokens_per_s", THROUGHPUT), ("ttft.p50", TTFT)):
            row = checked[load][figure]
            assert 1 / most < row["predicted"] / row["measured"] < most, (load, row)


def test_its_limits_are_found(checked: dict[str, dict[str, Any]]) -> None:
    """2048 tokens a step, as vLLM has it on a CPU, and the cache as its metrics say."""
    folder: Path = checked["folder"][""]
    twin = json.loads((folder / "twin.json").read_text())
    assert twin["step_tokens"] == 2048
    assert twin["kv_tokens"] > 1_000_000
    assert twin["gpu"] == ""
