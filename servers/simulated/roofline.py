"""How long one engine step takes on a GPU, from what it computes and what it reads.

    step = max(FLOPs / (peak FLOP/s * efficiency), bytes / (bandwidth * efficiency)) + all-reduce + overhead

after Williams, Waterman and Patterson, "Roofline" (CACM 2009). Weights are read once per step; attention and the KV
cache are counted by the exact lengths of the sequences. Good for orders of magnitude and for the shape of a curve, not
for predicting a server: docs/concepts/simulated-timing.md says how far off it is.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_Value = TypeVar("_Value")

COMPUTE_EFFICIENCY = 0.6
"""Of the peak FLOP/s. Fitted to the prefill-bound row of llm-infer-bench (github.com/L1aoXingyu/llm-infer-bench, commit
a13f639: LightLLM, 13B, one A800, outputs of at most 32 tokens). The best single matmul reaches 271.2 of 312 TFLOP/s on
an A100 (github.com/stas00/ml-engineering, compute/accelerator); a whole layer does not."""
MEMORY_EFFICIENCY = 0.685
"""Of the memory bandwidth: 1397.31 of 2039 GB/s, Llama-2-7B at batch 1 on one A100-80GB (README of
github.com/pytorch-labs/gpt-fast)."""
OVERHEAD_S = 0.003
"""Per step: scheduling, launches and sampling that do not overlap with the GPU. An assumption."""
ALL_REDUCE_LATENCY_S = 17e-6
"""Of a small all-reduce over a pair of H100 without P2P (16 KiB). Pessimistic where there is NVLink."""
BYTES_PER_VALUE = 2
"""Weights, activations and KV cache are 16-bit."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's data-sheet figures."""

    name: str
    flops_per_s: float
    """Dense bf16 with fp32 accumulation."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One way, to the other GPUs: NVLink where there is one, else PCIe."""


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
    def kv_bytes(self) -> int:
        """KV cache of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes, in totals over its sequences."""

    tokens: int
    """Tokens that pass through the layers."""
    logits: int
    """Sequences, of which the last token passes through the output head."""
    pairs: int
    """(token, earlier token or itself) pairs that attention computes."""
    kv_tokens: int
    """Tokens whose keys and values attention reads."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on `tensor_parallel` GPUs of one kind."""

    gpu: Gpu
    model: ModelShape
    tensor_parallel: int = 1

    def step_ns(self, work: Work) -> int:
        """Duration of one step, in nanoseconds."""
        model, gpu = self.model, self.gpu
        flops = 2 * (model.layer_parameters * work.tokens + model.head_parameters * work.logits)
        flops += 4 * model.layers * model.heads * model.head_dim * work.pairs  # Q K^T, and scores times V
        read_bytes = BYTES_PER_VALUE * (model.layer_parameters + model.head_parameters)
        read_bytes += model.kv_bytes * (work.kv_tokens + work.tokens)  # read by attention, and written once
        compute_s = flops / (self.tensor_parallel * gpu.flops_per_s * COMPUTE_EFFICIENCY)
        memory_s = read_bytes / (self.tensor_parallel * gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)
        return round(1e9 * (max(compute_s, memory_s) + self._all_reduce_s(work.tokens) + OVERHEAD_S))

    def kv_tokens(self, memory_fraction: float) -> int:
        """Tokens of KV cache beside the weights in `memory_fraction` of the memory.

        Raises ValueError when the weights alone do not fit. Activations are not counted; the data sheet's GB, which are
        less than what a card reports, leave room for them.
        """
        memory_bytes = self.tensor_parallel * self.gpu.memory_bytes * memory_fraction
        left_bytes = memory_bytes - self.model.parameters * BYTES_PER_VALUE
        tokens = int(left_bytes / self.model.kv_bytes)
        if tokens <= 0:
            raise ValueError(
                f"{self.model.name} does not fit {self.tensor_parallel} x {self.gpu.name}: "
                "choose more GPUs (tensor parallel), a larger GPU or a smaller model"
            )
        return tokens

    def _all_reduce_s(self, tokens: int) -> float:
        """Two ring all-reduces per layer, over the attention's and the MLP's output (Megatron-LM, arXiv 1909.08053)."""
        if self.tensor_parallel == 1:
            return 0.0
        activation_bytes = tokens * self.model.hidden * BYTES_PER_VALUE
        moved_bytes = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * activation_bytes
        return 2 * self.model.layers * (moved_bytes / self.gpu.link_bytes_per_s + ALL_REDUCE_LATENCY_S)


def roofline(gpu: str = "A800-80GB SXM", model: str = "Llama-2-7B", tensor_parallel: int = 1) -> Roofline:
    """The roofline of a named model on named GPUs. Raises ValueError, which lists the names there are."""
    if tensor_parallel < 1:
        raise ValueError(f"tensor parallel over {tensor_parallel} GPUs: give 1 or more")
    return Roofline(_pick("GPU", gpu, gpus()), _pick("model", model, model_shapes()), tensor_parallel)


def gpus() -> dict[str, Gpu]:
    """Every GPU of data/gpu_specs.csv, by name."""
    return {row["gpu"]: _gpu(row) for row in _rows("gpu_specs.csv")}


def model_shapes() -> dict[str, ModelShape]:
    """Every model of data/model_shapes.csv, by name."""
    return {row["model"]: _model_shape(row) for row in _rows("model_shapes.csv")}


def _gpu(row: dict[str, str]) -> Gpu:
    both_ways_gb = float(row["nvlink_total_bidirectional_GBps"]) or float(row["pcie_x16_bidirectional_GBps"])
    return Gpu(
        name=row["gpu"],
        flops_per_s=1e12 * float(row["bf16_dense_tflops_fp32_accumulate"]),
        memory_bytes=1e9 * float(row["memory_GB"]),
        memory_bytes_per_s=1e9 * float(row["memory_bandwidth_GBps"]),
        link_bytes_per_s=1e9 * both_ways_gb / 2,
    )


def _model_shape(row: dict[str, str]) -> ModelShape:
    return ModelShape(
        name=row["model"],
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        intermediate=int(row["intermediate"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        vocabulary=int(row["vocab"]),
        parameters=int(row["parameters"]),
    )


def _rows(file: str) -> list[dict[str, str]]:
    with (Path(__file__).with_name("data") / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _pick(kind: str, name: str, known: Mapping[str, _Value]) -> _Value:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")
    return known[name]
