"""Memory of GPUs, processes and the host before, during and after a Run, and how full the server's KV cache was.

Engines take most of a card when they start and keep it, so memory in use says little about the load: the share of the
KV cache that was in use does. Both stand here, and the note says which engine takes how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from analysis.resources import GpuMemory, HostMemoryLevels, KvCache, Memory, MemoryReserved, ProcessMemory
from analysis.telemetry import AFTER, Reading, Source, last_of, number, rows, samples
from loadgen.runfile import Run

SHARE_DECIMALS = 4


Readings = list[tuple[str, Mapping[str, Any]]]
"""Moments, and what was read at each."""


def memory(run: Run) -> Memory | None:
    """`memory` of the summary; None for a run without telemetry."""
    found = {source: samples(run, source) for source in get_args(Source)}
    told = run.header.telemetry
    if not told and not any(found.values()):
        return None
    gpus = [_gpu(name, read, told) for name, read in _by_name(found["gpu"], "gpu").items() if name.startswith("GPU")]
    host = _by_name(found["host"], "host")
    return Memory(
        gpus=gpus,
        processes=[*_gpu_processes(found["gpu"]), *_host_processes(host, told)],
        host=_host(host["host"], told) if "host" in host else None,
        kv_cache=_kv_cache(run, found["server"]),
        taken_at_start=_taken(run, found["server"]) if gpus else None,
        not_measured=dict(told.get("not_measured", {})),
        gaps={
            source: dict(Counter(reasons).most_common())
            for source, each in found.items()
            if (reasons := [sample.gap for sample in each if sample.gap])
        },
    )


def _by_name(found: Sequence[Reading], source: Source) -> dict[str, Readings]:
    """Readings by what they are about."""
    names: dict[str, Readings] = {}
    for sample in found:
        for name, values in rows(sample, source).items():
            names.setdefault(name, []).append((sample.moment, values))
    return names


def _levels(readings: Readings, figure: str) -> dict[str, Any]:
    """The fields of MemoryLevels."""
    known = [(moment, int(size)) for moment, values in readings if (size := number(values, figure)) is not None]
    idle = [size for moment, size in known if moment == "idle"]
    loaded = [size for moment, size in known if moment in AFTER]
    return {
        "idle_bytes": idle[-1] if idle else None,
        "loaded_bytes": loaded[-1] if loaded else None,
        "peak_bytes": max((size for moment, size in known if moment != "idle"), default=None),
        "readings": len(known),
    }


def _gpu(name: str, readings: Readings, told: Mapping[str, Any]) -> GpuMemory:
    known = told.get("gpu", {}).get("gpus", [])
    facts: Mapping[str, Any] = next((each for each in known if f"GPU {each.get('index')}" == name), {})
    levels = _levels(readings, "memory_used_bytes")
    return GpuMemory(of=name, name=facts.get("name", ""), total_bytes=facts.get("memory_total_bytes"), **levels)


def _gpu_processes(found: Sequence[Reading]) -> Iterator[ProcessMemory]:
    """What each process held of each GPU, where the driver says so: in a container often not."""
    held: dict[tuple[str, str], Readings] = {}
    for gpu, readings in _by_name(found, "gpu").items():
        for moment, values in readings:
            for process in values.get("processes") or ():
                held.setdefault((f"process {process.get('pid')}", gpu), []).append((moment, process))
    for (of, gpu), readings in held.items():
        yield ProcessMemory(of=of, on=gpu, name="", **_levels(readings, "memory_used_bytes"))


def _host_processes(found: Mapping[str, Readings], told: Mapping[str, Any]) -> Iterator[ProcessMemory]:
    names = {f"process {each.get('pid')}": each.get("name", "") for each in told.get("host", {}).get("processes", [])}
    for of, readings in found.items():
        if of != "host":
            yield ProcessMemory(of=of, on="host", name=names.get(of, ""), **_levels(readings, "rss_bytes"))


def _host(readings: Readings, told: Mapping[str, Any]) -> HostMemoryLevels:
    total = told.get("host", {}).get("memory_total_bytes")
    return HostMemoryLevels(of="host", total_bytes=total, **_levels(readings, "memory_used_bytes"))


def _kv_cache(run: Run, found: Sequence[Reading]) -> KvCache | None:
    read = [(sample.moment, share) for sample in found if (share := number(sample.values, "kv_used")) is not None]
    if not read:
        return None
    during = [share for moment, share in read if moment == "run"]
    sizes = [size for sample in found if (size := number(sample.values, "kv_tokens")) is not None]
    limits = run.header.server.get("limits") or {}

    def share_of(value: float | None) -> float | None:
        return None if value is None else round(value, SHARE_DECIMALS)

    return KvCache(
        idle_share=share_of(next((share for moment, share in read if moment == "idle"), None)),
        mean_share=share_of(sum(during) / len(during) if during else None),
        peak_share=share_of(max(during, default=None)),
        readings=len(during),
        tokens=int(sizes[-1]) if sizes else limits.get("max_total_token_num"),
    )


def _taken(run: Run, found: Sequence[Reading]) -> MemoryReserved | None:
    """How much of a card the engine takes whatever the load: by its own word, or its default."""
    told = run.header.server_notes
    if "memory_option" not in told or run.header.server.get("simulated"):
        return None
    last = last_of(found, ("idle", "start", "run", *AFTER))
    share = number(last.values, "taken_share") if last else None
    said = f"{share * 100:g} %" if share is not None else told["memory_taken"]
    note = f"{run.header.server_title} takes {said} of each card when it starts ({told['memory_option']}) and keeps it"
    return MemoryReserved(share=share, note=note)
