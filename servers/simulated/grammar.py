"""Texts that fit a grammar: what a simulated model says when a request wants a JSON schema or a regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from re import _parser  # type: ignore[attr-defined]  # the one parser of regular expressions in the standard library
from typing import Any

_DEEPEST = 32
_CATEGORIES = {
    "CATEGORY_DIGIT": "0",
    "CATEGORY_NOT_DIGIT": "a",
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_SPACE": "a",
    "CATEGORY_WORD": "a",
    "CATEGORY_NOT_WORD": " ",
}


class GrammarError(ValueError):
    """A grammar without a text that fits it."""


def json_text(schema: Mapping[str, Any], word: str) -> str:
    """A JSON document that fits a schema. Its strings are `word`. Raises GrammarError."""
    return json.dumps(_value(schema, schema, word, 0), ensure_ascii=False)


def _value(schema: Any, root: Mapping[str, Any], word: str, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        raise GrammarError("the schema is not an object, or nested too deeply")
    if "const" in schema:
        return schema["const"]
    enum = schema.get("enum")
    if isinstance(enum, list) and enum:
        return enum[0]
    other = _referred(str(schema["$ref"]), root) if "$ref" in schema else _first_choice(schema)
    if other is not None:
        return _value(other, root, word, depth + 1)
    return _value_of_type(schema, root, word, depth)


def _first_choice(schema: Mapping[str, Any]) -> Any:
    """The first of several schemas of which one has to fit."""
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        if isinstance(choices, list) and choices:
            return choices[0]
    return None


def _value_of_type(schema: Mapping[str, Any], root: Mapping[str, Any], word: str, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        return {name: _value(each, root, word, depth + 1) for name, each in _properties(schema).items()}
    if kind == "array":
        items = schema.get("items", {"type": "string"})
        return [_value(items, root, word, depth + 1) for _ in range(int(schema.get("minItems", 1)))]
    if kind == "string" and isinstance(schema.get("pattern"), str):
        return regex_text(schema["pattern"])
    return {"string": word, "integer": 7, "number": 0.5, "boolean": True}.get(str(kind))


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _referred(path: str, root: Mapping[str, Any]) -> Any:
    result: Any = root
    for step in filter(None, path.removeprefix("#").split("/")):
        result = result.get(step) if isinstance(result, Mapping) else None
    return result


def regex_text(pattern: str) -> str:
    """A text that a regular expression matches as a whole. Raises GrammarError."""
    try:
        return _matched(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as problem:
        raise GrammarError(str(problem)) from None


def _matched(parsed: Sequence[tuple[Any, Any]]) -> str:
    return "".join(_piece(str(operation), argument) for operation, argument in parsed)


def _piece(operation: str, argument: Any) -> str:
    """The shortest text for one piece of a pattern, but one turn of what may be left out."""
    if operation not in _PIECES:
        raise GrammarError(f"{operation} is not supported")
    return _PIECES[operation](argument)


def _repeated(argument: tuple[int, int, Any]) -> str:
    minimum, maximum, repeated = argument
    return _matched(repeated) * max(minimum, min(1, maximum))


def _member(members: Sequence[tuple[Any, Any]]) -> str:
    """A character of a set."""
    if str(members[0][0]) == "NEGATE":
        taken = re.compile("[" + "".join(_as_written(*member) for member in members[1:]) + "]")
        return next((letter for letter in "abcdefghij0 " if not taken.match(letter)), "\x7f")
    operation, argument = members[0]
    if str(operation) == "RANGE":
        return chr(argument[0])
    return _CATEGORIES.get(str(argument), "a") if str(operation) == "CATEGORY" else chr(argument)


def _as_written(operation: Any, argument: Any) -> str:
    if str(operation) == "RANGE":
        return f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
    if str(operation) == "CATEGORY":
        return {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.get(str(argument).removeprefix("CATEGORY_"), "")
    return re.escape(chr(argument))


_PIECES: Mapping[str, Callable[[Any], str]] = {
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
