"""Fabricated telemetry: what a sampler would have left in a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry
from tests.support.runs import footer, header, healthy, write
from tests.support.runs import read as read_run

S = 1_000_000_000


def line(source: str, at_s: float, moment: str = "run", **values: Any) -> Telemetry:
    """One reading; `gap="why"` makes it one that failed."""
    return Telemetry(source=source, at_ns=round(at_s * S), values={"moment": moment, "took_ns": 1000, **values})


def told(
    folder: Path, lines: list[Telemetry], records: list[Record] | None = None, *, server: str = "tgi", **ending: Any
) -> Run:
    """A run with these readings. `ended=False` leaves the footer out; the rest changes it."""
    held = records or []
    ended = ending.pop("ended", True)
    facts = {"every_s": 1.0, "not_measured": {}, **ending.pop("facts", {})}
    last = [footer(held, **ending)] if ended else []
    write(folder, [header(len(held), server=server, telemetry=facts), *held, *healthy(), *lines, *last])
    return read_run(folder)
