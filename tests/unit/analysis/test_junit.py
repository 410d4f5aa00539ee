"""JUnit XML, as a parser and the strictest schema in use see it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from loadgen.analysis.objectives import parse
from loadgen.analysis.slo import judge, junit
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary
from tests.support.runs import burst, failed, run_of, summarise, typed

SUITE = {"id", "name", "package", "hostname", "timestamp", "time", "tests", "failures", "errors"}
SHAPE: dict[str, tuple[set[str], set[str], list[str]]] = {
    "testsuites": (set(), set(), ["testsuite*"]),
    "testsuite": (SUITE, {"skipped"}, ["properties", "testcase*", "system-out", "system-err"]),
    "properties": (set(), set(), ["property*"]),
    "property": ({"name", "value"}, set(), []),
    "testcase": ({"name", "classname", "time"}, set(), ["skipped?", "failure?"]),
    "failure": ({"type"}, {"message"}, []),
    "skipped": (set(), {"message"}, []),
    "system-out": (set(), set(), []),
    "system-err": (set(), set(), []),
}
"""JUnit.xsd of windyroad/JUnit-Schema: required and optional attributes, and the elements within, in their order."""

ASKED = ("ttft.p50 < 100s", "ttft.p99 < 1us", "complete >= 95%", "failed <= 1")
HOSTILE = "a <b> & \"c\" 'd' ]]> \x1b[31m \x00 é"


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    """A run of 60 requests, one of them failed, whose objectives pass, fail, cannot be told and pass."""
    run = run_of(tmp_path / "run", [*burst(59, 4), failed(59)])
    summary = typed(summarise(run))
    summary.objectives = judge(parse(ASKED), frame_of_run(run), summary, 0.95)
    return summary


def test_it_has_the_shape_of_the_schema(summary: Summary) -> None:
    """Every element stands where it may, in order, with all attributes it needs and no other."""
    root = Xml.fromstring(junit([summary, summary]))
    assert root.tag == "testsuites"
    for element in root.iter():
        required, optional, children = SHAPE[element.tag]
        assert required <= set(element.keys()) <= required | optional
        order = "".join(f"(?:{name.rstrip('*?')} )" + re.sub("[^*?]", "", name) for name in children)
        assert re.fullmatch(order, "".join(f"{child.tag} " for child in element)), element.tag


def test_every_objective_is_a_case(summary: Summary) -> None:
    """A pass is empty, a fail holds what was measured, what cannot be told is skipped; the counts agree."""
    (suite,) = Xml.fromstring(junit([summary]))
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == list(ASKED)
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"], ["skipped"], []]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "4",
        "1",
        "0",
        "1",
    )
    failure = cases[1][0]
    assert failure.get("message") == summary.objectives[1].said
    assert failure.text == f"ttft.p99 < 1us: {failure.get('message')}; 1 request not complete and left out"
    assert "requests would decide" in cases[2][0].get("message", "")


def test_the_output_lists_every_objective_with_its_interval(tmp_path: Path) -> None:
    """A case that passes has no text, so the output of its suite says by how much and whether it is marginal."""
    run = run_of(tmp_path / "run", [*burst(59, 4), failed(59)])
    summary = typed(summarise(run))
    summary.objectives = judge(parse(ASKED), frame_of_run(run), summary)
    (suite,) = Xml.fromstring(junit([summary]))
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "0")
    lines = (suite.findtext("system-out") or "").splitlines()
    assert len(lines) == 2 + len(ASKED)
    assert lines[4].startswith("pass: complete >= 95%: 98.33%, 95% CI 91.06\u201399.96%; marginal, about ")


def test_the_run_is_named_in_it(summary: Summary) -> None:
    """Properties say which run of which server it was; time and duration are the run's; what is unknown is left out."""
    summary.server.version = None
    (suite,) = Xml.fromstring(junit([summary]))
    properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert properties["run.id"] == summary.run.id
    assert properties["server.name"] == "tgi"
    assert properties["client.verdict"] == summary.client.verdict
    assert "server.version" not in properties
    assert suite.get("timestamp") == "2026-11-21T09:00:00"
    assert float(suite.get("time", "")) == summary.run.duration_s


def test_several_runs_are_several_suites(summary: Summary) -> None:
    """Numbered from 0."""
    assert [suite.get("id") for suite in Xml.fromstring(junit([summary, summary]))] == ["0", "1"]


def test_a_simulated_server_is_never_taken_for_a_real_one(tmp_path: Path) -> None:
    """The mark is in the suite's name and in the group of each case."""
    run = run_of(tmp_path / "run", burst(5, 4), simulated=True)
    summary = typed(summarise(run))
    summary.objectives = judge(parse(ASKED), frame_of_run(run), summary)
    (suite,) = Xml.fromstring(junit([summary]))
    assert "SIMULATED" in suite.get("name", "")
    assert all("SIMULATED" in case.get("classname", "") for case in suite.iter("testcase"))


def test_text_of_others_is_only_text(summary: Summary) -> None:
    """A server's words with markup and control characters come back as they were, less what XML cannot hold."""
    summary.server.version = HOSTILE
    summary.run.started_at = "no time at all"
    (suite,) = Xml.fromstring(junit([summary]))
    versions = [each.get("value") for each in suite.iter("property") if each.get("name") == "server.version"]
    assert versions == [HOSTILE.replace("\x1b", "\ufffd").replace("\x00", "\ufffd")]
    assert suite.get("timestamp") == "1970-01-01T00:00:00"
