"""Processes of torch.distributed that share each layer, with gradients through their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.profiler import record_function

SLEEP_CYCLES = 10_000_000
ALL_REDUCE, ALL_REDUCE_WAIT, ALL_GATHER = "all-reduce", "all-reduce wait", "all-gather"


class _AllReduced(torch.autograd.Function):
    """The sum, which was made meanwhile; its gradient is that of every part."""

    @staticmethod
    def forward(_: Any, __: Tensor, total: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CopyToRanks(torch.autograd.Function):
    """The same; of the gradient each has a part of the sum."""

    @staticmethod
    def forward(_: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with record_function(ALL_REDUCE):
            distributed.all_reduce(total)
        return total


class _AllGather(torch.autograd.Function):
    """All parts; of the gradient each takes its own."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        context.width = part.shape[-1]
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size())]
        with record_function(ALL_GATHER):
            distributed.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.narrow(-1, distributed.get_rank() * context.width, context.width)


class ProcessGroup:
    """The processes of torch.distributed's default group. An all-reduce of the forward pass takes `delay_s` at least:
    the latency of a link, in which the device can compute."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    @property
    def size(self) -> int:
        return int(distributed.get_world_size())

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        return _CopyToRanks.apply(hidden)

    def all_reduce(self, partial: Tensor) -> Tensor:
        with record_function(ALL_REDUCE):
            arrived = self._started(partial)
            return arrived()

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        with record_function(ALL_REDUCE):
            arrived = self._started(partial)

        def waited() -> Tensor:
            with record_function(ALL_REDUCE_WAIT):
                return arrived()

        return waited

    def all_gather(self, part: Tensor) -> Tensor:
        return _AllGather.apply(part)

    def _started(self, partial: Tensor) -> Callable[[], Tensor]:
        total = partial.detach().clone() if partial.requires_grad else partial
        handle = distributed.all_reduce(total, async_op=True)
        latency = _start_delay(self.delay_s, total.device) if self.delay_s else None

        def arrived() -> Tensor:
            handle.wait()
            if latency:
                latency()
            return _AllReduced.apply(partial, total)

        return arrived


def _start_delay(delay_s: float, device: torch.device) -> Callable[[], None]:
    """Begins now; what is called ends no sooner. A GPU waits in a stream of its own."""
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(delay_s * _cycles_per_s(device)))
        return lambda: torch.cuda.current_stream().wait_stream(stream)
    due_s = time.perf_counter() + delay_s
    return lambda: time.sleep(max(0.0, due_s - time.perf_counter()))


@cache
def _cycles_per_s(device: torch.device) -> float:
    """Of the counter by which `torch.cuda._sleep` waits, measured: not every torch names a clock, no card keeps it."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # clocks rise
        begin.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
        end.synchronize()
    took_ms: float = begin.elapsed_time(end)
    return 1e3 * SLEEP_CYCLES / took_ms
