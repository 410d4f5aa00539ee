"""Tells how far predictions of the hardware model were from published measurements.

validation.csv has one row per framework, GPU, kind of model and figure that was compared with measurements.
`python -m benchmarks.hardware_goals --write` generates the table. A combination without a row is not validated.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from loadgen.servers.hardware import FOLDER, Gpu, HardwareError, gpu
from loadgen.servers.hardware.inference import Deployment

TABLE = FOLDER / "validation.csv"
COLUMNS = ("framework", "gpu", "models", "figure", "rows", "error_p50", "error_p90", "source")
FIGURES = ("TTFT", "TPOT", "prefill", "decode step")
"""Figures of a deployment that validation.csv may contain."""
SPEED_UP = "speed-up"
"""Figure of the rows about the speed-up between two GPUs, whose names are joined by SPEED_UP_JOIN in the column `gpu`.
A speed-up is the ratio of the times per output token (TPOT) of the two GPUs."""
SPEED_UP_JOIN = " to "
KERNELS = "kernels"
KERNEL_FIGURES = ("GEMM", "decode attention", "prefill attention")
"""Framework and figures of the rows about single kernels."""
TRANSFERRED = "transferred"
"""First word of the figures `transferred TTFT` and `transferred TPOT`: predictions of a twin that was fitted to another
server with the same framework."""
TRAINING = "training"
"""Framework of the rows about training iterations. Their figure is `iteration`."""

DEFAULT_CHUNKED_PREFILL = {"vLLM": "mixed", "SGLang": "separate", "TensorRT-LLM": "off", "NIM": "off"}
"""The value of CHUNKED_PREFILL that a framework uses by default."""
PUBLISHED_SETTINGS = {
    ("TensorRT-LLM", "dense", "aiconfigurator (8B)"): (
        "at most in flight + input + 1,500 tokens and in flight - 1 sequences per step, the latter inferred from the "
        "same measurements"
    ),
    ("TensorRT-LLM", "dense", "InferenceX"): (
        "at most 16,384 tokens per step, and a batch wait of 20 steps for 1,024 output tokens on fewer than 8 GPUs"
    ),
    ("NIM", "dense", "NIM"): "clients that send requests for 600 s, a time inferred from the same measurements",
    ("SGLang", "dense", "aiconfigurator (32B)"): "a memory fraction of 0.86",
    ("SGLang", "mixture of experts", "InferenceX"): (
        "a receive interval of 10 steps, or of 30 steps from 16 requests in flight on"
    ),
}
"""Settings of the compared runs that differ from the defaults of `loadgen limits`, by framework, kind of model and
source. `with_protocol` and `mixture_loop` of benchmarks.hardware_model apply these settings to the predictions."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of one predicted figure for a framework, a GPU and a kind of model, as shares of the measured values."""

    validated: bool
    """False if this combination was never compared with published measurements. The other fields are then 0 or empty.
    """
    rows: int = 0
    error_p50: float = 0.0
    error_p90: float = 0.0
    source: str = ""
    settings: str = ""
    """Settings of the compared runs that differ from the defaults of `loadgen limits`. The errors hold for them only.
    """

    def __str__(self) -> str:
        if not self.validated:
            return "not validated"
        return f"{100 * self.error_p50:.0f}% (p50) and {100 * self.error_p90:.0f}% (p90) off in {self.rows:,} rows"


def accuracies(
    deployment: Deployment, figures: Sequence[str] = FIGURES, *, separate_workers: bool = False
) -> dict[str, Accuracy]:
    """Return the prediction errors of each figure, as measured for similar deployments.

    Similar deployments have the same framework, the same GPU and a model of the same type (dense or mixture of
    experts). No figure is validated if the deployment has an option without measurements (see
    `has_unmeasured_options`), or if its prefill and decode workers are separate (`separate_workers`).
    """
    if separate_workers or has_unmeasured_options(deployment):
        return {figure: Accuracy(validated=False) for figure in figures}
    names = (deployment.framework.name, deployment.gpu.name, models_like(deployment))
    return {figure: accuracy(*names, figure) for figure in figures}


def has_unmeasured_options(deployment: Deployment) -> bool:
    """Return True if a deployment has an option with which none of the servers in validation.csv was measured.

    Such options are pipelines, speculative decoding, cached prompts, chunked prefill that differs from the default,
    architectures other than the standard one, and GPUs whose figures differ from those in the hardware tables.
    """
    chunked = deployment.chunked_prefill
    return (
        deployment.pipeline > 1
        or deployment.speculation is not None
        or deployment.cache_hit_rate > 0
        or chunked not in ("", DEFAULT_CHUNKED_PREFILL.get(deployment.framework.name))
        or deployment.architecture != "standard"
        or _differs_from_tables(deployment.gpu)
    )


def _differs_from_tables(card: Gpu) -> bool:
    try:
        return bool(card.changes) or card != gpu(card.name)
    except HardwareError:  # a GPU that a file of the user describes
        return True


def kernel_accuracies(gpu_name: str) -> dict[str, Accuracy]:
    """Return the accuracy of predicted kernel durations on a GPU, for each figure of KERNEL_FIGURES."""
    return {figure: accuracy(KERNELS, gpu_name, "dense", figure) for figure in KERNEL_FIGURES}


def speed_up_accuracy(before: Deployment, after: Deployment) -> Accuracy:
    """Return how far off predictions of the speed-up from one GPU to another are, according to measurements.

    The measured speed-ups are ratios of the TPOT of two GPUs at the same load. They come from servers with the GPUs,
    the engine and the kind of model of `before` and `after`. The speed-up is not validated if the engine or the TP of
    the two deployments differ.
    """
    unmeasured = has_unmeasured_options(before) or has_unmeasured_options(after)
    if unmeasured or before.framework.name != after.framework.name or before.tensor != after.tensor:
        return Accuracy(validated=False)
    gpus = f"{before.gpu.name}{SPEED_UP_JOIN}{after.gpu.name}"
    return accuracy(after.framework.name, gpus, models_like(after), SPEED_UP)


def describe(found: Mapping[str, Accuracy]) -> str:
    """Return a sentence about the accuracy of figures, such as `TPOT 4% (p50) and 13% (p90) off in 20 rows`.

    `found` maps the name of each figure to its accuracy. If the measured servers had other settings than the defaults,
    the sentence names these settings.
    """
    known = [f"{figure} {each}" for figure, each in found.items() if each.validated]
    settings = dict.fromkeys(each.settings for each in found.values() if each.settings)
    known += [f"these errors are of runs with {text}" for text in settings]
    unknown = [figure for figure, each in found.items() if not each.validated]
    return "; ".join([*known, *([f"{', '.join(unknown)} not validated"] if unknown else [])])


def models_like(deployment: Deployment) -> str:
    """Return the kind of the deployed model, as in the column `models`: `dense` or `mixture of experts`."""
    return "mixture of experts" if deployment.model.experts else "dense"


def accuracy(framework: str, gpu: str, models: str, figure: str) -> Accuracy:
    """Return the accuracy of the predictions of a figure, from validation.csv.

    The arguments are the values of the first four columns. A combination without a row is not validated.
    """
    return _table().get((framework, gpu, models, figure), Accuracy(validated=False))


@cache
def _table() -> dict[tuple[str, ...], Accuracy]:
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return {
            tuple(row[column] for column in COLUMNS[:4]): Accuracy(
                validated=True,
                rows=int(row["rows"]),
                error_p50=float(row["error_p50"]),
                error_p90=float(row["error_p90"]),
                source=row["source"],
                settings=_settings(row),
            )
            for row in csv.DictReader(lines)
        }


def _settings(row: Mapping[str, str]) -> str:
    """Return the settings of the compared runs that differ from the defaults, or "" if none do.

    `row` is a row of validation.csv. The rows about transferred twins (TRANSFERRED) always have default settings.
    """
    if row["figure"].startswith(TRANSFERRED):
        return ""
    return PUBLISHED_SETTINGS.get((row["framework"], row["models"], row["source"]), "")
