"""What one Locust process shares: the server, the run that goes on, and Locust's events that begin and end it.

init_command_line_parser    options made from the Plan's fields; some become fields of the start form
init                        find the server (or start the simulated one), extend the page
test_start, test_stop       a LiveRun each: one run, one folder
quitting                    the last run's end; the simulated server goes with the process
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from locust import events

from loadgen import host
from loadgen.engine.sampler import SamplerProcess
from loadgen.errors import EXIT_USAGE, LoadgenError
from loadgen.interactive import interactive_plan, locust_option
from loadgen.interactive.live_run import LiveRun, warm_up
from loadgen.interactive.target import ONE_LOOK_S, HubPoller, LiveTarget, find_target
from loadgen.plan import Plan, run_options
from loadgen.prepare import default_folder, longest_of
from servers.errors import LimitError, ServerError
from servers.simulated import SimulatedError
from servers.wire.stamps import PLAIN, StampSource, open_source
from workloads.syntax import WorkloadError

TICK_S = 0.05
TICKS_PER_SAMPLE = 20
CONNECTIONS = 10_000
YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Collections by themselves are of young objects, below a millisecond."""
EXPECTED = (LoadgenError, ServerError, LimitError, SimulatedError, WorkloadError)
"""What can go wrong that is meant for the user."""
DEFAULTS = {"server": "vllm", "label": "ui"}
"""Of plain `locust`, where they are not the Plan's."""
LOG = logging.getLogger("loadgen")


class LocustSession:
    """The state of this process. There is one, because Locust makes users itself and hands them nothing of ours."""

    def __init__(self) -> None:
        self.target: LiveTarget | None = None
        self.run: LiveRun | None = None
        self.folders: list[Path] = []
        self.failed: Exception | None = None
        self.output_tokens = 128
        self.command = list(sys.argv)
        """What the Run says it was made with."""
        self.stamps: StampSource = PLAIN
        self.poller = HubPoller()
        self._environment: Any = None
        self._extend: Callable[[Any, LocustSession], None] | None = None
        self._turns = BoundedSemaphore(1)
        self._stack = ExitStack()
        self._interrupted = False
        self._sampler: SamplerProcess | None = None
        """Waits for the next run."""

    def attach(self, extend: Callable[[Any, LocustSession], None]) -> None:
        """Listen to Locust's events; `extend` adds our part to its page. A second call does nothing."""
        if self._extend is not None:
            return
        self._extend = extend
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
        return interactive_plan({name: value for name, value in settings.items() if value not in (None, "")})

    def same_workload(self, plan: Plan) -> bool:
        """Whether this plan asks what the running one does."""
        return all(getattr(plan, name) == getattr(self.plan(), name) for name in _fields("form"))

    def choose(self, plan: Plan) -> None:
        """Ask this from the next start on, and build its prompts now. Raises what LiveTarget.prompts raises."""
        assert self.target is not None
        target = self.target if plan == self.target.plan else self.target.changed(plan)
        target.prompts(target.dialect(None))
        self.target = target
        self.output_tokens = longest_of(plan.output_tokens)

    def move(self, url: str) -> None:
        """Ask another server from the next start on. Raises ServerError, PlanError."""
        plan = interactive_plan(self.plan().model_dump() | {"url": url})
        self.target = find_target(plan, self._stack, LOG.info)
        self._environment.parsed_options.url = url

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
            plan = self.plan()
            self.target = find_target(plan, self._stack, LOG.info)
            self.choose(plan)
            host.allow_open_files(CONNECTIONS)
        except EXPECTED as error:  # end as every command ends that cannot begin; Locust itself would say less
            self._sampler.close()
            self._stack.close()
            self.failed = error
            raise SystemExit(EXIT_USAGE) from None
        environment.host = self.target.facts.url
        self.stamps = open_source(plan.stamps)
        self._stack.callback(self.stamps.close)
        if environment.web_ui and self._extend is not None:
            self._extend(environment.web_ui, self)
        else:
            self._sampler.ready()  # not in the time of the run
        warm_up()
        gevent.spawn(self._tick)
        gc.collect()
        gc.freeze()  # Locust, its page and the prompts live as long as the process: no collection need look at them
        gc.set_threshold(*YOUNG_ONLY)
        # An interrupt is for the greenlet that waits for the end, not for whichever runs just now.
        gevent.signal_handler(signal.SIGINT, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)

    def _on_start(self, **_: Any) -> None:
        if self.target is None:
            return
        self.target = self.target.restarted()
        self.failed = None
        try:
            self._begin(self.target)
        except EXPECTED as error:
            self.run = None
            self.fail(error)

    def _begin(self, target: LiveTarget) -> None:
        named = self._environment.parsed_options.out
        folder = Path(named) if named else default_folder(target.plan)
        if named and self.folders:
            folder = folder.with_name(f"{folder.name}-{len(self.folders) + 1}")
        sampler, self._sampler = self._sampler or SamplerProcess(), None
        try:
            self.run = LiveRun(folder, target, stamps=self.stamps, command=self.command, sampler=sampler)
        except BaseException:
            sampler.close()
            raise
        self.folders.append(folder)

    def _on_stop(self, **_: Any) -> None:
        if self.run is not None:
            rescued = self.run.end(self.users, interrupted=self._interrupted)
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
    return [name for name, option in run_options().items() if option.interactive in when]


def _add_options(parser: Any, **_: Any) -> None:
    for name, option in run_options().items():
        if option.interactive is None:
            continue
        default = DEFAULTS.get(name, Plan.model_fields[name].default)
        how: dict[str, Any] = {"default": None if default is None else str(default)}
        if Plan.model_fields[name].annotation is bool:
            how = {"action": "store_true"}
        text, shown = option.help.replace("%", "%%"), option.interactive == "form"
        parser.add_argument(locust_option(name), help=text, include_in_web_ui=shown, **how)
    text = "Folder of the first run; the next ones get a number behind it."
    parser.add_argument("--out", help=text, include_in_web_ui=False)


SESSION = LocustSession()
