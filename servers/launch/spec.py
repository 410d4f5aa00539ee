"""The description of a server to start (`LaunchSpec`, `Host`), and functions that several launch methods share.

The functions wait until a server is ready, and turn its log into an error message with a hint.
"""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from loadgen.servers.auth import HIDDEN, Access, hide_secrets, read_secret, redact
from loadgen.servers.backends import BACKENDS, join_or, launchable_backends
from loadgen.servers.backends.base import KnownFault
from loadgen.servers.backends.dialect import bearer_header
from loadgen.servers.errors import HostsError, LaunchError, ServerError, read_toml
from loadgen.servers.json_client import JsonClient

LaunchMethod = Literal["compose", "process", "simulated", "running"]
Say = Callable[[str], None]  # Shows one line of progress

READY_TIMEOUT_S = 1800.0  # Half an hour, because loading large weights from a slow disk takes long
PROGRESS_INTERVAL_S = 10.0
LOOK_AT_LOG = "look at the end of its log"

_GPU = r"(\d+|(GPU|MIG)-[\w/-]+)"
_KEY = re.compile(r"(?i)(--api-key[ =]|api_?key['\"]?\s*[=:]\s*\[?['\"]?)(?!None)[^\s'\",\])]{6,}")
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): \S")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with GPUs: the addresses of its container engine and its servers, and the location of its models."""

    name: str
    platform: str = ""  # Name in reports, such as `A800`. Empty: no name.
    docker: str = ""  # Docker context or `ssh://user@host`. Empty: the engine of this machine.
    address: str = "127.0.0.1"  # Name or address of the host as seen from here. Servers listen only on this address.
    gpus: Mapping[str, str] = field(default_factory=dict)  # GPU indices or UUIDs by server, separated by commas
    model_dir: str = ""  # Folder on the host with the models. Empty: the volume is used as it is.
    model_volume: str = "llm-models"  # Volume from which containers read the models
    env: Mapping[str, str] = field(default_factory=dict)  # Variables for docker-compose.yml, such as VLLM_TAG


LOCAL = Host("local")  # This machine: the local container engine, and servers on loopback


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A server to start: backend, host, model, launch method and options."""

    server: str  # A backend that can be started, see loadgen.servers.backends.launchable_backends
    host: Host
    model: str
    """compose: the model's folder in the volume. process: the model's folder, absolute or below the host's model_dir,
    or the model's name on the Hugging Face Hub. simulated: any name."""
    method: LaunchMethod
    options: Mapping[str, Any] = field(default_factory=dict)  # Options of the method, see its `launched_server`

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs that share the model: options["tensor_parallel"], 1 by default."""
        return int(self.options.get("tensor_parallel") or 1)

    @property
    def gpus(self) -> str:
        """GPUs of the server, as a comma-separated list for Docker and CUDA, such as `0,1`. Empty: the default GPU.

        The first rule whose condition is true decides:

        - If the option `gpus` is set, its value is used.
        - If the host lists at least `tensor_parallel` GPUs for this server, the first `tensor_parallel` of them are
          used.
        - If `tensor_parallel` is greater than 1, the first `tensor_parallel` GPUs of the machine are used.
        - Otherwise, the list is empty.
        """
        if self.options.get("gpus"):
            return str(self.options["gpus"])
        count = self.tensor_parallel
        listed = self.host.gpus.get(self.server, "").split(",")
        return ",".join(listed[:count] if len(listed) >= count else map(str, range(count)))

    @property
    def access(self) -> Access:
        """The credentials for requests to the server: its API key.

        The key is read from an environment variable. options["api_key_env"] is the name of this variable, by default
        LOADGEN_API_KEY. Raises SecretError if the key contains invalid characters.
        """
        return Access(bearer_header(read_secret(self.options.get("api_key_env", "LOADGEN_API_KEY"))))

    @property
    def timeout_s(self) -> float:
        """Maximum time in seconds from the start of the server until it is ready."""
        return float(self.options.get("timeout_s") or READY_TIMEOUT_S)

    def check_options(self, known: frozenset[str]) -> None:
        """Raise LaunchError if `options` has a key that is not in `known`, the options of the launch method."""
        unknown = sorted(self.options.keys() - known)
        if unknown:
            raise LaunchError(
                f"--launch {self.method} has no option {', '.join(unknown)}", f"it has {', '.join(sorted(known))}"
            )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready for requests."""

    url: str
    facts: Mapping[str, Any]
    """Facts to store with a run: `launch`, `ready_s` (startup time in seconds), image, digest, command, ..."""
    pids: tuple[int, ...] = ()  # Processes on this machine. Empty: the server runs in a container or elsewhere.


def read_hosts(path: Path) -> Mapping[str, Host]:
    """Read the hosts of a TOML file, which has one table `[NAME]` per host. Return them by name.

    The result always contains a host `local`. By default, `local` is this machine, but the file can define another host
    of this name. Raises HostsError with a list of all mistakes, including unknown keys."""
    try:
        tables = read_toml(path)
    except OSError as problem:
        raise HostsError(
            f"cannot read {path}: {problem.strerror}", "see examples/hosts.toml for an example"
        ) from problem
    except ValueError as problem:
        raise HostsError(f"{path} is not TOML: {problem}", "see examples/hosts.toml for an example") from problem
    problems = [problem for name, table in tables.items() for problem in _problems(name, table)]
    if problems:
        raise HostsError(f"{path}: {'; '.join(problems)}", f"a host has {', '.join(_KEYS)}; see examples/hosts.toml")
    return {LOCAL.name: LOCAL} | {name: Host(name, **table) for name, table in tables.items()}


def _problems(name: str, table: object) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        yield f"{name!r} is not a valid host name: use only lower-case letters, digits, - and _"
    if not isinstance(table, dict):
        yield f"{name} must be a table"
        return
    for key, value in table.items():
        if key not in _KEYS:
            yield f"{name} has no key {key!r}"
            continue
        pattern, expected = _KEYS[key]
        texts = [value]
        if isinstance(value, dict):
            texts = [f"{part}={text}" if isinstance(text, str) else "" for part, text in value.items()]
        if type(value) is not type(getattr(LOCAL, key)) or not all(re.fullmatch(pattern, text) for text in texts):
            shown = re.sub(r":(?!//).*@", f":{HIDDEN}@", repr(redact(value, key)))
            yield f"{name}.{key} cannot be {shown}: {expected}"


_KEYS = {
    "platform": (r"(?s).*", "text, such as A800"),
    "docker": (
        r"|[A-Za-z0-9][A-Za-z0-9_.+-]*|ssh://(?!.*:.*@)[^\s/-]\S*",
        'the name of a Docker context, or "ssh://user@host" with your own key and no password, or "" for this machine',
    ),
    "address": (r"[^/\s@?#\[\]]+|\[[\da-fA-F:.]+\]", "a host name or an address, without scheme and port"),
    "gpus": (
        rf"({'|'.join(launchable_backends())})={_GPU}(,{_GPU})*",
        f'one GPU per server ({", ".join(launchable_backends())}), by index "0" or UUID "GPU-...", or several: "0,1"',
    ),
    "model_dir": (r"(?s)/.*", "an absolute folder of that machine"),
    "model_volume": (r"[A-Za-z0-9][A-Za-z0-9_.-]*", "the name of a Docker volume"),
    "env": (
        r"(?!(?i:(\w*_)?(token|key|secret|password)=))[A-Za-z_][A-Za-z0-9_]*=(?s:.*)",
        "names and text values; secrets must come from the environment, not from this file",
    ),
}
"""Keys of a host, each with a pattern and a description. The pattern must match the text of the key, or each
`name=text` of its table."""
assert set(_KEYS) == {host_field.name for host_field in fields(Host)} - {"name"}


def wait_until_ready(
    server: str,
    url: str,
    watch: Callable[[], str],
    log: Callable[[], str],
    say: Say,
    *,
    timeout_s: float,
    poll_s: float,
) -> float:
    """Wait until the health route of the server at `url` answers. Return the waiting time in seconds.

    The server is checked every `poll_s` seconds. Before each check, `watch()` is called, which returns the server's
    state as text and raises LaunchError if the server has ended. `say` receives the state every ten seconds. If the
    server is not ready after `timeout_s` seconds, LaunchError with the end of `log()` is raised."""
    start_s = time.monotonic()
    last_message_s = start_s
    while True:
        state = watch()
        now_s = time.monotonic()
        # vLLM 0.2.0 has no health route, but answers 404.
        with suppress(ServerError), closing(JsonClient(url, retry=False)) as client:
            if client("/health")[0] in (200, 404):
                return now_s - start_s
        if now_s - start_s > timeout_s:
            raise LaunchError(
                f"{server} did not get ready within {timeout_s:g} s",
                f"allow more time with --timeout, or {LOOK_AT_LOG}",
                log_tail=tail(log()),
            )
        if now_s - last_message_s >= PROGRESS_INTERVAL_S:
            last_message_s = now_s
            say(f"{now_s - start_s:.0f} s: {state or 'nothing in its log yet'}")
        time.sleep(poll_s)


def ended_error(server: str, log: str, reason: str, hint: str = LOOK_AT_LOG, *, where: str = "") -> LaunchError:
    """Return the error for a server that ended during startup.

    If the log shows a known failure, the error states the cause and the remedy of this failure. Otherwise the error
    states `reason` and `hint`."""
    fault = known_fault(log, "log", server)
    if fault:
        reason, hint = fault
    end = tail(log)
    # Later errors are often consequences of the first one, so the first one is shown too.
    first = next((line for line in log.splitlines() if _ERROR.search(line) and "root cause" not in line), "")
    shown = end if first.strip() in end else f"{tail(first)}\n...\n{end}"
    return LaunchError(f"{where}{reason}", hint, log_tail=shown)


def known_fault(text: str, table: Literal["docker", "log"], server: str = "") -> tuple[str, str] | None:
    """Return the cause and the remedy of a known failure whose pattern matches `text`, or None if there is none.

    Known failures are defined in the server's backend, and in the table `table` of faults.toml."""
    rows = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))[table]
    common = [KnownFault(**row) for row in rows]
    own = BACKENDS[server].faults if server else ()
    for fault in (*own, *common):
        match = re.search(fault.pattern, text, re.IGNORECASE)
        if match:
            group = next((group for group in match.groups() if group), "").strip()
            # `{*_TAG}` stands for the variables of docker-compose.yml with this ending.
            hint = re.sub(
                r"\{\*(\w+)\}",
                lambda ending: join_or(f"{name.upper()}{ending[1]}" for name in launchable_backends()),
                fault.hint,
            ).replace("{0}", group or "NAME")
            return fault.what.replace("{0}", group).rstrip(" :"), hint
    return None


def readable_log(log: bytes) -> str:
    """Return `log`, the output of a server or of Docker, as text in which `***` replaces secrets.

    The secrets are those in environment variables, and API keys in command lines.
    """
    redact(os.environ)
    return hide_secrets(_KEY.sub(rf"\1{HIDDEN}", log.decode(errors="replace")))


def tail(text: str, lines: int = 25) -> str:
    """Return the last `lines` lines of the log `text`. Empty lines are left out, and lines are cut after 400
    characters.
    """
    nonempty = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in nonempty[-lines:])
