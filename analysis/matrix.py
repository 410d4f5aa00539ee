"""A matrix in figures: its runs grouped into cells, what each cell gave over its repeats, and what differs.

Pure functions of the plan, of the summaries and samples of the runs, and of what matrix.jsonl says beside them; nothing
is read here. A cell is one server on one host with one model under one workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.frame import Floats, Frame
from analysis.matrix_differences import differences
from analysis.matrix_memory import memory
from analysis.metrics import METRICS
from analysis.repeats import figures, over_runs
from analysis.stats import percentile

FORMAT = 1
CELL = ("server", "host", "model", "workload")
SAMPLED = ("e2e_s", "ttft_s", "tpot_s")
"""Latencies of which a cell's distribution is drawn: one sample per request each."""

Summary = Mapping[str, Any]
Key = tuple[str, str, str, str]


class Figure(NamedTuple):
    """A figure of a run by which cells are compared; its name is that of analysis.repeats and of --assert."""

    name: str
    title: str
    unit: str
    better: str


FIGURES = (
    Figure("output_tokens_per_s", "Output throughput", "tokens/s", "higher"),
    Figure("total_tokens_per_s", "Total throughput", "tokens/s", "higher"),
    Figure("requests_per_s", "Requests", "requests/s", "higher"),
    Figure("ttft.p50", "TTFT, median", "s", "lower"),
    Figure("ttft.p99", "TTFT, p99", "s", "lower"),
    Figure("tpot.p50", "TPOT, median", "s", "lower"),
    Figure("e2e.p50", "E2E, median", "s", "lower"),
    Figure("e2e.p99", "E2E, p99", "s", "lower"),
    Figure("normalised.mean", "Normalised, mean", "s", "lower"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run of a cell."""

    cell: Key
    repeat: int
    folder: str
    """Below the matrix's folder."""
    start: int | None
    """Which start of the server it was part of; None where matrix.jsonl does not say."""
    place: int | None
    """0: the first run after that start."""
    summary: Summary
    samples: Mapping[str, Floats]
    """Of each metric in SAMPLED."""
    lengths: Floats
    """Output tokens of each complete answer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known beside the finished runs."""

    plan: Mapping[str, Any]
    """As matrix.jsonl has it: the resolved plan, with `hosts_found`."""
    cells: Sequence[Key]
    """All that were to be measured, in the order of the plan."""
    skipped: Mapping[str, str]
    failures: Sequence[Mapping[str, Any]]
    """The newest failure of each run that is not finished."""
    starts: Sequence[Mapping[str, Any]]
    """Each time a server came up."""
    started_at: str
    version: str
    interrupted: bool


def samples_of(frame: Frame) -> tuple[dict[str, Floats], Floats]:
    """What a Measured keeps of a run's Frame: samples of latencies, and lengths of complete answers."""
    reported = frame.output_reported[frame.measured & frame.complete]
    return {name: METRICS[name].values(frame) for name in SAMPLED}, reported[~np.isnan(reported)]


def matrix(kept: Kept, measured: Sequence[Measured]) -> dict[str, Any]:
    """matrix.json."""
    by_cell = {cell: [run for run in measured if run.cell == cell] for cell in kept.cells}
    failures = Counter(_key(line["cell"]) for line in kept.failures)
    plan = kept.plan
    cells = [_cell(kept, cell, runs, failures[cell]) for cell, runs in by_cell.items()]
    return {
        "format": FORMAT,
        "name": plan["name"],
        "started_at": kept.started_at,
        "version": kept.version,
        "interrupted": kept.interrupted,
        "simulated": any(run.summary["server"]["simulated"] for run in measured),
        "servers": [{"name": each["name"], "server": each["server"]} for each in plan["servers"]],
        "hosts": hosts(plan),
        "models": [each["name"] for each in plan["models"]],
        "workloads": [each["name"] for each in plan["workloads"]],
        "repeats": plan["repeats"],
        "starts": plan["starts"],
        "seed": plan["seed"],
        "equal_work": _equal_work(plan, by_cell),
        "references": plan.get("references", []),
        "cells": cells,
        "differences": differences(cells),
        "skipped": [{"cell": cell, "reason": reason} for cell, reason in kept.skipped.items()],
        "failures": [dict(line) for line in kept.failures],
        "server_starts": [dict(line) for line in kept.starts],
    }


def hosts(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each host with the name under which figures show it: its platform, with its own where two share one."""
    found = [(each["name"], plan["hosts_found"][each["name"]]["platform"] or each["name"]) for each in plan["hosts"]]
    shared = Counter(platform for _, platform in found)
    return [
        {"name": name, "platform": platform, "title": platform if shared[platform] == 1 else f"{platform} ({name})"}
        for name, platform in found
    ]


def _cell(kept: Kept, cell: Key, runs: Sequence[Measured], failures: int) -> dict[str, Any]:
    planned = int(kept.plan["repeats"])
    state = "measured" if len(runs) == planned else "failed" if failures and not runs else "partly measured"
    return {
        **dict(zip(CELL, cell, strict=True)),
        "kind": next(each["server"] for each in kept.plan["servers"] if each["name"] == cell[0]),
        "state": state if runs or failures else "not measured",
        "planned": planned,
        "failed": failures,
        "versions": sorted({str(run.summary["server"]["version"] or "") for run in runs}),
        "served": sorted({str(run.summary["server"]["model"] or "") for run in runs}),
        "simulated": any(run.summary["server"]["simulated"] for run in runs),
        "speed": next((run.summary["server"]["speed"] for run in runs), None),
        "figures": over_repeats(runs),
        "lengths": lengths(runs),
        "requests": {
            state: sum(run.summary["requests"][state] for run in runs)
            for state in ("sent", "complete", "truncated", "failed", "dropped")
        },
        "errors": dict(sum((Counter(run.summary["requests"]["errors"]) for run in runs), Counter[str]()).most_common()),
        "verdicts": dict(Counter(run.summary["client"]["verdict"] for run in runs)),
        "memory": memory([run.summary["memory"] for run in runs]),
        "runs": [_run(run) for run in runs],
    }


def _run(run: Measured) -> dict[str, Any]:
    return {
        "repeat": run.repeat,
        "folder": run.folder,
        "started_at": run.summary["run"]["started_at"],
        "start": run.start,
        "place": run.place,
        "cold": None if run.place is None else run.place == 0,
        "seed": run.summary["run"]["seed"],
        "duration_s": run.summary["run"]["duration_s"],
        "verdict": run.summary["client"]["verdict"],
        "output_tokens_asked": run.summary["run"]["output_tokens"],
        "output_tokens_per_s": run.summary["throughput"]["output_tokens_per_s"],
    }


def over_repeats(runs: Sequence[Measured]) -> dict[str, dict[str, Any]]:
    """Each figure over the repeats: its mean, the interval of that, and each run's value."""
    values = [figures(run.summary) for run in runs]
    return {figure.name: over_runs([each[figure.name] for each in values]) for figure in FIGURES}


def lengths(runs: Sequence[Measured]) -> dict[str, Any]:
    """Output tokens of complete answers, over all repeats: asked in all, and as they came."""
    ordered = np.sort(np.concatenate([run.lengths for run in runs])) if runs else np.zeros(0)
    known = len(ordered) > 0
    return {
        "asked": sum(run.summary["tokens"]["output_asked"] for run in runs),
        "reported": sum(run.summary["tokens"]["output_reported"] for run in runs),
        "differ": sum(run.summary["tokens"]["output_mismatches"] for run in runs),
        "answers": len(ordered),
        "mean": round(float(ordered.mean()), 3) if known else None,
        **{name: float(percentile(ordered, share)) if known else None for name, share in LENGTH_SHARES.items()},
    }


LENGTH_SHARES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "max": 1.0}


def pooled(runs: Iterable[Measured], metric: str) -> Floats:
    """One metric's samples of all repeats of a cell."""
    found = [run.samples[metric] for run in runs]
    return np.concatenate(found) if found else np.zeros(0)


def _equal_work(plan: Mapping[str, Any], by_cell: Mapping[Key, Sequence[Measured]]) -> dict[str, Any] | None:
    """Who led, and how many answers' lengths the others were given."""
    leader = plan.get("equal_work")
    if leader is None:
        return None
    led = [
        {"host": cell[1], "model": cell[2], "workload": cell[3], "given": f"equal-work/{'-'.join(cell[1:])}.txt"}
        for cell in by_cell
        if cell[0] == leader
    ]
    return {"server": leader, "lengths": led}


def _key(cell: Mapping[str, str]) -> Key:
    return cell["server"], cell["host"], cell["model"], cell["workload"]
