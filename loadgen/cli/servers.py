"""The commands `servers` and `mock-server`.

`servers` starts, inspects and stops real servers, in containers or as processes, on this machine or on a GPU host.
`mock-server` runs the simulated server, with one option for each field of SimulatedConfig.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, BadParameter, Exit, Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.cli.options import SettingsCommand, complete, seconds, seconds_with_unit
from loadgen.errors import EXIT_SERVER, PlanError
from loadgen.servers.auth import Access, read_secret
from loadgen.servers.backends import BACKENDS, join_or, launchable_backends, simulated_backends
from loadgen.servers.backends.dialect import bearer_header
from loadgen.servers.discovery import check_limits, probe
from loadgen.servers.errors import LaunchError, ServerError
from loadgen.servers.launch import compose, process
from loadgen.servers.launch.process import BackgroundServer, log_file
from loadgen.servers.launch.spec import LOCAL, LaunchSpec, read_hosts

LAUNCH_METHODS = ("compose", "process", "simulated")
SIMULATED_CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "server": simulated_backends,
    "clock": lambda: ("script", "batching"),
    "vintage": lambda: ("current", "2023"),
}
"""Functions that return the values of options of `mock-server`, for completion in a shell."""

servers = Typer(
    no_args_is_help=True,
    help="Start, inspect and stop real inference servers.",
    **TYPER_DEFAULTS,
)

_Server = Annotated[
    str, Option(help=f"Server type: {join_or(launchable_backends())}.", autocompletion=complete(launchable_backends))
]
_AnyServer = Annotated[
    str | None,
    Option(
        help=f"Server type: {join_or(launchable_backends())}. Default: all of them.",
        autocompletion=complete(launchable_backends),
    ),
]
_HostName = Annotated[str, Option(help="Host from the hosts file. `local` is this machine.")]
_Hosts = Annotated[Path | None, Option(help="Hosts file. Default: hosts.toml in the current folder, if it exists.")]
_File = Annotated[Path | None, Option(help="For compose: path of another docker-compose.yml.")]
_Launch = Annotated[
    str | None, Option(help="How the server was started: compose, process or simulated. Default: any of them.")
]


@servers.command()
def up(
    server: _Server,
    model: Annotated[
        str | None,
        Option(
            help="Model. For compose: folder in the model volume (default llama-2-7b). For process: folder or Hugging "
            "Face name. For simulated: any name."
        ),
    ] = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: Annotated[
        str,
        Option(
            help="How to start it: compose (container), process (installed in a Python environment on this machine) or "
            "simulated."
        ),
    ] = "compose",
    file: _File = None,
    python: Annotated[
        Path | None, Option(help="For process: Python interpreter in whose environment the server is installed.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, Option(help="For compose and process: number of GPUs that share the model.")
    ] = None,
    port: Annotated[
        int | None, Option(help="For process and simulated: port to listen on. Default: any free port.")
    ] = None,
    timeout_s: Annotated[
        float, Option("--timeout", parser=seconds, metavar="T", help="Maximum time until the server is ready.")
    ] = 1800.0,
    n: Annotated[
        int, Option("--n", help="Number of requests of a burst for which the server's limits are checked.")
    ] = 1000,
    input_tokens: Annotated[int, Option(help="Prompt length of that burst.")] = 512,
    output_tokens: Annotated[int, Option(help="Output length of that burst.")] = 128,
    as_json: Annotated[bool, Option("--json", help="Print URL, limits and facts as JSON and nothing else.")] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
    arguments: Annotated[
        list[str] | None,
        Argument(help="For process and simulated: additional options of the server, after --.", metavar="[-- OPTIONS]"),
    ] = None,
) -> None:
    """Start a server and wait until it is ready. The server keeps running when the command ends.

    The server's limits are compared with the needs of a burst of --n requests. Exit codes: 0 ready; 2 usage error, or
    the limits are too small for the burst (the server keeps running); 3 the server did not start.
    """
    if launch == "process" and not model:
        raise BadParameter("--launch process needs --model: a folder or a Hugging Face name")
    options = {"file": file, "python": python, "port": port, "timeout_s": timeout_s, "arguments": arguments}
    spec = _spec(server, host, hosts, launch, model or "llama-2-7b", **options, tensor_parallel=tensor_parallel)
    _check_options(launch, spec.options)
    say = (lambda _: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    running = (compose if launch == "compose" else process).up(spec, say)
    facts = probe(running.url, server, access=Access(bearer_header(read_secret("LOADGEN_API_KEY"))))
    if as_json:
        result = {"url": running.url, "model": facts.model, "limits": facts.limits, "facts": running.facts}
        print(json.dumps(result, indent=2))
    elif not quiet:
        ready_s = running.facts.get("ready_s")
        state = "was already running" if ready_s is None else f"is ready after {ready_s:.1f} s"
        print(f"{server} {facts.version} {state} at {running.url}: {facts.model}")
        print("\n".join(f"  {name} {value}" for name, value in facts.limits.items()))
        is_default_url = running.url == f"http://{LOCAL.address}:{BACKENDS[server].port}"
        print(f"next: loadgen burst --server {server}{'' if is_default_url else f' --url {running.url}'}")
    check_limits(facts, n, input_tokens, output_tokens)


@servers.command()
def down(
    server: _AnyServer = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Stop servers and remove their containers. Volumes and images stay.

    A server that is already down is not an error.
    """
    for name in _selected_servers(server):
        spec = _spec(name, host, hosts, launch, file=file)
        background = _background_server(spec, launch)
        if background:
            state = "stopped" if background.alive else "had already ended"
            process.down(background)
            print(f"{name}: process {background.pid} {state}")
        elif launch in (None, "compose") and (server or launch or compose.has_container(spec)):
            compose.down(spec)
            print(f"{name} on {host}: down")


@servers.command()
def status(
    server: _AnyServer = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Show which servers run, where, and whether they are ready.

    Exit code 3 if the server named with --server is not ready.
    """
    all_ready = True
    for name in _selected_servers(server):
        line, ready = _server_state(_spec(name, host, hosts, launch, file=file), launch)
        all_ready = all_ready and ready
        print(f"{name:<9} {line}")
    if server and not all_ready:
        raise Exit(EXIT_SERVER)


@servers.command()
def logs(
    server: _Server,
    lines: Annotated[int, Option(help="Number of lines from the end of the log; 0 prints all.")] = 50,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Print the end of a server's log.

    The exit code is 3 if the server is down, because its log is then gone.
    """
    spec = _spec(server, host, hosts, launch, file=file)
    background = _background_server(spec, launch)
    if background:
        print(process.logs(background, lines=lines))
    elif launch not in (None, "compose") or not compose.status(spec):
        raise LaunchError(
            f"{server} is down on {host}, so it has no log",
            f"If the server failed to start, see {log_file(server, host)}.",
        )
    else:
        print(compose.logs(spec, lines=lines))


@servers.command()
def convert(
    source: Annotated[
        Path, Argument(metavar="SOURCE", help="Folder of a Llama model: config.json, weights and tokenizer.")
    ],
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to create. It must not exist.")],
) -> None:
    """Convert a Llama model to a ladder model.

    A ladder model uses Ladder Residual (arXiv 2501.06589). The weights stay the same, and vLLM overlaps each all-reduce
    with the next block. The speed of the ladder model is realistic, but its text is meaningless until the model is
    retrained.
    """
    from loadgen.servers.ladder import PLUGIN_FOLDER
    from loadgen.servers.ladder.checkpoint import convert_checkpoint

    try:
        convert_checkpoint(source, target)
    except LaunchError as error:
        raise PlanError(str(error), error.hint) from None
    print(f"{target} is a ladder model with the weights of {source}")
    print(f"next: loadgen servers up --server vllm --launch process --model {target}")
    print(f"without loadgen: PYTHONPATH={target / PLUGIN_FOLDER.name} vllm serve {target}")


def _selected_servers(server: str | None) -> tuple[str, ...]:
    if server is not None and server not in launchable_backends():
        raise BadParameter(f"--server {server}: unknown; choose {', '.join(launchable_backends())}")
    return (server,) if server else launchable_backends()


def _spec(
    server: str, host: str, hosts_file: Path | None, launch: str | None, model: str = "", **options: Any
) -> LaunchSpec:
    """Return the launch specification for these options. The host `local` needs no hosts file.

    Raises BadParameter for an unknown server, host or launch method.
    """
    _selected_servers(server)
    if launch is not None and launch not in LAUNCH_METHODS:
        raise BadParameter(f"--launch {launch}: unknown; choose {', '.join(LAUNCH_METHODS)}")
    path = hosts_file or (Path("hosts.toml") if Path("hosts.toml").is_file() else None)
    hosts = read_hosts(path) if path else {LOCAL.name: LOCAL}
    if host not in hosts:
        source = path or "no hosts file was named, and there is no hosts.toml in this folder"
        raise BadParameter(f"--host {host}: unknown; choose {', '.join(hosts)} ({source})")
    set_options = {name: value for name, value in options.items() if value}
    method = launch or "compose"
    return LaunchSpec(server, hosts[host], model, method, set_options)  # type: ignore[arg-type]  # checked above


def _check_options(launch: str, options: Collection[str]) -> None:
    """Raise BadParameter for options that the launch method would ignore."""
    known = compose.OPTIONS if launch == "compose" else process.OPTIONS
    if launch == "simulated":
        known = known - {"python", "tensor_parallel"}
    ignored = sorted(set(options) - known)
    if ignored:
        names = ["options after --" if name == "arguments" else "--" + name.replace("_", "-") for name in ignored]
        hint = "; configure containers in docker-compose.yml and in the host's env" if launch == "compose" else ""
        raise BadParameter(f"--launch {launch} does not take {', '.join(names)}{hint}")


def _background_server(spec: LaunchSpec, launch: str | None) -> BackgroundServer | None:
    """Return the process on this machine that `servers up` started for the server of `spec`.

    Return None if there is no such process, or if the options select containers.
    """
    return None if launch == "compose" or spec.host.docker else process.read_background_server(spec.server)


def _server_state(spec: LaunchSpec, launch: str | None) -> tuple[str, bool]:
    """Return one line of text about a server, and True if the server is ready.

    If the server's process has ended, the description of the server that `servers up` stored is removed.
    """
    background = _background_server(spec, launch)
    if background:
        return _process_state(background)
    if launch in ("process", "simulated"):
        return "down", False
    try:
        row = compose.status(spec)
    except LaunchError as error:
        return f"no process on this machine; cannot list containers: {error}", False
    if not row:
        return f"down on {spec.host.name}", False
    url = compose.server_url(row, spec)
    line = f"{compose.describe_state(row)} on {spec.host.name} at {url}: {row.get('Image', '')}"
    return line, row.get("Health") == "healthy"


def _process_state(background: BackgroundServer) -> tuple[str, bool]:
    """Return one line of text about a server that `servers up` started, and True if the server is ready.

    If the process of the server has ended, the description of the server that `servers up` stored is removed.
    """
    if not background.alive:
        process.down(background)
        return f"ended unexpectedly; its log is in {background.log}", False
    access = Access(bearer_header(read_secret("LOADGEN_API_KEY")))
    try:
        facts = probe(background.url, background.server, access=access)
    except ServerError as error:
        return f"process {background.pid} runs, but {error}", False
    simulated = "SIMULATED, " if facts.simulated else ""
    running = f"process {background.pid} since {background.since}"
    return f"{simulated}ready at {background.url}: {facts.model}, {running}", True


def _parameters() -> Iterator[Parameter]:
    """Yield an option for each documented field of SimulatedConfig. Times must have a unit."""
    from loadgen.servers.simulated.config import SimulatedConfig

    hints = get_type_hints(SimulatedConfig, include_extras=True)
    for field in fields(SimulatedConfig):
        value_type: Any = hints[field.name]
        help_text = getattr(value_type, "__metadata__", ("",))[0]
        default: Any = Parameter.empty if field.default is MISSING else field.default
        flag = f"--{field.name.replace('_', '-')}"
        keywords: dict[str, Any] = {}
        if field.name in SIMULATED_CHOICES:
            keywords["autocompletion"] = complete(SIMULATED_CHOICES[field.name])
        if field.name.endswith("_s"):
            default = None if default is None else f"{default * 1e3:g}ms"
            flag = flag.removesuffix("-s")
            keywords = {"metavar": "T", "parser": seconds_with_unit}
            value_type = Any
        elif field.name == "adapters":
            flag, value_type, default = "--adapter", list[str] | None, None
        if help_text:
            annotation: Any = Annotated[value_type, Option(flag, help=help_text, **keywords)]
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def serve(
    settings: dict[str, Any],
    *,
    api_key_env: Annotated[
        str | None, Option(help="Environment variable with the API key that requests must send.")
    ] = None,
    write_model: Annotated[
        Path | None,
        Option(help="Write a model folder with tokenizer and configuration, for load testers that need one."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        Option(
            help="Fault to inject: reset@12:3,17 (in requests 3 and 17), stall=0.01 (in 1% of requests), merged@4 (in "
            "all requests). Repeatable."
        ),
    ] = None,
) -> None:
    """Run the simulated server until it is stopped. Then print how late it sent its tokens."""
    from loadgen.servers.simulated import StartError
    from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
    from loadgen.servers.simulated.server import run
    from loadgen.servers.simulated.tokenizer import write_model as write

    key = read_secret(api_key_env) if api_key_env else ""
    if api_key_env is not None and not key:
        raise BadParameter(f"the environment variable {api_key_env} is empty or not set")
    settings["adapters"] = tuple(settings.get("adapters") or ())
    config = SimulatedConfig(**settings, api_key=key, faults=tuple(map(parse_rule, fault or ())))
    try:
        if write_model is not None:
            write(write_model, config.max_model_len)
        summary = run(config)
    except OSError as error:
        raise StartError(str(error)) from None
    late = ", ".join(f"{name} {late_ns / 1e6:.3f} ms" for name, late_ns in summary["late_ns"].items())
    from loadgen.analysis.format import pluralise

    print(f"{pluralise(summary['requests'], 'request')}, {pluralise(summary['events'], 'send')}; late {late}")
    if summary["falling_behind"]:
        print("The simulated server was too slow: it sent tokens later than planned.")


@functools.partial(SettingsCommand, generate=_parameters, shared=serve)
def mock_server(settings: dict[str, Any], **shared: Any) -> None:
    """Run a simulated vLLM, TGI, LightLLM, SGLang or TEI server.

    The simulated server needs no model. It sends the same bytes as the real server, at times that you choose. The
    command prints `ready URL`, serves until SIGTERM or Ctrl-C, and then prints how late the tokens were sent.
    """
    serve(settings, **shared)
