"""Starts servers in containers with docker-compose.yml, on this machine or on a GPU host.

Each launch starts one service of the file. A server is ready when its health route answers requests from this machine.
The health check of the container is not enough: it does not detect a port that is published on the wrong address, which
is a common mistake.
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
from loadgen.servers.backends import BACKENDS, launchable_backends
from loadgen.servers.discovery import probe
from loadgen.servers.errors import DECODE_ERRORS, LaunchError
from loadgen.servers.launch import spec as common
from loadgen.servers.launch.process import log_file
from loadgen.servers.launch.spec import LOCAL, LOOK_AT_LOG, Host, LaunchSpec, RunningServer, Say, readable_log, tail

CALL_TIMEOUT_S = 60.0  # For every call except those that may pull an image or stop a server
PULL_TIMEOUT_S = 7200.0  # Images of these servers are 10 to 30 GB
STOP_TIMEOUT_S = 180.0  # More than the stop_grace_period of docker-compose.yml
UNREACHABLE_AFTER_S = 60.0  # Time after which a healthy container that does not answer here counts as unreachable
OPTIONS = frozenset(("file", "env", "tensor_parallel", "gpus", "timeout_s", "poll_s", "unreachable_s", "api_key_env"))
_POLL_S = 3.0
_PROJECT_LABEL, _SERVICE_LABEL = "com.docker.compose.project", "com.docker.compose.service"
"""Labels that Compose gives to each container."""


@contextmanager
def launched_server(spec: LaunchSpec, say: Say) -> Iterator[RunningServer]:
    """Run the server in a container on its host, and remove the container on exit.

    These options are supported:

    - `file`: path of a docker-compose.yml to use instead of the default file.
    - `env`: additional variables for docker-compose.yml.
    - `tensor_parallel`: number of GPUs that share the model.
    - `gpus`: see LaunchSpec.gpus.
    - `timeout_s`: maximum time until the server is ready.
    - `poll_s`: time between two checks of the server.
    - `unreachable_s`: maximum time for which a healthy container may be unreachable.
    - `api_key_env`: name of the environment variable with the API key.

    Raises LaunchError, which has the end of the container's log, and the exceptions that
    `loadgen.servers.discovery.probe` raises."""
    server = up(spec, say)
    try:
        yield server
    finally:
        say(f"stopping {_where(spec)}")
        down(spec)


def up(spec: LaunchSpec, say: Say) -> RunningServer:
    """Start the server in a container, and wait until it is ready.

    If the start fails, the container's log is stored in a file, and the container is removed."""
    host = spec.host
    server = spec.server
    spec.check_options(OPTIONS)
    access = spec.access
    redact(_env(spec))
    engine = {
        "compose_version": docker(host, "compose", "version", "--short").strip(),
        "engine_version": docker(host, "version", "--format", "{{.Server.Version}}").strip(),
    }
    _make_volume(host)
    before = status(spec)
    if before.get("State") != "running":
        _require_free_gpus(spec)
    say(f"starting {server} on {host.name}: docker {' '.join(_words(spec))} up")
    try:
        _compose(spec, "up", "--detach", "--no-deps", server, timeout_s=PULL_TIMEOUT_S, say=say)
        row = status(spec)
        log = partial(logs, spec, lines=25)
        ran_before = before.get("State") == "running" and before["ID"] == row.get("ID")
        url = server_url(row, spec)
        poll_s = float(spec.options.get("poll_s") or _POLL_S)
        watch = _watch(spec, url)
        ready_s = common.wait_until_ready(_where(spec), url, watch, log, say, timeout_s=spec.timeout_s, poll_s=poll_s)
        probed = probe(url, server, access=access)
        facts: dict[str, Any] = {
            "launch": "compose",
            "host": host.name,
            "platform": host.platform,
            "docker": host.docker,
            "version": probed.version,
            **engine,
        }
        if not ran_before:
            facts["ready_s"] = round(ready_s, 3)
        return RunningServer(probed.url, facts | _container_facts(host, row.get("ID", "")))
    except BaseException as problem:
        say(f"stopping {_where(spec)}")
        with suppress(LaunchError, OSError):  # store the whole log before the container is removed
            text = logs(spec, lines=0)
            if text:
                file = log_file(server, host.name)
                file.write_text(text, "utf-8")
                if isinstance(problem, LaunchError):
                    problem.hint += f"; the whole log is in {file}"
        with suppress(LaunchError):
            down(spec)
        raise


def down(spec: LaunchSpec) -> None:
    """Stop and remove the server's container.

    The network of the Compose project is also removed if no other container uses it. Volumes are kept."""
    _compose(spec, "down", spec.server, timeout_s=STOP_TIMEOUT_S)


def status(spec: LaunchSpec) -> dict[str, Any]:
    """Return the server's row of `docker compose ps`, or an empty dict if the server has no container.

    The row has the state, health, exit code and image of the container, with Compose's names as keys. Compose prints
    one JSON object per line. Versions before 2.21 print one array."""
    text = _compose(spec, "ps", "--all", "--format", "json", spec.server).strip()
    if text.startswith("["):
        rows = msgspec.json.decode(text)
    else:
        rows = [msgspec.json.decode(line) for line in text.splitlines()]
    return dict(rows[0]) if rows else {}


def describe_state(row: dict[str, Any]) -> str:
    """Return the state and health of a container as `docker compose ps` shows them, such as `running (healthy)`."""
    health = row.get("Health")
    return f"{row.get('State')}{f' ({health})' if health else ''}"


def has_container(spec: LaunchSpec) -> bool:
    """Return True if the server has a container. If Docker cannot be used, return False."""
    with suppress(LaunchError):
        return bool(status(spec))
    return False


def logs(spec: LaunchSpec, *, lines: int) -> str:
    """Return the last `lines` lines of the container's log, or the whole log if `lines` is 0."""
    return _compose(spec, "logs", "--no-color", "--no-log-prefix", "--tail", str(lines or "all"), spec.server)


def server_url(row: Mapping[str, Any], spec: LaunchSpec) -> str:
    """Return the URL at which this machine reaches the server.

    The URL contains the port that Docker has published. This port differs from the default port if a variable such as
    VLLM_PORT is set in the hosts file, in the shell or in a `.env` file next to docker-compose.yml."""
    address = f"[{spec.host.address}]" if ":" in spec.host.address else spec.host.address
    publishers = row.get("Publishers") or ()
    published = (publisher["PublishedPort"] for publisher in publishers if publisher.get("PublishedPort"))
    return f"http://{address}:{next(published, BACKENDS[spec.server].port)}"


def compose_file(named: str | Path | None = None) -> Path:
    """Return the path of the docker-compose.yml to use: `named`, or by default the file that is installed with loadgen.

    A docker-compose.yml in the working folder is never the default, because it may belong to another project. Raises
    LaunchError if the file does not exist."""
    package = Path(__file__).resolve().parent
    installed = [folder / "docker-compose.yml" for folder in (package.parents[1], package)]  # checkout, wheel
    candidates = [Path(named)] if named else installed
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise LaunchError(f"there is no {candidates[0]}", "name the file with --file")
    return file.absolute()


def _compose(spec: LaunchSpec, *arguments: str, timeout_s: float = CALL_TIMEOUT_S, say: Say | None = None) -> str:
    return docker(spec.host, *_words(spec), *arguments, env=_env(spec), timeout_s=timeout_s, say=say)


def _where(spec: LaunchSpec) -> str:
    return f"{spec.server} on {spec.host.name}"


def _words(spec: LaunchSpec) -> tuple[str, ...]:
    file = str(compose_file(spec.options.get("file")))
    return ("compose", "--file", file, "--project-name", _project(spec), "--profile", spec.server)


def _project(spec: LaunchSpec) -> str:
    """Return the name of the Compose project.

    Each host of a hosts file has a separate project, because two hosts may share one container engine.
    """
    return "loadgen" if spec.host.name == LOCAL.name else f"loadgen-{spec.host.name}"


def _env(spec: LaunchSpec) -> dict[str, str]:
    """Return the variables for docker-compose.yml.

    The variables come from three sources: the properties of the server and its host, `env` in the hosts file, and
    options["env"]. A later source replaces values of an earlier source. Raises LaunchError if the address of the host
    cannot be resolved."""
    try:
        address = str(socket.getaddrinfo(spec.host.address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as problem:
        raise LaunchError(f"{spec.host.address}: no such host", "check `address` in the hosts file") from problem
    variables = {
        "MODELS_VOLUME": spec.host.model_volume,
        # Ports are published only on the address under which the host is reached.
        "BIND": f"[{address}]" if ":" in address else address,
        "MODEL_NAME": spec.model,
        "TENSOR_PARALLEL": str(spec.tensor_parallel),
        f"{spec.server.upper()}_GPU": spec.gpus,
    }
    additional = {name: str(value) for name, value in spec.options.get("env", {}).items()}
    return {name: value for name, value in variables.items() if value} | dict(spec.host.env) | additional


def _require_free_gpus(spec: LaunchSpec) -> None:
    """Raise LaunchError if a running container of loadgen already uses a GPU of this server.

    Each server reserves nearly all memory of its GPUs. Without this check, a second server would fail minutes later
    with an unclear message."""
    own = _gpu_ids(spec)
    containers = docker(spec.host, "container", "ls", "--quiet", "--filter", f"label={_PROJECT_LABEL}").split()
    for container in msgspec.json.decode(docker(spec.host, "inspect", *containers)) if own and containers else ():
        labels = container.get("Config", {}).get("Labels") or {}
        name, project = labels.get(_SERVICE_LABEL, ""), labels.get(_PROJECT_LABEL, "")
        if name not in launchable_backends() or (project, name) == (_project(spec), spec.server):
            continue
        requests = container.get("HostConfig", {}).get("DeviceRequests") or ()
        used = {gpu for request in requests for ids in request.get("DeviceIDs") or () for gpu in ids.split(",")}
        shared = own & used
        if project.split("-")[0] == "loadgen" and shared:
            gpus = ", ".join(sorted(shared))
            host = "" if spec.host.name == LOCAL.name else f" --host {spec.host.name}"
            raise LaunchError(
                f"{_where(spec)} needs GPU {gpus}, which {name} already uses",
                f"stop {name} (loadgen servers down --server {name}{host}), or choose another GPU: "
                f"{spec.server.upper()}_GPU=1, or `gpus` in the hosts file",
            )


def _gpu_ids(spec: LaunchSpec) -> set[str]:
    """Return the GPUs that docker-compose.yml reserves for the server, each as an index or a UUID.

    Variables in the file are replaced by their values first. The result is empty if the file reserves no GPU by index
    or UUID, for example if it reserves only a number of GPUs.
    """
    with suppress(LookupError, TypeError, *DECODE_ERRORS):
        service = msgspec.json.decode(_compose(spec, "config", "--format", "json"))["services"][spec.server]
        devices = service["deploy"]["resources"]["reservations"]["devices"]
        names = [name for device in devices for name in device.get("device_ids") or ()]
        return {gpu for name in names for gpu in str(name).split(",")}
    return set()


def _make_volume(host: Host) -> None:
    """Create the Docker volume for models, and bind it to the folder `model_dir` of the host.

    An existing volume is not changed. Raises LaunchError if an existing volume is bound to another folder."""
    if not host.model_dir:
        return
    names = docker(host, "volume", "ls", "--quiet", "--filter", f"name=^{host.model_volume}$").split()
    if host.model_volume not in names:
        options = [f"--opt={option}" for option in ("type=none", "o=bind", f"device={host.model_dir}")]
        docker(host, "volume", "create", *options, host.model_volume)
        return
    (volume,) = msgspec.json.decode(docker(host, "volume", "inspect", host.model_volume))
    shown = str((volume.get("Options") or {}).get("device", ""))
    if shown != host.model_dir:
        raise LaunchError(
            f"the volume {host.model_volume} on {host.name} is bound to {shown or 'no folder'}, not {host.model_dir}",
            "name another model_volume in the hosts file, or leave out model_dir to use the volume as it is",
        )


def _watch(spec: LaunchSpec, url: str) -> Callable[[], str]:
    """Return a function that returns the state of the container as text.

    The function is called until the server answers at `url`. It raises LaunchError if the container has ended, is
    unhealthy, or has been healthy for more than `unreachable_s` seconds without an answer at `url`."""
    healthy_s: list[float] = []

    def watch() -> str:
        row = status(spec)
        health = row.get("Health")
        if row.get("State", "gone") in ("exited", "dead", "gone"):
            raise _ended(spec, row)
        if health == "unhealthy":
            problem = f"{_where(spec)} runs, but its health check fails"
            raise LaunchError(problem, f"{LOOK_AT_LOG}; the server may hang", log_tail=tail(logs(spec, lines=25)))
        if health == "healthy":
            healthy_s.append(time.monotonic())
            if healthy_s[-1] - healthy_s[0] > float(spec.options.get("unreachable_s", UNREACHABLE_AFTER_S)):
                raise LaunchError(
                    f"{_where(spec)} is healthy, but nothing answers at {url} from here",
                    "check `address` of the host, BIND in its env, and firewalls on the way",
                )
        return f"{describe_state(row)}; {tail(logs(spec, lines=1), 1)}"

    return watch


def _ended(spec: LaunchSpec, row: dict[str, Any]) -> LaunchError:
    """Return the error for a container that has ended. The reason comes from its log or from Docker."""
    code = f", with exit code {row['ExitCode']}" if "ExitCode" in row else ""
    reason = f"it ended during startup{code}"
    hint = LOOK_AT_LOG
    with suppress(LaunchError):
        killed = row and docker(spec.host, "inspect", "--format", "{{.State.OOMKilled}}", row.get("ID", "")).strip()
        if killed == "true":
            reason = "it was killed because the host ran out of memory"
            hint = "free memory on the host, or choose a smaller model"
    log = logs(spec, lines=200) if row else ""
    return common.ended_error(spec.server, log, reason, hint, where=f"{_where(spec)}: ")


def docker(
    host: Host,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
    say: Say | None = None,
) -> str:
    """Run the command `docker` with `arguments` on the container engine of `host`, and return its standard output.

    `env` contains variables to add to the environment of the command. While the command runs, `say` is called every ten
    seconds with the last line of its output. Raises LaunchError if the command fails. For a known failure, the error
    explains the cause.
    """
    program = shutil.which("docker")
    if program is None:
        raise LaunchError(
            "docker is not installed on this machine",
            "install Docker's command line with the Compose plugin, or start without Docker: --launch process",
        )
    context: list[str] = []
    environment = dict(os.environ)
    if host.docker:  # variables of the shell must not replace the engine that the host names
        environment.pop("DOCKER_HOST", None)
        environment.pop("DOCKER_CONTEXT", None)
    if host.docker.startswith("ssh://"):
        environment["DOCKER_HOST"] = host.docker
    elif host.docker:
        context = ["--context", host.docker]
    code, out, err = _run([program, *context, *arguments], environment | dict(env or {}), timeout_s, say)
    if code:
        output = err or out
        fault = common.known_fault(output, "docker")
        if fault:
            raise LaunchError(*fault, log_tail=tail(output, 6))
        problem = f"docker {' '.join(arguments)} on {host.name} failed with exit code {code}"
        raise LaunchError(problem, "Docker's output is above", log_tail=tail(output))
    return out


def _container_facts(host: Host, name: str) -> dict[str, Any]:
    """Return the facts about the container `name` that are stored with a run.

    The facts are its image, the digest of the image, its command, its start time and its limits, and the driver version
    and the GPU that the container sees. A fact that cannot be read is left out. The container's environment is never
    stored, because it may contain secrets.
    """
    facts: dict[str, Any] = {}
    with suppress(LaunchError, LookupError, *DECODE_ERRORS):
        container = msgspec.json.decode(docker(host, "inspect", name))[0]
        config = container.get("Config") or {}
        limits = container.get("HostConfig") or {}
        facts["image"] = config.get("Image")
        facts["image_id"] = container.get("Image")
        facts["command"] = redact(config.get("Cmd"))
        facts["started"] = (container.get("State") or {}).get("StartedAt")
        limit_names = ("ShmSize", "IpcMode", "DeviceRequests", "Ulimits", "Memory")
        facts["limits"] = {key: limits.get(key) for key in limit_names}
        text = docker(host, "image", "inspect", "--format", "{{json .RepoDigests}}", str(container.get("Image")))
        facts["image_digest"] = next(iter(msgspec.json.decode(text) or ()), "")
    query = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    with suppress(LaunchError, ValueError, LookupError):
        first_gpu = docker(host, "exec", name, *query).strip().splitlines()[0]
        facts["driver_version"], facts["gpu"] = first_gpu.split(", ", 1)
    return {key: value for key, value in facts.items() if value}


def _run(command: Sequence[str], env: Mapping[str, str], timeout_s: float, say: Say | None) -> tuple[int, str, str]:
    """Run a command, and return its exit code, standard output and standard error.

    The output goes to temporary files instead of pipes. A background process that the command leaves behind, such as a
    shared ssh connection, would keep a pipe open. Raises LaunchError if the command takes longer than `timeout_s`."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        child = subprocess.Popen(  # noqa: S603 - docker, with arguments of ours
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        start_s = time.monotonic()
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(min(common.PROGRESS_INTERVAL_S, timeout_s)), _text(out), _text(err)
                elapsed_s = time.monotonic() - start_s
                if elapsed_s > timeout_s:
                    raise LaunchError(
                        f"{' '.join(command[1:4])} ... did not end within {timeout_s:.0f} s",
                        "check that the host is reachable and its Docker engine works",
                        log_tail=tail(_text(err)),
                    )
                if say:
                    say(f"{elapsed_s:.0f} s: {tail(_text(err), 1).strip()}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


def _text(file: IO[bytes]) -> str:
    # The read must not move the file position, which the child shares for writing.
    return readable_log(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
