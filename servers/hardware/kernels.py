"""Predicts the duration of one kernel on one GPU, and of one collective operation between GPUs.

The predictions extend the roofline model (Williams, Waterman and Patterson, CACM 2009) with tiles, waves, the L2 cache
and latencies. Other sources:

- Tile and wave quantisation: NVIDIA's "Matrix Multiplication Background User's Guide".
- Ring collectives: Patarasuk and Yuan (JPDC 2009).

The functions accept numbers or NumPy arrays and return seconds. architectures.csv and constants.csv in this folder
contain the constants, and name the measurements behind them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from loadgen.servers.hardware import Architecture, Format, Gpu, Link, constant
from loadgen.servers.hardware.numeric import as_float, ceiling, elementwise_max, elementwise_min, log2

Seconds = Any
"""A number, or a NumPy array if an argument was one."""

TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64), (64, 32), (32, 64), (16, 64))
"""Rows and columns of the output that one SM computes at a time, as in CUTLASS and cuBLAS."""
SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which the inner dimension may be split, so that a small output occupies every SM."""
L2_BYTES_PER_CLOCK = 64
"""L2 read rate of one SM. NVIDIA's A100 whitepaper gives 5,120 for two partitions of 54 SMs; one SM reaches 64."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that kernels reach on one GPU."""

    flops_per_s: float
    bytes_per_s: float
    l2_bytes_per_s: float


def rates(gpu: Gpu, number_format: Format) -> Rates:
    """Return the rates that kernels reach: data-sheet rates times the measured efficiencies of the architecture."""
    architecture: Architecture = gpu.architecture
    peak = gpu.peaks[gpu.effective_format(number_format).compute_type]
    compute_share = min(constant("compute_most"), architecture.compute_share * power_scale(gpu))
    return Rates(
        flops_per_s=peak * compute_share,
        bytes_per_s=gpu.memory_bytes_per_s * architecture.memory_share,
        l2_bytes_per_s=gpu.sms * gpu.clock_hz * L2_BYTES_PER_CLOCK * architecture.load_share,
    )


def power_scale(gpu: Gpu) -> float:
    """Return the factor that corrects the FLOP/s of `gpu` for its power limit.

    The share of the peak FLOP/s that kernels reach was measured on one GPU per architecture. Another GPU of the
    architecture may have fewer watts per TFLOP/s. It then lowers its clock under load, and reaches a smaller share. The
    factor is `(w / w0)**power_exponent`:

    - `w` is the number of watts per TFLOP/s of this GPU.
    - `w0` is the number of watts per TFLOP/s of the measured GPU.

    If the power of this GPU is unknown, the factor is 1.
    """
    if not gpu.watts:
        return 1.0
    share = gpu.watts / (gpu.flops_per_s / 1e12) / gpu.architecture.watts_per_TFLOP
    return float(share ** constant("power_exponent"))


def gemm_s(gpu: Gpu, number_format: Format, m: Any, n: Any, k: Any) -> Seconds:
    """Return the duration of `C[m, n] = A[m, k] @ B[k, n]`, where B holds weights.

    The duration is approximately the computation time or the memory access time, whichever is longer (see
    `_smooth_max`). The times to start the kernel and to quantise activations are added.
    """
    rate = rates(gpu, number_format)
    m = as_float(m)
    n = as_float(n)
    k = as_float(k)
    computing = tiles_s(gpu, number_format, rate, m, n, k)
    reading = gemm_bytes(number_format, m, n, k) / (rate.bytes_per_s * number_format.read_share)
    return (
        gpu.architecture.launch_s
        + _smooth_max(computing, reading, constant("gemm_overlap"))
        + _quantising_s(number_format, rate, m, k)
    )


def gemm_bytes(number_format: Format, m: Any, n: Any, k: Any) -> Any:
    """Return the bytes that a GEMM moves: each operand is read once, and the result is written in 16 bits."""
    return m * k * number_format.activation_bytes + k * n * number_format.weight_bytes + 2 * m * n


def tiles_s(gpu: Gpu, number_format: Format, rate: Rates, m: Any, n: Any, k: Any) -> Seconds:
    """Return the computation time of a GEMM, for the fastest tile size and split of the inner dimension.

    The output has m rows and n columns, and the inner dimension is k. The output is divided into tiles. In each wave,
    every SM computes one tile. A wave takes the same time even if there are fewer tiles than SMs. The time for a tile
    is the time to compute it or the time to load it from L2, whichever is longer, plus a constant.
    """
    row_bytes = weight_bytes = number_format.operand_bytes
    if number_format.activation_bytes >= 2:  # only weights are quantised: tiles load the small values and expand them
        weight_bytes = min(weight_bytes, number_format.weight_bytes)
    split_s = constant("split_s")

    def tiling_s(rows: Any, columns: Any, split: Any) -> Seconds:
        """Return the computation time with tiles of `rows` rows and `columns` columns.

        `split` is the number of parts into which the inner dimension is divided.
        """
        waves = ceiling(ceiling(m / rows) * ceiling(n / columns) * split / gpu.sms)
        flops_s = 2 * rows * columns * k / split / (rate.flops_per_s / gpu.sms)
        loads_s = (rows * row_bytes + columns * weight_bytes) * k / split / (rate.l2_bytes_per_s / gpu.sms)
        tiles = waves * (elementwise_max(flops_s, loads_s) + gpu.architecture.tile_s)
        return tiles + split_s * (split > 1)

    dimensions = max(getattr(size, "ndim", 0) for size in (m, n, k))
    if "numpy" not in sys.modules:
        return min(tiling_s(rows, columns, split) for (rows, columns), split in product(TILES, SPLITS))
    best = tiling_s(*_tilings().reshape(3, -1, *(1,) * dimensions)).min(axis=0)
    return best if dimensions else float(best)


@cache
def _tilings() -> Any:
    """Return all combinations of a tile size (TILES) and a split (SPLITS), as an array with one column per combination.

    The array has three rows: the number of rows of a tile, the number of columns of a tile, and the split. A split of 2
    means that two SMs share the computation of a tile: each computes half of the inner dimension.
    """
    import numpy as np  # loaded already, as an argument is an array, or another module has imported it

    return np.array([(*tile, split) for tile, split in product(TILES, SPLITS)], float).T


def quantises_separately(number_format: Format) -> bool:
    """Return True if GEMMs in this number format need a separate kernel, which quantises the activations before each
    GEMM.

    Such formats store activations in less than 16 bits, with one scale per token.
    """
    return number_format.activation_bytes < 2 and number_format.operand_bytes != number_format.activation_bytes


def _quantising_s(number_format: Format, rate: Rates, m: Any, k: Any) -> Seconds:
    """Return the duration of a separate kernel that quantises activations before a GEMM, with one scale per token.

    The duration is 0 for 16-bit activations, which are not quantised. The duration is also 0 for formats with one scale
    per tensor, because the kernel before the GEMM then quantises the activations as a part of its own work.
    """
    if not quantises_separately(number_format):
        return 0.0
    return number_format.quantise_s + m * k * (2 + number_format.activation_bytes) / rate.bytes_per_s


def _smooth_max(first: Any, second: Any, power: float) -> Any:
    """Return the smooth maximum of the durations of two activities: `(first**power + second**power)**(1 / power)`.

    If both durations are similar, the result is longer than either of them, because the activities do not overlap
    completely.
    """
    return (first**power + second**power) ** (1 / power)


def decode_attention_s(gpu: Gpu, batch: Any, context: Any, kv_heads: Any, head_dim: Any, kv_bytes: Any) -> Seconds:
    """Return the duration of attention in a decode step, which adds one token to each of `batch` sequences.

    Each sequence holds `context` tokens, and `kv_bytes` is the size of one value in the KV cache. The KV cache is read
    from L2 if it fits there, otherwise from memory. An SM processes one KV head of one sequence at a time. A long cache
    is split over several SMs, and their results are combined (Flash-Decoding, 2023).
    """
    rate = rates(gpu, _ANY_FORMAT)
    cache_bytes = 2.0 * batch * context * kv_heads * head_dim * kv_bytes
    cached = 1 / (1 + (cache_bytes / (constant("l2_share") * gpu.l2_bytes)) ** 8) if gpu.l2_bytes else 0.0
    reading = cache_bytes * (cached / (rate.l2_bytes_per_s) + (1 - cached) / rate.bytes_per_s)
    turns = ceiling(batch * kv_heads / gpu.sms) * gpu.architecture.attention_turn_s
    splitting = constant("attention_split_s") * log2(1 + context / 256)
    return gpu.architecture.attention_launch_s + _smooth_max(reading, turns, constant("attention_overlap")) + splitting


def whole_context_attention_s(
    gpu: Gpu, batch: Any, context: Any, kv_heads: Any, head_dim: Any, kv_bytes: Any
) -> Seconds:
    """Return the duration of attention in a decode step if contexts are not split over several SMs.

    One SM reads the whole context of a sequence and KV head, as in the masked multi-head attention of TensorRT-LLM
    without its multi-block mode. A single long context therefore takes as long as this SM needs for all of its tokens.
    """
    rate = rates(gpu, _ANY_FORMAT)
    reading = 2.0 * batch * context * kv_heads * head_dim * kv_bytes / rate.bytes_per_s
    turn = gpu.architecture.attention_turn_s + context * gpu.architecture.attention_token_s
    turns = ceiling(batch * kv_heads / gpu.sms) * turn
    return gpu.architecture.attention_launch_s + _smooth_max(reading, turns, constant("attention_overlap"))


def prefill_attention_s(gpu: Gpu, batch: Any, tokens: Any, heads: Any, head_dim: Any, before: Any = 0) -> Seconds:
    """Return the duration of causal attention for `tokens` new tokens per sequence, after `before` cached tokens.

    `batch` is the number of sequences. An SM processes a block of 128 queries at a time (FlashAttention-2, arXiv
    2307.08691).
    """
    tokens = as_float(tokens)
    rows = elementwise_min(tokens, 128)
    flops = 4 * rows * (before + (tokens + rows) / 2) * head_dim
    waves = elementwise_max(1.0, batch * heads * ceiling(tokens / 128) / gpu.sms)
    rate = gpu.peaks["bf16"] * min(0.9, gpu.architecture.attention_share * power_scale(gpu)) / gpu.sms
    turn = constant("prefill_turn_s") * (0.2 + 0.8 * rows / 128)
    return gpu.architecture.attention_launch_s + waves * (flops / rate + turn)


def all_reduce_s(link: Link, gpus: int, message_bytes: Any, library: str = "custom") -> Seconds:
    """Return the duration of an all-reduce of `message_bytes` bytes over `gpus` GPUs, with the fastest algorithm.

    `library` determines the possible algorithms:

    - `nccl`: a ring, or NVLS if the switch can compute sums.
    - `custom`: the algorithms of `nccl`, and two more in which GPUs read from each other directly. In the one-shot
      algorithm, each GPU reads the whole tensor of every other GPU. The two-shot algorithm is a reduce-scatter followed
      by an all-gather.
    """
    if gpus == 1:
        return 0.0 * as_float(message_bytes)
    rate = link.bytes_per_s * link.share
    peers = gpus - 1
    ring_bytes = 2 * peers / gpus * as_float(message_bytes)
    nccl_latency = link.nccl_s + link.step_s * 2 * peers
    nccl = nccl_latency + ring_bytes / rate
    if link.switch_share:
        nvls = nccl_latency + (1 + 1 / gpus) * message_bytes / (link.bytes_per_s * link.switch_share)
        nccl = elementwise_min(nccl, nvls)
    if library == "nccl":
        return nccl
    start = link.custom_s + link.peer_s * gpus
    one_shot = start + peers * message_bytes / rate
    two_shot = start + link.two_shot_s + ring_bytes / rate
    return elementwise_min(elementwise_min(one_shot, two_shot), nccl)


def ring_s(link: Link, ranks: int, message_bytes: Any, collective: str) -> Seconds:
    """Return the duration in seconds of a transfer among `ranks` GPUs over `link`.

    `collective` is the name of the transfer: `all-gather`, `reduce-scatter`, `all-to-all` or `point to point`.
    `message_bytes` is the size of the whole tensor in bytes.
    """
    if ranks == 1:
        return 0.0 * as_float(message_bytes)
    rate = link.bytes_per_s * link.share
    if collective == "point to point":
        return message_bytes / rate + link.nccl_s
    return link.nccl_s + (ranks - 1) * (message_bytes / (ranks * rate) + link.step_s)


_ANY_FORMAT = Format("any", 2.0, 2.0, "bf16", 2.0)
