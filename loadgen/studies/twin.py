"""The twin of a server: the few constants that the hardware model leaves open, as real runs have them, in a small file.

    runs ─ loadgen.studies.twin_fitting ─> Twin ─> twin.json ─ loadgen.studies.simulate ─> what the server would do
    under another load

Where GPU and model are known, the constants are what a step costs the host, and how much the server reaches of the
bandwidth and the compute that kernels reach elsewhere. Where they are not, a step is a straight line of what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.errors import PlanError
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.simulated.scheduler_presets import Engine
from loadgen.servers.simulated.step_time import LinearStepTime, StepDurations
from loadgen.workloads.input_files import read_input

FORMAT = 1
"""Of the file: rises when a key goes or changes its meaning, not when one is added."""
MAX_FILE_BYTES = 1 << 26
"""Maximum size of a twin file; thousands of draws of the constants are about 1 MB."""


class ConstantInfo(NamedTuple):
    """Of a constant: its unit, its words, and how far from its start it may lie, as a factor's logarithm."""

    unit: str
    meaning: str
    spread: float


STEP_CONSTANTS = {
    "step_s": ConstantInfo("s", "the host, per step", 1.5),
    "sequence_s": ConstantInfo("s", "the host, per sequence in a step", 1.0),
}
REQUEST_CONSTANTS = {
    "request_s": ConstantInfo("s", "the front end, per request", 2.0),
    "path_s": ConstantInfo("s", "from the front end to the first step", 2.0),
}
HARDWARE_CONSTANTS = {
    **STEP_CONSTANTS,
    "bandwidth": ConstantInfo("", "memory bandwidth, of what kernels reach elsewhere", 0.3),
    "compute": ConstantInfo("", "compute, of what kernels reach elsewhere", 0.3),
    **REQUEST_CONSTANTS,
}
LINEAR_CONSTANTS = {
    **STEP_CONSTANTS,
    "token_s": ConstantInfo("s", "per prompt token", 1.0),
    "context_s": ConstantInfo("s", "per token that a decoding sequence holds", 1.5),
    **REQUEST_CONSTANTS,
}


class TwinConstant(msgspec.Struct, kw_only=True, frozen=True):
    """One that was estimated."""

    value: float
    low: float
    """With `high`, its 95 % interval."""
    high: float
    unit: str
    meaning: str


class Twin(msgspec.Struct, kw_only=True, frozen=True):
    """What `loadgen twin fit` writes, as JSON."""

    format: int = FORMAT
    version: str
    """Of loadgen."""
    server: str
    """Its kind, such as vllm."""
    server_version: str
    rules: str
    """Whose scheduler: vllm, tgi or lightllm."""
    vintage: str
    served: str
    """The model, as the server calls it."""
    gpu: str = ""
    """Empty where nobody knows: then the constants are the twin's own."""
    model: str = ""
    """The model, as the hardware tables call it; with `tensor` and `number_format` only where the GPU is known."""
    tensor: int = 1
    number_format: str = "bf16"
    hardware: str = ""
    """A TOML file with more GPUs and models, as --hardware."""
    kv_tokens: int
    running_limit: int | None = None
    """None: the rules' own, as of step_tokens."""
    step_tokens: int | None = None
    constants: dict[str, TwinConstant]
    draws: list[list[float]]
    """Constants as other samples of the same runs would give them, in order of `constants`: for intervals."""
    residual: dict[str, float]
    """By how much the fit misses ttft, tpot and e2e of tenths of runs, and rate and p99 of runs: the logarithm's
    deviation."""
    runs: list[dict[str, Any]]
    """What it was fitted to."""

    def values(self, draw: int | None = None) -> dict[str, float]:
        """The constants, or one draw of them."""
        if draw is None:
            return {name: each.value for name, each in self.constants.items()}
        return dict(zip(self.constants, self.draws[draw], strict=True))

    def deployment(
        self,
        engine: Engine,
        *,
        gpu: str | None = None,
        model: str | None = None,
        tensor: int | None = None,
        number_format: str | None = None,
        hardware: Path | None = None,
        changes: Sequence[str] = (),
    ) -> Deployment | None:
        """As it was, or what if; None where its hardware is not known. Raises HardwareError, and PlanError for another
        hardware where that is not known which it was."""
        if not self.gpu:
            if gpu or model or tensor or number_format or changes:
                raise PlanError(
                    "this twin knows no hardware: --gpu, --model, --tp, --format and --set change nothing",
                    "Fit it with the hardware it was measured on: loadgen twin fit RUN --gpu H100 --model llama-3.1-8b",
                )
            return None
        file = hardware or (Path(self.hardware) if self.hardware else None)
        more: dict[str, Any] = {"tensor": tensor or self.tensor, "file": file, "changes": changes}
        return engine.deployment(
            gpu or self.gpu, model or self.model, format_name=number_format or self.number_format, **more
        )


def step_time_with(values: Mapping[str, float], engine: Engine, deployment: Deployment | None) -> StepDurations:
    """What steps take with these constants."""
    if deployment is None:
        return LinearStepTime(*(values[name] for name in ("step_s", "sequence_s", "token_s", "context_s")))
    gpu, compute = deployment.gpu, values["compute"]
    reached = replace(
        gpu,
        memory_bytes_per_s=gpu.memory_bytes_per_s * values["bandwidth"],
        peaks={name: rate * compute for name, rate in gpu.peaks.items()},
        watts=gpu.watts * compute,  # fewer FLOPs of the same clock, not more power for each
    )
    host = replace(engine, step_s=values["step_s"], sequence_s=values["sequence_s"])
    return host.step_time(replace(deployment, gpu=reached))


def read_twin(path: Path) -> Twin:
    """Raises PlanError for a file that is no twin, or another version's."""
    try:
        twin = msgspec.json.decode(read_input(path, MAX_FILE_BYTES), type=Twin)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", "loadgen twin fit RUN... writes one.") from None
    except msgspec.MsgspecError as error:
        raise PlanError(f"{path} is not a twin: {error}", "loadgen twin fit RUN... writes one.") from None
    if twin.format > FORMAT:
        raise PlanError(f"{path} is of a newer loadgen ({twin.version})", "Update this one, or fit it again.")
    if [*twin.constants] not in ([*HARDWARE_CONSTANTS], [*LINEAR_CONSTANTS]) or any(
        len(draw) != len(twin.constants) for draw in twin.draws
    ):
        raise PlanError(f"{path}: its constants are not those of a twin", "Fit it again.")
    return twin
