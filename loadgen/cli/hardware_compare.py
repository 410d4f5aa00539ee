"""The commands `hardware compare` and `hardware bounds`: why a GPU is faster, and what limits each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from typer import Argument, Context, Option

from loadgen.cli.hardware_output import INFERENCE, TRAINING, check_purpose, print_result, usage_errors
from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.servers.hardware.dissection import Dissection
    from loadgen.servers.hardware.inference import Deployment

SERVING_ONLY = {"rich_help_panel": INFERENCE}
TRAINING_ONLY = {"rich_help_panel": TRAINING}
"""Keyword arguments of `Option` that put an option under a heading of `--help`."""
MAX_GPUS = 8
RECOMPUTATIONS = ("auto", "none", "selective", "full")
ATTENTIONS = ("fused", "stored")
Value = TypeVar("Value")
_Purpose = Annotated[Literal["inference", "training"], Option("--for", help="What the GPUs do.")]
_Model = Annotated[str, Option(help="Model, such as llama-3.1-70b, or a Hugging Face config.json.")]
_Hardware = Annotated[Path | None, Option(help="TOML file with additional GPUs and models.")]
_Page = Annotated[Path | None, Option(metavar="FILE", help="Also write an HTML page with the picture.")]
_Json = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


def compare(
    context: Context,
    gpus_compared: Annotated[
        list[str], Argument(metavar="GPU GPU...", help="Two or more GPUs, the oldest first: A100 H100 B200.")
    ],
    purpose: _Purpose = "inference",
    model: _Model = "llama-3.1-8b",
    format_names: Annotated[
        str,
        Option(
            "--format",
            metavar="F,F",
            help="Number format; `native` is the one with the fewest bits that a GPU computes in. Like other options "
            "with commas: one value for all GPUs, or one per GPU.",
        ),
    ] = "native",
    tp: Annotated[
        str | None,
        Option(
            metavar="N,N",
            help="GPUs that share each layer (tensor parallel). Default: 1 for inference; the fastest for training.",
        ),
    ] = None,
    network: Annotated[
        str,
        Option(
            metavar="L,L",
            help="Another link, such as 'NVLink 5' within a machine, or InfiniBand NDR between machines.",
        ),
    ] = "",
    input_tokens: Annotated[int, Option("--input", min=1, help="Tokens per prompt.", **SERVING_ONLY)] = 512,
    output_tokens: Annotated[int, Option("--output", min=1, help="Tokens per response.", **SERVING_ONLY)] = 128,
    in_flight: Annotated[
        str | None,
        Option(
            metavar="N,N",
            help="Concurrent requests. If fewer fit into memory, only these are compared. Default: as many as fit, at "
            "most 1,024 per replica.",
            **SERVING_ONLY,
        ),
    ] = None,
    dp: Annotated[str, Option(metavar="N,N", help="Replicas, each with --tp GPUs.", **SERVING_ONLY)] = "1",
    framework: Annotated[
        str, Option(metavar="E,E", help="Inference engine, such as vllm, sglang, trtllm or nim.", **SERVING_ONLY)
    ] = "vllm",
    gpus: Annotated[str, Option(metavar="N,N", help="Number of GPUs.", **TRAINING_ONLY)] = "64",
    batch: Annotated[str, Option(metavar="N,N", help="Sequences per iteration.", **TRAINING_ONLY)] = "256",
    sequence: Annotated[int, Option(min=1, help="Tokens per sequence.", **TRAINING_ONLY)] = 2048,
    recomputation: Annotated[
        str,
        Option(
            metavar="R,R",
            help="Activations to recompute: none, selective, full, or auto for the fastest that fits.",
            **TRAINING_ONLY,
        ),
    ] = "auto",
    attention: Annotated[
        str, Option(metavar="A,A", help="Attention: fused, or stored (scores are written to memory).", **TRAINING_ONLY)
    ] = "fused",
    hardware: _Hardware = None,
    page: _Page = None,
    as_json: _Json = False,
) -> None:
    """Explain the speed-up from one GPU to the next, factor by factor.

    The factors are compute rate, number format, memory bandwidth, memory capacity, links, kernel launches, software and
    number of GPUs. They are applied one after the other, and the product of their gains is the whole speed-up. Exit
    codes: 0 computed, 2 usage error.
    """
    check_purpose(context, purpose)
    gpus_compared = [name for words in gpus_compared for name in words.split(",") if name]
    if not 2 <= len(gpus_compared) <= MAX_GPUS:
        raise PlanError(
            f"compare needs 2 to {MAX_GPUS} GPUs, not {len(gpus_compared)}", "Write: loadgen hardware compare A100 B200"
        )
    number = len(gpus_compared)
    formats = per_gpu("--format", format_names, number, str)
    if purpose == "training":
        from loadgen.servers.hardware.dissect_training import TrainedOn, TrainingJob, dissect_training

        uses = [
            TrainedOn(*fields)
            for fields in zip(
                gpus_compared,
                formats,
                per_gpu("--gpus", gpus, number, positive),
                per_gpu("--batch", batch, number, positive),
                per_gpu("--recomputation", recomputation, number, one_of(RECOMPUTATIONS)),
                per_gpu("--attention", attention, number, one_of(ATTENTIONS)),
                per_gpu("--network", network, number, str),
                strict=True,
            )
        ]
        tensor = None if tp is None else one_value("--tp", tp)
        job = TrainingJob(model, sequence, tensor, hardware)
        with usage_errors():
            dissections = dissect_training(uses, job)
        load = f"Training {model_title(model, hardware)} with sequences of {sequence:,} tokens."
    else:
        from loadgen.servers.hardware.dissect_serving import ServedBy, dissect_serving

        served = [
            ServedBy(*fields)
            for fields in zip(
                gpus_compared,
                formats,
                per_gpu("--framework", framework, number, str),
                per_gpu("--tp", tp or "1", number, positive),
                per_gpu("--dp", dp, number, positive),
                per_gpu("--in-flight", in_flight, number, positive) if in_flight else [None] * number,
                per_gpu("--network", network, number, str),
                strict=True,
            )
        ]
        with usage_errors():
            dissections = dissect_serving(served, model, input_tokens, output_tokens, hardware)
        load = f"Serving {model_title(model, hardware)}: {input_tokens:,} + {output_tokens:,} tokens per request."
    _print_speedup(dissections, load, page, as_json)


def _print_speedup(dissections: Sequence[Dissection], load: str, page: Path | None, as_json: bool) -> None:
    from loadgen.analysis.hardware_speedup import format_speedup, speedup_document

    print_result(
        {"load": load, "steps": [asdict(dissection) for dissection in dissections]},
        lambda: format_speedup(dissections, load),
        lambda: speedup_document(dissections, load),
        page,
        as_json,
    )


def bounds(
    context: Context,
    gpus: Annotated[str, Option(metavar="GPU,GPU", help="GPUs to compare.")] = "V100,A100,H100,H200,B200",
    purpose: _Purpose = "inference",
    model: _Model = "llama-3.1-8b",
    format_names: Annotated[
        str,
        Option(
            "--format",
            metavar="F,F",
            help="Number format of the weights: one for all GPUs, or one per GPU. `native` is the one with the fewest "
            "bits that a GPU computes in.",
        ),
    ] = "fp16",
    tp: Annotated[int, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 1,
    batch: Annotated[int, Option(min=1, help="Prompts, decoding sequences, or sequences per micro-batch.")] = 1,
    input_tokens: Annotated[int, Option("--input", min=1, help="Tokens per prompt.", **SERVING_ONLY)] = 512,
    cached_tokens: Annotated[
        int | None,
        Option("--context", min=1, help="Tokens that each decoding sequence holds. Default: --input.", **SERVING_ONLY),
    ] = None,
    sequence: Annotated[int, Option(min=1, help="Tokens per sequence.", **TRAINING_ONLY)] = 2048,
    hardware: _Hardware = None,
    page: _Page = None,
    as_json: _Json = False,
) -> None:
    """Show whether compute, memory or latency binds each kernel.

    The kernels are the GEMMs and the attention of a model. For each GPU, the command computes the arithmetic intensity,
    the ridge of the roofline, the expected time, and the smallest batch that is bound by compute. Exit codes: 0
    computed, 2 usage error.
    """
    from loadgen.servers.hardware.bounds import serving_bounds, training_bounds
    from loadgen.servers.hardware.dissection import NATIVE, native_format
    from loadgen.servers.hardware.roofline import make_deployment

    check_purpose(context, purpose)
    names = [name for name in gpus.split(",") if name]
    if not 1 <= len(names) <= MAX_GPUS:
        raise PlanError(f"--gpus {gpus}: name 1 to {MAX_GPUS} GPUs", "Write --gpus A100,H100,B200")
    deployments: dict[str, Deployment] = {}
    for name, wanted in zip(names, per_gpu("--format", format_names, len(names), str), strict=True):
        with usage_errors():
            plain = make_deployment(name, model, "fp16", tp, 1, KERNELS_ALONE, file=hardware)
            format_name = native_format(plain.gpu) if wanted == NATIVE else wanted
            deployment = make_deployment(name, model, format_name, tp, 1, KERNELS_ALONE, file=hardware)
        label = name if names.count(name) == 1 else f"{name} {format_name}"
        if label in deployments:
            raise PlanError(f"--gpus {gpus}: {label} is named twice", "Name each GPU once, or with another --format.")
        deployments[label] = deployment
    held = cached_tokens or input_tokens
    with usage_errors():
        if purpose == "training":
            results = {label: training_bounds(each, batch, sequence) for label, each in deployments.items()}
        else:
            results = {label: serving_bounds(each, batch, input_tokens, held) for label, each in deployments.items()}
    first = next(iter(deployments.values()))
    formats = ", ".join(dict.fromkeys(deployment.weights.name for deployment in deployments.values()))
    title = f"What binds the kernels of {first.model.name} in {formats}" + (f", TP {tp}" if tp > 1 else "")
    load = f"Prefill: {batch:,} x {input_tokens:,} tokens. Decode: {batch:,} x {held:,} tokens in the KV cache."
    sizes = {"prefill": "tokens", "decode": "sequences"}
    too_large = [label for label, deployment in deployments.items() if not fits(deployment)]
    if too_large:
        load += f" The model does not fit the memory of {tp} x {', '.join(too_large)}; its kernels are shown anyway."
    if purpose == "training":
        load = f"Training step: micro-batches of {batch:,} x {sequence:,} tokens. Optimiser: all layers on one GPU."
        sizes = {"forward": "tokens", "backward": "tokens", "optimiser": ""}
    from loadgen.analysis.hardware_bounds import bounds_document, format_bounds

    print_result(
        {"model": first.model.name, "load": load, "gpus": {label: asdict(item) for label, item in results.items()}},
        lambda: format_bounds(results, (title, load), sizes),
        lambda: bounds_document(results, (title, load), sizes),
        page,
        as_json,
    )


KERNELS_ALONE = "kernels"
"""Framework without overheads, so that only the kernels count."""


def model_title(name: str, file: Path | None) -> str:
    """Return the full name of a model."""
    from loadgen.servers.hardware import model

    return model(name, file).name


def fits(deployment: Deployment) -> bool:
    """Return True if the weights and the KV cache of one token fit into the memory of the GPUs."""
    from loadgen.servers.hardware import HardwareError
    from loadgen.servers.hardware.throughput_model import MEMORY_FRACTION

    try:
        deployment.kv_tokens(MEMORY_FRACTION)
    except HardwareError:
        return False
    return True


def per_gpu(option: str, text: str, number: int, parse: Callable[[str], Value]) -> list[Value]:
    """Return one value of an option for each of `number` GPUs.

    `text` contains one value for all GPUs, or one value per GPU, separated by commas. `parse` converts each value.
    Raises PlanError for any other number of values and for an invalid value.
    """
    words = text.split(",")
    if len(words) not in (1, number):
        raise PlanError(
            f"{option} {text}: {len(words)} values for {number} GPUs", "Write one value for all GPUs, or one per GPU."
        )
    try:
        values = [parse(word.strip()) for word in words]
    except ValueError as error:
        raise PlanError(f"{option} {text}: {error}") from None
    return values * number if len(words) == 1 else values


def one_value(option: str, text: str) -> int:
    """Parse the value of an option that takes a single positive number for all GPUs. Raises PlanError for any other
    value.

    `option` is the name of the option, which the error message states. `text` is the value that the user gave.
    """
    if "," in text:
        raise PlanError(f"{option} {text}: all GPUs train with one value", f"Write {option} 8, or leave it out.")
    return per_gpu(option, text, 1, positive)[0]


def positive(word: str) -> int:
    """Parse a whole number from 1 to 999,999."""
    if not word.isdecimal() or not 0 < int(word) < 1_000_000:
        raise ValueError(f"{word!r} is not a number from 1 to 999,999")
    return int(word)


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a function that returns a word unchanged, and raises ValueError for a word that is not in `choices`."""

    def parse(word: str) -> str:
        if word not in choices:
            raise ValueError(f"{word!r} is unknown; choose one of {', '.join(choices)}")
        return word

    return parse
