"""Shared parts of the pages of `loadgen plan-capacity` and `loadgen twin`, which show predictions of a server model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from loadgen.analysis.report import Chip, Document, RunStyle, Section
from loadgen.analysis.report.charts import DASHES, PALETTE

MARK = "SIMULATED (virtual)"


def model_document(
    kind: str,
    titles: tuple[str, str],
    sections: Sequence[Section],
    *,
    chips: Sequence[Chip],
    data: Mapping[str, Any],
    styles: Sequence[RunStyle] = (),
    scripts: Sequence[str] = (),
) -> Document:
    """Return a page that is marked as simulated.

    `kind` is the name of the command, and `titles` contains the title and the subtitle. `data` contains the `runs`
    (results of `run_data`) and the `charts` (results of `chart_definition`). `scripts` are the names of additional
    scripts in the folder analysis/report.
    """
    title, subtitle = titles
    return Document(kind, title, sections, subtitle, MARK, styles, scripts, data, version("llm-loadgen"), chips=chips)


def run_data(name: str, index: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of one line of a chart, in the form that the page's scripts expect.

    `name` is the label of the line, and `data` contains its values by column. `index` is the index of the line, which
    determines its colour and its style.
    """
    dash = DASHES[index // len(PALETTE) % len(DASHES)]
    return {"name": name, "colour": colour(index), "dash": dash, "window": None, "data": data}


def colour(index: int) -> str:
    """Return the name of the colour of the line with this index."""
    return list(PALETTE)[index % len(PALETTE)]


def chart_definition(
    name: str, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return a chart in the form that charts.js expects.

    `columns` maps each heading of the chart's table to the name of a data column.
    """
    return {"id": name, "script": "", "traces": traces, "layout": layout, "table": columns, "scales": {}}
