"""What one Locust process shares: the server, the run that goes on, and Locust's events that begin and end it.

init_command_line_parser    our options; those of the workload become fields of the start form
init                        find the server (or start the simulated one), extend the page
test_start, test_stop       a Ledger each: one run, one folder
quitting                    the last run's end; the simulated server goes with the process
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gevent
from locust import events

from loadgen import host
from loadgen.errors import EXIT_USAGE, LoadgenError
from loadgen.interactive import setting as settings
from loadgen.interactive.beside import Beside
from loadgen.interactive.ledger import Ledger
from loadgen.interactive.setting import Setting
from loadgen.interactive.wire import HubPoller, Turns
from loadgen.plan import Plan
from loadgen.prepare import default_folder, longest_of
from servers.errors import LimitError, ServerError
from servers.kinds import KINDS, any_of
from servers.simulated import SimulatedError
from servers.wire.stamps import hold_stamps
from workloads.prompts import PromptError
from workloads.syntax import WorkloadError

TICK_S = 0.05
TICKS_PER_SAMPLE = 20
CONNECTIONS = 10_000
YOUNG_ONLY = (10_000, 1_000, 1_000)
"""Collections by themselves are of young objects, below a millisecond."""
MEANT_FOR_USERS = (LoadgenError, ServerError, LimitError, SimulatedError, PromptError, WorkloadError)
FORM: tuple[tuple[str, str | None, str], ...] = (
    ("--input-tokens", "512", "Prompt length: a number, uniform:A..B, lognormal:mean=M,cv=C"),
    ("--output-tokens", "128", "Tokens to generate, likewise"),
    ("--workload", "synthetic", "synthetic, shared-prefix:groups=G,tokens=P, sharegpt:FILE, jsonl:FILE"),
    ("--seed", "0", "The same seed gives the same prompts"),
)
"""Fields of the start form."""
HIDDEN: tuple[tuple[str, str | None, str], ...] = (
    ("--server", "vllm", f"Which server answers: {any_of(KINDS)}"),
    ("--url", None, "Where it is; found as `loadgen burst` does otherwise"),
    ("--endpoint", None, "completions, chat or generate"),
    ("--model", None, "Model name to ask for"),
    ("--request-timeout", "600", "Seconds after which one request is given up"),
    ("--tokenizer", None, "A tokenizer.json to build prompts with"),
    ("--api-key-env", "LOADGEN_API_KEY", "Environment variable that holds the API key"),
    ("--ca-file", None, "Certificate authorities for https, in PEM"),
    ("--speed", "5", "How many times faster the built-in simulated server's clock runs"),
    ("--metrics-every", "1", "Seconds between readings of the server's metrics, GPUs and memory; 0 reads nothing"),
    ("--dcgm-url", None, "A DCGM exporter on the server's machine, for its GPUs"),
    ("--platform", None, "What the server runs on, such as A800"),
    ("--label", "ui", "A word for the run's folder and report"),
    ("--stamps", "kernel", "kernel, or user"),
    ("--out", None, "Folder of the first run; the next ones get a number behind it"),
)
FLAGS = (
    ("--insecure", "Do not check certificates"),
    ("--real", "Never fall back to the simulated server"),
    ("--force", "Measure a version of a server that is known to mislead"),
)


class Desk:
    """The state of this process. There is one, because Locust makes users itself and hands them nothing of ours."""

    def __init__(self) -> None:
        self.setting: Setting | None = None
        self.ledger: Ledger | None = None
        self.folders: list[Path] = []
        self.failed: Exception | None = None
        self.output_tokens = 128
        self.command = list(sys.argv)
        """What the Run says it was made with."""
        self.poller = HubPoller()
        self.turns = Turns()
        self._environment: Any = None
        self._stack = ExitStack()
        self._stamps = "user"
        self._attached = False
        self._interrupted = False
        self._beside: Beside | None = None
        """Waits for the next run."""

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
        return self.ledger is not None and not self.ledger.ended

    def plan(self, form: Mapping[str, Any] | None = None) -> Plan:
        """The Plan of the command line, or of these fields of the start form. Raises PlanError."""
        options = {name: value for name, value in vars(self._environment.parsed_options).items() if value != ""}
        options |= {name: str(value) for name, value in (form or {}).items() if name in settings.CHOSEN}
        options["timeout_s"] = options.pop("request_timeout")
        options["metrics_every_s"] = options.pop("metrics_every")
        return settings.interactive_plan(options)

    def choose(self, plan: Plan) -> None:
        """Ask this from the next start on, and build its prompts now. Raises what Setting.prompts_for raises."""
        setting = self.setting
        assert setting is not None
        if plan != setting.plan:
            setting = setting.changed(plan)
        setting.prompts_for(setting.dialect(None))
        self.setting = setting
        self.output_tokens = longest_of(plan.output_tokens)

    def move(self, url: str) -> None:
        """Ask another server from the next start on. Raises ServerError, PlanError."""
        plan = settings.interactive_plan(self.plan().model_dump() | {"url": url})
        self.setting = settings.find(plan, self._stack, self._say)
        self._environment.parsed_options.url = url

    def _on_init(self, environment: Any, **_: Any) -> None:
        self._environment = environment
        if type(environment.runner).__name__ == "MasterRunner":
            return  # users are elsewhere, and so are their Runs
        self._beside = Beside()  # starts while the server is found and prompts are built
        try:
            plan = self.plan()
            self.setting = settings.find(plan, self._stack, self._say)
            self.choose(plan)
            host.allow_open_files(CONNECTIONS)
        except MEANT_FOR_USERS as error:
            self._refuse(error)
        environment.host = self.setting.facts.url if self.setting else ""
        held = hold_stamps() if self.plan().stamps == "kernel" else None
        if held is not None:
            self._stack.callback(held.close)
            self._stamps = "kernel"
        if environment.web_ui:
            from loadgen.interactive.page import extend

            extend(environment.web_ui, self)
        else:
            self._beside.ready()  # not in the time of the run
        gevent.spawn(self._tick)
        gc.collect()
        gc.freeze()  # Locust, its page and the prompts live as long as the process: no collection need look at them
        gc.set_threshold(*YOUNG_ONLY)
        # An interrupt is for the greenlet that waits for the end, not for whichever runs just now.
        gevent.signal_handler(signal.SIGINT, gevent.kill, gevent.getcurrent(), KeyboardInterrupt)

    def _say(self, line: str) -> None:
        logging.getLogger("loadgen").info(line)

    def _refuse(self, error: Exception) -> None:
        """End the process as every command ends that cannot begin; Locust itself would say less."""
        if self._beside is not None:
            self._beside.close()
        self._stack.close()
        self.failed = error
        raise SystemExit(EXIT_USAGE)

    def _on_start(self, **_: Any) -> None:
        if self.setting is None:
            return
        self.setting = self.setting.begun_again()
        self.failed = None
        try:
            self._begin(self.setting)
        except MEANT_FOR_USERS as error:
            self.ledger = None
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Say what is wrong and end the run: with a page it can be started again, otherwise the process ends."""
        if self.failed is None:
            self.failed = error
            logging.getLogger("loadgen").error("%s %s", error, getattr(error, "hint", ""))
            runner = self._environment.runner
            gevent.spawn(runner.stop if self._environment.web_ui else runner.quit)

    def _begin(self, setting: Setting) -> None:
        dialect = setting.dialect(None)
        how = setting.prompts_for(dialect).how
        folder = self._folder(setting.plan)
        beside, self._beside = self._beside or Beside(), None
        try:
            self.ledger = Ledger(
                folder, setting, dialect.endpoint, how, stamps=self._stamps, command=self.command, beside=beside
            )
        except BaseException:
            beside.close()
            raise
        self.folders.append(folder)

    def _folder(self, plan: Plan) -> Path:
        named = self._environment.parsed_options.out
        folder = Path(named) if named else default_folder(plan)
        number = len(self.folders) + 1
        return folder if number == 1 or not named else folder.with_name(f"{folder.name}-{number}")

    def _on_stop(self, **_: Any) -> None:
        if self.ledger is not None:
            rescued = self.ledger.end(self.users, interrupted=self._interrupted)
            if self._environment.web_ui and self._beside is None:
                self._beside = Beside()
            if rescued is not None:
                logging.getLogger("loadgen").error(
                    "the disk is full: the end of %s is in %s", self.ledger.folder / "run.jsonl", rescued
                )

    def _on_quitting(self, environment: Any, **_: Any) -> None:
        if self.running:  # a run that ends by itself has ended before: somebody interrupts this one
            self._interrupted = True
            environment.stop_timeout = 0.0
            environment.runner.stop()
        if self._beside is not None:
            self._beside.close()
        self._stack.close()

    def _tick(self) -> None:
        """Stalls at every tick, health and figures once a second."""
        ticks = 0
        while True:
            before_ns = time.monotonic_ns()
            gevent.sleep(TICK_S)
            ledger = self.ledger
            if ledger is None or ledger.ended:
                continue
            ledger.stall(time.monotonic_ns() - before_ns - int(TICK_S * 1e9))
            ticks += 1
            if ticks % TICKS_PER_SAMPLE == 0:
                ledger.sample(self.users)


def _add_options(parser: Any, **_: Any) -> None:
    for name, default, text in FORM:
        parser.add_argument(name, default=default, help=text, include_in_web_ui=True)
    for name, default, text in HIDDEN:
        parser.add_argument(name, default=default, help=text, include_in_web_ui=False)
    for name, text in FLAGS:
        parser.add_argument(name, action="store_true", help=text, include_in_web_ui=False)


DESK = Desk()
