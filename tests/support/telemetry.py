"""Fabricates telemetry as the telemetry sampler writes it to a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry
from tests.support.runs import footer, header, healthy, write
from tests.support.runs import read as read_run

S = 1_000_000_000


def line(source: str, at_s: float, moment: str = "run", **values: Any) -> Telemetry:
    """Return one reading of a telemetry source, at `at_s` seconds after the start of the run.

    `values` are the values of the reading. `gap="reason"` makes it a failed reading.
    """
    return Telemetry(source=source, at_ns=round(at_s * S), values={"moment": moment, "took_ns": 1000, **values})


def told(
    folder: Path, lines: list[Telemetry], records: list[Record] | None = None, *, server: str = "tgi", **ending: Any
) -> Run:
    """Write the run file of a run with these telemetry lines, and read it.

    With `ended=False`, the run file has no footer. `facts` are added to the telemetry facts in the header. Any other
    keyword argument replaces a field of the footer.
    """
    held = records or []
    ended = ending.pop("ended", True)
    facts = {"every_s": 1.0, "not_measured": {}, **ending.pop("facts", {})}
    last = [footer(held, **ending)] if ended else []
    write(folder, [header(len(held), server=server, telemetry=facts), *held, *healthy(), *lines, *last])
    return read_run(folder)
