"""The chips below the title of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.compare import Comparison
from loadgen.analysis.compare import _chips as compare_chips
from loadgen.analysis.compare.gates import GateResult
from loadgen.analysis.held_back import HeldBack
from loadgen.analysis.objectives import ObjectiveVerdict
from loadgen.analysis.report import findings, status, tables
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, failed, healthy, run_of, summarise, typed


def summary_of(folder: Path, records: list[Any], **changes: Any) -> Any:
    return typed(summarise(run_of(folder / "run", records, **changes)))


def verdict(objective: str, measured: float | None, bound: float, unit: Any = "s", result: Any = "fail") -> Any:
    """Return the verdict on an objective such as `tpot.p99 < 50ms`."""
    rest: dict[str, Any] = {"marginal": False, "whole_interval": False, "interval": None, "confidence": 0.95}
    rest |= {"requests": 9, "left_out": 0, "requests_needed": None, "said": ""}
    figure = re.split(r"[. ]", objective)[0]
    return ObjectiveVerdict(
        objective=objective, figure=figure, verdict=result, unit=unit, bound=bound, measured=measured, **rest
    )


def test_a_run_without_problems_has_two_green_chips(tmp_path: Path) -> None:
    """Without objectives there is no third chip."""
    chips = status.run_chips([summary_of(tmp_path, burst(30, 4))])
    assert [(chip.label, chip.text, chip.level) for chip in chips] == [
        ("Measurement", "valid", "ok"),
        ("Requests", "all 30 complete", "ok"),
    ]


def test_the_requests_chip_names_the_most_frequent_reason(tmp_path: Path) -> None:
    """`mostly` is left out if there is one reason only."""
    one = [*burst(28, 4), failed(30, http_status=500), failed(31, http_status=500)]
    chip = status.requests([summary_of(tmp_path / "one", one)])
    assert (chip.text, chip.level) == ("28 of 30 complete (6.7% incomplete, HTTP 500)", "error")
    two = [*one, failed(32, "timeout")]
    chip = status.requests([summary_of(tmp_path / "two", two)])
    assert chip.text == "28 of 31 complete (9.7% incomplete, mostly HTTP 500)"


def test_a_warning_that_concerns_every_latency_is_named(tmp_path: Path) -> None:
    """An overload and tokens that a proxy holds back change what latencies mean. A green check never stands beside."""
    summary = summary_of(tmp_path, burst(30, 4))
    summary.window.unsteady, summary.window.overloaded = "9 requests were in flight in the first half, 90 later", True
    chip = status.validity([summary])
    assert (chip.text, chip.level) == ("valid, 1 warning: server overloaded", "warning")
    held = HeldBack(examined=30, responses=30, in_one_piece=30, chunks_per_group=4, zero_gap_share=1.0)
    summary.held_back = held
    assert status.validity([summary]).text == "valid, 2 warnings: server overloaded, tokens held back"
    assert not any("Valid" in finding.sentence for finding in findings.findings(summary))


def test_tiles_name_the_objectives_that_failed(tmp_path: Path) -> None:
    """The tile shows the median, so it names the percentile that failed."""
    summary = summary_of(tmp_path, burst(30, 4))
    summary.objectives = [verdict("ttft.p99 < 200ms", 0.653, 0.2), verdict("complete > 99%", 0.5, 0.99, "share")]
    cards = tables.cards(summary)
    assert cards["ttft_s"].failed == ["`ttft.p99` 653 > 200 ms"]
    assert cards["requests"].failed == ["`complete` 50% < 99%"]
    assert cards["tpot_s"].failed == []


def test_an_invalid_measurement_says_why(tmp_path: Path) -> None:
    """On a page of several runs, the chip counts the valid ones."""
    good = summary_of(tmp_path / "good", burst(30, 4))
    bad = summary_of(tmp_path / "bad", burst(30, 4), telemetry=healthy(stall_ns_max=2_000 * MS))
    chip = status.validity([bad])
    assert (chip.text, chip.level) == ("invalid: the client was the limit", "error")
    chip = status.validity([good, bad])
    assert chip.text.startswith("1 of 2 runs valid, ")
    assert chip.level == "error"


def test_failed_objectives_are_named_the_worst_first(tmp_path: Path) -> None:
    """A chip names at most two of them, each with its measured value and its bound in the unit of the bound."""
    summary = summary_of(tmp_path, burst(12, 4))
    assert status.objectives([summary]) == []
    summary.objectives = [
        verdict("tpot.p99 < 50ms", 0.0725, 0.05),
        verdict("e2e.p95 < 3s", 9.154, 3.0),
        verdict("complete >= 99%", 1.0, 0.99, "share", "pass"),
    ]
    (chip,) = status.objectives([summary])
    assert chip.text == "2 of 3 failed: `e2e.p95` 9.15 > 3 s, `tpot.p99` 72.5 > 50 ms"
    assert (chip.level, chip.anchor) == ("error", "objectives")
    summary.objectives.append(verdict("output_tokens_per_s > 5000", 900.0, 5000.0, "per second"))
    (chip,) = status.objectives([summary])
    assert chip.text.startswith("3 of 4 failed: `output_tokens_per_s` 900 < 5,000 per second, ")
    assert chip.text.endswith(",\u00a0…")


@pytest.mark.parametrize(
    ("objective", "measured", "bound", "unit", "text"),
    [
        ("complete >= 99%", 0.96, 0.99, "share", "`complete` 96% < 99%"),
        ("failed <= 1", 3.0, 1.0, "requests", "`failed` 3 > 1"),
        ("ttft.p99 < 1s", None, 1.0, "s", "`ttft.p99` not measured"),
    ],
)
def test_a_failure_has_the_unit_of_its_bound(
    objective: str, measured: float | None, bound: float, unit: str, text: str
) -> None:
    """Shares are percentages, and numbers of requests have no unit."""
    assert status.failure_text(verdict(objective, measured, bound, unit)) == text


def test_objectives_that_are_met_or_inconclusive(tmp_path: Path) -> None:
    """Inconclusive objectives are a warning if none failed."""
    summary = summary_of(tmp_path, burst(12, 4))
    summary.objectives = [verdict("ttft.p99 < 1s", 0.5, 1.0, result="pass")] * 3
    assert status.objectives([summary])[0].text == "all 3 met"
    summary.objectives = [verdict("ttft.p99 < 1s", 0.5, 1.0, result="inconclusive")]
    (chip,) = status.objectives([summary])
    assert (chip.text, chip.level) == ("1 of 1 inconclusive: `ttft.p99` 0.500 < 1 s", "warning")


def test_a_simulation_in_virtual_time_claims_no_validity(tmp_path: Path) -> None:
    """No client took part, so neither the chip nor the verdict speaks of a client."""
    summary = summary_of(tmp_path, burst(30, 4), simulated=True)
    summary.server.virtual = True
    assert status.validity([summary]) == status.MODELLED
    assert "valid" not in status.MODELLED.text.lower()
    summary.window.unsteady, summary.window.overloaded = "9 requests were in flight in the first half, 90 later", True
    chip = status.validity([summary])
    assert (chip.text, chip.level) == ("figures of a model; server overloaded", "warning")


def test_a_comparison_has_chips(tmp_path: Path) -> None:
    """A comparison counts the runs of A and B together, and names the gates that failed."""
    gate = GateResult("tpot.p50 worse by 5%", "fail", "")
    comparison = Comparison("A", "B", 1, 1, "", "", 0.05, 0.1, [], [], [], [], [gate])
    summaries = [summary_of(tmp_path / name, burst(30, 4)) for name in ("a", "b")]
    chips = compare_chips(comparison, summaries)
    assert [(chip.label, chip.text) for chip in chips] == [
        ("Measurement", "2 of 2 runs valid"),
        ("Requests", "all 60 complete"),
        ("Gates", "1 of 1 failed: tpot.p50 worse by 5%"),
    ]
