"""Runs `loadgen` commands in separate processes, and reads the files that the commands write."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn
from urllib.request import urlopen

from loadgen import api
from loadgen.analysis.run import runfile
from loadgen.cli import COMMANDS, LazyCommands, main
from loadgen.servers import lifeline
from loadgen.servers.simulated import process as server_process
from loadgen.servers.simulated.server import child
from tests.support.checked_patches import CheckedMonkeyPatch
from tests.support.fork_server import ChildSpec, ForkServer

ROOT = Path(__file__).parents[2]
FAST = {"ttft_s": 0.02, "itl_s": 0.002}
"""A simulated server's clock for tests that are not about time."""


LIBRARIES = (
    "encodings.idna",
    "jinja2",
    "multiprocessing.popen_fork",
    "numpy",
    "prometheus_client.parser",
    "psutil",
    "scipy.special",
    "typer._click.decorators",
    "uvloop",
)
"""Libraries that commands import only when needed. The fork server imports them before the first fork."""
SEPARATE = (
    "loadgen.dissect",
    "loadgen.distributed.locust_process",
    "loadgen.interactive",
    "loadgen.servers.ladder.plugin",
)
"""Modules that need torch or gevent, and run in separate processes. The fork server does not import them."""

SERVER = ForkServer()
"""The fork server of this test process."""


class Forked(subprocess.Popen[Any]):
    """A Popen that runs `loadgen ...` in a fork instead of a new interpreter, which would import for a second.

    The fork server forks the command, because forks of the test process cost more. The test process itself forks the
    command if a test has replaced something with the fixture `monkeypatch`, so that the command has the replacement.
    """

    forks_here: ClassVar = False
    """Whether the calling process always forks itself."""

    @classmethod
    def runs(cls, words: list[str]) -> None:
        """Run the command line `loadgen WORDS` in the child process."""
        sys.argv = ["loadgen", *words]
        main()

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        kept, cwd, env, new_session = [*rest[3]], rest[4], rest[5], rest[20]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        folder = str(Path(cwd or ".").absolute())
        spec = ChildSpec(type(self).__name__, list(args), folder, dict(env or os.environ), kept, new_session)
        self._here = self.forks_here or not SERVER.usable or bool(CheckedMonkeyPatch.patching)
        with Path(os.devnull).open("r+b", 0) as nowhere:
            streams = [stream if stream >= 0 else nowhere.fileno() for stream in (p2cread, c2pwrite, errwrite)]
            self.pid = self._fork(spec, streams) if self._here else SERVER.fork(spec, streams)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _fork(self, spec: ChildSpec, streams: list[int]) -> int:
        """Fork the calling process and return the pid of the child process."""
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # about forks of threaded processes
            pid = os.fork()
        if pid == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            self.become(spec)
        return pid

    def _internal_poll(self, _deadstate: Any = None) -> Any:
        return super()._internal_poll(_deadstate, os.waitpid if self._here else SERVER.waitpid)  # type: ignore[misc]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        return super()._try_wait(flags) if self._here else SERVER.waitpid(self.pid, flags)  # type: ignore[misc]

    @classmethod
    def become(cls, spec: ChildSpec) -> NoReturn:
        """Prepare the child process after the fork, run the command and exit. This method does not return.

        The child has the requested standard streams already. It closes all other files of its parent, except `kept`.
        """
        gc.freeze()  # objects of the parent that own a file descriptor must not close it in this process
        code: object = 1
        # This reference keeps the old files open. If they were closed, they would close the new descriptors 0 to 2.
        before = sys.stdin, sys.stdout, sys.stderr
        try:
            for last, following in pairwise((2, *sorted(spec.kept), 1 << 16)):
                os.closerange(last + 1, following)  # otherwise the parent's connections would stay open
            replace_popen(server_process, ForkedServer)
            SERVER.usable = False  # its socket is closed
            lifeline._open.clear()  # their descriptors are closed, and other files will get the same numbers
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if spec.new_session:
                os.setsid()
            os.chdir(spec.folder)
            os.environ.clear()
            os.environ.update(spec.environment)
            tempfile.tempdir = None  # found again by the command's own TMPDIR
            cls.runs(spec.words)
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


class ForkedRun(Forked):
    """A fork that replaces the measuring process of the Python function `loadgen.run`."""

    @classmethod
    def runs(cls, words: list[str]) -> None:
        """Measure as `python -m loadgen.api` does. The last word is the descriptor of the connection to the parent."""
        api._measure(Connection(int(words[-1])))


class ForkedServer(Forked):
    """A fork that replaces the process that `loadgen.servers.simulated.process` starts."""

    @classmethod
    def runs(cls, _words: list[str]) -> None:
        """Run the simulated server in the child process."""
        child()


def prepare_forks() -> None:
    """Import and build what commands need, so that forks of this process inherit it."""
    for name in LIBRARIES:
        importlib.import_module(name)
    _import_all("loadgen")
    root = LazyCommands(name="loadgen")
    commands = {name: LazyCommands.get_command(root, None, name) for name in COMMANDS}
    build = LazyCommands.get_command

    def get_command(group: LazyCommands, context: Any, name: str) -> Any:
        return commands[name] if name in commands else build(group, context, name)

    LazyCommands.get_command = get_command  # type: ignore[method-assign]
    # The first report compiles templates and decoders, which later reports use again.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tests/data/recorded/burst", Path(folder, "run"))
        code, _, err = in_process(Path(folder), "report", "run")
    assert code == 0, err
    gc.collect()
    gc.freeze()


def _import_all(package: str) -> None:
    """Import all modules of a package, except those in SEPARATE and scripts."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if module.name.startswith(SEPARATE) or module.name.endswith("__main__"):
            continue
        importlib.import_module(module.name)
        if module.ispkg:
            _import_all(module.name)


def replace_popen(module: Any, forked: type[Forked]) -> None:
    """Replace the Popen that a module calls."""
    module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": forked})


def start(
    folder: Path,
    *arguments: str,
    command: str = "burst",
    report: bool = False,
    new_interpreter: bool = False,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start `loadgen COMMAND --out FOLDER/run ARGUMENTS`, without waiting for its end.

    If `report` is False, `burst` and `run` write no HTML report. `environment` is added to the environment variables.
    With `new_interpreter`, the command is not forked.
    """
    no_report = ["--no-report"] if command in {"burst", "run"} and not report else []
    words = [command, "--out", str(folder / "run"), *no_report, *arguments]
    # Only a new interpreter reads these variables.
    fresh = new_interpreter or any(name.startswith(("LD_", "PYTHON")) for name in environment)
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
