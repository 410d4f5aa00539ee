"""The command `sweep`: find the largest load at which a server meets its objectives.

`write_frontier` writes and prints the results of one or more sweeps. The command `report` uses this function too.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from typer import Exit, Option

from loadgen import errors
from loadgen.cli.options import (
    LOAD,
    OUT_NAMES,
    OUTPUT,
    Catalog,
    PlanFile,
    fraction,
    merge_settings,
    run_command,
    seconds,
)
from loadgen.cli.output import Output, Quiet, print_document, print_error
from loadgen.cli.simulate import Changes, Format, Hardware, KvTokens, RunningLimit, StepTokens, Tp, TwinFile, Vintage
from loadgen.cli.streams import results_are_kept
from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.prices import Price
    from loadgen.analysis.sweep import SweepResult
    from loadgen.plan import Plan
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.sweep.measure import SweepTargets

OBJECTIVE_HELP = (
    "Objective to meet: 'ttft.p99 < 500ms'. Repeatable. A load with more than 1% of incomplete or rejected requests "
    "fails too, unless an objective limits these requests."
)
VIRTUAL_HELP = (
    "GPU to simulate instead of a server: H100. The simulation runs in virtual time, with the model of --model. `twin` "
    "simulates the file of --twin."
)
Over = Literal["rate", "concurrency", "sessions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCommandOptions:
    """The options of `loadgen sweep` that are not fields of the Plan."""

    objectives: Annotated[list[str] | None, Option("--objective", metavar="EXPR", help=OBJECTIVE_HELP, **LOAD)] = None
    over: Annotated[
        Over,
        Option(metavar="NAME", help="Rate, concurrency or sessions; rates are Poisson arrivals.", **LOAD),
    ] = "rate"
    rates: Annotated[
        str | None, Option(metavar="R,R,...", help="Measure these rates: 1,2,4,...,64. Replaces the search.", **LOAD)
    ] = None
    concurrency: Annotated[
        str | None,
        Option(metavar="N,N,...", help="Measure these concurrencies: 1,2,4,...,256. Replaces the search.", **LOAD),
    ] = None
    start: Annotated[
        float | None,
        Option(
            min=1e-3,
            help="First load of a search with objectives. Default: chosen by a pilot, or predicted by a twin.",
            **LOAD,
        ),
    ] = None
    precision: Annotated[
        float,
        Option(
            parser=fraction,
            metavar="FRACTION",
            help="Precision of the capacity (default 10%). The sweep ends when the capacity is known this precisely.",
            **LOAD,
        ),
    ] = 0.1
    confidence: Annotated[
        float,
        Option(
            parser=fraction,
            metavar="FRACTION",
            help="Confidence of the interval. The interval is that of the capacity.",
            **LOAD,
        ),
    ] = 0.95
    max_runs: Annotated[int, Option(min=1, max=100, help="Maximum number of runs.", **LOAD)] = 8
    max_time_s: Annotated[
        float | None,
        Option("--max-time", parser=seconds, metavar="T", help="Maximum duration of this command.", **LOAD),
    ] = None
    virtual: Annotated[str | None, Option(metavar="GPU", help=VIRTUAL_HELP, rich_help_panel="Server")] = None
    twin: TwinFile = None
    tp: Tp = None
    format_name: Format = None
    vintage: Vintage = None
    kv_tokens: KvTokens = None
    running_limit: RunningLimit = None
    step_tokens: StepTokens = None
    hardware: Hardware = None
    changes: Changes = None
    gpu_hour_cost: Annotated[
        str | None,
        Option(
            metavar="PRICE",
            help="Price of a GPU per hour, such as '$2.50'. The report then shows the cost of tokens.",
            **OUTPUT,
        ),
    ] = None
    gpus: Annotated[
        int | None, Option(min=1, help="Number of GPUs of the server. Default: as detected by the runs.", **OUTPUT)
    ] = None
    out: Annotated[
        Path | None,
        Option(
            *OUT_NAMES,
            metavar="FOLDER",
            help="Folder of the sweep. Default: runs/<time>-<server>-<label>.",
            **OUTPUT,
        ),
    ] = None
    resume: Annotated[bool, Option("--resume", help="Continue the sweep in the folder of --out.", **OUTPUT)] = False
    as_json: Annotated[bool, Option("--json", help="Print sweep.json and nothing else.", **OUTPUT)] = False
    quiet: Quiet = False


def run_sweep(settings: dict[str, Any], options: SweepCommandOptions) -> NoReturn:
    """Run a new sweep, or continue an earlier one, and report the results."""
    from loadgen.engine.resolve_server import command_with_seed, require_server, with_seed
    from loadgen.folders import run_folder
    from loadgen.servers.auth import redact
    from loadgen.studies.simulate import VirtualClock
    from loadgen.studies.sweep import with_recorded_seed
    from loadgen.studies.sweep.measure import (
        StepRunner,
        class_settings,
        measure_function,
        new_sweep,
        plan_of_steps,
        predict_sweep,
    )

    hour_cost = _hour_cost(options.gpu_hour_cost)
    targets = _targets(settings, options)
    model = _server_model(options, settings.get("model"))
    if model and model.twin:
        settings = {"server": model.twin.server} | settings
    if options.start is not None and not targets.objectives:
        raise PlanError(
            "--start needs an objective", "Leave --start out: without --objective, a pilot chooses the loads."
        )
    output = Output(as_json=options.as_json, quiet=options.quiet)
    plan = plan_of_steps(settings, targets, output.say)
    _check_sessions(plan, options)
    if options.resume and options.out is None:
        raise PlanError("--resume needs --out", "Name the folder of the sweep: --out FOLDER")
    speed = 1.0
    if not options.virtual:
        require_server(plan, "sweep")
        if options.resume and options.out is not None:
            plan = with_recorded_seed(plan, options.out)
        plan = with_seed(plan, output.say)
        speed = _clock_speed(plan, options)
    virtual_model = model if options.virtual else None
    search_settings: dict[str, Any] = {
        "precision": options.precision,
        "confidence": options.confidence,
        "start": options.start,
        "hour": hour_cost and hour_cost.amount,
        "currency": hour_cost and hour_cost.currency,
        "gpus": options.gpus,
    }
    search_settings |= class_settings(plan, targets.over, options.start)
    command = redact(command_with_seed(["loadgen", *sys.argv[1:]], plan))
    with run_folder(options.out, plan.server, plan.label) as folder:
        adaptive = not (settings.get("n") or settings.get("duration_s"))
        sweep = new_sweep(plan, folder, targets, virtual_model, adaptive=adaptive, speed=speed)
        clock = VirtualClock() if virtual_model else None
        if model and not options.virtual:
            search_settings["foreseen"] = predict_sweep(sweep, targets, model, search_settings)
        output.say(f"sweep over {targets.over}{', virtual time' if virtual_model else ''}: {folder}")
        with output.progress(None, plain=False) as on_progress:
            StepRunner(
                sweep=sweep,
                targets=targets,
                search_settings=search_settings,
                measure=measure_function(virtual_model, command, output.say, clock),
                say=output.say,
                on_progress=on_progress,
                max_runs=options.max_runs,
                max_time_s=options.max_time_s,
                resume=options.resume,
                clock=clock or time.monotonic,
            ).run()
        results_are_kept(folder, text_only=not options.as_json)
        result = write_frontier([folder], output, folder / "frontier.html")[0]
        if result.ended == "interrupted":
            print_error(f"interrupted; to continue, repeat the command with --resume --out {folder}")
        raise Exit(exit_code(result))


def _targets(settings: dict[str, Any], options: SweepCommandOptions) -> SweepTargets:
    """Return the objectives and the loads of the sweep.

    The objectives are those of --objective, or else those of the plan file. The objectives in the file's `[[traffic]]`
    tables apply in both cases.
    """
    from loadgen.plan import Plan
    from loadgen.studies.sweep import default_duration
    from loadgen.studies.sweep.measure import parse_targets

    over = "concurrency" if options.over == "sessions" else options.over
    has_classes = settings.get("traffic") is not None
    objectives = options.objectives or settings.get("objectives") or ()
    if has_classes:
        plan = Plan(**{**settings, **default_duration(settings), "objectives": ()})
        objectives = tuple(dict.fromkeys((*objectives, *plan.objectives)))
    return parse_targets(objectives, options.rates, options.concurrency, over, parts=has_classes)


def _check_sessions(plan: Plan, options: SweepCommandOptions) -> None:
    """Raise PlanError if the sweep varies the number of sessions (`--over sessions`) and the plan does not allow this.

    The plan must have a workload with sessions, and no classes of traffic.
    """
    if options.over != "sessions":
        return
    if plan.traffic:
        raise PlanError(
            "--over sessions: the plan has classes of traffic, whose loads are rates and numbers of clients",
            "Use --over rate to scale all rates, or --over concurrency to scale all closed loops.",
        )
    if not plan.uses_sessions:
        raise PlanError(
            f"--over sessions: --workload {plan.workload} has no sessions",
            "Use --over concurrency, or a workload with sessions, such as sessions:FILE or multi-turn:turns=4.",
        )


@run_command(
    SweepCommandOptions,
    without=("arrivals", "concurrency", "repeats"),
    defaults={"label": "sweep"},
    helps={"max_in_flight": "Limit in flight: further requests are DROPPED. A dropped request is never sent."},
)
def sweep(
    settings: dict[str, Any],
    plan: PlanFile = None,
    catalog: Catalog = None,
    **shared: Any,
) -> None:
    """Find the largest load that a server can carry.

    Without objectives, this is the largest request rate at which no queue grows. With --objective, it is the largest
    load at which all objectives hold. First, closed loops of a few seconds measure the full throughput of the server.
    Runs at rates near this throughput then find the capacity. Each run ends as soon as its result is clear. Exit codes:
    0 capacity known with the requested precision; 2 usage error; 3 server not reachable, not the expected one, or
    refusing every request; 4 the objectives do not hold at the lowest load; 5 the client was the limit; 6 capacity not
    known with the requested precision; 130 interrupted.
    """
    from loadgen.cli.run import check_plan_file
    from loadgen.load_shorthand import LOAD_KEYS
    from loadgen.studies.sweep import default_duration

    settings = merge_settings(plan, catalog, settings)
    settings.pop("repeats", None)
    if settings.get("traffic") is None:
        settings = {name: value for name, value in settings.items() if name not in LOAD_KEYS}
    elif plan is not None:
        check_plan_file(plan, settings | default_duration(settings))
    run_sweep(settings, SweepCommandOptions(**shared))


def exit_code(result: SweepResult) -> int:
    """Return the exit code of a sweep."""
    if result.ended == "interrupted":
        return errors.EXIT_INTERRUPTED
    if result.ended == "client":
        return errors.EXIT_CLIENT_LIMITED
    unknown = result.state == "open" or (result.state is None and not result.fixed_loads)
    if result.ended in ("runs", "time") and unknown:  # the capacity is not known precisely enough
        return errors.EXIT_INCONCLUSIVE
    return errors.EXIT_ASSERTION if result.state == "below" else errors.EXIT_OK


def write_frontier(folders: Sequence[Path], output: Output, page: Path) -> list[SweepResult]:
    """Write the results of sweeps to files, print them as `output` requires, and return them.

    Each folder in `folders` contains one sweep, and gets a file sweep.json. `page` is the file of one HTML page about
    all sweeps.

    Raises PlanError if the sweeps ran at different speeds. For example, a sweep on a simulated server with `--speed 5`
    cannot share a page with a sweep on a real server. Raises OutputError if a file cannot be written.
    """
    from loadgen.analysis.sweep.document import terminal_document
    from loadgen.studies.sweep.result import read_sweep, write_sweeps

    results = [read_sweep(folder) for folder in folders]
    speeds = sorted({result.speed for result in results})
    if len(speeds) > 1:
        raise PlanError(
            f"these sweeps ran at different speeds ({' and '.join(f'{speed:g}' for speed in speeds)} times real time) "
            "and cannot share a page",
            "Sweep each simulated server at --speed 1.",
        )
    names = [result.name for result in results]
    sweeps = {}
    for folder, result in zip(folders, results, strict=True):
        name = result.name if names.count(result.name) == 1 else f"{result.name} ({folder.name})"
        sweeps[name] = (folder, result)
    texts = write_sweeps(sweeps, page)
    if output.as_json:
        print(texts[0] if len(texts) == 1 else json.dumps([json.loads(text) for text in texts], indent=2), end="")
    elif not output.quiet:
        for result in results:
            print()
            print_document(terminal_document(result))
        print(f"\n{page}")
    return results


def _server_model(options: SweepCommandOptions, model: str | None) -> ServerModel | None:
    """Return the server model that `options` describe, or None if they contain neither --virtual nor --twin.

    With --virtual, the sweep runs on this model instead of a server. With --twin alone, the sweep runs on the real
    server, and the model predicts the results. Raises PlanError for `--virtual twin` without --twin.
    """
    from loadgen.studies.simulate import ServerModel
    from loadgen.studies.twin import read_twin

    if options.virtual == "twin" and options.twin is None:
        raise PlanError("--virtual twin needs --twin", "Name its file: --twin twin.json; or a GPU: --virtual H100")
    if not (options.virtual or options.twin):
        return None
    return ServerModel(
        gpu=None if options.virtual == "twin" else options.virtual,
        model=model if options.virtual else None,
        tensor=options.tp,
        format=options.format_name,
        vintage=options.vintage,
        kv_tokens=options.kv_tokens,
        running_limit=options.running_limit,
        step_tokens=options.step_tokens,
        hardware=options.hardware,
        changes=tuple(options.changes or ()),
        twin=read_twin(options.twin) if options.twin else None,
    )


def _hour_cost(text: str | None) -> Price | None:
    """Parse the value of --gpu-hour-cost. Raises PlanError for a text that is not a price."""
    from loadgen.analysis.prices import HINT, parse_price

    try:
        return None if text is None else parse_price(text)
    except ValueError as error:
        raise PlanError(f"--gpu-hour-cost: {error}", HINT) from None


def _clock_speed(plan: Plan, options: SweepCommandOptions) -> float:
    """Return the clock speed of the plan's server, as a multiple of real time. The speed of a real server is 1.

    Raises PlanError for --gpu-hour-cost and --twin if the speed is not 1. A sweep measures in the time of the server's
    clock, but prices and the predictions of a twin are in real time.
    """
    from loadgen.engine.resolve_server import clock_speed

    needs_real_time = {"--gpu-hour-cost": options.gpu_hour_cost is not None, "--twin": options.twin is not None}
    used = [option for option, is_used in needs_real_time.items() if is_used]
    speed = clock_speed(plan)
    if speed != 1 and used:
        verb = "needs" if len(used) == 1 else "need"
        raise PlanError(
            f"{', '.join(used)} {verb} real time, but the clock of the simulated server runs {speed:g} times as fast",
            "Use a simulated server at --speed 1, or a real one.",
        )
    return speed
