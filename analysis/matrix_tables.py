"""The rows of a matrix's tables, as plain values for the page; no figure is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from analysis import words
from analysis.asked import length
from analysis.matrix import LENGTH_SHARES
from analysis.matrix_words import MAIN, figure, interval, platform_of, server_of
from analysis.report.charts import PALETTE

Found = Mapping[str, Any]


def figure_row(found: Found, cell: Found, shown: Sequence[str]) -> dict[str, Any]:
    """A cell of the table of all figures."""
    return _labels(found, cell) | {
        "n": len(cell["runs"]),
        "figures": [
            {"name": name, "text": figure(name, cell["figures"]), "interval": interval(name, cell["figures"])}
            for name in shown
        ],
    }


def length_row(found: Found, cell: Found) -> dict[str, Any]:
    """What was asked of a cell and how long its answers were."""
    lengths = cell["lengths"]
    asked = list(dict.fromkeys(length(run["output_tokens_asked"]) for run in cell["runs"]))
    shares = [lengths[name] for name in LENGTH_SHARES]
    ends = [words.UNKNOWN if value is None else f"{value:,.0f}" for value in shares]
    mean = words.UNKNOWN if lengths["mean"] is None else f"{lengths['mean']:,.1f}"
    asked_text = " or ".join(asked)
    return _labels(found, cell) | {"asked": asked_text, "mean": mean, "ends": ends, "differ": f"{lengths['differ']:,}"}


def ending_row(found: Found, cell: Found) -> dict[str, Any]:
    """How the requests of a cell ended."""
    texts = [f"{cell['requests'][state]:,}" for state in ("sent", "complete", "truncated", "failed", "dropped")]
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in cell["errors"].items())
    return _labels(found, cell) | {"state": cell["state"], "texts": texts, "kinds": kinds}


def failure_row(found: Found, line: Found) -> dict[str, Any]:
    """A run that could not be made, and why."""
    kept = {name: str(line.get(name, "")) for name in ("kind", "reason", "hint", "log")}
    return _labels(found, line["cell"]) | {"repeat": line["repeat"], **kept}


def run_row(found: Found, cell: Found, run: Found) -> dict[str, Any]:
    """One run, with where it lies."""
    rate = words.UNKNOWN if run[MAIN] is None else words.significant(run[MAIN], 4)
    cold = words.UNKNOWN if run["cold"] is None else "cold" if run["cold"] else "warm"
    place = words.UNKNOWN if run["start"] is None else str(run["start"])
    return _labels(found, cell) | {
        **{name: run[name] for name in ("repeat", "folder", "seed", "verdict")},
        **{"start": place, "cold": cold, "rate": rate, "began": str(run["started_at"])[:19].replace("T", " ")},
    }


def difference_rows(found: Found) -> list[dict[str, Any]]:
    """One row per pair of cells, with a ratio, its interval and a verdict for each figure that is compared."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in found["differences"]:
        a, b, by = each["a"], each["b"], each["by"]
        name = server_of if by == "server" else platform_of
        where = [platform_of(found, a["host"]) if by == "server" else server_of(found, a["server"])]
        where += [a[kind] for kind in ("model", "workload") if len(found[f"{kind}s"]) > 1]
        key = (by, a["server"], a["host"], a["model"], a["workload"], b["server"], b["host"])
        row = rows.setdefault(
            key,
            {"pair": f"{name(found, a[by])} / {name(found, b[by])}", "where": ", ".join(where), "cells": [], "by": by},
        )
        row["equal_work"] = each["equal_work"]
        row["cells"].append(_ratio(each))
    return sorted(rows.values(), key=lambda row: str(row["by"]), reverse=True)  # servers first


def _ratio(each: Found) -> dict[str, str]:
    text = words.UNKNOWN if each["ratio"] is None else words.significant(each["ratio"], 3)
    ends = "" if each["ci95"] is None else " to ".join(words.significant(end, 3) for end in each["ci95"])
    return {"figure": each["figure"], "text": text, "interval": ends, "verdict": each["verdict"]}


def memory_rows(found: Found) -> list[dict[str, Any]]:
    """What each cell is known to have taken: one row per GPU and process, the first with the KV cache."""
    rows = []
    for cell in found["cells"]:
        cache = cell["memory"].get("kv_cache")
        kept = words.UNKNOWN if not cache or cache["peak_share"] is None else words.share(cache["peak_share"])
        levels = cell["memory"].get("levels", []) or ([{"of": "server"}] if cache else [])
        for place, each in enumerate(levels):
            texts = [words.size(each.get(f"{name}_bytes")) for name in ("idle", "peak", "loaded", "total")]
            rows.append(_labels(found, cell) | {"of": each["of"], "texts": [*texts, kept if place == 0 else ""]})
    return rows


def start_rows(found: Found) -> list[dict[str, Any]]:
    """Each time a server came up: which build of it, and how long that took."""
    rows = []
    for line in found["server_starts"]:
        facts = line["facts"]
        build = [str(facts[name]) for name in ("version", "image", "image_digest") if facts.get(name)]
        texts = [str(line["start"]), line["model"], words.duration(line["seconds"], 2), str(facts.get("launch", ""))]
        names = [server_of(found, line["server"]), platform_of(found, line["host"])]
        rows.append({"names": names, "texts": texts, "build": ", ".join(build)})
    return rows


def memory_notes(found: Found) -> list[str]:
    """What the engines take at their start, and what could not be read and why."""
    notes = [note for cell in found["cells"] for note in cell["memory"].get("notes", [])]
    return list(dict.fromkeys(notes))


def _labels(found: Found, cell: Found) -> dict[str, Any]:
    kind = next(each["server"] for each in found["servers"] if each["name"] == cell["server"])
    return {
        "server": server_of(found, cell["server"]),
        "colour": colours(found)[kind],
        "platform": platform_of(found, cell["host"]),
        "model": cell["model"],
        "workload": cell["workload"],
    }


def colours(found: Mapping[str, Any]) -> dict[str, str]:
    """The colour of each kind of server: a name of the palette, in the order in which they come."""
    kinds = dict.fromkeys(cell["kind"] for cell in found["cells"])
    return dict(zip(kinds, cycle(PALETTE), strict=False))
