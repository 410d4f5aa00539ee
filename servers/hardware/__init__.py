"""What GPUs, links and models can do at best, and how long one engine step takes on them; nothing of ours.

Pure, so that the simulator, the matrix and the analysis can all use it. Every table is a CSV file of this folder, one
row per entry: a new GPU is one row of gpus.csv, or, at run time, one table of a TOML file with the same columns:

    [gpus."My card"]
    bf16_TFLOPs = 148
    memory_GB = 96
    memory_GBps = 4000
    link_GBps = 900         # both directions together; pcie_GBps where it has none

    [models."My-7B"]
    layers = 32             # and hidden, intermediate, heads, kv_heads, head_dim, vocabulary, parameters

A step is what it computes or what it reads, whichever takes longer:

    step = max(FLOPs / (peak FLOP/s * efficiency), bytes / (bandwidth * efficiency)) + all-reduce + overhead

after Williams, Waterman and Patterson, "Roofline" (CACM 2009). Weights are read once per step; attention and the KV
cache are counted by the exact lengths of the sequences. Good for orders of magnitude and for the shape of a curve, not
for predicting a server: docs/concepts/simulated-timing.md says how far off it is.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from servers.errors import read_toml

_Entry = TypeVar("_Entry")

FOLDER = Path(__file__).parent  # Where the tables are
DEFAULT_GPU = "A800-80GB SXM"
DEFAULT_MODEL = "Llama-2-7B"
DEFAULT_FORMAT = "bf16"

COMPUTE_EFFICIENCY = 0.6
"""Of the peak FLOP/s. Fitted to the prefill-bound row of llm-infer-bench (github.com/L1aoXingyu/llm-infer-bench, commit
a13f639: LightLLM, 13B, one A800, outputs of at most 32 tokens). The best single matmul reaches 271.2 of 312 TFLOP/s on
an A100 (github.com/stas00/ml-engineering, compute/accelerator); a whole layer does not."""
MEMORY_EFFICIENCY = 0.685
"""Of the memory bandwidth: 1397.31 of 2039 GB/s, Llama-2-7B at batch 1 on one A100-80GB (README of
github.com/pytorch-labs/gpt-fast)."""
OVERHEAD_S = 0.003  # Per step: scheduling, launches and sampling that do not overlap with the GPU. An assumption.
ALL_REDUCE_LATENCY_S = 17e-6  # Of 16 KiB over a pair of H100 without P2P. Pessimistic where there is NVLink.


class HardwareError(ValueError):
    """A GPU, model or number format that is not known, or not described as its table wants it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data-sheet figures. Further columns of gpus.csv wait for who needs them."""

    name: str
    flops_per_s: float  # Dense bf16 with fp32 accumulation
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # One way, to the other GPUs: NVLink where there is one, else PCIe


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer with gated MLPs and untied embeddings (Llama)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int

    @property
    def layer_parameters(self) -> int:
        """Matrix elements that every token passes: Q and output, K and V, and three matrices of the MLP, per layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Elements of the output head, which only the last token of a sequence passes."""
        return self.hidden * self.vocabulary

    @property
    def kv_values(self) -> int:
        """Values in the KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes, in totals over its sequences."""

    tokens: int  # Tokens that pass through the layers
    logits: int  # Sequences, of which the last token passes through the output head
    pairs: int  # (token, earlier token or itself) pairs that attention computes
    kv_tokens: int  # Tokens whose keys and values attention reads


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on `tensor_parallel` GPUs of one kind."""

    gpu: Gpu
    model: ModelShape
    tensor_parallel: int = 1
    bytes_per_value: float = field(default_factory=lambda: number_format(DEFAULT_FORMAT))
    """Of weights, activations and KV cache. The rate of computing is bf16's whatever they are stored in."""

    @property
    def kv_bytes(self) -> float:
        """KV cache of one token, over all layers."""
        return self.model.kv_values * self.bytes_per_value

    def step_ns(self, work: Work) -> int:
        """Duration of one step, in nanoseconds."""
        model, gpu = self.model, self.gpu
        flops = 2 * (model.layer_parameters * work.tokens + model.head_parameters * work.logits)
        flops += 4 * model.layers * model.heads * model.head_dim * work.pairs  # Q K^T, and scores times V
        read_bytes = self.bytes_per_value * (model.layer_parameters + model.head_parameters)
        read_bytes += self.kv_bytes * (work.kv_tokens + work.tokens)  # read by attention, and written once
        compute_s = flops / (self.tensor_parallel * gpu.flops_per_s * COMPUTE_EFFICIENCY)
        memory_s = read_bytes / (self.tensor_parallel * gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)
        return round(1e9 * (max(compute_s, memory_s) + self._all_reduce_s(work.tokens) + OVERHEAD_S))

    def kv_tokens(self, memory_fraction: float) -> int:
        """Tokens of KV cache beside the weights in `memory_fraction` of the memory. Raises HardwareError when the
        weights alone do not fit. Activations are not counted; the data sheet's GB, which are less than what a card
        reports, leave room for them."""
        memory_bytes = self.tensor_parallel * self.gpu.memory_bytes * memory_fraction
        left_bytes = memory_bytes - self.model.parameters * self.bytes_per_value
        tokens = int(left_bytes / self.kv_bytes)
        if tokens <= 0:
            raise HardwareError(
                f"{self.model.name} does not fit {self.tensor_parallel} x {self.gpu.name}: "
                "choose more GPUs (tensor parallel), a larger GPU or a smaller model"
            )
        return tokens

    def _all_reduce_s(self, tokens: int) -> float:
        """Two ring all-reduces per layer, over the attention's and the MLP's output (Megatron-LM, arXiv 1909.08053)."""
        if self.tensor_parallel == 1:
            return 0.0
        activation_bytes = tokens * self.model.hidden * self.bytes_per_value
        moved_bytes = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * activation_bytes
        return 2 * self.model.layers * (moved_bytes / self.gpu.link_bytes_per_s + ALL_REDUCE_LATENCY_S)


def roofline(
    gpu_name: str = DEFAULT_GPU, model_name: str = DEFAULT_MODEL, tensor_parallel: int = 1, file: Path | None = None
) -> Roofline:
    """The roofline of a named model on named GPUs. Raises HardwareError; `file` as in `gpu`."""
    if tensor_parallel < 1:
        raise HardwareError(f"tensor parallel over {tensor_parallel} GPUs: give 1 or more")
    return Roofline(gpu(gpu_name, file), model(model_name, file), tensor_parallel)


def gpu(name: str, file: Path | None = None) -> Gpu:
    """A GPU of gpus.csv or of a TOML file, which wins. Raises HardwareError, which names the nearest one and all."""
    return _pick("GPU", name, _rows("gpus", file), _gpu)


def model(name: str, file: Path | None = None) -> ModelShape:
    """A model of models.csv or of a TOML file, as `gpu`."""
    figures = [each.name for each in fields(ModelShape)[1:]]
    return _pick(
        *("model", name, _rows("models", file)),
        lambda name, row: ModelShape(name, **{each: int(_number(name, row, each)) for each in figures}),
    )


def number_format(name: str) -> float:
    """The bytes of one value in a number format of formats.csv, as `gpu`."""
    return _pick("number format", name, _rows("formats"), lambda name, row: _number(name, row, "bytes_per_value"))


def tables() -> dict[str, list[dict[str, str]]]:
    """Every row of every table with all its columns, for the documentation."""
    return {table: [dict(row) for row in _rows(table).values()] for table in ("gpus", "models", "formats")}


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    both_ways_gb = _number(name, row, "link_GBps", 0) or _number(name, row, "pcie_GBps")
    return Gpu(
        name=name,
        flops_per_s=1e12 * _number(name, row, "bf16_TFLOPs"),
        memory_bytes=1e9 * _number(name, row, "memory_GB"),
        memory_bytes_per_s=1e9 * _number(name, row, "memory_GBps"),
        link_bytes_per_s=1e9 * both_ways_gb / 2,
    )


def _number(name: str, row: Mapping[str, Any], column: str, default: float | None = None) -> float:
    """A figure of one entry. An empty cell is one that is not known."""
    value = row.get(column)
    if value in (None, "") and default is not None:
        return default
    try:
        figure = float(value or "nothing")
    except (TypeError, ValueError):
        figure = -1.0
    if figure < 0 or (figure == 0 and default is None):
        raise HardwareError(f"{name}: {column} must be a positive number, not {value!r}")
    return figure


def _rows(table: str, file: Path | None = None) -> dict[str, Mapping[str, Any]]:
    """Rows of a table by name, those of the file behind ours. Raises HardwareError."""
    with (FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        key, *columns = reader.fieldnames or ()
        rows: dict[str, Mapping[str, Any]] = {row[key]: row for row in reader}
    if file is None:
        return rows
    try:
        told = read_toml(file)
    except (OSError, ValueError) as problem:
        raise HardwareError(f"{file}: {problem}") from None
    if unknown := sorted(told.keys() - {"gpus", "models"}):
        raise HardwareError(f"{file}: no table {', '.join(unknown)}: it holds gpus and models")
    entries: dict[str, Mapping[str, Any]] = told.get(table, {})
    for name, row in entries.items():
        if not isinstance(row, dict) or row.keys() - set(columns):
            raise HardwareError(f"{file}: {table}.{name!r} may have {', '.join(columns)} and nothing else")
    return rows | entries


def _pick(
    kind: str, name: str, rows: Mapping[str, Mapping[str, Any]], made: Callable[[str, Mapping[str, Any]], _Entry]
) -> _Entry:
    known = {each: made(each, row) for each, row in rows.items()}  # all: a mistake in any of them is told
    if name in known:
        return known[name]
    folded = {each.casefold(): each for each in known}
    near = get_close_matches(name.casefold(), folded, n=1, cutoff=0.4)
    meant = f" (did you mean {folded[near[0]]}?)" if near else ""
    raise HardwareError(f"unknown {kind} {name!r}{meant}: choose one of {', '.join(known)}")
