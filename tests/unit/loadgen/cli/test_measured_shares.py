"""Shares that are numbers, or that a server reported in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.cli.measured_shares import acceptance_from_length, parse_acceptance, parse_cache_hit_rate
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware.inference import ServingOptions
from loadgen.studies.simulate import ServerModel, run


def simulated(folder: Path, serving: ServingOptions) -> str:
    """Simulate a run with serving options, and return its folder."""
    run(Plan(server="vllm", n=20, output_tokens=8), ServerModel(serving=serving), folder / "run", [])
    return str(folder / "run")


def test_numbers_are_shares() -> None:
    """Without an option, no prompt is cached, and the acceptance is the default."""
    assert (parse_cache_hit_rate(None), parse_acceptance(None, 3)) == (0.0, None)
    assert (parse_cache_hit_rate("0.3"), parse_acceptance("0.6", 3)) == (0.3, 0.6)


@pytest.mark.parametrize(("text", "said"), [("1.5", "not a share from 0 to 1"), ("nowhere", "neither a number nor")])
def test_other_values_are_refused(text: str, said: str) -> None:
    """The message says what to write."""
    with pytest.raises(PlanError, match=said) as caught:
        parse_cache_hit_rate(text)
    assert "--cache-hit-rate 0.3" in caught.value.hint
    with pytest.raises(PlanError, match=said):
        parse_acceptance(text, 3)


def test_a_run_has_the_measured_share(tmp_path: Path) -> None:
    """The share of its prompt tokens that the server found in its cache."""
    folder = simulated(tmp_path, ServingOptions(cache_hit_rate=0.25))
    assert parse_cache_hit_rate(folder) == 0.25
    with pytest.raises(PlanError, match="did not report how many draft tokens"):
        parse_acceptance(folder, 3)


def test_a_run_without_the_share_is_refused(tmp_path: Path) -> None:
    """Its server did not report it."""
    with pytest.raises(PlanError, match="did not report how many prompt tokens"):
        parse_cache_hit_rate(simulated(tmp_path, ServingOptions()))


@pytest.mark.parametrize(
    ("length", "drafted", "acceptance"), [(1.75, 2, 0.5), (1.0, 3, 0.0), (0.9, 3, 0.0), (4.0, 3, 1.0), (5.0, 3, 1.0)]
)
def test_the_acceptance_follows_from_the_tokens_per_step(length: float, drafted: int, acceptance: float) -> None:
    """1 + 0.5 + 0.25 tokens per step are an acceptance of one half with two drafted tokens."""
    assert acceptance_from_length(length, drafted) == pytest.approx(acceptance)
