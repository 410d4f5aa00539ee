"""`loadgen servers`: real servers, up and down, on this machine or on a GPU host, in containers or as processes; and
`loadgen sim`: the simulated server, on its own, with an option for each field of SimulatedConfig."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import MISSING, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, BadParameter, Exit, Option, Typer

from loadgen.cli import TYPER_DEFAULTS
from loadgen.cli.options import SettingsCommand, seconds, seconds_with_unit
from loadgen.errors import EXIT_SERVER, PlanError
from loadgen.servers.auth import Access, bearer_header, read_secret
from loadgen.servers.backends import BACKENDS, join_or, launchable_backends
from loadgen.servers.discovery import check_limits, probe
from loadgen.servers.errors import LaunchError, ServerError
from loadgen.servers.launch import compose, process
from loadgen.servers.launch.process import BackgroundServer, log_file
from loadgen.servers.launch.spec import LOCAL, LaunchSpec, read_hosts

LAUNCH_METHODS = ("compose", "process", "simulated")

servers = Typer(
    no_args_is_help=True,
    help="Start, look at and end real servers, on this machine or on a GPU host.",
    **TYPER_DEFAULTS,
)

_Server = Annotated[str, Option(help=f"{join_or(launchable_backends())}.")]
_AnyServer = Annotated[str | None, Option(help=f"{join_or(launchable_backends())}; all of them by default.")]
_HostName = Annotated[str, Option(help="A host of the hosts file; local is this machine.")]
_Hosts = Annotated[Path | None, Option(help="The hosts file. Default: hosts.toml in this folder, if there is one.")]
_File = Annotated[Path | None, Option(help="compose: another docker-compose.yml.")]
_Launch = Annotated[str | None, Option(help="compose, process or simulated; by default, however it was started.")]


@servers.command()
def up(
    server: _Server,
    model: Annotated[
        str | None,
        Option(
            help="compose: folder in the volume with the models (llama-2-7b by default); process: a folder, or a name "
            "on the Hub; simulated: any name."
        ),
    ] = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: Annotated[
        str, Option(help="compose, process (installed in a Python environment, this machine) or simulated.")
    ] = "compose",
    file: _File = None,
    python: Annotated[Path | None, Option(help="process: the interpreter that has the server installed.")] = None,
    tensor_parallel: Annotated[int | None, Option(help="compose, process: so many GPUs share the model.")] = None,
    port: Annotated[int | None, Option(help="process, simulated: port to listen on; any free one by default.")] = None,
    timeout_s: Annotated[
        float, Option("--timeout", parser=seconds, metavar="T", help="After which a server that is not ready failed.")
    ] = 1800.0,
    n: Annotated[int, Option("--n", help="The burst its limits are compared with: how many requests.")] = 1000,
    input_tokens: Annotated[int, Option(help="Prompt length of that burst.")] = 512,
    output_tokens: Annotated[int, Option(help="Tokens to generate of that burst.")] = 128,
    as_json: Annotated[
        bool, Option("--json", help="Print URL, limits and facts as JSON on stdout, nothing else.")
    ] = False,
    quiet: Annotated[bool, Option("--quiet", help="Print nothing but errors.")] = False,
    arguments: Annotated[
        list[str] | None, Argument(help="process, simulated: more for the server, after --.", metavar="[-- OPTIONS]")
    ] = None,
) -> None:
    """Start a server, wait until it is ready, and compare its limits with a burst. It is left running.

    Exit codes: 0 ready, 2 usage, or its limits are too small for the burst (it stays up), 3 it did not come up.
    """
    if launch == "process" and not model:
        raise BadParameter("--launch process needs --model: a folder, or a name on the Hub")
    options = {"file": file, "python": python, "port": port, "timeout_s": timeout_s, "arguments": arguments}
    spec = _spec(server, host, hosts, launch, model or "llama-2-7b", **options, tensor_parallel=tensor_parallel)
    _check_options(launch, spec.options)
    say = (lambda _: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    there = (compose if launch == "compose" else process).up(spec, say)
    facts = probe(there.url, server, access=Access(bearer_header(read_secret("LOADGEN_API_KEY"))))
    if as_json:
        told = {"url": there.url, "model": facts.model, "limits": facts.limits, "facts": there.facts}
        print(json.dumps(told, indent=2))
    elif not quiet:
        took_s = there.facts.get("ready_s")
        when = "was running already" if took_s is None else f"is ready after {took_s:.1f} s"
        print(f"{server} {facts.version} {when} at {there.url}: {facts.model}")
        print(*(f"  {name} {value}" for name, value in facts.limits.items()), sep="\n")
        where = "" if there.url == f"http://{LOCAL.address}:{BACKENDS[server].port}" else f" --url {there.url}"
        print(f"next: loadgen burst --server {server}{where}")
    check_limits(facts, n, input_tokens, output_tokens)


@servers.command()
def down(
    server: _AnyServer = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Stop servers and remove their containers; volumes and images stay. What is down already is no error."""
    for each in _selected_servers(server):
        spec = _spec(each, host, hosts, launch, file=file)
        if left := _running_process(spec, launch):
            was = "ended" if left.alive else "had ended by itself"
            process.down(left)
            print(f"{each}: process {left.pid} {was}")
        elif launch in (None, "compose") and (server or launch or compose.has_container(spec)):
            compose.down(spec)
            print(f"{each} on {host}: down")


@servers.command()
def status(
    server: _AnyServer = None,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Say which servers run, where, and whether they answer. Exit code 3 when the one named does not."""
    answers = []
    for each in _selected_servers(server):
        line, well = _server_state(_spec(each, host, hosts, launch, file=file), launch)
        answers.append(well)
        print(f"{each:<9} {line}")
    if server and not all(answers):
        raise Exit(EXIT_SERVER)


@servers.command()
def logs(
    server: _Server,
    lines: Annotated[int, Option(help="How many of the last lines; 0 prints all.")] = 50,
    host: _HostName = "local",
    hosts: _Hosts = None,
    launch: _Launch = None,
    file: _File = None,
) -> None:
    """Print the end of a server's log. Exit code 3 when it is down: nothing is left of it then."""
    spec = _spec(server, host, hosts, launch, file=file)
    if left := _running_process(spec, launch):
        print(process.logs(left, lines=lines))
    elif launch not in (None, "compose") or not compose.status(spec):
        raise LaunchError(
            f"{server} is down on {host}: it has no log here",
            f"that of a start that failed is in {log_file(server, host)}, if there was one",
        )
    else:
        print(compose.logs(spec, lines=lines))


@servers.command()
def convert(
    source: Annotated[Path, Argument(metavar="SOURCE", help="Folder of a Llama: config.json, weights, tokenizer.")],
    target: Annotated[Path, Argument(metavar="TARGET", help="A folder that is not there yet.")],
) -> None:
    """Make a ladder (Ladder Residual, arXiv 2501.06589) of a Llama: the same weights, which vLLM serves with each
    all-reduce beside the next block. What it answers has no sense until it has been retrained; its speed is real."""
    from loadgen.servers.ladder import PLUGIN_FOLDER
    from loadgen.servers.ladder.checkpoint import convert_checkpoint

    try:
        convert_checkpoint(source, target)
    except LaunchError as problem:
        raise PlanError(str(problem), problem.hint) from None
    print(f"{target} is a ladder with the weights of {source}")
    print(f"next: loadgen servers up --server vllm --launch process --model {target}")
    print(f"without loadgen: PYTHONPATH={target / PLUGIN_FOLDER.name} vllm serve {target}")


def _selected_servers(server: str | None) -> tuple[str, ...]:
    if server is not None and server not in launchable_backends():
        raise BadParameter(f"--server {server}: unknown; choose {', '.join(launchable_backends())}")
    return (server,) if server else launchable_backends()


def _spec(
    server: str, host: str, hosts_file: Path | None, launch: str | None, model: str = "", **options: Any
) -> LaunchSpec:
    """What the options mean. The host `local` needs no hosts file."""
    _selected_servers(server)
    if launch is not None and launch not in LAUNCH_METHODS:
        raise BadParameter(f"--launch {launch}: unknown; choose {', '.join(LAUNCH_METHODS)}")
    path = hosts_file or (Path("hosts.toml") if Path("hosts.toml").is_file() else None)
    hosts = read_hosts(path) if path else {LOCAL.name: LOCAL}
    if host not in hosts:
        where = path or "no hosts file was named, and there is no hosts.toml here"
        raise BadParameter(f"--host {host}: unknown; there are {', '.join(hosts)} ({where})")
    given = {name: value for name, value in options.items() if value}
    return LaunchSpec(server, hosts[host], model, launch or "compose", given)  # type: ignore[arg-type]  # checked above


def _check_options(launch: str, given: Collection[str]) -> None:
    """Options that this way of starting would pass over are mistakes."""
    known = compose.OPTIONS if launch == "compose" else process.OPTIONS
    if wrong := sorted(set(given) - (known - {"python", "tensor_parallel"} if launch == "simulated" else known)):
        names = ["options after --" if name == "arguments" else "--" + name.replace("_", "-") for name in wrong]
        more = "; containers are told in docker-compose.yml and in a host's env" if launch == "compose" else ""
        raise BadParameter(f"--launch {launch} takes no {', '.join(names)}{more}")


def _running_process(spec: LaunchSpec, launch: str | None) -> BackgroundServer | None:
    """The process that was left running under this name on this machine, if it is what is meant."""
    return None if launch == "compose" or spec.host.docker else process.read_background_server(spec.server)


def _server_state(spec: LaunchSpec, launch: str | None) -> tuple[str, bool]:
    """One line about a server, and whether it answers; a process that has ended is forgotten."""
    if left := _running_process(spec, launch):
        return _process_state(left)
    if launch in ("process", "simulated"):
        return "down", False
    try:
        row = compose.status(spec)
    except LaunchError as problem:
        return f"no process here, and no look at containers: {problem}", False
    if not row:
        return f"down on {spec.host.name}", False
    url = compose.server_url(row, spec)
    line = f"{compose.describe_state(row)} on {spec.host.name} at {url}: {row.get('Image', '')}"
    return line, row.get("Health") == "healthy"


def _process_state(left: BackgroundServer) -> tuple[str, bool]:
    if not left.alive:
        process.down(left)
        return f"ended by itself; its log is in {left.log}", False
    try:
        facts = probe(left.url, left.server, access=Access(bearer_header(read_secret("LOADGEN_API_KEY"))))
    except ServerError as problem:
        return f"process {left.pid} runs, but {problem}", False
    simulated = "SIMULATED, " if facts.simulated else ""
    return f"{simulated}ready at {left.url}: {facts.model}, process {left.pid} since {left.since}", True


def _parameters() -> Iterator[Parameter]:
    """An option for each field that says what it is; times are written with their unit."""
    from loadgen.servers.simulated.config import SimulatedConfig

    hints = get_type_hints(SimulatedConfig, include_extras=True)
    for field in fields(SimulatedConfig):
        kind: Any = hints[field.name]
        default: Any = Parameter.empty if field.default is MISSING else field.default
        flag = f"--{field.name.replace('_', '-')}"
        form: dict[str, Any] = {}
        if field.name.endswith("_s"):
            default, flag = f"{default * 1e3:g}ms", flag.removesuffix("-s")
            form = {"metavar": "T", "parser": seconds_with_unit}
        if help_text := getattr(kind, "__metadata__", ("",))[0]:
            annotation: Any = Annotated[Any if form else kind, Option(flag, help=help_text, **form)]
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def serve(
    settings: dict[str, Any],
    *,
    api_key_env: Annotated[str | None, Option(help="Environment variable with the API key to ask for.")] = None,
    write_model: Annotated[
        Path | None, Option(help="Write the folder with tokenizer and configuration that other load testers ask for.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        Option(help="A fault, repeatable: reset@12:3,17 (these requests), stall=0.01 (a share), merged@4 (all)."),
    ] = None,
) -> None:
    """Serve until the end, and say how it went."""
    from loadgen.servers.auth import read_secret
    from loadgen.servers.simulated import StartError
    from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
    from loadgen.servers.simulated.server import run
    from loadgen.servers.simulated.tokenizer import write_model as write

    key = read_secret(api_key_env) if api_key_env else ""
    if api_key_env is not None and not key:
        raise BadParameter(f"the environment variable {api_key_env} is empty or not set")
    config = SimulatedConfig(**settings, api_key=key, faults=tuple(map(parse_rule, fault or ())))
    try:
        if write_model is not None:
            write(write_model, config.max_model_len)
        summary = run(config)
    except OSError as problem:
        raise StartError(str(problem)) from None
    late = ", ".join(f"{name} {late_ns / 1e6:.3f} ms" for name, late_ns in summary["late_ns"].items())
    print(f"{summary['requests']} requests, {summary['events']} sends; late {late}")
    if summary["falling_behind"]:
        print("The simulated server was too slow: its tokens left later than its clock said.")


@functools.partial(SettingsCommand, generate=_parameters, shared=serve)
def sim(settings: dict[str, Any], **own: Any) -> None:
    """Be a vLLM, TGI or LightLLM server without a model: the same bytes, at times of your choosing.

    Prints `ready URL`, serves until SIGTERM or Ctrl-C, then says how late its tokens left.
    """
    serve(settings, **own)
