"""Short forms of a load, and what they replace when several sources are merged."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.errors import PlanError
from loadgen.load_shorthand import expand, override
from loadgen.plan import Plan

URL = {"server": "vllm", "url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("settings", "arrivals", "concurrency"),
    [
        ({"rate": 5, "n": 9}, "poisson:5", None),
        ({"rate": "2.50/s", "n": 9}, "poisson:2.5", None),
        ({"rate": 20.0, "n": 9}, "poisson:20", None),
        ({"rate": "inf", "n": 9}, "burst", None),
        ({"concurrency": 8, "n": 9}, "closed:8", None),
        ({"rate": 5, "concurrency": 8, "n": 9}, "poisson:5", 8),
        ({"arrivals": "constant:5", "concurrency": 8, "n": 9}, "constant:5", 8),
        ({"arrivals": "burst", "concurrency": 8, "n": 9}, "burst", 8),
        ({"duration_s": "30s"}, "closed:1", None),
        ({"n": 9}, "burst", None),
        ({"n": 9, "duration_s": 30}, "burst", None),
    ],
)
def test_a_plan_stores_the_arrivals_that_a_short_form_means(
    settings: dict[str, Any], arrivals: str, concurrency: int | None
) -> None:
    """Expanding the stored settings again changes nothing."""
    plan = Plan(**URL, **settings)
    assert (plan.arrivals, plan.concurrency) == (arrivals, concurrency)
    assert Plan(**plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"url": []}, "url: the list is empty"), ({"more_urls": ["http://b:1"]}, "more_urls without url")],
)
def test_a_list_without_urls_is_refused(settings: dict[str, Any], message: str) -> None:
    """An empty list does not mean that the server is detected, and further replicas need a first one."""
    with pytest.raises(PlanError, match=message):
        Plan(n=9, **settings)


def test_another_url_replaces_all_replicas() -> None:
    """The replicas of a stored plan do not remain when another server is named."""
    stored = Plan(server="vllm", url=["http://a:1", "http://b:1"], n=9).to_dict()
    assert Plan(**override(stored, {"url": "http://c:1"})).urls == ("http://c:1",)
    assert Plan(**override(stored, {"n": 8})).urls == ("http://a:1", "http://b:1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 5, "arrivals": "closed:3"}, "--rate 5 and --arrivals closed:3 both say when to send requests"),
        ({"rate": -1}, "--rate -1: rate '-1' is not a plain decimal number"),
        ({"rate": "fast"}, "--rate fast: rate 'fast' is not"),
        ({"rate": 0}, "--rate 0: a rate of 0 sends no requests"),
        ({"arrivals": "closed:3", "concurrency": 8}, "write only --concurrency 8, or only --arrivals closed:3"),
        ({"rate": 5, "concurrency": 8, "max_in_flight": 9}, "beyond --max-in-flight 9 they are dropped: choose one"),
        ({"concurrency": 0}, "--arrivals closed:0"),
    ],
)
def test_contradictions_are_refused_with_what_to_write(settings: dict[str, Any], message: str) -> None:
    """The message names both options."""
    with pytest.raises(PlanError) as caught:
        Plan(**URL, n=9, **settings)
    assert message in f"{caught.value}"


@pytest.mark.parametrize(
    ("settings", "changes", "merged"),
    [
        ({"arrivals": "poisson:20"}, {"rate": "5"}, {"rate": "5"}),
        ({"rate": 5}, {"arrivals": "burst"}, {"arrivals": "burst"}),
        ({"arrivals": "closed:4"}, {"concurrency": 8}, {"concurrency": 8}),
        ({"arrivals": "poisson:20"}, {"concurrency": 8}, {"arrivals": "poisson:20", "concurrency": 8}),
        ({"concurrency": 8}, {"arrivals": "closed:4"}, {"arrivals": "closed:4"}),
        ({"concurrency": 8}, {"rate": "5"}, {"concurrency": 8, "rate": "5"}),
    ],
)
def test_a_later_source_replaces_the_load_of_an_earlier_one(
    settings: dict[str, Any], changes: dict[str, Any], merged: dict[str, Any]
) -> None:
    """As the command line replaces settings of a plan file."""
    assert override(settings, changes) == merged
    assert expand(merged)["arrivals"]
