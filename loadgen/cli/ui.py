"""The command `loadgen ui`: a load test with exact latencies, which the user controls on Locust's web page.

With --headless, the test runs without this page.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from loadgen.cli.options import ADVANCED, LOAD, OUTPUT, PlanFile, merge_settings, run_command, seconds
from loadgen.cli.output import Assertions, Confidence, Inconclusive, Output, Quiet, write_results
from loadgen.errors import EXIT_USAGE, PlanError, install_hint
from loadgen.workloads import lengths
from loadgen.workloads.input_files import open_input

if TYPE_CHECKING:
    from loadgen.interactive.session import LocustSession
    from loadgen.plan import Plan

LOCUSTFILE = Path(__file__).parents[1] / "interactive" / "user.py"
PLAN_SETTINGS = ("traffic", "objectives", "confidence", "goodput")
"""Settings of a plan file that an interactive run uses, and that Locust has no options for."""
LOAD_SETTINGS = ("arrivals", "rate", "concurrency", "n", "duration_s", "max_in_flight", "workers", "repeats")
"""Settings of a plan file that an interactive run ignores, because the users of Locust are the load."""
HOST_HINT = "Name an address of this machine: 127.0.0.1 for this machine only, or 0.0.0.0 for every address."
STOP_TIMEOUT_S = 60
"""Time for users to finish their requests at the end of a --headless run. Then the requests are cancelled."""


def _output(
    *,
    assertions: Assertions = None,
    confidence: Confidence = None,
    inconclusive: Inconclusive = None,
    report: Annotated[
        bool, Option("--report/--no-report", help="With --headless: write report.html.", **ADVANCED)
    ] = True,
    as_json: Annotated[bool, Option("--json", help="With --headless: print only summary.json.", **OUTPUT)] = False,
    quiet: Quiet = False,
) -> tuple[Output, bool]:
    output = Output(
        as_json=as_json, quiet=quiet, assertions=assertions, confidence=confidence, inconclusive=inconclusive
    )
    return output, report


@run_command(_output, interactive=True, defaults={"label": "ui"}, also={"output_tokens": ("--n-tokens",)})
def ui(
    settings: dict[str, Any],
    plan: PlanFile = None,
    users: Annotated[int, Option(help="Initial number of users. The page can change it during a run.", **LOAD)] = 1,
    spawn_rate: Annotated[float, Option(help="Users to start per second.", **LOAD)] = 10.0,
    run_time_s: Annotated[
        float | None,
        Option("--run-time", parser=seconds, metavar="T", help="Time after which the users stop.", **LOAD),
    ] = None,
    headless: Annotated[
        bool, Option("--headless", help="Start without a page and stop after --run-time.", **LOAD)
    ] = False,
    host: Annotated[
        str,
        Option(
            "--host",
            "--web-host",
            help="Address on which to serve the page. Other machines cannot reach a loopback address.",
            **ADVANCED,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, Option("--port", "--web-port", min=1, max=65535, help="Port of the page.", **ADVANCED)] = 8089,
    locustfile: Annotated[
        Path | None,
        Option(help="Python file with your own user classes, derived from loadgen.interactive.user.", **ADVANCED),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the first run: new or empty.", **OUTPUT)] = None,
    **shared: Any,
) -> None:
    """Control the load by hand on Locust's web page.

    Each start of the load is a separate run with exact latencies. By default, the page can be opened only on this
    machine (--host). The command needs the extra `ui`. With --headless there is no page: the load starts at once, and
    the command prints the results at the end. Exit codes: 0 all requests complete; 1 some requests failed; 2 usage
    error; 3 server not reachable or not the expected one; 4 an --assert failed; 5 the client was the limit; 6 an
    --assert with --confidence is inconclusive; 130 interrupted.
    """
    if headless:
        _check_headless(users, run_time_s)
    from loadgen.interactive import check_users, interactive_plan

    check_users(users, spawn_rate)
    settings, plan_settings, ignored = _with_plan_file(plan, settings)
    try:
        checked = interactive_plan({**plan_settings, **settings})  # reports mistakes before Locust is started
    except PlanError as error:
        raise PlanError(f"{plan}:\n{error}" if plan else str(error), error.hint) from None
    _check_locustfile(locustfile)
    shared["assertions"] = shared["assertions"] or list(checked.objectives) or None
    shared["confidence"] = shared["confidence"] or checked.confidence
    output, report = _output(**shared)
    if ignored:
        output.say(f"{plan}: the users are the load, not {', '.join(ignored)}")
    words = ["-f", str(locustfile or LOCUSTFILE), "--users", str(users), "--spawn-rate", str(spawn_rate)]
    if headless:
        words += ["--headless", "--only-summary", "--stop-timeout", str(STOP_TIMEOUT_S)]
    else:
        _check_port(host, port)
        words += ["--web-host", host, "--web-port", str(port)]
    if run_time_s is not None:
        words += ["--run-time", str(max(1, round(run_time_s)))]
    words += _setting_words(settings | {"out": out} if out else settings, checked)
    session = _run_locust(words, plan_settings, quiet=shared["quiet"] or shared["as_json"])
    if session.failed is not None and (headless or session.target is None):
        raise session.failed
    if headless and not session.folders:
        raise PlanError("no user was started within --run-time", "Use a longer --run-time.")
    if headless:
        raise Exit(write_results(output, session.folders[0], report=report))
    for folder in session.folders:
        output.say(str(folder / "run.jsonl"))


def _check_headless(users: int, run_time_s: float | None) -> None:
    """Raise PlanError if a run with `--headless`, without the web page, would never end or would send nothing."""
    if run_time_s is None:
        raise PlanError("--headless would never end", "Limit the run with --run-time.")
    if users == 0:
        raise PlanError("--headless with --users 0 would send nothing", "Write --users 1 or more.")


def _with_plan_file(file: Path | None, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Merge the settings in a plan file with `settings`, those of the command line. The command line wins.

    Return three parts:

    - The settings for which Locust has options.
    - The settings for which Locust has no options, such as classes of traffic and objectives.
    - The names of ignored settings, such as `rate`. They describe a load, but in an interactive run the users are the
      load.

    Raises PlanError for a setting that an interactive run cannot use.
    """
    from loadgen.plan import Plan
    from loadgen.plan_fields import fields_of, run_options

    if file is None:
        return settings, {}, []
    merged = merge_settings(file, None, settings)
    options = [name for name, option in run_options(Plan).items() if option.interactive]
    used = {name: value for name, value in merged.items() if name in options}
    others = {name: value for name, value in merged.items() if name in PLAN_SETTINGS}
    ignored = [name for name in merged if name in LOAD_SETTINGS]
    known = {*fields_of(Plan), "rate"}
    unusable = [name for name in merged if name in known and name not in {*used, *others, *ignored}]
    if unusable:
        raise PlanError(f"{file}: loadgen ui cannot use {', '.join(unusable)}", "Leave it out, or use loadgen run.")
    unknown = {name: value for name, value in merged.items() if name not in known}
    return used, others | unknown, ignored


def _setting_words(settings: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return `settings` of the plan as command-line arguments for Locust, such as `--input-tokens=512`."""
    from loadgen.interactive import locust_option

    settings = dict(settings)
    if settings.get("endpoint") is None and plan.output_tokens == lengths.DEFAULT_OUTPUT_TOKENS:
        settings.setdefault("output_tokens", plan.output_tokens)  # the form then shows the default
    words = []
    for name, value in settings.items():
        option = locust_option(name)
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(item) if isinstance(item, dict) else item for item in values]
        words += [option if item is True else f"{option}={item}" for item in texts if item is not False]
    if settings.get("ignore_eos") is False:
        words.append("--no-ignore-eos")
    return words


def _check_locustfile(file: Path | None) -> None:
    """Raise PlanError if the locustfile exists but Python cannot read it, for example because it is a device.

    Locust itself reports a missing file. Folders are not checked.
    """
    if file is None or file.is_dir() or not file.exists():
        return
    try:
        open_input(file, pipes=False).close()
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}", "Name a Python file.") from None


def _check_port(host: str, port: int) -> None:
    """Raise PlanError if the page cannot listen at `host` and `port`, for example because another program uses this
    port.

    Without this check, Locust would print a traceback instead of a clear message.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError):
        raise PlanError(f"--host {host}: no machine has this name or address", HOST_HINT) from None
    try:
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = HOST_HINT if error.errno == errno.EADDRNOTAVAIL else "Name another --port."
        raise PlanError(f"the page cannot listen on port {port} of {host}: {reason}", hint) from None


def _run_locust(arguments: list[str], plan_settings: Mapping[str, Any], *, quiet: bool) -> LocustSession:
    """Run Locust until it ends, and return the session.

    `plan_settings` are the settings for which Locust has no options. Locust patches this process with gevent, so the
    process cannot use asyncio.
    """
    try:
        from locust.main import main
    except ImportError as error:
        raise PlanError(f"loadgen ui needs Locust, which is not installed ({error})", install_hint("ui")) from None
    from loadgen.interactive.session import SESSION
    from loadgen.servers.auth import redact

    if quiet:
        logging.getLogger("locust.stats_logger").addFilter(lambda _: False)  # its final tables ignore the log level
        arguments = [*arguments, "--loglevel", "ERROR"]
    own_arguments = sys.argv
    SESSION.command = redact(["loadgen", *own_arguments[1:]])
    SESSION.plan_settings = plan_settings
    sys.argv = ["locust", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code == EXIT_USAGE and SESSION.target is None and SESSION.failed is None:
            raise
    finally:
        sys.argv = own_arguments
    return SESSION
