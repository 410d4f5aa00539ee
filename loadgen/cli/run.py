"""`loadgen run`: any arrival process and any workload, from options, a plan file or the catalog."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from typer import Argument, Exit, Option

from loadgen.cli import options
from loadgen.cli.assertions import Assertions, Goodput, Junit
from loadgen.cli.distributed import BIND, JOIN_TIMEOUT_S, Bind, Distributed, ExpectWorkers, JoinTimeout, spread_of
from loadgen.cli.output import Output, finish, output_of

if TYPE_CHECKING:
    from loadgen.distributed.master import Spread
    from loadgen.plan import Plan
    from loadgen.runfile import Footer


def run(
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    catalog: Annotated[str | None, Option(help="A named workload, such as paper-burst: see docs.")] = None,
    server: Annotated[str | None, Option(help=f"Which server answers: {options.SERVERS}.")] = None,
    arrivals: options.Arrivals = None,
    n: options.N = None,
    duration_s: options.Duration = None,
    workload: options.Workload = None,
    input_tokens: options.InputTokens = None,
    output_tokens: options.OutputTokens = None,
    warmup: options.Warmup = None,
    max_in_flight: options.MaxInFlight = None,
    window_s: options.Window = None,
    url: options.Url = None,
    endpoint: options.Endpoint = None,
    model: options.Model = None,
    seed: options.Seed = None,
    workers: options.Workers = None,
    timeout_s: options.Timeout = None,
    repeats: options.Repeats = None,
    tokenizer: options.Tokenizer = None,
    api_key_env: options.ApiKeyEnv = None,
    ca_file: options.CaFile = None,
    insecure: options.Insecure = None,
    stamps: options.Stamps = None,
    metrics_every_s: options.MetricsEvery = None,
    dcgm_url: options.DcgmUrl = None,
    gpu: options.Gpu = None,
    server_pid: options.ServerPid = None,
    real: options.Real = None,
    force: options.Force = None,
    speed: options.Speed = None,
    label: options.Label = None,
    platform: options.Platform = None,
    out: options.Out = None,
    distributed: Distributed = False,
    expect_workers: ExpectWorkers = 0,
    bind: Bind = BIND,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    assertions: Assertions = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: options.Report = True,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
) -> None:
    """Send requests as they are due and report what came back.

    Exit codes: 0 all complete, 1 some failed, were truncated or dropped and no --assert speaks of it, 2 usage, 3 server
    not reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 130 interrupted.
    """
    given = locals()
    from loadgen.plan import Plan, from_catalog, plan_of, read_plan

    output = output_of(given)
    settings = {} if catalog is None else from_catalog(catalog)
    settings |= {} if plan is None else read_plan(plan)
    settings |= {name: value for name, value in given.items() if name in Plan.model_fields and value is not None}
    drive(plan_of(**settings), out, output, report=report, spread=spread_of(given))


def drive(asked: Plan, out: Path | None, output: Output, *, report: bool, spread: Spread | None = None) -> NoReturn:
    """Run a plan, as often as it says, here or spread over machines; write and print its results, exit as they ask."""
    from loadgen import prepare

    folder = out or prepare.default_folder(asked)
    if asked.repeats == 1:
        _run(asked, folder, output, spread)
        raise Exit(finish(output, folder, report=report))
    for plan in repeats_of(asked):
        output.say(f"repeat {plan.repeat} of {plan.repeats}, seed {plan.seed}")
        if _run(plan, folder / f"repeat-{plan.repeat}", output, spread).interrupted:
            break
    raise Exit(finish(output, folder, report=report))


def repeats_of(asked: Plan) -> list[Plan]:
    """The plan of each repeat: another seed for each, or a server's prefix cache would know the prompts already, and
    chance in lengths and gaps would be the same each time."""
    return [
        asked.model_copy(update={"repeat": place, "seed": asked.seed + place - 1})
        for place in range(1, asked.repeats + 1)
    ]


def _run(asked: Plan, folder: Path, output: Output, spread: Spread | None) -> Footer:
    from loadgen import prepare

    command = ["loadgen", *sys.argv[1:]]
    with output.progress(None if asked.of_sessions else asked.n) as display:
        if spread is None:
            return prepare.run(asked, folder, command=command, say=output.say, on_progress=display.show)
        from loadgen.distributed import master

        return master.run(asked, spread, folder, command=command, say=output.say, on_progress=display.show)
