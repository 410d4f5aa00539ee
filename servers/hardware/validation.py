"""Tells by how much predictions of the hardware model differ from published measurements.

The table validation.csv contains these errors. It has one row for each combination that was compared with measurements.
A combination consists of the framework, the GPU, the kind of model (`dense` or `mixture of experts`) and the predicted
figure, such as `TPOT`. The predictions for all other combinations are not validated.

`python -m benchmarks.hardware_goals --write` generates the table.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from loadgen.servers.hardware import FOLDER, Gpu, HardwareError, framework, gpu, number_format
from loadgen.servers.hardware.inference import Deployment
from loadgen.servers.hardware.throughput_model import DEFAULT_ROUNDS, MEMORY_FRACTION, Load
from loadgen.servers.hardware.training import TrainingSetup

TABLE = FOLDER / "validation.csv"
COVERED = ("formats", "tp", "ep", "dp_attention", "input", "output", "in_flight")
"""Columns with the values of the compared runs, separated by spaces: number formats of the weights, GPUs per layer,
expert groups, attention groups, tokens per prompt, tokens per response and requests in flight. They are empty for
kernels, training and speed-ups."""
FAR = 2.0
"""A load is outside of the compared runs if its tokens or its requests in flight are more than this factor above all of
their values, or below all of them."""
COLUMNS = ("framework", "gpu", "models", "figure", "rows", "error_p50", "error_p90", "source", *COVERED)
FIGURES = ("TTFT", "TPOT", "prefill", "decode step")
"""Figures of a deployment that validation.csv may contain."""
SPEED_UP = "speed-up"
"""Figure of the rows about the speed-up between two GPUs, whose names are joined by SPEED_UP_JOIN in the column `gpu`.
A speed-up is the ratio of the times per output token (TPOT) of the two GPUs."""
SPEED_UP_JOIN = " to "
KERNELS = "kernels"
KERNEL_FIGURES = ("GEMM", "decode attention", "prefill attention")
"""Framework and kernels of the rows about single kernels. Their figure ends in a format, such as `GEMM in fp8`."""
TRANSFERRED = "transferred"
"""First word of the figures `transferred TTFT` and `transferred TPOT`: predictions of a twin that was fitted to another
server with the same framework."""
TRAINING = "training"
"""Framework of the rows about training iterations. Their figure is `iteration`."""

DEFAULT_CHUNKED_PREFILL = {"vLLM": "mixed", "SGLang": "separate", "TensorRT-LLM": "off", "NIM": "off"}
"""The value of CHUNKED_PREFILL that a framework uses by default."""


@dataclass(frozen=True, slots=True)
class PublishedSettings:
    """Settings of published measurements that differ from the defaults of `loadgen limits`."""

    text: str
    """The settings in words."""
    options: tuple[str, ...]
    """Options of `loadgen limits` that set them."""
    gpus: tuple[str, ...] = ()
    """GPUs on which they were used. Empty: on all GPUs."""


SAME_SPEED = {"bf16": "fp16", "fp16": "bf16"}
"""A number format that has the size and the rate of another one. Runs in the one validate predictions for the other."""
PUBLISHED_SETTINGS = {
    ("TensorRT-LLM", "dense", "aiconfigurator (8B)"): PublishedSettings(
        "at most in flight + input + 1,500 tokens and in flight - 1 sequences per step, the latter inferred from the "
        "same measurements",
        ("--step-tokens", "--max-running"),
    ),
    ("TensorRT-LLM", "dense", "InferenceX"): PublishedSettings(
        "at most 16,384 tokens per step, and a batch wait of 20 steps for 1,024 output tokens on fewer than 8 GPUs",
        ("--step-tokens", "--batch-wait"),
    ),
    ("NIM", "dense", "NIM"): PublishedSettings(
        "clients that send requests for 600 s, a time inferred from the same measurements", ("--seconds",)
    ),
    ("vLLM", "dense", "InferenceX"): PublishedSettings(
        "a model that vLLM compiles as a whole (`splitting_ops: []`), with a time to launch the kernels of prompts "
        "that was inferred from the same measurements",
        (),
        ("B200 SXM",),
    ),
    ("SGLang", "dense", "aiconfigurator (32B)"): PublishedSettings("a memory fraction of 0.86", ("--memory-fraction",)),
    ("TensorRT-LLM", "mixture of experts", "aiconfigurator (235B)"): PublishedSettings(
        "at most in flight + input + 1,500 tokens per step", ("--step-tokens",)
    ),
    ("TensorRT-LLM", "mixture of experts", "InferenceX"): PublishedSettings(
        "a batch wait of 40 steps for DeepSeek in fp8 with 1,024 output tokens from 64 requests in flight on",
        ("--batch-wait",),
    ),
    ("SGLang", "mixture of experts", "InferenceX"): PublishedSettings(
        "a receive interval of 10 steps, or of 30 steps from 16 requests in flight on", ("--receive-interval",)
    ),
}
"""Settings of the compared runs that differ from the defaults of `loadgen limits`, by framework, kind of model and
source. `with_protocol` and `with_mixture_protocol` of benchmarks.hardware_model apply these settings to predictions."""


@dataclass(frozen=True, slots=True)
class PredictedLoad:
    """The properties of a load that are compared with those of the measured runs. None stands for an unknown value."""

    prompt_tokens: float | None
    """Mean tokens per prompt."""
    output_tokens: float | None
    """Mean tokens per response."""
    in_flight: float | None
    """Requests in flight on one replica."""
    closed_loop: bool = True
    """False if requests arrive at times that do not depend on responses, such as Poisson arrivals and bursts."""

    def outside_of(self, covered: Mapping[str, Sequence[str]]) -> str:
        """Return a text on properties of the compared runs that are far from those of this load, or "".

        `covered` has the values of the compared runs, by column of COVERED. For example, `with at most 7,373 tokens per
        prompt` means that all compared runs had much shorter prompts than this load.
        """
        properties = {
            "input": (self.prompt_tokens, "tokens per prompt"),
            "output": (self.output_tokens, "tokens per response"),
            "in_flight": (self.in_flight, "requests in flight"),
        }
        bounds = []
        for column, (value, unit) in properties.items():
            measured = [int(text) for text in covered[column]]
            if value is None or not measured:
                continue
            if value > FAR * max(measured):
                bounds.append(f"at most {max(measured):,} {unit}")
            elif value < min(measured) / FAR:
                bounds.append(f"at least {min(measured):,} {unit}")
        texts = [] if self.closed_loop else ["in closed loops"]
        texts += [f"with {', '.join(bounds)}"] if bounds else []
        return " ".join(texts)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far predictions of one figure were from measurements, for one framework, GPU and kind of model.

    Each error is a share of the measured value: 0.1 is an error of 10%.
    """

    validated: bool
    """True if the errors are known for predictions like this one.

    False in two cases. If this combination of framework, GPU and settings was never compared with published
    measurements, `rows` and the errors are 0. If it was compared, but only under other loads, `rows` and the errors are
    those of these loads, and `reason` names them.
    """
    rows: int = 0
    error_p50: float = 0.0
    error_p90: float = 0.0
    source: str = ""
    settings: str = ""
    """Settings of the compared runs that differ from the defaults of `loadgen limits`. The errors hold for them only.
    """
    reason: str = ""
    """Why the figure is not validated, such as `compared only in fp8`. Empty if the figure is validated, and if there
    was no comparison for this GPU."""

    def __str__(self) -> str:
        if self.validated:
            return self.errors
        if self.rows:
            return f"{self.errors}, {self.load_text}"
        return f"not validated ({self.reason})" if self.reason else "not validated"

    @property
    def load_text(self) -> str:
        """Text that says that only other loads were compared, and which."""
        return f"not validated for this load ({self.reason})"

    @property
    def errors(self) -> str:
        """Text with the median error, the 90th percentile of the errors, and the number of compared rows.

        For example: `8% (p50) and 21% (p90) off in 120 rows`.
        """
        return f"{100 * self.error_p50:.0f}% (p50) and {100 * self.error_p90:.0f}% (p90) off in {self.rows:,} rows"


def accuracies(
    deployment: Deployment,
    figures: Sequence[str] = FIGURES,
    *,
    load: PredictedLoad | None = None,
    separate_workers: bool = False,
    changed_settings: Collection[str] = (),
) -> dict[str, Accuracy]:
    """Return, for each of the `figures`, how far its predictions were from measurements of similar servers.

    The figures are durations, such as `TTFT` and `TPOT`. A similar server has the framework and the GPU of
    `deployment`, and serves a model of the same kind (dense or mixture of experts).

    - `load` is the load of the prediction. None if the load need not be checked.
    - `separate_workers` is True if prefill and decode have separate workers.
    - `changed_settings` lists the options that do not have their default values, such as `--max-running`.

    In these cases, the result for a figure has no numbers, and is marked as not validated:

    - No similar server was measured.
    - `deployment` has an option that was never measured (see `has_unmeasured_options`).
    - `separate_workers` is True.
    - The number format of `deployment` was not measured.
    - The TP, the EP or the number of attention groups is below or above all measured values.
    - All measured servers had the default value of an option in `changed_settings`.

    If only `load` is far outside of the measured loads (see `PredictedLoad.outside_of`), the result is also marked as
    not validated. It then still contains the errors that were found under the measured loads.
    """
    if separate_workers or has_unmeasured_options(deployment):
        return {figure: Accuracy(validated=False) for figure in figures}
    names = (deployment.framework.name, deployment.gpu.name, models_like(deployment))
    result = {}
    for figure in figures:
        row = _table().get((*names, figure))
        if row is None:
            result[figure] = Accuracy(validated=False)
            continue
        changed = [option for option in changed_settings if option not in row.changed_options]
        limits = [*row.limits_on(deployment), *(f"with the default of {option}" for option in changed)]
        outside = load.outside_of(row.covered) if load else ""
        if limits:
            result[figure] = Accuracy(validated=False, reason=f"compared only {' and '.join(limits)}")
        elif outside:
            result[figure] = replace(row.accuracy, validated=False, reason=f"compared only {outside}")
        else:
            result[figure] = row.accuracy
    return result


def changed_settings(deployment: Deployment, load: Load, memory_fraction: float) -> list[str]:
    """Return the options of `loadgen limits`, such as `--max-running`, whose values differ from the defaults.

    Only options of the engine and of the closed loop are considered. Options that describe the load, such as the length
    of prompts or the number of requests in flight, are not considered.
    """
    settings = load.settings
    changed = {
        "--step-tokens": deployment.framework.chunk_tokens != framework(deployment.framework.name).chunk_tokens,
        "--max-running": settings.running_limit is not None,
        "--batch-wait": settings.batch_wait_steps > 0,
        "--receive-interval": settings.receive_steps > 1,
        "--memory-fraction": memory_fraction != MEMORY_FRACTION,
        "--rounds": load.rounds != DEFAULT_ROUNDS,
        "--statistic": load.statistic != "mean",
        "--seconds": math.isfinite(load.seconds),
    }
    return [option for option, is_changed in changed.items() if is_changed]


def has_unmeasured_options(deployment: Deployment) -> bool:
    """Return True if `deployment` uses an option that no server in validation.csv used when it was measured.

    These options are:

    - more than one pipeline stage.
    - speculative decoding.
    - prompts of which a part is in the prefix cache.
    - a setting of chunked prefill that differs from the engine's default.
    - a number format of the KV cache that differs from the default.
    - an architecture that differs from the standard architecture.
    - a GPU whose figures differ from those in the hardware tables.
    """
    chunked = deployment.chunked_prefill
    return (
        deployment.pipeline > 1
        or deployment.speculation is not None
        or deployment.cache_hit_rate > 0
        or chunked not in ("", DEFAULT_CHUNKED_PREFILL.get(deployment.framework.name))
        or deployment.kv_bytes != deployment.default_kv_bytes
        or deployment.architecture != "standard"
        or _differs_from_tables(deployment.gpu)
    )


def _differs_from_tables(card: Gpu) -> bool:
    try:
        return bool(card.changes) or card != gpu(card.name)
    except HardwareError:  # a GPU that a file of the user describes
        return True


def kernel_accuracies(deployment: Deployment) -> dict[str, Accuracy]:
    """Return the accuracy of the predicted kernel durations of a dense model, by kernel and number format.

    A key is, for example, `GEMM in fp8`. The format of a GEMM is that of the weights, and the format of attention is
    that of the KV cache. bf16 and fp16 count as the same format. A kernel whose format was not measured on this GPU is
    not validated.
    """
    weights = "bf16" if deployment.weights.name == "fp16" else deployment.weights.name
    cache_format = "fp8" if deployment.kv_bytes == number_format("fp8").weight_bytes else "bf16"
    formats = {"GEMM": weights, "decode attention": cache_format, "prefill attention": cache_format}
    figures = [f"{kernel} in {formats[kernel]}" for kernel in KERNEL_FIGURES]
    return {figure: accuracy(KERNELS, deployment.gpu.name, "dense", figure) for figure in figures}


def training_accuracy(setup: TrainingSetup) -> Accuracy:
    """Return how far predictions of a training iteration were from measurements on the GPU of `setup`.

    The measured jobs ran Megatron-LM. They computed in 16 bits and recomputed activations. They did not use fused
    attention, ZeRO, offloading or adapters. If `setup` differs from them in one of these points, the result is "not
    validated".
    """
    known = accuracy(TRAINING, setup.gpu.name, "dense", "iteration")
    if not known.validated or _differs_from_tables(setup.gpu):
        return Accuracy(validated=False)
    unmeasured = {
        "without fused attention": setup.flash,
        "without ZeRO": setup.zero > 0,
        "without offloading": setup.offload,
        "without adapters": setup.adapter_rank > 0,
        "in 16 bits": setup.number not in ("bf16", "fp16"),
        "with recomputation": setup.recomputation == "none",
    }
    limits = [text for text, applies in unmeasured.items() if applies]
    return Accuracy(validated=False, reason=f"compared only {', '.join(limits)}") if limits else known


def speed_up_accuracy(before: Deployment, after: Deployment, load: PredictedLoad | None = None) -> Accuracy:
    """Return how accurately the hardware model predicts the speed-up from one GPU to another.

    `before` and `after` are deployments on these two GPUs. The speed-up is the TPOT of `before` divided by the TPOT of
    `after`, at the same load. The accuracy was found by comparison with measurements of servers with the same two GPUs,
    the same engine and the same kind of model (dense or mixture of experts).

    The result is "not validated" in three cases:

    - The two deployments differ in their engine or TP.
    - The TPOT of one of them was never compared with measurements under a load such as `load`.
    - There are no measurements of such a speed-up.
    """
    if before.framework.name != after.framework.name or before.tensor != after.tensor:
        return Accuracy(validated=False)
    if not _is_validated(before, load) or not _is_validated(after, load):
        return Accuracy(validated=False)
    gpus = f"{before.gpu.name}{SPEED_UP_JOIN}{after.gpu.name}"
    return accuracy(after.framework.name, gpus, models_like(after), SPEED_UP)


def _is_validated(deployment: Deployment, load: PredictedLoad | None) -> bool:
    """Return True if predicted times per output token were compared with measurements.

    The comparison must cover servers like `deployment` under a load like `load`. If `load` is None, any load is
    sufficient.
    """
    return any(figure.validated for figure in accuracies(deployment, ("TPOT", "decode step"), load=load).values())


def describe(found: Mapping[str, Accuracy]) -> str:
    """Return a text about the accuracy of figures, such as `TPOT 4% (p50) and 13% (p90) off in 20 rows`.

    `found` maps the name of each figure to its accuracy. In the example, the median error is 4% and the 90th percentile
    is 13%, over 20 published measurements.

    The text also names the settings of the measured servers and their clients if these settings differ from the
    defaults of `loadgen limits`. If the load of a prediction is far from all measured loads, the text says so and
    states the limits of the measured loads. A figure whose accuracy is unknown is called `not validated`.
    """
    known = [f"{figure} {each.errors}" for figure, each in found.items() if each.rows]
    settings = dict.fromkeys(each.settings for each in found.values() if each.settings)
    known += [f"these errors are of runs with {text}" for text in settings]
    known += dict.fromkeys(each.load_text for each in found.values() if each.rows and not each.validated)
    unknown: dict[str, list[str]] = {}
    for figure, each in found.items():
        if not each.rows:
            unknown.setdefault(str(each), []).append(figure)
    return "; ".join([*known, *(f"{', '.join(figures)} {text}" for text, figures in unknown.items())])


def models_like(deployment: Deployment) -> str:
    """Return the kind of the deployed model: `dense` or `mixture of experts`, as in the column `models` of
    validation.csv.
    """
    return "mixture of experts" if deployment.model.experts else "dense"


def accuracy(framework_name: str, gpu_name: str, models: str, figure: str) -> Accuracy:
    """Return the accuracy of the predictions of `figure`, for example `TTFT`, from validation.csv.

    `models` is the kind of model: `dense` or `mixture of experts`. If the table has no row for this combination of
    framework, GPU, kind of model and figure, the result says that the figure is not validated.
    """
    row = _table().get((framework_name, gpu_name, models, figure))
    return row.accuracy if row else Accuracy(validated=False)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One row of validation.csv: the errors of one predicted figure, and the settings of the servers that were
    measured.
    """

    accuracy: Accuracy
    covered: Mapping[str, Sequence[str]]
    """Values of the compared runs, by column of COVERED."""
    changed_options: Sequence[str]
    """Options of `loadgen limits` that had other values than their defaults in the compared runs."""

    def limits_on(self, deployment: Deployment) -> Iterator[str]:
        """Yield a text for each setting of `deployment` that the measurements do not cover.

        - Number format: it is covered if it was measured, or if a format with the same size and rate was measured.
        - TP, EP, and the number of attention groups: each of them is covered if it lies between the smallest and the
          largest measured value.

        The text states which values were measured. For example, `in fp8` means that only fp8 was measured.
        """
        formats = self.covered["formats"]
        if not {deployment.weights.name, SAME_SPEED.get(deployment.weights.name)} & set(formats):
            yield f"in {', '.join(formats)}"
        sizes = {
            "tp": (deployment.tensor, "at TP"),
            "ep": (deployment.expert_parallel, "at EP"),
            "dp_attention": (deployment.attention_data, "with attention groups:"),
        }
        for column, (size, text) in sizes.items():
            values = [int(value) for value in self.covered[column]]
            if not min(values) <= size <= max(values):
                yield f"{text} {min(values)}" + (f" to {max(values)}" if len(values) > 1 else "")


@cache
def _table() -> dict[tuple[str, ...], ValidationRow]:
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return {tuple(row[column] for column in COLUMNS[:4]): _validation_row(row) for row in csv.DictReader(lines)}


def _validation_row(row: Mapping[str, str]) -> ValidationRow:
    """Convert `row`, a row of validation.csv, to a ValidationRow.

    Some rows come from published runs whose settings were not the defaults. These settings are in PUBLISHED_SETTINGS,
    and are copied to the result. The result for a row about a twin never contains such settings. (A twin is a simulated
    server that was fitted to measurements of one server. A row about a twin states how well the twin predicts a
    different server.)
    """
    is_twin = row["figure"].startswith(TRANSFERRED)
    published = None if is_twin else PUBLISHED_SETTINGS.get((row["framework"], row["models"], row["source"]))
    if published and published.gpus and row["gpu"] not in published.gpus:
        published = None
    return ValidationRow(
        Accuracy(
            validated=True,
            rows=int(row["rows"]),
            error_p50=float(row["error_p50"]),
            error_p90=float(row["error_p90"]),
            source=row["source"],
            settings=published.text if published else "",
        ),
        covered={column: row[column].split() for column in COVERED},
        changed_options=published.options if published else (),
    )
