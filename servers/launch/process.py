"""Servers without containers, as processes of this machine: real ones from a Python environment, and simulated ones.

Each leads a process group of its own, is looked at and ended by id, never by name, and what is known of it is kept in
a file, so that a later command finds it. Linux only: a process id alone says little, because ids come round again, so
each goes with the instant at which the kernel started it (/proc/PID/stat, field 22).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.servers.auth import redact
from loadgen.servers.backends import BACKENDS, join_or
from loadgen.servers.backends.base import ProcessCommand
from loadgen.servers.discovery import probe
from loadgen.servers.errors import DECODE_ERRORS, LaunchError
from loadgen.servers.ladder.checkpoint import is_ladder
from loadgen.servers.launch.spec import (
    READY_TIMEOUT_S,
    LaunchSpec,
    RunningServer,
    Say,
    ended_error,
    readable_log,
    tail,
    wait_until_ready,
)

OPTIONS = frozenset(
    ("python", "port", "name", "arguments", "env", "tensor_parallel", "gpus", "log", "timeout_s", "api_key_env")
)
END_TIMEOUT_S = 15.0  # After SIGTERM; engines that hold streams open wait for them, and a test must not
HELPERS_TIMEOUT_S = 5.0  # For what is left of its group, such as Python's resource tracker, which removes shared memory
_READY_POLL_S = 0.25
_END_POLL_S = 0.05


class Command(NamedTuple):
    """What to start."""

    words: tuple[str, ...]
    env: Mapping[str, str]  # What is added to the environment


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    """What is kept of one server that was left running."""

    server: str
    url: str
    pid: int  # Leader of a process group of its own
    ticks: int  # When the kernel started it, so that another process with the same id is not taken for it
    log: str
    since: str  # ISO 8601, local time with offset
    facts: dict[str, Any]

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        return start_ticks(self.pid) == self.ticks


@contextmanager
def launched_server(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """The server as a process of this machine. It is found by `loadgen servers` too, should this process be killed.
    Options: `python` (interpreter that has it), `port` (0 or none: any free one), `name` (of the model), `arguments`
    (added to the command), `env` (added to its environment), `tensor_parallel` and `gpus` (see LaunchSpec.gpus), `log`
    (file), `timeout_s`, `api_key_env`. Raises LaunchError with the end of the log, and what `probe` raises."""
    left = up(spec, say)
    try:
        yield RunningServer(left.url, left.facts, group_members(left.pid))
    finally:
        down(left)


def up(spec: LaunchSpec, say: Say) -> BackgroundServer:
    """Start the server and leave it running; what was kept of it. Options and errors as for `launched_server`."""
    spec.check_options(OPTIONS)
    access = spec.access
    if (before := read_background_server(spec.server)) and before.alive:
        raise LaunchError(
            f"{spec.server} runs already, as process {before.pid} at {before.url}, since {before.since}",
            f"take it down first: loadgen servers down --server {spec.server} --launch process",
        )
    if spec.host.docker or spec.host.address not in ("127.0.0.1", "localhost"):
        raise LaunchError(
            f"a process can only be started on this machine, not on {spec.host.name}",
            "log in there and run the same command, or use --launch compose",
        )
    address = spec.host.address
    port = spec.options.get("port") or free_port(address)
    command = command_of(spec, address, port)
    words, env = redact([command.words, command.env])
    log = Path(spec.options.get("log") or log_file(spec.server, spec.host.name))
    url = f"http://{address}:{port}"
    say(f"starting {spec.server}: {' '.join(words)}")
    pid, ready_s = start_and_wait(spec.server, command, url, log, say, timeout_s=spec.timeout_s)
    try:
        said = probe(url, spec.server, access=access)
        facts: dict[str, Any] = {"ready_s": round(ready_s, 3), "version": said.version, "launch": spec.how}
        facts |= {"command": words, "environment": env, "pid": pid, "log": str(log)}
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        left = BackgroundServer(spec.server, said.url, pid, start_ticks(pid) or 0, str(log), since, facts)
        write_background_server(left)
    except BaseException:
        end_process(pid)
        raise
    return left


def down(left: BackgroundServer) -> None:
    """End a server that `up` started, and forget it. One that has ended by itself is forgotten too."""
    if left.alive:
        end_process(left.pid)
    (_state_folder() / f"{left.server}.json").unlink(missing_ok=True)


def logs(left: BackgroundServer, *, lines: int) -> str:
    """The last lines of the server's log, or all of it where `lines` is 0."""
    text = _end_of(Path(left.log), 1 << 40 if lines == 0 else 1 << 18)
    return "\n".join(text.splitlines()[-lines:])


def command_of(spec: LaunchSpec, host: str, port: int) -> Command:
    """How to start the server on this machine, listening at `host` and `port`; a simulated one as `loadgen sim` does.
    Raises LaunchError when it is not installed, or is no Python package."""
    name = str(spec.options.get("name") or spec.model.rstrip("/").rpartition("/")[2])
    more = tuple(map(str, spec.options.get("arguments", ())))
    if spec.how == "simulated":
        options = ("--server", spec.server, "--host", host, "--port", str(port), "--model", name)
        return Command((sys.executable, "-m", "loadgen", "sim", *options, *more), {})
    command = BACKENDS[spec.server].process
    if command is None:
        raise LaunchError(
            f"{spec.server} cannot be started as a process: it is not a Python package",
            "start it in a container (--launch compose), or start it yourself and pass --url",
        )
    # A folder below the host's model_dir, or as it is named; else a name on the Hub. Absolute, because a relative one
    # can be taken for a name on the Hub.
    below = [Path(spec.host.model_dir) / spec.model] if spec.host.model_dir else []
    folder = next((each.absolute() for each in (*below, Path(spec.model)) if each.is_dir()), None)
    filled: dict[str, object] = {"model": folder or spec.model, "name": name, "host": host, "port": port}
    filled["tensor_parallel"] = spec.tensor_parallel
    parallel = command.parallel if spec.tensor_parallel > 1 else ()
    words = [each.format_map(filled) for each in (*command.arguments, *parallel)]
    env = {
        **command.env,
        **({"HF_HUB_OFFLINE": "1"} if folder else {}),
        **(_for_ladders(spec.server, command) if folder and is_ladder(folder) else {}),
        **({"CUDA_VISIBLE_DEVICES": spec.gpus} if spec.gpus else {}),
        **spec.host.env,
        **spec.options.get("env", {}),
    }
    return Command((*_program(spec, command, filled), *words, *more), env)


def _for_ladders(server: str, command: ProcessCommand) -> dict[str, str]:
    """The environment in which it serves them. Others would serve the weights as a standard model, and say nothing."""
    if not command.ladder:
        able = join_or(name for name, kind in BACKENDS.items() if kind.process and kind.process.ladder)
        raise LaunchError(f"the model is a ladder, which {server} does not know", f"serve it with --server {able}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (command.ladder, os.environ.get("PYTHONPATH"))))}


def _program(spec: LaunchSpec, command: ProcessCommand, filled: Mapping[str, object]) -> list[str]:
    """The first words: the kind's own program where the environment has it, else its module."""
    named = spec.options.get("python")
    # Not resolved: that of a virtual environment is a link.
    python = str(Path(named).expanduser().absolute()) if named else None
    if python and not Path(python).is_file():
        raise LaunchError(f"{python} does not exist", "--python names an interpreter, such as .venv/bin/python")
    if command.program:
        name, *first = command.program
        if beside := shutil.which(name, path=str(Path(python).parent) if python else None):
            return [beside, *(each.format_map(filled) for each in first)]
        if not python:
            raise LaunchError(
                f"{name} is not installed: there is no program of that name on PATH",
                f"install it (`pip install {name}`) or name the Python that has it: --python PATH",
            )
    python = python or shutil.which("python3")
    if python is None:
        raise LaunchError("there is no python3 on PATH", f"name the Python that has {spec.server}: --python PATH")
    return [python, "-m", *(each.format_map(filled) for each in command.module)]


def start_and_wait(
    server: str, command: Command, url: str, log: Path, say: Say, *, timeout_s: float = READY_TIMEOUT_S
) -> tuple[int, float]:
    """Start `command` and wait until it answers at `url`: the process, and how many seconds that took. Raises
    LaunchError with the end of the log, once the process has been ended."""
    try:
        pid = start_process(command.words, command.env, log)
    except OSError as problem:
        raise LaunchError(
            f"cannot start {command.words[0]}: {problem.strerror}", "name the Python that has it: --python PATH"
        ) from problem

    def watch() -> str:
        # Asked once a child has ended, the kernel forgets it.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return tail(_end_of(log), 1)
        code = os.waitstatus_to_exitcode(status)
        what = f"it ended while it started, with exit code {code}"
        if code == -signal.SIGKILL:
            what = "it was killed while it started: did this machine run out of memory?"
        raise ended_error(server, _end_of(log), what)

    try:
        return pid, wait_until_ready(
            server, url, watch, lambda: _end_of(log), say, timeout_s=timeout_s, poll_s=_READY_POLL_S
        )
    except BaseException as problem:
        end_process(pid)
        if isinstance(problem, LaunchError):
            problem.hint += f"; the whole log is in {log}"
        raise


def _end_of(log: Path, limit_bytes: int = 1 << 18) -> str:
    """The end of the log; the whole may be long."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return readable_log(file.read())
    except OSError:
        return ""


def _state_folder() -> Path:
    """Where logs, and what is known of servers, are kept: $XDG_STATE_HOME/loadgen, or ~/.local/state/loadgen."""
    base = os.environ.get("XDG_STATE_HOME", "")
    made = (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "loadgen"
    made.mkdir(parents=True, exist_ok=True)
    return made


def log_file(server: str, host: str) -> Path:
    """Where the log of a server goes; the one before is overwritten."""
    return _state_folder() / f"{host}-{server}.log"


def read_background_server(server: str) -> BackgroundServer | None:
    """What was kept of this server; None when nothing, or nothing that can be read, was."""
    try:
        return msgspec.json.decode((_state_folder() / f"{server}.json").read_bytes(), type=BackgroundServer)
    except (OSError, *DECODE_ERRORS):
        return None


def write_background_server(left: BackgroundServer) -> None:
    """Keep it, in place of what was there."""
    file = _state_folder() / f"{left.server}.json"
    beside = file.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(left))
    beside.replace(file)


def start_process(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Start `command` in a session and process group of its own, both its outputs going to `log`; its process id. `env`
    is added to this process's environment. Raises OSError when the program or the folder of the log is missing."""
    if log.is_file():  # and no device
        log.chmod(0o600)
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    return os.posix_spawnp(
        command[0],
        [*command],
        os.environ | dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), write, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGINT, signal.SIGTERM, signal.SIGPIPE),
    )


def end_process(pid: int, *, timeout_s: float = END_TIMEOUT_S) -> None:
    """SIGTERM to the process, then to what it leaves behind, and SIGKILL for whatever of its group will not end. `pid`
    leads a group of its own, as `start_process` makes them. Ending what has ended already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if _wait(lambda: start_ticks(pid) is None, timeout_s):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        _wait(lambda: not group_members(pid), HELPERS_TIMEOUT_S)
    with suppress(ProcessLookupError):
        if group_members(pid):
            os.killpg(pid, signal.SIGKILL)
            _wait(lambda: not group_members(pid), HELPERS_TIMEOUT_S)
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # a child of ours would stay a zombie


def start_ticks(pid: int) -> int | None:
    """When the kernel started this process, in clock ticks since boot; None when it has ended (a zombie has)."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def group_members(pid: int) -> tuple[int, ...]:
    """The living processes of the group that `pid` leads, itself included."""
    ids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return tuple(each for each in ids if (fields := _stat(each)) and int(fields[2]) == pid and fields[0] not in "ZX")


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 (state) on: the name before it may hold blanks and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except (OSError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not (ended := done()) and time.monotonic() < deadline_s:
        time.sleep(_END_POLL_S)
    return ended
