"""A JSON parser with the error messages of serde_json and axum, including line and column.

The routers of TGI and TEI are written in Rust and report these errors for an invalid request body. The body is first
decoded with msgspec, which is fast. If msgspec fails or the value has the wrong type, this module parses the body
again, byte by byte, to find the message and the position that the real server reports.

Sources: serde_json 1.0.140 (`src/de.rs`, `src/read.rs`, `src/error.rs`), serde 1.0.219, serde_path_to_error 0.1.17 and
axum 0.7.9 (`axum/src/json.rs`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.simulated.protocol import TEXT_TYPE, ErrorReply, Reply

_MAX_DEPTH = 127  # serde_json fails at 128 levels
_BLANKS = re.compile(rb"[ \n\t\r]*")
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_UNESCAPED = re.compile(rb'[^"\\\x00-\x1f]*')
_ESCAPES = re.compile(rb'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_LITERALS = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}
"""The literals of JSON and their values, by first byte."""


class BodyError(Exception):
    """A request body is not valid JSON, or does not have the expected type.

    `syntax` is True if the body is not valid JSON. The response then has status 400. For a wrong type, it has status
    422.
    """

    def __init__(self, message: str, position: str = "", *, syntax: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.syntax = syntax
        self.path = ""

    @property
    def text(self) -> str:
        """The body of the error response: plain text that ends with the line and the column of the error."""
        problem = "Failed to deserialize the JSON body into the target type"
        if self.syntax:
            problem = "Failed to parse the request body as JSON"
        path = f"{self.path}: " if self.path else ""
        return f"{problem}: {path}{self.message}{self.position}"


class JsonType(Protocol):
    """The expected type of a JSON value."""

    def accepts(self, value: Any) -> bool:
        """Return True if a decoded value has this type."""
        ...

    def read(self, reader: Reader) -> Any:
        """Read a value from `reader`. Raises BodyError if the value does not have this type."""
        ...


def read_fields(routes: Mapping[str, Struct], path: str, body: bytes | bytearray) -> Mapping[str, Any]:
    """Return the fields of a request body, whose type depends on the path.

    Raises ErrorReply with axum's plain-text message if the body is invalid. A body for a path that is not in `routes`
    may be any JSON value."""
    try:
        result = decode(body, routes.get(path) or AnyValue())
    except BodyError as error:
        raise ErrorReply(Reply(error.text.encode(), 400 if error.syntax else 422, TEXT_TYPE)) from None
    return result if isinstance(result, dict) else {}


def decode(body: bytes | bytearray, json_type: JsonType) -> Any:
    """Return the value of a JSON body. Raises BodyError if the value does not have the type `json_type`."""
    try:
        value = msgspec.json.decode(body)
        if json_type.accepts(value):
            return value
    except DECODE_ERRORS:
        pass
    return Reader(bytes(body)).read(json_type)


class Reader:
    """A JSON reader that reports errors with the messages of serde_json, the JSON library of Rust servers.

    `offset` is the number of bytes read so far.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0
        self.depth = 0

    def read(self, json_type: JsonType) -> Any:
        """Read one value of the type `json_type`. Bytes after the value are ignored, as in axum 0.7."""
        return json_type.read(self)

    def peek(self) -> bytes:
        """Skip whitespace and return the next byte without reading it, or empty bytes at the end of the body."""
        blanks = _BLANKS.match(self.data, self.offset)
        self.offset = blanks.end() if blanks else self.offset
        return self.data[self.offset : self.offset + 1]

    def position(self, offset: int) -> str:
        """Return ` at line L column C` for a byte offset, as serde_json formats it. Columns count bytes."""
        line_start = self.data.rfind(b"\n", 0, offset) + 1
        line = self.data.count(b"\n", 0, line_start) + 1
        return f" at line {line} column {offset - line_start}"

    def syntax_error(self, message: str, offset: int) -> BodyError:
        """Return the error for invalid JSON that serde_json detects after `offset` bytes."""
        return BodyError(message, self.position(offset), syntax=True)

    def unexpected(self, message: str) -> BodyError:
        """Return the error for invalid JSON that serde_json detects at the next byte."""
        return self.syntax_error(message, min(len(self.data), self.offset + 1))

    def with_position(self, error: BodyError) -> BodyError:
        """Return `error`. If it has no position, set its position to the current position of the reader."""
        error.position = error.position or self.position(self.offset)
        return error

    def wrong_type(self, expected: str) -> BodyError:
        """Return the error for the next value, which does not have the type `expected`.

        The position of the error is the end of the value. For a list or an object, it is the beginning of the value.
        """
        first = self.peek()
        if first == b"[":
            actual = "sequence"
        elif first == b"{":
            actual = "map"
        else:
            actual = _describe(self.any())
        return self.with_position(BodyError(f"invalid type: {actual}, expected {expected}"))

    def any(self) -> Any:
        """Read a value of any JSON type."""
        first = self.peek()
        if not first:
            raise self.unexpected("EOF while parsing a value")
        if first == b'"':
            return self.text()
        if first == b"[":
            return self.items(AnyValue())
        if first == b"{":
            return self.fields(lambda _name: AnyValue())
        if first in _LITERALS:
            return self.literal(*_LITERALS[first])
        if first == b"-" or first.isdigit():
            return self.number()
        raise self.unexpected("expected value")

    def literal(self, text: bytes, value: bool | None) -> bool | None:
        """Read the literal `text` (`null`, `true` or `false`), and return `value`, which is its Python value."""
        for index, byte in enumerate(text):
            if self.offset + index >= len(self.data):
                raise self.syntax_error("EOF while parsing a value", len(self.data))
            if self.data[self.offset + index] != byte:
                raise self.syntax_error("expected ident", self.offset + index + 1)
        self.offset += len(text)
        return value

    def number(self) -> int | float:
        """Read a number. Return an int if the number has no fraction and no exponent, and a float otherwise."""
        match = _NUMBER.match(self.data, self.offset)
        end = match.end() if match else self.offset + 1
        next_byte = self.data[end : end + 1]
        if match is None or next_byte in (b".", b"e", b"E") or next_byte.isdigit():
            self.offset = end + (match is not None and not next_byte.isdigit())
            at_end = self.offset >= len(self.data)
            raise self.unexpected("EOF while parsing a value" if at_end else "invalid number")
        self.offset = end
        return int(match[0]) if match[2] is None and match[3] is None else float(match[0])

    def text(self) -> str:
        """Read a string. The next byte must be its opening quotation mark."""
        start = self.offset
        self.offset += 1
        while True:
            unescaped = _UNESCAPED.match(self.data, self.offset)
            self.offset = unescaped.end() if unescaped else self.offset
            byte = self.data[self.offset : self.offset + 1]
            if not byte:
                raise self.syntax_error("EOF while parsing a string", self.offset)
            if byte == b'"':
                break
            if byte != b"\\":
                message = "control character (\\u0000-\\u001F) found while parsing a string"
                raise self.syntax_error(message, self.offset + 1)
            escape = _ESCAPES.match(self.data, self.offset + 1)
            if escape is None:
                if self.offset + 2 > len(self.data):
                    raise self.syntax_error("EOF while parsing a string", self.offset + 1)
                raise self.syntax_error("invalid escape", self.offset + 2)
            self.offset = escape.end()
        self.offset += 1
        try:
            return str(json.loads(self.data[start : self.offset].decode()))
        except UnicodeDecodeError:
            raise self.syntax_error("invalid unicode code point", self.offset) from None

    def items(self, json_type: JsonType) -> list[Any]:
        """Read a list whose items have the type `json_type`. The next byte must be its opening bracket."""
        result: list[Any] = []
        with self.nested():
            while True:
                byte = self.peek()
                if byte == b"]":
                    self.offset += 1
                    return result
                if not byte:
                    raise self.unexpected("EOF while parsing a list")
                if result:
                    if byte != b",":
                        raise self.unexpected("expected `,` or `]`")
                    self.offset += 1
                    if self.peek() == b"]":
                        raise self.unexpected("trailing comma")
                with path_step(f"[{len(result)}]"):
                    result.append(json_type.read(self))

    def fields(self, type_of: Callable[[str], JsonType]) -> dict[str, Any]:
        """Read an object. The next byte must be its opening brace.

        `type_of` returns the type of a field from its name.
        """
        result: dict[str, Any] = {}
        with self.nested():
            first = True
            while True:
                byte = self.peek()
                if byte == b"}":
                    self.offset += 1
                    return result
                if not byte:
                    raise self.unexpected("EOF while parsing an object")
                if not first:
                    if byte != b",":
                        raise self.unexpected("expected `,` or `}`")
                    self.offset += 1
                    byte = self.peek()
                    if byte == b"}":
                        raise self.unexpected("trailing comma")
                first = False
                if byte != b'"':
                    raise self.unexpected("key must be a string" if byte else "EOF while parsing a value")
                name = self.text()
                json_type = type_of(name)
                if self.peek() != b":":
                    at_end = self.offset >= len(self.data)
                    raise self.unexpected("EOF while parsing an object" if at_end else "expected `:`")
                self.offset += 1
                with path_step(name):
                    result[name] = json_type.read(self)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Read the opening bracket of a list or an object, and count one more nesting level while the context is open.

        Raises BodyError if there are more than `_MAX_DEPTH` levels.
        """
        if self.depth >= _MAX_DEPTH:
            raise self.unexpected("recursion limit exceeded")
        self.depth += 1
        self.offset += 1
        try:
            yield
        finally:
            self.depth -= 1


@contextmanager
def path_step(step: str) -> Iterator[None]:
    """Add `step` to the front of the path of each BodyError that is raised in this context.

    `step` is a field name or an index such as `[3]`."""
    try:
        yield
    except BodyError as error:
        separator = "." if error.path and not error.path.startswith("[") else ""
        error.path = f"{step}{separator}{error.path}"
        raise


@dataclass(frozen=True, slots=True)
class AnyValue:
    """A type that accepts every JSON value."""

    def accepts(self, value: Any) -> bool:  # noqa: ARG002 - as JsonType
        return True

    def read(self, reader: Reader) -> Any:
        return reader.any()


@dataclass(frozen=True, slots=True)
class Text:
    """The type of a JSON value that must be a string."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, reader: Reader) -> str:
        if reader.peek() == b'"':
            return reader.text()
        raise _missing_or_wrong(reader, "a string")


@dataclass(frozen=True, slots=True)
class Boolean:
    """The type of `true` and `false`."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def read(self, reader: Reader) -> bool:
        first = reader.peek()
        if first in (b"t", b"f"):
            return bool(reader.literal(*_LITERALS[first]))
        raise _missing_or_wrong(reader, "a boolean")


@dataclass(frozen=True, slots=True)
class Number:
    """The type of a number. `name` is the name of this type in Rust: `u32`, `u64`, `usize`, `i32` or `f32`."""

    name: str

    @property
    def bounds(self) -> tuple[int, int]:
        """Lowest and highest integer that the Rust type can hold."""
        bits = {"u32": 32, "i32": 32}.get(self.name, 64)
        if self.name.startswith("u"):
            return 0, (1 << bits) - 1
        return -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def accepts(self, value: Any) -> bool:
        if isinstance(value, bool):
            return False
        if self.name == "f32":
            return isinstance(value, int | float)
        low, high = self.bounds
        return isinstance(value, int) and low <= value <= high

    def read(self, reader: Reader) -> int | float:
        first = reader.peek()
        if first != b"-" and not first.isdigit():
            raise _missing_or_wrong(reader, self.name)
        value = reader.number()
        if self.accepts(value):
            return value
        problem = "type" if isinstance(value, float) else "value"
        raise reader.with_position(BodyError(f"invalid {problem}: {_describe(value)}, expected {self.name}"))


@dataclass(frozen=True, slots=True)
class Optional:
    """The type of a value that may also be null."""

    item: JsonType

    def accepts(self, value: Any) -> bool:
        return value is None or self.item.accepts(value)

    def read(self, reader: Reader) -> Any:
        return reader.literal(*_LITERALS[b"n"]) if reader.peek() == b"n" else self.item.read(reader)


@dataclass(frozen=True, slots=True)
class ListOf:
    """The type of a list whose items all have the type `item`."""

    item: JsonType

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list) and all(map(self.item.accepts, value))

    def read(self, reader: Reader) -> list[Any]:
        if reader.peek() != b"[":
            raise _missing_or_wrong(reader, "a sequence")
        return reader.items(self.item)


@dataclass(frozen=True, slots=True)
class Struct:
    """The type of a JSON object. `known` contains the type of each known field, by name.

    Unknown fields can have any value. `check` can reject the object as a whole.
    """

    name: str
    known: Mapping[str, JsonType]
    required: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Mapping[str, Any]], str] | None = None
    """Function that returns the problem of an object, or an empty string if the object is valid."""

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        names = [self.aliases.get(name, name) for name in value] if self.aliases else list(value)
        distinct_names = set(names)
        if len(distinct_names) < len(names) or not distinct_names.issuperset(self.required):
            return False
        for name, item in zip(names, value.values(), strict=True):
            if name in self.known and not self.known[name].accepts(item):
                return False
        return not (self.check and self.check(value))

    def read(self, reader: Reader) -> dict[str, Any]:
        if reader.peek() != b"{":
            raise _missing_or_wrong(reader, f"struct {self.name}")
        seen: set[str] = set()

        def type_of(field_name: str) -> JsonType:
            name = self.aliases.get(field_name, field_name)
            if name in self.known and name in seen:
                raise self.closed(reader, BodyError(f"duplicate field `{name}`"))
            seen.add(name)
            return self.known.get(name, AnyValue())

        value = reader.fields(type_of)
        for name in self.required:
            if name not in seen:
                raise reader.with_position(BodyError(f"missing field `{name}`"))
        problem = self.check(value) if self.check else ""
        if problem:
            raise reader.with_position(BodyError(problem))
        return value

    @staticmethod
    def closed(reader: Reader, error: BodyError) -> BodyError:
        """Return `error` with a position. If the error already has a position, this position is kept.

        If the next byte is the closing brace of an object, the position is directly after this brace. Otherwise it is
        the current position of `reader`.
        """
        if reader.peek() == b"}":
            reader.offset += 1
        return reader.with_position(error)


@dataclass(frozen=True, slots=True)
class Untagged:
    """The type of a value that may have one of several types, such as a text or a list (an untagged enum of serde).

    serde reads the whole value before it tries the types. If no type fits, the reported position is therefore after the
    value. If the value is the last field of an object, the reported position is after the object.
    """

    name: str
    types: tuple[JsonType, ...]
    check: Callable[[Any], str] | None = None
    """Function that returns the problem of a value that has one of the types, or an empty string if it is valid."""

    def accepts(self, value: Any) -> bool:
        return any(json_type.accepts(value) for json_type in self.types) and not (self.check and self.check(value))

    def read(self, reader: Reader) -> Any:
        value = reader.any()
        if not any(json_type.accepts(value) for json_type in self.types):
            message = f"data did not match any variant of untagged enum {self.name}"
            raise Struct.closed(reader, BodyError(message))
        problem = self.check(value) if self.check else ""
        if problem:
            raise Struct.closed(reader, BodyError(problem))
        return value


def _missing_or_wrong(reader: Reader, expected: str) -> BodyError:
    """Return the error for a missing value, or for a value that does not have the type `expected`.

    The value is missing if the body has ended.
    """
    if not reader.peek():
        return reader.unexpected("EOF while parsing a value")
    return reader.wrong_type(expected)


def _describe(value: Any) -> str:
    """Return the description of a value in serde's messages, such as boolean `true`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value!r}`"
    return f"string {json.dumps(value, ensure_ascii=False)}"
