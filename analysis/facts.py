"""What a Run says without any formula: what was asked, of whom, and how the requests ended."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis import stats
from analysis.asked import turns
from analysis.frame import Booleans, Ending, Floats, Frame, Seen
from loadgen.runfile import Run

EXAMPLES_PER_KIND = 3
BURST_INTERVALS = (
    "Requests of one burst are not independent: they wait in one queue and share the server's steps. An interval says "
    "how exactly the figure of this run is known, not how far another run's may be: only repeats tell (--repeats)."
)
RUN_INTERVALS = (
    "Requests that are in flight together share the server's steps, so they are not quite independent. An interval "
    "says how exactly the figure of this run is known, not how far another run's may be: only repeats tell (--repeats)."
)
ASKED = ("n", "workload", "input_tokens", "output_tokens", "seed", "workers", "timeout_s")


def run_facts(run: Run, frame: Frame) -> dict[str, Any]:
    """Which run this is and how it can be had again."""
    plan = run.header.plan
    folder = run.path.resolve().parent.name
    return {
        "id": folder,
        "label": plan.get("label") or folder,
        "started_at": run.header.started_at,
        "duration_s": round(_ended_ns(run, frame) / 1e9, 9),
        "arrivals": plan.get("arrivals", "burst"),
        "asked_s": plan.get("duration_s"),
        **{name: plan.get(name) for name in ASKED},
        "interrupted": run.footer is None or run.footer.interrupted,
        "damaged_lines": run.damaged_lines,
        "notes": [] if run.footer is None else run.footer.notes,
        "command": shlex.join(run.header.command),
        "version": run.header.version,
        "prompts": run.header.client.get("prompts"),
        "forced": run.header.client.get("forced"),
        "repeat": plan.get("repeat", 0),
        "repeats": plan.get("repeats", 1),
    }


def server_facts(run: Run) -> dict[str, Any]:
    """Who answered, as the probe found it."""
    server = run.header.server
    return {
        "name": server.get("name") or run.header.plan.get("server"),
        "version": server.get("version"),
        "model": server.get("model"),
        "platform": run.header.plan.get("platform") or "",
        "url": server.get("url") or run.header.plan.get("url"),
        "endpoint": server.get("endpoint") or run.header.plan.get("endpoint"),
        "simulated": bool(server.get("simulated", False)),
        "speed": server.get("speed"),
        "limits": server.get("limits") or {},
    }


def request_counts(run: Run, frame: Frame) -> dict[str, Any]:
    """How the requests ended. `unrecorded` are those a killed run left no Record of."""
    endings = {ending: seen for ending, seen in frame.endings.items() if ending.measured}
    states, errors = Counter[str](), Counter[str]()
    for ending, seen in endings.items():
        states[ending.state] += seen.number
        if ending.kind:
            errors[ending.kind] += seen.number
    plan, recorded = run.header.plan, states.total()
    # Of a given time nobody knows how many it would be, and of a file's sessions how many turns.
    asked = 0 if plan.get("duration_s") else (plan.get("n") or 0) * turns(plan.get("workload") or "")
    return {
        "sent": recorded - states["dropped"],
        **{state: states[state] for state in ("complete", "truncated", "failed", "dropped")},
        "unrecorded": max(0, asked - recorded),
        "warmup": int((~frame.measured).sum()),
        "errors": dict(errors.most_common()),
        "examples": {kind: _examples(kind, endings) for kind in errors},
    }


def token_counts(frame: Frame) -> dict[str, Any]:
    """What was asked and what the server reported, over the requests sent; mismatches where both are known.

    An output mismatch is a complete answer of another length than asked, which only servers that cannot fix the
    length give; elsewhere such an answer is truncated.
    """
    tried = frame.measured & ~frame.dropped
    complete = frame.measured & frame.complete
    counted_by = Counter[str]()
    for source, number in frame.sources.items():
        if source.measured and source.state == "complete":
            counted_by[source.counted_by or "nobody"] += number
    return {
        "prompt_asked": _sum(frame.prompt_asked, tried),
        "prompt_reported": _sum(frame.prompt_reported, tried),
        "output_asked": _sum(frame.output_asked, tried),
        "output_reported": _sum(frame.output_reported, tried),
        "prompt_mismatches": _mismatches(frame.prompt_reported, frame.prompt_asked, tried),
        "output_mismatches": _mismatches(frame.output_reported, frame.output_asked, complete),
        "prompt_unknown": int((np.isnan(frame.prompt_asked) & complete).sum()),
        "prompt_unreported": int(np.isnan(frame.prompt_reported[complete]).sum()),
        "counted_by": dict(counted_by),
    }


def what_intervals_mean(arrivals: str) -> dict[str, Any]:
    """What the 95 % intervals of `latency` are of, and whether requests may be taken for independent."""
    burst = arrivals == "burst"
    return {"confidence": stats.CONFIDENCE, "independent": False, "note": BURST_INTERVALS if burst else RUN_INTERVALS}


def _ended_ns(run: Run, frame: Frame) -> int:
    """The footer's instant; without one the last instant that anything is known of."""
    if run.footer is not None:
        return run.footer.ended_ns
    last_ns = np.nanmax(frame.end_ns, initial=0)
    return max([int(last_ns), *(sample.at_ns for sample in run.telemetry)])


def _examples(kind: str, endings: Mapping[Ending, Seen]) -> list[dict[str, Any]]:
    """The most frequent details of an error kind, with how often they occurred and one request's id."""
    found = sorted(
        ((ending, seen) for ending, seen in endings.items() if ending.kind == kind), key=lambda pair: -pair[1].number
    )
    return [
        {"count": seen.number, "detail": ending.detail, "http_status": ending.http_status, "request": seen.id}
        for ending, seen in found[:EXAMPLES_PER_KIND]
    ]


def _sum(values: Floats, rows: Booleans) -> int:
    return int(np.nansum(values[rows]))


def _mismatches(reported: Floats, asked: Floats, rows: Booleans) -> int:
    return int((~np.isnan(reported) & ~np.isnan(asked) & (reported != asked) & rows).sum())
