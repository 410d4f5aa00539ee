"""`loadgen simulate`: a plan in virtual time, on a model of the server's scheduler and of its hardware."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Argument, Exit, Option

from loadgen.cli.options import ADVANCED, OUTPUT, run_command
from loadgen.cli.output import AsJson, Assertions, Goodput, Inconclusive, Junit, Output, Quiet, Report, write_results

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel

SERVER: dict[str, Any] = {"rich_help_panel": "Server"}
SET_HELP = "What if: memory_bandwidth=8TB/s. May be repeated."
TwinFile = Annotated[
    Path | None,
    Option("--twin", help="What `loadgen twin fit` wrote: that server; options below then say what if.", **SERVER),
]
Tp = Annotated[int | None, Option(min=1, help="GPUs that share each layer (tensor parallel).", **SERVER)]
Format = Annotated[str | None, Option("--format", help="Of weights: bf16 (default), fp8, int8, int4, nvfp4.", **SERVER)]
Vintage = Annotated[
    str | None, Option(help="Which generation of the server's scheduler: current (default) or 2023.", **SERVER)
]
KvTokens = Annotated[
    int | None, Option(min=64, help="Tokens in the KV cache; by default what memory is left.", **SERVER)
]
RunningLimit = Annotated[int | None, Option(min=1, help="Sequences in a step; else the server's.", **SERVER)]
StepTokens = Annotated[int | None, Option(min=1, help="Tokens that a step may prefill; else the server's.", **SERVER)]
Hardware = Annotated[Path | None, Option(help="A TOML file with more GPUs and models.", **ADVANCED)]
Changes = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help=SET_HELP, **SERVER)]
REAL_SERVER_OPTIONS = (
    *("url", "model", "workers", "api_key_env", "header", "ca_file", "insecure", "real", "force", "over_limit"),
    *("speed", "stamps", "client_priority"),
    *("dcgm_url", "gpu", "gpu_model", "server_pid", "lengths", "extra_body", "image", "warmup"),
)
"""Options of a run that speak of connections, of bytes, or of this machine."""


def run_simulation(
    settings: dict[str, Any],
    *,
    twin: TwinFile = None,
    gpu: Annotated[
        str | None, Option(help="Such as A100, A800 (default), H100, H200, B200, L40S, RTX4090.", **SERVER)
    ] = None,
    model: Annotated[str | None, Option(help="Such as llama-2-7b (default), or a config.json.", **SERVER)] = None,
    tp: Tp = None,
    format_name: Format = None,
    vintage: Vintage = None,
    kv_tokens: KvTokens = None,
    running_limit: RunningLimit = None,
    step_tokens: StepTokens = None,
    hardware: Hardware = None,
    changes: Changes = None,
    out: Annotated[
        Path | None, Option(help="Folder for this run; must be new. Default: runs/<time>-<server>-<label>.", **OUTPUT)
    ] = None,
    assertions: Assertions = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Report = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> NoReturn:
    """Simulate the plan as often as it says; write and print its results, exit as they ask."""
    from loadgen import folders
    from loadgen.plan import Plan
    from loadgen.servers.auth import redact
    from loadgen.studies import simulate
    from loadgen.studies.twin import read

    known = read(twin) if twin else None
    settings |= {"objectives": assertions or settings.get("objectives"), "goodput": goodput or settings.get("goodput")}
    requested = Plan(**({"server": known.server} if known else {}) | settings)
    judged: dict[str, Any] = {
        "assertions": requested.objectives,
        "inconclusive": inconclusive,
        "goodput": requested.goodput,
    }
    output = Output(as_json=as_json, quiet=quiet, junit=junit, **judged)
    limits = (kv_tokens, running_limit, step_tokens)
    modelled = simulate.ServerModel(
        gpu, model, tp, format_name, vintage, *limits, hardware, tuple(changes or ()), known
    )
    command = redact(["loadgen", *sys.argv[1:]])
    output.say(f"SIMULATED (virtual) {simulate.described(requested, modelled)}; nothing is sent")
    with folders.run_folder(out, requested.server, requested.label) as folder:
        if requested.repeats == 1:
            _simulate(requested, modelled, folder, command, output, drawn=report)
        else:
            with folders.FolderClaim(folder):
                for plan in requested.each_repeat():
                    _simulate(plan, modelled, folder / f"repeat-{plan.repeat}", command, output, drawn=report)
        raise Exit(write_results(output, folder, report=report))


def _simulate(
    plan: Plan, modelled: ServerModel, folder: Path, command: list[str], output: Output, *, drawn: bool
) -> None:
    """Simulate one plan into a folder, and keep its figures for the report."""
    from loadgen.analysis.frame import FrameBuilder
    from loadgen.analysis.steady_window import with_window
    from loadgen.cli.twin import predict
    from loadgen.studies import simulate

    gathering = FrameBuilder()
    prediction = predict(plan, modelled) if modelled.twin else ()
    run = simulate.run(plan, modelled, folder, command, prediction, gathering.add, output.say)
    output.loaded(folder, run, with_window(gathering.frame(), run.header), drawn=drawn)


@run_command(run_simulation, without=REAL_SERVER_OPTIONS, defaults={"label": "simulated"})
def simulate(
    settings: dict[str, Any],
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    catalog: Annotated[str | None, Option(help="A named workload, such as paper-burst: see docs.", **ADVANCED)] = None,
    **shared: Any,
) -> None:
    """Run a plan in virtual time, on a model of server and hardware. It takes seconds for hours, and nothing is sent.

    Exit codes: 0 all complete, 1 some failed, were refused or dropped and no --assert speaks of it, 2 usage, 4 an
    --assert failed, 6 an --assert is inconclusive.
    """
    from loadgen.plan_fields import from_catalog, read_plan

    named = {} if catalog is None else from_catalog(catalog)
    run_simulation(named | ({} if plan is None else read_plan(plan)) | settings, **shared)
