"""`loadgen run`: any arrival process and any workload, from options, a plan file or the catalog."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Argument, Exit, Option

from loadgen.cli.assertions import Assertions, Goodput, Junit
from loadgen.cli.distributed import BIND, JOIN_TIMEOUT_S, Bind, Distributed, ExpectWorkers, JoinTimeout, asked_of
from loadgen.cli.output import Output, finish, output_of
from loadgen.cli.quantities import seconds, span
from loadgen.cli.telemetry import DcgmUrl, Gpu, MetricsEvery, ServerPid

if TYPE_CHECKING:
    from loadgen.distributed.master import Asked
    from loadgen.plan import Plan
    from loadgen.runfile import Footer

Force = Annotated[bool | None, Option("--force", help="Measure a version of a server that is known to mislead.")]
SERVERS = "vllm, tgi, lightllm or openai"

Arrivals = Annotated[
    str | None,
    Option(
        help="When requests are due: burst, burst:N/T, constant:R, poisson:R, gamma:R,cv=C, ramp:A..B/T, "
        "steps:R1@T1,R2@T2,..., closed:N[,think=S] or trace:FILE."
    ),
]
Workload = Annotated[
    str | None,
    Option(help="What is asked: synthetic, shared-prefix:groups=G,tokens=P, sharegpt:FILE, jsonl:FILE, ..."),
]


def run(
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    catalog: Annotated[str | None, Option(help="A named workload, such as paper-burst: see docs.")] = None,
    server: Annotated[str | None, Option(help=f"Which server answers: {SERVERS}.")] = None,
    arrivals: Arrivals = None,
    n: Annotated[int | None, Option("--n", help="How many requests.")] = None,
    duration_s: Annotated[float | None, Option("--duration", parser=seconds, help="Nothing is due later.")] = None,
    workload: Workload = None,
    input_tokens: Annotated[
        str | None, Option(help="Prompt lengths: a number, uniform:A..B, lognormal:mean=M,cv=C, empirical:FILE, ...")
    ] = None,
    output_tokens: Annotated[str | None, Option(help="Tokens to generate, likewise.")] = None,
    warmup: Annotated[int | None, Option(help="Requests to send before the clock starts; in no figure.")] = None,
    max_in_flight: Annotated[int | None, Option(help="Past it a request that is due is dropped, and counted.")] = None,
    window_s: Annotated[
        Any, Option("--window", parser=span, metavar="T..T", help="What the figures are of; else chosen.")
    ] = None,
    url: Annotated[str | None, Option(help="Where the server is; found as `loadgen burst` does otherwise.")] = None,
    endpoint: Annotated[str | None, Option(help="completions, chat or generate.")] = None,
    model: Annotated[str | None, Option(help="Model name to ask for.")] = None,
    seed: Annotated[int | None, Option(help="The same seed gives byte-identical requests and due instants.")] = None,
    workers: Annotated[int | None, Option(help="Processes that share the load.")] = None,
    timeout_s: Annotated[
        float | None, Option("--timeout", parser=seconds, metavar="T", help="After which one request is given up.")
    ] = None,
    repeats: Annotated[int | None, Option(help="Run it so often, each time with the next seed: see docs.")] = None,
    tokenizer: Annotated[Path | None, Option(help="A tokenizer.json to build prompts with.")] = None,
    api_key_env: Annotated[str | None, Option(help="Environment variable that holds the API key.")] = None,
    ca_file: Annotated[Path | None, Option(help="Certificate authorities for https, in PEM.")] = None,
    insecure: Annotated[bool | None, Option("--insecure", help="Do not check certificates.")] = None,
    metrics_every_s: MetricsEvery = None,
    dcgm_url: DcgmUrl = None,
    gpu: Gpu = None,
    server_pid: ServerPid = None,
    real: Annotated[bool | None, Option("--real", help="Never fall back to the simulated server.")] = None,
    force: Force = None,
    speed: Annotated[float | None, Option(help="How many times faster the built-in simulated server runs.")] = None,
    label: Annotated[str | None, Option(help="A word for the run's folder and report.")] = None,
    platform: Annotated[str | None, Option(help="What the server runs on, such as A800; stands by its name.")] = None,
    out: Annotated[Path | None, Option(help="Folder for this run; must be new.")] = None,
    distributed: Distributed = False,
    expect_workers: ExpectWorkers = 0,
    bind: Bind = BIND,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    assertions: Assertions = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Annotated[bool, Option("--report/--no-report", help="Write report.html.")] = True,
    as_json: Annotated[bool, Option("--json", help="Print summary.json and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
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
    spread = asked_of(distributed, expect_workers, bind, join_timeout_s)
    drive(plan_of(**settings), out, output, report=report, spread=spread)


def drive(asked: Plan, out: Path | None, output: Output, *, report: bool, spread: Asked | None = None) -> NoReturn:
    """Run a plan, as often as it says, here or spread over machines; write and print its results, exit as they ask."""
    from loadgen import api

    folder = out or api.default_folder(asked)
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


def _run(asked: Plan, folder: Path, output: Output, spread: Asked | None) -> Footer:
    from loadgen import api

    command = ["loadgen", *sys.argv[1:]]
    with output.progress(asked.n) as display:
        if spread is None:
            return api.run(asked, folder, command=command, say=output.say, on_progress=display.show)
        from loadgen.distributed import master

        return master.run(asked, spread, folder, command=command, say=output.say, on_progress=display.show)
