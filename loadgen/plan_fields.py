"""The settings of a Plan as people write and keep them: options and what is wrong with one, plan files, the catalog of
named workloads, command lines."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from loadgen.errors import PlanError
from loadgen.servers.auth import redact, redact_header
from loadgen.servers.backends import join_or
from loadgen.servers.errors import read_settings, read_toml
from loadgen.workloads import arrivals, lengths, workload
from loadgen.workloads import images as pictures
from loadgen.workloads.json_values import check_text
from loadgen.workloads.prompts import tokenizer_file
from loadgen.workloads.spec_syntax import WorkloadError

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.servers.backends.dialect import Dialect

CATALOG = Path(workload.__file__).with_name("catalog")
"""Named workloads, a TOML file each: settings, a `summary`, and the `source` of its numbers."""
NOTHING_SENT = "Nothing was sent. --help lists the options."
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
"""What is said where something else was given."""

Group = Literal["Load", "Server", "Prompts", "Output", "Advanced"]
"""Under which heading `--help` lists an option; of advanced ones its first screen has the names alone."""
Check = Callable[[Any], Any]
"""Beside the type of a field: gives what it is given, or that in its canonical form. Raises ValueError."""


class RunOption(msgspec.Struct, frozen=True):
    """How people meet a field of the Plan. Its name, unit and form on the command line follow from the field itself:
    `timeout_s` is `--timeout` and takes `500ms`, a bool is a flag, a tuple of several values may be repeated."""

    group: Group
    interactive: Literal["form", "start"] | None = None
    """Whether `loadgen ui` has it: its web form may change it between runs, or it is fixed when `loadgen ui` starts."""
    help: str = ""
    """By default the field's docstring."""
    default: Callable[[Mapping[str, Any]], Any] | None = None
    """Where it follows from the settings before it."""


class Preprocess(msgspec.Struct, frozen=True):
    """Beside the type of a field: makes of what was given what the type takes. Raises ValueError."""

    read: Callable[[Any], Any]


def one_of(known: Callable[[], Iterable[str]]) -> Check:
    """Like a Literal, of names that are looked up when they are needed."""

    def check(name: str) -> str:
        if name not in (names := [*known()]):
            raise ValueError(f"unknown; choose {join_or(map(repr, names))}")
        return name

    return check


def require(hold: Callable[[Any], bool], otherwise: str) -> Check:
    """What has to hold of a value, and what is said otherwise."""

    def check(value: Any) -> Any:
        if not hold(value):
            raise ValueError(otherwise)
        return value

    return check


def in_range(least: int, most: int) -> Check:
    """A number from one to another."""
    return require(lambda number: least <= number <= most, f"must be from {least} to {most:,}")


def image_sizes(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Of pictures, in their canonical form."""
    return tuple("x".join(map(str, pictures.parse_size(text))) for text in texts)


def known_gpu(text: str) -> str:
    """GPUs that loadgen.servers.hardware knows; none where none is named."""
    if text:
        from loadgen.servers.hardware import cards

        cards(text)
    return text


def existing_tokenizer(tokenizer: Path) -> Path:
    """A tokenizer whose file is there."""
    tokenizer_file(tokenizer)
    return tokenizer


def canonical(parse: Callable[[str], object]) -> Check:
    """As it is parsed and written again; the hint of a mistake goes into its message."""

    def check(value: int | str) -> int | str:
        try:
            text = str(parse(str(value)))
        except WorkloadError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None
        return int(text) if text.isdecimal() else text

    return check


def _as_tuple(given: Any) -> Any:
    return (given,) if isinstance(given, int | str) else given or ()


def _as_object(given: Any) -> Any:
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


TUPLE, JSON_OBJECT = Preprocess(_as_tuple), Preprocess(_as_object)
POSITIVE = require(lambda number: number > 0, "must be more than 0")


class PlanField(NamedTuple):
    """One field of the Plan."""

    type: Any
    """Without what stands beside it."""
    option: RunOption | None
    preprocess: list[Preprocess]
    checks: list[Check]
    default: Any

    def default_after(self, settings: Mapping[str, Any]) -> Any:
        """What it is where nobody says, given the settings before it."""
        return self.option.default(settings) if self.option and self.option.default else self.default

    def read(self, given: Any) -> Any:
        """Raises ValueError."""
        for each in self.preprocess:
            given = each.read(given)
        kinds = get_args(self.type) if get_origin(self.type) in {Union, UnionType} else (self.type,)
        for kind in kinds:
            if (names := get_args(kind)) and get_origin(kind) is Literal and given is not None:
                return one_of(partial(tuple, names))(given)
        try:
            result = msgspec.convert(given, self.type, strict=False, dec_hook=lambda kind, given: kind(given))
        except (msgspec.ValidationError, TypeError):
            takes = [TYPE_NAMES.get((get_args(kind) or [kind])[0], "") for kind in kinds if kind is not type(None)]
            raise ValueError(f"must be {' or '.join(takes)}") from None
        for text in result if isinstance(result, tuple) else (result,):
            if isinstance(text, str):
                check_text(text, "the text")
        for check in self.checks if result is not None else ():
            result = check(result)
        return result


_FIELDS: dict[type[Plan], dict[str, PlanField]] = {}


def fields_of(plan: type[Plan]) -> dict[str, PlanField]:
    """The fields of the Plan, in their order."""
    if plan not in _FIELDS:
        hints, bare = get_type_hints(plan, include_extras=True), get_type_hints(plan)
        _FIELDS[plan] = {field.name: _field(field, hints[field.name], bare[field.name]) for field in fields(plan)}
    return _FIELDS[plan]


def _field(field: Field[Any], hint: Any, bare: Any) -> PlanField:
    beside = [*_metadata(hint)]
    option = next((each for each in beside if isinstance(each, RunOption)), None)
    before = [each for each in beside if isinstance(each, Preprocess)]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return PlanField(bare, option, before, [each for each in beside if callable(each)], default)


def _metadata(hint: Any) -> Iterator[Any]:
    """What stands beside a type in Annotated, beside a part of it first."""
    if get_origin(hint) in {Union, UnionType, Annotated}:
        kinds = get_args(hint) if get_origin(hint) is not Annotated else (hint.__origin__,)
        for kind in kinds:
            yield from _metadata(kind)
        yield from getattr(hint, "__metadata__", ())


def validate_fields(plan: type[Plan], given: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each field, as given or by default. Raises PlanError with a line for each mistake, named by its
    option."""
    known, result = fields_of(plan), dict[str, Any]()
    wrong = [f"{name}: there is no such setting" for name in given if name not in known]
    for name, field in known.items():
        try:
            if name in given:
                result[name] = field.read(given[name])
            elif not wrong:  # a default may follow from a setting with a mistake
                result[name] = field.default_after(result)
        except WorkloadError as error:
            wrong.append(_error_line(name, given[name], f"{error}; {error.hint}" if error.hint else str(error)))
        except ValueError as error:
            wrong.append(_error_line(name, given[name], str(error)))
    if wrong:
        raise PlanError("\n".join(wrong), NOTHING_SENT)
    return result


def run_options(plan: type[Plan]) -> dict[str, RunOption]:
    """The fields of the Plan that are options of a run, in their order, with their help."""
    said = _docstrings(plan)
    options = {name: field.option for name, field in fields_of(plan).items() if field.option}
    return {name: replace(each, help=each.help or said[name]) for name, each in options.items()}


def _docstrings(plan: type[Plan]) -> dict[str, str]:
    """Of its fields, those of its bases included."""
    result = dict[str, str]()
    for each in reversed(plan.__mro__[:-1]):
        source = ast.parse(Path(str(sys.modules[each.__module__].__file__)).read_text("utf-8"))
        body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == each.__name__)
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                result[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return result


def option_name(field: str) -> str:
    """What a field is called on the command line: units are written with the value."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def _error_line(name: str, given: Any, said: str) -> str:
    value = tuple(map(redact_header, _as_tuple(given))) if name == "header" else given
    value = ", ".join(map(str, value)) if isinstance(value, tuple | list) else value
    return f"{option_name(name)} {value}: {said}"


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


def command_line(plan: Plan) -> list[str]:
    """The command line that runs this plan: what differs from the defaults."""
    words = ["loadgen", "run"]
    for name, field in fields_of(type(plan)).items():
        value, flag = getattr(plan, name), option_name(name)
        values = value if isinstance(value, tuple) else (value,)
        if field.option is None or value == field.default_after(vars(plan)):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif name.endswith("_s"):
            words += [flag, "..".join(f"{end:.9f}".rstrip("0").rstrip(".") + "s" for end in values)]
        else:
            words += [text for value in values for text in (flag, str(value))]
    words += [text for objective in plan.objectives for text in ("--assert", objective)]
    words += [text for each in plan.goodput for text in ("--goodput", each)]
    return list(redact(words))


def describe_lengths(plan: Plan) -> tuple[str, str]:
    """Prompt and output lengths in words, also where a trace or a file brings its own."""
    if arrivals.parse(plan.arrivals).facts.recorded and plan.workload == "synthetic":
        return "recorded", "recorded"
    named = lengths.parse_outputs(str(plan.output_tokens)).lengths
    gaps = f" ({lengths.DEFAULT_OUTPUT_TOKENS} where it names none)" if plan.workload.startswith("jsonl:") else ""
    told = f"the file's{gaps}" if named is None else f"{named}"
    return "the file's" if plan.uses_file else f"{plan.input_tokens}", "at most " * plan.may_stop_early + told


def describe_plan(plan: Plan, dialect: Dialect) -> str:
    """The plan in one line."""
    how_many = "" if plan.n is None else f"{plan.n} {'sessions' if plan.uses_sessions else 'requests'}, "
    how_long = "" if plan.duration_s is None else f" for {plan.duration_s:g} s"
    facts = arrivals.parse(plan.arrivals).facts
    when = facts.text if facts.burst else plan.arrivals
    tokens_in, tokens_out = describe_lengths(plan)
    about = "about " if plan.lengths == "approximate" and not plan.uses_file else ""
    back = f"{tokens_out} out" if dialect.streams else dialect.endpoint
    return f"{how_many}{when}{how_long}, {about}{tokens_in} tokens in, {back}"
