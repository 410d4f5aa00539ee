"""What repeats of one plan say together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from scipy import stats as reference

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.repeats import describe_over_runs, document, start_states, summarise_repeats
from loadgen.analysis.report.terminal import render
from loadgen.analysis.summary import Summary
from loadgen.plan import Plan
from loadgen.results import runs_in
from tests.support.runs import burst, run_of


def summaries(folder: Path, paces: list[float], n: int = 20) -> list[Summary]:
    """Runs whose server took these multiples of the usual time."""
    return [
        summarise(run_of(folder / str(place), burst(n, 4, seed=place, pace=pace))) for place, pace in enumerate(paces)
    ]


@pytest.mark.parametrize("values", [[3.0, 3.5, 3.1], [5.0, 5.5, 4.5, 5.1, 4.9, 5.3]])
def test_the_interval_is_students(values: list[float]) -> None:
    """Mean, deviation and interval are those of scipy's t distribution over the runs."""
    found = describe_over_runs(list(values))
    low, high = reference.t.interval(0.95, len(values) - 1, found.mean, reference.sem(values))
    assert found.ci95 == pytest.approx([low, high], rel=1e-7)


@pytest.mark.parametrize(
    ("values", "mean"), [([], None), ([4.0], 4.0), ([1.0, 2.0], 1.5), ([1.0, None], None), ([None], None)]
)
def test_too_few_values_have_no_interval(values: list[float | None], mean: float | None) -> None:
    """One run or two have a figure and no interval; a figure that one of the runs lacks is no figure of them all."""
    found = describe_over_runs(values)
    assert (found.mean, found.ci95) == (mean, None)


def test_shares_are_no_surer_than_their_requests(tmp_path: Path) -> None:
    """Three runs of 20 that were all complete: at least so many as the exact interval of 60 of 60 says."""
    low, high = summarise_repeats(summaries(tmp_path, [1.0, 3.0, 2.0])).figures["complete"].ci95
    assert (low, high) == (pytest.approx(reference.binomtest(60, 60).proportion_ci().low), 1.0)


def test_no_interval_extends_below_0(tmp_path: Path) -> None:
    """Three runs that differ widely have a wide interval, but no latency is negative."""
    low, high = summarise_repeats(summaries(tmp_path, [1.0, 9.0, 1.0])).figures["e2e.p50"].ci95
    assert low == 0
    assert high > 0


def test_figures_and_order_of_repeats(tmp_path: Path) -> None:
    """Each figure has the value of each run, in order, by the name it has elsewhere; a percentile of too few samples is
    marked."""
    found = summarise_repeats(summaries(tmp_path, [1.0, 3.0, 2.0]))
    assert found.runs == 3
    values = found.figures["e2e.p50"].values
    assert values == [
        summarise(run_of(tmp_path / "again", burst(20, 4, seed=0))).latency.e2e.p50,
        *values[1:],
    ]
    assert sorted(each or 0 for each in values) == [values[0], values[2], values[1]]
    assert (found.figures["ttft.p99"].thin, found.figures["e2e.p50"].thin) == (True, False)
    text = render(document(found, summaries(tmp_path / "text", [1.0, 3.0, 2.0])))
    assert "95% CI" in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^TTFT p99 +\w+ +[\d.]+\* ", text, re.M)
    assert re.search(r"^TTFT p50 +\w+ +[\d.]+ ", text, re.M)
    assert "Output throughput" in text
    assert "* too few independent samples: p99 662" in text
    assert "ttft.p50" not in text


def test_the_first_repeat_is_cold_unless_warmed_up(tmp_path: Path) -> None:
    """Later runs at the same address are warm; a run after another server's is cold again, whatever came before."""
    first, second = summaries(tmp_path, [1.0, 1.0])
    elsewhere = replace(second, server=replace(second.server, url="http://127.0.0.1:9"))
    warmed = replace(first, requests=replace(first.requests, warmup=8))
    assert start_states([first, second]) == ["cold", "warm"]
    assert start_states([first, elsewhere]) == ["cold", "cold"]
    assert start_states([warmed, second]) == ["warm", "warm"]
    assert "Repeat 1 started cold" in summarise_repeats([first, second]).state_said


def test_each_repeat_has_a_seed_of_its_own() -> None:
    """Or a prefix cache would know its prompts. The plan is the same otherwise, and says which repeat it is."""
    plans = Plan(server="vllm", n=5, seed=7, repeats=3).each_repeat()
    assert [(plan.repeat, plan.repeats, plan.seed) for plan in plans] == [(1, 3, 7), (2, 3, 8), (3, 3, 9)]


def test_a_folder_of_repeats_is_found_in_order(tmp_path: Path) -> None:
    """By number, so that the tenth comes after the ninth; a run by itself stays one."""
    for place in (10, 9, 1):
        run_of(tmp_path / f"repeat-{place}", burst(2, 2))
    assert [each.name for each in runs_in(tmp_path)] == ["repeat-1", "repeat-9", "repeat-10"]
    assert runs_in(tmp_path / "repeat-1") == [tmp_path / "repeat-1"]
