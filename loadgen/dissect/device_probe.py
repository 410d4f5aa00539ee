"""Determines the limits of a device: FLOP/s, memory bandwidth, launch time and links between processes.

The limits of a GPU in servers/hardware/gpus.csv come from its data sheet. The limits of other devices are measured by
short probes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from loadgen.dissect import DissectError
from loadgen.dissect.results import DATA_SHEET, DeviceLimits, LinkProbe
from loadgen.servers.hardware import Gpu, HardwareError, gpu

Statistic = Callable[[list[float]], float]
"""Combines the times of all attempts of a probe in s: `min` or `median`."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMM_SIZE = 1536
SUM_SIZE = 512
STREAM_VALUES = 1 << 24
"""Number of fp32 values in each of three arrays. An array has 64 MiB, which is more than any CPU cache."""
PROBES = 12
PROBE_S = 1.0
"""A probe ends after PROBES attempts or after PROBE_S seconds, whichever comes first."""
LINK_VALUES = 1 << 23
"""Number of fp32 values per process in a large message: 32 MiB."""
LINK_PROBES = 5


def check_device(device: str, dtype: str) -> None:
    """Raise DissectError for an unknown or missing device, or for an unknown number format `dtype`."""
    if device not in ("cpu", "cuda"):
        raise DissectError(f"unknown device {device!r}", "Choose --device cpu or --device cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise DissectError(
            "torch sees no GPU here",
            "Choose --device cpu, or use a GPU host: nvidia-smi must list the GPU, and torch must be a CUDA build.",
        )
    if dtype not in DTYPES:
        raise DissectError(f"unknown number format {dtype!r}", f"Choose one of {', '.join(DTYPES)}.")


def device_limits(device: str, dtype: str, statistic: Statistic = min) -> DeviceLimits:
    """Return the limits of a device: from its data sheet if the GPU is in gpus.csv, otherwise from probes.

    The FLOP/s are those of the number format `dtype`. If it is fp32, the limits are always measured. A probe makes
    several attempts, and `statistic` computes its result from their durations. By default, the fastest attempt counts.
    """
    if device == "cuda":
        name = torch.cuda.get_device_name()
        card = _known_gpu(name)
        if card and dtype != "fp32":
            return DeviceLimits(
                card.name, card.flops_per_s, card.memory_bytes_per_s, DATA_SHEET, card.architecture.launch_s
            )
    else:
        name = f"{torch.get_num_threads()} CPU threads"
    return DeviceLimits(
        device=name,
        flops_per_s=_gemm_flops_per_s(device, dtype, statistic),
        bytes_per_s=_stream_bytes_per_s(device, statistic),
        source=f"measured: {'best' if statistic is min else 'median'} GEMM, and STREAM's triad",
        fresh_bytes_per_s=_fresh_bytes_per_s(statistic) if device == "cpu" else 0.0,
        launch_s=_launch_s(device),
        sums_in_fp32=device == "cpu" and _sums_in_fp32(dtype),
    )


def _known_gpu(name: str) -> Gpu | None:
    try:
        return gpu(name)
    except HardwareError:
        return None


def group_device_limits(device: str, dtype: str) -> DeviceLimits:
    """Return the limits of the device while all processes of the group probe it at the same time.

    The result also holds the speed of the links between the processes. Each measured limit is the median of several
    attempts. Predictions of a training step use these limits.
    """
    if not distributed.is_initialized():
        return device_limits(device, dtype, median)
    distributed.barrier()
    return replace(device_limits(device, dtype, median), links=measure_links(device))


def measure_links(device: str) -> dict[str, LinkProbe]:
    """Measure the latency and the bus bandwidth of each collective between the processes of the group."""
    ranks = distributed.get_world_size()
    crossings = {  # how often each byte of a message crosses the busiest link
        "all-reduce": 2 * (ranks - 1) / ranks,
        "all-gather": (ranks - 1) / ranks,
        "reduce-scatter": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }
    links = {}
    for name, share in crossings.items():
        small_s = _collective_s(name, ranks, device, ranks)
        large_s = _collective_s(name, LINK_VALUES * ranks, device, ranks)
        links[name] = LinkProbe(small_s, share * 4.0 * LINK_VALUES * ranks / max(large_s - small_s, 1e-9))
    return links


def _collective_s(name: str, values: int, device: str, ranks: int) -> float:
    """Return the median time in s of the collective `name`, such as an all-reduce of `values` numbers.

    The collective connects `ranks` processes, which start it at the same time.
    """
    whole = torch.ones(values, device=device)
    part = torch.ones(values // ranks, device=device)
    gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    step = {
        "all-reduce": lambda: distributed.all_reduce(whole),
        "all-gather": lambda: gather(whole, part),
        "reduce-scatter": lambda: scatter(part, whole),
        "broadcast": lambda: distributed.broadcast(whole, 0),
    }[name]
    seconds = []
    for _ in range(LINK_PROBES):
        distributed.barrier()
        seconds.append(time_call(device, step))
    return median(seconds)


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_call(device: str, step: Callable[[], Any]) -> float:
    """Call `step`, and return the seconds until the device has finished its work."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def _probe(device: str, step: Callable[[], Any], statistic: Statistic = min) -> float:
    """Call `step` once to warm up, then several more times, and return its duration in seconds.

    `statistic` computes the result from the durations of these calls. By default, it is the minimum.
    """
    step()
    end = time.perf_counter() + PROBE_S
    seconds = [time_call(device, step)]
    while len(seconds) < PROBES and time.perf_counter() < end:
        seconds.append(time_call(device, step))
    return statistic(seconds)


def _gemm_flops_per_s(device: str, dtype: str, statistic: Statistic) -> float:
    first, second = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2.0 * GEMM_SIZE**3 / _probe(device, lambda: first @ second, statistic)


def _stream_bytes_per_s(device: str, statistic: Statistic) -> float:
    """Measure the memory bandwidth of a device in bytes per second.

    The operation is the triad of the STREAM benchmark, which reads two arrays and writes a third one. `statistic`
    computes the result from the durations of several attempts.
    """
    first, second, target = (torch.ones(STREAM_VALUES, device=device) for _ in range(3))
    seconds = _probe(device, lambda: torch.add(first, second, alpha=3.0, out=target), statistic)
    return 3 * 4.0 * STREAM_VALUES / seconds


def _fresh_bytes_per_s(statistic: Statistic) -> float:
    """Return the rate in bytes per second at which the operating system provides new memory.

    The function writes to new memory and to memory that is already in use, several times each. `statistic` computes one
    duration from these attempts, for example the minimum. Return 0 if writing to new memory does not take clearly
    longer.
    """
    used = torch.ones(STREAM_VALUES)
    used_s = _probe("cpu", lambda: used.fill_(1.0), statistic)
    fresh_s = _probe("cpu", lambda: torch.ones(STREAM_VALUES), statistic)
    return 4.0 * STREAM_VALUES / (fresh_s - used_s) if fresh_s > 1.1 * used_s else 0.0


def _sums_in_fp32(dtype: str) -> bool:
    """Return True if a GEMM with inputs of the type `dtype` allocates an fp32 copy of its result."""
    first, second = (torch.ones(SUM_SIZE, SUM_SIZE, dtype=DTYPES[dtype]) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = first @ second
    return any(size >= 2 * result.nbytes for _, _, size in allocations(profiler, "cpu"))


def allocations(profiler: Any, device: str) -> list[tuple[int, int, int]]:
    """Return (time in ns, address, bytes) of each allocation in time order. Bytes are negative for freed memory."""
    from torch._C._profiler import _EventType

    def walk(events: Any) -> Iterator[tuple[int, int, int]]:
        for event in events:
            if event.typed[0] == _EventType.Allocation and str(event.extra_fields.device).startswith(device):
                yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
            yield from walk(event.children)

    return sorted(walk(profiler.profiler.kineto_results.experimental_event_tree()))


def _launch_s(device: str) -> float:
    """Return the time to start one small operator, in s."""
    value = torch.zeros(1, device=device)

    def launch_thousand() -> None:
        for _ in range(1000):
            value.add_(1)

    return _probe(device, launch_thousand) / 1000
