"""The options of commands that run a Plan, made from its fields; and the quantities that options take."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from typer import BadParameter, Option

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.plan_fields import PlanField

LOAD, OUTPUT, ADVANCED = ({"rich_help_panel": heading} for heading in ("Load", "Output", "Advanced"))
"""Under which heading of `--help` an option stands that is no field of the Plan."""
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s|min|h)?")
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+) ?(%)?")
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, None: 1.0}


class SettingsCommand:
    """A command with options that are `made` of fields, besides those of `function` itself and of `shared`, to which it
    hands them on. `function` is called with the settings that were given, and by name with all others. Options are made
    when typer asks for the signature: whoever only lists commands does not pay for what that imports."""

    def __init__(
        self, function: Callable[..., None], made: Callable[[], Iterator[Parameter]], shared: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._made, self._shared = function, made, shared
        self._known: dict[type[Plan], list[Parameter]] = {}

    def _options(self) -> list[Parameter]:
        """Those that are made: once, though typer asks four times for each command."""
        from loadgen.plan import Plan

        if Plan not in self._known:
            self._known[Plan] = [*self._made()]
        return self._known[Plan]

    @property
    def __signature__(self) -> Signature:
        return Signature([*_own_options(self._function), *self._options(), *_own_options(self._shared)])

    def __call__(self, **given: Any) -> None:
        made = {option.name for option in self._options()}
        settings = {name: value for name, value in given.items() if name in made and value is not None}
        self._function(settings, **{name: value for name, value in given.items() if name not in made})


def run_command(shared: Callable[..., Any], **variation: Any) -> Callable[[Callable[..., None]], SettingsCommand]:
    """Make a command of a function that runs a Plan; keywords as those of `plan_parameters`."""
    return lambda function: SettingsCommand(function, functools.partial(plan_parameters, **variation), shared)


def plan_parameters(
    *,
    without: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
    also: Mapping[str, Sequence[str]] | None = None,
    interactive: bool = False,
) -> Iterator[Parameter]:
    """An option for each field of the Plan but those `without`; `also` are its other names. `interactive` takes only
    what `loadgen ui` has."""
    from loadgen.plan import Plan
    from loadgen.plan_fields import fields_of, option_name, run_options

    for name, option in run_options(Plan).items():
        if name in without or (interactive and not option.interactive):
            continue
        kind, form = _option_form(name, fields_of(Plan)[name])
        flags = [option_name(name) + form.pop("otherwise", ""), *(also or {}).get(name, ())]
        default = (defaults or {}).get(name)
        if default is None:
            kind = kind | None
        text = (helps or {}).get(name, option.help)
        annotation: Any = Annotated[kind, Option(*flags, help=text, rich_help_panel=option.group, **form)]
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def seconds(text: str | float) -> float:
    """`500ms`, `2s`, `100us`, `1.5min`, `1h` or plain seconds such as `0.5`, in seconds. Raises BadParameter."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise BadParameter(f"{text!r} is not a duration: write 500ms, 2s or 0.5")
    return float(match[1]) * _UNITS_S[match[2]]


def seconds_with_unit(text: str) -> float:
    """As `seconds`, but with a unit: of times that people think of in milliseconds. Raises BadParameter."""
    if (match := _DURATION.fullmatch(text.strip())) and not match[2]:
        raise BadParameter(f"{text} has no unit: write {text}ms or {text}s")
    return seconds(text)


def interval(text: str) -> tuple[float, float]:
    """`10s..50s`, in seconds. Raises BadParameter."""
    begin, dots, end = text.partition("..")
    if not dots:
        raise BadParameter(f"{text!r} is not a stretch of time: write 10s..50s")
    return seconds(begin), seconds(end)


def fraction(text: str | float) -> float:
    """`5%` or `0.05`, as a share above 0. Raises BadParameter."""
    match = _SHARE.fullmatch(str(text).strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0
    if not 0 < value < 1:
        raise BadParameter(f"{text!r} is not a share above 0 and below 1: write 5% or 0.05")
    return value


def _own_options(function: Callable[..., Any]) -> Iterator[Parameter]:
    for parameter in signature(function, eval_str=True).parameters.values():
        if get_origin(parameter.annotation) is Annotated:
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)


def _option_form(name: str, field: PlanField) -> tuple[Any, dict[str, Any]]:
    """The type of an option and how it is written, by its field. Words are text here: the Plan checks them, and reports
    all mistakes at once."""
    kinds = get_args(field.type) if get_origin(field.type) in {Union, UnionType} else (field.type,)
    several = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if bool in kinds:
        return bool, {} if field.default is False else {"otherwise": f"/--no-{name.replace('_', '-')}"}
    if name.endswith("_s"):
        return Any, {"metavar": "T..T", "parser": interval} if several else {"metavar": "T", "parser": seconds}
    if several:
        return list[several[0]], {}  # type: ignore[valid-type]
    return next((kind for kind in (int, float, Path) if {*kinds} <= {kind, type(None)}), str), {}
