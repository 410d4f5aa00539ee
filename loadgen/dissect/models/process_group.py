"""Tensor parallelism with torch.distributed. Processes share each layer, and autograd supports the collectives."""

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
    """Autograd function for an all-reduce that has completed. It returns the sum.

    In the backward pass, the gradient of the sum is passed on unchanged as the gradient of this process's summand.
    """

    @staticmethod
    def forward(_: Any, __: Tensor, total: Tensor) -> Tensor:
        return total.view_as(total)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CopyToRanks(torch.autograd.Function):
    """Autograd function that returns its input. In the backward pass, the gradient is summed over all processes."""

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
    """Autograd function that concatenates the parts of all processes.

    In the backward pass, each process takes the gradient of its part.
    """

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
    """A `TensorGroup` of the processes in torch.distributed's default group.

    An all-reduce of the forward pass takes at least `delay_s`, which simulates the latency of a link. The device can
    compute during this time.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return int(distributed.get_world_size())

    def copy_to_ranks(self, hidden: Tensor) -> Tensor:
        """Return the input. In the backward pass, the gradient of the input is summed over all processes."""
        return _CopyToRanks.apply(hidden)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over all processes."""
        with record_function(ALL_REDUCE):
            wait = self._start(partial)
            return wait()

    def start_all_reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce, which sums `partial` over all processes.

        The result is a function that waits until the sum is complete, and returns the sum.
        """
        with record_function(ALL_REDUCE):
            wait = self._start(partial)

        def recorded_wait() -> Tensor:
            with record_function(ALL_REDUCE_WAIT):
                return wait()

        return recorded_wait

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the concatenation of `part` over all processes, along the last dimension."""
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
    """Start a delay of `delay_s` seconds, which simulates a slow link. Return a function that waits until it is over.

    On a GPU, the delay runs in a separate stream, so that the GPU can compute in the meantime.
    """
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
    """Measure the frequency of the counter that `torch.cuda._sleep` uses, in Hz.

    A measurement is necessary, because some versions of torch report no clock rate, and GPUs change their clock rate.
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
