"""Every operator that torch dispatches: whose it is, how long it took, what it computed and moved.

A dispatch mode stands between autograd and the kernels, so that it sees exactly what runs, with its arguments. Which
module a forward operator belongs to, hooks say; a backward operator belongs to the module in which its node of the
autograd graph was made: nodes are numbered in order, and each module has a stretch of numbers.

The clock stops while this module looks: what is left is the model's own. On a GPU instants are CUDA events.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from loadgen.dissect.models.llama import DecoderLayer
from loadgen.dissect.results import Direction

MODULES = {
    "embed_tokens": "Embedding",
    "q_proj": "QKV",
    "k_proj": "QKV",
    "v_proj": "QKV",
    "rotary": "RoPE",
    "self_attn": "attention",
    "core": "attention",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "act_fn": "SiLU",
    "mlp": "SiLU",
    "input_layernorm": "RMSNorm",
    "post_attention_layernorm": "RMSNorm",
    "norm": "RMSNorm",
    "lm_head": "LM head",
    "model": "RoPE",
    "layers": "residual",
}
"""What each module is called, by its name in the model; what a block computes itself is named after its part."""
COPIES = {"clone", "_to_copy", "copy_", "cat", "repeat", "contiguous", "constant_pad_nd", "stack"}
PLAIN_NAMES = {"_softmax": "softmax", "_log_softmax": "softmax", "_softmax_backward_data": "softmax", "silu": "SiLU"}
ATTENTION = "_scaled_dot_product"


class Clock:
    """Instants of this device, without what watching takes."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.out_ns = cuda, 0

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter_ns() - self.out_ns
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def leave_out(self, since_ns: int) -> None:
        """What has passed since then was the instrument's."""
        self.out_ns += time.perf_counter_ns() - since_ns

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two instants; on a GPU once all has ended."""
        return float(begin.elapsed_time(end)) / 1e3 if self.cuda else (end - begin) / 1e9


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call."""

    module: str
    in_layers: bool
    direction: Direction
    operator: str
    shape: str
    flops: float
    bytes: float
    begin: Any
    end: Any


class OpProfiler(TorchDispatchMode):
    """Sees all operators of one step, and the stretches of time of its parts."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.clock, self.seen = clock, list[OperatorCall]()
        self.spans: list[tuple[str, Any, Any]] = []
        self._owners: list[tuple[str, bool]] = [("loss", False)]
        self._starts: list[int] = [0]  # the number of the first node of each stretch, and whose it is
        self._whose: list[tuple[str, bool]] = [self._owners[0]]
        self._by_parameter = {id(each): owner for owner, each in _parameters(model)}
        self._model, self._begun, self._collective = model, list[Any](), ""

    @contextmanager
    def watching(self) -> Iterator[OpProfiler]:
        """One step: hooks are there as long as this lasts."""
        hooks = [
            hook
            for name, module in self._model.named_modules()
            if (owner := _owner(name, module))
            for hook in (
                module.register_forward_pre_hook(partial(self._enter, owner)),
                module.register_forward_hook(partial(self._leave, _part(name, module)), prepend=True),
            )
        ]
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, owner: tuple[str, bool], *_: Any) -> None:
        entered = time.perf_counter_ns()
        self._owners.append(owner)
        self._stretch()
        self.clock.leave_out(entered)
        self._begun.append(self.clock.now())

    def _leave(self, part: str, *_: Any) -> None:
        end, left = self.clock.now(), time.perf_counter_ns()
        begin = self._begun.pop()
        if part:
            self.spans.append((part, begin, end))
        self._owners.pop()
        self._stretch()
        self.clock.leave_out(left)

    def _stretch(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())
        self._whose.append(self._owners[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entered = time.perf_counter_ns()
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        owner = self._owners[-1] if node is None else self._owner_of(node)
        self.clock.leave_out(entered)
        begin = self.clock.now()
        result = func(*args, **kwargs)
        end = self.clock.now()
        left = time.perf_counter_ns()
        self._keep(func, args, kwargs, result, (owner, node is not None, begin, end))
        self.clock.leave_out(left)
        return result

    def _owner_of(self, node: Any) -> tuple[str, bool]:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._by_parameter.get(id(variable), self._whose[0])
        return self._whose[bisect_right(self._starts, node._sequence_nr()) - 1]

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any, how: tuple[Any, bool, Any, Any]) -> None:
        """What happens between the two ends of a `record_function` is one operator, of that name: a collective."""
        (module, in_layers), backward, begin, end = how
        name = str(func.overloadpacket.__name__)
        if name.startswith("_record_function"):
            if name.startswith("_record_function_enter"):
                self._collective, self._begun_collective = str(args[0]), begin
            elif self._collective:
                operator, moved = self._collective, self._moved
                self._collective, begin, self._moved = "", self._begun_collective, 0.0
                shape = f"{moved / 1e6:.3g} MB"
                self.seen.append(
                    OperatorCall(operator, in_layers, _direction(backward), operator, shape, 0.0, moved, begin, end)
                )
            return
        if self._collective:  # copies on the way to it are its time, but travel nowhere
            self._moved += sum(map(_bytes, _tensors(args))) if func.namespace == "c10d" else 0.0
            return
        operator, shape, flops, moved = describe_call(func, args, kwargs, result)
        self.seen.append(
            OperatorCall(module, in_layers, _direction(backward), operator, shape, flops, moved, begin, end)
        )

    _begun_collective: Any = 0
    _moved = 0.0


def describe_call(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, str, float, float]:
    """Of one call: what it is called, its shape, FLOPs (one per number that it gives where it is no GEMM), and
    bytes that it must read and write."""
    name = str(func.overloadpacket.__name__)
    inputs, outputs = _tensors([args, kwargs]), _tensors(result)
    changed = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
    known = {each.untyped_storage().data_ptr() for each in inputs}
    if not changed and outputs and all(output.untyped_storage().data_ptr() in known for output in outputs):
        return "views", "", 0.0, 0.0
    counts = flop_registry.get(func.overloadpacket)
    flops = float(counts(*args, **kwargs, out_val=result)) if counts else 0.0
    moved = float(sum(map(_bytes, outputs)))
    if name == "embedding":
        moved *= 2  # the rows that are looked up, not the table
    elif name not in ("fill_", "zero_", "zeros", "ones", "arange", "empty"):
        skipped = args[0] if name == "copy_" else None  # is written, not read
        moved += sum(_bytes(each) for each in inputs if each is not skipped)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        one, other = inputs[-2:]
        sizes = _joined((*one.shape[:-1], other.shape[-1], one.shape[-1]))
        return ("GEMM" if one.dim() == 2 else "batched GEMM"), sizes, flops, moved
    sizes = _joined(max((each.shape for each in [*inputs, *outputs]), key=math.prod, default=()))
    if name.startswith(ATTENTION):
        return "attention kernel", sizes, flops or _attention_flops(inputs, "backward" in name), moved
    if name in COPIES:
        return "copy", sizes, flops, moved
    given = sum(output.numel() for output in outputs if output.is_floating_point()) if name != "embedding" else 0
    return PLAIN_NAMES.get(name, name.strip("_")), sizes, flops or float(given), moved


def _joined(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def _attention_flops(inputs: list[Tensor], backward: bool) -> float:
    """Two GEMMs of queries and keys, five in the backward pass (arXiv 2205.14135), as though none were masked."""
    queries, keys = inputs[1:3] if backward else inputs[:2]
    return float((5.0 if backward else 2.0) * 2.0 * queries.numel() * keys.shape[2])


def _tensors(values: Any) -> list[Tensor]:
    return [tree_leave for tree_leave in tree_leaves(values) if isinstance(tree_leave, Tensor)]


def _bytes(tensor: Tensor) -> float:
    """What is there of it in memory: an expanded dimension is there once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(math.prod(sizes) * tensor.element_size())


def _direction(backward: bool) -> Direction:
    return "backward" if backward else "forward"


def _owner(name: str, module: nn.Module) -> tuple[str, bool] | None:
    """What operators of a module are called, and whether they are a layer's."""
    if isinstance(module, nn.ModuleList):
        return None
    last = "layers" if isinstance(module, DecoderLayer) else name.rpartition(".")[2]
    return MODULES.get(last, "LM head"), ".layers." in f".{name}"


def _part(name: str, module: nn.Module) -> str:
    """Of those that follow each other in a step, and of all together: what their time is called."""
    if isinstance(module, DecoderLayer):
        return "layers"
    return {"": "model", "model.embed_tokens": "Embedding", "model.norm": "RMSNorm", "lm_head": "LM head"}.get(name, "")


def _parameters(model: nn.Module) -> Iterator[tuple[tuple[str, bool], Tensor]]:
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0].rpartition(".")[2]
        yield (MODULES.get(owner, "LM head"), ".layers." in f".{name}"), parameter
