"""The command `simulate`: run a plan in virtual time, on a model of the server's scheduler and hardware."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from typer import Exit, Option

from loadgen.cli.options import ADVANCED, Catalog, PlanFile, RunFolder, merge_settings, run_command
from loadgen.cli.output import (
    AsJson,
    Assertions,
    Confidence,
    Goodput,
    Inconclusive,
    Junit,
    Output,
    Quiet,
    Report,
    objective_settings,
    write_results,
)

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel

SERVER: dict[str, Any] = {"rich_help_panel": "Server"}
SET_HELP = "GPU property, such as memory_bandwidth=8TB/s. It replaces the value of the hardware table. Repeatable."
TwinFile = Annotated[
    Path | None,
    Option("--twin", help="Twin to simulate: file of `loadgen twin fit`. Other options override its values.", **SERVER),
]
Tp = Annotated[int | None, Option(min=1, help="GPUs that share each layer (tensor parallel).", **SERVER)]
Format = Annotated[
    str | None,
    Option("--format", help="Weight format, such as fp8 (default bf16). All: bf16, fp8, int8, int4, nvfp4.", **SERVER),
]
Pp = Annotated[int, Option(min=1, help="Pipeline stages (pipeline parallel). Each has --tp GPUs.", **SERVER)]
GpusPerNode = Annotated[
    int, Option(min=1, help="GPUs per machine. Pipeline stages in different machines use InfiniBand.", **SERVER)
]
Ep = Annotated[
    int,
    Option(min=1, help="Expert-parallel groups of GPUs. Each holds whole experts; 1 splits every expert.", **SERVER),
]
DpAttention = Annotated[int, Option(min=1, help="Attention groups of --tp GPUs. They share the experts.", **SERVER)]
PrefillWorkers = Annotated[
    int,
    Option(
        min=0,
        help="Separate workers for prompts. Each has the GPUs of one replica (disaggregated serving).",
        **SERVER,
    ),
]
DecodeWorkers = Annotated[
    int | None, Option(min=1, help="Workers that decode (default 1). Needs --prefill-workers.", **SERVER)
]
DraftTokens = Annotated[
    int,
    Option(
        min=0, metavar="N", help="Tokens to draft per step. Speculative decoding or multi-token prediction.", **SERVER
    ),
]
Acceptance = Annotated[
    str | None,
    Option(
        metavar="P",
        help="Share of accepted tokens (default 0.55). Probability that a drafted token is accepted, or the folder "
        "of a run that measured it.",
        **SERVER,
    ),
]
CacheHitRate = Annotated[
    str | None,
    Option(
        metavar="P",
        help="Share of cached prompt tokens. A number such as 0.3, or the folder of a run that measured it.",
        **SERVER,
    ),
]
ChunkedPrefill = Annotated[
    Literal["mixed", "separate", "off"] | None,
    Option(
        metavar="M",
        help="Chunked prefill: mixed, separate or off. Chunks of prompts share steps with decoding, have separate "
        "steps, or prompts are computed whole. Default: as the server does.",
        **SERVER,
    ),
]
Vintage = Annotated[str | None, Option(help="Scheduler version: current (default) or 2023.", **SERVER)]
KvTokens = Annotated[
    int | None,
    Option(min=64, help="KV cache size in tokens. Default: all memory that the model leaves free.", **SERVER),
]
RunningLimit = Annotated[
    int | None, Option(min=1, help="Maximum sequences per scheduler step. Default: the server's limit.", **SERVER)
]
StepTokens = Annotated[
    int | None,
    Option(
        min=1,
        help="Maximum tokens per scheduler step. vLLM: max_num_batched_tokens; SGLang: chunked_prefill_size. Default: "
        "the server's limit.",
        **SERVER,
    ),
]
Hardware = Annotated[Path | None, Option(help="TOML file with additional GPUs and models.", **ADVANCED)]
Changes = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help=SET_HELP, **SERVER)]
TechnologyNode = Annotated[
    str | None,
    Option(metavar="NODE", help="Technology node of the GPU, such as 3nm. 12nm to 1nm.", **SERVER),
]
MemoryName = Annotated[
    str | None,
    Option(metavar="NAME", help="Memory of the GPU, such as HBM4. Number of stacks: '8 x HBM4'.", **SERVER),
]
NetworkName = Annotated[
    str | None,
    Option(metavar="NAME", help="Links of the GPU, such as 'NVLink 5'.", **SERVER),
]
REAL_SERVER_OPTIONS = (
    "url",
    "balance",
    "expect_replicas",
    "replicas_wait_s",
    "model",
    "workers",
    "api_key_env",
    "header",
    "proxy",
    "ca_file",
    "cert",
    "key",
    "insecure",
    "simulated",
    "real",
    "force",
    "over_limit",
    "speed",
    "stamps",
    "client_priority",
    "dcgm_url",
    "gpu",
    "gpu_model",
    "server_pid",
    "lengths",
    "extra_body",
    "image",
    "warmup",
)
"""Options of a run that do not apply to a simulation. They concern connections, bytes on the wire or this machine."""


def run_simulation(
    settings: dict[str, Any],
    *,
    twin: TwinFile = None,
    gpu: Annotated[
        str | None, Option(help="GPU, such as H100 (default A800). Others: A100, H200, B200, L40S, RTX4090.", **SERVER)
    ] = None,
    model: Annotated[str | None, Option(help="Model (default llama-2-7b), or a config.json.", **SERVER)] = None,
    tp: Tp = None,
    pp: Pp = 1,
    ep: Ep = 1,
    dp_attention: DpAttention = 1,
    gpus_per_node: GpusPerNode = 8,
    prefill_workers: PrefillWorkers = 0,
    decode_workers: DecodeWorkers = None,
    draft_tokens: DraftTokens = 0,
    acceptance: Acceptance = None,
    cache_hit_rate: CacheHitRate = None,
    chunked_prefill: ChunkedPrefill = None,
    format_name: Format = None,
    vintage: Vintage = None,
    kv_tokens: KvTokens = None,
    running_limit: RunningLimit = None,
    step_tokens: StepTokens = None,
    hardware: Hardware = None,
    changes: Changes = None,
    technology: TechnologyNode = None,
    memory: MemoryName = None,
    network: NetworkName = None,
    out: RunFolder = None,
    assertions: Assertions = None,
    confidence: Confidence = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Report = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> NoReturn:
    """Simulate all repeats of the plan and report the results."""
    from loadgen import folders
    from loadgen.cli.measured_shares import parse_acceptance, parse_cache_hit_rate
    from loadgen.cli.unused_options import check_worker_options
    from loadgen.plan import Plan
    from loadgen.servers.auth import redact
    from loadgen.servers.hardware.inference import ServingOptions
    from loadgen.servers.hardware.technology import scaling_changes
    from loadgen.servers.simulated.disaggregated_engine import WorkerPools
    from loadgen.studies import simulate
    from loadgen.studies.twin import read_twin

    check_worker_options(prefill_workers, decode_workers, chunked_prefill)
    fitted_twin = read_twin(twin) if twin else None
    settings |= objective_settings(settings, assertions, confidence, goodput)
    if fitted_twin:
        settings = {"server": fitted_twin.server} | settings
    plan = Plan(**settings)
    output = Output(
        as_json=as_json,
        quiet=quiet,
        assertions=plan.objectives,
        confidence=plan.confidence,
        goodput=plan.goodput,
        inconclusive=inconclusive,
        junit=junit,
    )
    model_of_server = simulate.ServerModel(
        gpu=gpu,
        model=model,
        tensor=tp,
        format=format_name,
        vintage=vintage,
        kv_tokens=kv_tokens,
        running_limit=running_limit,
        step_tokens=step_tokens,
        hardware=hardware,
        changes=(*scaling_changes(technology, memory, network), *(changes or ())),
        serving=ServingOptions(
            ep,
            dp_attention,
            draft_tokens,
            parse_acceptance(acceptance, draft_tokens),
            pp,
            gpus_per_node,
            parse_cache_hit_rate(cache_hit_rate),
            chunked_prefill or "",
        ),
        workers=WorkerPools(prefill_workers, decode_workers or 1) if prefill_workers else None,
        twin=fitted_twin,
    )
    command = redact(["loadgen", *sys.argv[1:]])
    output.say(f"SIMULATED (virtual) {simulate.describe_server(plan, model_of_server)}; nothing is sent")
    with folders.run_folder(out, plan.server, plan.label) as folder:
        if plan.repeats == 1:
            _simulate(plan, model_of_server, folder, command, output, drawn=report)
        else:
            with folders.FolderClaim(folder):
                for repeat in plan.each_repeat():
                    subfolder = folder / f"repeat-{repeat.repeat}"
                    _simulate(repeat, model_of_server, subfolder, command, output, drawn=report)
        raise Exit(write_results(output, folder, report=report))


def _simulate(
    plan: Plan, model_of_server: ServerModel, folder: Path, command: list[str], output: Output, *, drawn: bool
) -> None:
    """Simulate a run of `plan` with the server `model_of_server`, and write its run file to `folder`.

    The content of the run is also passed to `output`, which writes the results. `command` is the command line to store
    in the run file. `drawn` is True if the results will include an HTML page.
    """
    from loadgen.analysis.frame import FrameBuilder
    from loadgen.analysis.steady_window import with_window
    from loadgen.cli.twin import predict
    from loadgen.studies import simulate

    frame_builder = FrameBuilder()
    prediction = predict(plan, model_of_server) if model_of_server.twin else ()
    run = simulate.run(plan, model_of_server, folder, command, prediction, frame_builder.add, output.say)
    output.loaded(folder, run, with_window(frame_builder.frame(), run.header), drawn=drawn)


@run_command(run_simulation, without=REAL_SERVER_OPTIONS, defaults={"label": "simulated"})
def simulate(
    settings: dict[str, Any],
    plan: PlanFile = None,
    catalog: Catalog = None,
    **shared: Any,
) -> None:
    """Simulate a plan in virtual time, without a server.

    The server and its hardware are modelled, so that hours of load take seconds. Nothing is sent. Exit codes: 0 all
    requests complete; 1 some requests failed or were rejected or dropped, and no --assert judges that outcome; 2 usage
    error; 4 an --assert failed; 6 an --assert with --confidence is inconclusive.
    """
    run_simulation(merge_settings(plan, catalog, settings), **shared)
