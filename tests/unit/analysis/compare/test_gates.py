"""The verdict of `--fail-if`: what fails, what passes, and what is said of the runs that decided it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gates import exit_codes, judged_pair
from loadgen.analysis.compare import compare, document
from loadgen.analysis.compare.gates import GateResult, judge_gates, parse_gates
from loadgen.analysis.objectives import ObjectiveError
from loadgen.analysis.report.terminal import render
from tests.support.compared import limited, row, run, scripted


def judged(condition: str, **changes: Any) -> GateResult:
    """Return the result for a figure of which B takes 10% longer, with an error of 1%."""
    (result,) = judge_gates(parse_gates([f"ttft.p99 {condition}"]), [row(**changes)])
    return result


@pytest.mark.parametrize(
    ("condition", "changes", "verdict", "marginal"),
    [
        ("worse by 5%", {}, "fail", False),
        ("worse", {}, "fail", False),
        ("worse by 9%", {}, "fail", True),  # 10% was observed, from 8.2 to 11.9%
        ("worse by 11%", {}, "pass", True),
        ("worse by 20%", {}, "pass", False),
        ("worse by 5%", {"direction": "higher"}, "pass", False),
        ("worse by 5%", {"b": 0.9, "ratio": 0.9, "difference": -0.1}, "pass", False),
        ("worse by 5%", {"b": 0.9, "ratio": 0.9, "difference": -0.1, "direction": "higher"}, "fail", False),
        ("worse by 5%", {"error": 0.05}, "fail", True),
        ("worse by 5%", {"error": 0.06}, "inconclusive", True),  # the lower limit is 0.9 / 1
        ("worse by 9%", {"error": 0.06}, "inconclusive", True),
        ("worse by 5%", {"b": 1.04, "ratio": 1.04, "error": 0.05}, "pass", True),
        ("worse by 5%", {"b": 1.0, "ratio": 1.0, "error": 0.5}, "pass", True),
        ("worse", {"b": 1.0, "ratio": 1.0, "error": 0.0}, "pass", False),
    ],
)
def test_a_gate_fails_if_its_bound_is_exceeded_and_worse_is_shown(
    condition: str, changes: dict[str, Any], verdict: str, marginal: bool
) -> None:
    """Beyond the bound, a gate fails if B is shown to be worse and is inconclusive if not. Within it, a gate passes."""
    result = judged(condition, **changes)
    assert (result.verdict, result.marginal) == (verdict, marginal)


def test_a_difference_of_more_than_100_percent_is_a_factor() -> None:
    """`6.83x` is easier to read than `+583%`. A sign needs an explanation, and a factor needs none."""
    changes = {"b": 6.83, "ratio": 6.83, "difference": 5.83}
    said = judged("worse by 5%", **changes).said
    assert "6.83x, 95% limits 6." in said
    assert "+ is worse" not in said
    assert "+10.0% (+ is worse)" in judged("worse by 5%").said
    assert "6.83x better" in judged("worse by 5%", **changes, direction="higher").said


def test_a_pass_names_the_smallest_difference_that_would_have_been_shown() -> None:
    """The text and the field agree: B with a little more would have failed, and with a little less would not."""
    equal = {"b": 1.0, "ratio": 1.0, "difference": 0.0, "error": 0.05}
    result = judged("worse by 5%", **equal)
    assert result.smallest_shown == pytest.approx(0.0886, abs=0.001)  # 1.7 errors of 5%
    assert "; these runs would have shown +8.9% or more" in result.said
    for step, verdict in ((0.001, "fail"), (-0.001, "inconclusive")):
        ratio = 1 + result.smallest_shown + step
        assert judged("worse by 5%", **equal | {"b": ratio, "ratio": ratio}).verdict == verdict


def test_an_undecided_gate_says_how_many_runs_would_decide() -> None:
    """The number of runs in each group, in the text and in the result; so many of them do decide."""
    few = {"error": 0.07, "count": 3, "degrees_of_freedom": 4.0, "more_of": "runs"}
    result = judged("worse by 5%", **few)
    assert result.verdict == "inconclusive"
    assert result.needs_more
    assert f"; about {result.needs_more} more runs in each would decide it" in result.said
    for more, verdict in ((result.needs_more, "fail"), (result.needs_more - 1, "inconclusive")):
        runs = 3 + more
        many = few | {"error": 0.07 * (3 / runs) ** 0.5, "count": runs, "degrees_of_freedom": 2.0 * runs - 2}
        assert judged("worse by 5%", **many).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "inconclusive"),
        ({"b": 1.04, "ratio": 1.04}, "pass"),
        ({"b": None, "ratio": None, "difference": None}, "inconclusive"),
        ({"a": 0.0, "ratio": None, "difference": 1.1}, "inconclusive"),
        ({"a": 0.0, "b": 0.0, "ratio": None, "difference": 0.0}, "pass"),
    ],
)
def test_a_figure_without_a_test_passes_only_within_the_bound(changes: dict[str, Any], verdict: str) -> None:
    """The reason is given, and no difference is said to be excluded. A figure without a value cannot pass."""
    result = judged("worse by 5%", **{"p_value": None, "why": "too few samples"} | changes)
    assert (result.verdict, result.limits, result.smallest_shown) == (verdict, None, None)
    assert result.said.endswith("; not tested, so no difference would have been shown: too few samples")


def test_several_gates_share_the_error_rate() -> None:
    """Each of two limits has 97.5% confidence, so that 5% is the chance of any false failure."""
    alone = judged("worse by 8%", error=0.05)
    both = judge_gates(parse_gates(["ttft.p99 worse by 8%", "ttft.p99 worse by 50%"]), [row(error=0.05)])
    assert (alone.verdict, alone.confidence) == ("fail", 0.95)
    assert (both[0].verdict, both[0].confidence) == ("inconclusive", 0.975)
    assert "97.5% limits" in both[0].said


def test_wrong_conditions_are_all_named() -> None:
    """One line for each, and what is allowed."""
    wrong = [
        "ttft worse by 5%",
        "ttft.p99 worse by 5",
        "nothing worse",
        "ttft.p99 better by 1%",
        "ttft.p42 worse",
        "complete.p50 worse",
    ]
    with pytest.raises(ObjectiveError) as error:
        parse_gates(["complete worse by 1%", "output_tokens_per_s worse", *wrong])
    assert len(str(error.value).splitlines()) == len(wrong)
    assert "5 has no unit: write 5%" in str(error.value)
    assert "worse by 5%" in error.value.hint


def test_runs_of_a_limited_client_decide_nothing(tmp_path: Path) -> None:
    """Even equal figures do not pass if the client was the limit in every run of a side."""
    one = run(tmp_path / "one")
    (result,) = compare([limited(one)], [one], gates=parse_gates(["tpot.p50 worse by 5%"])).gates
    assert result.verdict == "inconclusive"
    assert "the client was the limit" in result.said


def test_a_failed_gate_is_worse_in_the_table_too(tmp_path: Path) -> None:
    """A difference within the margin of the table fails a stricter gate, and the table then says so."""
    a = [scripted(tmp_path / f"a{number}", seed=number) for number in range(3)]
    b = [scripted(tmp_path / f"b{number}", itl_ms=20.6, seed=number + 9) for number in range(3)]
    without = {figure.figure: figure.verdict for figure in compare(a, b).rows}
    gated = compare(a, b, gates=parse_gates(["tpot.p50 worse by 1%"]))
    assert without["tpot.p50"] == "no difference"
    assert [result.verdict for result in gated.gates] == ["fail"]
    assert {figure.figure: figure.verdict for figure in gated.rows}["tpot.p50"] == "worse"
    text = " ".join(render(document(gated)).split())
    assert "fail: tpot.p50 worse by 1%: " in text


def test_json_has_the_limits_and_what_would_have_been_shown(tmp_path: Path) -> None:
    """Two identical servers pass, with the limits of the difference, the mark and the smallest difference."""
    one = run(tmp_path / "one")
    (condition,) = compare([one], [one], gates=parse_gates(["tpot.p50 worse by 5%"])).json()["conditions"]
    assert (condition["verdict"], condition["observed"], condition["bound"]) == ("pass", 0.0, 0.05)
    low, high = condition["limits"]
    assert low < 0 < high
    assert condition["smallest_shown"] == pytest.approx(1 / (1 + low) - 1, abs=1e-5)
    assert condition["marginal"] == (high > 0.05)


@pytest.mark.parametrize("load", ["closed loop of 16", "Poisson, 5 per second"])
def test_identical_servers_pass_and_slower_ones_fail(load: str) -> None:
    """Pairs of simulated servers with three repeats each: none of the identical ones fails a gate on TPOT, and all that
    are 10% slower do. The repeats of a Poisson load differ by more than 5%, so only equal seeds can show that."""
    for slower, code in ((1.0, 0), (1.1, 4)):
        results = [judged_pair(load, 0.01, slower, pair) for pair in range(2)]
        assert exit_codes(results)[code] == len(results)
