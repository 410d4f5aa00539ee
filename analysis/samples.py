"""What a Run says about the server, the GPUs and the host: its Telemetry lines put in order, gaps kept as gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.runfile import Run

Source = Literal["server", "gpu", "host"]
BEFORE = ("idle", "start")
"""Moments before the run's instant 0: `idle` before any request, `start` after the warm-up requests."""
AFTER = ("end", "after")
"""Moments after it: `end` as soon as the last request had ended, `after` a little later."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a source. A gap has its reason and no values."""

    at_s: float
    """From the run's instant 0."""
    moment: str
    """`idle`, `start`, `run`, `end` or `after`."""
    values: Mapping[str, Any]
    gap: str


def samples(run: Run, source: Source) -> list[Sample]:
    """The readings of one source in order of time; a line that is in the file twice counts once."""
    found = {line.at_ns: line for line in run.telemetry if line.source == source}
    return [
        Sample(at_ns / 1e9, str(line.values.get("moment", "run")), line.values, str(line.values.get("gap", "")))
        for at_ns, line in sorted(found.items())
    ]


def rows(sample: Sample, source: Source) -> dict[str, Mapping[str, Any]]:
    """What one reading says of each thing it is about: `server`, `GPU 0`, `host`, `process 123`."""
    if sample.gap:
        return {}
    if source == "server":
        return {"server": sample.values}
    if source == "gpu":
        gpus = [gpu for gpu in _listed(sample.values, "gpus") if not gpu.get("gap")]
        return {f"GPU {gpu.get('index')}": gpu for gpu in gpus} | _holders(gpus)
    processes = {f"process {each.get('pid')}": each for each in _listed(sample.values, "processes")}
    return {"host": sample.values} | {name: each for name, each in processes.items() if not each.get("gap")}


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A figure; None where the reading has none."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def last_of(found: Sequence[Sample], moments: Sequence[str]) -> Sample | None:
    """The latest reading at one of these moments that is no gap."""
    return next((each for each in reversed(found) if each.moment in moments and not each.gap), None)


def _holders(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """What each process holds of all GPUs together: `held_bytes`."""
    held: dict[str, float] = {}
    for process in (each for gpu in gpus for each in _listed(gpu, "processes")):
        if (size := number(process, "memory_used_bytes")) is not None:
            name = f"process {process.get('pid')}"
            held[name] = held.get(name, 0.0) + size
    return {name: {"held_bytes": size} for name, size in held.items()}


def _listed(values: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    listed = values.get(name)
    return [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
