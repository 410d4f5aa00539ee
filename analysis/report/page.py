"""Renders Runs into one HTML file that needs nothing else: no network, no second file, no library at hand.

Text that came from a server is escaped by the template and, in the charts' data, by writing `<`, `>` and `&` as JSON
escapes. The page's policy lets only the two scripts run whose hashes it names (Content Security Policy Level 3,
section 2.3.1), so that markup in a server's words could do nothing even if it got through.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis import delivery_words, memory, words
from analysis.asked import asked
from analysis.metrics import METRICS
from analysis.report import machines, objectives, said, tables
from analysis.report.curves import CDF_METRICS
from analysis.report.panels import panels
from analysis.telemetry import Series
from loadgen.runfile import Run

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
SCRIPTS = ("plotly-basic.min.js", "charts.js", "page.js", "course.js", "requests.js", "tables.js")
RUNS_WITH_TOKENS = 3
"""A page of more runs has no room for the instant of each token in the timelines."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


class Part(NamedTuple):
    """What a page needs of one Run: its Records are not among it."""

    run: Run
    summary: Mapping[str, Any]
    curves: Mapping[str, Any]
    """As analysis.report.curves draws them."""
    series: Sequence[Series] = ()
    """What the server, the GPUs and the host said during the run."""


class Extra(NamedTuple):
    """A section that another part of the project adds to the page, right after its first screen.

    The template sees `runs`, `several` and `mark` of the page beside its own `values`; its figures come from the macros
    in macros.html.j2. The script runs after the page's own, finds its data in `DATA.extras[id]` and draws with
    `Report.chart` (charts.js).
    """

    id: str
    """Of the section: lower-case letters, digits and hyphens. Links lead to it."""
    title: str
    template: str
    """A file in analysis/report/."""
    values: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    script: str = ""
    """A file in analysis/report/, or nothing."""


def render(parts: Sequence[Part], *, extras: Sequence[Extra] = ()) -> str:
    """The page of these Runs, one column or curve each, with the extra sections of the caller."""
    added = dict.fromkeys(extra.script for extra in extras if extra.script)
    scripts = [_file(name) for name in (*SCRIPTS, *added)]
    data, summaries = _data(parts), [part.summary for part in parts]
    data["extras"] = {extra.id: extra.data for extra in extras}
    shared = {
        "runs": [_run(part, drawn) for part, drawn in zip(parts, data["runs"], strict=True)],
        "several": len(parts) > 1,
        "mark": _mark(summaries),
    }
    environment = _environment()
    return environment.get_template("page.html.j2").render(
        **shared,
        policy=_policy(scripts),
        style=_file("page.css"),
        scripts=scripts,
        data=_json(data),
        extras=[(extra, environment.get_template(extra.template).render(**shared, **extra.values)) for extra in extras],
        charts=data["charts"],
        runs_with_tokens=RUNS_WITH_TOKENS,
        measured=any(part.series for part in parts),
        prompts_differ=any(len(set(part.curves["first"]["prompts"])) > 1 for part in parts),
        longest_rows=said.longest_rows([part.curves for part in parts]),
        memory_rows=machines.memory_rows(summaries),
        counter_rows=machines.counter_rows(summaries),
        overview_heads=tables.OVERVIEW,
        overview_rows=tables.overview_rows(summaries),
        objectives=objectives.rows(summaries),
        asked=asked(summaries[0]),
        percentile_rows=tables.percentile_rows(summaries),
        adjusted_rows=tables.percentile_rows(summaries, "latency_adjusted"),
        delivery_rows=tables.delivery_rows(summaries),
        length_rows=tables.length_rows(summaries),
        client_rows=tables.client_rows(summaries),
        metrics=list(METRICS.values()),
    )


def assembled(template: str, scripts: Sequence[str], data: Mapping[str, Any], **values: Any) -> str:
    """Another page with this one's looks and rules: its template, its scripts (in analysis/report/), their data."""
    texts = [_file(name) for name in scripts]
    return (
        _environment()
        .get_template(template)
        .render(policy=_policy(texts), style=_file("page.css"), scripts=texts, data=_json(data), **values)
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _run(part: Part, drawn: Mapping[str, Any]) -> dict[str, Any]:
    summary = part.summary
    return {
        "name": drawn["name"],
        "colour": drawn["colour"],
        "mark": words.simulated(summary),
        "summary": summary,
        "headline": tables.headline(summary),
        "beliefs": tables.beliefs(summary),
        "trust": tables.trust(summary),
        "objectives": objectives.kept(summary),
        "said": said.captions(part.curves),
        "memory": memory.sentences(summary),
        "not_measured": machines.not_measured(summary),
        "window": words.window(summary),
        "sending": delivery_words.delivery(summary),
        "failures": tables.failure_rows(summary),
        "started": words.started(summary),
        "environment": tables.environment(part.run, summary),
        "curves": drawn,
    }


def _data(parts: Sequence[Part]) -> dict[str, Any]:
    """What the charts draw, with the unit each axis reads best in."""
    summaries = [part.summary for part in parts]
    drawn = []
    colours: list[str] = []
    for part, name in zip(parts, tables.names(summaries), strict=True):
        colour = tables.colour_of(part.summary)
        dash = DASHES[colours.count(colour) % len(DASHES)]
        colours.append(colour)
        look = {"name": name, "colour": colour, "dash": dash, "window": part.summary["window"]}
        drawn.append({**look, **part.curves, "series": panels(part.series)})
    if len(drawn) > RUNS_WITH_TOKENS:
        drawn = [each | {"timeline": each["timeline"] | {"tokens": None}} for each in drawn]
    charts = [_chart(name, summaries) for name in CDF_METRICS]
    longest_s = max((each["sends"]["x"][-1] for each in drawn if each["sends"]["x"]), default=0)
    factor, unit = words.scale_of(longest_s)
    sends = {"factor": factor, "unit": unit}
    return {"runs": drawn, "charts": charts, "sends": sends, "gaps": _gap_unit(drawn)}


def _gap_unit(drawn: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The unit in which the typical gap between tokens reads best."""
    known = [value for each in drawn for value in each["lifetime"]["p50"] + each["lifetime"]["max"] if value]
    factor, unit = words.scale_of(known[0] if known else None)
    return {"factor": factor, "unit": unit}


def _chart(name: str, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians = [summary["latency"][name]["p50"] for summary in summaries]
    factor, unit = words.scale_of(max((median for median in medians if median is not None), default=None))
    return {"name": name, "title": METRICS[name].title, "short": METRICS[name].short, "factor": factor, "unit": unit}


def _mark(summaries: Sequence[Mapping[str, Any]]) -> str:
    """SIMULATED if any of the runs was, because a chart or table with one such curve must say so."""
    return next((mark for summary in summaries if (mark := words.simulated(summary))), "")


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _json(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
