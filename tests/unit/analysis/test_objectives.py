"""Expressions of objectives: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.analysis.objectives import HINT, ObjectiveError, check_no_parts, parse

ROOT = Path(__file__).parents[3]

GOOD = [
    ("ttft.p99 < 500ms", "ttft", "p99", "<", 0.5, "s"),
    ("tpot.p50<=30ms", "tpot", "p50", "<=", 0.03, "s"),
    ("  e2e.mean   <  2s ", "e2e", "mean", "<", 2.0, "s"),
    ("itl.max >= 250 us", "itl", "max", ">=", 0.00025, "s"),
    ("normalised.min > .5s", "normalised", "min", ">", 0.5, "s"),
    ("ttft_due.p99.9 < 1.5s", "ttft_due", "p99.9", "<", 1.5, "s"),
    ("icl.p1 > 0s", "icl", "p1", ">", 0.0, "s"),
    ("skew < 20ms", "skew", "", "<", 0.02, "s"),
    ("complete >= 99.9%", "complete", "", ">=", 0.999, "share"),
    ("complete >= 100%", "complete", "", ">=", 1.0, "share"),
    ("failed <= 3", "failed", "", "<=", 3.0, "requests"),
    ("truncated <= 0", "truncated", "", "<=", 0.0, "requests"),
    ("dropped < 0.1%", "dropped", "", "<", 0.001, "share"),
    ("output_tokens_per_s > 1000", "output_tokens_per_s", "", ">", 1000.0, "per second"),
    ("requests_per_s >= 12.5", "requests_per_s", "", ">=", 12.5, "per second"),
]

BAD = [
    ("", "the comparison is missing"),
    ("ttft.p99", "the comparison is missing"),
    ("ttft.p99 == 500ms", "the comparison is missing"),
    ("< 500ms", "'' is not a figure"),
    ("goodput.p50 > 5", "goodput is a single figure"),
    ("TTFT.p99 < 5", "'TTFT.p99' is not a figure"),
    ("1ms < ttft.p99 < 5ms", "'1ms' is not a figure"),
    ("ttft < 500ms", "ttft is a distribution; name one of its statistics, such as ttft.p99"),
    ("ttft.p100 < 1s", "'p100' is not a statistic"),
    ("ttft.p0.5 < 1s", "'p0.5' is not a statistic"),
    ("ttft.p99.95 < 1s", "'p99.95' is not a statistic"),
    ("ttft.median < 1s", "'median' is not a statistic"),
    ("ttft.p99 =< 1s", "'p99 =' is not a statistic"),
    ("complete.p99 > 1", "complete is a single figure; remove '.p99'"),
    ("skew. < 1ms", "skew is a single figure; remove '.'"),
    ("ttft.p99 <", "'' is not a bound"),
    ("ttft.p99 < -5ms", "'-5ms' is not a bound"),
    ("ttft.p99 < fast", "'fast' is not a bound"),
    ("ttft.p99 < 5 ms or so", "'5 ms or so' is not a bound"),
    ("ttft.p99 < 5day", "'day' is not a unit of ttft; use s, ms, us"),
    ("ttft.p50 < 800", "800 has no unit: write 800ms or 800s"),
    ("skew < .5", ".5 has no unit: write .5ms or .5s"),
    ("attainment >= 95", "95 has no unit: write 95%"),
    ("skew < 5%", "'%' is not a unit of skew"),
    ("complete >= 99.9ms", "'ms' is not a unit of complete; use no unit, %"),
    ("output_tokens_per_s > 1k", "'k' is not a unit of output_tokens_per_s; use no unit"),
    ("failed < 0.5", "'0.5' is not a number of requests; write 0.5% for a share"),
    ("complete >= 101%", "a share is at most 100%"),
]


@pytest.mark.parametrize(("text", "figure", "statistic", "comparison", "bound", "unit"), GOOD)
def test_an_expression_means_what_it_says(
    text: str, figure: str, statistic: str, comparison: str, bound: float, unit: str
) -> None:
    """Figure, statistic and comparison as written; the bound is the float nearest to it in s, as a share, or plain."""
    (found,) = parse([text])
    assert (found.figure, found.statistic, found.comparison, found.bound, found.unit) == (
        figure,
        statistic,
        comparison,
        bound,
        unit,
    )
    assert found.text == " ".join(text.split())


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_wrong_expression_is_quoted_with_what_is_wrong(text: str, message: str) -> None:
    """The message names the expression and its bad part; the hint lists what is allowed."""
    with pytest.raises(ObjectiveError) as error:
        parse([text])
    assert str(error.value).startswith(f"--assert {text!r}: ")
    assert message in str(error.value)
    assert error.value.hint == HINT


def test_every_mistake_is_named_at_once() -> None:
    """One line for each wrong expression and none for the right ones."""
    with pytest.raises(ObjectiveError) as error:
        parse([text for text, _ in BAD] + [good[0] for good in GOOD])
    lines = str(error.value).splitlines()
    assert len(lines) == len(BAD)
    assert all(message in line for line, (_, message) in zip(lines, BAD, strict=True))


@pytest.mark.parametrize(
    ("comparison", "below", "at", "above"),
    [("<", True, False, False), ("<=", True, True, False), (">", False, False, True), (">=", False, True, True)],
)
def test_a_bound_is_kept_on_its_side(comparison: str, below: bool, at: bool, above: bool) -> None:
    """Only `<=` and `>=` keep to the bound itself."""
    (objective,) = parse([f"ttft.p50 {comparison} 30ms"])
    assert [objective.satisfied_by(value) for value in (0.0299, 0.03, 0.0301)] == [below, at, above]


@pytest.mark.parametrize(("statistic", "share"), [("p50", 0.5), ("p99.9", 0.999), ("p1", 0.01), ("mean", None)])
def test_percentiles_are_shares(statistic: str, share: float | None) -> None:
    """p99.9 is 0.999 exactly; a mean is no percentile."""
    assert parse([f"e2e.{statistic} < 1s"])[0].percentile == share


def test_reading_them_costs_no_heavy_import() -> None:
    """They are read before a burst starts, which must not wait for numpy."""
    program = "import sys, loadgen.analysis.objectives; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=60).returncode == 0


def test_an_objective_may_name_a_class_or_a_model() -> None:
    """The name stands before the last colon, because names of models may contain colons."""
    (objective,) = parse(["llama:70b: ttft.p99 < 1s"])
    assert (objective.part, objective.figure, objective.statistic) == ("llama:70b", "ttft", "p99")
    assert parse(["ttft.p99 < 1s"])[0].part == ""
    with pytest.raises(ObjectiveError, match="no class of traffic, model or replica is named before the colon"):
        parse([": ttft.p99 < 1s"])


def test_a_sweep_judges_all_requests_together() -> None:
    """Where objectives on parts are impossible, the message says what to write."""
    with pytest.raises(ObjectiveError, match="all requests are judged together, not those of 'chat'") as error:
        check_no_parts(parse(["chat: ttft.p99 < 1s"]), "--objective")
    assert error.value.hint == "Write 'ttft.p99 < 1s'."
