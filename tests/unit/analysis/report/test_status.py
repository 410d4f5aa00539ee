"""The chips below the title of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.analysis.compare import Comparison
from loadgen.analysis.compare import _chips as compare_chips
from loadgen.analysis.compare.gates import GateResult
from loadgen.analysis.frame import build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.held_back import HeldBack
from loadgen.analysis.objectives import ObjectiveVerdict, parse_bounds
from loadgen.analysis.report import findings, run_document, status, tables
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


def test_the_chip_counts_the_lines_that_the_page_marks(tmp_path: Path) -> None:
    """Errors are red lines and warnings are amber ones. The chip on requests states the incomplete ones already."""
    summary = summary_of(tmp_path, [*burst(30, 4), failed(30)])
    assert [finding.id for finding in findings.findings(summary) if finding.level == "error"] == ["complete"]
    assert (status.validity([summary]).text, status.validity([summary]).level) == ("valid", "ok")
    summary.window.unsteady = "9 requests were in flight in the first half, 90 later"
    assert status.validity([summary]).text == "valid, 1 warning"
    known = findings.findings(summary)
    assert findings.verdict(summary, known).sentence == "Valid, with 1 error and 1 warning below."


def test_the_chip_is_red_if_it_counts_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that counts errors has their colour, for one run and for several."""
    summary = summary_of(tmp_path, burst(30, 4))
    known = [*findings.findings(summary), findings.Finding("example", "error", "An example.", "")]
    monkeypatch.setattr(findings, "findings", lambda _: known)
    assert (status.validity([summary]).text, status.validity([summary]).level) == ("valid, 1 error", "error")
    assert status.validity([summary, summary]).level == "error"


def test_a_chip_names_a_simulated_server(tmp_path: Path) -> None:
    """The client of such a run is real. Runs in virtual time have none, so they are counted apart."""
    summary = summary_of(tmp_path, burst(30, 4), simulated=True)
    assert status.validity([summary]).text == "valid (simulated server)"
    modelled = replace(summary, server=replace(summary.server, virtual=True))
    chip = status.validity([summary, modelled, modelled])
    assert (chip.text, chip.level) == ("2 runs modelled, 1 measured, all valid", "ok")


def test_a_tile_shows_the_throughput_before_the_drain(tmp_path: Path) -> None:
    """Readers compare runs by this figure, so it is a figure of its own and not part of the small print."""
    summary = summary_of(tmp_path, burst(30, 4))
    summary.throughput.output_tokens_per_s, summary.throughput.steady_output_tokens_per_s = 900.0, 1000.0
    summary.throughput.tail_share = 0.1
    card = tables.cards(summary)["output"]
    assert card.second == ("1,000", "before the drain, the last 10% of the run")
    assert card.note.startswith("whole run: 120 tokens in ")
    summary.throughput.steady_output_tokens_per_s = 901.0
    assert tables.cards(summary)["output"].second is None


def test_goodput_and_objectives_say_what_they_judge(tmp_path: Path) -> None:
    """Both may be on TTFT: a bound judges each request, and an objective judges a figure of the run."""
    summary = summary_of(tmp_path, burst(30, 4))
    summary.objectives = [verdict("ttft.p99 < 1s", 0.5, 1.0, result="pass")]
    assert status.objectives([summary])[0].label == "Objectives"
    frame = build_frame(burst(30, 4))
    summary = replace(summary, goodput=goodput(frame, parse_bounds(["ttft < 1000s"])))
    assert status.objectives([summary])[0].label == "Objectives of the run"
    note = tables.cards(summary)["goodput"].note
    assert "30 of 30 requests (100%) met the bound on each request, ttft < 1000s" in note


def test_tiles_name_the_objectives_that_failed(tmp_path: Path) -> None:
    """The tile shows the median, so it names the percentile that failed."""
    summary = summary_of(tmp_path, burst(30, 4))
    summary.objectives = [verdict("ttft.p99 < 200ms", 0.653, 0.2), verdict("complete > 99%", 0.5, 0.99, "share")]
    cards = tables.cards(summary)
    assert cards["ttft_s"].failed == ["objective `ttft.p99` 653 > 200 ms"]
    assert cards["requests"].failed == ["objective `complete` 50% < 99%"]
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
        ("ttft.p99 < 500ms", 75.73, 0.5, "s", "`ttft.p99` 75.7 s > 500 ms"),
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
    names = ("ttft.p99 < 1s", "tpot.p99 < 1s", "e2e.p99 < 1s")
    summary.objectives = [verdict(name, 0.5, 1.0, result="pass") for name in names]
    assert status.objectives([summary])[0].text == "3 of 3 met"
    assert status.objectives([summary] * 5)[0].text == "3 of 3 met in each of 5 runs"
    other = replace(summary, objectives=summary.objectives[:1])
    assert status.objectives([summary, other])[0].text == "4 of 4 met"
    summary.objectives = [verdict("ttft.p99 < 1s", 0.5, 1.0, result="inconclusive")]
    (chip,) = status.objectives([summary])
    assert (chip.text, chip.level) == ("1 of 1 inconclusive: `ttft.p99` 0.500 < 1 s", "warning")


def test_a_simulation_in_virtual_time_claims_no_validity(tmp_path: Path) -> None:
    """No client took part, so neither the chip nor the verdict speaks of a client."""
    summary = summary_of(tmp_path, burst(30, 4), simulated=True)
    summary.server.virtual = True
    assert status.validity([summary]) == status.MODELLED
    known = findings.findings(summary)
    assert (known[0].id, known[0].level) == ("client", "note")
    assert (findings.verdict(summary, known).id, findings.verdict(summary, known).level) == ("simulated", "note")
    assert run_document.list_title([summary]) == "Checks"
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
