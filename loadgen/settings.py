"""The settings of a Plan as people write and keep them: options and what is wrong with one, plan files, the catalog of
named workloads, command lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError
from pydantic_core import PydanticCustomError

from loadgen.errors import PlanError
from servers.access import redacted, without_secrets
from servers.errors import read_settings, read_toml
from servers.kinds import any_of
from workloads import pictures, workload
from workloads.prompts import tokenizer_file
from workloads.syntax import WorkloadError

if TYPE_CHECKING:
    from loadgen.plan import Plan

CATALOG = Path(workload.__file__).with_name("catalog")
"""Named workloads, a TOML file each: settings, a `summary`, and the `source` of its numbers."""


Group = Literal["Server", "Load", "Prompts", "Measurement", "Output"]
"""Under which heading `--help` lists an option."""


@dataclass(frozen=True, slots=True)
class RunOption:
    """How people meet a field of the Plan. Its name, unit and form on the command line follow from the field itself:
    `timeout_s` is `--timeout` and takes `500ms`, a bool is a flag, a tuple of several values may be repeated."""

    group: Group
    interactive: Literal["form", "start"] | None = None
    """Whether `loadgen ui` has it: its web form may change it between runs, or it is fixed when `loadgen ui` starts."""
    help: str = ""
    """By default the field's docstring."""


def one_of(known: Callable[[], Iterable[str]]) -> AfterValidator:
    """Like a Literal, of names that are looked up when they are needed."""

    def check(name: str) -> str:
        if name not in (names := [*known()]):
            raise PydanticCustomError("literal_error", "unknown", {"expected": any_of(map(repr, names))})
        return name

    return AfterValidator(check)


def _must(hold: Callable[[Any], bool], otherwise: str) -> AfterValidator:
    """A check of a value that was given; what is said `otherwise` may quote it."""

    def check(value: Any) -> Any:
        if value is not None and not hold(value):
            raise ValueError(otherwise.format(value))
        return value

    return AfterValidator(check)


def sizes(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Of pictures, as they are written again."""
    return tuple("x".join(map(str, pictures.size(text))) for text in texts)


def must_exist(tokenizer: Path | None) -> Path | None:
    """A check of a tokenizer's file."""
    if tokenizer is not None:
        tokenizer_file(tokenizer)
    return tokenizer


def _several(given: Any) -> Any:
    return (given,) if isinstance(given, int | str) else given or ()


def _object(given: Any) -> Any:
    try:
        if isinstance(given, str):
            given = json.loads(read_settings(Path(given[1:])) if given.startswith("@") else given)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    return given


SEVERAL, OBJECT = BeforeValidator(_several), BeforeValidator(_object)
FORWARD = _must(lambda ends: 0 <= ends[0] < ends[1], "must begin at 0 or later, and end after it begins")
SELDOM = _must(
    lambda every_s: not 0 < every_s < 1,
    "at most once a second, or a server at its limit is measured while it answers us; 0 is off",
)


def run_options(plan: type[BaseModel]) -> dict[str, RunOption]:
    """The fields of the Plan that are options of a run, in their order."""
    return {
        name: replace(each, help=each.help or " ".join((field.description or "").split()))
        for name, field in plan.model_fields.items()
        for each in field.metadata
        if isinstance(each, RunOption)
    }


def option_name(field: str) -> str:
    """What a field is called on the command line: units are written with the value."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def mistakes(error: ValidationError) -> str:
    """A line for each, named by its option."""
    # A default that follows from a field with a mistake is none of its own.
    return "\n".join(_mistake(each) for each in error.errors() if each["type"] != "default_factory_not_called")


def _mistake(item: Any) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    name, option, value = item["loc"][0], option_name(str(item["loc"][0])), item["input"]
    if name == "header":
        value = tuple(map(redacted, value))
    value = ", ".join(map(str, value)) if isinstance(value, tuple | list) else value
    if item["type"] == "literal_error":
        return f"{option} {value}: unknown; choose {item['ctx']['expected']}"
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    return f"{option} {value}: {message[0].lower()}{message[1:]}"


def read_plan(path: Path) -> dict[str, Any]:
    """The settings of a plan file (TOML, keys as the fields of Plan). Raises PlanError when it is not TOML."""
    try:
        return read_toml(path)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"{path} is not TOML: {error}", 'Write lines such as: arrivals = "poisson:20"') from error


def catalog_names() -> list[str]:
    """The named workloads: `paper-burst` first, the others in alphabetical order."""
    return sorted((file.stem for file in CATALOG.glob("*.toml")), key=lambda name: (name != "paper-burst", name))


def from_catalog(name: str) -> dict[str, Any]:
    """The settings of a named workload. Raises WorkloadError for a name that is not in the catalog."""
    if name not in (names := catalog_names()):
        raise WorkloadError(f"there is no workload {name!r} in the catalog", f"choose {', '.join(names)}")
    named = read_plan(CATALOG / f"{name}.toml")
    settings = {key: value for key, value in named.items() if key not in ("summary", "source")}
    return {"workload": "synthetic", "label": name} | settings


def command_of(plan: Plan) -> list[str]:
    """The command line that runs this plan: what differs from the defaults."""
    words = ["loadgen", "run"]
    for name in run_options(type(plan)):
        value, flag = getattr(plan, name), option_name(name)
        values = value if isinstance(value, tuple) else (value,)
        if value == type(plan).model_fields[name].get_default(call_default_factory=True, validated_data=vars(plan)):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif name.endswith("_s"):
            words += [flag, "..".join(f"{end:.9f}".rstrip("0").rstrip(".") + "s" for end in values)]
        else:
            words += [text for each in values for text in (flag, str(each))]
    return list(without_secrets(words))
