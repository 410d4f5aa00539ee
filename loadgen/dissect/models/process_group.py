"""Tensor parallelism with torch.distributed: processes share each layer, and gradients pass their collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, distributed
from torch.profiler import record_function

SLEEP_CYCLES = 10_000_000
ALL_REDUCE = "all-reduce"
ALL_REDUCE_WAIT = "all-reduce wait"
ALL_GATHER = "all-gather"


class _AllReduced(torch.autograd.Function):
    """Returns the finished sum. Each partial result has the gradient of the sum."""

    @staticmethod
    def forward(_: Any, __: Tensor, total: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CopyToRanks(torch.autograd.Function):
    """Returns its input. The gradient is the sum over all processes."""

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
    """Returns the parts of all processes side by side. Each process takes its part of the gradient."""

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
    """The processes of torch.distributed's default group, as a `TensorGroup`.

    An all-reduce of the forward pass takes at least `delay_s`. This simulates the latency of a link: the device can
    compute meanwhile.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(distributed.get_world_size())

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        """Return the input; its gradient is summed over all processes."""
        return _CopyToRanks.apply(hidden)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum over all processes."""
        with record_function(ALL_REDUCE):
            wait = self._start(partial)
            return wait()

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce, and return a function that waits for the sum."""
        with record_function(ALL_REDUCE):
            wait = self._start(partial)

        def recorded_wait() -> Tensor:
            with record_function(ALL_REDUCE_WAIT):
                return wait()

        return recorded_wait

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the parts of all processes side by side."""
        return _AllGather.apply(part)

    def _start(self, partial: Tensor) -> Callable[[], Tensor]:
        total = partial.detach().clone() if partial.requires_grad else partial
        handle = distributed.all_reduce(total, async_op=True)
        wait_for_link = _start_delay(self.delay_s, total.device) if self.delay_s else None

        def wait() -> Tensor:
            handle.wait()
            if wait_for_link:
                wait_for_link()
            return _AllReduced.apply(partial, total)

        return wait


def _start_delay(delay_s: float, device: torch.device) -> Callable[[], None]:
    """Start a delay now, and return a function that waits for its end. A GPU waits in a separate stream."""
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
    """Measure the frequency of the counter that `torch.cuda._sleep` uses.

    Some versions of torch report no clock rate, and GPUs change theirs.
    """
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # lets the clock rise
        begin.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
        end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return 1e3 * SLEEP_CYCLES / elapsed_ms
