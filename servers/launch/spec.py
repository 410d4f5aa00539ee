"""What a server is started from and on, and what all ways of starting share: readiness, and what a failure means."""

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

from loadgen.servers.auth import HIDDEN, Access, bearer_header, hide_secrets, read_secret, redact
from loadgen.servers.backends import BACKENDS, join_or, launchable_backends
from loadgen.servers.backends.base import KnownFault
from loadgen.servers.errors import HostsError, LaunchError, ServerError, read_toml
from loadgen.servers.json_client import JsonClient

LaunchMethod = Literal["compose", "process", "simulated", "running"]
Say = Callable[[str], None]  # Takes one line of progress for people

READY_TIMEOUT_S = 1800.0  # Half an hour: large weights come from slow disks
PROGRESS_INTERVAL_S = 10.0
LOOK_AT_LOG = "look at the end of its log"

_GPU = r"(\d+|(GPU|MIG)-[\w/-]+)"
_KEY = re.compile(r"(?i)(--api-key[ =]|api_?key['\"]?\s*[=:]\s*\[?['\"]?)(?!None)[^\s'\",\])]{6,}")
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): \S")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine with GPUs, and how its container engine and its servers are reached."""

    name: str
    platform: str = ""  # What reports call it, such as `A800`; empty: nothing is said
    docker: str = ""  # A Docker context's name, or `ssh://user@host`; empty: the engine of this machine
    address: str = "127.0.0.1"  # Name or address under which this machine reaches it. Servers listen there only.
    gpus: Mapping[str, str] = field(default_factory=dict)  # Of each server: indices or UUIDs, commas between
    model_dir: str = ""  # Folder of that machine that holds the models; empty: the volume as it is there
    model_volume: str = "llm-models"  # Name of the volume that its containers read the models from
    env: Mapping[str, str] = field(default_factory=dict)  # For docker-compose.yml, such as VLLM_TAG; no secrets


LOCAL = Host("local")  # This machine: its own container engine, and servers on loopback


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A server that should be up."""

    server: str  # A kind that can be started: loadgen.servers.backends.launchable_backends
    host: Host
    model: str
    """compose: the model's folder in the volume; process: its folder, alone or below the host's model_dir, or its name
    on the Hub; simulated: any name."""
    how: LaunchMethod
    options: Mapping[str, Any] = field(default_factory=dict)  # Of this way alone: its launcher's docstring lists them

    @property
    def tensor_parallel(self) -> int:
        """How many GPUs the model is spread over: options["tensor_parallel"], else one."""
        return int(self.options.get("tensor_parallel") or 1)

    @property
    def gpus(self) -> str:
        """The GPUs to use, with commas between, as Docker's engine and CUDA both take them; empty: whatever is usual.
        options["gpus"] wins; then the first ones that the host names for this server; then, for several, its first."""
        if self.options.get("gpus"):
            return str(self.options["gpus"])
        count, named = self.tensor_parallel, self.host.gpus.get(self.server, "").split(",")
        return ",".join(named[:count] if len(named) >= count else map(str, range(count)))

    @property
    def access(self) -> Access:
        """With the key in the environment variable options["api_key_env"] (LOADGEN_API_KEY). Raises SecretError."""
        return Access(bearer_header(read_secret(self.options.get("api_key_env", "LOADGEN_API_KEY"))))

    @property
    def timeout_s(self) -> float:
        """How long it may take to become ready."""
        return float(self.options.get("timeout_s") or READY_TIMEOUT_S)

    def check_options(self, known: frozenset[str]) -> None:
        """Raises LaunchError for options that this way of starting would pass over."""
        if unknown := sorted(self.options.keys() - known):
            raise LaunchError(
                f"--launch {self.how} has no option {', '.join(unknown)}", f"it has {', '.join(sorted(known))}"
            )


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is up and has answered."""

    url: str
    facts: Mapping[str, Any]
    """What to keep with a run: `launch`, `ready_s` (start-up, where we started it) and image, digest, command, ..."""
    pids: tuple[int, ...] = ()  # Its processes on this machine; empty where it runs in containers or elsewhere


def read_hosts(path: Path) -> Mapping[str, Host]:
    """The hosts of a TOML file, a table `[NAME]` each, and `local`, which is this machine unless the file has one.
    Raises HostsError that lists every mistake, unknown keys included."""
    try:
        tables = read_toml(path)
    except OSError as problem:
        raise HostsError(f"cannot read {path}: {problem.strerror}", "examples/hosts.toml shows one") from problem
    except ValueError as problem:
        raise HostsError(f"{path} is not TOML: {problem}", "examples/hosts.toml shows one") from problem
    problems = [problem for name, table in tables.items() for problem in _problems(name, table)]
    if problems:
        raise HostsError(f"{path}: {'; '.join(problems)}", f"a host has {', '.join(_KEYS)}; see examples/hosts.toml")
    return {LOCAL.name: LOCAL} | {name: Host(name, **table) for name, table in tables.items()}


def _problems(name: str, table: object) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        yield f"{name!r} is no name for a host: small letters, digits, - and _ only"
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
    "platform": (r"(?s).*", "a text, such as A800"),
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
        "names and texts; secrets come from the environment, never from this file",
    ),
}
"""The pattern that each text of a host, or each `name=text` of a table of it, must match, and the words for that."""
assert set(_KEYS) == {each.name for each in fields(Host)} - {"name"}


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
    """Seconds until `url` answers its health route. Raises LaunchError with the end of its `log` after `timeout_s`.
    `watch` is called before each look, every `poll_s`: it raises LaunchError once the server has ended, and returns
    what there is to say, which goes to `say` every ten seconds."""
    began_s = said_s = time.monotonic()
    while True:
        state = watch()
        now_s = time.monotonic()
        # A server without such a route (vLLM 0.2.0) answers at least.
        with suppress(ServerError), closing(JsonClient(url)) as ask:
            if ask("/health")[0] in (200, 404):
                return now_s - began_s
        if now_s - began_s > timeout_s:
            raise LaunchError(
                f"{server} did not get ready within {timeout_s:g} s",
                f"allow more with --timeout, or {LOOK_AT_LOG}",
                log_tail=tail(log()),
            )
        if now_s - said_s >= PROGRESS_INTERVAL_S:
            said_s = now_s
            say(f"{now_s - began_s:.0f} s: {state or 'no word in its log yet'}")
        time.sleep(poll_s)


def ended_error(server: str, log: str, otherwise: str, hint: str = LOOK_AT_LOG, *, where: str = "") -> LaunchError:
    """A server of this kind has ended: what its log says of that, else what is known `otherwise`."""
    what, hint = known_fault(log, "log", server) or (otherwise, hint)
    end = tail(log)
    # What follows the first error is often its echo.
    first = next((line for line in log.splitlines() if _ERROR.search(line) and "root cause" not in line), "")
    shown = end if first.strip() in end else f"{tail(first)}\n...\n{end}"
    return LaunchError(f"{where}{what}", hint, log_tail=shown)


def known_fault(text: str, table: Literal["docker", "log"], server: str = "") -> tuple[str, str] | None:
    """What happened and what to do, by faults.toml and what the server's kind knows; None for something new."""
    common = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))[table]
    own = BACKENDS[server].faults if server else ()
    for fault in (*own, *(KnownFault(**each) for each in common)):
        if result := re.search(fault.pattern, text, re.IGNORECASE):
            group = next((group for group in result.groups() if group), "").strip()
            # `{*_TAG}`: the variables of docker-compose.yml with this ending.
            hint = re.sub(
                r"\{\*(\w+)\}",
                lambda ending: join_or(f"{name.upper()}{ending[1]}" for name in launchable_backends()),
                fault.hint,
            ).replace("{0}", group or "NAME")
            return fault.what.replace("{0}", group).rstrip(" :"), hint
    return None


def readable_log(log: bytes) -> str:
    """What a server or Docker has printed, without keys: those of the environment, those given as options."""
    redact(os.environ)
    return hide_secrets(_KEY.sub(rf"\1{HIDDEN}", log.decode(errors="replace")))


def tail(text: str, lines: int = 25) -> str:
    """The last lines of a log, without empty ones, each cut to a length that can be read."""
    retained = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(line if len(line) <= 400 else line[:400] + " ..." for line in retained[-lines:])
