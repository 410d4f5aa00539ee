"""Checks tool calls and JSON in responses against the JSON schemas that the requests state.

The APIs have different fields for these schemas in the body of a request:

    tools[].function.parameters, tools[].parameters, tools[].input_schema, functions[].parameters    tool calls
    response_format, text.format, output_format, output_config.format                                JSON
    guided_json, structured_outputs.json, grammar, json_schema                                       JSON

The library jsonschema is optional. Without it, tool calls and JSON are parsed, but not compared with their schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import msgspec

from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.errors import DECODE_ERRORS

Verdict = Literal["valid", "invalid", "unchecked", "no_call"]
"""`unchecked`: the response parses, and could not be compared with its schema. `no_call`: the model answered with text
although it could have called a tool, which is no mistake."""
NOT_INSTALLED = "not compared with the schema: pip install 'llm-loadgen[schema]'"
_SCHEMA_FIELDS = (
    *(b'"tools"', b'"functions"', b'"response_format"', b'"format"', b'"output_format"'),
    *(b'"guided_json"', b'"structured_outputs"', b'"grammar"', b'"json_schema"'),
)
_RELEVANT = (
    *("tools", "functions", "tool_choice", "response_format", "text", "output_format", "output_config"),
    *("guided_json", "structured_outputs", "grammar", "json_schema"),
)
_SECTIONS = ("parameters", "sampling_params")
"""Objects within the body of a native route that may contain a schema."""


class ToolCall(NamedTuple):
    """A call of a tool in a response."""

    name: str
    arguments: str
    """The arguments as JSON. Empty for a call without arguments."""


class ExpectedOutput(NamedTuple):
    """JSON schemas that a request requires its response to match: one for the text, and one for the arguments of each
    tool.
    """

    tools: Mapping[str, Any]
    """JSON schema of each tool's arguments, by the name of the tool."""
    must_call: bool
    """True if the response must contain a tool call."""
    schema: Any
    """JSON schema of the text. None: any text."""


class OutputVerdict(NamedTuple):
    """The result of the check of one response. `reason` says why the response is invalid or was not checked."""

    verdict: Verdict
    reason: str = ""


def expected_output(body: bytes) -> ExpectedOutput | None:
    """Return the JSON schemas that the response to a request must match.

    `body` is the body of the request. A schema describes the text of the response, or the arguments of a tool call. The
    result is None if the request states no schema for the text and no tools.
    """
    if not any(field in body for field in _SCHEMA_FIELDS):
        return None
    try:
        fields = msgspec.json.decode(body)
    except DECODE_ERRORS:
        return None
    if not isinstance(fields, dict):
        return None
    for section in _SECTIONS:
        fields |= _object(fields.get(section))
    relevant = {name: fields[name] for name in _RELEVANT if name in fields}
    return _expected(msgspec.json.encode(relevant, order="sorted"))


@lru_cache(maxsize=256)
def _expected(fields_json: bytes) -> ExpectedOutput | None:
    """Return the tools and the schema that a request states for its response, or None if it states neither.

    `fields_json` contains the fields of the request body that state tools and schemas. If the request forbids tool
    calls (`"tool_choice": "none"`), its tools do not count. Schemas are compiled here, so that later checks are fast.
    """
    fields = msgspec.json.decode(fields_json)
    tools = _tools(fields)
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    must_call = bool(tools) and kind in ("required", "any", "tool", "function")
    schema = _text_schema(fields)
    if kind == "none":
        tools = {}
    for compiled in (*tools.values(), schema):
        if isinstance(compiled, dict) and compiled and can_check_schemas():
            _validator(msgspec.json.encode(compiled, order="sorted"))
    return ExpectedOutput(tools, must_call, schema) if tools or schema is not None else None


def check_output(expected: ExpectedOutput, text: str, calls: Sequence[ToolCall], *, cut: bool) -> OutputVerdict:
    """Check whether a complete response has the `expected` output, and return the verdict.

    `text` is the text of the response, and `calls` are its tool calls. `cut` is True if the response ended because of
    the limit on its length.
    """
    if calls and expected.tools:
        verdicts = [_check_call(expected, call, cut=cut) for call in calls]
        invalid = [verdict for verdict in verdicts if verdict.verdict != "valid"]
        return invalid[0] if invalid else verdicts[0]
    if expected.must_call:
        return OutputVerdict("invalid", "cut off at the limit of output tokens" if cut else "no tool call")
    if expected.schema is None:
        return OutputVerdict("no_call")
    return _check_json(text.rpartition("</think>")[2], expected.schema, "JSON", cut=cut)


def can_check_schemas() -> bool:
    """Return True if the library jsonschema is installed."""
    return find_spec("jsonschema") is not None


def _check_call(expected: ExpectedOutput, call: ToolCall, *, cut: bool) -> OutputVerdict:
    if call.name not in expected.tools:
        return OutputVerdict("invalid", "call of an unknown tool")
    return _check_json(call.arguments or "{}", expected.tools[call.name], "arguments", cut=cut)


def _check_json(text: str, schema: Any, noun: str, *, cut: bool) -> OutputVerdict:
    try:
        document = msgspec.json.decode(text)
    except DECODE_ERRORS:
        return OutputVerdict("invalid", "cut off at the limit of output tokens" if cut else f"{noun} do not parse")
    if not isinstance(schema, dict | bool):
        return OutputVerdict(
            "valid" if isinstance(document, dict) else "invalid",
            "" if isinstance(document, dict) else f"{noun} are no object",
        )
    return _check_schema(document, schema, noun)


def _check_schema(document: Any, schema: Any, noun: str) -> OutputVerdict:
    """Return whether `document` matches the JSON schema `schema`, which the request contained.

    If the schema itself cannot be used, the result is `unchecked`, because the response is not at fault. `noun` is the
    subject of the message, such as `arguments`.
    """
    if schema in ({}, True):
        return OutputVerdict("valid")
    if not can_check_schemas():
        return OutputVerdict("unchecked", NOT_INSTALLED)
    find_error = _validator(msgspec.json.encode(schema, order="sorted"))
    if find_error is None:
        return OutputVerdict("unchecked", "the schema of the request is not valid")
    from referencing.exceptions import Unresolvable

    try:
        problem = find_error(document)
    except Unresolvable:
        return OutputVerdict("unchecked", "the schema of the request refers to a schema outside the request")
    return OutputVerdict("invalid", f"{noun} do not fit the schema: {problem}") if problem else OutputVerdict("valid")


@lru_cache(maxsize=256)
def _validator(schema_json: bytes) -> Callable[[Any], str] | None:
    """Return a function that takes a document and describes its first mistake, or None if the schema is invalid.

    The function returns "" for a document without mistakes. A description names the keyword of the schema and the place
    in the document, but no values of the document. Nothing is loaded from the network: the function raises
    `referencing.exceptions.Unresolvable` if the check needs a schema that is neither in the request nor built in.
    """
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    schema = msgspec.json.decode(schema_json)
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError:
        return None
    validator = kind(schema, registry=REGISTRY)

    def first_error(document: Any) -> str:
        error = next(iter(validator.iter_errors(document)), None)
        return "" if error is None else one_line(f"`{error.validator}` at {error.json_path}", 120)

    return first_error


def _tools(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of the arguments of all tools, by the name of the tool."""
    entries = [*_list(fields.get("tools")), *_list(fields.get("functions"))]
    functions = [_object(_object(entry).get("function") or entry) for entry in entries]
    schemas = {}
    for function in functions:
        schema = function.get("parameters", function.get("input_schema"))
        if isinstance(function.get("name"), str):
            schemas[function["name"]] = {} if schema is None else schema
    return schemas


def _text_schema(fields: Mapping[str, Any]) -> Any:
    """Return the JSON schema for the text of the response, from the `fields` of a request.

    Return `"object"` if the response may be any JSON object, and None if the request states no schema.
    """
    formats = (
        fields.get("response_format"),
        _object(fields.get("text")).get("format"),
        fields.get("output_format"),
        _object(fields.get("output_config")).get("format"),
    )
    for format_ in map(_object, formats):
        if format_.get("type") == "json_object":
            return "object"
        if format_.get("type") in ("json_schema", "json"):
            nested = _object(format_.get("json_schema"))
            return _parsed(nested.get("schema") or format_.get("schema") or format_.get("value") or "object")
    grammar = _object(fields.get("grammar"))
    if grammar.get("type") in ("json", "json_schema"):
        value = grammar.get("value")
        return _parsed(_object(value).get("schema") or value)
    structured = _object(fields.get("structured_outputs")).get("json")
    schema = fields.get("guided_json") or structured or fields.get("json_schema")
    return None if schema is None else _parsed(schema)


def _parsed(schema: Any) -> Any:
    """Return a JSON schema as an object. A request may contain the schema as an object or as JSON text."""
    if not isinstance(schema, str) or schema == "object":
        return schema
    try:
        return msgspec.json.decode(schema)
    except DECODE_ERRORS:
        return "object"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
