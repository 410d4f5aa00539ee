"""What the server, the GPUs and the host said during a Run, as curves on the run's own time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from analysis.samples import Sample, Source, number, rows, samples
from loadgen.runfile import Run


@dataclass(frozen=True, slots=True)
class Series:
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


@dataclass(frozen=True, slots=True)
class Curve:
    """How a figure of a reading becomes a curve."""

    source: Source
    figure: str
    """Its name in the Telemetry lines."""
    name: str
    title: str
    unit: str
    drawn: Callable[[Points], Points]


def as_read(points: Points) -> Points:
    """A gauge: drawn as it was read."""
    return points


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
    Curve("server", "running", "running", "Requests running", "requests", as_read),
    Curve("server", "waiting", "waiting", "Requests waiting", "requests", as_read),
    Curve("server", "kv_used", "kv_used", "KV cache in use", "share", as_read),
    Curve("server", "output_tokens", "output_tokens_per_s", "Output tokens", "tokens/s", per_second),
    Curve("server", "prompt_tokens", "prompt_tokens_per_s", "Prompt tokens", "tokens/s", per_second),
    Curve("server", "requests_finished", "requests_finished_per_s", "Requests finished", "requests/s", per_second),
    Curve("server", "preemptions", "preemptions", "Preemptions since the start", "requests", since_first),
    Curve("server", "rejections", "rejections", "Rejections since the start", "requests", since_first),
    Curve("gpu", "memory_used_bytes", "gpu_memory_used", "GPU memory in use", "bytes", as_read),
    Curve("gpu", "held_bytes", "gpu_memory_held", "GPU memory held by one process", "bytes", as_read),
    Curve("gpu", "busy", "gpu_busy", "GPU busy", "share", as_read),
    Curve("gpu", "power_w", "gpu_power", "GPU power", "W", as_read),
    Curve("gpu", "sm_clock_hz", "gpu_sm_clock", "GPU clock", "Hz", as_read),
    Curve("gpu", "engine_active", "gpu_engine_active", "GPU engine active", "share", as_read),
    Curve("gpu", "tensor_active", "gpu_tensor_active", "Tensor cores active", "share", as_read),
    Curve("gpu", "dram_active", "gpu_dram_active", "GPU memory interface active", "share", as_read),
    Curve("host", "memory_used_bytes", "host_memory_used", "Host memory in use", "bytes", as_read),
    Curve("host", "rss_bytes", "process_memory", "Resident memory", "bytes", as_read),
)
"""Every curve there is, in the order in which they are drawn."""


def series(run: Run) -> list[Series]:
    """Every curve that the Run has a reading for, on one time axis. Empty for a run without telemetry."""
    found = {source: samples(run, source) for source in ("server", "gpu", "host")}
    return [each for curve in CURVES for each in _series(curve, found[curve.source])]


def _series(curve: Curve, found: Sequence[Sample]) -> list[Series]:
    read = [(sample.at_s, rows(sample, curve.source)) for sample in found]
    names = dict.fromkeys(
        name for _, said in read for name, values in said.items() if number(values, curve.figure) is not None
    )
    curves = []
    for of in names:
        points = curve.drawn([(at_s, number(said.get(of, {}), curve.figure)) for at_s, said in read])
        if any(y is not None for _, y in points):
            x_s, y = zip(*points, strict=True)
            curves.append(Series(curve.name, curve.title, curve.unit, of, list(x_s), list(y)))
    return curves
