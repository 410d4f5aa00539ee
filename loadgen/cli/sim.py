"""`loadgen sim`: the simulated server, on its own, with an option for each field of SimulatedConfig."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import MISSING, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import BadParameter, Option

from loadgen.cli.options import SettingsCommand, timed


def _parameters() -> Iterator[Parameter]:
    """An option for each field that says what it is; times are written with their unit."""
    from servers.simulated.config import SimulatedConfig

    hints = get_type_hints(SimulatedConfig, include_extras=True)
    for each in fields(SimulatedConfig):
        kind: Any = hints[each.name]
        default: Any = Parameter.empty if each.default is MISSING else each.default
        flag = f"--{each.name.replace('_', '-')}"
        form: dict[str, Any] = {}
        if each.name.endswith("_s"):
            default, flag = f"{default * 1e3:g}ms", flag.removesuffix("-s")
            form = {"metavar": "T", "parser": timed}
        if help_text := getattr(kind, "__metadata__", ("",))[0]:
            annotation: Any = Annotated[Any if form else kind, Option(flag, help=help_text, **form)]
            yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


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
    from servers.access import secret_in
    from servers.simulated import StartError
    from servers.simulated.config import SimulatedConfig, parse_rule
    from servers.simulated.model import write_model as write
    from servers.simulated.server import run

    key = secret_in(api_key_env) if api_key_env else ""
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
        print("The simulated server did not keep up: its tokens left later than its clock wanted.")


@functools.partial(SettingsCommand, made=_parameters, shared=serve)
def sim(settings: dict[str, Any], **own: Any) -> None:
    """Be a vLLM, TGI or LightLLM server without a model: the same bytes, at times of your choosing.

    Prints `ready URL`, serves until SIGTERM or Ctrl-C, then says how late its tokens left.
    """
    serve(settings, **own)
