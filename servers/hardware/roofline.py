"""How long one engine step takes on a GPU, from what it computes and what it reads.

    step = max(FLOPs / (peak FLOP/s * efficiency), bytes / (bandwidth * efficiency)) + all-reduce + overhead

after Williams, Waterman and Patterson, "Roofline" (CACM 2009). Weights are read once per step; attention and the KV
cache are counted by the exact lengths of the sequences. Good for orders of magnitude and for the shape of a curve, not
for predicting a server: docs/concepts/simulated-timing.md says how far off it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from servers.hardware import (
    DEFAULT_FORMAT,
    DEFAULT_GPU,
    DEFAULT_MODEL,
    Gpu,
    HardwareError,
    ModelShape,
    NumberFormat,
    gpu,
    model,
    number_format,
)

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
    numbers: NumberFormat = field(default_factory=lambda: number_format(DEFAULT_FORMAT))
    """Of weights, activations and KV cache. The rate of computing is bf16's whatever they are stored in."""

    @property
    def kv_bytes(self) -> float:
        """KV cache of one token, over all layers."""
        return self.model.kv_values * self.numbers.bytes_per_value

    def step_ns(self, work: Work) -> int:
        """Duration of one step, in nanoseconds."""
        model, gpu = self.model, self.gpu
        flops = 2 * (model.layer_parameters * work.tokens + model.head_parameters * work.logits)
        flops += 4 * model.layers * model.heads * model.head_dim * work.pairs  # Q K^T, and scores times V
        read_bytes = self.numbers.bytes_per_value * (model.layer_parameters + model.head_parameters)
        read_bytes += self.kv_bytes * (work.kv_tokens + work.tokens)  # read by attention, and written once
        compute_s = flops / (self.tensor_parallel * gpu.flops_per_s * COMPUTE_EFFICIENCY)
        memory_s = read_bytes / (self.tensor_parallel * gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)
        return round(1e9 * (max(compute_s, memory_s) + self._all_reduce_s(work.tokens) + OVERHEAD_S))

    def kv_tokens(self, memory_fraction: float) -> int:
        """Tokens of KV cache beside the weights in `memory_fraction` of the memory.

        Raises HardwareError when the weights alone do not fit. Activations are not counted; the data sheet's GB, which
        are less than what a card reports, leave room for them.
        """
        memory_bytes = self.tensor_parallel * self.gpu.memory_bytes * memory_fraction
        left_bytes = memory_bytes - self.model.parameters * self.numbers.bytes_per_value
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
        activation_bytes = tokens * self.model.hidden * self.numbers.bytes_per_value
        moved_bytes = 2 * (self.tensor_parallel - 1) / self.tensor_parallel * activation_bytes
        return 2 * self.model.layers * (moved_bytes / self.gpu.link_bytes_per_s + ALL_REDUCE_LATENCY_S)


def roofline(
    gpu_name: str = DEFAULT_GPU, model_name: str = DEFAULT_MODEL, tensor_parallel: int = 1, file: Path | None = None
) -> Roofline:
    """The roofline of a named model on named GPUs. Raises HardwareError; `file` as in `servers.hardware.gpu`."""
    if tensor_parallel < 1:
        raise HardwareError(f"tensor parallel over {tensor_parallel} GPUs: give 1 or more")
    return Roofline(gpu(gpu_name, file), model(model_name, file), tensor_parallel)
