"""Change points of a series: found where the level changes, and nowhere else."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from loadgen.analysis.change_points import MIN_SEGMENT, _best_partition, find_change_points

COUNT = 60


def noisy(levels: np.ndarray, *, noise: float = 0.05, seed: int = 1) -> np.ndarray:
    return np.asarray(levels * (1 + noise * np.random.default_rng(seed).standard_normal(len(levels))))


@pytest.mark.parametrize("factor", [0.7, 1.4, 3.0])
def test_a_change_of_level_is_found(factor: float) -> None:
    """The first value of the new level is found, whatever the direction of the change."""
    points = find_change_points(noisy(np.where(np.arange(COUNT) < 25, 1.0, factor)))
    assert len(points) == 1
    assert abs(points[0] - 25) <= 1


def test_several_changes_are_found() -> None:
    """A bad time in the middle begins and ends with a change."""
    instants = np.arange(COUNT)
    assert find_change_points(noisy(np.where((instants >= 20) & (instants < 40), 2.0, 1.0))) == [20, 40]


@pytest.mark.parametrize("kind", ["constant", "noise", "outliers", "drift", "short"])
def test_other_series_have_no_changes(kind: str) -> None:
    """Noise, single bad values and an even drift are no changes of the level."""
    series = {
        "constant": np.ones(COUNT),
        "noise": noisy(np.ones(COUNT)),
        "outliers": noisy(np.where(np.arange(COUNT) % 20 == 7, 4.0, 1.0)),
        "drift": noisy(np.linspace(1, 2, COUNT)),
        "short": noisy(np.array([1.0, 1, 1, 2, 2, 2])),
    }[kind]
    assert find_change_points(series) == []


def test_chance_makes_no_changes() -> None:
    """In 200 series of noise, whose neighbouring values are alike by 0.3, at most two have a change."""
    false_alarms = 0
    for seed in range(200):
        steps = np.random.default_rng(seed).standard_normal(120)
        for index in range(1, 120):
            steps[index] += 0.3 * steps[index - 1]
        false_alarms += bool(find_change_points(1 + 0.05 * steps))
    assert false_alarms <= 2


def test_the_partition_is_the_best_of_all() -> None:
    """No other division into segments has a smaller cost, as a search through all of them shows."""
    values = np.random.default_rng(5).standard_normal(24) + np.repeat([0.0, 2.0, 1.0], 8)
    penalty = 4.0

    def cost(changes: tuple[int, ...]) -> float:
        segments = np.split(values, changes)
        return sum(float(((part - part.mean()) ** 2).sum()) for part in segments) + penalty * len(changes)

    divisions = [
        changes
        for number in range(4)
        for changes in combinations(range(1, 24), number)
        if all(later - earlier >= MIN_SEGMENT for earlier, later in zip((0, *changes), (*changes, 24), strict=True))
    ]
    changes, best = _best_partition(values, penalty)
    assert best == pytest.approx(min(map(cost, divisions)))
    assert cost(tuple(changes)) == pytest.approx(best)
