"""Memory of a cell over its repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Memory = Mapping[str, Any]
"""`memory` of a run's summary (analysis.memory)."""
MEANS = ("idle_bytes", "loaded_bytes")


def memory(found: Sequence[Memory]) -> dict[str, Any]:
    """Per GPU, per process and of the host: means over the repeats, the largest of the peaks; KV cache; notes.

    Empty where no run has a reading. Processes are told apart by their place in the list, because a server that was
    started twice had two process ids.
    """
    read = [each for each in found if each]
    if not read:
        return {}
    parts = [[*each["gpus"], *each["processes"], *([each["host"]] if each["host"] else [])] for each in read]
    return {
        "levels": [_level([run[place] for run in parts if len(run) > place]) for place in range(max(map(len, parts)))],
        "kv_cache": _kv_cache([each["kv_cache"] for each in read if each["kv_cache"]]),
        "notes": list(dict.fromkeys(note for each in read for note in _notes(each))),
    }


def _level(seen: Sequence[Memory]) -> dict[str, Any]:
    """One GPU, process or host over the repeats."""
    first = seen[0]
    peaks = [each["peak_bytes"] for each in seen if each["peak_bytes"] is not None]
    return {
        "of": _name(first),
        "total_bytes": first.get("total_bytes"),
        **{name: _mean([each[name] for each in seen]) for name in MEANS},
        "peak_bytes": max(peaks, default=None),
    }


def _name(each: Memory) -> str:
    """A GPU by index and name; a process by what it is, not by an id that differs from start to start."""
    of = str(each["of"])
    if of.startswith("process"):
        return (
            f"process {each['name']} on {each['on']}".replace("  ", " ")
            if each.get("name")
            else f"process on {each['on']}"
        )
    return f"{of} {each['name']}" if each.get("name") else of


def _kv_cache(seen: Sequence[Memory]) -> dict[str, Any] | None:
    if not seen:
        return None
    peaks = [each["peak_share"] for each in seen if each["peak_share"] is not None]
    return {
        "mean_share": _mean([each["mean_share"] for each in seen]),
        "peak_share": max(peaks, default=None),
        "tokens": seen[0]["tokens"],
    }


def _notes(each: Memory) -> list[str]:
    taken = [f"{each['taken_at_start']['note']}."] if each["taken_at_start"] else []
    missing = [f"Not read, {source}: {reason}." for source, reason in each["not_measured"].items()]
    return taken + missing


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None
