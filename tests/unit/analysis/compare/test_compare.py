"""Comparing runs: the pieces against independent references, and what a comparison says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as changed
from scipy import stats as reference

from benchmarks.same_server import TUNING, Chance, alarms, one_run
from loadgen.analysis import stats
from loadgen.analysis.compare import (
    FIGURES,
    ComparedRun,
    compare,
    document,
    figures,
    read_run,
    remark,
    run_variance,
    unequal_work,
)
from loadgen.analysis.compare.gates import parse_gates
from loadgen.analysis.compare.run_variance import Samples, split_offsets
from loadgen.analysis.report import markdown
from loadgen.analysis.report.terminal import render
from loadgen.analysis.summary import Summary
from loadgen.cli.command_help import SEPARATOR
from loadgen.cli.compare import split_sides
from loadgen.errors import PlanError
from tests.support.compared import limited, row, run
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, header, run_of


def test_holm_agrees_with_its_definition() -> None:
    """The smallest of m p-values is multiplied by m, the next by m - 1, never falling; others do not count."""
    assert figures.holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert figures.holm([None]) == [None]
    assert figures.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("a", "b"), [((3, 20), (9, 20)), ((0, 5), (5, 5)), ((1000, 1000), (1000, 1000)), ((1, 3), (8, 9))]
)
def test_shares_agree_with_scipy(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Fisher's exact test to the last table; Newcombe's interval holds the difference."""
    table = [[a[0], a[1] - a[0]], [b[0], b[1] - b[0]]]
    assert stats.fisher_exact(a, b) == pytest.approx(reference.fisher_exact(table).pvalue, rel=1e-6)
    difference = b[0] / b[1] - a[0] / a[1]
    low, high = stats.share_difference_interval(a, b, difference, stats.wilson_interval)
    assert low <= difference <= high


@pytest.mark.parametrize("seed", [1, 2])
def test_welch_agrees_with_scipy(seed: int) -> None:
    """Difference, p-value and interval of groups of unequal size and spread."""
    random = np.random.default_rng(seed)
    a, b = random.normal(5, 1, 4).tolist(), random.normal(6, 3, 7).tolist()
    expected = reference.ttest_ind(b, a, equal_var=False)
    found = stats.difference_of_means(a, b)
    assert figures.p_value(*found) == pytest.approx(expected.pvalue, rel=1e-6)
    assert figures.confidence_interval(*found) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b"),
    [([10.0, 11.0, 10.5], [20.0, 19.0, 21.5]), ([1.0, 1.1], [1.0, 1.2]), ([5.0, 5.5, 5.2, 5.1], [5.3, 4.9])],
)
def test_the_interval_of_a_ratio_is_welchs(a: list[float], b: list[float]) -> None:
    """On logarithms, as scipy has it."""
    found = figures.compare_values("e2e.p50", a, b)
    logs = [[math.log(value) for value in values] for values in (b, a)]
    expected = reference.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert found.ratio == pytest.approx(math.exp(sum(logs[0]) / len(b) - sum(logs[1]) / len(a)))
    assert found.ratio_ci95 == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-6)


@pytest.mark.parametrize(("a", "b"), [([1.0, None], [2.0, 2.1]), ([0.0, 1.0], [1, 1]), ([1e-75, 1e75], [1, 1])])
def test_of_what_has_no_ratio_no_interval_is_claimed(a: list[float | None], b: list[float | None]) -> None:
    """A figure that a run lacks is not left out quietly, and runs may differ beyond all measure."""
    assert figures.compare_values("e2e.p50", a, b).ratio_ci95 is None


def test_pairs_of_runs_are_compared_by_the_paired_t_test() -> None:
    """On logarithms, as scipy has it, with an interval of the ratio and a bound from how the pairs differ."""
    a, b = [10.0, 13.0, 11.0, 15.0], [11.1, 14.2, 12.3, 16.4]
    found = figures.compare_values("e2e.p50", a, b, 0.2, paired=True)
    logs_a, logs_b = ([math.log(value) for value in values] for values in (a, b))
    expected = reference.ttest_rel(logs_b, logs_a)
    interval = expected.confidence_interval(0.95)
    assert found.ratio_ci95 == pytest.approx((math.exp(interval.low), math.exp(interval.high)), rel=1e-6)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert (found.paired, found.test) == (True, figures.PAIRED_RUNS)
    unpaired = figures.compare_values("e2e.p50", a, b, 0.2)
    assert unpaired.error > 5 * found.error
    (pairs, single) = figures.judge_figures([replace(found, p_value=0.2, error=0.1), replace(unpaired, p_value=0.2)])
    assert pairs.needs_more
    assert single.needs_more


@pytest.mark.parametrize(
    ("changes", "paired"),
    [
        ({"arrivals": "poisson:20"}, True),
        ({"arrivals": "closed:4", "output_tokens": "uniform:8..64"}, True),
        ({"arrivals": "closed:4"}, False),  # each repeat has the same load
        ({"arrivals": "burst"}, False),
    ],
)
def test_runs_are_paired_if_the_seed_determines_the_load(changes: dict[str, Any], paired: bool, tmp_path: Path) -> None:
    """Random arrivals or lengths, at least three repeats, and the same seeds on both sides, in any order."""
    plan = header(60).plan | {"input_tokens": 512, "output_tokens": 8} | changes

    def group(name: str, seeds: Sequence[int]) -> list[Summary]:
        return [run(tmp_path / f"{name}{seed}", plan=plan | {"seed": seed}).summary for seed in seeds]

    a, b = group("a", (7, 8, 9)), group("b", (9, 8, 7))
    assert figures.have_equal_random_loads(a, b) == paired
    assert all(row.paired == paired for row in figures.compare_groups(a, b, ["tpot.p50"]))
    assert not figures.have_equal_random_loads(a, group("c", (8, 9, 10)))
    assert not figures.have_equal_random_loads(a[:2], b[1:])


def test_repeats_that_agree_exactly_differ_from_others_that_do() -> None:
    """No scatter, no margin."""
    found = figures.compare_values("e2e.p50", [1.0, 1.0], [2.0, 2.0])
    assert (found.ratio, found.ratio_ci95) == (pytest.approx(2.0), pytest.approx((2.0, 2.0)))


def test_one_run_against_many_borrows_their_variation() -> None:
    """A single run is as uncertain as one of the others: the pooled t test of one against many."""
    a, b = [5.0], [6.0, 6.4, 5.9, 6.1]
    assert figures.p_value(*stats.difference_of_means(a, b)) == pytest.approx(
        reference.ttest_ind(b, a).pvalue, rel=1e-6
    )


def test_pairs_agree_with_mann_whitney() -> None:
    """Without anything that moves all of B, the share of pairs is U / nm, and the test Brunner and Munzel's."""
    random = np.random.default_rng(3)
    a, b = random.gamma(3, 1, 700).round(2), random.gamma(3, 1.1, 900).round(2)  # with ties
    both = [Samples(each, split_offsets(len(each), len(each)), strata=False) for each in (a, b)]
    share, error, p = run_variance.probability_of_superiority(both[0], both[1], 0.0)
    assert share == pytest.approx(reference.mannwhitneyu(b, a).statistic / (len(a) * len(b)))
    expected = reference.brunnermunzel(a, b, distribution="normal")
    assert p == pytest.approx(expected.pvalue, rel=0.02)
    assert error > 0


@pytest.mark.parametrize("count", [11, 50, 333])
def test_half_of_the_pairs_of_equal_samples_are_slower(count: int) -> None:
    """The share is exactly one half, so the page does not show a difference of 1e-15."""
    values = np.random.default_rng(count).gamma(3, 1, count)
    samples = Samples(values, split_offsets(count, count), strata=False)
    assert run_variance.probability_of_superiority(samples, samples, 0.01)[0] == 0.5


def test_the_bootstrap_of_a_quantile_agrees_with_drawing() -> None:
    """What the Beta distribution of an order statistic says is what drawing with replacement does."""
    values = np.random.default_rng(4).gamma(2, 1, 800)
    samples = Samples(values, split_offsets(800, 800), strata=False)
    expected = reference.bootstrap(
        (values,), lambda each, axis: np.log(np.quantile(each, 0.9, axis=axis)), n_resamples=2000, method="basic", rng=5
    )
    found = run_variance.quantile_error(samples, 0.9, np.random.default_rng(6))
    assert found == pytest.approx(expected.standard_error, rel=0.1)


def test_dependent_samples_are_worth_less_and_strata_more() -> None:
    """Samples that come in runs of equal ones count once per run; a rise by plan within a burst is no chance."""
    random = np.random.default_rng(7)
    runs = np.repeat(random.normal(0, 1, 64), 25)
    assert (
        run_variance.effective_size(Samples(runs, split_offsets(1600, 16), strata=False), 0.5, float(np.median(runs)))
        < 200
    )
    ramp = np.arange(1600) + random.normal(0, 5, 1600)
    assert (
        run_variance.effective_size(Samples(ramp, split_offsets(1600, 100), strata=True), 0.5, float(np.median(ramp)))
        > 16_000
    )


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "worse"),
        ({"direction": "higher"}, "better"),
        ({"ratio": 0.9, "b": 0.9}, "better"),
        ({"p_value": 0.2, "error": 0.08}, "inconclusive"),
        ({"ratio": 1.01, "p_value": 0.3}, "no difference"),
        ({"ratio": 1.02, "error": 0.001, "p_value": 1e-9}, "no difference"),
        ({"p_value": None}, "inconclusive"),
    ],
)
def test_four_verdicts(changes: dict[str, Any], verdict: str) -> None:
    """Within the margin there is no difference that matters, however sure it is; otherwise the test decides."""
    (found,) = figures.judge_figures([row(**changes)])
    assert found.verdict == verdict
    assert (found.needs_more is not None) == (verdict == "inconclusive" and found.p_value is not None)


def test_the_number_that_would_tell_does() -> None:
    """With so many more runs the interval is as narrow as was aimed for, and with one fewer it is not."""
    undecided = row(more_of="runs", count=3, error=0.1, degrees_of_freedom=4.0, p_value=0.4)
    (found,) = figures.judge_figures([undecided])
    assert found.needs_more
    for more, tells in ((found.needs_more, True), (found.needs_more - 1, False)):
        runs = 3 + more
        margin = reference.t.ppf(0.975, 2 * runs - 2) * 0.1 * (3 / runs) ** 0.5
        assert (margin <= found.effect) == tells


def test_a_and_b_never_have_the_same_name(tmp_path: Path) -> None:
    """Runs of one folder are named by their repeats, and runs of equal names by their start times."""
    repeats = [run(tmp_path / "h100" / f"repeat-{number}", seed=number) for number in (1, 2)]
    compared = compare(repeats[:1], repeats[1:])
    assert (compared.name_a, compared.name_b) == ("h100/repeat-1", "h100/repeat-2")
    times = ("2026-11-21T09:00:00Z", "2026-11-22T09:00:00Z")
    facts = repeats[0].summary
    same = [replace(repeats[0], summary=changed(facts, run=changed(facts.run, started_at=time))) for time in times]
    compared = compare(same[:1], same[1:])
    assert compared.name_a == "h100, 2026-11-21 09:00:00 UTC"
    assert compared.name_b == "h100, 2026-11-22 09:00:00 UTC"


def test_everything_equal_is_no_difference(tmp_path: Path) -> None:
    """A run against itself: every figure that is tested has the ratio 1 and none is better or worse."""
    one = run(tmp_path / "run", n=700)
    found = compare([one], [one])
    assert alarms(found) == []
    assert [each.figure for each in found.rows] == list(FIGURES)
    assert all(each.ratio == 1 for each in found.rows if each.ratio is not None)
    assert not found.unequal


@pytest.mark.parametrize("lost", [60, 59, 58])
def test_hardly_any_samples_are_never_a_verdict(lost: int, tmp_path: Path) -> None:
    """No, one or two complete requests: what cannot be computed is said to be untold, and the failures are worse."""
    found = compare([run(tmp_path / "a")], [run(tmp_path / "b", lost=lost)])
    by_figure = {each.figure: each for each in found.rows}
    assert by_figure["complete"].verdict == "worse"
    assert all(each.verdict == "inconclusive" and each.why for name, each in by_figure.items() if "ttft" in name)
    assert any("not complete" in note for note in found.notes)
    assert "inconclusive" in render(document(found))
    assert "inconclusive" in markdown(document(found))


def test_unequal_work_is_named(tmp_path: Path) -> None:
    """Each thing that makes work unequal is found, with what it was on either side; another server, what it admits, how
    it is asked and whether its client was the bottleneck are none."""
    a = run(tmp_path / "a")
    assert not unequal_work([a], [run(tmp_path / "b", server="vllm")])
    plan = header(60).plan
    server = header(60).server
    for name, changes in {
        "input_tokens": {"plan": plan | {"input_tokens": 128}},
        "seed": {"plan": plan | {"seed": 8}},
        "extra_body": {"plan": plan | {"extra_body": {"temperature": 0.7}}},
        "ignore_eos": {"plan": plan | {"ignore_eos": False}},
        "image": {"plan": plan | {"image": ["512x512"]}},
        "header": {"plan": plan | {"header": ["X-Lane: slow"]}},
        "arrivals": {"plan": plan | {"arrivals": "poisson:3"}},
        "clock": {"simulated": True},
        "model": {"facts": server | {"model": "other"}},
    }.items():
        assert name in {each.what for each in unequal_work([a], [run(tmp_path / name, **changes)])}, name
    assert not unequal_work([a], [limited(a)])
    chat = {"plan": plan | {"endpoint": "chat"}, "facts": server | {"model": f"meta/{server['model']}", "limits": {}}}
    other = run(tmp_path / "chat", **chat)
    assert not unequal_work([a], [other])
    notes = compare([a], [other]).notes
    assert "Endpoint: generate in A, chat in B." in notes
    assert any(note.startswith("Server limits: max_concurrent_requests 1000") for note in notes)
    third = run(tmp_path / "third", plan=plan | {"repeat": 3, "repeats": 3, "seed": 9})
    assert not unequal_work([a], [third])


def test_random_seeds_are_equal_work(tmp_path: Path) -> None:
    """Different seeds are a note if one of them was drawn at random. Cached prompts are never equal work."""
    plan = header(60).plan
    a = run(tmp_path / "a", plan=plan | {"seed": 812, "seed_choice": "random"})
    for name, seed_choice in (("random", "random"), ("stated", "stated")):
        b = run(tmp_path / name, plan=plan | {"seed": 99, "seed_choice": seed_choice})
        assert not unequal_work([a], [b])
        assert any("run B with --seed 812" in note for note in compare([a], [b]).notes)
    same = run(tmp_path / "same", plan=plan | {"seed": 812, "seed_choice": "stated"})
    assert not any("Seeds differ" in note for note in compare([a], [same]).notes)
    records = burst(60, 8)
    for record in records:
        record.marks = {"cached_prompt_tokens": record.prompt_tokens or 0}
    cached = read_run(run_of(tmp_path / "cached", records, plan=plan | {"seed": 99, "seed_choice": "random"}).path)
    assert [difference.what for difference in unequal_work([a], [cached])] == ["prompts"]


def test_answers_that_might_end_early_are_compared_and_said_not_to_be_equal(tmp_path: Path) -> None:
    """Two such runs are not refused over their lengths; one such run beside another that fixed them is."""
    early = header(60).plan | {"output_tokens": "max:8"}
    a, b = run(tmp_path / "a", plan=early), run(tmp_path / "b", chunks=5, plan=early)
    found = compare([a], [b])
    assert not found.unequal
    assert (
        "Responses were allowed to end early (--output-tokens max:...), so the runs are not strictly comparable: on "
        "average 8.0 tokens in A and 5.0 tokens in B."
    ) in found.notes
    assert "output_tokens" in {each.what for each in unequal_work([a], [run(tmp_path / "c")])}


def test_groups_of_repeats_are_judged_between_runs(tmp_path: Path) -> None:
    """Three runs each, one group 30% slower: worse by Welch's t, with runs as what more of would help."""
    a = [run(tmp_path / f"a{place}", seed=place) for place in range(3)]
    b = [run(tmp_path / f"b{place}", seed=place + 9, pace=1.6) for place in range(3)]
    found = compare(a, b, gates=parse_gates(["tpot.p50 worse by 5%", "tpot.p50 worse by 500%"]))
    by_figure = {each.figure: each for each in found.rows}
    assert by_figure["tpot.p50"].verdict == "worse"
    assert by_figure["output_tokens_per_s"].more_of == "runs"
    assert not any(name.endswith("pairs") for name in by_figure)
    assert [each.verdict for each in found.gates] == ["fail", "pass"]
    assert "Welch" in found.method


def test_all_complete_is_not_known_to_the_last_request() -> None:
    """Groups of which every request was complete: as wide as the exact interval of so many requests, and never 0."""
    found = figures.compare_group_shares("complete", [(200, 200)] * 5, [(200, 200)] * 5)
    low, high = found.difference_ci95 or (0.0, 0.0)
    miss = 1 - reference.binomtest(1000, 1000).proportion_ci().low
    assert (low, high) == pytest.approx((-miss, miss))
    (said,) = figures.judge_figures([found])
    assert (said.verdict, said.no_larger_than) == ("no difference", pytest.approx(miss))


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([(10, 10)] * 5, [(9, 10)] * 5, "inconclusive"),  # alike run by run, and yet five of fifty may be chance
        ([(200, 200)] * 5, [(180, 200)] * 5, "worse"),
        ([(10, 10), (2, 10), (10, 10)], [(3, 10), (10, 10), (3, 10)], "inconclusive"),
    ],
)
def test_shares_of_groups_are_no_surer_than_their_requests(
    a: list[tuple[int, int]], b: list[tuple[int, int]], verdict: str
) -> None:
    """Both tests must see it: between runs (Welch), and over all requests (Fisher)."""
    found = figures.compare_group_shares("complete", a, b)
    table = [[sum(good for good, _ in each), sum(total - good for good, total in each)] for each in (a, b)]
    assert (found.p_value or 0) >= reference.fisher_exact(table).pvalue * (1 - 1e-6)
    (said,) = figures.judge_figures([found])
    assert said.verdict == verdict


def with_outputs(path: Path, number: int, valid: int) -> ComparedRun:
    """A run of `number` responses with JSON, of which the first `valid` fit their schema."""
    records = [
        complete(index, [50 * MS, 70 * MS], marks={"valid_output": int(index < valid)}) for index in range(number)
    ]
    return read_run(run_of(path, records).path.parent)


def test_shares_of_valid_outputs_are_compared(tmp_path: Path) -> None:
    """They have an interval and a verdict, like the share of complete requests, and may have a gate."""
    a, b = with_outputs(tmp_path / "a", 200, 198), with_outputs(tmp_path / "b", 200, 150)
    found = compare([a], [b], gates=parse_gates(["valid_output worse by 5%"]))
    row = next(row for row in found.rows if row.figure == "valid_output")
    assert (row.a, row.b, row.unit, row.verdict) == (0.99, 0.75, "share", "worse")
    assert row.difference_ci95 is not None
    assert row.difference_ci95[0] < -0.24 < row.difference_ci95[1]
    assert found.gates[0].verdict == "fail"
    assert "valid_output" in render(document(found))
    repeated = compare([a] * 3, [b] * 3)
    assert next(row for row in repeated.rows if row.figure == "valid_output").verdict == "worse"


def test_shares_that_a_run_does_not_have_are_not_compared(tmp_path: Path) -> None:
    """A gate on such a share says why it was not tested."""
    a, b = with_outputs(tmp_path / "a", 20, 20), run(tmp_path / "b")
    assert "valid_output" not in {row.figure for row in compare([a], [b]).rows}
    (gate,) = compare([a], [b], gates=parse_gates(["valid_output worse"])).gates
    assert gate.verdict == "inconclusive"
    assert "no output was checked" in gate.said


def test_sides_are_told_apart() -> None:
    """Two runs are one each; more need the two hyphens."""
    between = SEPARATOR
    assert split_sides(["a", "b"]) == split_sides(["a", between, "b"]) == ([Path("a")], [Path("b")])
    assert split_sides(["a1", "a2", between, "b1"]) == ([Path("a1"), Path("a2")], [Path("b1")])
    for runs in (
        ["a"],
        ["a", "b", "c"],
        ["a", between],
        [between, "a"],
        ["a", between, between, "b"],
        [between, "a", "b"],
    ):
        with pytest.raises(PlanError):
            split_sides(runs)


@pytest.mark.parametrize("scene", TUNING, ids=lambda scene: scene.name)
def test_the_same_server_twice_is_not_called_different(scene: Any) -> None:
    """200 pairs of runs in all, of an engine whose steps vary, linger and stall: at most 5% of them raise any alarm.
    Each run is compared with the one before it.

    The requests wait in one queue and share steps, so that a test which took them for independent fails here.
    """
    runs = [one_run(scene, seed, 64, output=96) for seed in range(51)]
    called = [alarms(compare([before], [after])) for before, after in pairwise(runs)]
    assert sum(bool(each) for each in called) <= 50 * 0.05


def test_single_runs_are_never_surer_than_runs_are_alike() -> None:
    """Runs without any chance within them: the intervals keep the room for what makes whole runs differ."""
    still = Chance(step_cv=0.0, stall_share=0.0)
    scene = replace(TUNING[1], chance=still)
    found = compare([one_run(scene, 1, 400, output=32)], [one_run(scene, 2, 400, output=32)])
    tested = {each.figure: each for each in found.rows if each.p_value is not None}
    assert {"output_tokens_per_s", "e2e.p50"} <= tested.keys()
    assert all(each.error >= run_variance.MIN_RUN_VARIATION for each in tested.values() if each.ratio is not None)
    assert any("at least 2%" in note for note in found.notes)


def test_more_requests_are_no_advice_where_they_cannot_help() -> None:
    """An effect that lies within what runs differ by is told by no number of requests, and the words say what may."""
    wide: dict[str, Any] = {"ratio": 1.045, "error": 0.03, "p_value": 0.2, "degrees_of_freedom": 7.0}
    (found,) = figures.judge_figures([row(**wide, error_floor=0.02)])
    assert (found.verdict, found.needs_more) == ("inconclusive", None)
    assert remark(found).endswith("repeats may")
    (alone,) = figures.judge_figures([row(**wide)])
    (among, *_) = figures.judge_figures([row(**wide)] * 3)
    assert alone.needs_more
    assert among.needs_more
    assert alone.needs_more < among.needs_more  # Holm's method asks more of each of three


def test_a_server_twice_as_slow_is_worse() -> None:
    """In one run each, and from its raw samples: throughput and end-to-end latency."""
    found = compare([one_run(TUNING[1], 1, 400, output=32)], [one_run(TUNING[1], 2, 400, output=32, slower=2.0)])
    called = {each.figure: each.verdict for each in found.rows}
    assert (called["output_tokens_per_s"], called["e2e.p50"], called["ttft.pairs"]) == ("worse", "worse", "worse")
