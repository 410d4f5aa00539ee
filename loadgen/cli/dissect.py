"""The command `dissect`: measure the modules, operators and memory of a model or a training step on this machine.

`loadgen.dissect` makes the measurements and formats the results.
"""

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
    help="Profile a model or a training step on this machine. Shows modules, operators and memory. Needs the extra "
    "`dissect`.",
    **TYPER_DEFAULTS,
)

_Model = Annotated[str, Option(help="Model, such as llama-2-7b, or a Hugging Face config.json. Weights are random.")]
_Device = Annotated[str, Option(help="Device: cpu or cuda.")]
_Dtype = Annotated[str, Option(help="Data type: fp32, bf16 or fp16.")]
_Repeats = Annotated[int, Option(min=1, help="Number of measured steps.")]
_Warmup = Annotated[int, Option(min=0, help="Number of warm-up steps before the measurement.")]
_Threads = Annotated[
    int | None, Option(min=1, help="CPU threads per process. Default: all cores, divided by the number of processes.")
]
_Hardware = Annotated[Path | None, Option(help="TOML file with additional GPUs and models.")]
_Page = Annotated[Path | None, Option(help="Also write an HTML page to this file.")]
_Json = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]


@dissect.command()
def inference(
    model: _Model,
    layers: Annotated[
        int, Option(min=1, help="Number of layers to measure. The whole model is extrapolated from them.")
    ] = 2,
    batch: Annotated[str, Option(metavar="N,N", help="Batch sizes.")] = "1",
    input_tokens: Annotated[
        int, Option("--input", min=2, help="Tokens per prompt. For decode, tokens in the KV cache.")
    ] = 512,
    phase: Annotated[
        Literal["prefill", "decode"],
        Option(help="Phase to measure: prefill (the whole prompt) or decode (one further token)."),
    ] = "prefill",
    backward: Annotated[bool, Option("--backward", help="Also measure the backward pass.")] = False,
    flash: Annotated[
        bool, Option("--flash", help="Use fused attention (SDPA), which does not store attention scores.")
    ] = False,
    architecture: Annotated[
        str,
        Option(help="Transformer block: standard, or one that hides all-reduces (parallel, ladder, no-communication)."),
    ] = "standard",
    tp: Annotated[
        int, Option(min=1, help="Number of processes that share each layer (tensor parallel, gloo or NCCL).")
    ] = 1,
    link_delay_s: Annotated[
        float,
        Option(
            "--link-delay",
            parser=seconds_with_unit,
            metavar="T",
            help="Minimum duration of an all-reduce, such as 200us.",
        ),
    ] = "0s",  # type: ignore[assignment]  # typer parses a default that is text
    device: _Device = "cpu",
    dtype: _Dtype = "fp32",
    repeats: _Repeats = 5,
    warmup: _Warmup = 2,
    threads: _Threads = None,
    hardware: _Hardware = None,
    page: Annotated[
        Path | None, Option(help="Also write an HTML page with the time per module and the roofline.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Time the modules and operators of one step.

    The times are compared with the limits of the device. The model has its real shape and random weights. Exit codes: 0
    measured, 2 usage error.
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
    from loadgen.dissect.inference_report import build_document, format_text

    _print_result(result, format_text, build_document, page, as_json)


@dissect.command()
def training(
    model: _Model,
    technique: Annotated[
        list[str] | None,
        Option(
            help="Training technique: naive (default), recompute, flash, quantised, zero1, zero2, zero3, offload, lora "
            "or qlora. Combine several with + (zero3+offload, or F+R+Z3O as in arXiv 2311.03687). Repeatable."
        ),
    ] = None,
    layers: Annotated[int | None, Option(min=1, help="Number of layers. Default: all layers of the model.")] = None,
    batch: Annotated[int, Option(min=1, help="Sequences per step, over all processes.")] = 2,
    sequence: Annotated[int, Option(min=2, help="Tokens per sequence.")] = 350,
    processes: Annotated[
        int | None,
        Option(min=1, help="Number of processes that share the batch (gloo or NCCL). Default: 2 for ZeRO, else 1."),
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
    """Measure the time and memory of one training step.

    The results are compared with the hardware model. Time is listed by phase, memory by purpose. Exit codes: 0
    measured; 2 usage error, or no technique can be measured on this device.
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
    from loadgen.dissect.training_report import build_document, format_text

    _print_result(result, format_text, build_document, page, as_json)


def _print_result(result: Any, text: Any, document: Any, page: Path | None, as_json: bool) -> None:
    """Print the result as JSON or text, and write the page if requested.

    `text` and `document` are the functions that format the result.
    """
    if as_json:
        from msgspec import json

        print(json.format(json.encode(result)).decode())
    else:
        print(text(result))
    if page:
        from loadgen.analysis.report.page import render

        try:
            page.write_text(render(cast("Document", document(result))), "utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {page}: {error.strerror}", "Name a file in an existing folder.") from None
        if not as_json:
            print(f"\nPage: {page}")


def _parse_batch_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise BadParameter(f"{text!r}: write batch sizes as 1,8", param_hint="--batch")
    return sizes


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Context in which a HardwareError becomes a PlanError, so that the command reports a usage error.

    Before the context begins, this function checks that torch is installed.
    """
    import os

    from loadgen.dissect import check_installed
    from loadgen.servers.hardware import HardwareError

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch.profiler logs each start to stderr
    check_installed("torch")
    try:
        yield
    except HardwareError as error:
        raise PlanError(str(error)) from None
