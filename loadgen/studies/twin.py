"""Defines the twin of a server: a simulated server that behaves like the real one. It is stored in a JSON file.

A fit determines the constants of the twin from measured runs of the real server. A simulation with these constants then
predicts how the real server behaves under another load:

    runs ─ loadgen.studies.twin_fitting ─> Twin ─> twin.json ─ loadgen.studies.simulate ─> predictions

Every twin has these constants:

- The time that the HTTP front end of the server takes per request.
- The time from the front end to the first step.
- The host (CPU) time per step, and per sequence in a step.

If the GPU and the model are known, there are two factors in addition. They compare the memory bandwidth and the compute
rate of the server with those of typical kernels. Otherwise there are two times instead: per prompt token, and per token
of context while decoding (`LinearStepTime`).
"""

from __future__ import annotations

import math
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
"""Version of the file format. The version rises when a key is removed or changes its meaning, not when a key is
added."""
MAX_FILE_BYTES = 1 << 26
"""Maximum size of a twin file. Thousands of draws of the constants take about 1 MB."""


MIN_STEP_S, MIN_SEQUENCE_S = 1e-4, 1e-6
"""Lower limits of the start values of `step_s` and `sequence_s`. The hardware tables contain 0 for some engines."""


MODEL_ERRORS = {"ttft": 0.3, "tpot": 0.075}
"""Typical error of the hardware model for one server: the standard deviation of `log(simulated / measured)`, from
validation.csv. The error has the same direction for most runs of a server. More runs of this server therefore say no
more about other hardware or other models."""


class ConstantInfo(NamedTuple):
    """Unit, meaning and prior spread of a fitted constant."""

    unit: str
    meaning: str
    spread: float
    """Prior standard deviation of `log(constant)`. It limits how far a fit moves the constant from its start value."""
    transfer_spread: float = 0.0
    """Typical deviation of `log(constant)` from its start value, for values that are used with other hardware or
    another model. Their prior has heavy tails. 0: the constant has no such value."""


STEP_CONSTANTS = {
    "step_s": ConstantInfo("s", "host time per step", 1.5, 0.3),
    "sequence_s": ConstantInfo("s", "host time per sequence in a step", 1.0, 0.15),
}
REQUEST_CONSTANTS = {
    "request_s": ConstantInfo("s", "front-end time per request", 2.0, 0.1),
    "path_s": ConstantInfo("s", "time from the front end to the first step", 2.0, 0.1),
}
HARDWARE_CONSTANTS = {
    **STEP_CONSTANTS,
    "bandwidth": ConstantInfo("", "memory bandwidth, relative to typical kernels", 0.3, 0.02),
    "compute": ConstantInfo("", "compute, relative to typical kernels", 0.3, 0.02),
    **REQUEST_CONSTANTS,
}
LINEAR_CONSTANTS = {
    **STEP_CONSTANTS,
    "token_s": ConstantInfo("s", "time per prompt token", 1.0),
    "context_s": ConstantInfo("s", "time per token of context while decoding", 1.5),
    **REQUEST_CONSTANTS,
}


class TwinConstant(msgspec.Struct, kw_only=True, frozen=True):
    """A fitted constant with its 95% interval."""

    value: float
    low: float
    high: float
    unit: str
    meaning: str


class Twin(msgspec.Struct, kw_only=True, frozen=True):
    """A simulated server whose constants were fitted to measured runs of a real server.

    `loadgen twin fit` writes it to a JSON file.
    """

    format: int = FORMAT
    version: str
    """Version of loadgen."""
    server: str
    """Backend, such as vllm."""
    server_version: str
    rules: str
    """Engine whose scheduling rules apply: vllm, tgi, lightllm or sglang."""
    vintage: str
    served: str
    """Model name that the server reports."""
    gpu: str = ""
    """GPU name; empty if the hardware is unknown. `constants` then has the names of LINEAR_CONSTANTS."""
    model: str = ""
    """Model name in the hardware tables. Like `tensor` and `number_format`, the name applies only if the GPU is
    known."""
    tensor: int = 1
    number_format: str = "bf16"
    hardware: str = ""
    """TOML file with additional GPUs and models (option --hardware)."""
    kv_tokens: int
    running_limit: int | None = None
    """Maximum number of sequences per step. None: the engine's default."""
    step_tokens: int | None = None
    """Maximum number of tokens per step. None: the engine's default."""
    constants: dict[str, TwinConstant]
    transferred: dict[str, float] = {}
    """Values of the constants for predictions of another GPU, model, number of GPUs or number format. A fitted value
    contains properties of the host, which remain the same, and errors of the hardware model for the measured server,
    which do not apply to others. The values here contain less of these errors. Empty if the twin has no hardware."""
    draws: list[list[float]]
    """Bootstrap draws of the constants, in the order of `constants`. The intervals of predictions come from these
    draws."""
    residual: dict[str, float]
    """Error of the fit by figure: the standard deviation of `log(simulated / measured)`. The values of ttft, tpot and
    e2e compare tenths of a run. The values of the rate and of the 99th percentiles compare whole runs."""
    runs: list[dict[str, Any]]
    """Names and request counts of the runs that the twin was fitted to."""

    def values(self, draw: int | None = None, *, elsewhere: bool = False) -> dict[str, float]:
        """Return the fitted values of the constants by name, or the values of one bootstrap draw.

        If `elsewhere` is True, return the values for a server with another GPU, model, number of GPUs or number format.
        """
        fitted = {name: constant.value for name, constant in self.constants.items()}
        values = fitted if draw is None else dict(zip(self.constants, self.draws[draw], strict=True))
        if not elsewhere:
            return values
        return {name: value * self.transferred.get(name, fitted[name]) / fitted[name] for name, value in values.items()}

    def errors(self, *, elsewhere: bool = False) -> dict[str, float]:
        """Return the relative error of each figure that the twin predicts, by the name of the figure.

        By default, the errors are for predictions of the measured server. They are then the errors of the fit
        (`residual`).

        If `elsewhere` is True, the errors are for predictions of a server with another GPU, model, number of GPUs or
        number format. They then include the error of the hardware model. This error is known only for TTFT and TPOT.
        For rates and for E2E latency, the error for TPOT is used instead.
        """
        if not elsewhere:
            return self.residual
        model_errors = {"rate": MODEL_ERRORS["tpot"], "e2e": MODEL_ERRORS["tpot"]} | MODEL_ERRORS
        return {
            name: math.hypot(error, model_errors.get(name.partition(".")[0], 0.0))
            for name, error in self.residual.items()
        }

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
        """Return the deployment of the twin, or None if the twin was fitted without hardware.

        Each argument after `engine` replaces a value of the fitted deployment. Raises HardwareError for hardware that
        is not in the tables. Raises PlanError if the twin was fitted without hardware and one of these arguments, other
        than `hardware`, is given.
        """
        if not self.gpu:
            if gpu or model or tensor or number_format or changes:
                raise PlanError(
                    "this twin was fitted without hardware, so --gpu, --model, --tp, --format and --set have no effect",
                    "Name the hardware when you fit it: loadgen twin fit RUN --gpu H100 --model llama-3.1-8b",
                )
            return None
        file = hardware or (Path(self.hardware) if self.hardware else None)
        return engine.deployment(
            gpu or self.gpu,
            model or self.model,
            format_name=number_format or self.number_format,
            tensor=tensor or self.tensor,
            file=file,
            changes=changes,
        )


def typical_host_s(engine: Engine, deployment: Deployment) -> dict[str, float]:
    """Return the times that `engine` typically needs on the host CPU, from the hardware tables.

    The keys are `step_s` (per step) and `sequence_s` (per sequence of a step). The times depend on the kind of model,
    dense or mixture of experts. They are never 0, because a fit multiplies them by factors.
    """
    step_s, sequence_s = deployment.host_s
    return {
        "step_s": max(engine.step_s or step_s, MIN_STEP_S),
        "sequence_s": max(engine.sequence_s or sequence_s, MIN_SEQUENCE_S),
    }


def step_time_with(values: Mapping[str, float], engine: Engine, deployment: Deployment | None) -> StepDurations:
    """Return an object that predicts the duration of each step of a twin.

    A twin is a simulated server whose constants are fitted to measured runs. `values` contains the constants of this
    twin. With a `deployment`, the names of the constants are those of HARDWARE_CONSTANTS. Without one, they are those
    of LINEAR_CONSTANTS.
    """
    if deployment is None:
        return LinearStepTime(values["step_s"], values["sequence_s"], values["token_s"], values["context_s"])
    gpu = deployment.gpu
    compute = values["compute"]
    reached = replace(
        gpu,
        memory_bytes_per_s=gpu.memory_bytes_per_s * values["bandwidth"],
        peaks={name: rate * compute for name, rate in gpu.peaks.items()},
        watts=gpu.watts * compute,  # a lower FLOP rate at the same clock, not more energy per FLOP
    )
    return engine.step_time(replace(deployment, gpu=reached, host=(values["step_s"], values["sequence_s"])))


def read_twin(path: Path) -> Twin:
    """Read a twin file. Raises PlanError if the file is not a twin, or if a newer version of loadgen wrote it."""
    try:
        twin = msgspec.json.decode(read_input(path, MAX_FILE_BYTES), type=Twin)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", "Write a twin with: loadgen twin fit RUN...") from None
    except msgspec.MsgspecError as error:
        raise PlanError(f"{path} is not a twin: {error}", "Write a twin with: loadgen twin fit RUN...") from None
    if twin.format > FORMAT:
        raise PlanError(
            f"{path} was written by a newer loadgen ({twin.version})", "Upgrade loadgen, or fit the twin again."
        )
    known_names = list(twin.constants) in (list(HARDWARE_CONSTANTS), list(LINEAR_CONSTANTS))
    if not known_names or any(len(draw) != len(twin.constants) for draw in twin.draws):
        raise PlanError(f"{path}: unexpected constants for a twin", "Fit the twin again.")
    return twin
