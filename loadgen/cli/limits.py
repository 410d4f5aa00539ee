"""`loadgen limits`: what can this hardware do at best, and what is to be expected of it? No server is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from loadgen.cli.options import SettingsCommand
from loadgen.errors import OutputError, PlanError

if TYPE_CHECKING:
    from loadgen.servers.hardware.training import TrainingSetup

LOAD, TRAINING = "Load", "Training"
NO_P2P = "NVLink 4 without P2P"


@dataclass(frozen=True, slots=True)
class LimitsOptions:
    """The options, by the names that they have on the command line."""

    gpu: Annotated[str, Option(help="Such as A100, A800, H100, H200, B200, L40S, RTX4090, MI300X.")] = "H100"
    model: Annotated[str, Option(help="Such as llama-3.1-8b, qwen3-32b, or a Hugging Face config.json.")] = (
        "llama-3.1-8b"
    )
    tp: Annotated[int, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 1
    pp: Annotated[int, Option(min=1, help="Groups of those that share the layers (pipeline parallel).")] = 1
    dp: Annotated[int, Option(min=1, help="Replicas that share requests, or the batch (data parallel).")] = 1
    format: Annotated[str, Option(help="Of weights: bf16, fp8, int8, int4 or nvfp4.")] = "bf16"
    kv_format: Annotated[str | None, Option(help="Of the KV cache. Default: the framework's own.")] = None
    framework: Annotated[
        str, Option(help="Whose overheads to expect: vllm, trtllm, nim, trtllm-0.9, gpt-fast or kernels (none).")
    ] = "vllm"
    set: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="What if: memory_bandwidth=8TB/s. May be repeated.")
    ] = None
    p2p: Annotated[bool, Option(help="Whether GPUs reach each other's memory.")] = True
    hardware: Annotated[Path | None, Option(help="A TOML file with more GPUs and models.")] = None
    page: Annotated[Path | None, Option(help="Write a page: roofline, and latency against throughput.")] = None
    json: Annotated[bool, Option("--json", help="Print JSON and nothing else.")] = False
    input: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Tokens per prompt.")] = 512
    output: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Tokens per answer.")] = 128
    in_flight: Annotated[int, Option(min=1, rich_help_panel=LOAD, help="Requests at any time.")] = 64
    memory_fraction: Annotated[
        float, Option(min=0.1, max=1, rich_help_panel=LOAD, help="Of GPU memory, for weights and KV cache.")
    ] = 0.9
    architecture: Annotated[
        str,
        Option(
            rich_help_panel=LOAD, help="How all-reduces are hidden: standard, parallel, ladder or no-communication."
        ),
    ] = "standard"
    training: Annotated[
        bool, Option("--training", rich_help_panel=TRAINING, help="One iteration of training instead of a load.")
    ] = False
    batch: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Sequences per iteration.")] = 64
    sequence: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Tokens per sequence.")] = 2048
    micro_batch: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Sequences at a time.")] = 1
    interleave: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Chunks of layers per stage.")] = 1
    recomputation: Annotated[
        Literal["none", "selective", "full"], Option(rich_help_panel=TRAINING, help="Of activations.")
    ] = "none"
    sequence_parallel: Annotated[
        bool, Option("--sequence-parallel", rich_help_panel=TRAINING, help="Norms are split over tokens.")
    ] = False
    flash: Annotated[bool, Option("--flash", rich_help_panel=TRAINING, help="Attention keeps no scores.")] = False
    zero: Annotated[int, Option(min=0, max=3, rich_help_panel=TRAINING, help="Stage of ZeRO.")] = 0
    offload: Annotated[bool, Option("--offload", rich_help_panel=TRAINING, help="The host holds optimiser states.")] = (
        False
    )
    lora: Annotated[int, Option(min=0, rich_help_panel=TRAINING, help="Rank of adapters; 0 trains all.")] = 0
    qlora: Annotated[bool, Option("--qlora", rich_help_panel=TRAINING, help="Adapters on a 4-bit base.")] = False


def _limits(settings: dict[str, Any]) -> None:
    """What GPUs allow for a model under a load, and what a framework is expected to make of it.

    `limit` is physics: every FLOP, byte and message at the data sheet's rate. `expected` adds what was measured of the
    named framework. How far off that is: docs/reference/hardware-validation.md. Exit codes: 0 answered, 2 usage.
    """
    requested = LimitsOptions(**settings)
    with _usage_errors():
        result = _training(requested) if requested.training else _serving(requested)
    if requested.json:
        from msgspec import json

        print(json.format(json.encode(result)).decode())


def _parameters() -> Iterator[Parameter]:
    return iter(signature(LimitsOptions, eval_str=True).parameters.values())


def _no_shared_options() -> None:
    """Shares no option with other commands."""


limits = SettingsCommand(_limits, _parameters, _no_shared_options)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What is wrong with hardware is wrong with the command line."""
    from loadgen.servers.hardware import HardwareError

    try:
        yield
    except HardwareError as problem:
        raise PlanError(str(problem)) from None


def _serving(asked: LimitsOptions) -> Any:
    from loadgen.servers.hardware import gpu_links
    from loadgen.servers.hardware.roofline import compute_limits, make_deployment
    from loadgen.servers.hardware.throughput_model import Load

    deployment = make_deployment(
        asked.gpu,
        asked.model,
        asked.format,
        asked.tp,
        asked.pp,
        asked.framework,
        file=asked.hardware,
        changes=asked.set or (),
    )
    deployment = replace(deployment, architecture=asked.architecture)
    if asked.kv_format:
        deployment = deployment.with_kv_format(asked.kv_format)
    if not asked.p2p:
        card = deployment.gpu
        slow = gpu_links()[NO_P2P] if card.link.name.startswith("NVLink") else card.pcie
        card = replace(card, link=replace(slow, bytes_per_s=card.link.bytes_per_s))
        deployment = replace(deployment, gpu=card)
    load = Load(asked.input, asked.output, max(1, asked.in_flight // asked.dp))
    result = compute_limits(deployment, load, asked.memory_fraction, replicas=asked.dp)
    if asked.page:
        from loadgen.analysis.hardware import build_document
        from loadgen.analysis.report.page import render

        try:
            asked.page.write_text(render(build_document(result, deployment)), "utf-8")
        except OSError as problem:
            raise OutputError(
                f"cannot write {asked.page}: {problem.strerror}", "Name a file in a folder that exists."
            ) from None
    if not asked.json:
        from loadgen.analysis.hardware import format_limits

        print(format_limits(result))
        if asked.page:
            print(f"\nPage: {asked.page}")
    return result


def _training(asked: LimitsOptions) -> dict[str, Any]:
    from loadgen.servers.hardware.training import mfu, predict_iteration, predict_memory

    setup = _setup(asked)
    took, held = predict_iteration(setup), predict_memory(setup)
    tokens = setup.batch * setup.sequence
    result = {
        "gpu": setup.gpu.name,
        "model": setup.model.name,
        "gpus": setup.gpus,
        "iteration_s": took.total_s,
        "tokens_per_s": tokens / took.total_s,
        "tokens_per_s_per_gpu": tokens / took.total_s / setup.gpus,
        "mfu": mfu(setup, took.total_s),
        "seconds": asdict(took),
        "memory_bytes": asdict(held) | {"total": held.total, "fits": held.total <= setup.gpu.memory_bytes},
    }
    if not asked.json:
        from loadgen.analysis.hardware import format_training

        print(format_training(result))
    return result


def _setup(asked: LimitsOptions) -> TrainingSetup:
    from loadgen.servers.hardware import gpu, model, with_changes
    from loadgen.servers.hardware.training import NF4_BYTES, WEIGHT_BYTES, TrainingSetup

    return TrainingSetup(
        gpu=with_changes(gpu(asked.gpu, asked.hardware), asked.set or ()),
        model=model(asked.model, asked.hardware),
        batch=asked.batch,
        sequence=asked.sequence,
        micro_batch=asked.micro_batch,
        tensor=asked.tp,
        pipeline=asked.pp,
        data=asked.dp,
        interleave=asked.interleave,
        number=asked.format,
        recomputation=asked.recomputation,
        sequence_parallel=asked.sequence_parallel,
        flash=asked.flash,
        zero=asked.zero,
        offload=asked.offload,
        adapter_rank=asked.lora or (64 if asked.qlora else 0),
        base_bytes=NF4_BYTES if asked.qlora else WEIGHT_BYTES,
    )
