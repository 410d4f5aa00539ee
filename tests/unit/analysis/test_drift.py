"""Drift of a figure per hour: its size, its interval, and the verdict on objectives that limit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.change_points import noise_of
from loadgen.analysis.drift import first_beyond, first_missed, hours_between_ends, measure_drift, reason_without_drift
from loadgen.analysis.objectives import RATES, ObjectiveError, ObjectiveVerdict, parse
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.time_windows import WindowSeries
from tests.support.long_runs import S, constant, long_run, requests_over
from tests.support.runs import summarise, typed

HOUR_S = 3600
WINDOWS = 40


def verdict_on(tmp_path: Path, records: list[Record], expression: str) -> ObjectiveVerdict:
    run = long_run(tmp_path, records)
    return judge(parse([expression]), frame_of_run(run), typed(summarise(run)))[0]


def rising(per_hour: float, *, noise: float = 0.05, correlation: float = 0.0, seed: int = 1) -> WindowSeries:
    """Return a figure over four hours that rises by the share `per_hour` of its median level each hour."""
    random = np.random.default_rng(seed)
    steps = random.standard_normal(WINDOWS + 50)
    errors = np.zeros(WINDOWS + 50)
    for index in range(1, len(errors)):
        errors[index] = correlation * errors[index - 1] + steps[index] * np.sqrt(1 - correlation**2)
    hours = (np.arange(WINDOWS) + 0.5) * 4 / WINDOWS - 2
    return WindowSeries(0.0, 4 * HOUR_S / WINDOWS, 0.2 * (1 + per_hour * hours + noise * errors[50:]))


@pytest.mark.parametrize("per_hour", [-0.1, 0.0, 0.05, 0.3])
def test_the_interval_contains_the_drift(per_hour: float) -> None:
    """A figure that rises evenly has this drift, as a share of its level, inside a narrow interval."""
    drift = measure_drift(rising(per_hour))
    assert drift is not None
    assert drift.low <= per_hour <= drift.high
    assert drift.high - drift.low < 0.1
    assert drift.level == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_a_figure_without_drift_rarely_seems_to_drift(correlation: float) -> None:
    """At most about one interval in ten of 95% misses the truth, although neighbouring windows are alike."""
    missed = 0
    certain = 0
    for seed in range(200):
        drift = measure_drift(rising(0.0, correlation=correlation, seed=seed))
        assert drift is not None
        missed += not drift.low <= 0 <= drift.high
        certain += drift.p_value < 0.001
    assert missed <= 24
    assert certain <= 3


def test_single_bad_windows_do_not_move_the_drift() -> None:
    """Three windows of ten times the level change the drift of forty windows by less than the width of its interval."""
    series = rising(0.05)
    values = series.values.copy()
    values[[5, 20, 38]] *= 10
    drift, disturbed = measure_drift(series), measure_drift(WindowSeries(series.from_s, series.window_s, values))
    assert drift is not None
    assert disturbed is not None
    assert abs(disturbed.per_hour - drift.per_hour) < drift.high - drift.low


def test_a_figure_with_too_few_values_has_no_drift() -> None:
    """Windows without requests do not count, and a figure that is 0 has no level to relate a drift to."""
    series = rising(0.0)
    values = series.values.copy()
    values[9:] = np.nan
    assert measure_drift(WindowSeries(0.0, 60.0, values)) is None
    assert measure_drift(WindowSeries(0.0, 60.0, np.zeros(WINDOWS))) is None


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("ttft.p50 drift < 5%/h", "fail"),
        ("ttft.p50 drift < 40%/h", "pass"),
        ("ttft.p50 drift > 5%/h", "pass"),
        ("ttft.mean drift < 5%/h", "fail"),
        ("tpot.p50 drift < 5%/h", "pass"),
        ("output_tokens_per_s drift > -20%/h", "pass"),
        ("ttft.p99 drift < 5%/h", "inconclusive"),
    ],
)
def test_objectives_limit_the_drift(tmp_path: Path, expression: str, verdict: str) -> None:
    """TTFT grows by 25% per hour for two hours. Only its drift is too large. p99 needs more requests than there are."""
    records = requests_over(2 * HOUR_S, lambda due_s: 0.1 * (1 + 0.25 * due_s / HOUR_S), rate_per_s=0.7)
    result = verdict_on(tmp_path, records, expression)
    assert result.verdict == verdict
    assert result.unit == "share per hour"
    assert result.whole_interval


def test_the_first_bad_window_is_named(tmp_path: Path) -> None:
    """A server that becomes 60% slower after one of two hours drifts too fast, and first does so after an hour."""
    records = requests_over(2 * HOUR_S, lambda due_s: 0.1 if due_s < HOUR_S else 0.16, rate_per_s=0.7)
    result = verdict_on(tmp_path, records, "ttft.p50 drift < 5%/h")
    assert result.verdict == "fail"
    assert result.first_bad_s is not None
    from_s, to_s = result.first_bad_s
    assert from_s <= HOUR_S + (to_s - from_s)
    assert to_s >= HOUR_S
    assert "first missed from 1 h" in result.said or "first missed from 59 min" in result.said


def test_a_figure_that_recovers_does_not_drift(tmp_path: Path) -> None:
    """A bad half hour in the middle of a run is no drift, because the last level is the first one."""
    records = requests_over(2 * HOUR_S, lambda due_s: 0.3 if 2000 < due_s < 4000 else 0.1, rate_per_s=0.7)
    result = verdict_on(tmp_path, records, "ttft.p50 drift < 10%/h")
    assert result.verdict == "pass"
    assert result.measured == pytest.approx(0, abs=0.05)


def test_a_failed_bound_names_its_first_window_too(tmp_path: Path) -> None:
    """`ttft.p50 < 150ms` fails from the second hour on. A run that missed it from the beginning names no window."""
    slow_later = requests_over(2 * HOUR_S, lambda due_s: 0.1 if due_s < 0.8 * HOUR_S else 0.2, rate_per_s=0.7)
    result = verdict_on(tmp_path, slow_later, "ttft.p50 < 150ms")
    assert result.verdict == "fail"
    assert result.first_bad_s is not None
    assert result.first_bad_s[1] >= 0.8 * HOUR_S
    objective = parse(["ttft.p50 < 150ms"])[0]
    assert first_missed(WindowSeries(0.0, 60.0, np.full(20, 0.2)), objective) is None


def test_a_steady_server_passes(tmp_path: Path) -> None:
    """Without a drift, the bound passes, and no window is named."""
    result = verdict_on(tmp_path, requests_over(4 * HOUR_S, constant, rate_per_s=0.7), "ttft.p50 drift < 5%/h")
    assert result.verdict == "pass"
    assert result.first_bad_s is None


def test_a_short_run_is_inconclusive(tmp_path: Path) -> None:
    """A run without enough time windows says what a drift needs, instead of a number."""
    result = verdict_on(tmp_path, requests_over(60), "ttft.p50 drift < 5%/h")
    assert result.verdict == "inconclusive"
    assert result.measured is None
    assert "a drift needs 10 time windows" in result.said


@pytest.mark.parametrize("rate", RATES)
def test_every_rate_can_be_judged(tmp_path: Path, rate: str) -> None:
    """A text run misses any high bound on a rate. Rates that it does not have fail, whether as a level or a drift."""
    run = long_run(tmp_path, requests_over(HOUR_S, constant, rate_per_s=0.7))
    level, drift = judge(
        parse([f"{rate} > 100000", f"{rate} drift > -900%/h"]), frame_of_run(run), typed(summarise(run))
    )
    assert level.verdict == "fail"
    if level.measured is None:
        assert (drift.verdict, drift.said) == ("fail", "the run does not have this figure")
    else:
        assert drift.verdict == "pass"


def test_the_first_bad_window_of_audio_is_named(tmp_path: Path) -> None:
    """Requests carry 30 s of audio each and 10 s after half an hour: the rate of audio misses its bound from then."""
    records = [
        replace(record, marks={"audio_us": 30_000_000 if (record.due_ns or 0) < 1800 * S else 10_000_000})
        for record in requests_over(HOUR_S, constant, rate_per_s=0.7)
    ]
    result = verdict_on(tmp_path, records, "audio_seconds_per_s > 15")
    assert result.verdict == "fail"
    assert result.first_bad_s is not None
    assert result.first_bad_s[1] == pytest.approx(1800, abs=200)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("nobody: ttft.p50 drift < 5%/h", "no complete request has this latency"),
        ("nobody: output_tokens_per_s drift > -5%/h", "nobody does not have this figure"),
        ("rtf.p50 drift < 5%/h", "no complete request has this latency"),
    ],
)
def test_the_drift_of_an_unknown_figure_fails(tmp_path: Path, expression: str, said: str) -> None:
    """A drift of a part or of a latency that the run does not have fails, as every other objective on it does."""
    result = verdict_on(tmp_path, requests_over(HOUR_S, constant, rate_per_s=0.7), expression)
    assert (result.verdict, result.said) == ("fail", said)


def test_a_figure_without_drift_has_a_reason() -> None:
    """A level of 0 has no share, and a figure that is known in few windows has no slope. The reasons differ."""
    zeros = WindowSeries(0.0, 60.0, np.zeros(WINDOWS))
    assert "the median of the figure over the run is 0" in reason_without_drift(zeros)
    few = np.full(WINDOWS, np.nan)
    few[:9] = 1.0
    assert "known in 9 of 40" in reason_without_drift(WindowSeries(0.0, 60.0, few))


@pytest.mark.parametrize("excess", [0.98, 1.02])
def test_the_first_bad_window_and_the_drift_have_one_base(excess: float) -> None:
    """The last three windows of a steep line exceed a bound just below their change, and not one just above it.

    The change is a share of the median over the run and of the time between the middles of the end windows.
    """
    values = np.linspace(1.0, 9.0, WINDOWS)
    series = WindowSeries(0.0, 4 * HOUR_S / WINDOWS, values)
    drift = measure_drift(series)
    assert drift is not None
    reached = (values[-3] - np.median(values[:3]) - noise_of(values)) / drift.level / hours_between_ends(series)
    objective = parse([f"ttft.p50 drift < {reached / excess * 100:.6f}%/h"])[0]
    assert (first_beyond(series, objective, drift) is not None) == (excess > 1)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("ttft.p99 drift < 5%", "a drift is a share per hour: write 5%/h"),
        ("ttft.p99 drift < 5ms", "a drift is a share per hour: write 5%/h"),
        ("complete drift < 5%/h", "complete has no drift"),
        ("ttft drift < 5%/h", "ttft is a distribution"),
        ("ttft.p99 < -5ms", "is not a bound"),
        ("ttft.p99 < 5%/h", "is not a duration"),
    ],
)
def test_mistakes_are_explained(expression: str, message: str) -> None:
    """A mistake in an objective with a drift says what to write."""
    with pytest.raises(ObjectiveError, match=message):
        parse([expression])
