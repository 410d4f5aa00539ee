"""Servers in containers: docker-compose.yml on this machine or on a GPU host, one service at a time.

Compose starts the container; whether the server is ready is seen from both sides, by the container's health and by its
own health route from here, because a port that is published on the wrong address is a common mistake.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from loadgen.servers.auth import redact
from loadgen.servers.backends import BACKENDS
from loadgen.servers.discovery import probe
from loadgen.servers.errors import DECODE_ERRORS, LaunchError
from loadgen.servers.launch import spec as common
from loadgen.servers.launch.process import log_file
from loadgen.servers.launch.spec import LOCAL, LOOK_AT_LOG, Host, LaunchSpec, RunningServer, Say, readable_log, tail

CALL_TIMEOUT_S = 60.0  # For every call but those that may pull an image or stop a server
PULL_TIMEOUT_S = 7200.0  # Images of these servers are 10 to 30 GB
STOP_TIMEOUT_S = 180.0  # More than the stop_grace_period of docker-compose.yml
UNREACHABLE_AFTER_S = 60.0  # A container that is healthy for so long, and does not answer from here, never will
OPTIONS = frozenset(("file", "env", "tensor_parallel", "gpus", "timeout_s", "poll_s", "unreachable_s", "api_key_env"))
_POLL_S = 3.0


@contextmanager
def launched_server(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """The server in a container of the host. Options: `file` (another docker-compose.yml), `env` (more for it),
    `timeout_s`, `poll_s`, `unreachable_s`, `api_key_env`; `tensor_parallel`, over how many GPUs the model is spread,
    and `gpus`, which ones (LaunchSpec.gpus). Raises LaunchError with the end of the container's log, and what `probe`
    raises."""
    there = up(spec, say)
    try:
        yield there
    finally:
        say(f"stopping {_where(spec)}")
        down(spec)


def up(spec: LaunchSpec, say: Say) -> RunningServer:
    """Start the server and wait until it is ready. When it is not, it is taken down again and its log kept."""
    host, server = spec.host, spec.server
    spec.check_options(OPTIONS)
    access = spec.access
    redact(_env(spec))
    engine = {
        "compose_version": docker(host, "compose", "version", "--short").strip(),
        "engine_version": docker(host, "version", "--format", "{{.Server.Version}}").strip(),
    }
    _make_volume(host)
    before = status(spec)
    say(f"starting {server} on {host.name}: docker {' '.join(_words(spec))} up")
    try:
        _compose(spec, "up", "--detach", "--no-deps", server, timeout_s=PULL_TIMEOUT_S, say=say)
        row, log = status(spec), partial(logs, spec, lines=25)
        ran = before.get("State") == "running" and before["ID"] == row.get("ID")
        url = server_url(row, spec)
        limits = {"timeout_s": spec.timeout_s, "poll_s": float(spec.options.get("poll_s") or _POLL_S)}
        ready_s = common.wait_until_ready(_where(spec), url, _watch(spec, url), log, say, **limits)
        facts = probe(url, server, access=access)
        retained = {"launch": "compose", "host": host.name, "platform": host.platform, "docker": host.docker}
        known = {"version": facts.version, **engine} | ({} if ran else {"ready_s": round(ready_s, 3)})
        return RunningServer(facts.url, retained | known | _container_facts(host, row.get("ID", "")))
    except BaseException as problem:
        say(f"stopping {_where(spec)}")
        with suppress(LaunchError, OSError):  # the whole log is kept before the container goes
            if text := logs(spec, lines=0):
                file = log_file(server, host.name)
                file.write_text(text, "utf-8")
                if isinstance(problem, LaunchError):
                    problem.hint += f"; the whole log is in {file}"
        with suppress(LaunchError):
            down(spec)
        raise


def down(spec: LaunchSpec) -> None:
    """Stop the server's container and remove it, and the project's network once nobody uses it; volumes stay."""
    _compose(spec, "down", spec.server, timeout_s=STOP_TIMEOUT_S)


def status(spec: LaunchSpec) -> dict[str, Any]:
    """The service's line of `docker compose ps`: state, health, exit code and image of its container under Compose's
    own names; empty without one. It is one JSON text per line, before 2.21 one array."""
    text = _compose(spec, "ps", "--all", "--format", "json", spec.server).strip()
    rows = msgspec.json.decode(text) if text.startswith("[") else [msgspec.json.decode(t) for t in text.splitlines()]
    return dict(rows[0]) if rows else {}


def describe_state(row: dict[str, Any]) -> str:
    """State and health of a container, as `docker compose ps` says them: `running (healthy)`."""
    health = row.get("Health")
    return f"{row.get('State')}{f' ({health})' if health else ''}"


def has_container(spec: LaunchSpec) -> bool:
    """Whether the server has a container; not, too, where there is no Docker."""
    with suppress(LaunchError):
        return bool(status(spec))
    return False


def logs(spec: LaunchSpec, *, lines: int) -> str:
    """The last lines of the container's log, or all of it where `lines` is 0."""
    return _compose(spec, "logs", "--no-color", "--no-log-prefix", "--tail", str(lines or "all"), spec.server)


def server_url(row: Mapping[str, Any], spec: LaunchSpec) -> str:
    """Where the server is reached from here. Its port is the one that Docker says it has published: VLLM_PORT and the
    like may have moved it, from the hosts file, the shell or a `.env` file beside docker-compose.yml."""
    address = f"[{spec.host.address}]" if ":" in spec.host.address else spec.host.address
    published = (each["PublishedPort"] for each in row.get("Publishers") or () if each.get("PublishedPort"))
    return f"http://{address}:{next(published, BACKENDS[spec.server].port)}"


def compose_file(named: str | Path | None = None) -> Path:
    """The docker-compose.yml named, or the one that came with loadgen. Raises LaunchError. Never one that merely lies
    in the working folder: it may be somebody else's."""
    package = Path(__file__).resolve().parent
    came_with_it = [folder / "docker-compose.yml" for folder in (package.parents[1], package)]
    places = [Path(named)] if named else came_with_it  # of a checkout, of an installed wheel
    result = next((place for place in places if place.is_file()), None)
    if result is None:
        raise LaunchError(f"there is no {places[0]}", "name the file with --file")
    return result.absolute()


def _compose(spec: LaunchSpec, *arguments: str, timeout_s: float = CALL_TIMEOUT_S, say: Say | None = None) -> str:
    return docker(spec.host, *_words(spec), *arguments, env=_env(spec), timeout_s=timeout_s, say=say)


def _where(spec: LaunchSpec) -> str:
    return f"{spec.server} on {spec.host.name}"


def _words(spec: LaunchSpec) -> tuple[str, ...]:
    file = str(compose_file(spec.options.get("file")))
    # One project per host, so that two hosts of a hosts file may share an engine.
    project = "loadgen" if spec.host.name == LOCAL.name else f"loadgen-{spec.host.name}"
    return ("compose", "--file", file, "--project-name", project, "--profile", spec.server)


def _env(spec: LaunchSpec) -> dict[str, str]:
    """What docker-compose.yml is told about this host, and what the hosts file says beside."""
    try:
        result = str(socket.getaddrinfo(spec.host.address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as problem:
        raise LaunchError(f"{spec.host.address}: no such host", "check `address` in the hosts file") from problem
    told = {
        "MODELS_VOLUME": spec.host.model_volume,
        # Ports are published on the address under which the host is reached, and on no other.
        "BIND": f"[{result}]" if ":" in result else result,
        "MODEL_NAME": spec.model,
        "TENSOR_PARALLEL": str(spec.tensor_parallel),
        f"{spec.server.upper()}_GPU": spec.gpus,
    }
    more = {name: str(value) for name, value in spec.options.get("env", {}).items()}
    return {name: value for name, value in told.items() if value} | dict(spec.host.env) | more


def _make_volume(host: Host) -> None:
    """The volume of the models as a view of the folder that the hosts file names. One that exists stays as it is."""
    if not host.model_dir:
        return
    names = docker(host, "volume", "ls", "--quiet", "--filter", f"name=^{host.model_volume}$").split()
    if host.model_volume not in names:
        options = [f"--opt={each}" for each in ("type=none", "o=bind", f"device={host.model_dir}")]
        docker(host, "volume", "create", *options, host.model_volume)
        return
    (said,) = msgspec.json.decode(docker(host, "volume", "inspect", host.model_volume))
    shown = str((said.get("Options") or {}).get("device", ""))
    if shown != host.model_dir:
        raise LaunchError(
            f"the volume {host.model_volume} on {host.name} shows {shown or 'files of its own'}, not {host.model_dir}",
            "name another model_volume in the hosts file, or leave model_dir out to use the volume as it is",
        )


def _watch(spec: LaunchSpec, url: str) -> Callable[[], str]:
    """Raises once the container has ended, is unhealthy, or is healthy where it cannot be reached from here."""
    healthy_s: list[float] = []

    def watch() -> str:
        row = status(spec)
        health = row.get("Health")
        if row.get("State", "gone") in ("exited", "dead", "gone"):
            raise _ended(spec, row)
        if health == "unhealthy":
            what = f"{_where(spec)} runs, but its health check fails"
            raise LaunchError(what, f"{LOOK_AT_LOG}; it may be stuck", log_tail=tail(logs(spec, lines=25)))
        if health == "healthy":
            healthy_s.append(time.monotonic())
            if healthy_s[-1] - healthy_s[0] > float(spec.options.get("unreachable_s", UNREACHABLE_AFTER_S)):
                raise LaunchError(
                    f"{_where(spec)} is healthy, but nothing answers at {url} from here",
                    "check `address` of the host, BIND in its env, and the firewall between",
                )
        return f"{describe_state(row)}; {tail(logs(spec, lines=1), 1)}"

    return watch


def _ended(spec: LaunchSpec, row: dict[str, Any]) -> LaunchError:
    """Why the container has ended, from its log, else from what the engine knows."""
    code = f", with exit code {row['ExitCode']}" if "ExitCode" in row else ""
    otherwise = f"it ended while it started{code}", LOOK_AT_LOG
    with suppress(LaunchError):
        killed = row and docker(spec.host, "inspect", "--format", "{{.State.OOMKilled}}", row.get("ID", "")).strip()
        if killed == "true":
            otherwise = "it was killed for using too much memory of the host", "free some, or choose a smaller model"
    log = logs(spec, lines=200) if row else ""
    return common.ended_error(spec.server, log, *otherwise, where=f"{_where(spec)}: ")


def docker(
    host: Host,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    say: Say | None = None,
) -> str:
    """Run `docker` against the host's engine; its standard output. `env` is for this call alone. `say` gets the last
    line that Docker has printed, every ten seconds. Raises LaunchError with a message of its own for each known
    failure."""
    program = shutil.which("docker")
    if program is None:
        raise LaunchError(
            "docker is not installed on this machine",
            "install Docker's command line with the Compose plugin, or start without Docker: --launch process",
        )
    context: list[str] = []
    environment = dict(os.environ)
    if host.docker:  # a host that names its engine must not be led elsewhere
        environment.pop("DOCKER_HOST", None)
        environment.pop("DOCKER_CONTEXT", None)
    if host.docker.startswith("ssh://"):
        environment["DOCKER_HOST"] = host.docker
    elif host.docker:
        context = ["--context", host.docker]
    code, out, err = _run([program, *context, *arguments], environment | dict(env or {}), timeout_s, say)
    if code:
        printed = err or out
        if known := common.known_fault(printed, "docker"):
            raise LaunchError(*known, log_tail=tail(printed, 6))
        what = f"docker {' '.join(arguments)} on {host.name} ended with {code}"
        raise LaunchError(what, "Docker's own words are above", log_tail=tail(printed))
    return out


def _container_facts(host: Host, name: str) -> dict[str, Any]:
    """What is kept of a container with a run: image, digest, command and limits, and the driver and GPU that it sees.
    What cannot be had is left out. Its environment is not kept: it may hold tokens."""
    facts: dict[str, Any] = {}
    with suppress(LaunchError, LookupError, *DECODE_ERRORS):
        said = msgspec.json.decode(docker(host, "inspect", name))[0]
        config, limits = said.get("Config") or {}, said.get("HostConfig") or {}
        facts |= {"image": config.get("Image"), "image_id": said.get("Image")}
        facts["command"] = redact(config.get("Cmd"))
        facts |= {"started": (said.get("State") or {}).get("StartedAt")}
        retained = ("ShmSize", "IpcMode", "DeviceRequests", "Ulimits", "Memory")
        facts["limits"] = {key: limits.get(key) for key in retained}
        text = docker(host, "image", "inspect", "--format", "{{json .RepoDigests}}", str(said.get("Image")))
        facts["image_digest"] = next(iter(msgspec.json.decode(text) or ()), "")
    query = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    with suppress(LaunchError, ValueError, LookupError):
        seen = docker(host, "exec", name, *query).strip().splitlines()[0]
        facts["driver_version"], facts["gpu"] = seen.split(", ", 1)
    return {key: value for key, value in facts.items() if value}


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float, say: Say | None) -> tuple[int, str, str]:
    """Through files, so that a child which outlives the call (ssh's connection sharing) holds up no pipe."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        child = subprocess.Popen(  # noqa: S603 - docker, with arguments of ours
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        began_s = time.monotonic()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(min(common.PROGRESS_INTERVAL_S, timeout_s)), _text(out), _text(err)
                passed_s = time.monotonic() - began_s
                if passed_s > timeout_s:
                    raise LaunchError(
                        f"{' '.join(command[1:4])} ... did not end within {timeout_s:.0f} s",
                        "is the host reachable, and its Docker engine well?",
                        log_tail=tail(_text(err)),
                    )
                if say:
                    say(f"{passed_s:.0f} s: {tail(_text(err), 1).strip()}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


def _text(file: IO[bytes]) -> str:
    # Without moving the position in it, which the child shares and may be writing at.
    return readable_log(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
