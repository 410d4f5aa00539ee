"""Servers without containers: vLLM and LightLLM from a Python environment, on GPU or CPU, and the simulated ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from servers.errors import LaunchError
from servers.launch import processes, ready, state
from servers.launch.base import READY_TIMEOUT_S, Launched, Say, Wanted, check_options
from servers.launch.commands import Command, command_of, simulated
from servers.launch.diagnose import LOGS, find, tail

OPTIONS = frozenset(
    ("python", "port", "name", "arguments", "env", "tensor_parallel", "gpus", "log", "timeout_s", "api_key_env"),
)
_POLL_S = 0.25


@contextmanager
def launched(wanted: Wanted, say: Say) -> Iterator[Launched]:
    """The server as a process of this machine. It is found by `loadgen servers` too, should this process be killed.

    Options: `python` (interpreter that has it), `port` (0 or none: any free one), `name` (of the model), `arguments`
    (added to the command), `env` (added to its environment), `tensor_parallel` and `gpus` (see gpus_of), `log` (file),
    `timeout_s`, `api_key_env`. Raises LaunchError with the end of the log, and
    what `probe` raises.
    """
    left = up(wanted, say)
    try:
        yield Launched(left.url, left.facts, processes.group(left.pid))
    finally:
        down(left)


def up(wanted: Wanted, say: Say) -> state.State:
    """Start the server wanted and leave it running; what was kept of it. Options and errors as for `launched`."""
    check_options(wanted, OPTIONS)
    if (before := state.read(wanted.server)) and before.alive:
        raise LaunchError(
            f"{wanted.server} runs already, as process {before.pid} at {before.url}, since {before.since}",
            f"take it down first: loadgen servers down --server {wanted.server} --launch process",
        )
    if wanted.host.docker or wanted.host.address not in ("127.0.0.1", "localhost"):
        raise LaunchError(
            f"a process can only be started on this machine, not on {wanted.host.name}",
            "log in there and run the same command, or use --launch compose",
        )
    address = wanted.host.address
    port = wanted.options.get("port") or processes.free_port(address)
    command = (simulated if wanted.how == "simulated" else command_of)(wanted, address, port)
    log = Path(wanted.options.get("log") or state.log_file(wanted.server, wanted.host.name))
    say(f"starting {wanted.server}: {' '.join(command.words)}")
    pid, ready_s = started(command, f"http://{address}:{port}", log, say, **_limits(wanted.options))
    return _kept(wanted, command, pid, ready_s, f"http://{address}:{port}", log)


def started(
    command: Command, url: str, log: Path, say: Say, *, timeout_s: float = READY_TIMEOUT_S
) -> tuple[int, float]:
    """Start `command` and wait until it answers at `url`: the process, and how many seconds that took.

    Raises LaunchError with the end of the log, once the process has been ended.
    """
    try:
        pid = processes.start(command.words, command.env, log)
    except OSError as problem:
        raise LaunchError(
            f"cannot start {command.words[0]}: {problem.strerror}", "name the Python that has it: --python PATH"
        ) from problem
    try:
        ready_s = ready.wait(url, _watch(pid, log), say, timeout_s=timeout_s, poll_s=_POLL_S)
        if ready_s is None:
            raise LaunchError(
                f"{url} did not get ready within {timeout_s:g} s, and process {pid} is still at it",
                f"allow more with --timeout; the whole log is in {log}",
                log_tail=_tail(log),
            )
    except BaseException:
        processes.end(pid)
        raise
    return pid, ready_s


def down(left: state.State) -> None:
    """End a server that `up` started, and forget it. One that has ended by itself is forgotten too."""
    if left.alive:
        processes.end(left.pid)
    state.forget(left.server)


def logs(left: state.State, *, lines: int) -> str:
    """The last lines of the server's log, or all of it where `lines` is 0."""
    text = _read(Path(left.log), 1 << 40 if lines == 0 else 1 << 18)
    return "\n".join(text.splitlines()[-lines:])


def _kept(wanted: Wanted, command: Command, pid: int, ready_s: float, url: str, log: Path) -> state.State:
    """The facts of a server that is ready, kept for later commands. Whatever fails here ends the server."""
    try:
        said = ready.facts_of(url, wanted.server, os.environ.get(wanted.options.get("api_key_env", "LOADGEN_API_KEY")))
        facts: dict[str, Any] = {
            "launch": wanted.how,
            "command": list(command.words),
            "environment": _without_secrets(command.env),
            "pid": pid,
            "log": str(log),
            "ready_s": round(ready_s, 3),
            "version": said.version,
        }
        left = state.State(
            wanted.server,
            said.url,
            pid,
            processes.started_ticks(pid) or 0,
            str(log),
            list(command.words),
            datetime.now().astimezone().isoformat(timespec="seconds"),
            facts,
        )
        state.write(left)
    except BaseException:
        processes.end(pid)
        raise
    return left


def _watch(pid: int, log: Path) -> Callable[[], str]:
    """Raises once the process has ended, with what its log says about that."""

    def watch() -> str:
        code = processes.exit_code(pid)
        if code is None:
            return tail(_read(log), 1)
        text = _read(log)
        what, hint = find(text, LOGS) or (_ended(code), f"the whole log is in {log}")
        raise LaunchError(what, hint, log_tail=tail(text))

    return watch


def _ended(code: int) -> str:
    if code == -9:
        return "it was killed while it started: did this machine run out of memory?"
    return f"it ended while it started, with exit code {code}"


def _limits(options: Mapping[str, Any]) -> dict[str, float]:
    return {"timeout_s": float(options["timeout_s"])} if options.get("timeout_s") else {}


def _without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    return {name: "..." if _secret(name) else value for name, value in env.items()}


def _secret(name: str) -> bool:
    return name.upper().endswith(("TOKEN", "KEY", "SECRET", "PASSWORD"))


def _read(log: Path, limit_bytes: int = 1 << 18) -> str:
    """The end of the log; the whole may be long."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _tail(log: Path) -> str:
    return tail(_read(log))
