"""What one Locust process shares: the server, the run that goes on, Locust's events that begin and end it, and our part
of Locust's page: exact figures under its own tables, checks of its form, and the report.

init_command_line_parser    options made from the Plan's fields; some become fields of the start form
init                        find the server (or start the simulated one), extend the page
test_start, test_stop       a LiveRun each: one run, one folder
quitting                    the last run's end; the simulated server goes with the process

Locust's page is served as it is; two lines are put before `</body>`, and what they load fills a section below. Nothing
comes from the network. Locust answers any origin (CORS *); a page that can start load and read files must not, so
requests of other origins, and on loopback of other host names (DNS rebinding), are refused here.
"""

from __future__ import annotations

import gc
import logging
import math
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
from loadgen.engine.resolve_server import max_length, with_detected_server
from loadgen.engine.telemetry_sampler import SamplerProcess
from loadgen.errors import EXIT_USAGE, LoadgenError, PlanError
from loadgen.folders import FolderClaim, run_folder
from loadgen.interactive import interactive_plan, locust_option
from loadgen.interactive.live_run import ONE_LOOK_S, POINTS, SHARES, SPANS, LiveRun, LiveTarget, find_target, warm_up
from loadgen.plan import Plan
from loadgen.plan_fields import fields_of, run_options
from loadgen.servers.discovery import apply_mark
from loadgen.servers.errors import LimitError, ServerError
from loadgen.servers.simulated import SimulatedError
from loadgen.servers.wire.packet_socket import set_packet_capability
from loadgen.servers.wire.timestamp_sources import open_source
from loadgen.servers.wire.timestamps import PLAIN, TimestampSource
from loadgen.workloads import lengths, workload
from loadgen.workloads.spec_syntax import WorkloadError

TICK_S = 0.05
TICKS_PER_SAMPLE = 20
CONNECTIONS = 10_000
YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Collections by themselves are of young objects, below a millisecond."""
EXPECTED = (LoadgenError, ServerError, LimitError, SimulatedError, WorkloadError)
"""What can go wrong that is meant for the user."""
DEFAULTS = {"label": "ui"}
"""Of plain `locust`, where they are not the Plan's."""
SERVER = "vllm"
"""Who is asked where neither a server nor a URL is named."""
LOG = logging.getLogger("loadgen")
INSERTED = (
    b'<link rel="stylesheet" href="./loadgen/live.css" /><section id="loadgen" aria-label="Exact figures"></section>'
    b'<script src="./loadgen/live.js"></script></body>'
)
BYTES, TOKENS = b"Average size (bytes)", b"Average size (tokens)"
"""Locust's column of what it takes for lengths of answers: users of ours give it tokens."""
REPORT_LIMIT_S = 300
LOCUSTS = frozenset(("user_count", "spawn_rate", "run_time", "host", "profile", "user_classes", "shape_class"))
"""What Locust's own form holds: how much load, for how long, by which users."""
TABLE = {
    "key": "latencies",
    "title": "Latencies",
    "structure": [
        {"key": "title", "title": "Exact, of complete requests"},
        {"key": "n", "title": "Samples"},
        *({"key": name, "title": f"{name} (ms)"} for name in (*SHARES, "max")),
    ],
}
"""A tab beside Locust's own."""


class LocustSession:
    """The state of this process. There is one, because Locust makes users itself and hands them nothing of ours."""

    def __init__(self) -> None:
        self.target: LiveTarget | None = None
        self.run: LiveRun | None = None
        self.folders: list[Path] = []
        self.failed: Exception | None = None
        self.output_tokens = lengths.DEFAULT_OUTPUT_TOKENS
        self.command = list(sys.argv)
        """What the Run says it was made with."""
        self.files: set[str] = set()
        """What requests may be read from: the files that were named at the start, and no other."""
        self.stamps: TimestampSource = PLAIN
        self._environment: Any = None
        self._attached = False
        self._turns = BoundedSemaphore(1)
        self._stack = ExitStack()
        self._interrupted = False
        self._sampler: SamplerProcess | None = None
        """Waits for the next run."""
        self._claims = ExitStack()
        """Holds the claim on the folder of the run that goes on."""

    def attach(self) -> None:
        """Listen to Locust's events. A second call does nothing."""
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
        """How many there are now."""
        runner = self._environment.runner if self._environment else None
        return runner.user_count if runner else 0

    @property
    def running(self) -> bool:
        """Whether a run goes on."""
        return self.run is not None and not self.run.ended

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The longer work of users, such as decoding an answer and building the next request: one at a time, and the
        hub reads what has come before each. gevent would run fifty greenlets before it looks at the sockets again, and
        streams that began together end together: tokens would share a stamp."""
        with self._turns:
            gevent.sleep(ONE_LOOK_S)
            yield

    def plan(self, form: Mapping[str, Any] | None = None) -> Plan:
        """The Plan of the command line, or of these fields of the start form. Raises PlanError."""
        given = vars(self._environment.parsed_options)
        settings = {field: given[locust_option(field)[2:].replace("-", "_")] for field in _fields("start", "form")}
        settings |= {field: str(form[field]) for field in _fields("form") if form and field in form}
        settings["server"] = settings["server"] or ("" if settings["url"] else SERVER)
        return interactive_plan({name: value for name, value in settings.items() if value not in (None, "")})

    def choose(self, plan: Plan, url: str = "") -> None:
        """Ask this from the next start on, at another URL if one is named, and build its prompts now. Raises what
        LiveTarget.prompts raises, ServerError and PlanError; then all stays as it is."""
        assert self.target is not None
        target = self.target if plan == self.target.plan else self.target.changed(plan)
        if url:
            if target.headers:
                raise PlanError("this server is sent headers or a key", "Start loadgen ui anew to ask another one.")
            target = find_target(interactive_plan(vars(plan) | {"url": url}), self._stack, LOG.info)
        target.prompts(target.dialect(None))
        self.target = target
        if url:
            self._environment.parsed_options.url = url
        of_answers = lengths.parse_outputs(str(plan.output_tokens)).lengths is None
        self.output_tokens = lengths.DEFAULT_OUTPUT_TOKENS if of_answers else max_length(plan.output_tokens)

    def fail(self, error: Exception) -> None:
        """Say what is wrong and end the run: with a page it can be started again, otherwise the process ends."""
        if self.failed is None:
            self.failed = error
            LOG.error("%s %s", error, getattr(error, "hint", ""))
            runner = self._environment.runner
            gevent.spawn(runner.stop if self._environment.web_ui else runner.quit)

    def _on_init(self, environment: Any, **_: Any) -> None:
        self._environment = environment
        if type(environment.runner).__name__ == "MasterRunner":
            return  # users are elsewhere, and so are their Runs
        self._sampler = SamplerProcess()  # starts while the server is found and prompts are built
        try:
            plan = with_detected_server(self.plan())
            environment.parsed_options.server, self.files = plan.server, _files(plan)
            self.target = find_target(plan, self._stack, LOG.info)
            self.choose(plan)
            host.allow_open_files(CONNECTIONS)
        except EXPECTED as error:  # end as every command ends that cannot begin; Locust itself would say less
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
            _extend(environment.web_ui, self)
        else:
            self._sampler.ready()  # not in the time of the run
        warm_up()
        gevent.spawn(self._tick)
        gc.collect()
        gc.freeze()  # Locust, its page and the prompts live as long as the process: no collection need look at them
        gc.set_threshold(*YOUNG_ONLY)
        # An interrupt is for the greenlet that waits for the end, not for whichever runs just now.
        # A terminal that goes away interrupts as well, unless that is ignored (nohup).
        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, *hangup):
            gevent.signal_handler(number, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)

    def _on_start(self, **_: Any) -> None:
        if self.target is None:
            return
        target = self.target = self.target.restarted()
        self.failed = None
        named = self._environment.parsed_options.out
        out = Path(named) if named else None
        if out is not None and self.folders:
            out = out.with_name(f"{out.name}-{len(self.folders) + 1}")
        sampler, self._sampler = self._sampler or SamplerProcess(), None
        try:
            folder = self._claims.enter_context(run_folder(out, target.plan.server, target.plan.label))
            self._claims.enter_context(FolderClaim(folder))
            self.run = LiveRun(folder, target, stamps=self.stamps, command=self.command, sampler=sampler)
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
        if self.running:  # a run that ends by itself has ended before: somebody interrupts this one
            self._interrupted = True
            environment.stop_timeout = 0.0
            environment.runner.stop()
        if self._sampler is not None:
            self._sampler.close()
        self._stack.close()

    def _tick(self) -> None:
        """Stalls and new latencies at every tick, health and charts once a second."""
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
    """The fields of the Plan that are options here: of the `form`, or fixed at the `start`."""
    return [name for name, option in run_options(Plan).items() if option.interactive in when]


def _add_options(parser: Any, **_: Any) -> None:
    for name, option in run_options(Plan).items():
        if option.interactive is None:
            continue
        default = DEFAULTS.get(name, None if option.default else fields_of(Plan)[name].default)
        how: dict[str, Any] = {"default": None if default is None else str(default)}
        if default is False:
            how = {"action": "store_true"}
        elif default is True:
            how = {"action": BooleanOptionalAction, "default": True}
        elif default == ():
            how = {"action": "append", "default": []}
        elif default == {}:
            how = {"default": None}
        text, shown = option.help.replace("%", "%%"), option.interactive == "form"
        parser.add_argument(locust_option(name), help=text, include_in_web_ui=shown, **how)
    text = "Folder of the first run; the next ones get a number behind it."
    parser.add_argument("--out", help=text, include_in_web_ui=False)


# Our part of Locust's page.


def _extend(web_ui: Any, session: LocustSession) -> None:
    """Add our routes, tab and section to Locust's page."""
    app: Flask = web_ui.app
    app.debug = False
    web_ui.template_args["extended_tables"] = [TABLE]
    web_ui.template_args["extended_tabs"] = [{"key": TABLE["key"], "title": TABLE["title"]}]
    web_ui.template_args["extended_csv_files"] = [
        {"href": "./loadgen/report", "title": "Download loadgen report"},
        {"href": "./loadgen/run", "title": "Download run file"},
    ]
    base = web_ui.environment.parsed_options.web_base_path or ""
    app.before_request(lambda: _refused(web_ui.host) or _unfit(session, web_ui.environment, base))
    # The first of them runs last: after flask_cors has put its header on.
    app.after_request_funcs.setdefault(None, []).insert(0, lambda answer: _completed(answer, session, base))
    for rule, answer in (("live", _live), ("<any(report, run):what>", _download)):
        view = web_ui.auth_required_if_enabled(partial(answer, session))
        app.add_url_rule(f"{base}/loadgen/{rule}", f"loadgen{answer.__name__}", view)
    assets = partial(send_from_directory, Path(__file__).parent.resolve())
    app.add_url_rule(f"{base}/loadgen/<any(live.js, live.css):path>", "loadgen_asset", assets)


def _refused(bound: str) -> Response | None:
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return Response("requests from other pages are refused", 403)
    name = request.host[1:].partition("]")[0] if request.host.startswith("[") else request.host.partition(":")[0]
    if host.is_loopback(bound) and not host.is_loopback(name):
        return Response("this page answers to loopback names only", 403)
    return None


def _unfit(session: LocustSession, environment: Any, base: str) -> Response | None:
    """A start form that cannot be run is answered with its mistakes, in the form, and changes nothing."""
    if request.method == "POST" and request.path == f"{base}/swarm":
        try:
            _heed(session, environment, request.form)
        except (*EXPECTED, ValueError) as error:
            text = f"{error} {getattr(error, 'hint', '')}".strip()
            return jsonify({"success": False, "message": text, "host": environment.host})
    return None


def _heed(session: LocustSession, environment: Any, form: Mapping[str, str]) -> None:
    """Ask what the form says from the next start on. It may change the load, but no file that is read, nor who gets the
    secrets. Raises PlanError, ValueError, and what `LocustSession.choose` raises."""
    if others := form.keys() - LOCUSTS - {*_fields("form")}:
        raise PlanError(f"Set only when loadgen ui is started: {', '.join(sorted(others))}.")
    shaped = 0 if environment.shape_class else -1  # Locust asks for no number then
    if int(form.get("user_count", shaped)) < 0 or not 0 < float(form.get("spawn_rate", shaped + 1)) < math.inf:
        raise PlanError("How many users, and how many a second? Both are numbers, the second above 0.")
    parse_timespan(form.get("run_time") or "1s")
    plan, url, target = session.plan(form), form.get("host", "").rstrip("/"), session.target
    if not _files(plan) <= session.files:
        raise PlanError("Files are named only when loadgen ui is started.")
    url = "" if target is None or url in (target.facts.url, environment.host) else url
    if not session.running:
        session.choose(plan, url)
    elif url or any(getattr(plan, name) != getattr(session.plan(), name) for name in _fields("form")):
        raise PlanError("The workload and the server are chosen at the start: stop first.")


def _files(plan: Plan) -> set[str]:
    """What these words would have this process read."""
    each = (str(plan.input_tokens), str(plan.output_tokens).removeprefix("max:"))
    named = {words for words in each if words.startswith("empirical:")}
    path = getattr(workload.parse(plan.workload), "path", None)
    return named if path is None else named | {str(path)}


def _completed(answer: Response, session: LocustSession, base: str) -> Response:
    answer.headers.pop("Access-Control-Allow-Origin", None)
    if request.path.endswith((".js", "/stats/report")) and answer.status_code == 200:
        answer.direct_passthrough = False
        answer.set_data(answer.get_data().replace(BYTES, TOKENS))
    if request.path == f"{base}/" and answer.mimetype == "text/html" and answer.status_code == 200:
        answer.set_data(answer.get_data().replace(b"</body>", INSERTED))
    elif request.path == f"{base}/stats/requests" and answer.is_json and session.run is not None:
        result = answer.get_json()
        rows = [
            {"title": row["title"], "n": row["n"]}
            | {name: "" if row[name] is None else f"{row[name] * 1000:.3f}" for name in (*SHARES, "max")}
            for row in session.run.latency()
        ]
        result["extended_stats"] = [{"key": TABLE["key"], "data": rows}]
        answer.set_data(jsonify(result).get_data())
    return answer


def _live(session: LocustSession) -> Response:
    shown = ("name", "version", "model", "url", "simulated", "speed")
    run, server = session.run, None
    if session.target:
        facts = apply_mark(session.target.facts, run.mark if run else None)
        server = {name: getattr(facts, name) for name in shown}
    if run is None:
        return jsonify({"server": server, "run": None})
    since, figures = request.args.get("since", 0, type=int), run.figures
    span = request.args.get("span", "run")
    states = {**figures.states, "failed": figures.states["failed"] - figures.cut_off, "cut_off": figures.cut_off}
    told = {
        "folder": str(run.folder),
        "ended": run.ended,
        "requests": {"in_flight": len(run.in_flight), "users": session.users, **states},
        "tokens": figures.tokens,
        "latency": run.latency(span if span in SPANS else "run"),
        "level": figures.level,
        "failures": [
            {"kind": kind, "detail": detail, "n": number} for (kind, detail), number in figures.failures.most_common(50)
        ],
        "client": run.client(),
        "points": [point for point in figures.points if point["at"] >= since],
        "point_limit": POINTS,
    }
    return jsonify({"server": server, "run": told})


def _download(session: LocustSession, what: str) -> Response:
    """The run file so far, or `loadgen report` on it, in a process of its own, so that this one goes on."""
    if session.run is None:
        return Response("nothing has been run yet", 404)
    folder = session.run.folder.resolve()
    if what == "run":
        return send_file(folder / "run.jsonl", as_attachment=True, mimetype="application/jsonl")
    with tempfile.TemporaryDirectory() as scratch:
        page = folder / "report.html" if session.run.ended else Path(scratch) / "report.html"
        command = [sys.executable, "-m", "loadgen", "report", str(folder), "--out", str(page), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_LIMIT_S, check=False)  # noqa: S603
        if done.returncode:
            return Response(done.stderr, 500, mimetype="text/plain")
        named = {"Content-Disposition": f'attachment; filename="{folder.name}.html"'}
        return Response(page.read_bytes(), mimetype="text/html", headers=named)


SESSION = LocustSession()
