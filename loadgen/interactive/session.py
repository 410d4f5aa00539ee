"""The state of one Locust process: the server, the current run, Locust's events, and loadgen's section of the page.

loadgen listens to these events of Locust:

init_command_line_parser    add options made from the Plan's fields; some become fields on Locust's start page.
init                        find the server (or start the simulated one) and extend the page.
test_start, test_stop       start and end a LiveRun, which writes one run folder.
quitting                    end the current run and stop the simulated server.

Locust's page is served unchanged except for two lines before `</body>`. These lines load a script that fills a section.
During a run, the script moves the section above Locust's tables, because these tables show rounded figures. Nothing is
loaded from other servers.

Locust accepts requests from any origin (CORS *). This is unsafe for a page that can start load and read files.
Therefore loadgen refuses requests from other origins. If the page is served on loopback, it also refuses requests whose
Host is not a loopback name (DNS rebinding). Other pages cannot show this page in a frame (clickjacking).
"""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import tempfile
import time
from argparse import BooleanOptionalAction
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from flask import Flask, Response, jsonify, request, send_file, send_from_directory
from gevent.lock import BoundedSemaphore
from locust import events
from locust.util.timespan import parse_timespan

from loadgen import machine as host
from loadgen.engine.resolve_server import (
    SIMULATED_SERVER,
    access_for,
    command_with_seed,
    max_length,
    with_detected_server,
    with_new_seed,
)
from loadgen.engine.telemetry_sampler import SamplerProcess
from loadgen.errors import EXIT_USAGE, LoadgenError, PlanError
from loadgen.folders import FolderClaim, run_folder
from loadgen.interactive import check_users, interactive_plan, locust_option
from loadgen.interactive.live_run import (
    POINTS,
    SOCKET_CHECK_S,
    SPANS,
    LiveRun,
    LiveTarget,
    find_target,
    warm_up,
)
from loadgen.plan import Plan
from loadgen.plan_fields import fields_of, run_options
from loadgen.servers.discovery import apply_mark
from loadgen.servers.errors import LimitError, ServerError
from loadgen.servers.own_process import own_process
from loadgen.servers.simulated import SimulatedError
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.timestamp_sources import open_source
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource
from loadgen.workloads import lengths
from loadgen.workloads.spec_syntax import WorkloadError

TICK_S = 0.05
TICKS_PER_SAMPLE = 20
CONNECTIONS = 10_000
YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Thresholds of the garbage collector. Automatic collections visit only young objects and take less than 1 ms."""
EXPECTED = (LoadgenError, ServerError, LimitError, SimulatedError, WorkloadError)
"""Errors that are shown to the user without a traceback."""
DEFAULTS = {"label": "ui"}
"""Defaults of options under plain `locust` that differ from the defaults of the Plan."""
LOG = logging.getLogger("loadgen")
INSERTED = (
    b'<link rel="stylesheet" href="./loadgen/live.css" /><section id="loadgen" aria-label="Exact figures"></section>'
    b'<script src="./loadgen/live.js"></script></body>'
)
BYTES, TOKENS = b"Average size (bytes)", b"Average size (tokens)"
"""Locust's title for the column of response lengths, and the replacement, because LoadgenUser reports tokens."""
NO_FRAME = {"X-Frame-Options": "DENY", "Content-Security-Policy": "frame-ancestors 'none'"}
"""Headers that forbid other pages to show this page in a frame, in which a user could be tricked into clicking its
buttons."""
REPORT_LIMIT_S = 300
LOCUST_FIELDS = frozenset(("user_count", "spawn_rate", "run_time", "host", "profile", "user_classes", "shape_class"))
"""Fields that Locust itself has in the form on its start page."""


class LocustSession:
    """The state of loadgen in a Locust process.

    The only instance is SESSION. It is global, because Locust passes only its environment to the users that it creates.
    """

    def __init__(self) -> None:
        self.target: LiveTarget | None = None
        self.run: LiveRun | None = None
        self.folders: list[Path] = []
        self.failed: Exception | None = None
        self.output_tokens = lengths.DEFAULT_OUTPUT_TOKENS
        self.command = list(sys.argv)
        """The command that the run file records."""
        self.plan_settings: Mapping[str, Any] = {}
        """Settings of the plan file that are no options of Locust: the classes of traffic, and objectives."""
        self.files: set[str] = set()
        """Files named on the command line. The form on Locust's start page may name only these."""
        self.stamps: TimestampSource = PLAIN
        self._environment: Any = None
        self._attached = False
        self._turns = BoundedSemaphore(1)
        self._stack = ExitStack()
        self._interrupted = False
        self._sampler: SamplerProcess | None = None
        """Telemetry sampler that was started in advance for the next run."""
        self._claims = ExitStack()
        """Holds the claim on the folder of the current run."""

    def attach(self) -> None:
        """Register listeners for Locust's events. Further calls do nothing."""
        if self._attached:
            return
        self._attached = True
        events.init_command_line_parser.add_listener(_add_options)
        events.init.add_listener(self._on_init)
        events.test_start.add_listener(self._on_start)
        events.test_stop.add_listener(self._on_stop)
        events.quitting.add_listener(self._on_quitting)

    @property
    def users(self) -> int:
        """Current number of users."""
        runner = self._environment.runner if self._environment else None
        return runner.user_count if runner else 0

    @property
    def running(self) -> bool:
        """True while a run is in progress."""
        return self.run is not None and not self.run.ended

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let only one user at a time do longer work, such as decoding a response or building the next request.

        gevent reads the sockets before it lets the next user in. Without this context manager, gevent would run up to
        fifty greenlets before it reads the sockets again. Tokens that arrive in this time would be read late and share
        one timestamp. This would happen often, because streams that start together also end together.
        """
        with self._turns:
            gevent.sleep(SOCKET_CHECK_S)
            yield

    def plan(self, form: Mapping[str, Any] | None = None) -> Plan:
        """Return the Plan for the command-line options and the form on Locust's start page.

        A value in the form overrides the option of the same field. Raises PlanError for an invalid value.
        """
        options = vars(self._environment.parsed_options)
        settings = {field: options[locust_option(field)[2:].replace("-", "_")] for field in _fields("start", "form")}
        settings |= {field: str(form[field]) for field in _fields("form") if form and field in form}
        settings["server"] = settings["server"] or ("" if settings["url"] else SIMULATED_SERVER)
        stated = {name: value for name, value in settings.items() if value not in (None, "")}
        return interactive_plan({**self.plan_settings, **stated})

    def choose(self, plan: Plan, url: str = "") -> None:
        """Set the plan of the next run, and build its prompts now. If `url` is not empty, the run uses the server at
        this URL.

        Each run on a real server gets a new random seed, unless the user states one, because the server's prefix cache
        may hold the prompts of the previous run.

        Raises ServerError, PlanError, and the errors of LiveTarget.prompts. After an error the session is unchanged.
        """
        assert self.target is not None
        target = self.target
        if url:
            if any(access_for(part.plan).headers for part in target.with_plan(plan).parts):
                raise PlanError(
                    "this server receives headers or an API key, which another server must not see",
                    "Restart loadgen ui to use another server.",
                )
            target = find_target(interactive_plan(vars(plan) | {"url": url}), self._stack, LOG.info)
            plan = target.plan
        plan = with_new_seed(plan, target.facts)
        if plan != target.plan:
            target = target.with_plan(plan)
        for part in target.parts:
            part.prompts(part.dialect(None))
        self.target = target
        if url:
            self._environment.parsed_options.url = url
        if plan.output_lengths.lengths is None:
            self.output_tokens = lengths.DEFAULT_OUTPUT_TOKENS
        else:
            self.output_tokens = max_length(plan.output_tokens)

    def fail(self, error: Exception) -> None:
        """Report `error` and end the run. Later errors of the same run are ignored.

        If the web page is shown, the process continues, and the user can start another run. Otherwise the process ends.
        """
        if self.failed is None:
            self.failed = error
            LOG.error("%s %s", error, getattr(error, "hint", ""))
            runner = self._environment.runner
            gevent.spawn(runner.stop if self._environment.web_ui else runner.quit)

    def _on_init(self, environment: Any, **_: Any) -> None:
        self._environment = environment
        if type(environment.runner).__name__ == "MasterRunner":
            return  # users run in other processes, which write their own runs
        self._sampler = SamplerProcess()  # starts while the server is found and prompts are built
        options = environment.parsed_options
        try:
            check_users(options.num_users or 0, options.spawn_rate or 1.0)
            plan = with_detected_server(self.plan(), LOG.info)
            environment.parsed_options.server, self.files = plan.server, _files(plan)
            self.target = find_target(plan, self._stack, LOG.info)
            self.choose(plan)
            host.allow_open_files(CONNECTIONS)
        except EXPECTED as error:  # exit like every command that cannot begin
            self._sampler.close()
            self._stack.close()
            self.target, self.failed = None, error
            raise SystemExit(EXIT_USAGE) from None
        environment.host = self.target.facts.url
        set_packet_capability(effective=True)
        self.stamps = open_source(plan.stamps, self.target.address.addresses)
        set_packet_capability(effective=False)
        self._stack.callback(self.stamps.close)
        if environment.web_ui:
            _extend_page(environment.web_ui, self)
        else:
            self._sampler.ready()  # before the run, so that the run does not wait
        warm_up()
        gevent.spawn(self._tick)
        gc.collect()
        gc.freeze()  # garbage collections need not visit objects that live as long as the process
        gc.set_threshold(*YOUNG_ONLY)
        # An interrupt goes to the greenlet that waits for the end, not to the one that happens to run.
        # A closed terminal interrupts as well, unless the signal is ignored (nohup).
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, *hangup):
            gevent.signal_handler(number, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)

    def _on_start(self, **_: Any) -> None:
        if self.target is None:
            return
        target = self.target.restarted()
        self.target = target
        self.failed = None
        option = self._environment.parsed_options.out
        out = Path(option) if option else None
        if out is not None and self.folders:
            out = out.with_name(f"{out.name}-{len(self.folders) + 1}")
        sampler = self._sampler or SamplerProcess()
        self._sampler = None
        try:
            folder = self._claims.enter_context(run_folder(out, target.plan.server, target.plan.label))
            self._claims.enter_context(FolderClaim(folder))
            command = command_with_seed(self.command, target.plan)
            self.run = LiveRun(folder, target, stamps=self.stamps, command=command, sampler=sampler)
            self.folders.append(folder)
        except BaseException as error:
            self._claims.close()
            sampler.close()
            self.run = None
            if not isinstance(error, EXPECTED):
                raise
            self.fail(error)

    def _on_stop(self, **_: Any) -> None:
        if self.run is not None:
            rescued = self.run.end(self.users, interrupted=self._interrupted)
            self._claims.close()
            if self._environment.web_ui and self._sampler is None:
                self._sampler = SamplerProcess()
            if rescued is not None:
                LOG.error("the disk is full: the end of %s is in %s", self.run.folder / "run.jsonl", rescued)

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        if self.running:  # the user has interrupted the run: otherwise it would have ended before
            self._interrupted = True
            environment.stop_timeout = 0.0
            environment.runner.stop()
        if self._sampler is not None:
            self._sampler.close()
        self._stack.close()

    def _tick(self) -> None:
        """Update the current run in an endless loop.

        Every TICK_S, record the delay of the event loop and compute new latencies. Once a second, also update client
        health and charts.
        """
        ticks = 0
        while True:
            before_ns = time.monotonic_ns()
            gevent.sleep(TICK_S)
            run = self.run
            if run is None or run.ended:
                continue
            run.tick(time.monotonic_ns() - before_ns - int(TICK_S * 1e9))
            ticks += 1
            if ticks % TICKS_PER_SAMPLE == 0 and not run.ended:
                run.sample(self.users)


def _fields(*when: str) -> list[str]:
    """Return the names of the Plan fields whose value of `RunOption.interactive` is in `when`.

    There are two values:

    - `form`: the user sets the field in the form on Locust's start page, before each run.
    - `start`: the user sets the field on the command line that starts Locust.
    """
    return [name for name, option in run_options(Plan).items() if option.interactive in when]


def _add_options(parser: Any, **_: Any) -> None:
    for name, option in run_options(Plan).items():
        if option.interactive is None:
            continue
        default = DEFAULTS.get(name, None if option.default else fields_of(Plan)[name].default)
        settings: dict[str, Any] = {"default": None if default is None else str(default)}
        if default is False:
            settings = {"action": "store_true"}
        elif default is True:
            settings = {"action": BooleanOptionalAction, "default": True}
        elif default == ():
            settings = {"action": "append", "default": []}
        elif default == {}:
            settings = {"default": None}
        text = option.help.replace("%", "%%")
        in_form = option.interactive == "form"
        parser.add_argument(locust_option(name), help=text, include_in_web_ui=in_form, **settings)
    text = "Folder of the first run. Later runs get a number appended to this name."
    parser.add_argument("--out", help=text, include_in_web_ui=False)


# loadgen's part of Locust's page.


def _extend_page(web_ui: Any, session: LocustSession) -> None:
    """Add loadgen's routes and section to Locust's page."""
    app: Flask = web_ui.app
    app.debug = False
    web_ui.template_args["extended_csv_files"] = [
        {"href": "./loadgen/report", "title": "Download loadgen report"},
        {"href": "./loadgen/run", "title": "Download run file"},
    ]
    base = web_ui.environment.parsed_options.web_base_path or ""
    app.before_request(lambda: _refuse_foreign(web_ui.host) or _check_start_form(session, web_ui.environment, base))
    # The first function in the list runs last: after flask_cors has added its header.
    app.after_request_funcs.setdefault(None, []).insert(0, lambda response: _complete(response, base))
    for rule, handler in (("live", _live), ("<any(report, run):what>", _download)):
        view = web_ui.auth_required_if_enabled(partial(handler, session))
        app.add_url_rule(f"{base}/loadgen/{rule}", f"loadgen{handler.__name__}", view)
    assets = partial(send_from_directory, Path(__file__).parent.resolve())
    app.add_url_rule(f"{base}/loadgen/<any(live.js, live.css):path>", "loadgen_asset", assets)


def _refuse_foreign(bound_host: str) -> Response | None:
    """Return a response with status 403 if the current request must be refused, or None if it is allowed.

    Requests from other origins are refused. If the server is bound to a loopback address, requests whose Host is not a
    loopback name are refused too.
    """
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return Response("requests from other pages are refused", 403)
    name = request.host[1:].partition("]")[0] if request.host.startswith("[") else request.host.partition(":")[0]
    if host.is_loopback(bound_host) and not host.is_loopback(name):
        return Response("this page accepts only loopback host names", 403)
    return None


def _check_start_form(session: LocustSession, environment: Any, base: str) -> Response | None:
    """Apply the form of Locust's start page if the current HTTP request submits this form.

    If the form is invalid, nothing is changed, and the result is a response that describes the mistake. Otherwise,
    return None. `base` is the URL path below which Locust's web server runs.
    """
    if request.method == "POST" and request.path == f"{base}/swarm":
        try:
            _apply_start_form(session, environment, request.form)
        except (*EXPECTED, ValueError) as error:
            text = f"{error} {getattr(error, 'hint', '')}".strip()
            return jsonify({"success": False, "message": text, "host": environment.host})
    return None


def _apply_start_form(session: LocustSession, environment: Any, form: Mapping[str, str]) -> None:
    """Apply the settings in `form`, which is the form on Locust's start page, to the next run of `session`.

    `environment` is Locust's environment. The form may change the load, the workload and the server. It is refused in
    these cases:

    - It names a file that was not named on the command line.
    - It names another server, although the requests contain an API key or other headers, which only the present server
      may see.
    - It changes the workload or the server while a run is in progress.

    Raises PlanError, ValueError, and the errors of `LocustSession.choose`.
    """
    unknown = form.keys() - LOCUST_FIELDS - {*_fields("form")}
    if unknown:
        raise PlanError(f"Only the command line of loadgen ui can set: {', '.join(sorted(unknown))}.")
    optional = bool(environment.shape_class)  # with a load shape, Locust's form has no numbers
    check_users(int(form.get("user_count", 0 if optional else -1)), float(form.get("spawn_rate", optional)))
    parse_timespan(form.get("run_time") or "1s")
    plan = session.plan(form)
    url = form.get("host", "").rstrip("/")
    target = session.target
    if not _files(plan) <= session.files:
        raise PlanError("Only the command line of loadgen ui can name files.")
    url = "" if target is None or url in (target.facts.url, environment.host) else url
    if not session.running:
        session.choose(plan, url)
    elif url or any(getattr(plan, name) != getattr(session.plan(), name) for name in _fields("form")):
        raise PlanError("The workload and the server cannot change during a run: stop the run first.")


def _files(plan: Plan) -> set[str]:
    """Return the files that a plan reads, as written in its settings."""
    length_specs = (str(plan.input_tokens), str(plan.output_tokens).removeprefix("max:"))
    files = {spec for spec in length_specs if spec.startswith("empirical:")}
    path = plan.workload_file
    return files if path is None else files | {str(path)}


def _complete(response: Response, base: str) -> Response:
    """Adapt a response of Locust's web server to loadgen, and return it. `base` is the URL path of the main page.

    - The headers of every response forbid other web pages to read it or to show it in a frame.
    - The main page gets a section with the figures of loadgen.
    - In scripts and reports, the column title `Average size (bytes)` becomes `Average size (tokens)`, because loadgen
      reports the number of tokens of a response as its size.
    """
    response.headers.pop("Access-Control-Allow-Origin", None)
    response.headers.update(NO_FRAME)
    if request.path.endswith((".js", "/stats/report")) and response.status_code == 200:
        response.direct_passthrough = False
        response.set_data(response.get_data().replace(BYTES, TOKENS))
    if request.path == f"{base}/" and response.mimetype == "text/html" and response.status_code == 200:
        response.set_data(response.get_data().replace(b"</body>", INSERTED))
    return response


def _live(session: LocustSession) -> Response:
    """Return the state of the current run as JSON, for the script of the page."""
    shown = ("name", "version", "model", "url", "simulated", "speed")
    run = session.run
    server = None
    if session.target:
        facts = apply_mark(session.target.facts, run.mark if run else None)
        server = {name: getattr(facts, name) for name in shown}
    if run is None:
        return jsonify({"server": server, "run": None})
    since = request.args.get("since", 0, type=int)
    figures = run.figures
    span = request.args.get("span", "run")
    states = {**figures.states, "failed": figures.states["failed"] - figures.cut_off, "cut_off": figures.cut_off}
    state = {
        "folder": str(run.folder),
        "ended": run.finished,
        "requests": {"in_flight": len(run.in_flight), "users": session.users, **states},
        "tokens": figures.tokens,
        "latency": run.latency(span if span in SPANS else "run"),
        "level": figures.level,
        "failures": [
            {"reason": key[0], "message": figures.messages[key], "n": number}
            for key, number in figures.failures.most_common(50)
        ],
        "client": run.client(),
        "points": [point for point in figures.points if point["at"] >= since],
        "point_limit": POINTS,
    }
    return jsonify({"server": server, "run": state})


def _download(session: LocustSession, what: str) -> Response:
    """Return an HTTP response with the current run file or its report, depending on `what` (`run` or `report`).

    A separate process builds the report, so that this process continues to read sockets.
    """
    if session.run is None:
        return Response("no run yet", 404)
    folder = session.run.folder.resolve()
    if what == "run":
        return send_file(folder / "run.jsonl", as_attachment=True, mimetype="application/jsonl")
    with tempfile.TemporaryDirectory() as scratch:
        page = folder / "report.html" if session.run.finished else Path(scratch) / "report.html"
        command = own_process("loadgen", "report", str(folder), "--out", str(page), "--quiet")
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_LIMIT_S, check=False)  # noqa: S603
        if done.returncode:
            return Response(done.stderr, 500, mimetype="text/plain")
        named = {"Content-Disposition": f'attachment; filename="{folder.name}.html"'}
        return Response(page.read_bytes(), mimetype="text/html", headers=named)


SESSION = LocustSession()
