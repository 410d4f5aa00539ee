"""What the server, the GPUs and the host said during a Run: its Telemetry lines in order of time, gaps kept as gaps; as
curves on the run's time axis; the server's own counts against the client's; memory before, during and after it; and the
clocks of several machines.

Engines take most of a card when they start and keep it, so memory in use says little about the load: the share of the
KV cache that was in use does. Both stand here, and the note says which engine takes how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from loadgen.analysis.frame import Booleans, Frame, sum_known
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.stats import round_to_ns
from loadgen.analysis.summary import (
    CounterCheck,
    GpuMemory,
    HostMemoryLevels,
    KvCache,
    MachineClock,
    Memory,
    MemoryReserved,
    ProcessMemory,
)

Source = Literal["server", "gpu", "host"]
BEFORE = ("idle", "start")
"""Moments before the run's instant 0: `idle` before any request, `start` after the warm-up requests."""
AFTER = ("end", "after")
"""Moments after it: `end` as soon as the last request had ended, `after` a little later."""
SHARE_DECIMALS = 4


class Reading(NamedTuple):
    """One reading of a source. A gap has its reason and no values."""

    at_s: float
    """From the run's instant 0."""
    moment: str
    """`idle`, `start`, `run`, `end` or `after`."""
    values: Mapping[str, Any]
    gap: str


def readings(run: Run, source: Source) -> list[Reading]:
    """The readings of one source in order of time; a line that is in the file twice counts once."""
    result = {line.at_ns: line for line in run.telemetry if line.source == source}
    return [
        Reading(at_ns / 1e9, line.values.get("moment", "run"), line.values, line.values.get("gap", ""))
        for at_ns, line in sorted(result.items())
    ]


def values_by_subject(sample: Reading, source: Source) -> dict[str, Mapping[str, Any]]:
    """What one reading says of each thing it is about: `server`, `GPU 0`, `host`, `process 123`."""
    if sample.gap:
        return {}
    if source == "server":
        return {"server": sample.values}
    if source == "gpu":
        gpus = [gpu for gpu in sample.values.get("gpus", ()) if not gpu.get("gap")]
        held: dict[str, dict[str, float]] = {}  # what each process holds of all GPUs together
        for process in (each for gpu in gpus for each in gpu.get("processes", ())):
            if (size := number_in(process, "memory_used_bytes")) is not None:
                total = held.setdefault(f"process {process.get('pid')}", {"held_bytes": 0.0})
                total["held_bytes"] += size
        return {f"GPU {gpu.get('index')}": gpu for gpu in gpus} | held
    processes = {f"process {each.get('pid')}": each for each in sample.values.get("processes", ())}
    return {"host": sample.values} | {name: each for name, each in processes.items() if not each.get("gap")}


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """A figure; None where the reading has none."""
    value = values.get(name)
    return None if value is None else float(value)


class Series(msgspec.Struct, frozen=True):
    """One curve. `x_s` is seconds from the run's instant 0, negative before it."""

    name: str
    """A word of the vocabulary (docs, reference/telemetry)."""
    title: str
    unit: str
    """`bytes`, `share`, `requests`, `tokens/s`, `requests/s`, `W` or `Hz`."""
    of: str
    """`server`, `GPU 0`, `host` or `process 123`."""
    x_s: list[float]
    y: list[float | None]
    """None is a gap: nothing was read there. It is not a zero."""


Points = list[tuple[float, float | None]]


class Curve(msgspec.Struct, frozen=True):
    """How a figure of a reading becomes a curve."""

    source: Source
    figure: str
    """Its name in the Telemetry lines."""
    name: str
    title: str
    unit: str
    drawn: Callable[[Points], Points] = list
    """A gauge is drawn as it was read."""


def per_second(points: Points) -> Points:
    """A counter: what it grew by since the reading before, per second. None after a gap, and where the server began to
    count anew."""
    rates: Points = [(points[0][0], None)]
    for (before_s, before), (now_s, now) in pairwise(points):
        grown = None if before is None or now is None or now < before or now_s <= before_s else now - before
        rates.append((now_s, None if grown is None else grown / (now_s - before_s)))
    return rates


def since_first(points: Points) -> Points:
    """A counter of rare events: its growth since the first reading, kept where the server begins to count anew."""
    total, before, grown = 0.0, None, []
    for at_s, now in points:
        if now is not None:
            total += 0.0 if before is None else now - before if now >= before else now
            before = now
        grown.append((at_s, None if now is None else total))
    return grown


CURVES: tuple[Curve, ...] = (
    Curve("server", "running", "running", "Requests running", "requests"),
    Curve("server", "waiting", "waiting", "Requests waiting", "requests"),
    Curve("server", "kv_used", "kv_used", "KV cache in use", "share"),
    Curve("server", "kv_used_max", "kv_used_max", "KV cache in use, fullest engine", "share"),
    Curve("server", "output_tokens", "output_tokens_per_s", "Output tokens", "tokens/s", per_second),
    Curve("server", "prompt_tokens", "prompt_tokens_per_s", "Prompt tokens", "tokens/s", per_second),
    Curve("server", "requests_finished", "requests_finished_per_s", "Requests finished", "requests/s", per_second),
    Curve("server", "preemptions", "preemptions", "Preemptions since the start", "requests", since_first),
    Curve("server", "rejections", "rejections", "Rejections since the start", "requests", since_first),
    Curve("gpu", "memory_used_bytes", "gpu_memory_used", "GPU memory in use", "bytes"),
    Curve("gpu", "held_bytes", "gpu_memory_held", "GPU memory held by one process", "bytes"),
    Curve("gpu", "busy", "gpu_busy", "GPU busy", "share"),
    Curve("gpu", "power_w", "gpu_power", "GPU power", "W"),
    Curve("gpu", "sm_clock_hz", "gpu_sm_clock", "GPU clock", "Hz"),
    Curve("gpu", "engine_active", "gpu_engine_active", "GPU engine active", "share"),
    Curve("gpu", "tensor_active", "gpu_tensor_active", "Tensor cores active", "share"),
    Curve("gpu", "dram_active", "gpu_dram_active", "GPU memory interface active", "share"),
    Curve("host", "memory_used_bytes", "host_memory_used", "Host memory in use", "bytes"),
    Curve("host", "rss_bytes", "process_memory", "Resident memory", "bytes"),
)
"""Every curve there is, in the order in which they are drawn."""


def all_series(run: Run) -> list[Series]:
    """Every curve that the Run has a reading for, on one time axis. Empty for a run without telemetry."""
    read = {
        source: [(sample.at_s, values_by_subject(sample, source)) for sample in readings(run, source)]
        for source in get_args(Source)
    }
    things = {source: dict.fromkeys(of for _, about in result for of in about) for source, result in read.items()}
    curves, nothing = [], dict[str, Any]()
    for curve in CURVES:
        for of in things[curve.source]:
            said = [(at_s, number_in(about.get(of, nothing), curve.figure)) for at_s, about in read[curve.source]]
            points = curve.drawn(said) if any(y is not None for _, y in said) else []
            if any(y is not None for _, y in points):
                x_s, y = zip(*points, strict=True)
                curves.append(Series(curve.name, curve.title, curve.unit, of, list(x_s), list(y)))
    return curves


COMPARED = ("prompt_tokens", "output_tokens", "requests_finished", "rejections")
"""Counters that the client has a count for too."""
ALONE = ("cached_prompt_tokens", "preemptions", "requests_failed")
"""Counters that only the server has."""


def check_counters(run: Run, frame: Frame) -> dict[str, CounterCheck]:
    """What the `server` and the `client` counted from before the first request, warm-up included, to after the last
    one. Empty for a run without readings of the server."""
    result = readings(run, "server")
    if not result:
        return {}
    read = [sample for sample in result if not sample.gap]
    first = next((sample for sample in read if sample.moment in BEFORE), None)
    if first is not None:
        read = [sample for sample in read if sample.at_s >= first.at_s]
    whole = np.ones(len(frame), np.bool_) if first and first.moment == "idle" else frame.measured
    why_not = _why_not(run, result, read, first)
    checks = {}
    for word in (*COMPARED, *ALONE):
        growth, resets = _growth(read, word)
        if growth is not None:
            checks[word] = check = CounterCheck(server=round(growth), resets=resets)
            if word in COMPARED:
                check.why = why_not
                if not why_not:
                    _compare(check, word, growth, frame, whole, run)
    return checks


def _why_not(run: Run, found: Sequence[Reading], read: Sequence[Reading], first: Reading | None) -> str:
    """Why the server's counts cannot be compared; empty where they can."""
    gaps = [sample.gap for sample in found if sample.gap] or ["none was taken"]
    if first is None:
        return f"there is no reading from before the run ({gaps[0]})"
    if run.footer is None or run.footer.interrupted:
        return "the run was interrupted"
    if not any(each.moment in AFTER and not each.gap for each in found):
        return f"there is no reading from after the run ({gaps[-1]})"
    # One that is past its old value already looks grown.
    anew = max(_growth(read, word)[1] for word in COMPARED)
    return f"the server began to count anew, {anew} time{'s' * (anew > 1)}" if anew else ""


def _growth(read: Sequence[Reading], word: str) -> tuple[float | None, int]:
    """What a counter grew by over these readings, and how often it began anew. A counter that the first page did not
    have yet was 0: servers publish some only when there is something to count."""
    values = [number_in(sample.values, word) for sample in read]
    if all(value is None for value in values):
        return None, 0
    known = [values[0] or 0.0, *(value for value in values[1:] if value is not None)]
    _, grown = since_first([(0.0, value) for value in known])[-1]
    return grown, sum(now < before for before, now in pairwise(known))


def _compare(check: CounterCheck, word: str, growth: float, frame: Frame, rows: Booleans, run: Run) -> None:
    """Put the client's count beside the server's: that of complete requests, and the maximum with all that were sent.

    Rejected requests are not in that maximum: a server that refuses a request neither reads its prompt nor answers it.
    """
    rejected = rows & frame.ended_as("rejected")
    sent = rows & ~np.isnan(frame.sent_ns) & ~rejected
    complete = sent & frame.complete
    if word == "rejections":
        minimum = maximum = int(rejected.sum())
    elif word == "requests_finished":
        minimum, maximum = int(complete.sum()), int(sent.sum())
    elif word == "prompt_tokens":
        minimum, maximum = sum_known(frame.prompt_tokens, complete), sum_known(frame.prompt_tokens, sent)
    else:
        minimum = sum_known(frame.output_tokens, complete)
        maximum = minimum + sum_known(np.fmax(frame.output_asked, frame.output_tokens), sent & ~complete)
    check.client = minimum
    unknown = int((sent & np.isnan(frame.prompt_tokens)).sum())
    if word == "prompt_tokens" and unknown and growth > maximum:
        check.why = f"prompts of unknown length that broke off: {unknown:,}"
        return
    check.client_most = None if maximum == minimum else maximum
    check.difference = round(growth - min(max(growth, minimum), maximum))
    check.agree = check.difference == 0
    check.why = _why(run, frame, word, check.difference)


def _why(run: Run, frame: Frame, word: str, difference: int) -> str:
    """Return the most likely reason of a difference; empty where there is none."""
    title, notes = run.header.server_title, run.header.server_notes
    if not difference:
        return ""
    if word == "rejections" and difference < 0:
        return f"a proxy in front of {title} rejected the others, or {title} does not count all that it rejects"
    if why := _counted_otherwise(run, frame, word):
        return why
    if difference > 0:
        return "somebody else was using the server, or it counts otherwise"
    if notes.get("drops_counts"):
        return f"{title} drops counts under load"
    return "it had not booked everything, or lost some"


def _counted_otherwise(run: Run, frame: Frame, word: str) -> str:
    """Say that this kind of server counts in another way than one request at a time; empty where it does not."""
    title, notes = run.header.server_title, run.header.server_notes
    piece, split = notes.get("prompt_piece_tokens"), notes.get("split_endpoint")
    if piece and np.nanmax(frame.output_asked, initial=0) > piece:
        return f"{title} runs answers of more than {piece} tokens in pieces and counts the prompt of each"
    if split and word == "requests_finished" and run.header.plan.get("endpoint") == split:
        return f"{title} may run each text of a request by itself, and counts what it runs"
    return ""


Readings = list[tuple[str, Mapping[str, Any]]]
"""Moments, and what was read at each."""


def memory_use(run: Run) -> Memory | None:
    """`memory_use` of the summary; None for a run without telemetry."""
    result = {source: readings(run, source) for source in get_args(Source)}
    told = run.header.telemetry
    if not told and not any(result.values()):
        return None
    gpus = {name: read for name, read in _by_name(result["gpu"], "gpu").items() if name.startswith("GPU")}
    processes = _by_name(result["host"], "host")
    host, host_told = processes.pop("host", None), told.get("host", {})
    cards = {f"GPU {each.get('index')}": each for each in told.get("gpu", {}).get("gpus", ())}
    names = {f"process {each.get('pid')}": each.get("name", "") for each in host_told.get("processes", ())}
    return Memory(
        gpus=[
            GpuMemory(
                name=cards.get(of, {}).get("name", ""),
                total_bytes=cards.get(of, {}).get("memory_total_bytes"),
                **_levels(of, read, "memory_used_bytes"),
            )
            for of, read in gpus.items()
        ],
        processes=[
            *_gpu_processes(gpus),
            *(
                ProcessMemory(on="host", name=names.get(of, ""), **_levels(of, read, "rss_bytes"))
                for of, read in processes.items()
            ),
        ],
        host=HostMemoryLevels(
            total_bytes=host_told.get("memory_total_bytes"), **_levels("host", host, "memory_used_bytes")
        )
        if host
        else None,
        kv_cache=_kv_cache(run, result["server"]),
        taken_at_start=_taken(run, result["server"]) if gpus else None,
        not_measured=dict(told.get("not_measured", {})),
        gaps={
            source: dict(Counter(reasons).most_common())
            for source, each in result.items()
            if (reasons := [sample.gap for sample in each if sample.gap])
        },
    )


def _by_name(found: Sequence[Reading], source: Source) -> dict[str, Readings]:
    """Readings by what they are about."""
    names: dict[str, Readings] = {}
    for sample in found:
        for name, values in values_by_subject(sample, source).items():
            names.setdefault(name, []).append((sample.moment, values))
    return names


def _levels(of: str, readings: Readings, figure: str) -> dict[str, Any]:
    """The fields of MemoryLevels."""
    known = [(moment, int(size)) for moment, values in readings if (size := number_in(values, figure)) is not None]
    idle = [size for moment, size in known if moment == "idle"]
    loaded = [size for moment, size in known if moment in AFTER]
    return {
        "of": of,
        "idle_bytes": idle[-1] if idle else None,
        "loaded_bytes": loaded[-1] if loaded else None,
        "peak_bytes": max((size for moment, size in known if moment != "idle"), default=None),
        "readings": len(known),
    }


def _gpu_processes(gpus: Mapping[str, Readings]) -> Iterator[ProcessMemory]:
    """What each process held of each GPU, where the driver says so: in a container often not."""
    held: dict[tuple[str, str], Readings] = {}
    for gpu, readings in gpus.items():
        for moment, values in readings:
            for process in values.get("processes", ()):
                held.setdefault((f"process {process.get('pid')}", gpu), []).append((moment, process))
    for (of, gpu), readings in held.items():
        yield ProcessMemory(on=gpu, name="", **_levels(of, readings, "memory_used_bytes"))


def _kv_cache(run: Run, found: Sequence[Reading]) -> KvCache | None:
    read = [(sample.moment, share) for sample in found if (share := number_in(sample.values, "kv_used")) is not None]
    if not read:
        return None
    idle = [round(share, SHARE_DECIMALS) for moment, share in read if moment == "idle"]
    during = [share for moment, share in read if moment == "run"]
    running = [sample.values for sample in found if sample.moment == "run"]
    fullest = [share for values in running if (share := number_in(values, "kv_used_max")) is not None]
    engines = [engines for values in running if (engines := number_in(values, "engines")) is not None]
    sizes = [size for sample in found if (size := number_in(sample.values, "kv_tokens")) is not None]
    limits = run.header.server.get("limits") or {}
    return KvCache(
        idle_share=idle[0] if idle else None,
        mean_share=round(sum(during) / len(during), SHARE_DECIMALS) if during else None,
        peak_share=round(max(during), SHARE_DECIMALS) if during else None,
        peak_fullest_share=round(max(fullest), SHARE_DECIMALS) if fullest else None,
        engines=int(max(engines)) if engines else 1,
        readings=len(during),
        tokens=int(sizes[-1]) if sizes else limits.get("max_total_token_num"),
    )


def _taken(run: Run, found: Sequence[Reading]) -> MemoryReserved | None:
    """How much of a card the engine takes whatever the load: by its own word, or its default."""
    told = run.header.server_notes
    if "memory_option" not in told or run.header.server.get("simulated"):
        return None
    last = next((each for each in reversed(found) if not each.gap), None)
    share = number_in(last.values, "taken_share") if last else None
    said = f"{share * 100:g} %" if share is not None else told["memory_taken"]
    note = f"{run.header.server_title} takes {said} of each card when it starts ({told['memory_option']}) and keeps it"
    return MemoryReserved(share=share, note=note)


def machine_clock(run: Run, frame: Frame, told: dict[str, Any]) -> MachineClock:
    """A machine of a run over several: from the header and the `clock` samples."""
    samples = [
        sample.values
        for sample in run.telemetry
        if sample.source == "clock" and sample.values.get("workers") == told["workers"]
    ] or [told]
    own = frame.measured & np.isin(frame.worker, told["workers"])
    return MachineClock(
        name=told["name"],
        workers=told["workers"],
        requests=int(own.sum()),
        complete=int((own & frame.complete).sum()),
        offset_s=told["offset_ns"] / 1e9,
        drift_s=(samples[-1]["offset_ns"] - samples[0]["offset_ns"]) / 1e9,
        uncertainty_s=max(sample["uncertainty_ns"] for sample in samples) / 1e9,
    )


def skew_range_s(machines: Sequence[MachineClock], frame: Frame) -> tuple[float, float]:
    """Least and most that the skew can have been, given how far each machine's clock may be off. Between a first byte
    of one machine and a last byte of another stand both machines' uncertainties; on one machine there is nothing
    between them. A machine that sent nothing is left out."""
    sent = frame.sent & ~np.isnan(frame.sent_end_ns)
    ends = [
        (each.uncertainty_s, frame.sent_ns[own].min() / 1e9, frame.sent_end_ns[own].max() / 1e9)
        for each in machines
        if (own := sent & np.isin(frame.worker, each.workers)).any()
    ]
    minimum = maximum = 0.0
    for (first, one), (last, other) in product(enumerate(ends), repeat=2):
        skew_s, off_s = float(other[2] - one[1]), 0.0 if first == last else one[0] + other[0]
        minimum, maximum = max(minimum, skew_s - off_s), max(maximum, skew_s + off_s)
    return round_to_ns(minimum), round_to_ns(maximum)
