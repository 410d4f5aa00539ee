"""How long a matrix takes, and how that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.studies.matrix import Matrix, MatrixPlan, build_matrix
from loadgen.studies.matrix.estimate import (
    OVERHEAD_S,
    TOKENS_PER_S,
    dry_run_text,
    estimate_runs,
    format_duration,
    remaining_s,
)


def plan(**changes: Any) -> MatrixPlan:
    values: dict[str, Any] = {
        "name": "x",
        "servers": ["vllm"],
        "hosts": [{"name": "a", "platform": "A", "gpu": "A800-80GB SXM"}],
        "models": [{"name": "7b", "shape": "Llama-2-7B"}],
        "workloads": [{"name": "burst", "n": 100, "output_tokens": 32}],
        "repeats": 2,
    }
    return MatrixPlan(**values | changes)


def matrix(asked: MatrixPlan) -> Matrix:
    return build_matrix(asked, Path("matrix"), [])


def seconds(asked: MatrixPlan, *lines: dict[str, Any]) -> tuple[float, str]:
    (found,) = estimate_runs(matrix(asked), lines).values()
    return found.seconds, found.source


def test_a_known_card_is_modelled() -> None:
    """A faster card or a shorter answer takes less; the simulated clock's speed divides, a real server's does not."""
    base, how = seconds(plan())
    assert how == "modelled"
    slower, _ = seconds(plan(hosts=[{"name": "a", "platform": "A", "gpu": "RTX 3090"}]))
    shorter, _ = seconds(plan(workloads=[{"name": "burst", "n": 100, "output_tokens": 8}]))
    assert shorter < base < slower
    simulated, _ = seconds(plan(launch="simulated", options={"speed": 4.0}))
    assert simulated - OVERHEAD_S == pytest.approx((base - OVERHEAD_S) / 4)


def test_what_is_not_known_is_guessed_and_says_so() -> None:
    """From the tokens asked; a model that does not fit its card is not modelled either."""
    asked = plan(hosts=[{"name": "a", "platform": "A"}])
    assert seconds(asked) == (100 * 32 / TOKENS_PER_S + OVERHEAD_S, "guessed")
    assert seconds(plan(models=[{"name": "70b", "shape": "Llama-2-70B"}]))[1] == "guessed"


def test_a_given_duration_is_taken_as_it_is() -> None:
    """An open loop of a minute takes a minute."""
    workload = {"name": "steady", "arrivals": "poisson:5", "duration_s": 60}
    assert seconds(plan(workloads=[workload])) == (60 + OVERHEAD_S, "modelled")


def test_an_open_loop_takes_until_its_last_request_is_due() -> None:
    """However fast the server is."""
    workload = {"name": "steady", "arrivals": "constant:2", "n": 101, "output_tokens": 1}
    assert seconds(plan(workloads=[workload]))[0] >= 50 + OVERHEAD_S


def test_a_large_burst_is_modelled_by_a_part_of_it() -> None:
    """The rest is taken to go on as fast."""
    few, many = (seconds(plan(workloads=[{"name": "b", "n": n, "output_tokens": 2}]))[0] for n in (2_000, 20_000))
    assert many - OVERHEAD_S == pytest.approx(10 * (few - OVERHEAD_S))


def test_what_was_measured_wins() -> None:
    """The mean of the cell's own runs, and of the starts of that server; only what is left is counted."""
    asked = plan()
    first, second = matrix(asked).repeats
    lines: list[dict[str, Any]] = [
        {"type": "up", "server": "vllm", "model": "7b", "seconds": 30.0},
        {"type": "end", **first.key, "seconds": 12.0},
    ]
    assert seconds(asked, *lines) == (12.0, "measured")
    assert remaining_s(matrix(asked), lines, [first]) == 30.0 + 12.0
    assert remaining_s(matrix(asked), lines, [first, second]) == 0.0


def test_the_dry_run_says_everything_beforehand() -> None:
    """Size, order, what is done, what is left out and why, how long, and where that comes from."""
    asked = plan(models=["7b", "70b"], cases=[{"model": "70b", "skip": "does not fit"}])
    found = matrix(asked)
    text = dry_run_text(found, [], found.repeats[:1])
    assert "1 server x 1 host x 2 models x 1 workload: 1 cell, 2 repeats each: 2 runs in 1 start" in text
    assert "burst#1 done" in text
    assert "Not measured: vllm on a, 70b: does not fit." in text
    assert "1 run to go, 1 done: about" in text
    assert "guessed: a server starts in 180 s (compose)" in text
    known = matrix(plan())
    (modelled,) = {estimate.accuracy for estimate in estimate_runs(known, []).values()}
    assert "TTFT" in modelled
    assert f"accuracy of the model for {modelled}." in " ".join(dry_run_text(known, [], []).split())


@pytest.mark.parametrize(
    ("value", "text"), [(3, "about 5 s"), (61, "about 60 s"), (600, "about 10 min"), (27_000, "about 7 h 30 min")]
)
def test_lengths_of_time_are_rounded_as_people_say_them(value: float, text: str) -> None:
    """Never finer than an estimate is good for."""
    assert format_duration(value) == text
