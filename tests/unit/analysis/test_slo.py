"""Verdicts on fabricated runs whose figures and intervals are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from loadgen.analysis.objectives import ObjectiveVerdict, parse
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.steady_window import frame_of_run
from tests.support.runs import (
    MILLISECOND_NS,
    complete,
    dropped,
    failed,
    header,
    rejected,
    run_of,
    summarise,
    truncated,
    typed,
)

Judge = Callable[..., list[ObjectiveVerdict]]


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """Judges a run of these records, `n` of which were asked for; with `confidence` by the whole interval."""

    def of(
        records: Sequence[Record], *expressions: str, n: int | None = None, confidence: float | None = None
    ) -> list[ObjectiveVerdict]:
        plan = header(n or len(records)).plan
        run = run_of(tmp_path / "run", records, plan=plan)
        return judge(parse(expressions), frame_of_run(run), typed(summarise(run)), confidence)

    return of


def rising(n: int, last_ms: int | None = None) -> list[Record]:
    """n complete requests; first tokens come evenly up to `last_ms`, so the k-th TTFT is k ms for n of n ms."""
    step_ns = (last_ms or n) * MILLISECOND_NS / n
    return [complete(place, [round((place + 1) * step_ns)] * 2) for place in range(n)]


def mixed() -> list[Record]:
    """990 complete, 3 truncated, 6 failed, 1 dropped."""
    endings = [truncated(place, [MILLISECOND_NS]) for place in range(990, 993)]
    return [*rising(990), *endings, *(failed(place) for place in range(993, 999)), dropped(999)]


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        # p99 of 1 to 1000 ms is 990 ms; the 983rd and the 997th enclose it.
        ("ttft.p99 < 998ms", "pass"),
        ("ttft.p99 <= 997ms", "pass"),
        ("ttft.p99 < 997ms", "inconclusive"),
        ("ttft.p99 < 991ms", "inconclusive"),
        ("ttft.p99 < 989ms", "inconclusive"),
        ("ttft.p99 <= 983ms", "inconclusive"),
        ("ttft.p99 < 983ms", "fail"),
        ("ttft.p99 > 982ms", "pass"),
        ("ttft.p99 >= 983ms", "pass"),
        ("ttft.p99 > 983ms", "inconclusive"),
        ("ttft.p99 > 997ms", "fail"),
        # The median is 500.5 ms; the 469th and the 532nd enclose it.
        ("ttft.p50 < 533ms", "pass"),
        ("ttft.p50 < 501ms", "inconclusive"),
        ("ttft.p50 < 469ms", "fail"),
        # p99.9 has no sample beyond it that could bound it.
        ("ttft.p99.9 < 1h", "inconclusive"),
        # The mean is 500.5 ms, give or take 1.962 * 288.8 ms / sqrt(1000) = 17.9 ms.
        ("ttft.mean < 519ms", "pass"),
        ("ttft.mean < 518ms", "inconclusive"),
        ("ttft.mean < 483ms", "inconclusive"),
        ("ttft.mean < 482ms", "fail"),
        ("ttft.max <= 1s", "pass"),
        ("ttft.max < 1s", "fail"),
        ("ttft.min >= 1ms", "pass"),
        ("ttft.min > 1ms", "fail"),
    ],
)
def test_a_confidence_demands_the_whole_interval_of_a_latency(judged: Judge, expression: str, verdict: str) -> None:
    """With --confidence the whole interval passes or fails, and a bound inside it is inconclusive."""
    (found,) = judged(rising(1000), expression.replace("1h", "3600s"), confidence=0.95)
    assert found.verdict == verdict
    assert found.marginal == (verdict == "inconclusive")
    assert (found.requests, found.left_out, found.whole_interval) == (1000, 0, True)


@pytest.mark.parametrize(
    ("expression", "verdict", "marginal"),
    [
        # p99 of 1 to 1000 ms is 990.01 ms, from 983 to 997 ms.
        ("ttft.p99 < 998ms", "pass", False),
        ("ttft.p99 < 991ms", "pass", True),
        ("ttft.p99 < 990ms", "fail", True),
        ("ttft.p99 < 983ms", "fail", False),
        ("ttft.p99 > 990ms", "pass", True),
        ("ttft.p50 < 501ms", "pass", True),
        ("ttft.p50 < 500ms", "fail", True),
        ("ttft.p99.9 < 3600s", "pass", True),
        ("ttft.mean < 501ms", "pass", True),
        ("ttft.mean < 500ms", "fail", True),
        ("ttft.max < 1s", "fail", False),
        ("complete >= 99%", "pass", False),
        ("complete >= 99.9%", "pass", True),
        ("failed < 0.1%", "pass", True),
        ("failed <= 0", "pass", False),
    ],
)
def test_the_measured_figure_decides(judged: Judge, expression: str, verdict: str, marginal: bool) -> None:
    """Without --confidence the figure itself passes or fails, and is marginal if the bound lies in its interval."""
    (found,) = judged(rising(1000), expression)
    assert (found.verdict, found.marginal, found.whole_interval) == (verdict, marginal, False)
    assert ("marginal" in found.said) == marginal


@pytest.mark.parametrize("expression", ["complete >= 99%", "ttft.p99 < 2s"])
def test_a_gate_that_is_met_passes_however_few_requests_there_are(judged: Judge, expression: str) -> None:
    """200 of 200 complete requests meet 99%, and a p99 that is ten times below its bound meets it."""
    (found,) = judged(rising(200), expression)
    assert (found.verdict, found.marginal, found.requests_needed) == ("pass", True, 368)
    assert found.said.endswith("requests would decide")


@pytest.mark.parametrize(("confidence", "needed"), [(0.9, 299), (0.95, 368), (0.99, 528)])
def test_a_higher_confidence_needs_more_requests(judged: Judge, confidence: float, needed: int) -> None:
    """The interval has the confidence that is demanded: 0.99 to the power of `needed` is at most half of the rest."""
    (found,) = judged(rising(200), "complete >= 99%", confidence=confidence)
    assert (found.verdict, found.requests_needed, found.confidence) == ("inconclusive", needed, confidence)
    assert f"{confidence * 100:.4g}% CI " in found.said
    low, _ = found.interval or (None, None)
    assert low == pytest.approx(((1 - confidence) / 2) ** (1 / 200), abs=1e-6)


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("complete >= 990", "pass"),
        ("complete > 990", "fail"),
        ("failed <= 6", "pass"),
        ("failed < 6", "fail"),
        ("truncated <= 3", "pass"),
        ("dropped < 1", "fail"),
        # By Clopper and Pearson 990 of 1000 are 98.168% to 99.519%.
        ("complete >= 98.1%", "pass"),
        ("complete >= 98.2%", "inconclusive"),
        ("complete >= 99%", "inconclusive"),
        ("complete >= 99.5%", "inconclusive"),
        ("complete >= 99.6%", "fail"),
        # 6 of 1000 are 0.221% to 1.301%.
        ("failed < 1.4%", "pass"),
        ("failed < 1%", "inconclusive"),
        ("failed < 0.2%", "fail"),
        ("complete >= 100%", "fail"),
        ("dropped <= 0%", "fail"),
        ("ttft.p50 < 100s", "pass"),
        ("requests_per_s > 1", "pass"),
        ("requests_per_s > 1000000", "fail"),
        ("output_tokens_per_s <= 1", "fail"),
        ("total_tokens_per_s > 1", "pass"),
        ("skew < 1s", "pass"),
        ("skew < 1us", "fail"),
    ],
)
def test_endings_rates_and_skew(judged: Judge, expression: str, verdict: str) -> None:
    """Counts and single figures are what they are; a confidence demands the whole interval of shares."""
    assert judged(mixed(), expression, confidence=0.95)[0].verdict == verdict


def test_all_complete_is_a_fact_of_the_run(judged: Judge) -> None:
    """No sample proves 100%, so that bound speaks of the run alone, where 99.9% is a question of the number."""
    asked = ["complete >= 100%", "failed <= 0%", "complete >= 99.9%", "complete >= 99.6%"]
    found = judged(rising(1000), *asked, confidence=0.95)
    assert [each.verdict for each in found] == ["pass", "pass", "inconclusive", "pass"]
    assert [each.interval is None for each in found] == [True, True, False, False]
    assert found[2].requests_needed == 3688  # the smallest n with 0.999**n <= 2.5%


def test_latencies_say_what_they_leave_out(judged: Judge) -> None:
    """A latency is of the 990 complete requests; the entry counts the other ten, a count leaves none out."""
    latency, count = judged(mixed(), "ttft.p50 < 1s", "failed <= 6")
    assert (latency.requests, latency.left_out) == (990, 10)
    assert (count.requests, count.left_out) == (1000, 0)


def test_a_window_is_of_latencies_and_rates(tmp_path: Path) -> None:
    """Half of a run is measured: latencies and what they leave out are of that half, endings of the whole run; and
    where requests are not due at once there is no skew to keep."""
    records = [*rising(100), *(failed(place) for place in range(100, 110))]
    for record in records:
        record.due_ns = record.id * MILLISECOND_NS
    plan = header(110).plan | {"arrivals": "constant:1000", "window_s": [0.0, 0.0495]}
    run = run_of(tmp_path / "run", records, plan=plan)
    asked = ["ttft.max <= 50ms", "complete >= 100", "requests_per_s > 900", "skew < 1000s"]
    latency, share, rate, skew = judge(parse(asked), frame_of_run(run), typed(summarise(run)))
    assert (latency.verdict, latency.requests, latency.left_out) == ("pass", 50, 0)
    assert (share.verdict, share.requests) == ("pass", 110)
    assert rate.measured == pytest.approx(49 / 0.0495, rel=0.05)
    assert (skew.verdict, skew.said) == ("fail", "the run does not have this figure")


def test_requests_without_a_record_count(judged: Judge) -> None:
    """A run that was killed half-way has not completed what it left no record of."""
    share, latency = judged(rising(500), "complete >= 90%", "ttft.p50 < 1s", n=1000)
    assert (share.verdict, share.measured, latency.left_out) == ("fail", 0.5, 500)


@pytest.mark.parametrize("confidence", [None, 0.95])
@pytest.mark.parametrize("expression", ["ttft.p99 < 1000s", "ttft.p99 > 0s", "e2e.max < 1000s", "itl.mean < 1000s"])
def test_without_a_complete_request_a_latency_fails(judged: Judge, expression: str, confidence: float | None) -> None:
    """Nothing was shown, however wide the bound."""
    (found,) = judged([failed(place) for place in range(20)], expression, confidence=confidence)
    assert (found.verdict, found.measured, found.interval, found.requests) == ("fail", None, None, 0)
    assert (found.said, found.left_out) == ("no complete request has this latency", 20)


def test_a_latency_that_no_answer_has_fails(judged: Judge) -> None:
    """One token per answer gives no time per token."""
    records = [complete(place, [MILLISECOND_NS]) for place in range(20)]
    assert judged(records, "tpot.p50 < 1000s")[0].verdict == "fail"


def test_a_run_without_anything_fails_its_rates(judged: Judge) -> None:
    """No request was sent: there is no rate, no skew and no share, and no bound on them is kept."""
    found = judged([], "requests_per_s >= 0", "skew < 1s", "complete >= 0.1%")
    assert [(each.verdict, each.said) for each in found] == [("fail", "the run does not have this figure")] * 3


@pytest.mark.parametrize(
    ("n", "expression", "needed"),
    [
        (100, "ttft.p99 < 100s", 368),  # 0.99**368 <= 2.5%
        (3, "ttft.p50 < 100s", 6),  # 0.5**6 <= 2.5%
        (3, "ttft.mean < 100s", 4),
        (1000, "ttft.p50 < 500ms", None),  # the bound is the median
    ],
)
def test_what_cannot_be_told_says_what_would_tell(judged: Judge, n: int, expression: str, needed: int | None) -> None:
    """The number of requests, where there is one."""
    (found,) = judged(rising(n), expression.replace("500ms", "500500us"), confidence=0.95)
    assert (found.verdict, found.requests_needed) == ("inconclusive", needed)


@pytest.mark.parametrize("expression", ["ttft.p99 <= 995ms", "ttft.p50 > 480ms", "ttft.mean < 510ms"])
def test_that_many_requests_do_tell(judged: Judge, tmp_path: Path, expression: str) -> None:
    """A run of as many requests as were said to be needed, of the same distribution, is told; one of nine tenths of
    them is not."""
    (first,) = judged(rising(1000), expression, confidence=0.95)
    needed = first.requests_needed
    verdicts = []
    for share in (0.9, 1.01):
        n = int(needed * share)
        run = run_of(tmp_path / str(n), rising(n, 1000))
        verdicts += judge(parse([expression]), frame_of_run(run), typed(summarise(run)), 0.95)
    assert [each.verdict for each in verdicts] == ["inconclusive", "pass"]


def test_gaps_of_one_request_are_not_independent(judged: Judge) -> None:
    """A hundred requests with ten like gaps each need as many more requests as if they had one gap each."""
    records = [complete(place, [(place + 1) * k * MILLISECOND_NS for k in range(1, 12)]) for place in range(100)]
    gaps, single = judged(records, "icl.p50 < 55ms", "ttft.p50 < 55ms", confidence=0.95)
    assert gaps.verdict == single.verdict == "inconclusive"
    assert gaps.requests == 100
    assert gaps.requests_needed == pytest.approx(single.requests_needed, rel=0.15)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("ttft.p50 < 1s", "500.5 ms, 95% CI 469.0\u2013532.0 ms"),
        ("ttft.p99.9 < 2s", "999.0 ms, 95% CI 997.0 ms or more; marginal, about 3,688 complete requests would decide"),
        ("ttft.max < 1s", "1.000 s"),
        ("complete >= 99%", "100%, 95% CI 99.63\u2013100%"),
        ("complete >= 99.995%", "100%, 95% CI 99.632\u2013100%"),
        ("complete >= 3", "1,000 requests"),
        ("failed < 1", "0 requests"),
        (
            "ttft.mean < 500500us",
            "500.5 ms, 95% CI 482.6\u2013518.4 ms; marginal, too close to the bound for any number of requests",
        ),
    ],
)
def test_evidence_in_words(judged: Judge, expression: str, said: str) -> None:
    """The figure and its interval in one unit, and what would tell."""
    assert judged(rising(1000), expression)[0].said.startswith(said)


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("rejected < 20%", "pass"),
        ("rejected < 10%", "inconclusive"),
        ("rejected < 1%", "fail"),
        ("rejected <= 100", "pass"),
        ("rejected < 100", "fail"),
        ("failed < 1", "pass"),
        ("complete >= 99%", "fail"),
    ],
)
def test_rejected_requests_are_judged_apart(expression: str, verdict: str, judged: Judge) -> None:
    """100 of 1,000 were rejected: an objective may allow that, `failed` does not see them, and `complete` does."""
    records = [*rising(900), *(rejected(place) for place in range(900, 1000))]
    (found,) = judged(records, expression, confidence=0.95)
    assert found.verdict == verdict
