"""Fabricated results of `loadgen dissect` with round numbers: two inference batch sizes, three training techniques."""

from __future__ import annotations

from dataclasses import replace

from loadgen.dissect.results import (
    DeviceLimits,
    Direction,
    InferenceResult,
    LinkProbe,
    Operator,
    StepCase,
    TechniqueResult,
    TrainingResult,
)

BOUNDS = DeviceLimits("2 CPU threads", 1e11, 1e10, "measured: best GEMM, and STREAM's triad")


def operator(
    module: str, name: str, shape: str, seconds: float, flops: float = 0.0, direction: Direction = "forward"
) -> Operator:
    return Operator(
        *(module, name, shape, direction, module != "LM head", 2, flops, 1e7),
        bound_s=max(flops / 1e11, 1e-3),
        bound="compute" if flops > 1e8 else "memory",
        seconds=[seconds, seconds * 1.1, seconds * 0.9],
    )


def case(batch: int) -> StepCase:
    """Return a fabricated step: 100 ms forward, of which the two layers take 90 ms, and 40 ms backward."""
    operators = [
        operator("QKV", "GEMM", "512 x 4096 x 4096", 0.050, 4e9),
        operator("attention", "softmax", "1 x 32 x 512 x 512", 0.039),
        operator("LM head", "GEMM", "1 x 32000 x 4096", 0.010, 2e8),
        operator("QKV", "GEMM", "4096 x 4096 x 512", 0.040, 4e9, "backward"),
    ]
    parts = {"model": 0.1, "step": 0.1, "layers": 0.09, "Embedding": 0.0, "RMSNorm": 0.0, "LM head": 0.01}
    spread = {name: [value, value * 1.1, value * 0.9] for name, value in parts.items()}
    return StepCase(batch, 512 * batch, [0.139, 0.140, 0.141], spread, operators, (0.126, 0.125))


def inference_found() -> InferenceResult:
    return InferenceResult(
        *("Llama-2-7B", "standard", 2, 32, 512, "prefill", "cpu", "fp32", 1, 2, False),
        bounds=BOUNDS,
        cases=[case(1), case(8)],
        torch="2.13.0",
    )


def training_found() -> TrainingResult:
    kinds = {"weights": 4e8, "gradients": 0.0, "optimiser": 8e8, "activations": 8e8}
    naive = TechniqueResult(
        *("naive", 1, ""),
        parts_s={"forward": [1.0, 1.2, 0.8], "backward": [2.0, 2.2, 1.8], "optimiser": [0.5, 0.5, 0.5]},
        memory_bytes=kinds,
        predicted_s={"forward": 0.8, "backward": 1.6, "optimiser": 0.4},
        predicted_bytes=kinds | {"activations": 7e8},
    )
    zero3 = TechniqueResult(
        *("zero3", 2, ""),
        parts_s={"forward": [2.0, 2.2, 1.8], "backward": [4.0, 4.2, 3.8], "optimiser": [0.3, 0.3, 0.3]},
        communication_s={"forward": 0.5, "backward": 1.5},
        memory_bytes=kinds | {"weights": 2e8, "gradients": 2e8, "optimiser": 4e8},
        predicted_s={"forward": 1.8, "backward": 3.6, "optimiser": 0.2},
        predicted_bytes=kinds | {"weights": 2e8, "gradients": 2e8, "optimiser": 4e8},
        predicted_communication_s={"forward": 0.4, "backward": 1.2},
        bounds=replace(BOUNDS, links={"all-gather": LinkProbe(2e-4, 3e8)}),
    )
    offload = TechniqueResult("zero3+offload", 2, "offload needs a GPU: on CPUs weights are with the host already")
    return TrainingResult(
        "small", 110_000_000, 12, 12, 2, 350, "cpu", "fp32", BOUNDS, [naive, zero3, offload], "2.13.0"
    )
