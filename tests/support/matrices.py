"""Fabricates the files of a finished `loadgen matrix`, with measured, skipped and failed cells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.cli.matrix import write_report
from loadgen.cli.output import Output
from loadgen.studies.matrix import MatrixPlan, Repeat, journal, plan_starts
from tests.support.runs import burst, footer, header, healthy, write

PACE = {"vllm": 1.0, "tgi": 1.1, "lightllm": 0.9}
"""Latency of each server, relative to vLLM. On the host `rtx`, all latencies are doubled."""


def plan(**changes: Any) -> MatrixPlan:
    """Return a matrix plan: three servers on two hosts, a model that is skipped, and a published reference value."""
    values: dict[str, Any] = {
        "name": "fabricated",
        "servers": ["vllm", "lightllm", "tgi"],
        "hosts": [{"name": "a800", "platform": "A800"}, {"name": "rtx", "platform": "RTX4090"}],
        "models": ["llama-2-7b", "llama-2-70b"],
        "workloads": [{"name": "burst", "n": 120, "output_tokens": 16}],
        "cases": [{"model": "llama-2-70b", "skip": "does not fit"}],
        "references": [{"of": "RTX4090", "says": "about 120 s", "source": "arXiv 2311.03687"}],
        "repeats": 2,
        "starts": 2,
    }
    return MatrixPlan(**values | changes)


def fabricate(
    folder: Path,
    *,
    failing: str = "",
    limited: str = "",
    nasty: str = "",
    pace: Mapping[str, float] = PACE,
    **changes: Any,
) -> Path:
    """Write a fabricated matrix and its report into `folder`, and return the folder.

    - `failing` names a server whose runs all failed to start.
    - `limited` names a server in whose runs the client was the limit.
    - `nasty` is a text that is added to the log and the reason of failures.
    - `pace` maps each server to its relative latency.
    """
    asked = plan(**changes)
    hosts = {each.name: {"platform": each.platform} for each in asked.hosts}
    resolved = asked.model_dump(mode="json", exclude={"hosts_file"}) | {"hosts_found": hosts}
    with journal(folder, resolved, resume=False) as book:
        for start in plan_starts(asked):
            named = {"server": start.server.name, "host": start.host.name, "model": start.model.name}
            book.write("up", start=start.number, **named, seconds=1.5, facts={"image": "tgi:3.3.7"})
            for place, repeat in enumerate(start.repeats):
                if repeat.cell.server == failing:
                    book.write(
                        "failure", **repeat.key, kind="LaunchError", reason=f"out of memory {nasty}", hint="", log=nasty
                    )
                    continue
                book.write("begin", **repeat.key, start=start.number, place=place)
                stalled = {"stall_ns_max": 2_000_000_000} if repeat.cell.server == limited else {}
                _run(folder, repeat, asked, pace[repeat.cell.server], **stalled)
                book.write("end", **repeat.key, seconds=4.0)
            book.write("down", start=start.number)
    write_report(folder, Output(as_json=False, quiet=True))
    return folder


def _run(folder: Path, repeat: Repeat, asked: MatrixPlan, pace: float, **client: Any) -> None:
    cell = repeat.cell
    pace *= (2.0 if cell.host == "rtx" else 1.0) * (1 + 0.01 * repeat.number)
    records = burst(120, 16, seed=repeat.number, running=32, pace=pace)
    base = header(120, server=cell.server)
    told = base.plan | {"platform": cell.host.upper(), "seed": asked.seed + repeat.number - 1, "output_tokens": 16}
    lines = [header(120, server=cell.server, plan=told), *records, *healthy(3, **client), footer(records)]
    write(folder / repeat.folder, lines)
