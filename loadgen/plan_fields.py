"""Converts and validates the fields of a Plan.

This module also reads plan files and the catalog of named workloads, and writes a plan as a command line or as one line
of text.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from inspect import Parameter, Signature
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from loadgen.errors import PlanError
from loadgen.load_shorthand import URL_LIST
from loadgen.servers.auth import redact, redact_fields
from loadgen.servers.backends import join_or
from loadgen.servers.errors import read_settings, read_toml
from loadgen.workloads import images, lengths, workload
from loadgen.workloads.json_values import check_text
from loadgen.workloads.prompts import tokenizer_file
from loadgen.workloads.spec_syntax import WorkloadError, parse_confidence, parse_seconds
from loadgen.workloads.workload_facts import about_tokens

if TYPE_CHECKING:
    from loadgen.plan import Plan
    from loadgen.servers.backends.dialect import Dialect

CATALOG = Path(workload.__file__).with_name("catalog")
"""Folder of the named workloads. Each TOML file holds settings, a `summary` and the `source` of its numbers."""
NOTHING_SENT = "Nothing was sent. --help lists the options."
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
"""Names of the types in error messages."""

Group = Literal["Load", "Server", "Prompts", "Output", "Advanced"]
"""Heading under which `--help` lists an option. The first help screen shows only the names of the advanced options."""
Check = Callable[[Any], Any]
"""A function that validates a field's value after type conversion. It is used as an Annotated marker.

The function returns the value or its canonical form, or raises ValueError.
"""


class RunOption(msgspec.Struct, frozen=True):
    """Command-line and web-form metadata of a Plan field.

    The option's name and syntax depend on the field. `timeout_s` becomes `--timeout`, which takes values such as
    `500ms`. A bool field becomes a flag. The option of a tuple field may be repeated.
    """

    group: Group
    interactive: Literal["form", "start"] | None = None
    """Availability in `loadgen ui`: `form` (editable in the web form between runs), `start` (fixed when the command
    starts), or None (not available)."""
    help: str = ""
    """Help text. Default: the field's docstring."""
    default: Callable[[Mapping[str, Any]], Any] | None = None
    """Function that computes the default from the settings of the preceding fields. None: the field has a fixed
    default."""


class Preprocess(msgspec.Struct, frozen=True):
    """Annotated marker that converts raw input before type checking. The conversion may raise ValueError."""

    read: Callable[[Any], Any]


def one_of(choices: Callable[[], Iterable[str]]) -> Check:
    """Return a check that accepts only the names returned by `choices`.

    `choices` is called whenever a value is checked, so the names need not be known at import time.
    """

    def check(name: str) -> str:
        names = list(choices())
        if name not in names:
            raise ValueError(f"unknown; choose {join_or(map(repr, names))}")
        return name

    return check


def require(condition: Callable[[Any], bool], message: str) -> Check:
    """Return a check that raises ValueError with `message` if the condition does not hold."""

    def check(value: Any) -> Any:
        if not condition(value):
            raise ValueError(message)
        return value

    return check


def in_range(low: int, high: int) -> Check:
    """Return a check that accepts numbers from `low` to `high`, both included."""
    return require(lambda number: low <= number <= high, f"must be from {low} to {high:,}")


def image_sizes(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return image sizes in their canonical form, such as 512x512. Raises ValueError for text that is not a size."""
    return tuple("x".join(map(str, images.parse_size(text))) for text in texts)


def known_gpu(text: str) -> str:
    """Return the text unchanged if it is empty or names supported GPUs, such as `4 x A100`.

    Raises ValueError for any other text. `loadgen.servers.hardware` defines the supported GPUs.
    """
    if text:
        from loadgen.servers.hardware import parse_gpus

        parse_gpus(text)
    return text


def existing_tokenizer(tokenizer: Path) -> Path:
    """Return the tokenizer unchanged if its file exists. Raises PromptError if the file does not exist."""
    tokenizer_file(tokenizer)
    return tokenizer


def canonical(parse: Callable[[str], object]) -> Check:
    """Return a check that parses a value and returns its canonical text, or an int if that text is a whole number.

    The check raises ValueError with the message and hint of the parser.
    """

    def check(value: int | str) -> int | str:
        try:
            text = str(parse(str(value)))
        except WorkloadError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None
        return int(text) if text.isdecimal() else text

    return check


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value or ()


def _as_object(value: Any) -> Any:
    try:
        if isinstance(value, str):
            value = json.loads(read_settings(Path(value[1:])) if value.startswith("@") else value)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _as_seconds(value: Any) -> Any:
    """Convert a duration such as `1m30s` to seconds, and an interval such as `10s..50s` to a pair of seconds.

    Values that are not text are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    begin, dots, end = value.partition("..")
    return (parse_seconds(begin), parse_seconds(end)) if dots else parse_seconds(value)


SECONDS = Preprocess(_as_seconds)
TUPLE = Preprocess(_as_tuple)
CONFIDENCE = Preprocess(lambda level: None if level is None else parse_confidence(level))
JSON_OBJECT = Preprocess(_as_object)
POSITIVE = require(lambda number: number > 0, "must be more than 0")


class PlanField(NamedTuple):
    """One field of the Plan, with its metadata."""

    type: Any
    """Type without its Annotated markers."""
    option: RunOption | None
    preprocess: list[Preprocess]
    checks: list[Check]
    default: Any

    def default_after(self, settings: Mapping[str, Any]) -> Any:
        """Return the default of the field. It may depend on `settings`, the values of the preceding fields."""
        return self.option.default(settings) if self.option and self.option.default else self.default

    def read(self, value: Any) -> Any:
        """Convert a raw value to the type of the field and check it. Raises ValueError if the value is invalid."""
        for step in self.preprocess:
            value = step.read(value)
        types = get_args(self.type) if get_origin(self.type) in {Union, UnionType} else (self.type,)
        for choice in types:
            if get_origin(choice) is Literal and value is not None:
                return one_of(partial(tuple, get_args(choice)))(value)
        try:
            result = msgspec.convert(value, self.type, strict=False, dec_hook=lambda cls, raw: cls(raw))
        except (msgspec.ValidationError, TypeError):
            names = [TYPE_NAMES.get((get_args(cls) or [cls])[0], "") for cls in types if cls is not type(None)]
            raise ValueError(f"must be {' or '.join(names)}") from None
        for text in result if isinstance(result, tuple) else (result,):
            if isinstance(text, str):
                check_text(text, "the text")
        for check in self.checks if result is not None else ():
            result = check(result)
        return result


_FIELDS: dict[type[Plan], dict[str, PlanField]] = {}


def fields_of(plan: type[Plan]) -> dict[str, PlanField]:
    """Return the fields of the Plan by name, in the order of their definition."""
    if plan not in _FIELDS:
        hints, bare = get_type_hints(plan, include_extras=True), get_type_hints(plan)
        _FIELDS[plan] = {field.name: _field(field, hints[field.name], bare[field.name]) for field in fields(plan)}
    return _FIELDS[plan]


def _field(field: Field[Any], hint: Any, bare: Any) -> PlanField:
    markers = list(_metadata(hint))
    option = next((marker for marker in markers if isinstance(marker, RunOption)), None)
    preprocess = [marker for marker in markers if isinstance(marker, Preprocess)]
    if field.name.endswith("_s"):
        preprocess.append(SECONDS)
    checks = [marker for marker in markers if callable(marker)]
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return PlanField(bare, option, preprocess, checks, default)


def _metadata(hint: Any) -> Iterator[Any]:
    """Yield the Annotated markers of a type hint, inner markers first."""
    if get_origin(hint) in {Union, UnionType, Annotated}:
        parts = get_args(hint) if get_origin(hint) is not Annotated else (hint.__origin__,)
        for part in parts:
            yield from _metadata(part)
        yield from getattr(hint, "__metadata__", ())


def validate_fields(plan: type[Plan], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field of the Plan: the validated entry of `values`, or else the field's default.

    Raises PlanError with one line per mistake. Each line names the option or the unknown setting.
    """
    known = fields_of(plan)
    result = dict[str, Any]()
    mistakes = [_unknown_setting(name, known) for name in values if name not in known]
    for name, field in known.items():
        try:
            if name in values:
                result[name] = field.read(values[name])
            elif not mistakes:  # a default may depend on a setting that is wrong
                result[name] = field.default_after(result)
        except WorkloadError as error:
            message = f"{error}; {error.hint}" if error.hint else str(error)
            mistakes.append(_error_line(name, values[name], message))
        except ValueError as error:
            mistakes.append(_error_line(name, values[name], str(error)))
    if mistakes:
        raise PlanError("\n".join(mistakes), NOTHING_SENT)
    return result


def run_options(plan: type[Plan]) -> dict[str, RunOption]:
    """Return the RunOption of each field of the Plan, by field name. Fields without a command-line option are left out.

    If a RunOption has no help text, its help text in the result is the docstring of the field.
    """
    docstrings = _docstrings(plan)
    options = {name: field.option for name, field in fields_of(plan).items() if field.option}
    return {name: replace(option, help=option.help or docstrings[name]) for name, option in options.items()}


def _docstrings(plan: type[Plan]) -> dict[str, str]:
    """Return the docstring of each field of the Plan and of its base classes, by field name.

    Python does not keep docstrings of fields, so they are read from the source code.
    """
    result = dict[str, str]()
    for cls in reversed(plan.__mro__[:-1]):
        source = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_text("utf-8"))
        body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                result[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return result


def option_name(field: str) -> str:
    """Return the command-line option of a field, such as `--timeout` for `timeout_s`.

    The unit suffix is removed, because users write the unit with the value.
    """
    return "--" + field.removesuffix("_s").replace("_", "-")


def keyword_signature(plan: type[Plan]) -> Signature:
    """Return the signature of the Plan's constructor, with a keyword argument for `rate` and for each field.

    Notebooks and IDEs use the signature to complete and explain the arguments.
    """
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for name, field in fields_of(plan).items()
    ]
    rate = Parameter("rate", Parameter.KEYWORD_ONLY, default=None, annotation=float | str | None)
    parameters.insert([parameter.name for parameter in parameters].index("arrivals") + 1, rate)
    return Signature(parameters)


def _unknown_setting(name: str, known: Collection[str]) -> str:
    """Return the message for a setting that does not exist. The message suggests the most similar setting."""
    from difflib import get_close_matches  # takes 2 ms, and few plans have such a mistake

    plain = name.strip("-").replace("-", "_")
    same_stem = [setting for setting in known if setting.startswith(f"{plain}_")]  # `timeout` means timeout_s
    similar = [*same_stem, *get_close_matches(plain, known, n=1, cutoff=0.7)]
    suggestion = f"; did you mean {similar[0]}?" if similar else ""
    return f"{name}: unknown setting{suggestion}"


def _error_line(name: str, value: Any, message: str) -> str:
    shown = redact(value, name)
    if isinstance(shown, tuple) and name.endswith("_s"):
        shown = "..".join(f"{end_s:g}s" for end_s in shown)
    elif isinstance(shown, tuple | list):
        shown = ", ".join(map(str, shown))
    return f"{option_name(name)} {shown}: {message}"


def read_plan(path: Path) -> dict[str, Any]:
    """Return the settings in a plan file, which is a TOML file whose keys are the fields of Plan.

    Raises PlanError if the file cannot be read or is not TOML, and for the key `more_urls`, which only run files have.
    """
    try:
        settings = read_toml(path)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", "Name a plan file (TOML).") from error
    except ValueError as error:
        raise PlanError(f"{path} is not TOML: {error}", 'Write lines such as: arrivals = "poisson:20"') from error
    if "more_urls" in settings:
        raise PlanError(f"{path}: more_urls is no setting of a plan file", URL_LIST)
    return settings


def catalog_names() -> list[str]:
    """Return the names of the workloads in the catalog in alphabetical order, but with `paper-burst` first."""
    return sorted((file.stem for file in CATALOG.glob("*.toml")), key=lambda name: (name != "paper-burst", name))


def from_catalog(name: str) -> dict[str, Any]:
    """Return the settings of a workload in the catalog. Raises WorkloadError for an unknown name."""
    names = catalog_names()
    if name not in names:
        raise WorkloadError(f"unknown workload {name!r} in --catalog", f"choose {', '.join(names)}")
    entry = read_plan(CATALOG / f"{name}.toml")
    settings = {key: value for key, value in entry.items() if key not in ("summary", "source")}
    return {"workload": "synthetic", "label": name} | settings


def command_line(plan: Plan) -> list[str]:
    """Return the command line that runs this plan. It contains only the options that differ from their defaults."""
    words = ["loadgen", "run", *(["PLAN"] if plan.traffic else [])]  # only a plan file has classes of traffic
    words += changed_options(plan, fields_of(type(plan)))
    words += [text for objective in plan.objectives for text in ("--assert", objective)]
    words += ["--confidence", f"{plan.confidence:g}"] if plan.confidence else []
    words += [text for objective in plan.goodput for text in ("--goodput", objective)]
    return list(redact(words))


def changed_options(plan: Plan, names: Iterable[str]) -> list[str]:
    """Return the options of the fields `names` that differ from their defaults, as words of a command line."""
    words: list[str] = []
    for name in names:
        field = fields_of(type(plan))[name]
        value, flag = getattr(plan, name), option_name(name)
        values = value if isinstance(value, tuple) else (value,)
        is_default = value == field.default_after(vars(plan))
        if name == "seed":  # without the option, another command may draw another seed
            is_default = plan.seed_choice == "fixed"
        if field.option is None or is_default:
            continue
        if name == "url":
            values = plan.urls
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, json.dumps(redact_fields(value))]
        elif name.endswith("_s"):
            words += [flag, "..".join(f"{end:.9f}".rstrip("0").rstrip(".") + "s" for end in values)]
        else:
            words += [text for value in values for text in (flag, str(value))]
    return words


def describe_lengths(plan: Plan) -> tuple[str, str]:
    """Return the prompt length and the output length of a plan as text, such as `512` and `at most 128`.

    If a trace contains the lengths, the text is `recorded`. If a file contains them, the text is `the file's`.
    """
    if plan.arrival_process.facts.recorded and isinstance(plan.prompt_source, workload.Synthetic):
        return "recorded", "recorded"
    inputs = "the file's" if plan.uses_file else f"{plan.input_tokens}"
    distribution = plan.output_lengths.lengths
    if distribution is not None:
        outputs = f"{distribution}"
    elif plan.workload.startswith("jsonl:"):
        outputs = f"the file's ({lengths.DEFAULT_OUTPUT_TOKENS} where it names none)"
    else:
        outputs = "the file's"
    return inputs, f"at most {outputs}" if plan.may_stop_early else outputs


def describe_plan(plan: Plan, dialect: Dialect, *, exact: bool = True) -> str:
    """Return a description of the plan in one line, such as `200 requests, poisson:20, 512 tokens in, 128 out`.

    `dialect` is the request and response format of the plan's endpoint. `exact` is False if the number of tokens in the
    prompts is only an estimate. The description then contains `about 512 tokens (estimated) in`.
    """
    noun = "session" if plan.uses_sessions else "request"
    number = "" if plan.n is None else f"{plan.n} {noun}{'' if plan.n == 1 else 's'}, "
    duration = "" if plan.duration_s is None else f" for {plan.duration_s:g} s"
    facts = plan.arrival_process.facts
    process = facts.text if facts.burst else plan.arrivals
    if plan.concurrency:
        process += f", at most {plan.concurrency} in flight"
    tokens_in, tokens_out = describe_lengths(plan)
    prompt = about_tokens(f"{tokens_in} tokens", exact=exact or plan.uses_file)
    if plan.batch_size > 1:
        prompt = f"{plan.batch_size} inputs of {prompt}"
    if dialect.inputs == "recording":
        prompt = describe_recordings(plan)
    output = f"{tokens_out} out" if dialect.has_output_length else dialect.endpoint
    return f"{number}{process}{duration}, {prompt} in, {output}"


def describe_recordings(plan: Plan) -> str:
    """Return a description of the recordings of a plan, such as `recordings of 10 s` or `recordings of a file`."""
    return f"recordings of {plan.workload}" if plan.uses_file else f"recordings of {plan.audio_lengths} s"
