"""`loadgen dissect`: what happens below the server. The work is `loadgen.dissect`'s, what it means `analysis`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from typer import BadParameter, Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.cli.options import seconds_with_unit
from loadgen.errors import OutputError, PlanError

if TYPE_CHECKING:
    from loadgen.analysis.report import Document

dissect = Typer(
    no_args_is_help=True,
    help="Take a model or a training step apart on this machine: modules, operators, memory. Needs the extra dissect.",
    **TYPER_DEFAULTS,
)

_Device = Annotated[str, Option(help="cpu or cuda.")]
_Dtype = Annotated[str, Option(help="fp32, bf16 or fp16.")]
_Repeats = Annotated[int, Option(min=1, help="Steps that are measured.")]
_Warmup = Annotated[int, Option(min=0, help="Steps before those.")]
_Threads = Annotated[int | None, Option(min=1, help="Of each process on CPUs. Default: all cores, divided.")]
_Hardware = Annotated[Path | None, Option(help="A TOML file with more GPUs and models.")]
_Page = Annotated[Path | None, Option(help="Write a page.")]
_Json = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


@dissect.command()
def inference(
    model: Annotated[str, Option(help="Such as llama-2-7b, or a Hugging Face config.json; weights are random.")],
    layers: Annotated[int, Option(min=1, help="Of the model's; the whole model is told from them.")] = 2,
    batch: Annotated[str, Option(metavar="N,N", help="Batch sizes.")] = "1",
    input_tokens: Annotated[int, Option("--input", min=2, help="Tokens per prompt, or in the cache.")] = 512,
    phase: Annotated[Literal["prefill", "decode"], Option(help="All of a prompt, or one more token.")] = "prefill",
    backward: Annotated[bool, Option("--backward", help="The backward pass too.")] = False,
    flash: Annotated[bool, Option("--flash", help="Attention keeps no scores (SDPA).")] = False,
    architecture: Annotated[
        str, Option(help="How all-reduces are hidden: standard, parallel, ladder or no-communication.")
    ] = "standard",
    tp: Annotated[int, Option(min=1, help="Processes that share each layer: gloo, or NCCL.")] = 1,
    link_delay_s: Annotated[
        float,
        Option("--link-delay", parser=seconds_with_unit, metavar="T", help="What an all-reduce lasts at least: 200us."),
    ] = "0s",  # type: ignore[assignment]  # parsed, as one on the command line is
    device: _Device = "cpu",
    dtype: _Dtype = "fp32",
    repeats: _Repeats = 5,
    warmup: _Warmup = 2,
    threads: _Threads = None,
    hardware: _Hardware = None,
    page: Annotated[Path | None, Option(help="Write a page: where a step goes, and the roofline.")] = None,
    as_json: _Json = False,
) -> None:
    """Time each module and each operator of one step, and hold them against what the device allows.

    The model has its real shape and random weights. Exit codes: 0 measured, 2 usage.
    """
    with _usage_errors():
        from loadgen.dissect.inference import InferenceSpec
        from loadgen.dissect.inference import measure_inference as measure

        result = measure(
            InferenceSpec(
                model=model,
                layers=layers,
                batches=_parse_batch_sizes(batch),
                input_tokens=input_tokens,
                phase=phase,
                backward=backward,
                device=device,
                dtype=dtype,
                architecture=architecture,
                flash=flash,
                tensor_parallel=tp,
                link_delay_s=link_delay_s,
                repeats=repeats,
                warmup=warmup,
                threads=threads,
                hardware=hardware,
            )
        )
    from loadgen.dissect import inference_report as told

    _print_result(result, told.format_text, told.build_document, page, as_json)


@dissect.command()
def training(
    model: Annotated[str, Option(help="Such as llama-2-7b, or a Hugging Face config.json; weights are random.")],
    technique: Annotated[
        list[str] | None,
        Option(
            help="naive, recompute, flash, quantised, zero1, zero2, zero3, offload, lora, qlora; several joined by + "
            "(zero3+offload, or F+R+Z3O as in arXiv 2311.03687). May be repeated; naive by default."
        ),
    ] = None,
    layers: Annotated[int | None, Option(min=1, help="Of the model's; all by default.")] = None,
    batch: Annotated[int, Option(min=1, help="Sequences per step, of all processes.")] = 2,
    sequence: Annotated[int, Option(min=2, help="Tokens per sequence.")] = 350,
    processes: Annotated[
        int | None, Option(min=1, help="That share the batch: gloo, or NCCL. Default: 2 for ZeRO, else 1.")
    ] = None,
    device: _Device = "cpu",
    dtype: _Dtype = "bf16",
    repeats: _Repeats = 3,
    warmup: _Warmup = 2,
    threads: _Threads = None,
    hardware: _Hardware = None,
    page: _Page = None,
    as_json: _Json = False,
) -> None:
    """Time one training step by phase and account for its memory by kind, beside what the hardware model predicts.

    Exit codes: 0 measured, 2 usage, also where no technique can be measured on this device.
    """
    with _usage_errors():
        from loadgen.dissect.techniques import parse_technique
        from loadgen.dissect.training import TrainingSpec
        from loadgen.dissect.training import measure_training as measure

        result = measure(
            TrainingSpec(
                model=model,
                techniques=tuple(map(parse_technique, technique or ["naive"])),
                layers=layers,
                batch=batch,
                sequence=sequence,
                processes=processes,
                device=device,
                dtype=dtype,
                repeats=repeats,
                warmup=warmup,
                threads=threads,
                hardware=hardware,
            )
        )
    from loadgen.dissect import training_report as told

    _print_result(result, told.format_text, told.build_document, page, as_json)


def _print_result(found: Any, text: Any, document: Any, page: Path | None, as_json: bool) -> None:
    """What was found, as JSON, or as text and a page."""
    if as_json:
        from msgspec import json

        print(json.format(json.encode(found)).decode())
    else:
        print(text(found))
    if page:
        from loadgen.analysis.report.page import render

        try:
            page.write_text(render(cast("Document", document(found))), "utf-8")
        except OSError as problem:
            raise OutputError(
                f"cannot write {page}: {problem.strerror}", "Name a file in a folder that exists."
            ) from None
        if not as_json:
            print(f"\nPage: {page}")


def _parse_batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(each) for each in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadParameter(f"{text!r}: write batch sizes as 1,8", param_hint="--batch")
    return sizes


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What is missing, or wrong with models and devices, is wrong with the command line."""
    import os

    from loadgen.dissect import check_installed
    from loadgen.servers.hardware import HardwareError

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler logs each start to stderr
    check_installed("torch")
    try:
        yield
    except HardwareError as problem:
        raise PlanError(str(problem)) from None
