"""Counters of several replicas behind one address, and those of replicas that are read one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadgen.analysis import telemetry
from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.findings import mixed_counters_finding
from loadgen.analysis.telemetry import all_series, check_counters, count_mixed_replicas, mixed_series
from loadgen.servers.telemetry import add_up_replicas
from tests.support.runs import complete, frame_of_run
from tests.support.telemetry import line, told

CLEAN_RUNS = 100


def moments(count: int) -> list[str]:
    """Return the moments of a run's readings: before it, during it and after it."""
    return ["idle", "start", *["run"] * (count - 4), "end", "after"]


def test_alternating_counters_are_those_of_several_replicas(tmp_path: Path) -> None:
    """Two replicas answer in turn: the finding says so, and neither counters nor their curves are shown."""
    values = [100, 5_000, 160, 5_090, 230, 5_170, 300, 5_260]
    lines = [
        line("server", at_s, moment, output_tokens=value, kv_used=0.5, running=1)
        for at_s, (moment, value) in enumerate(zip(moments(len(values)), values, strict=True))
    ]
    records = [complete(number, [10 + number, 20 + number]) for number in range(4)]
    run = told(tmp_path / "run", lines, records, server="vllm")
    assert count_mixed_replicas(run) == 2
    assert check_counters(run, frame_of_run(run)) == {}
    assert {series.name for series in all_series(run)} == {"kv_used", "running"}
    summary = summarise(run)
    assert summary.mixed_replicas == 2
    finding = mixed_counters_finding(summary)
    assert finding is not None
    assert "these are the counters of at least 2 replicas behind one address. The counters are not used" in (
        finding.sentence
    )
    assert "repeat --url" in finding.sentence


def test_readings_are_searched_for_several_counters_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summary reads the telemetry many times. The search is repeated only if the run has got more of it."""
    lines = [line("server", at_s, output_tokens=100 * at_s) for at_s in range(8)]
    run = told(tmp_path / "run", lines, [complete(0, [1, 2])], server="vllm")
    searched: list[int] = []

    def search(points: Sequence[tuple[float, float]]) -> int:
        searched.append(len(points))
        return 0

    monkeypatch.setattr(telemetry, "mixed_series", search)
    summarise(run)
    count_mixed_replicas(run)
    assert len(searched) == len(telemetry.COMPARED)
    run.telemetry.append(line("server", 9, output_tokens=900))
    count_mixed_replicas(run)
    assert searched.count(9) == 1


@pytest.mark.parametrize("restarts", [1, 2, 3])
def test_a_server_that_restarts_is_one_server(restarts: int, tmp_path: Path) -> None:
    """The counters begin anew and exceed their old values later, even several times."""
    values: list[int] = []
    for number in range(restarts + 1):
        values += [*range(0, 1_000 + 700 * number, 150)]
    lines = [line("server", at_s, output_tokens=value) for at_s, value in enumerate(values)]
    run = told(tmp_path / "run", lines, server="vllm")
    assert count_mixed_replicas(run) == 0
    assert (
        mixed_counters_finding(summarise(told(tmp_path / "complete", lines, [complete(0, [1, 2])], server="vllm")))
        is None
    )


@pytest.mark.parametrize("seed", range(CLEAN_RUNS))
def test_clean_counters_raise_no_warning(seed: int) -> None:
    """Counters of one server that grow by random steps, with pauses and at most two restarts."""
    draw = random.Random(seed)
    value, points = draw.choice([0, draw.randrange(10**6)]), []
    restarts = {draw.randrange(5, 300) for _ in range(draw.randrange(3))}
    for at_s in range(300):
        value = draw.randrange(3) * 10 if at_s in restarts else value + draw.choice([0, 0, draw.randrange(2_000)])
        points.append((float(at_s), float(value)))
    assert mixed_series(points) == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_mixed_counters_are_always_found(seed: int, replicas: int) -> None:
    """Replicas that answer in turn or at random: never fewer than two, and never more than there are."""
    draw = random.Random(seed)
    values = [draw.randrange(10**6) for _ in range(replicas)]
    turns = cycle(range(replicas))
    points = []
    for at_s in range(60):
        values = [value + draw.randrange(500) for value in values]
        chosen = next(turns) if seed % 2 else draw.randrange(replicas)
        points.append((float(at_s), float(values[chosen])))
    assert 2 <= mixed_series(points) <= replicas


def test_a_few_quick_readings_suffice() -> None:
    """The readings of a short burst fall three times within two seconds: no server restarts so quickly."""
    eight = [(0.0, 900.0), (0.1, 700.0), (0.6, 500.0), (0.8, 300.0), (1.2, 950.0)]
    assert mixed_series(eight) == 4
    assert mixed_series([(at_s * 60, value) for at_s, value in eight]) == 0


def replica(url: str, **values: Any) -> dict[str, Any]:
    """Return the values of one replica in a reading."""
    return {"url": url, **values}


def test_replicas_that_are_read_one_by_one_add_up(tmp_path: Path) -> None:
    """Counters add up, also if one replica restarts. KV use has a mean and a maximum, weighted by engines."""
    readings = [[(100, 900), (200, 950)], [(150, 1_000), (50, 1_100)], [(200, 1_050), (90, 1_200)]]
    lines = []
    for at_s, (moment, values) in enumerate(zip(("start", "run", "end"), readings, strict=True)):
        replicas = [
            replica("http://a", output_tokens=values[0][0], requests_finished=values[0][1]),
            replica("http://b", output_tokens=values[1][0], requests_finished=values[1][1]),
        ]
        lines.append(line("server", at_s, moment, **add_up_replicas(replicas), replicas=replicas))
    run = told(tmp_path / "run", lines, [complete(0, [1, 2])], server="vllm")
    checks = check_counters(run, frame_of_run(run))
    assert (checks["output_tokens"].server, checks["output_tokens"].resets) == (100 + 90, 1)
    assert (checks["requests_finished"].server, checks["requests_finished"].resets) == (150 + 250, 0)
    assert count_mixed_replicas(run) == 0


def test_kv_use_of_replicas_is_mean_and_worst() -> None:
    """A replica with three engines counts three times in the mean, and the fullest engine of all is the worst."""
    one = replica("http://a", kv_used=0.4, kv_used_max=0.6, engines=3, running=2, taken_share=0.9)
    other = replica("http://b", kv_used=0.8, running=3, taken_share=0.9, output_tokens=7)
    assert add_up_replicas([one, other]) == {
        "kv_used": pytest.approx(0.5),
        "kv_used_max": 0.8,
        "engines": 4,
        "running": 5,
        "taken_share": 0.9,
        "output_tokens": 7,
    }


@pytest.mark.parametrize(("names", "cause"), [(("a", "b"), "one of 2 replicas"), (("a",), "lost counts")])
def test_counters_of_one_of_several_replicas_are_named(names: tuple[str, ...], cause: str, tmp_path: Path) -> None:
    """The responses name two replicas, and only the counters of one were read: that is why counts are missing."""
    records = [
        replace(complete(number, [10 + number, 20 + number]), replica=names[number % len(names)]) for number in range(8)
    ]
    lines = [line("server", at_s, moment, requests_finished=at_s) for at_s, moment in ((0, "start"), (4, "end"))]
    run = told(tmp_path / "run", lines, records, server="vllm")
    check = check_counters(run, frame_of_run(run))["requests_finished"]
    assert (check.difference, cause in check.why) == (-4, True), check.why
