"""How long one kernel takes on one GPU, and one collective between GPUs: rooflines with tiles, waves, L2 and latency.

Every function takes numbers or NumPy arrays, and gives seconds. After Williams, Waterman and Patterson, "Roofline"
(CACM 2009), with the tile and wave quantisation of NVIDIA's "Matrix Multiplication Background User's Guide" and the
ring collectives of Patarasuk and Yuan (JPDC 2009). The constants, with what they were measured on, stand in
architectures.csv and constants.csv of this folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from loadgen.servers.hardware import Architecture, Format, Gpu, Link, constant
from loadgen.servers.hardware.numeric import as_float, ceiling, elementwise_max, elementwise_min, log2

Seconds = Any
"""A number, or an array where an argument was one."""

TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64), (64, 32), (32, 64), (16, 64))
"""Rows and columns of the output that one SM computes at a time: those of CUTLASS and cuBLAS."""
SPLITS = (1, 2, 4, 8)
"""Into how many parts the inner dimension may be cut, so that a small output still occupies every SM."""
L2_BYTES_PER_CLOCK = 64
"""Per SM, from L2: NVIDIA's A100 whitepaper gives 5,120 for its two partitions of 54 SMs, of which 64 reach an SM."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU reaches of its data sheet."""

    flops_per_s: float
    bytes_per_s: float
    l2_bytes_per_s: float


def rates(gpu: Gpu, number_format: Format) -> Rates:
    """The data sheet's, times what kernels reach of it."""
    architecture: Architecture = gpu.architecture
    return Rates(
        flops_per_s=gpu.peaks[gpu.effective_format(number_format).compute_type]
        * min(constant("compute_most"), architecture.compute_share * power_scale(gpu)),
        bytes_per_s=gpu.memory_bytes_per_s * architecture.memory_share,
        l2_bytes_per_s=gpu.sms * gpu.clock_hz * L2_BYTES_PER_CLOCK * architecture.load_share,
    )


def power_scale(gpu: Gpu) -> float:
    """How much more of its peak this GPU computes at than that on which its architecture was measured: clocks fall
    where there are fewer watts for each TFLOP/s."""
    if not gpu.watts:
        return 1.0
    share = gpu.watts / (gpu.flops_per_s / 1e12) / gpu.architecture.watts_per_TFLOP
    return float(share ** constant("power_exponent"))


def gemm_s(gpu: Gpu, number_format: Format, m: Any, n: Any, k: Any) -> Seconds:
    """C[m, n] = A[m, k] times B[k, n], B being weights: the fastest tile, or the memory where that is slower."""
    rate, shape = rates(gpu, number_format), (as_float(m), as_float(n), as_float(k))
    computing = tiles_s(gpu, number_format, rate, *shape)
    reading = gemm_bytes(number_format, *shape) / (rate.bytes_per_s * number_format.read_share)
    return (
        gpu.architecture.launch_s
        + _smooth_max(computing, reading, constant("gemm_overlap"))
        + _quantising_s(number_format, rate, shape[0], shape[2])
    )


def gemm_bytes(number_format: Format, m: Any, n: Any, k: Any) -> Any:
    """Each operand read once, and the result written in 16 bits."""
    return m * k * number_format.activation_bytes + k * n * number_format.weight_bytes + 2 * m * n


def tiles_s(gpu: Gpu, number_format: Format, rate: Rates, m: Any, n: Any, k: Any) -> Seconds:
    """Whole waves of tiles over the SMs, each bound by its FLOPs or by what it loads from L2; the best tile counts."""
    best: Any = math.inf
    row_bytes = weight_bytes = number_format.operand_bytes
    if number_format.activation_bytes >= 2:  # weights alone are small, and made larger where they are used
        weight_bytes = min(weight_bytes, number_format.weight_bytes)
    for (rows, columns), split in product(TILES, SPLITS):
        waves = ceiling(ceiling(m / rows) * ceiling(n / columns) * split / gpu.sms)
        flops_s = 2 * rows * columns * k / split / (rate.flops_per_s / gpu.sms)
        loads_s = (rows * row_bytes + columns * weight_bytes) * k / split / (rate.l2_bytes_per_s / gpu.sms)
        took = waves * (elementwise_max(flops_s, loads_s) + gpu.architecture.tile_s)
        best = elementwise_min(best, took + (constant("split_s") if split > 1 else 0.0))
    return best


def _quantising_s(number_format: Format, rate: Rates, m: Any, k: Any) -> Seconds:
    """One more kernel where activations are made smaller than 16 bits before the GEMM, with a scale for each token;
    with one scale for all, the kernel before does it."""
    if number_format.activation_bytes >= 2 or number_format.operand_bytes == number_format.activation_bytes:
        return 0.0
    return number_format.quantise_s + m * k * (2 + number_format.activation_bytes) / rate.bytes_per_s


def _smooth_max(one: Any, other: Any, power: float) -> Any:
    """Nearly the larger of the two: where they are alike, neither hides the other wholly."""
    return (one**power + other**power) ** (1 / power)


def decode_attention_s(gpu: Gpu, batch: Any, context: Any, kv_heads: Any, head_dim: Any, kv_bytes: Any) -> Seconds:
    """One token per sequence against its cache: bytes from L2 while all of it fits, from memory otherwise, or one turn
    per sequence and KV head on each SM; long caches are split over SMs and combined (Flash-Decoding, 2023)."""
    rate = rates(gpu, _ANY_FORMAT)
    cache_bytes = 2.0 * batch * context * kv_heads * head_dim * kv_bytes
    cached = 1 / (1 + (cache_bytes / (constant("l2_share") * gpu.l2_bytes)) ** 8) if gpu.l2_bytes else 0.0
    reading = cache_bytes * (cached / (rate.l2_bytes_per_s) + (1 - cached) / rate.bytes_per_s)
    turns = ceiling(batch * kv_heads / gpu.sms) * gpu.architecture.attention_turn_s
    splitting = constant("attention_split_s") * log2(1 + context / 256)
    return gpu.architecture.attention_launch_s + _smooth_max(reading, turns, constant("attention_overlap")) + splitting


def prefill_attention_s(gpu: Gpu, batch: Any, tokens: Any, heads: Any, head_dim: Any, before: Any = 0) -> Seconds:
    """Causal attention of `tokens` new tokens behind `before` cached ones, in blocks of 128 queries (FlashAttention-2,
    arXiv 2307.08691): whole waves of blocks."""
    tokens = as_float(tokens)
    rows = elementwise_min(tokens, 128)
    flops = 4 * rows * (before + (tokens + rows) / 2) * head_dim
    waves = elementwise_max(1.0, batch * heads * ceiling(tokens / 128) / gpu.sms)
    rate = gpu.peaks["bf16"] * min(0.9, gpu.architecture.attention_share * power_scale(gpu)) / gpu.sms
    turn = constant("prefill_turn_s") * (0.2 + 0.8 * rows / 128)
    return gpu.architecture.attention_launch_s + waves * (flops / rate + turn)


def all_reduce_s(link: Link, gpus: int, message_bytes: Any, library: str = "custom") -> Seconds:
    """The sum of a tensor over `gpus`, held by each afterwards. The fastest of: everybody reads from everybody (one
    shot); reduce-scatter and all-gather by direct reads (two shot); NCCL's ring; the switch adds (NVLS)."""
    if gpus == 1:
        return 0.0 * as_float(message_bytes)
    rate, others = link.bytes_per_s * link.share, gpus - 1
    ring_bytes = 2 * others / gpus * as_float(message_bytes)
    ring = link.nccl_s + link.step_s * 2 * others + ring_bytes / rate
    if link.switch_share:
        adding = link.nccl_s + link.step_s * 2 * others
        ring = elementwise_min(ring, adding + (1 + 1 / gpus) * message_bytes / (link.bytes_per_s * link.switch_share))
    if library == "nccl":
        return ring
    started = link.custom_s + link.peer_s * gpus
    one_shot = started + others * message_bytes / rate
    two_shot = started + link.two_shot_s + ring_bytes / rate
    return elementwise_min(elementwise_min(one_shot, two_shot), ring)


def ring_s(link: Link, ranks: int, message_bytes: Any, collective: str) -> Seconds:
    """All-gather, reduce-scatter, all-to-all, or point to point, of `message_bytes` in all on each rank."""
    if ranks == 1:
        return 0.0 * as_float(message_bytes)
    rate = link.bytes_per_s * link.share
    if collective == "point to point":
        return message_bytes / rate + link.nccl_s
    return link.nccl_s + (ranks - 1) * (message_bytes / (ranks * rate) + link.step_s)


_ANY_FORMAT = Format("any", 2.0, 2.0, "bf16", 2.0)
