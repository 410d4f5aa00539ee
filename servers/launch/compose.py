"""Servers in containers: docker-compose.yml on this machine or on a GPU host, one service at a time.

Compose starts the container; whether the server is ready is seen from both sides, by the container's health and by its
own health route from here, because a port that is published on the wrong address is a common mistake.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from servers.errors import LaunchError
from servers.kinds import KINDS
from servers.launch import inspect, ready, state
from servers.launch.base import READY_TIMEOUT_S, Launched, Say, Wanted, check_options, gpus_of, tensor_parallel
from servers.launch.diagnose import LOGS, ending, find, tail
from servers.launch.docker import docker
from servers.launch.hosts import LOCAL, Host

PULL_TIMEOUT_S = 7200.0
"""Images of these servers are 10 to 30 GB."""
STOP_TIMEOUT_S = 180.0
"""More than the stop_grace_period of docker-compose.yml."""
UNREACHABLE_AFTER_S = 60.0
"""A container that is healthy for so long, and does not answer from here, never will."""
OPTIONS = frozenset(
    ("file", "env", "tensor_parallel", "gpus", "timeout_s", "poll_s", "unreachable_s", "api_key_env"),
)
_POLL_S = 3.0


@contextmanager
def launched(wanted: Wanted, say: Say) -> Iterator[Launched]:
    """The server in a container of the host.

    Options: `file` (another docker-compose.yml), `env` (more for it), `timeout_s`, `poll_s`, `unreachable_s`,
    `api_key_env`; `tensor_parallel`, over how many GPUs the model is spread, and `gpus`, which ones (see gpus_of).
    Raises LaunchError with the end of the container's log, and what `probe` raises.
    """
    there = up(wanted, say)
    try:
        yield there
    finally:
        down(wanted)


def up(wanted: Wanted, say: Say) -> Launched:
    """Start the server wanted and wait until it is ready. When it is not, it is taken down again and its log kept."""
    host, server = wanted.host, wanted.server
    check_options(wanted, OPTIONS)
    versions = inspect.versions(host)
    _make_volume(host)
    say(f"starting {server} on {host.name}: docker {' '.join(_words(wanted))} up")
    try:
        _compose(wanted, "up", "--detach", "--no-deps", server, timeout_s=PULL_TIMEOUT_S, say=say)
        url = url_of(server, host)
        limit_s = float(wanted.options.get("timeout_s") or READY_TIMEOUT_S)
        poll_s = float(wanted.options.get("poll_s") or _POLL_S)
        ready_s = ready.wait(url, _watch(wanted, url), say, timeout_s=limit_s, poll_s=poll_s)
        if ready_s is None:
            raise LaunchError(
                f"{server} on {host.name} did not get ready within {limit_s:g} s",
                "allow more with --timeout, or look at the end of its log",
                log_tail=tail(logs(wanted, lines=25)),
            )
        facts = ready.facts_of(url, server, os.environ.get(wanted.options.get("api_key_env", "LOADGEN_API_KEY")))
        kept: dict[str, Any] = {
            "launch": "compose",
            "host": host.name,
            "platform": host.platform,
            "docker": host.docker,
        }
        kept |= {"ready_s": round(ready_s, 3), "version": facts.version, **versions}
        return Launched(facts.url, kept | inspect.container(host, _row(wanted).get("ID", "")))
    except BaseException as problem:
        _keep_log(wanted, problem)
        with suppress(LaunchError):
            down(wanted)
        raise


def down(wanted: Wanted) -> None:
    """Stop the server's container and remove it; volumes and everything else of the project stay."""
    _compose(wanted, "rm", "--stop", "--force", wanted.server, timeout_s=STOP_TIMEOUT_S)


def status(wanted: Wanted) -> dict[str, Any]:
    """State, health, exit code and image of the server's container, under Compose's own names; empty without one."""
    return _row(wanted)


def is_there(wanted: Wanted) -> bool:
    """Whether the server has a container; not, too, where there is no Docker."""
    with suppress(LaunchError):
        return bool(_row(wanted))
    return False


def logs(wanted: Wanted, *, lines: int) -> str:
    """The last lines of the container's log, or all of it where `lines` is 0."""
    return _compose(wanted, "logs", "--no-color", "--no-log-prefix", "--tail", str(lines or "all"), wanted.server)


def url_of(server: str, host: Host) -> str:
    """Where the server of docker-compose.yml is reached from here. VLLM_PORT and the like in `env` move it."""
    address = f"[{host.address}]" if ":" in host.address else host.address
    return f"http://{address}:{host.env.get(f'{server.upper()}_PORT', KINDS[server].port)}"


def compose_file(named: str | Path | None = None) -> Path:
    """The docker-compose.yml named, or the one that came with loadgen. Raises LaunchError.

    Never one that merely lies in the working folder: it may be somebody else's.
    """
    package = Path(__file__).resolve().parent
    came_with_it = [folder / "docker-compose.yml" for folder in (package.parents[1], package)]
    places = [Path(named)] if named else came_with_it  # of a checkout, of an installed wheel
    found = next((each for each in places if each.is_file()), None)
    if found is None:
        raise LaunchError(f"there is no {places[0]}", "name the file with --file")
    return found.absolute()


def project_of(host: Host) -> str:
    """One project per host, so that two hosts of a hosts file may share an engine."""
    return "loadgen" if host.name == LOCAL.name else f"loadgen-{host.name}"


def _compose(wanted: Wanted, *arguments: str, timeout_s: float = 60.0, say: Say | None = None) -> str:
    return docker(wanted.host, *_words(wanted), *arguments, env=_env(wanted), timeout_s=timeout_s, say=say)


def _words(wanted: Wanted) -> tuple[str, ...]:
    file = str(compose_file(wanted.options.get("file")))
    return ("compose", "--file", file, "--project-name", project_of(wanted.host), "--profile", wanted.server)


def _env(wanted: Wanted) -> dict[str, str]:
    """What docker-compose.yml is told about this host, and what the hosts file says beside."""
    host = wanted.host
    told = {"MODELS_VOLUME": host.model_volume, "BIND": _bind(host.address)}
    if wanted.model:
        told["MODEL_NAME"] = wanted.model
    told["TENSOR_PARALLEL"] = str(tensor_parallel(wanted))
    if gpus := gpus_of(wanted):
        told[f"{wanted.server.upper()}_GPU"] = gpus
    return told | dict(host.env) | {name: str(value) for name, value in wanted.options.get("env", {}).items()}


def _bind(address: str) -> str:
    """The address that ports are published on: the one under which the host is reached, and no other."""
    try:
        found = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as problem:
        raise LaunchError(f"{address}: no such host", "check `address` in the hosts file") from problem
    return f"[{found}]" if ":" in found else found


def _make_volume(host: Host) -> None:
    """The volume of the models as a view of the folder that the hosts file names. One that exists stays as it is."""
    if not host.model_dir:
        return
    shown = _shown(host)
    if shown is None:
        options = [f"--opt={each}" for each in ("type=none", "o=bind", f"device={host.model_dir}")]
        docker(host, "volume", "create", *options, host.model_volume)
    elif shown != host.model_dir:
        raise LaunchError(
            f"the volume {host.model_volume} on {host.name} shows {shown or 'files of its own'}, not {host.model_dir}",
            "name another model_volume in the hosts file, or leave model_dir out to use the volume as it is",
        )


def _shown(host: Host) -> str | None:
    """The folder that the host's volume shows, empty for one of its own; None when there is no such volume."""
    names = docker(host, "volume", "ls", "--quiet", "--filter", f"name=^{host.model_volume}$").split()
    if host.model_volume not in names:
        return None
    (said,) = msgspec.json.decode(docker(host, "volume", "inspect", host.model_volume))
    return str((said.get("Options") or {}).get("device", ""))


def _row(wanted: Wanted) -> dict[str, Any]:
    """The service's line of `docker compose ps`: one JSON text per line, before 2.21 one array."""
    text = _compose(wanted, "ps", "--all", "--format", "json", wanted.server).strip()
    rows = msgspec.json.decode(text) if text.startswith("[") else [msgspec.json.decode(t) for t in text.splitlines()]
    return dict(rows[0]) if rows else {}


def _watch(wanted: Wanted, url: str) -> Callable[[], str]:
    """Raises once the container has ended, is unhealthy, or is healthy where it cannot be reached from here."""
    healthy_s: list[float] = []

    def watch() -> str:
        row = _row(wanted)
        state_of, health = str(row.get("State", "gone")), str(row.get("Health", ""))
        if state_of in ("exited", "dead", "gone"):
            raise _ended(wanted, row)
        if health == "unhealthy":
            raise LaunchError(
                f"{wanted.server} on {wanted.host.name} runs, but its health check fails",
                "look at the end of its log; it may be stuck",
                log_tail=tail(logs(wanted, lines=25)),
            )
        if health == "healthy":
            healthy_s.append(time.monotonic())
            if healthy_s[-1] - healthy_s[0] > float(wanted.options.get("unreachable_s", UNREACHABLE_AFTER_S)):
                raise LaunchError(
                    f"{wanted.server} on {wanted.host.name} is healthy, but nothing answers at {url} from here",
                    "check `address` of the host, BIND in its env, and the firewall between",
                )
        return f"{state_of}{f' ({health})' if health else ''}; {tail(logs(wanted, lines=1), 1)}"

    return watch


def _ended(wanted: Wanted, row: dict[str, Any]) -> LaunchError:
    """Why the container has ended, from its log, else from its exit code."""
    text = logs(wanted, lines=200) if row else ""
    where = f"{wanted.server} on {wanted.host.name}"
    if known := find(text, LOGS):
        return LaunchError(f"{where}: {known[0]}", known[1], log_tail=ending(text))
    if row and inspect.killed_for_memory(wanted.host, row.get("ID", "")):
        return LaunchError(
            f"{where} was killed for using too much memory of the host",
            "free some, or choose a smaller model",
            log_tail=ending(text),
        )
    code = f" with exit code {row['ExitCode']}" if "ExitCode" in row else ""
    return LaunchError(f"{where} ended while it started{code}", "look at the end of its log", log_tail=ending(text))


def _keep_log(wanted: Wanted, problem: BaseException) -> None:
    """The whole log in a file, before the container goes; the hint says where."""
    with suppress(LaunchError, OSError):
        if text := logs(wanted, lines=0):
            file = state.log_file(wanted.server, wanted.host.name)
            file.write_text(text, "utf-8")
            if isinstance(problem, LaunchError):
                problem.hint = f"{problem.hint}; the whole log is in {file}"
