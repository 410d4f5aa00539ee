"""Builds command-line options from the fields of the Plan, and parses durations, time intervals and fractions."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from typer import Argument, BadParameter, Option

from loadgen.workloads.spec_syntax import WorkloadError, parse_seconds

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.plan_fields import PlanField

LOAD = {"rich_help_panel": "Load"}
OUTPUT = {"rich_help_panel": "Output"}
ADVANCED = {"rich_help_panel": "Advanced"}
"""Keyword arguments of `typer.Option` that put an option under a heading of `--help`."""
PlanFile = Annotated[
    Path | None, Argument(metavar="[PLAN]", help="Plan file (TOML). Options on the command line override its settings.")
]
OUT_NAMES = ("--out", "-o", "--output")
RunFolder = Annotated[
    Path | None,
    Option(
        *OUT_NAMES,
        metavar="FOLDER",
        help="Folder for this run: new or empty. Default: runs/<time>-<server>-<label>.",
        **OUTPUT,
    ),
]
ALIASES = {
    "n": ("-n", "--requests"),
    "duration_s": ("-d",),
    "concurrency": ("-c",),
}
"""Further names of options, by field. Other load testers have the same ones."""
PLACEHOLDERS = {
    "server": "NAME",
    "endpoint": "NAME",
    "url": "URL",
    "model": "NAME",
    "arrivals": "LOAD",
    "workload": "SOURCE",
    "extra_body": "JSON",
    "image": "WxH",
    "tokenizer": "PATH",
    "lengths": "METHOD",
    "api_key_env": "NAME",
    "header": "HEADER",
    "session_header": "HEADER",
    "session_capture": "HEADER",
    "replica_header": "HEADER",
    "balance": "HOW",
    "connections": "USE",
    "cancel": "SHARE",
    "at": "T COMMAND",
    "path": "PATH",
    "proxy": "URL",
    "ca_file": "FILE",
    "cert": "FILE",
    "key": "FILE",
    "stamps": "SOURCE",
    "client_priority": "PRIORITY",
    "dcgm_url": "URL",
    "server_pid": "PID",
    "label": "WORD",
    "platform": "TEXT",
    "gpu_model": "GPU",
    "speed": "FACTOR",
}
"""Placeholders of option values in `--help`, by field. Other numbers are N, and durations are T."""
_FRACTION = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?(%)?")


def _backends() -> Iterable[str]:
    from loadgen.servers.backends import BACKENDS

    return BACKENDS


def _endpoints() -> Iterable[str]:
    from loadgen.plan import all_endpoints

    return all_endpoints()


def _arrivals() -> Iterable[str]:
    from loadgen.workloads.arrivals import ARRIVAL_PROCESSES

    return ["burst", *(f"{name}:" for name in ARRIVAL_PROCESSES if name != "burst")]


def _workloads() -> Iterable[str]:
    from loadgen.workloads.workload import WORKLOADS

    return ["synthetic", *(f"{name}:" for name in WORKLOADS if name != "synthetic")]


def _timestamp_sources() -> Iterable[str]:
    from loadgen.servers.wire.timestamp_sources import AUTO, SOURCES

    return (AUTO, *SOURCES)


def _literals(name: str) -> Callable[[], Iterable[str]]:
    """Return a function that lists the allowed values of a Plan field. The type of this field must be a Literal."""

    def choices() -> Iterable[str]:
        from loadgen.plan import Plan
        from loadgen.plan_fields import fields_of

        field_type = fields_of(Plan)[name].type
        kinds = (field_type, *get_args(field_type))
        return [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]

    return choices


def _catalog() -> Iterable[str]:
    from loadgen.plan_fields import catalog_names

    return catalog_names()


CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "server": _backends,
    "endpoint": _endpoints,
    "arrivals": _arrivals,
    "workload": _workloads,
    "stamps": _timestamp_sources,
    "lengths": _literals("lengths"),
    "balance": _literals("balance"),
    "client_priority": _literals("client_priority"),
    "catalog": _catalog,
}
"""Functions that return the values, or the beginnings of values, that a shell completes, by option."""


def completion_of(name: str) -> Callable[[str], list[str]] | None:
    """Return typer's completion function for an option, or None if the values of the option cannot be listed."""
    return complete(CHOICES[name]) if name in CHOICES else None


def complete(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for typer. It offers the choices that start with the text typed so far."""
    return lambda incomplete: [value for value in choices() if value.startswith(incomplete)]


Catalog = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Named workload, such as paper-burst. The documentation lists all of them.",
        autocompletion=completion_of("catalog"),
        **ADVANCED,
    ),
]
Rate = Annotated[
    str | None,
    Option(
        "--rate",
        metavar="R",
        help="Requests per second. They are sent at random (Poisson) intervals, as with --arrivals poisson:R.",
        **LOAD,
    ),
]


class SettingsCommand:
    """A typer command whose options come from three sources.

    - `generate` yields the generated options.
    - `function` is the command. Its parameters are options.
    - `shared` is a function that `function` calls. Its parameters are options that several commands share.

    When the command runs, `function` receives a dict of the generated options that were set, and all other options as
    keyword arguments. The options are generated only when typer reads the signature, so that `loadgen --help` imports
    little.
    """

    def __init__(
        self, function: Callable[..., None], generate: Callable[[], Iterator[Parameter]], shared: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._generate = generate
        self._shared = shared
        self._cache: dict[type[Plan], list[Parameter]] = {}

    def _options(self) -> list[Parameter]:
        """Return the generated options. They are cached, because typer reads the signature four times per command."""
        from loadgen.plan import Plan

        if Plan not in self._cache:
            self._cache[Plan] = list(self._generate())
        return self._cache[Plan]

    @property
    def __signature__(self) -> Signature:
        return Signature([*_own_options(self._function), *self._options(), *_own_options(self._shared)])

    def __call__(self, **values: Any) -> None:
        generated = {option.name for option in self._options()}
        settings = {name: value for name, value in values.items() if name in generated and value is not None}
        self._function(settings, **{name: value for name, value in values.items() if name not in generated})


def run_command(shared: Callable[..., Any], **variation: Any) -> Callable[[Callable[..., None]], SettingsCommand]:
    """Return a decorator that turns a function into a command with an option for each field of the Plan.

    The parameters of the function `shared` become options too. `variation` contains keyword arguments for
    `plan_parameters`, which change the options of Plan fields.
    """
    return lambda function: SettingsCommand(function, functools.partial(plan_parameters, **variation), shared)


def merge_settings(plan: Path | None, catalog: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, merged from the command line, the plan file and the workload catalog.

    Settings on the command line override those of the plan file `plan`. The plan file overrides the catalog entry
    `catalog`.
    """
    from loadgen.load_shorthand import override
    from loadgen.plan_fields import from_catalog, read_plan

    merged = {} if catalog is None else from_catalog(catalog)
    if plan is not None:
        merged = override(merged, read_plan(plan))
    return override(merged, settings)


def plan_parameters(
    *,
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
    also: Mapping[str, Sequence[str]] | None = None,
    interactive: bool = False,
) -> Iterator[Parameter]:
    """Yield a command-line parameter for each field of the Plan that is an option.

    - `without`: fields to omit.
    - `defaults`: defaults by field, which override those of the Plan.
    - `helps`: help texts by field, which override those of the Plan.
    - `also`: additional option names by field.
    - `interactive`: yield only the options of `loadgen ui`.
    """
    from loadgen.plan import Plan
    from loadgen.plan_fields import fields_of, option_name, run_options

    for name, option in run_options(Plan).items():
        if name in without or (interactive and not option.interactive):
            continue
        value_type, keywords = _option_form(name, fields_of(Plan)[name])
        if name == "url" and not interactive:
            value_type = list[str]  # replicas of one server; the Plan keeps the others in `more_urls`
        flags = [option_name(name) + keywords.pop("negation", ""), *ALIASES.get(name, ()), *(also or {}).get(name, ())]
        default = (defaults or {}).get(name)
        if default is None:
            value_type = value_type | None
        keywords |= {"help": (helps or {}).get(name, option.help), "rich_help_panel": option.group}
        annotation: Any = Annotated[value_type, Option(*flags, **keywords)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        if name == "arrivals":
            yield Parameter("rate", Parameter.KEYWORD_ONLY, default=None, annotation=Rate)


def seconds(text: str | float) -> float:
    """Parse a duration such as `500ms`, `2s`, `1m30s` or `1h` into seconds.

    A number without a unit is in seconds. Raises BadParameter for other text.
    """
    try:
        return parse_seconds(str(text))
    except WorkloadError as error:
        raise BadParameter(str(error)) from None


def seconds_with_unit(text: str) -> float:
    """Parse a duration with a mandatory unit into seconds. Raises BadParameter for other text.

    Options such as `--itl` are usually given in milliseconds, so a number without a unit is probably a mistake.
    """
    result = seconds(text)
    if text.strip()[-1] in "0123456789.":
        raise BadParameter(f"{text} has no unit: write {text}ms or {text}s")
    return result


def interval(text: str) -> tuple[float, float]:
    """Parse a time interval such as `10s..50s` into (begin, end) in seconds. Raises BadParameter for other text."""
    begin, dots, end = text.partition("..")
    if not dots:
        raise BadParameter(f"{text!r} is not a time interval: write 10s..50s")
    return seconds(begin), seconds(end)


def fraction(text: str | float) -> float:
    """Return the number that a text such as `5%` or `0.05` states (0.05 for both texts).

    The number must be greater than 0 and less than 1. Raises BadParameter for any other text.
    """
    match = _FRACTION.fullmatch(str(text).strip())
    value = 0.0
    if match:
        value = float(match[1]) / (100 if match[2] else 1)
    if not 0 < value < 1:
        raise BadParameter(f"{text!r} is not a fraction between 0 and 1: write 5% or 0.05")
    return value


def confidence_level(text: str | float) -> float:
    """Parse text such as `95%` or `0.95` into a share between 0.5 and 1, both excluded.

    Raises BadParameter for other text.
    """
    from loadgen.workloads.spec_syntax import parse_confidence

    try:
        return parse_confidence(text)
    except ValueError as error:
        raise BadParameter(str(error)) from None


def _own_options(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of `function` that are command-line options, as keyword-only parameters.

    A parameter is a command-line option if its type is `Annotated`.
    """
    for parameter in signature(function, eval_str=True).parameters.values():
        if get_origin(parameter.annotation) is Annotated:
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)


def _option_form(name: str, field: PlanField) -> tuple[Any, dict[str, Any]]:
    """Return the type of the command-line option for a Plan field, and keyword arguments for `typer.Option`.

    If only certain values are allowed, the type is nevertheless a plain string. The Plan checks the value, so that all
    mistakes are reported together.
    """
    types = get_args(field.type) if get_origin(field.type) in {Union, UnionType} else (field.type,)
    item_types = [get_args(cls)[0] for cls in types if get_origin(cls) is tuple]
    if bool in types:
        return bool, {} if field.default is False else {"negation": f"/--no-{name.replace('_', '-')}"}
    if name.endswith("_s"):
        return Any, {"metavar": "T..T", "parser": interval} if item_types else {"metavar": "T", "parser": seconds}
    keywords: dict[str, Any] = {"metavar": PLACEHOLDERS.get(name, "N"), "autocompletion": completion_of(name)}
    if item_types:
        return list[item_types[0]], keywords  # type: ignore[valid-type]
    return next((cls for cls in (int, float, Path) if {*types} <= {cls, type(None)}), str), keywords
