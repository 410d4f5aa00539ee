"""summary.json is an interface: its keys, and the figures of one run that is kept for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadgen.analysis.run.runfile import read
from tests.support.command import ROOT
from tests.support.runs import summarise

GOLDEN = Path(__file__).parents[1] / "golden" / "burst"


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    """The golden run, summarised by the code as it is."""
    return summarise(read(GOLDEN))


def test_the_figures_of_the_golden_run_stay(summary: dict[str, Any]) -> None:
    """Nineteen requests with every ending. After a change that is meant, `loadgen report tests/golden/burst` writes the
    new summary, and the difference is part of the change."""
    assert summary == json.loads((GOLDEN / "summary.json").read_text("utf-8"))


@pytest.mark.parametrize(
    "file", [GOLDEN / "summary.json", *(ROOT / "tests/data/recorded").glob("*/summary.expected.json")], ids=str
)
def test_the_schema_is_that_of_the_file(file: Path) -> None:
    """What is committed as the JSON Schema of summary.json accepts these, older ones included."""
    schema = json.loads((ROOT / "docs/reference/summary.schema.json").read_text("utf-8"))
    jsonschema.validate(json.loads(file.read_text("utf-8")), schema)


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        ("", {"run", "server", "requests", "tokens", "throughput", "latency", "burst", "memory", "client"}),
        (
            "run",
            {"id", "label", "started_at", "duration_s", "arrivals", "seed", "interrupted", "damaged_lines", "command"},
        ),
        ("server", {"name", "version", "model", "simulated", "limits"}),
        ("requests", {"sent", "complete", "truncated", "failed", "dropped", "errors"}),
        ("tokens", {"prompt_asked", "prompt_reported", "output_asked", "output_reported"}),
        ("tokens", {"prompt_mismatches", "output_mismatches"}),
        ("throughput", {"requests_per_s", "output_tokens_per_s", "total_tokens_per_s"}),
        ("latency", {"ttft_s", "ttft_due_s", "tpot_s", "icl_s", "itl_s", "e2e_s", "normalised_s"}),
        ("burst", {"skew_s"}),
        ("client", {"verdict", "reasons", "stamps", "late_p50_s", "late_p99_s", "late_max_s", "coalesced_share"}),
        ("client", {"send_late_p99_s", "clock_disagreement_s", "cpu_share"}),
    ],
)
def test_the_promised_keys_are_there(summary: dict[str, Any], part: str, keys: set[str]) -> None:
    """What design and documentation name is present, in each part."""
    assert keys <= (summary[part] if part else summary).keys()


def test_every_latency_has_the_same_figures(summary: dict[str, Any]) -> None:
    """n, mean, percentiles, extremes and intervals, for each."""
    promised = {"n", "mean", "p50", "p90", "p95", "p99", "max", "min", "ci95", "thin", "std"}
    assert all(promised <= described.keys() for described in summary["latency"].values())
