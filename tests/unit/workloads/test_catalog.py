"""The catalog: every file is a plan's settings and cites its source."""

from __future__ import annotations

import pytest

from loadgen.plan import Plan
from loadgen.plan_fields import CATALOG, catalog_names, from_catalog, read_plan
from loadgen.workloads.spec_syntax import WorkloadError


def test_the_experiment_of_the_paper_comes_first() -> None:
    """`paper-burst` is 1000 synthetic prompts of 512 tokens at once."""
    assert catalog_names()[0] == "paper-burst"
    plan = Plan(server="tgi", **from_catalog("paper-burst"))
    assert (plan.n, plan.arrivals, plan.input_tokens, plan.workload) == (1000, "burst", 512, "synthetic")
    assert "2311.03687" in read_plan(CATALOG / "paper-burst.toml")["source"]


@pytest.mark.parametrize("name", catalog_names())
def test_every_workload_loads_and_cites_its_source(name: str) -> None:
    """Each file makes a valid plan, is canonical, has a summary of one line, and names a paper or a repository."""
    settings, file = from_catalog(name), read_plan(CATALOG / f"{name}.toml")
    plan = Plan(server="tgi", **settings)
    assert {key: type(value)(getattr(plan, key)) for key, value in settings.items()} == settings
    assert plan.label == name
    assert {"n", "arrivals", "input_tokens", "output_tokens"} <= set(settings)
    assert file["summary"].strip()
    assert "\n" not in file["summary"]
    assert "arXiv" in file["source"] or "github.com/" in file["source"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The hint is the catalog."""
    with pytest.raises(WorkloadError, match="unknown workload 'chat'") as caught:
        from_catalog("chat")
    assert "paper-burst" in caught.value.hint


def test_a_name_is_not_a_path() -> None:
    """A name that leads out of the catalog's folder is just unknown."""
    with pytest.raises(WorkloadError, match="unknown workload"):
        from_catalog("../catalog/paper-burst")
