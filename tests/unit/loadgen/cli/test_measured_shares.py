"""Shares that are numbers, or that a server reported in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.analysis.speculation import Speculation
from loadgen.cli.measured_shares import (
    _drafted_per_step,
    acceptance_from_length,
    parse_acceptance,
    parse_cache_hit_rate,
)
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.hardware.inference import ServingOptions
from loadgen.studies.simulate import ServerModel, run
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, footer, header, healthy, write


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


def with_drafts(folder: Path, **marks: int) -> str:
    """Write a run whose server reports its draft tokens in each response, and return its folder."""
    records = [complete(number, [MS, 2 * MS], marks=marks) for number in range(10)]
    write(folder, [header(10), *records, *healthy(), footer(records)])
    return str(folder)


def test_the_acceptance_of_a_run_is_that_of_its_own_draft_length(tmp_path: Path) -> None:
    """The run drafted two tokens per step. A prediction with four drafted tokens uses the same acceptance."""
    folder = with_drafts(tmp_path / "run", draft_steps=100, draft_tokens=200, accepted_draft_tokens=75)
    assert parse_acceptance(folder, 4) == pytest.approx(0.5)


def test_a_run_with_an_unknown_draft_length_is_refused(tmp_path: Path) -> None:
    """Its acceptance length alone does not determine the acceptance."""
    folder = with_drafts(tmp_path / "run", draft_steps=100, accepted_draft_tokens=75)
    with pytest.raises(PlanError, match="did not report how many draft tokens a step has"):
        parse_acceptance(folder, 4)


def test_a_draft_length_follows_from_length_and_rate() -> None:
    """A server that reports gauges states both: 0.75 of 2 drafted tokens are 37.5%."""
    assert _drafted_per_step(Speculation(acceptance_length=1.75, acceptance_rate=0.375, source="gauges")) == 2
