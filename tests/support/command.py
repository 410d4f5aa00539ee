"""Runs `loadgen` commands in separate processes, and reads the files that the commands write."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from urllib.request import urlopen

from loadgen import api
from loadgen.analysis.run import runfile
from loadgen.cli import COMMANDS, main
from loadgen.cli.options import SettingsCommand
from loadgen.servers import lifeline
from loadgen.servers.simulated.server import child

ROOT = Path(__file__).parents[2]
FAST = {"ttft_s": 0.02, "itl_s": 0.002}
"""A simulated server's clock for tests that are not about time."""


LATE = (
    *(
        "loadgen.engine.coordinator",
        "loadgen.engine.telemetry_sampler",
        "loadgen.cli.output",
        "loadgen.cli.run",
        "loadgen.engine.prepare",
    ),
    *("loadgen.cli.sweep", "loadgen.cli.capacity"),
    *(
        "loadgen.servers.json_client",
        "loadgen.servers.telemetry",
        "loadgen.servers.wire.packet_ring",
        "loadgen.servers.simulated.scheduler_presets",
    ),
    *(
        "loadgen.analysis.report.page",
        "loadgen.analysis.report.terminal",
        "loadgen.analysis.build_summary",
        "numpy",
        "jinja2",
        "scipy.special",
    ),
)
"""Modules that commands import only when needed. They are imported here before the first fork."""


class Forked(subprocess.Popen[Any]):
    """A Popen that runs `loadgen ...` in a fork of the test process instead of a new interpreter.

    The test process has already imported loadgen. A new interpreter would need a second of CPU time for these imports.
    """

    def runs(self, words: list[str]) -> None:
        """Run the command line `loadgen WORDS` in the child process."""
        sys.argv = ["loadgen", *words]
        main()

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        for name in LATE:
            importlib.import_module(name)
        _build_options(args[0])
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # about forks of threaded processes
            self.pid = os.fork()
        if self.pid == 0:
            if rest[20]:
                os.setsid()
            self._become(args, *rest[3:6], p2cread, c2pwrite, errwrite)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _become(
        self, args: list[str], kept: Sequence[int], cwd: Path | None, env: dict[str, str] | None, *streams: int
    ) -> NoReturn:
        """Prepare the child process after the fork, run the command and exit. This method does not return.

        The child gets the requested streams, folder and environment, and closes all other files of the test process.
        """
        gc.freeze()  # objects of the test that own a file descriptor must not close it in this process
        code: object = 1
        # This reference keeps the old files open. If they were closed, they would close the new descriptors 0 to 2.
        before = sys.stdin, sys.stdout, sys.stderr
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream if stream >= 0 else os.open(os.devnull, os.O_RDWR), number)
            for last, following in pairwise((2, *sorted(kept), 1 << 16)):
                os.closerange(last + 1, following)  # otherwise the test's connections would stay open
            lifeline._open.clear()  # their descriptors are closed, and other files will get the same numbers
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(cwd or ".")
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            self.runs(args)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            if isinstance(code, str):
                print(code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            del before
            os._exit(code if isinstance(code, int) else 1)


def _build_options(name: str) -> None:
    """Build the options of a command in the test process, because a fork inherits them.

    The command keeps the options per type of Plan. A child process would need 10 ms of CPU time for them.
    """
    if name in COMMANDS:
        command = getattr(importlib.import_module(COMMANDS[name]), name.replace("-", "_"))
        if isinstance(command, SettingsCommand):
            _ = command.__signature__


class ForkedRun(Forked):
    """A fork of the test process that replaces the measuring process of the Python function `loadgen.run`."""

    def runs(self, words: list[str]) -> None:
        """Measure as `python -m loadgen.api` does. The last word is the descriptor of the connection to the parent."""
        api._measure(Connection(int(words[-1])))


class ForkedServer(Forked):
    """A fork of the test process in place of the process that `loadgen.servers.simulated.process` starts."""

    def runs(self, _words: list[str]) -> None:
        """Run the simulated server in the child process."""
        child()


def start(
    folder: Path, *arguments: str, command: str = "burst", report: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start `loadgen COMMAND --out FOLDER/run ARGUMENTS`, without waiting for its end.

    If `report` is False, `burst` and `run` write no HTML report. `environment` is added to the environment variables.
    """
    no_report = ["--no-report"] if command in {"burst", "run"} and not report else []
    words = [command, "--out", str(folder / "run"), *no_report, *arguments]
    # Only a new interpreter reads these variables.
    fresh = any(name.startswith(("LD_", "PYTHON")) for name in environment)
    run, words = (subprocess.Popen[str], [sys.executable, "-m", "loadgen", *words]) if fresh else (Forked, words)
    return run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)} | environment,
    )


def loadgen(
    folder: Path, *arguments: str, timeout_s: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `loadgen ARGUMENTS` in `folder` until it ends. Raises AssertionError if it prints a traceback."""
    pipe = subprocess.PIPE
    process = Forked(arguments, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=os.environ | environment)
    out, err = process.communicate(timeout=timeout_s)
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def burst(folder: Path, *arguments: str, command: str = "burst", **more: Any) -> tuple[int, str, str]:
    """Run a command as in `start` until it ends, and return its exit code, stdout and stderr.

    Raises AssertionError if the command prints a traceback.
    """
    process = start(folder, *arguments, command=command, **more)
    out, err = process.communicate(timeout=100)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def summary_of(folder: Path) -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = json.loads((folder / "run" / "summary.json").read_text())
    return loaded


def accounted(folder: Path, n: int) -> Counter[str]:
    """Check that each of the `n` requests of a run has exactly one Record. Return the number of Records per state."""
    run = runfile.read(folder / "run")
    assert sorted(record.id for record in run.records) == list(range(n))
    assert run.footer is not None
    states = Counter[str](record.state for record in run.records)
    footer = run.footer
    assert footer.rejected is not None
    assert footer.sent == n == footer.complete + footer.truncated + footer.failed + footer.rejected
    assert states["complete"] == run.footer.complete
    return states


def events_sent(url: str) -> int:
    """Return the number of events that the simulated server at `url` has sent."""
    with urlopen(f"{url}/simulated/status", timeout=10) as answer:
        return int(json.load(answer)["events"])


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.02)


def in_process(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run `loadgen ARGUMENTS` in the test process, and return its exit code, stdout and stderr.

    This is faster than a new process. It suits commands that send no load.
    """
    out, err, argv, before = io.StringIO(), io.StringIO(), sys.argv, Path.cwd()
    sys.argv = ["loadgen", *arguments]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code: object = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        os.chdir(before)
    return code if isinstance(code, int) else 0, out.getvalue(), err.getvalue()
