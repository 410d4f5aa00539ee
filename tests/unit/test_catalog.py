"""The catalog: every file loads and cites its source; a wrong file reports all its mistakes."""

from __future__ import annotations

import pytest

from workloads import catalog
from workloads.arrivals import Burst
from workloads.lengths import Fixed
from workloads.syntax import WorkloadError
from workloads.workload import Synthetic

GOOD = """
summary = "a"
source = "arXiv 0000.00000"
requests = 5
arrivals = "burst"
input_tokens = "512"
output_tokens = "128"
"""


def test_the_experiment_of_the_paper_comes_first() -> None:
    """`paper-burst` is 1000 synthetic prompts of 512 tokens at once."""
    assert catalog.names()[0] == "paper-burst"
    named = catalog.load("paper-burst")
    assert (named.requests, named.arrivals, named.input_tokens) == (1000, Burst(), Fixed(512))
    assert named.workload == Synthetic()
    assert "2311.03687" in named.source


@pytest.mark.parametrize("name", catalog.names())
def test_every_workload_loads_and_cites_its_source(name: str) -> None:
    """Each file is valid, has a summary of one line, and names a paper or a repository."""
    named = catalog.load(name)
    assert named.name == name
    assert "\n" not in named.summary
    assert "arXiv" in named.source or "github.com/" in named.source


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The hint is the catalog."""
    with pytest.raises(WorkloadError, match="no workload 'chat'") as caught:
        catalog.load("chat")
    assert "paper-burst" in caught.value.hint


def test_a_name_is_not_a_path() -> None:
    """A name that leads out of the catalog's folder is just unknown."""
    with pytest.raises(WorkloadError, match="no workload"):
        catalog.load("../catalog/paper-burst")


def test_all_mistakes_are_reported_at_once() -> None:
    """Unknown keys, missing keys and bad values each get a line with the key's name."""
    wrong = 'requests = 0\narrivals = "poisson"\ninput_tokens = 512\nsummary = ""\nspeed = 3\noutput_tokens = "1..2"\n'
    with pytest.raises(WorkloadError) as caught:
        catalog.parse(wrong, "x")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "arrivals", "input_tokens", "output_tokens", "requests", "source", "speed", "summary",
    ]  # fmt: skip
    assert "write poisson:R" in lines[0]
    assert lines[4:6] == ["x: source: missing", "x: speed: there is no such setting"]


@pytest.mark.parametrize("requests", ["0", "1000001", "true", '"5"', "2.0"])
def test_the_number_of_requests_is_a_whole_number(requests: str) -> None:
    """Nothing but an integer within the limit is taken."""
    with pytest.raises(WorkloadError, match="x: requests: "):
        catalog.parse(GOOD.replace("requests = 5", f"requests = {requests}"), "x")


def test_a_file_that_is_not_toml_says_where() -> None:
    """The parser's line and column are passed on."""
    with pytest.raises(WorkloadError, match=r"x: is not TOML: .*line 2"):
        catalog.parse("a = 1\nb = \n", "x")
