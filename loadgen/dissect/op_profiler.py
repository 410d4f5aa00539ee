"""Records every operator that torch dispatches: its module, its time, its FLOPs and the bytes that it moves.

A torch dispatch mode between autograd and the kernels receives every operator with its arguments. The module of an
operator is determined as follows:

- Hooks record which module is running. A forward operator belongs to this module.
- A backward operator belongs to the module that created its node in the autograd graph. Nodes are numbered in order,
  and each module has a range of numbers.

The time of the profiler itself is excluded, so that only the time of the model counts. On a GPU, times are CUDA events.
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
"""Reported name of each module by its name in the model. Operators that belong to a block directly have the name of the
block's main part."""
COPIES = {"clone", "_to_copy", "copy_", "cat", "repeat", "contiguous", "constant_pad_nd", "stack"}
PLAIN_NAMES = {"_softmax": "softmax", "_log_softmax": "softmax", "_softmax_backward_data": "softmax", "silu": "SiLU"}
ATTENTION = "_scaled_dot_product"


class Clock:
    """Measures how long operators take on a device.

    On a GPU, the times are CUDA events. On a CPU, the clock leaves out the time that the profiler itself needs.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.excluded_ns = 0

    def now(self) -> Any:
        """Return the current time: an integer in ns on a CPU, or a CUDA event on a GPU."""
        if not self.cuda:
            return time.perf_counter_ns() - self.excluded_ns
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def exclude_since(self, since_ns: int) -> None:
        """Exclude the time from `since_ns` until now, in which the profiler itself has worked.

        `since_ns` is a time of time.perf_counter_ns. On a CPU, all later times of this clock are smaller by the
        excluded time. On a GPU, this method has no effect.
        """
        self.excluded_ns += time.perf_counter_ns() - since_ns

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two times of this clock.

        If the device is a GPU, it must have finished its work before this call.
        """
        return float(begin.elapsed_time(end)) / 1e3 if self.cuda else (end - begin) / 1e9


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator. `begin` and `end` are times of a `Clock`."""

    module: str
    in_layers: bool
    direction: Direction
    operator: str
    shape: str
    flops: float
    bytes: float
    begin: Any
    end: Any


Owner = tuple[str, bool]
"""Reported name of the module that an operator belongs to, and True if the module is in a decoder layer."""


class OpProfiler(TorchDispatchMode):
    """Records all operators of one step, and the times of embedding, layers, last norm and LM head."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.calls: list[OperatorCall] = []
        self.spans: list[tuple[str, Any, Any]] = []
        self._model = model
        self._owners: list[Owner] = [("loss", False)]  # stack of the modules in progress
        self._range_starts: list[int] = [0]  # number of the first autograd node of each range
        self._range_owners: list[Owner] = [self._owners[0]]
        self._by_parameter = {id(parameter): owner for owner, parameter in _parameters(model)}
        self._begins: list[Any] = []  # stack of the begin times of the modules in progress
        self._collective = ""  # name of the collective in progress
        self._collective_begin: Any = 0
        self._collective_bytes = 0.0

    @contextmanager
    def recording(self) -> Iterator[OpProfiler]:
        """Record the step that runs inside this context. Hooks are installed on the model during this time."""
        hooks = []
        for name, module in self._model.named_modules():
            owner = _owner(name, module)
            if owner:
                leave = partial(self._leave, _part(name, module))
                hooks.append(module.register_forward_pre_hook(partial(self._enter, owner)))
                hooks.append(module.register_forward_hook(leave, prepend=True))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, owner: Owner, *_: Any) -> None:
        entered_ns = time.perf_counter_ns()
        self._owners.append(owner)
        self._start_range()
        self.clock.exclude_since(entered_ns)
        self._begins.append(self.clock.now())

    def _leave(self, part: str, *_: Any) -> None:
        end = self.clock.now()
        left_ns = time.perf_counter_ns()
        begin = self._begins.pop()
        if part:
            self.spans.append((part, begin, end))
        self._owners.pop()
        self._start_range()
        self.clock.exclude_since(left_ns)

    def _start_range(self) -> None:
        self._range_starts.append(torch.autograd._get_sequence_nr())
        self._range_owners.append(self._owners[-1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entered_ns = time.perf_counter_ns()
        kwargs = kwargs or {}
        node = torch._C._current_autograd_node()
        owner = self._owners[-1] if node is None else self._owner_of(node)
        self.clock.exclude_since(entered_ns)
        begin = self.clock.now()
        result = func(*args, **kwargs)
        end = self.clock.now()
        left_ns = time.perf_counter_ns()
        call = _Dispatch(func, args, kwargs, result, owner, _direction(node is not None), begin, end)
        self._record(call)
        self.clock.exclude_since(left_ns)
        return result

    def _owner_of(self, node: Any) -> Owner:
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._by_parameter.get(id(variable), self._range_owners[0])
        return self._range_owners[bisect_right(self._range_starts, node._sequence_nr()) - 1]

    def _record(self, call: _Dispatch) -> None:
        """Record the call of an operator.

        A collective (such as an all-reduce) runs inside a `record_function` block. All calls inside this block are
        recorded as a single operator, which gets the name of the block.
        """
        name = str(call.func.overloadpacket.__name__)
        if name.startswith("_record_function"):
            if name.startswith("_record_function_enter"):
                self._collective = str(call.args[0])
                self._collective_begin = call.begin
            elif self._collective:
                self._record_collective(call)
            return
        if self._collective:  # copies count as time of the collective, but their bytes are not sent
            if call.func.namespace == "c10d":
                self._collective_bytes += sum(map(_bytes, _tensors(call.args)))
            return
        module, in_layers = call.owner
        operator, shape, flops, moved_bytes = describe_call(call.func, call.args, call.kwargs, call.result)
        self.calls.append(
            OperatorCall(module, in_layers, call.direction, operator, shape, flops, moved_bytes, call.begin, call.end)
        )

    def _record_collective(self, call: _Dispatch) -> None:
        name = self._collective
        moved_bytes = self._collective_bytes
        self._collective = ""
        self._collective_bytes = 0.0
        self.calls.append(
            OperatorCall(
                module=name,
                in_layers=call.owner[1],
                direction=call.direction,
                operator=name,
                shape=f"{moved_bytes / 1e6:.3g} MB",
                flops=0.0,
                bytes=moved_bytes,
                begin=self._collective_begin,
                end=call.end,
            )
        )


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """One operator call that torch dispatched: the function, its arguments and result, and when it ran.

    `owner` identifies the module that made the call.
    """

    func: Any
    args: Any
    kwargs: Any
    result: Any
    owner: Owner
    direction: Direction
    begin: Any
    end: Any


def describe_call(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, str, float, float]:
    """Return four facts about a call of the operator `func`: its name in reports, its shape, its FLOPs and its bytes.

    - Shape: m x n x k for a GEMM. For any other operator, the largest shape among its tensors. Empty for a view.
    - FLOPs: those of the multiplications and additions for a GEMM, a convolution or an attention kernel. For any other
      operator, one per floating-point value of its result. Views, copies and embeddings have none.
    - Bytes: the minimum that the call must read and write.
    """
    name = str(func.overloadpacket.__name__)
    inputs = _tensors([args, kwargs])
    outputs = _tensors(result)
    if _is_view(func, inputs, outputs):
        return "views", "", 0.0, 0.0
    count_flops = flop_registry.get(func.overloadpacket)
    flops = float(count_flops(*args, **kwargs, out_val=result)) if count_flops else 0.0
    moved = float(sum(map(_bytes, outputs)))
    if name == "embedding":
        moved *= 2  # an embedding reads only the rows that it returns
    elif name not in ("fill_", "zero_", "zeros", "ones", "arange", "empty"):
        only_written = args[0] if name == "copy_" else None
        moved += sum(_bytes(tensor) for tensor in inputs if tensor is not only_written)
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = inputs[-2:]
        sizes = _format_shape((*left.shape[:-1], right.shape[-1], left.shape[-1]))
        return ("GEMM" if left.dim() == 2 else "batched GEMM"), sizes, flops, moved
    sizes = _format_shape(max((tensor.shape for tensor in [*inputs, *outputs]), key=math.prod, default=()))
    if name.startswith(ATTENTION):
        return "attention kernel", sizes, flops or _attention_flops(inputs, "backward" in name), moved
    if name in COPIES:
        return "copy", sizes, flops, moved
    values = 0 if name == "embedding" else sum(output.numel() for output in outputs if output.is_floating_point())
    return PLAIN_NAMES.get(name, name.strip("_")), sizes, flops or float(values), moved


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return True if a call of the operator `func` only creates views of its inputs.

    A view is a tensor that shares the memory of an input, so the call computes and copies nothing. The result is False
    for a call that changes one of its arguments.
    """
    if not outputs or any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments):
        return False
    input_storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return all(output.untyped_storage().data_ptr() in input_storages for output in outputs)


def _format_shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


def _attention_flops(inputs: list[Tensor], backward: bool) -> float:
    """Return the FLOPs of an attention operator with these `inputs`, as if no position were masked.

    The forward pass counts as two matrix products of queries and keys. The backward pass counts as five (arXiv
    2205.14135).
    """
    queries, keys = inputs[1:3] if backward else inputs[:2]
    return float((5.0 if backward else 2.0) * 2.0 * queries.numel() * keys.shape[2])


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> float:
    """Return the bytes of a tensor in memory.

    If a dimension was created by `expand`, its elements share memory, so the dimension does not increase the result.
    """
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(math.prod(sizes) * tensor.element_size())


def _direction(backward: bool) -> Direction:
    return "backward" if backward else "forward"


def _owner(name: str, module: nn.Module) -> Owner | None:
    """Return the `Owner` of the operators that `module` calls, or None if `module` is a list of modules.

    An `Owner` is a pair: the reported name of the module, and True if the module is part of a decoder layer. A list of
    modules has no `Owner`, because the list itself calls no operators. `name` is the path of the module in the model.
    """
    if isinstance(module, nn.ModuleList):
        return None
    last = "layers" if isinstance(module, DecoderLayer) else name.rpartition(".")[2]
    return MODULES.get(last, "LM head"), ".layers." in f".{name}"


def _part(name: str, module: nn.Module) -> str:
    """Return the name under which the time of a module is reported, such as `layers`.

    Return "" for modules whose time is not reported, such as the modules inside a layer.
    """
    if isinstance(module, DecoderLayer):
        return "layers"
    return {"": "model", "model.embed_tokens": "Embedding", "model.norm": "RMSNorm", "lm_head": "LM head"}.get(name, "")


def _parameters(model: nn.Module) -> Iterator[tuple[Owner, Tensor]]:
    """Yield each parameter of the model, together with the `Owner` of the parameter.

    An `Owner` is a pair: the reported name of a module, and True if the module is part of a decoder layer.
    """
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0].rpartition(".")[2]
        yield (MODULES.get(module, "LM head"), ".layers." in f".{name}"), parameter
