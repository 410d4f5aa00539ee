"""`loadgen ui`: Locust's web page on this server, with exact latencies; or the same without a page."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from loadgen.cli import options
from loadgen.cli.assertions import Assertions, objectives_of
from loadgen.cli.output import Output, finish
from loadgen.cli.quantities import seconds
from loadgen.errors import EXIT_OK, EXIT_USAGE, PlanError

if TYPE_CHECKING:
    from loadgen.interactive.desk import Desk

LOCUSTFILE = Path(__file__).parents[1] / "interactive" / "locustfile.py"
OURS = (
    *("server", "url", "endpoint", "model", "input_tokens", "output_tokens", "workload", "seed", "tokenizer"),
    *("api_key_env", "ca_file", "insecure", "real", "force", "speed", "platform", "label", "out", "stamps"),
    *("request_timeout", "metrics_every", "dcgm_url"),
)
"""Options that our users add to Locust's, by the same names."""
LAST_ANSWERS_S = 60
"""Without a page, users finish what they have begun; after so long they are cut off."""


def ui(
    server: Annotated[str, Option(help=f"Which server answers: {options.SERVERS}.")],
    url: options.Url = None,
    endpoint: options.Endpoint = None,
    model: options.Model = None,
    input_tokens: Annotated[str, Option(help="Prompt lengths; the page's start form changes them.")] = "512",
    output_tokens: Annotated[
        str, Option("--output-tokens", "--n-tokens", help="Tokens to generate; the start form changes them.")
    ] = "128",
    workload: Annotated[
        str, Option(help="What is asked, as for `loadgen run`; the start form changes it.")
    ] = "synthetic",
    seed: Annotated[int, Option(help="The same seed gives the same prompts.")] = 0,
    users: Annotated[int, Option(help="Users to start with; the page changes them while they run.")] = 1,
    spawn_rate: Annotated[float, Option(help="Users started per second.")] = 10.0,
    run_time_s: Annotated[
        float | None, Option("--run-time", parser=seconds, metavar="T", help="After which the users stop.")
    ] = None,
    headless: Annotated[bool, Option("--headless", help="No page: start at once, stop after --run-time.")] = False,
    host: Annotated[str, Option(help="Address of the page; other machines reach only what is not loopback.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, Option(help="Port of the page.")] = 8089,
    locustfile: Annotated[Path | None, Option(help="Users of your own, from loadgen.interactive.user.")] = None,
    request_timeout: Annotated[
        float, Option("--timeout", parser=seconds, metavar="T", help="After which one request is given up.")
    ] = 600.0,
    tokenizer: options.Tokenizer = None,
    api_key_env: options.ApiKeyEnv = None,
    ca_file: options.CaFile = None,
    insecure: options.Insecure = None,
    stamps: options.Stamps = None,
    real: options.Real = None,
    force: options.Force = None,
    metrics_every: options.MetricsEvery = None,
    dcgm_url: options.DcgmUrl = None,
    speed: options.Speed = None,
    platform: options.Platform = None,
    label: Annotated[str, Option(help="A word for the runs' folders and reports.")] = "ui",
    out: Annotated[Path | None, Option(help="Folder of the first run, which must be new.")] = None,
    assertions: Assertions = None,
    report: Annotated[bool, Option("--report/--no-report", help="--headless: write report.html.")] = True,
    as_json: Annotated[bool, Option("--json", help="--headless: print summary.json and nothing else.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Explore by hand: Locust's web page, on loopback, with exact latencies. Each start makes a run of its own.

    Needs the extra `ui`. With --headless it ends as `loadgen burst` does. Exit codes: 0 ok, 1 some requests failed, 2
    usage, 3 server not reachable or not the one named, 4 an --assert failed, 5 the client was the limit, 130
    interrupted.
    """
    given = locals()
    if headless and run_time_s is None:
        raise PlanError("--headless would never end", "Say how long with --run-time.")
    output = Output(as_json=as_json, quiet=quiet, objectives=objectives_of(assertions, None))
    desk = _drive(_arguments(given), quiet=quiet or as_json)
    if desk.failed is not None and (headless or desk.setting is None):
        raise desk.failed
    if headless and not desk.folders:
        raise PlanError("nothing was started within --run-time", "Give it more time.")
    if not headless:
        for folder in desk.folders:
            output.say(str(folder / "run.jsonl"))
        raise Exit(EXIT_OK)
    raise Exit(finish(output, desk.folders[0], report=report))


def _arguments(given: dict[str, Any]) -> list[str]:
    """The command line of Locust."""
    named = {name.replace("_", "-"): given[name] for name in OURS if given[name] not in (None, False)}
    ours = [
        text
        for name, value in named.items()
        for text in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]
    page = ["--web-host", given["host"], "--web-port", str(given["port"])]
    if given["headless"]:
        page = ["--headless", "--only-summary", "--stop-timeout", str(LAST_ANSWERS_S)]
    until = [] if given["run_time_s"] is None else ["--run-time", str(max(1, round(given["run_time_s"])))]
    users = ["--users", str(given["users"]), "--spawn-rate", str(given["spawn_rate"])]
    return ["-f", str(given["locustfile"] or LOCUSTFILE), *page, *until, *users, *ours]


def _drive(arguments: list[str], *, quiet: bool) -> Desk:
    """Locust's own main, to its end. From here on gevent has this process; its asyncio is not used."""
    try:
        from locust.main import main
    except ImportError as error:
        raise PlanError(
            f"loadgen ui needs Locust, which is not installed ({error})", "pip install 'llm-loadgen[ui]'"
        ) from None
    from loadgen.interactive.desk import DESK

    if quiet:
        logging.getLogger("locust.stats_logger").addFilter(lambda _: False)  # its closing tables heed no level
    command, sys.argv = sys.argv, ["locust", *arguments, *(["--loglevel", "ERROR"] if quiet else [])]
    DESK.command = ["loadgen", *command[1:]]
    try:
        main()
    except SystemExit as end:
        if end.code == EXIT_USAGE and DESK.setting is None and DESK.failed is None:
            raise
    finally:
        sys.argv = command
    return DESK
