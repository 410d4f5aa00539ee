"""Processes of torch.distributed that share each layer, with gradients through their collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.profiler import record_function

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"


class _Reduced(torch.autograd.Function):
    """The sum; the gradient is the same on all."""

    @staticmethod
    def forward(_: Any, partial: Tensor) -> Tensor:
        return summed(partial)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Entered(torch.autograd.Function):
    """The same; of the gradient each has a part of the sum."""

    @staticmethod
    def forward(_: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class _Gathered(torch.autograd.Function):
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


def summed(partial: Tensor) -> Tensor:
    """Over all processes, in a tensor of its own."""
    total = partial.clone(memory_format=torch.contiguous_format)
    with record_function(ALL_REDUCE):
        distributed.all_reduce(total)
    return total


class Shared:
    """The processes of torch.distributed's default group, each waiting for its all-reduces."""

    @property
    def size(self) -> int:
        return int(distributed.get_world_size())

    def entered(self, hidden: Tensor) -> Tensor:
        return _Entered.apply(hidden)

    def reduced(self, partial: Tensor) -> Tensor:
        return _Reduced.apply(partial)

    def gathered(self, part: Tensor) -> Tensor:
        return _Gathered.apply(part)
