"""Builds texts that match a JSON schema or a regular expression.

A simulated server sends such a text when a request restricts the output to a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from re import _parser  # type: ignore[attr-defined]  # the only regular expression parser in the standard library
from typing import Any

_MAX_DEPTH = 32
_CATEGORIES = {
    "CATEGORY_DIGIT": "0",
    "CATEGORY_NOT_DIGIT": "a",
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_SPACE": "a",
    "CATEGORY_WORD": "a",
    "CATEGORY_NOT_WORD": " ",
}


class GrammarError(ValueError):
    """A grammar is invalid, or the simulated server does not support it."""


def json_text(schema: Mapping[str, Any], word: str) -> str:
    """Return a JSON document that matches the JSON schema `schema`.

    The value of every string without a restriction is `word`. Raises GrammarError for an unsupported schema.
    """
    return json.dumps(_value(schema, schema, word, 0), ensure_ascii=False)


def _value(schema: Any, root: Mapping[str, Any], word: str, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        raise GrammarError("the schema is not an object, or nested too deeply")
    if "const" in schema:
        return schema["const"]
    enum = schema.get("enum")
    if isinstance(enum, list) and enum:
        return enum[0]
    subschema = _referred(str(schema["$ref"]), root) if "$ref" in schema else _first_choice(schema)
    if subschema is not None:
        return _value(subschema, root, word, depth + 1)
    return _value_of_type(schema, root, word, depth)


def _first_choice(schema: Mapping[str, Any]) -> Any:
    """Return the first schema of `anyOf`, `oneOf` or `allOf`, or None if `schema` has none of them."""
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        if isinstance(choices, list) and choices:
            return choices[0]
    return None


def _value_of_type(schema: Mapping[str, Any], root: Mapping[str, Any], word: str, depth: int) -> Any:
    type_ = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(type_, list) and type_:
        type_ = type_[0]
    if type_ == "object":
        properties = _properties(schema)
        return {name: _value(subschema, root, word, depth + 1) for name, subschema in properties.items()}
    if type_ == "array":
        items = schema.get("items", {"type": "string"})
        return [_value(items, root, word, depth + 1) for _ in range(int(schema.get("minItems", 1)))]
    if type_ == "string" and isinstance(schema.get("pattern"), str):
        return regex_text(schema["pattern"])
    return {"string": word, "integer": 7, "number": 0.5, "boolean": True}.get(str(type_))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _referred(path: str, root: Mapping[str, Any]) -> Any:
    """Return the subschema of `root` that a `$ref` path points to, or None if the path does not exist."""
    result: Any = root
    for step in filter(None, path.removeprefix("#").split("/")):
        result = result.get(step) if isinstance(result, Mapping) else None
    return result


def regex_text(pattern: str) -> str:
    """Return a text that matches the whole regular expression `pattern`.

    Raises GrammarError for an invalid or unsupported pattern.
    """
    try:
        return _matched(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as problem:
        raise GrammarError(str(problem)) from None


def _matched(parsed: Sequence[tuple[Any, Any]]) -> str:
    return "".join(_piece(str(operation), argument) for operation, argument in parsed)


def _piece(operation: str, argument: Any) -> str:
    """Return a short text that matches one operation of a parsed regular expression.

    For an optional operation, such as `a?` or `a*`, the text contains one occurrence.
    """
    if operation not in _GENERATORS:
        raise GrammarError(f"{operation} is not supported")
    return _GENERATORS[operation](argument)


def _repeated(argument: tuple[int, int, Any]) -> str:
    minimum, maximum, repeated = argument
    return _matched(repeated) * max(minimum, min(1, maximum))


def _member(members: Sequence[tuple[Any, Any]]) -> str:
    """Return one character that belongs to a parsed character set, such as `[a-f]` or `[^0-9]`."""
    if str(members[0][0]) == "NEGATE":
        excluded = re.compile("[" + "".join(_pattern_of(*member) for member in members[1:]) + "]")
        return next((letter for letter in "abcdefghij0 " if not excluded.match(letter)), "\x7f")
    operation, argument = members[0]
    if str(operation) == "RANGE":
        return chr(argument[0])
    return _CATEGORIES.get(str(argument), "a") if str(operation) == "CATEGORY" else chr(argument)


def _pattern_of(operation: Any, argument: Any) -> str:
    """Return one member of a parsed character set as a part of a regular expression, such as `a-f`."""
    if str(operation) == "RANGE":
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    if str(operation) == "CATEGORY":
        return {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.get(str(argument).removeprefix("CATEGORY_"), "")
    return re.escape(chr(argument))


_GENERATORS: Mapping[str, Callable[[Any], str]] = {
    "LITERAL": chr,
    "NOT_LITERAL": lambda code: "b" if chr(code) == "a" else "a",
    "ANY": lambda _: "a",
    "AT": lambda _: "",
    "IN": _member,
    "BRANCH": lambda branches: _matched(branches[1][0]),
    "SUBPATTERN": lambda group: _matched(group[-1]),
    "ATOMIC_GROUP": _matched,
    "MAX_REPEAT": _repeated,
    "MIN_REPEAT": _repeated,
    "POSSESSIVE_REPEAT": _repeated,
}
