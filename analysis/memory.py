"""Memory of GPUs, processes and the host before, during and after a Run, and how full the server's KV cache was.

Engines take most of a card when they start and keep it, so memory in use says little about the load: the share of the
KV cache that was in use does. Both stand here, and the note says which engine takes how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis import words
from analysis.samples import AFTER, Sample, Source, last_of, number, rows, samples
from loadgen.runfile import Run

SHARE_DECIMALS = 4
GPUS_NAMED = 4
"""More GPUs than this are counted, not listed."""


def memory(run: Run) -> dict[str, Any]:
    """`memory` of the summary; empty for a run without telemetry. None where nothing was read.

    `idle_bytes`: before the first request; `loaded_bytes`: after the last; `peak_bytes`: the largest in between,
    of one reading per second.
    """
    found = {source: samples(run, source) for source in ("server", "gpu", "host")}
    told = run.header.telemetry
    if not told and not any(found.values()):
        return {}
    gpus = [_gpu(name, read, told) for name, read in _by_name(found["gpu"], "gpu").items() if name.startswith("GPU")]
    return {
        "gpus": gpus,
        "processes": [*_gpu_processes(found["gpu"]), *_host_processes(found["host"], told)],
        "host": _host(found["host"], told),
        "kv_cache": _kv_cache(run, found["server"]),
        "taken_at_start": _taken(run, found["server"]) if gpus else None,
        "not_measured": dict(told.get("not_measured", {})),
        "gaps": {source: _gaps(each) for source, each in found.items() if any(sample.gap for sample in each)},
    }


def _by_name(found: Sequence[Sample], source: Source) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Readings with their moments, by what they are about."""
    names: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for sample in found:
        for name, values in rows(sample, source).items():
            names.setdefault(name, []).append((sample.moment, values))
    return names


def _levels(readings: Sequence[tuple[str, float | None]]) -> dict[str, Any]:
    """idle, loaded and peak of (moment, bytes)."""
    known = [(moment, int(value)) for moment, value in readings if value is not None]
    idle = [value for moment, value in known if moment == "idle"]
    loaded = [value for moment, value in known if moment in AFTER]
    during = [value for moment, value in known if moment != "idle"]
    return {
        "idle_bytes": idle[-1] if idle else None,
        "loaded_bytes": loaded[-1] if loaded else None,
        "peak_bytes": max(during, default=None),
        "readings": len(known),
    }


def _figure(readings: Sequence[tuple[str, Mapping[str, Any]]], name: str) -> list[tuple[str, float | None]]:
    return [(moment, number(values, name)) for moment, values in readings]


def _gpu(name: str, readings: Sequence[tuple[str, Mapping[str, Any]]], told: Mapping[str, Any]) -> dict[str, Any]:
    known = told.get("gpu", {}).get("gpus", [])
    facts: Mapping[str, Any] = next((each for each in known if f"GPU {each.get('index')}" == name), {})
    return {
        "of": name,
        "name": facts.get("name", ""),
        "total_bytes": facts.get("memory_total_bytes"),
        **_levels(_figure(readings, "memory_used_bytes")),
    }


def _gpu_processes(found: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """What each process held of each GPU, where the driver says so: in a container often not."""
    held: dict[tuple[str, str], list[tuple[str, float | None]]] = {}
    for name, readings in _by_name(found, "gpu").items():
        for moment, values in readings:
            for process in values.get("processes") or ():
                key = (f"process {process.get('pid')}", name)
                held.setdefault(key, []).append((moment, number(process, "memory_used_bytes")))
    for (process, gpu), levels in held.items():
        yield {"of": process, "on": gpu, "name": "", **_levels(levels)}


def _host_processes(found: Sequence[Sample], told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    names = {f"process {each.get('pid')}": each.get("name", "") for each in told.get("host", {}).get("processes", [])}
    for name, readings in _by_name(found, "host").items():
        if name != "host":
            yield {"of": name, "on": "host", "name": names.get(name, ""), **_levels(_figure(readings, "rss_bytes"))}


def _host(found: Sequence[Sample], told: Mapping[str, Any]) -> dict[str, Any] | None:
    readings = _by_name(found, "host").get("host")
    if not readings:
        return None
    total = told.get("host", {}).get("memory_total_bytes")
    return {"of": "host", "total_bytes": total, **_levels(_figure(readings, "memory_used_bytes"))}


def _kv_cache(run: Run, found: Sequence[Sample]) -> dict[str, Any] | None:
    """The share of the server's KV cache in use, by its own gauge, and how many tokens fit into it."""
    read = [(sample.moment, share) for sample in found if (share := number(sample.values, "kv_used")) is not None]
    during = [share for moment, share in read if moment == "run"]
    if not read:
        return None
    sizes = [size for sample in found if (size := number(sample.values, "kv_tokens")) is not None]
    limits = run.header.server.get("limits") or {}
    return {
        "idle_share": _rounded(next((share for moment, share in read if moment == "idle"), None)),
        "mean_share": _rounded(sum(during) / len(during) if during else None),
        "peak_share": _rounded(max(during, default=None)),
        "readings": len(during),
        "tokens": int(sizes[-1]) if sizes else limits.get("max_total_token_num"),
    }


def _taken(run: Run, found: Sequence[Sample]) -> dict[str, Any] | None:
    """How much of a card the engine takes whatever the load: by its own word, or its default."""
    told = run.header.server_notes
    if "memory_option" not in told or run.header.server.get("simulated"):
        return None
    last = last_of(found, ("idle", "start", "run", *AFTER))
    share = number(last.values, "taken_share") if last else None
    said = f"{share * 100:g} %" if share is not None else told["memory_taken"]
    note = f"{run.header.server_title} takes {said} of each card when it starts ({told['memory_option']}) and keeps it"
    return {"share": share, "note": note}


def _gaps(found: Sequence[Sample]) -> dict[str, int]:
    """How many readings failed, by reason."""
    return dict(Counter(sample.gap for sample in found if sample.gap).most_common())


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, SHARE_DECIMALS)


def sentences(summary: words.Summary) -> list[str]:
    """What is known of memory, in a sentence each: the KV cache, the GPUs, the server's processes. Often nothing."""
    found = summary["memory"]
    if not found:
        return []
    lines = []
    if (cache := found["kv_cache"]) and cache["peak_share"] is not None:
        room = f" of {cache['tokens']:,} tokens" if cache["tokens"] else ""
        lines.append(f"KV cache{room}: at most {words.share(cache['peak_share'])} in use, by the server's own gauge.")
    lines += [_level(each) for each in found["gpus"][:GPUS_NAMED] if each["peak_bytes"] is not None]
    if (more := len(found["gpus"]) - GPUS_NAMED) > 0:
        lines.append(f"{words.count(more, 'more GPU')} in summary.json.")
    if found["taken_at_start"] and lines:
        lines.append(f"{found['taken_at_start']['note']}.")
    held = [each for each in found["processes"] if each["on"] == "host" and each["peak_bytes"] is not None]
    return [*lines, *(_level(each) for each in held)]


def _level(each: Mapping[str, Any]) -> str:
    name = f" ({each['name']})" if each["name"] else ""
    whole = f" of {words.size(each['total_bytes'])}" if each.get("total_bytes") else ""
    before = f"{words.size(each['idle_bytes'])} before the first request, " if each["idle_bytes"] is not None else ""
    return f"{each['of'][0].upper()}{each['of'][1:]}{name}: {before}{words.size(each['peak_bytes'])} at most{whole}."
