"""The device, and the bounds that its operators are held against."""

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
from loadgen.servers.hardware import HardwareError, gpu

Pick = Callable[[list[float]], float]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMM_SIZE, SUM_SIZE = 1536, 512
STREAM_VALUES = 1 << 24
"""Of each of three arrays in fp32: 64 MiB, more than any cache of a CPU."""
PROBES, PROBE_S = 12, 1.0
"""How often, and for how long, at most."""
LINK_VALUES, LINK_PROBES = 1 << 23, 5
"""In fp32, of each process: 32 MiB."""


def check_device(device: str, dtype: str) -> None:
    """Raises DissectError for a device that is not here, or a number format that it does not compute in."""
    if device not in ("cpu", "cuda"):
        raise DissectError(f"no device is called {device!r}", "Choose --device cpu or --device cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise DissectError(
            "torch sees no GPU here",
            "Choose --device cpu, or run this on a GPU host: nvidia-smi must list the card, and torch be a CUDA build.",
        )
    if dtype not in DTYPES:
        raise DissectError(f"no number format is called {dtype!r}", f"Choose one of {', '.join(DTYPES)}.")


def device_limits(device: str, dtype: str, pick: Pick = min) -> DeviceLimits:
    """Of a GPU that has a row in servers/hardware/gpus.csv the data sheet's; else what short probes reach: the fastest
    try, or the one that is picked."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        try:
            card = gpu(name)
        except HardwareError:
            card = None
        if card and dtype != "fp32":
            return DeviceLimits(
                card.name, card.flops_per_s, card.memory_bytes_per_s, DATA_SHEET, card.architecture.launch_s
            )
    else:
        name = f"{torch.get_num_threads()} CPU threads"
    rate, moved = _gemm_flops_per_s(device, dtype, pick), _stream_bytes_per_s(device, pick)
    fresh = _fresh_bytes_per_s(pick) if device == "cpu" else 0.0
    source = f"measured: {'best' if pick is min else 'median'} GEMM, and STREAM's triad"
    return DeviceLimits(name, rate, moved, source, _launch_s(device), fresh, device == "cpu" and _sums_in_fp32(dtype))


def group_device_limits(device: str, dtype: str) -> DeviceLimits:
    """What each process has while all are busy, as a rule rather than at best: what a step is predicted of. And what
    the links between them have."""
    if not distributed.is_initialized():
        return device_limits(device, dtype, median)
    distributed.barrier()
    return replace(device_limits(device, dtype, median), links=measure_links(device))


def measure_links(device: str) -> dict[str, LinkProbe]:
    """What collectives of the group take: the latency of a small message, the rate of a large one."""
    ranks = distributed.get_world_size()
    around = {"all-reduce": 2 * (ranks - 1) / ranks, "all-gather": (ranks - 1) / ranks}
    around |= {"reduce-scatter": around["all-gather"], "broadcast": 1.0}
    result = {}
    for name, share in around.items():
        small, large = (_collective_s(name, values, device, ranks) for values in (ranks, LINK_VALUES * ranks))
        result[name] = LinkProbe(small, share * 4.0 * LINK_VALUES * ranks / max(large - small, 1e-9))
    return result


def _collective_s(name: str, values: int, device: str, ranks: int) -> float:
    """As a rule, begun by all at once."""
    whole, part = torch.ones(values, device=device), torch.ones(values // ranks, device=device)
    gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    step = {
        "all-reduce": lambda: distributed.all_reduce(whole),
        "all-gather": lambda: gather(whole, part),
        "reduce-scatter": lambda: scatter(part, whole),
        "broadcast": lambda: distributed.broadcast(whole, 0),
    }[name]
    took = []
    for _ in range(LINK_PROBES):
        distributed.barrier()
        took.append(time_call(device, step))
    return median(took)


def synchronize(device: str) -> None:
    """All that was asked of the device has ended."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_call(device: str, step: Callable[[], Any]) -> float:
    """Seconds of one step, from its start until the device has nothing left to do."""
    synchronize(device)
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def _best(device: str, step: Callable[[], Any], pick: Pick = min) -> float:
    step()
    end, took = time.perf_counter() + PROBE_S, [time_call(device, step)]
    while len(took) < PROBES and time.perf_counter() < end:
        took.append(time_call(device, step))
    return pick(took)


def _gemm_flops_per_s(device: str, dtype: str, pick: Pick) -> float:
    one, other = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2.0 * GEMM_SIZE**3 / _best(device, lambda: one @ other, pick)


def _stream_bytes_per_s(device: str, pick: Pick) -> float:
    one, two, three = (torch.ones(STREAM_VALUES, device=device) for _ in range(3))
    return 3 * 4.0 * STREAM_VALUES / _best(device, lambda: torch.add(one, two, alpha=3.0, out=three), pick)


def _fresh_bytes_per_s(pick: Pick) -> float:
    """By how much longer it takes to write where nobody has written; 0 where that is no longer."""
    there = torch.ones(STREAM_VALUES)
    known, fresh = (_best("cpu", step, pick) for step in (lambda: there.fill_(1.0), lambda: torch.ones(STREAM_VALUES)))
    return 4.0 * STREAM_VALUES / (fresh - known) if fresh > 1.1 * known else 0.0


def _sums_in_fp32(dtype: str) -> bool:
    one, other = (torch.ones(SUM_SIZE, SUM_SIZE, dtype=DTYPES[dtype]) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = one @ other
    return any(size >= 2 * result.nbytes for _, _, size in allocations(profiler, "cpu"))


def allocations(profiler: Any, device: str) -> list[tuple[int, int, int]]:
    """Instant (ns), address and bytes of each in order, negative where memory is given back."""
    from torch._C._profiler import _EventType

    def below(events: Any) -> Iterator[tuple[int, int, int]]:
        for event in events:
            if event.typed[0] == _EventType.Allocation and str(event.extra_fields.device).startswith(device):
                yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
            yield from below(event.children)

    return sorted(below(profiler.profiler.kineto_results.experimental_event_tree()))


def _launch_s(device: str) -> float:
    value = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(1000):
            value.add_(1)

    return _best(device, many) / 1000
