"""Divides a predicted time among the resources of a GPU (compute, memory and network) and latency.

The share of a resource is the time that would be saved if this resource were infinitely fast. This saving depends on
the speed of the other resources. For example, compute and memory work at the same time. If both take equally long, a
faster memory alone saves nothing. It saves time only after compute has become faster too. The share is therefore the
mean saving over all orders in which the resources can become infinitely fast, one after the other (the Shapley value).

Some time remains even if all resources are infinitely fast. This time is the latency: kernel launches, the start of
transfers, waits, and the work of the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from loadgen.servers.hardware import Gpu, Link

RESOURCES = ("compute", "memory", "network")
LATENCY = "latency"
FASTER = 1e6
"""Factor that makes a resource so fast that it takes no time."""
TimeOf = Callable[[Gpu], float]
"""Function that predicts the time of some work in seconds on a GPU."""


@dataclass(frozen=True, slots=True)
class DividedTime:
    """A predicted time, divided into one part for each resource of the GPU and one part for latency."""

    total_s: float
    parts_s: Mapping[str, float]
    shares: Mapping[str, float]
    """The parts as shares of the total time."""
    bound: str
    """The resource with the largest part, or `latency`."""


def divide_time(time_of: TimeOf, gpu: Gpu) -> DividedTime:
    """Return the time of some work on `gpu`, divided into parts for compute, memory, network and latency.

    `time_of` takes a GPU and returns the seconds of the work on this GPU.
    """
    count = len(RESOURCES)
    times = {
        frozenset(names): time_of(with_fast_resources(gpu, names))
        for size in range(count + 1)
        for names in combinations(RESOURCES, size)
    }
    parts = {}
    for resource in RESOURCES:
        parts[resource] = 0.0
        for names, seconds in times.items():
            if resource not in names:  # the mean over all orders weights each set by its size
                weight = 1 / (count * comb(count - 1, len(names)))
                parts[resource] += weight * (seconds - times[names | {resource}])
    parts[LATENCY] = times[frozenset(RESOURCES)]
    total_s = times[frozenset()]
    shares = {name: seconds / total_s for name, seconds in parts.items()}
    return DividedTime(total_s, parts, shares, bound=max(parts, key=lambda name: parts[name]))


def with_fast_resources(gpu: Gpu, names: Collection[str]) -> Gpu:
    """Return a copy of `gpu` on which the resources in `names` are so fast that they take no time.

    The resources are `compute`, `memory` and `network`. `compute` includes the caches on the chip and the power limit.
    """
    if "compute" in names:
        peaks = {name: rate * FASTER for name, rate in gpu.peaks.items()}
        gpu = replace(gpu, peaks=peaks, clock_hz=gpu.clock_hz * FASTER, watts=gpu.watts * FASTER)
    if "memory" in names:
        gpu = replace(gpu, memory_bytes_per_s=gpu.memory_bytes_per_s * FASTER)
    if "network" in names:
        network = _fast_link(gpu.machine_link)
        gpu = replace(gpu, link=_fast_link(gpu.link), pcie=_fast_link(gpu.pcie), network=network)
    return gpu


def _fast_link(link: Link) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * FASTER)
