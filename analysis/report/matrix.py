"""Renders a matrix into one HTML file that needs nothing else, with the looks and the rules of a run's page.

A page of its own and not sections of a run's: a matrix has dozens of runs, and what a run's page says of each is in
that run's own report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis import matrix_tables as tables
from analysis import matrix_words as said
from analysis import words
from analysis.frame import Floats
from analysis.matrix import FIGURES, SAMPLED, Measured, pooled
from analysis.matrix_differences import COMPARED
from analysis.matrix_words import BY_NAME
from analysis.metrics import METRICS
from analysis.report.charts import DASHES
from analysis.report.curves import distribution, drawn_ranks
from analysis.report.page import assembled

SCRIPTS = ("plotly-basic.min.js", "charts.js", "matrix.js")
POINTS_OF_A_RUN = 120
SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft.p50", "ttft.p99", "tpot.p50", "e2e.p50", "e2e.p99")
"""Figures that the table of cells has columns for; matrix.json has all."""

Found = Mapping[str, Any]
Group = tuple[str, str]
"""A model and a workload: what is drawn together."""


def render(found: Found, measured: Sequence[Measured]) -> str:
    """The page of a matrix: `found` is matrix.json, `measured` its finished runs."""
    mark = said.mark(found)
    groups = [_group(found, group, place) for place, group in enumerate(groups_of(found))]
    return assembled(
        "matrix.html.j2",
        SCRIPTS,
        _data(found, measured, groups),
        found=found,
        mark=mark,
        title=said.title(found),
        groups=groups,
        metrics=[{"name": name, "title": METRICS[name].title, "short": words.NAMES[name]} for name in SAMPLED],
        beliefs=said.beliefs(found),
        order=said.order(found),
        starts=tables.start_rows(found),
        plan=json.dumps(found["plan"], indent=2),
        equal_work=said.equal_work(found),
        figures=[figure for figure in FIGURES if figure.name in SHOWN],
        figure_rows=[tables.figure_row(found, cell, SHOWN) for cell in _met(found)],
        differences=tables.difference_rows(found),
        compared=[BY_NAME[name] for name in COMPARED],
        memory=tables.memory_rows(found),
        memory_notes=tables.memory_notes(found),
        length_rows=[tables.length_row(found, cell) for cell in _met(found)],
        failure_rows=[tables.failure_row(found, line) for line in found["failures"]],
        ending_rows=[tables.ending_row(found, cell) for cell in found["cells"]],
        runs=[tables.run_row(found, cell, run) for cell in found["cells"] for run in cell["runs"]],
    )


def groups_of(found: Found) -> list[Group]:
    """Every model and workload of which a cell was measured."""
    return list(dict.fromkeys((cell["model"], cell["workload"]) for cell in _met(found)))


def _met(found: Found) -> list[Found]:
    return [cell for cell in found["cells"] if cell["runs"]]


def _group(found: Found, group: Group, place: int) -> dict[str, Any]:
    """One model and workload: its charts, by the names under which the script draws them."""
    cells = [cell for cell in _met(found) if (cell["model"], cell["workload"]) == group]
    charts = [
        {"id": f"host-{place}-{index}", "kind": "host", "title": host["title"], "cells": here}
        for index, host in enumerate(found["hosts"])
        if (here := [cell for cell in cells if cell["host"] == host["name"]])
    ]
    charts += [
        {"id": f"server-{place}-{index}", "kind": "server", "title": said.server_title(server), "cells": here}
        for index, server in enumerate(found["servers"])
        if (here := [cell for cell in cells if cell["server"] == server["name"]])
    ]
    return {
        "id": f"group-{place}",
        "bars": f"bars-{place}",
        "model": group[0],
        "workload": group[1],
        "title": said.group_title(found, group),
        "sentences": said.sentences(found, group),
        "charts": [chart | {"text": said.chart_text(found, chart["cells"], chart["kind"])} for chart in charts],
        "cells": cells,
    }


def _data(found: Found, measured: Sequence[Measured], groups: Sequence[Found]) -> dict[str, Any]:
    """What the script draws. `runs` is what charts.js asks for, and empty: no chart here is of a single run."""
    cells, colours = _met(found), tables.colours(found)
    titles = {host["name"]: host["title"] for host in found["hosts"]}
    names = {name: index for index, name in enumerate(dict.fromkeys(cell["server"] for cell in cells))}
    return {
        "runs": [],
        "figures": [_axis(cells, figure.name, figure.title, figure.unit) for figure in FIGURES],
        "metrics": [
            {"name": name, "title": METRICS[name].title, "short": words.NAMES[name], **_scale(measured, name)}
            for name in SAMPLED
        ],
        "cells": [
            _drawn(
                cell, colours[cell["kind"]], [run for run in measured if _is(run, cell)], titles, names, found["hosts"]
            )
            for cell in cells
        ],
        "groups": [
            {
                "bars": group["bars"],
                "cells": [cells.index(cell) for cell in group["cells"]],
                "charts": [
                    {"id": chart["id"], "kind": chart["kind"], "cells": [cells.index(cell) for cell in chart["cells"]]}
                    for chart in group["charts"]
                ],
            }
            for group in groups
        ],
    }


def _drawn(
    cell: Found,
    colour: str,
    runs: Sequence[Measured],
    titles: Mapping[str, str],
    names: Mapping[str, int],
    hosts: Sequence[Found],
) -> dict[str, Any]:
    """One cell: its names and colour, its figures, and its curves, pooled and of each repeat."""
    places = [host["name"] for host in hosts]
    return {
        "server": said.server_title({"name": cell["server"], "server": cell["kind"]}),
        "platform": titles[cell["host"]],
        "colour": colour,
        "server_dash": DASHES[names[cell["server"]] % len(DASHES)] if cell["server"] != cell["kind"] else "solid",
        "host_dash": DASHES[places.index(cell["host"]) % len(DASHES)],
        "figures": {name: _values(each) for name, each in cell["figures"].items()},
        "curves": {
            name: {
                "pooled": distribution(pooled(runs, name), sum(len(run.samples[name]) for run in runs)),
                "runs": [_thin(run.samples[name]) for run in runs] if len(runs) > 1 else [],
            }
            for name in SAMPLED
        },
    }


def _values(figure: Found) -> dict[str, Any]:
    return {"mean": figure["mean"], "ci95": figure["ci95"], "values": figure["values"]}


def _thin(samples: Floats) -> dict[str, list[float]]:
    """One run's distribution through few of its samples, the extremes among them."""
    ordered = np.sort(samples)
    ranks = drawn_ranks(len(ordered))
    if len(ranks) > POINTS_OF_A_RUN:
        ranks = np.unique(np.linspace(0, len(ordered) - 1, POINTS_OF_A_RUN).astype(np.int64))
    return {
        "x": np.round(ordered[ranks], 7).tolist(),
        "y": np.round((ranks + 1) / max(1, len(ordered)), 6).tolist(),
    }


def _axis(cells: Sequence[Found], name: str, title: str, unit: str) -> dict[str, Any]:
    """A figure's axis in the unit that reads best; rates keep theirs."""
    means = [cell["figures"][name]["mean"] for cell in cells if cell["figures"][name]["mean"] is not None]
    factor, best = words.scale_of(max(means, default=None)) if unit == "s" else (1.0, unit)
    return {"name": name, "title": title, "unit": best, "factor": factor}


def _scale(measured: Sequence[Measured], name: str) -> dict[str, Any]:
    medians = [float(np.median(run.samples[name])) for run in measured if len(run.samples[name])]
    factor, unit = words.scale_of(max(medians, default=None))
    return {"factor": factor, "unit": unit}


def _is(run: Measured, cell: Found) -> bool:
    return run.cell == (cell["server"], cell["host"], cell["model"], cell["workload"])
