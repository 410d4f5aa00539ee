"""`loadgen burst` and `loadgen run`: send the requests of a plan, from here or from several machines, and report; and
`loadgen worker`, the command of those machines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Argument, Exit, Option

from loadgen.cli.options import ADVANCED, OUTPUT, run_command, seconds
from loadgen.cli.output import AsJson, Assertions, Goodput, Inconclusive, Junit, Output, Quiet, Report, write_results
from loadgen.errors import PlanError

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.plan import Plan

BIND_HELP = (
    "With --distributed: where to listen for them. Other than this machine's loopback only with a token in "
    "LOADGEN_TOKEN."
)
JOIN_HELP = "With --distributed: how long to wait for them."


def run_load(
    settings: dict[str, Any],
    *,
    out: Annotated[
        Path | None, Option(help="Folder for this run; must be new. Default: runs/<time>-<server>-<label>.", **OUTPUT)
    ] = None,
    distributed: Annotated[
        bool, Option("--distributed", help="Split the run over machines on which `loadgen worker` runs.", **ADVANCED)
    ] = False,
    expect_workers: Annotated[
        int,
        Option(help="With --distributed: worker machines to wait for; --workers processes run on each.", **ADVANCED),
    ] = 0,
    bind: Annotated[str, Option(metavar="HOST[:PORT]", help=BIND_HELP, **ADVANCED)] = "127.0.0.1:5557",
    join_timeout_s: Annotated[
        float, Option("--join-timeout", parser=seconds, metavar="T", help=JOIN_HELP, **ADVANCED)
    ] = 600.0,
    assertions: Assertions = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Report = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> NoReturn:
    """Run the plan as often as it says, here or spread over machines; write and print its results, exit as they ask."""
    from loadgen import folders
    from loadgen.engine import prepare
    from loadgen.engine.resolve_server import with_detected_server
    from loadgen.plan import Plan

    settings |= {"objectives": assertions or settings.get("objectives"), "goodput": goodput or settings.get("goodput")}
    requested = Plan(**settings)
    judged: dict[str, Any] = {
        "assertions": requested.objectives,
        "inconclusive": inconclusive,
        "goodput": requested.goodput,
    }
    output = Output(as_json=as_json, quiet=quiet, junit=junit, **judged)
    requested = with_detected_server(requested)
    run_plan: Callable[..., Footer] = prepare.run
    if distributed:
        from loadgen.distributed import master
        from loadgen.distributed.protocol import address_of

        if expect_workers < 1:
            raise PlanError("--expect-workers is missing", "Say how many machines will run `loadgen worker`.")
        spread = master.MachinePlan(expect_workers, address_of(bind, "--bind"), join_timeout_s)
        run_plan = partial(master.run, spread=spread)
    with folders.run_folder(out, requested.server, requested.label) as folder:
        if requested.repeats == 1:
            _run(run_plan, requested, folder, output)
        else:
            with folders.FolderClaim(folder):
                _run_repeats(run_plan, requested, folder, output)
        raise Exit(write_results(output, folder, report=report))


@run_command(
    run_load,
    without=("arrivals", "duration_s", "max_in_flight", "window_s"),
    defaults={"n": 1000, "label": "burst"},
    helps={"n": "How many requests, all sent at once."},
)
def burst(settings: dict[str, Any], **shared: Any) -> None:
    """Send N requests all at once and report the results.

    Exit codes: 0 all complete, 1 some failed, were rejected or truncated and no --assert speaks of it, 2 usage, 3
    server not reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 6 an --assert is
    inconclusive, 130 interrupted.
    """
    run_load(settings, **shared)


@run_command(run_load)
def run(
    settings: dict[str, Any],
    plan: Annotated[Path | None, Argument(help="A plan file (TOML); options given here win over it.")] = None,
    catalog: Annotated[str | None, Option(help="A named workload, such as paper-burst: see docs.", **ADVANCED)] = None,
    **shared: Any,
) -> None:
    """Send requests as they are due and report the results.

    Exit codes: 0 all complete, 1 some failed, were rejected, truncated or dropped and no --assert speaks of it, 2
    usage, 3 server not reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 6 an --assert
    is inconclusive, 130 interrupted.
    """
    from loadgen.plan_fields import from_catalog, read_plan

    named = {} if catalog is None else from_catalog(catalog)
    run_load(named | ({} if plan is None else read_plan(plan)) | settings, **shared)


def worker(
    master: Annotated[str, Option(metavar="HOST[:PORT]", help="Where `loadgen burst --distributed` runs.")],
    out: Annotated[Path, Option(help="Folder in which part files lie until the master has them.")] = Path("runs"),
    stay: Annotated[bool, Option("--stay", help="Take part in one run after the other.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Take part in a run over several machines: prepare a share, start when all do, send back what was recorded.

    The token of the master has to be in LOADGEN_TOKEN, and the server's API key where it was on the master. Exit codes:
    0 everything delivered, or not needed; 2 usage, not let in, called off or not delivered; 3 server not reachable from
    here or not the one named; 130 interrupted.
    """
    from loadgen.distributed.protocol import address_of
    from loadgen.distributed.worker import serve

    output = Output(as_json=False, quiet=quiet)
    with output.progress(None) as show:
        raise Exit(serve(address_of(master, "--master"), out, stay=stay, say=output.say, on_progress=show))


def _run_repeats(run_plan: Callable[..., Footer], asked: Plan, folder: Path, output: Output) -> None:
    """Run every repeat in a subfolder, until one is interrupted."""
    for plan in asked.each_repeat():
        output.say(f"repeat {plan.repeat} of {plan.repeats}, seed {plan.seed}")
        if _run(run_plan, plan, folder / f"repeat-{plan.repeat}", output).interrupted:
            return


def _run(run_plan: Callable[..., Footer], asked: Plan, folder: Path, output: Output) -> Footer:
    from loadgen.servers.auth import redact

    command = redact(["loadgen", *sys.argv[1:]])
    with output.progress(asked) as show:
        return run_plan(asked, folder=folder, command=command, say=output.say, on_progress=show)
