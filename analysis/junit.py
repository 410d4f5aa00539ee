"""Objectives as JUnit XML, which every CI system shows: one test suite for each run, one test case for each objective.

There is no standard; this keeps to the strictest schema in use, that of Ant's reports (windyroad/JUnit-Schema,
JUnit.xsd), in which all attributes below are required and in this order of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree as Xml

from analysis import words


def render(summaries: Sequence[words.Summary]) -> str:
    """The document for these runs, each a summary.json with `objectives`. What cannot be told counts as skipped."""
    root = Xml.Element("testsuites")
    for place, summary in enumerate(summaries):
        _suite(root, place, summary)
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="unicode")}\n'


def _suite(root: Xml.Element, place: int, summary: words.Summary) -> None:
    run, objectives = summary["run"], summary["objectives"]
    verdicts = [each["verdict"] for each in objectives]
    mark = words.simulated(summary)
    suite = _element(
        root,
        "testsuite",
        id=place,
        name=" ".join(part for part in (mark, words.who(summary), run["id"]) if part),
        package="loadgen",
        hostname="localhost",
        timestamp=_timestamp(run["started_at"]),
        time=run["duration_s"],
        tests=len(verdicts),
        failures=verdicts.count("fail"),
        errors=0,
        skipped=verdicts.count("cannot tell"),
    )
    properties = Xml.SubElement(suite, "properties")
    for key, value in _properties(summary).items():
        _element(properties, "property", name=key, value=value)
    for objective in objectives:
        _case(suite, " ".join(part for part in (f"loadgen.{summary['server']['name']}", mark) if part), objective)
    Xml.SubElement(suite, "system-out").text = _text(words.endings(summary) + "\n" + words.believe(summary))
    Xml.SubElement(suite, "system-err").text = _text("\n".join(words.warnings(summary)))


def _case(suite: Xml.Element, group: str, objective: Mapping[str, Any]) -> None:
    case = _element(suite, "testcase", name=objective["objective"], classname=group, time=0)
    if objective["verdict"] == "fail":
        failure = _element(case, "failure", message=objective["said"], type="objective")
        failure.text = _text(words.objective(objective))
    elif objective["verdict"] == "cannot tell":
        _element(case, "skipped", message=objective["said"])


def _properties(summary: words.Summary) -> dict[str, Any]:
    run, server = summary["run"], summary["server"]
    known = {
        **{f"run.{key}": run[key] for key in ("id", "label", "started_at", "arrivals", "seed", "command", "version")},
        **{f"server.{key}": server[key] for key in ("name", "version", "model", "url", "endpoint", "simulated")},
        "client.verdict": summary["client"]["verdict"],
    }
    return {key: value for key, value in known.items() if value is not None}


def _timestamp(text: str) -> str:
    """UTC to the second and without a zone, as the schema has it; the epoch where the run file holds no time."""
    try:
        started = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        started = datetime.fromtimestamp(0, UTC)
    return started.strftime("%Y-%m-%dT%H:%M:%S")


def _element(parent: Xml.Element, tag: str, **attributes: Any) -> Xml.Element:
    return Xml.SubElement(parent, tag, {key: _text(value) for key, value in attributes.items()})


def _text(value: Any) -> str:
    """Without what XML 1.0 cannot hold even when escaped (section 2.2): control characters, surrogates, U+FFFE."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in str(value))
