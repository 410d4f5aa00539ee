"""Starts real or simulated servers without containers, as processes of this machine.

Each server leads a separate process group. A server is identified by its process id, never by its name. Process ids are
reused, so the id is stored in a file together with the start time of the process (/proc/PID/stat, field 22). Later
commands read this file to find the server. The module runs only on Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
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
from loadgen.servers.own_process import own_process

OPTIONS = frozenset(
    ("python", "port", "name", "arguments", "env", "tensor_parallel", "gpus", "log", "timeout_s", "api_key_env")
)
END_TIMEOUT_S = 15.0  # After SIGTERM. An engine may wait longer, until its open streams end.
HELPERS_TIMEOUT_S = 5.0  # For the rest of the group, such as Python's resource tracker, which removes shared memory
_READY_POLL_S = 0.25
_END_POLL_S = 0.05


class Command(NamedTuple):
    """The command line of a process to start, and variables for its environment."""

    words: tuple[str, ...]
    env: Mapping[str, str]  # Variables added to the environment


@dataclass(frozen=True, slots=True)
class BackgroundServer:
    """A server that a command has started and left running. The fields are stored in a file for later commands."""

    server: str
    url: str
    pid: int  # Leader of the server's process group
    ticks: int  # Start time in clock ticks. A later process with the same id has another start time.
    log: str
    since: str  # ISO 8601, local time with offset
    facts: dict[str, Any]

    @property
    def alive(self) -> bool:
        """True if the server's process is still running."""
        return start_ticks(self.pid) == self.ticks


@contextmanager
def launched_server(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """Run the server as a process of this machine, and stop it on exit.

    If this process is killed, `loadgen servers` still finds the server. These options are supported:

    - `python`: Python interpreter of the environment in which the server is installed.
    - `port`: port of the server, by default any free port.
    - `name`: name under which the server offers the model.
    - `arguments`: arguments added to the command.
    - `env`: variables added to the environment.
    - `tensor_parallel`: number of GPUs that share the model.
    - `gpus`: see LaunchSpec.gpus.
    - `log`: log file.
    - `timeout_s`: maximum time until the server is ready.
    - `api_key_env`: name of the environment variable with the API key.

    Raises LaunchError with the end of the log, and the errors of `loadgen.servers.discovery.probe`."""
    server = up(spec, say)
    try:
        yield RunningServer(server.url, server.facts, group_members(server.pid))
    finally:
        down(server)


def up(spec: LaunchSpec, say: Say) -> BackgroundServer:
    """Start the server, wait until it is ready, and leave it running.

    The options and errors are those of `launched_server`."""
    spec.check_options(OPTIONS)
    access = spec.access
    running = read_background_server(spec.server)
    if running and running.alive:
        raise LaunchError(
            f"{spec.server} runs already, as process {running.pid} at {running.url}, since {running.since}",
            f"stop it first: loadgen servers down --server {spec.server} --launch process",
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
        probed = probe(url, spec.server, access=access)
        facts: dict[str, Any] = {
            "ready_s": round(ready_s, 3),
            "version": probed.version,
            "launch": spec.method,
            "command": words,
            "environment": env,
            "pid": pid,
            "log": str(log),
        }
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        server = BackgroundServer(spec.server, probed.url, pid, start_ticks(pid) or 0, str(log), since, facts)
        write_background_server(server)
    except BaseException:
        end_process(pid)
        raise
    return server


def down(server: BackgroundServer) -> None:
    """Stop a server that `up` started, if it is still running, and delete the file that describes the server."""
    if server.alive:
        end_process(server.pid)
    (_state_folder() / f"{server.server}.json").unlink(missing_ok=True)


def logs(server: BackgroundServer, *, lines: int) -> str:
    """Return the last `lines` lines of the server's log, or the whole log if `lines` is 0."""
    text = _end_of(Path(server.log), 1 << 40 if lines == 0 else 1 << 18)
    return "\n".join(text.splitlines()[-lines:])


def command_of(spec: LaunchSpec, host: str, port: int) -> Command:
    """Return the command that starts the server on this machine, listening on `host` and `port`.

    A simulated server is started with `loadgen mock-server`. Raises LaunchError if the server is not installed or
    cannot be started as a process."""
    name = str(spec.options.get("name") or spec.model.rstrip("/").rpartition("/")[2])
    additional = tuple(map(str, spec.options.get("arguments", ())))
    if spec.method == "simulated":
        options = ("--server", spec.server, "--host", host, "--port", str(port), "--model", name)
        return Command((*own_process("loadgen", "mock-server", *options), *additional), {})
    command = BACKENDS[spec.server].process
    if command is None:
        raise LaunchError(
            f"{spec.server} cannot be started as a process: it is not a Python package",
            "start it in a container (--launch compose), or start it yourself and pass --url",
        )
    # The model is a folder below the host's model_dir, another folder, or a name on the Hub. Folders are passed as
    # absolute paths, because servers may take a relative one for a name on the Hub.
    candidates = [Path(spec.host.model_dir) / spec.model] if spec.host.model_dir else []
    candidates.append(Path(spec.model))
    folder = next((candidate.absolute() for candidate in candidates if candidate.is_dir()), None)
    values: dict[str, object] = {
        "model": folder or spec.model,
        "name": name,
        "host": host,
        "port": port,
        "tensor_parallel": spec.tensor_parallel,
    }
    parallel = command.parallel if spec.tensor_parallel > 1 else ()
    words = [word.format_map(values) for word in (*command.arguments, *parallel)]
    # `python -m` would import a Python file of the working directory in place of a library with the same name. Python
    # 3.11 and newer have this setting, and older versions ignore it.
    env = {"PYTHONSAFEPATH": "1"} | dict(command.env)
    if folder:
        env["HF_HUB_OFFLINE"] = "1"
        if is_ladder(folder):
            env |= _ladder_env(spec.server, command)
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = spec.gpus
    env |= spec.host.env
    env |= spec.options.get("env", {})
    return Command((*_program(spec, command, values), *words, *additional), env)


def _ladder_env(server: str, command: ProcessCommand) -> dict[str, str]:
    """Return the environment variables with which `server` can serve a ladder model.

    A ladder model has a special architecture (see `servers.ladder`), for which the server needs a plugin. The result is
    a PYTHONPATH that contains the folder of this plugin. The folder is stated in `command`, which describes how the
    server is started.

    Raises LaunchError if the server has no such plugin. Without the plugin, the server would serve the weights as a
    standard model, without an error.
    """
    if not command.ladder:
        able = join_or(name for name, backend in BACKENDS.items() if backend.process and backend.process.ladder)
        raise LaunchError(f"the model is a ladder, which {server} does not support", f"serve it with --server {able}")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (command.ladder, os.environ.get("PYTHONPATH"))))}


def _program(spec: LaunchSpec, command: ProcessCommand, values: Mapping[str, object]) -> list[str]:
    """Return the first words of the command: the server's program if it is installed, otherwise `python -m MODULE`.

    Raises LaunchError if there is neither the program nor a Python interpreter."""
    named = spec.options.get("python")
    # The path is not resolved, because the interpreter of a virtual environment is a symbolic link.
    python = str(Path(named).expanduser().absolute()) if named else None
    if python and not Path(python).is_file():
        raise LaunchError(f"{python} does not exist", "--python names an interpreter, such as .venv/bin/python")
    if command.program:
        name, *first = command.program
        program = shutil.which(name, path=str(Path(python).parent) if python else None)
        if program:
            return [program, *(word.format_map(values) for word in first)]
        if not python:
            raise LaunchError(
                f"{name} is not installed: there is no program of that name on PATH",
                f"install it (`pip install {name}`), or name a Python that has it: --python PATH",
            )
    python = python or shutil.which("python3")
    if python is None:
        raise LaunchError("there is no python3 on PATH", f"name a Python that has {spec.server}: --python PATH")
    return [python, "-m", *(word.format_map(values) for word in command.module)]


def start_and_wait(
    server: str, command: Command, url: str, log: Path, say: Say, *, timeout_s: float = READY_TIMEOUT_S
) -> tuple[int, float]:
    """Start `command`, and wait until the server answers at `url`.

    Returns the process id and the startup time in seconds. If the start fails, the process is ended, and LaunchError
    with the end of the log is raised."""
    try:
        pid = start_process(command.words, command.env, log)
    except OSError as problem:
        raise LaunchError(
            f"cannot start {command.words[0]}: {problem.strerror}", "name a Python that has it: --python PATH"
        ) from problem

    def watch() -> str:
        # This call reaps the child if it has ended. Later calls cannot return its exit status.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return tail(_end_of(log), 1)
        code = os.waitstatus_to_exitcode(status)
        reason = f"it ended during startup, with exit code {code}"
        if code == -signal.SIGKILL:
            reason = "it was killed during startup: did this machine run out of memory?"
        raise ended_error(server, _end_of(log), reason)

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
    """Return the last `limit_bytes` of the log as text without secrets, or "" if the log cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return readable_log(file.read())
    except OSError:
        return ""


def _state_folder() -> Path:
    """Return the folder for the logs and descriptions of servers, and create it if necessary.

    The folder is $XDG_STATE_HOME/loadgen, or ~/.local/state/loadgen by default."""
    base = os.environ.get("XDG_STATE_HOME", "")
    state = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    folder = state / "loadgen"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def log_file(server: str, host: str) -> Path:
    """Return the path of the server's log. Each start of the server overwrites the previous log."""
    return _state_folder() / f"{host}-{server}.log"


def read_background_server(server: str) -> BackgroundServer | None:
    """Return the stored description of a server, or None if there is no readable description."""
    try:
        return msgspec.json.decode((_state_folder() / f"{server}.json").read_bytes(), type=BackgroundServer)
    except (OSError, *DECODE_ERRORS):
        return None


def write_background_server(server: BackgroundServer) -> None:
    """Store the description of a server for later commands. An earlier description is replaced."""
    file = _state_folder() / f"{server.server}.json"
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(server))
    new.replace(file)


def start_process(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    """Start `command` in a new session and process group, and return its process id.

    Standard output and standard error go to `log`. `env` is added to the environment of this process. Raises OSError if
    the program or the folder of the log does not exist."""
    if log.is_file():  # not for a device
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
    """End a process that `start_process` started, and all other processes of its group.

    The process itself gets SIGTERM first. When it has ended, the other processes of its group get SIGTERM. Processes
    that do not end in time get SIGKILL. If the process has already ended, no error is raised."""
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
        os.waitpid(pid, os.WNOHANG)  # otherwise a child of this process would stay a zombie


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None if the process has ended.

    A zombie counts as ended."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def group_members(pid: int) -> tuple[int, ...]:
    """Return the ids of the running processes in the process group that the process `pid` leads, including `pid`."""
    members: list[int] = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        fields = _stat(int(path.name))
        if fields and int(fields[2]) == pid and fields[0] not in "ZX":
            members.append(int(path.name))
    return tuple(members)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port of `address` that no process uses at the moment."""
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from field 3 (state) on, or None if the process does not exist.

    Field 2, the name of the program, is skipped because it may contain spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except (OSError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `done()` returns True, and return True. If the wait exceeds `timeout_s` seconds, return False."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_END_POLL_S)
    return True
