"""The commands `burst`, `run` and `worker`.

`burst` and `run` send the requests of a plan, from this machine or from several, and report the results. `worker` runs
on each additional machine.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from typer import Exit, Option

from loadgen.cli.options import ADVANCED, OUTPUT, Catalog, PlanFile, RunFolder, merge_settings, run_command, seconds
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
    planned_end,
    write_results,
)
from loadgen.errors import EXIT_INTERRUPTED, PlanError

if TYPE_CHECKING:
    from loadgen.analysis.run.runfile import Footer
    from loadgen.engine.client_health import LiveCounters
    from loadgen.live.page import LivePage
    from loadgen.plan import Plan

BIND_HELP = (
    "With --distributed: address on which to listen for worker machines. Addresses other than loopback need a token in "
    "LOADGEN_TOKEN."
)
ALONE_HELP = (
    "With [[traffic]] tables: run each class by itself first, and show how much the classes slow each other down. The "
    "runs of single classes are in FOLDER-alone."
)
JOIN_HELP = "With --distributed: how long to wait until all worker machines have connected."


def run_load(
    settings: dict[str, Any],
    *,
    out: RunFolder = None,
    distributed: Annotated[
        bool,
        Option("--distributed", help="Split the run over several machines that run `loadgen worker`.", **ADVANCED),
    ] = False,
    expect_workers: Annotated[
        int,
        Option(
            help="With --distributed: number of worker machines. Each runs --workers processes.",
            **ADVANCED,
        ),
    ] = 0,
    bind: Annotated[str, Option(metavar="HOST[:PORT]", help=BIND_HELP, **ADVANCED)] = "127.0.0.1:5557",
    join_timeout_s: Annotated[
        float, Option("--join-timeout", parser=seconds, metavar="T", help=JOIN_HELP, **ADVANCED)
    ] = 600.0,
    assertions: Assertions = None,
    confidence: Confidence = None,
    inconclusive: Inconclusive = None,
    goodput: Goodput = None,
    junit: Junit = None,
    report: Report = True,
    live: Annotated[
        bool,
        Option("--live", help="Show the progress on a local web page. The page is saved as live.html.", **OUTPUT),
    ] = False,
    live_port: Annotated[int, Option(help="With --live: port of the page. 0 means any free port.", **ADVANCED)] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    alone: bool = False,
) -> NoReturn:
    """Run all repeats of the plan, on this machine or on several, and report the results."""
    from loadgen import folders
    from loadgen.engine import prepare
    from loadgen.engine.resolve_server import command_with_seed, with_detected_server
    from loadgen.load_shorthand import ONE_AT_A_TIME
    from loadgen.plan import Plan
    from loadgen.servers.auth import redact

    settings |= objective_settings(settings, assertions, confidence, goodput)
    plan = Plan(**settings)
    if alone:
        _check_alone(plan, distributed=distributed)
    is_default_load = plan.arrivals == ONE_AT_A_TIME and not settings.keys() & {"arrivals", "concurrency"}
    output = Output(
        as_json=as_json,
        quiet=quiet,
        assertions=plan.objectives,
        confidence=plan.confidence,
        goodput=plan.goodput,
        inconclusive=inconclusive,
        junit=junit,
    )
    if is_default_load:
        output.say("no --rate and no --concurrency: sending one request at a time, as with --concurrency 1")
    plan = with_detected_server(plan, output.say)
    run_plan: Callable[..., Footer] = prepare.run
    if distributed:
        from loadgen.distributed import master
        from loadgen.distributed.protocol import address_of

        if expect_workers < 1:
            raise PlanError(
                "--expect-workers is missing", "Give the number of machines that will run `loadgen worker`."
            )
        spread = master.MachinePlan(expect_workers, address_of(bind, "--bind", listening=True), join_timeout_s)
        run_plan = partial(master.run, spread=spread)
    with folders.run_folder(out, plan.server, plan.label) as folder, _live_page(live, live_port, output) as page:
        with folders.FolderClaim(folder):  # a folder in use is refused before the server is asked
            plan = prepare.with_seed_of_run(plan, output.say)
        run_plan = partial(run_plan, command=redact(command_with_seed(["loadgen", *sys.argv[1:]], plan)))
        if alone:
            run_plan = partial(run_plan, alone=_run_alone(run_plan, plan, folder, output))
        if plan.repeats == 1:
            _run(run_plan, plan, folder, output, page)
        else:
            with folders.FolderClaim(folder):
                _run_repeats(run_plan, plan, folder, output, page)
        raise Exit(write_results(output, folder, report=report))


@run_command(
    run_load,
    without=("arrivals", "duration_s", "concurrency", "max_in_flight", "window_s"),
    defaults={"label": "burst"},
    helps={"n": "Number of requests, all at once. Default: 1000, or every prompt of a file."},
)
def burst(settings: dict[str, Any], **shared: Any) -> None:
    """Send N requests all at once and report the results.

    Exit codes: 0 all requests complete; 1 some requests failed or were rejected or truncated, and no --assert judges
    that outcome; 2 usage error; 3 server not reachable or not the expected one; 4 an --assert failed; 5 the client was
    the limit; 6 an --assert with --confidence is inconclusive; 130 interrupted.
    """
    from loadgen.plan import BURST_REQUESTS, names_file

    if not names_file(settings.get("workload", "")):
        settings.setdefault("n", BURST_REQUESTS)
    if settings.get("rate") is None:
        settings["arrivals"] = "burst"  # a file of requests may have times, which a burst ignores
    run_load(settings, **shared)


@run_command(run_load)
def run(
    settings: dict[str, Any],
    plan: PlanFile = None,
    catalog: Catalog = None,
    alone: Annotated[bool, Option("--alone", help=ALONE_HELP, **ADVANCED)] = False,
    **shared: Any,
) -> None:
    """Run a load test with any arrival process.

    Exit codes: 0 all requests complete; 1 some requests failed or were rejected, truncated or dropped, and no --assert
    judges that outcome; 2 usage error; 3 server not reachable or not the expected one; 4 an --assert failed; 5 the
    client was the limit; 6 an --assert with --confidence is inconclusive; 130 interrupted.
    """
    settings = merge_settings(plan, catalog, settings)
    if plan is not None:
        check_plan_file(plan, settings)
    run_load(settings, alone=alone, **shared)


def check_plan_file(file: Path, settings: dict[str, Any]) -> None:
    """Raise PlanError for mistakes in the `[[traffic]]` tables of a plan file. The message names the file."""
    from loadgen.plan import Plan

    if "traffic" not in settings:
        return
    try:
        Plan(**settings)
    except PlanError as error:
        raise PlanError(f"{file}:\n{error}", error.hint) from None


def worker(
    master: Annotated[
        str, Option(metavar="HOST[:PORT]", help="Address of the machine that runs `loadgen burst --distributed`.")
    ],
    out: Annotated[
        Path, Option(help="Folder for the records of this worker until the master has received them.")
    ] = Path("runs"),
    stay: Annotated[bool, Option("--stay", help="After each run, wait for the next one.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Send a share of the load of a distributed run.

    The worker prepares its share, starts at the same instant as all other workers, and sends its records to the master.
    Set LOADGEN_TOKEN to the token of the master, and set the server's API key as on the master. Exit codes: 0 all
    records delivered, or none needed; 2 usage error, refused by the master, run cancelled, or records not delivered; 3
    server not reachable from this machine or not the expected one; 130 interrupted.
    """
    from loadgen.distributed.protocol import address_of
    from loadgen.distributed.worker import serve

    output = Output(as_json=False, quiet=quiet)
    with output.progress(None) as show:
        raise Exit(serve(address_of(master, "--master"), out, stay=stay, say=output.say, on_progress=show))


@contextlib.contextmanager
def _live_page(live: bool, port: int, output: Output) -> Iterator[LivePage | None]:
    """Serve the live page while this context is open, and print its address. Yield None without `--live`."""
    if not live:
        yield None
        return
    from loadgen.live.page import open_page

    with open_page(port) as page:
        output.say(f"live page: {page.url}")
        yield page


def _check_alone(plan: Plan, *, distributed: bool) -> None:
    """Raise PlanError if `--alone` cannot be used with this plan or with `--distributed`."""
    from loadgen.engine.alone_runs import check_alone

    check_alone(plan, "--alone")
    if distributed:
        raise PlanError("--alone cannot be used with --distributed", "Leave one of them out.")


def _run_alone(run_plan: Callable[..., Footer], plan: Plan, folder: Path, output: Output) -> dict[str, str]:
    """Run each class of traffic by itself. Return the folders of these runs by class, relative to `folder`."""
    from loadgen.engine.alone_runs import run_alone

    def run_class(alone: Plan, subfolder: Path) -> Footer:
        return _run(run_plan, alone, subfolder, output, None)

    result = run_alone(plan, folder, run_class, output.say)
    if result is None:
        raise Exit(EXIT_INTERRUPTED)
    return result


def _run_repeats(
    run_plan: Callable[..., Footer], plan: Plan, folder: Path, output: Output, page: LivePage | None
) -> None:
    """Run each repeat with `run_plan`, in a separate subfolder. Stop after a repeat that is interrupted."""
    for repeat in plan.each_repeat():
        output.say(f"repeat {repeat.repeat} of {repeat.repeats}, seed {repeat.seed}")
        if _run(run_plan, repeat, folder / f"repeat-{repeat.repeat}", output, page).interrupted:
            return


def _run(run_plan: Callable[..., Footer], plan: Plan, folder: Path, output: Output, page: LivePage | None) -> Footer:
    """Run one plan with progress on stderr and on the live page. Return the footer of its run file."""
    with output.progress(plan) as show:
        if page is None:
            return run_plan(plan, folder=folder, say=output.say, on_progress=show)
        page.begin(planned_end(plan))

        def say(line: str) -> None:
            output.say(line)
            page.name(line)

        def show_everywhere(phase: str, counts: LiveCounters) -> str | None:
            page.show(phase, counts)
            return show(phase, counts)

        footer = run_plan(plan, folder=folder, say=say, on_progress=show_everywhere)
        output.say(str(page.save(folder)))
        return footer
