"""The command `loadgen hardware`: compares GPUs, real or hypothetical, for a model. No server is contacted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Context, Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.cli.hardware_compare import bounds, compare
from loadgen.cli.hardware_output import INFERENCE, TRAINING, check_purpose, print_result, usage_errors

if TYPE_CHECKING:
    from loadgen.servers.hardware.technology_sweep import TechnologySweep

hardware = Typer(
    no_args_is_help=True,
    help="Compare GPUs, real or hypothetical, for a model. No server is contacted.",
    **TYPER_DEFAULTS,
)
Purpose = Literal["inference", "training"]
MODELS: dict[str, str] = {"inference": "llama-2-70b", "training": "gpt-3-175b"}
"""Default model of each purpose."""
Page = Annotated[Path | None, Option(metavar="FILE", help="Also write an HTML page to this file.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]

hardware.command()(compare)
hardware.command()(bounds)


@dataclass(frozen=True, slots=True)
class TechnologySweepOptions:
    """The options of `loadgen hardware sweep`. Each field has the name of its option."""

    purpose: Purpose
    gpu: str
    technology: str
    memory: str | None
    network: str | None
    model: str
    format: str
    tp: int
    pp: int
    dp: int
    framework: str
    input: int
    output: int
    in_flight: int
    batch: int
    sequence: int
    recomputation: Literal["none", "selective", "full"]
    flash: bool
    hardware: Path | None


@hardware.command()
def sweep(
    context: Context,
    gpu: Annotated[str, Option(help="GPU from which the hypothetical GPUs are derived.")] = "A100",
    technology: Annotated[
        str, Option(metavar="NODES", help="Technology nodes, such as 7nm,5nm or 12nm..1nm.")
    ] = "12nm..1nm",
    memory: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Memory generations, such as HBM3,'8 x HBM4'. All: HBM2, HBM2E, HBM3, HBM3E, HBM4, GDDR6, GDDR6X, "
            "GDDR7, LPDDR5X. Default: that of the GPU, and later ones of its family.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Networks, such as 'NVLink 4,NVLink 5+InfiniBand XDR'. Default: that of the GPU. All: NVLink 3 to 5, "
            "InfiniBand HDR, NDR and XDR, Ethernet 100G, 200G, 400G and 800G.",
        ),
    ] = None,
    purpose: Annotated[Purpose, Option("--for", help="Serve requests, or train the model.")] = "inference",
    model: Annotated[
        str | None,
        Option(help="Model, or a Hugging Face config.json. Default: llama-2-70b, or gpt-3-175b for training."),
    ] = None,
    format_name: Annotated[str, Option("--format", help="Format of weights: bf16, fp8, int8, int4, nvfp4.")] = "bf16",
    tp: Annotated[int, Option(min=1, help="GPUs that share each layer (tensor parallel).")] = 8,
    pp: Annotated[int | None, Option(min=1, help="Pipeline stages. Default: 1, or 8 for training.")] = None,
    framework: Annotated[
        str, Option(rich_help_panel=INFERENCE, help="Framework: vllm, sglang, trtllm, nim or kernels.")
    ] = "vllm",
    input_tokens: Annotated[int, Option("--input", min=1, rich_help_panel=INFERENCE, help="Tokens per prompt.")] = 512,
    output_tokens: Annotated[
        int, Option("--output", min=1, rich_help_panel=INFERENCE, help="Tokens per response.")
    ] = 128,
    in_flight: Annotated[int, Option(min=1, rich_help_panel=INFERENCE, help="Concurrent requests.")] = 16,
    dp: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Replicas (data parallel).")] = 8,
    batch: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Sequences per step.")] = 512,
    sequence: Annotated[int, Option(min=1, rich_help_panel=TRAINING, help="Tokens per sequence.")] = 2048,
    recomputation: Annotated[
        Literal["none", "selective", "full"],
        Option(rich_help_panel=TRAINING, help="Activations to recompute in the backward pass."),
    ] = "selective",
    flash: Annotated[
        bool, Option("--flash", rich_help_panel=TRAINING, help="Use fused attention, which stores no scores.")
    ] = False,
    hardware_file: Annotated[
        Path | None, Option("--hardware", help="TOML file with additional GPUs and models.")
    ] = None,
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Predict what another technology node, memory or network brings.

    Every node is combined with every memory and network. A cell contains a time (per output token, per prompt or per
    training step) and the largest part of this time: compute, memory, network or latency. Training uses sequence
    parallelism and ZeRO stage 1. The GPUs do not exist, so the predictions cannot be validated. Exit codes: 0 computed,
    2 usage error.
    """
    check_purpose(context, purpose)
    options = TechnologySweepOptions(
        purpose=purpose,
        gpu=gpu,
        technology=technology,
        memory=memory,
        network=network,
        model=model or MODELS[purpose],
        format=format_name,
        tp=tp,
        pp=pp or (8 if purpose == "training" else 1),
        dp=dp,
        framework=framework,
        input=input_tokens,
        output=output_tokens,
        in_flight=in_flight,
        batch=batch,
        sequence=sequence,
        recomputation=recomputation,
        flash=flash,
        hardware=hardware_file,
    )
    with usage_errors():
        result = _sweep(options)
    from loadgen.analysis.technology_sweep import build_document, format_sweep

    print_result(result, lambda: format_sweep(result), lambda: build_document(result), page, as_json)


def _sweep(options: TechnologySweepOptions) -> TechnologySweep:
    """Compute the sweep. Raises HardwareError for an unknown name, and if the model fits on none of the GPUs."""
    from loadgen.servers.hardware import HardwareError, gpu, model
    from loadgen.servers.hardware.roofline import make_deployment
    from loadgen.servers.hardware.technology import later_memories, memory_names, network_names, technology_names
    from loadgen.servers.hardware.technology_sweep import SweepAxes, sweep_inference, sweep_training
    from loadgen.servers.hardware.throughput_model import Load
    from loadgen.servers.hardware.training import TrainingSetup

    axes = SweepAxes(
        technology_names(options.technology),
        memory_names(options.memory) if options.memory else later_memories(gpu(options.gpu, options.hardware)),
        network_names(options.network) if options.network else [""],
    )
    if options.purpose == "inference":
        deployment = make_deployment(
            options.gpu,
            options.model,
            options.format,
            options.tp,
            options.pp,
            options.framework,
            file=options.hardware,
        )
        result = sweep_inference(deployment, Load(options.input, options.output, options.in_flight), axes)
    else:
        setup = TrainingSetup(
            gpu=gpu(options.gpu, options.hardware),
            model=model(options.model, options.hardware),
            batch=options.batch,
            sequence=options.sequence,
            tensor=options.tp,
            pipeline=options.pp,
            data=options.dp,
            number=options.format,
            recomputation=options.recomputation,
            sequence_parallel=True,
            flash=options.flash,
            zero=1,
        )
        result = sweep_training(setup, axes)
    if not any(point.times for point in result.points):
        raise HardwareError(result.points[-1].problem)
    return result
