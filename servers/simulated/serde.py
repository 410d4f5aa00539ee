"""Errors of a Rust server about a JSON body: what serde_json and axum say, with line and column.

A body is first decoded by msgspec and compared with its type, which is fast. Only a body that does not fit is read
again here, byte by byte, to find the words and the position that the real server reports.

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

_NESTED = 127  # serde_json gives up at 128 levels
_BLANKS = re.compile(rb"[ \n\t\r]*")
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_ESCAPES = re.compile(rb'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_WORDS = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}


class BodyError(Exception):
    """A body that does not fit. `syntax`: it is not JSON at all, which gets status 400 instead of 422."""

    def __init__(self, message: str, position: str = "", *, syntax: bool = False) -> None:
        super().__init__(message)
        self.message, self.position, self.syntax = message, position, syntax
        self.path = ""

    @property
    def text(self) -> str:
        """The response body: plain text that ends in the position."""
        what = (
            "Failed to parse the request body as JSON"
            if self.syntax
            else "Failed to deserialize the JSON body into the target type"
        )
        return f"{what}: {self.path}{': ' if self.path else ''}{self.message}{self.position}"


class JsonType(Protocol):
    """The type of a JSON value. `accepts` compares a decoded value with it; `read` reads one, and raises BodyError."""

    def accepts(self, value: Any) -> bool: ...

    def read(self, reader: Reader) -> Any: ...


def decode(body: bytes | bytearray, kind: JsonType) -> Any:
    """The value that a body holds. Raises BodyError in the words of serde_json."""
    try:
        value = msgspec.json.decode(body)
        if kind.accepts(value):
            return value
    except DECODE_ERRORS:
        pass
    return Reader(bytes(body)).read(kind)


class Reader:
    """Reads JSON as serde_json does, and knows where it is."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.depth = data, 0, 0

    def read(self, kind: JsonType) -> Any:
        """One value. What comes after the value is ignored, as axum 0.7 ignores it."""
        return kind.read(self)

    def peek(self) -> bytes:
        """The next byte that is not blank; empty at the end."""
        result = _BLANKS.match(self.data, self.at)
        self.at = result.end() if result else self.at
        return self.data[self.at : self.at + 1]

    def place(self, at: int) -> str:
        """A position in the words of serde_json. Columns count bytes."""
        line_start = self.data.rfind(b"\n", 0, at) + 1
        line = self.data.count(b"\n", 0, line_start) + 1
        return f" at line {line} column {at - line_start}"

    def syntax(self, message: str, at: int) -> BodyError:
        """Not JSON, noticed when `at` bytes were read."""
        return BodyError(message, self.place(at), syntax=True)

    def unexpected(self, message: str) -> BodyError:
        """Not JSON, noticed at the next byte."""
        return self.syntax(message, min(len(self.data), self.at + 1))

    def located(self, error: BodyError) -> BodyError:
        """The error, at this place if it has none yet."""
        error.position = error.position or self.place(self.at)
        return error

    def wrong_type(self, expected: str) -> BodyError:
        """The next value is of another type than the one expected. A list or an object is not read any further."""
        first = self.peek()
        if first in (b"[", b"{"):
            result = "sequence" if first == b"[" else "map"
        else:
            value = self.any()
            result = _named(value)
        return self.located(BodyError(f"invalid type: {result}, expected {expected}"))

    def any(self) -> Any:
        """A value of any type."""
        first = self.peek()
        if not first:
            raise self.unexpected("EOF while parsing a value")
        if first == b'"':
            return self.text()
        if first == b"[":
            return self.items(AnyValue())
        if first == b"{":
            return self.fields(lambda _name: AnyValue())
        if first in _WORDS:
            return self.word(*_WORDS[first])
        if first == b"-" or first.isdigit():
            return self.number()
        raise self.unexpected("expected value")

    def word(self, word: bytes, value: bool | None) -> bool | None:
        """`null`, `true` or `false`."""
        for index, byte in enumerate(word):
            if self.at + index >= len(self.data):
                raise self.syntax("EOF while parsing a value", len(self.data))
            if self.data[self.at + index] != byte:
                raise self.syntax("expected ident", self.at + index + 1)
        self.at += len(word)
        return value

    def number(self) -> int | float:
        """A number without a fraction is an int."""
        result = _NUMBER.match(self.data, self.at)
        end = result.end() if result else self.at + 1
        after = self.data[end : end + 1]
        if result is None or after in (b".", b"e", b"E") or after.isdigit():
            self.at = end + (result is not None and not after.isdigit())
            at_end = self.at >= len(self.data)
            raise self.unexpected("EOF while parsing a value" if at_end else "invalid number")
        self.at = end
        return int(result[0]) if result[2] is None and result[3] is None else float(result[0])

    def text(self) -> str:
        """A string."""
        start, self.at = self.at, self.at + 1
        while True:
            result = _PLAIN.match(self.data, self.at)
            self.at = result.end() if result else self.at
            byte = self.data[self.at : self.at + 1]
            if not byte:
                raise self.syntax("EOF while parsing a string", self.at)
            if byte == b'"':
                break
            if byte != b"\\":
                raise self.syntax("control character (\\u0000-\\u001F) found while parsing a string", self.at + 1)
            escape = _ESCAPES.match(self.data, self.at + 1)
            if escape is None:
                short = self.at + 2 > len(self.data)
                raise self.syntax("EOF while parsing a string" if short else "invalid escape", self.at + 2 - short)
            self.at = escape.end()
        self.at += 1
        try:
            return str(json.loads(self.data[start : self.at].decode()))
        except UnicodeDecodeError:
            raise self.syntax("invalid unicode code point", self.at) from None

    def items(self, kind: JsonType) -> list[Any]:
        """A list; the next byte is its bracket."""
        result: list[Any] = []
        with self.nested():
            while True:
                byte = self.peek()
                if byte == b"]":
                    self.at += 1
                    return result
                if not byte:
                    raise self.unexpected("EOF while parsing a list")
                if result:
                    if byte != b",":
                        raise self.unexpected("expected `,` or `]`")
                    self.at += 1
                    if self.peek() == b"]":
                        raise self.unexpected("trailing comma")
                with path_step(f"[{len(result)}]"):
                    result.append(kind.read(self))

    def fields(self, kind_of: Callable[[str], JsonType]) -> dict[str, Any]:
        """An object; the next byte is its brace."""
        result: dict[str, Any] = {}
        with self.nested():
            first = True
            while True:
                byte = self.peek()
                if byte == b"}":
                    self.at += 1
                    return result
                if not byte:
                    raise self.unexpected("EOF while parsing an object")
                if not first:
                    if byte != b",":
                        raise self.unexpected("expected `,` or `}`")
                    self.at += 1
                    byte = self.peek()
                    if byte == b"}":
                        raise self.unexpected("trailing comma")
                first = False
                if byte != b'"':
                    raise self.unexpected("key must be a string" if byte else "EOF while parsing a value")
                name = self.text()
                kind = kind_of(name)
                if self.peek() != b":":
                    at_end = self.at >= len(self.data)
                    raise self.unexpected("EOF while parsing an object" if at_end else "expected `:`")
                self.at += 1
                with path_step(name):
                    result[name] = kind.read(self)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """One level deeper, behind the opening bracket."""
        if self.depth >= _NESTED:
            raise self.unexpected("recursion limit exceeded")
        self.depth += 1
        self.at += 1
        try:
            yield
        finally:
            self.depth -= 1


@contextmanager
def path_step(step: str) -> Iterator[None]:
    """Put a field's name or an item's index in front of the path of an error."""
    try:
        yield
    except BodyError as error:
        joint = "." if error.path and not error.path.startswith("[") else ""
        error.path = f"{step}{joint}{error.path}"
        raise


@dataclass(frozen=True, slots=True)
class AnyValue:
    """Any JSON value."""

    def accepts(self, value: Any) -> bool:  # noqa: ARG002 - the shape of a Kind
        return True

    def read(self, reader: Reader) -> Any:
        return reader.any()


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, reader: Reader) -> str:
        if reader.peek() == b'"':
            return reader.text()
        raise _missing_or_wrong(reader, "a string")


@dataclass(frozen=True, slots=True)
class Boolean:
    """A boolean."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def read(self, reader: Reader) -> bool:
        first = reader.peek()
        if first in (b"t", b"f"):
            return bool(reader.word(*_WORDS[first]))
        raise _missing_or_wrong(reader, "a boolean")


@dataclass(frozen=True, slots=True)
class Number:
    """A number by its name in Rust: `u32`, `u64`, `usize`, `i32` or `f32`."""

    name: str

    @property
    def bounds(self) -> tuple[int, int]:
        """Lowest and highest integer."""
        bits = {"u32": 32, "i32": 32}.get(self.name, 64)
        return (0, (1 << bits) - 1) if self.name.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)

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
        raise reader.located(BodyError(f"invalid {problem}: {_named(value)}, expected {self.name}"))


@dataclass(frozen=True, slots=True)
class Optional:
    """A value or null."""

    kind: JsonType

    def accepts(self, value: Any) -> bool:
        return value is None or self.kind.accepts(value)

    def read(self, reader: Reader) -> Any:
        return reader.word(*_WORDS[b"n"]) if reader.peek() == b"n" else self.kind.read(reader)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of values of one type."""

    kind: JsonType

    def accepts(self, value: Any) -> bool:
        return isinstance(value, list) and all(map(self.kind.accepts, value))

    def read(self, reader: Reader) -> list[Any]:
        if reader.peek() != b"[":
            raise _missing_or_wrong(reader, "a sequence")
        return reader.items(self.kind)


@dataclass(frozen=True, slots=True)
class Struct:
    """An object. Other fields than these are ignored, or left to `rest`."""

    name: str
    known: Mapping[str, JsonType]
    required: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    rest: Callable[[Mapping[str, Any]], str] | None = None
    """What is wrong with the object as a whole; empty for nothing."""

    def accepts(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        known, aliases = self.known, self.aliases
        names = [aliases.get(name, name) for name in value] if aliases else list(value)
        if len({*names}) < len(names) or not {*names}.issuperset(self.required):
            return False
        fits = all(known[name].accepts(each) for name, each in zip(names, value.values(), strict=True) if name in known)
        return fits and not (self.rest and self.rest(value))

    def read(self, reader: Reader) -> dict[str, Any]:
        if reader.peek() != b"{":
            raise _missing_or_wrong(reader, f"struct {self.name}")
        seen: set[str] = set()

        def kind_of(given: str) -> JsonType:
            name = self.aliases.get(given, given)
            if name in self.known and name in seen:
                raise self.closed(reader, BodyError(f"duplicate field `{name}`"))
            seen.add(name)
            return self.known.get(name, AnyValue())

        value = reader.fields(kind_of)
        for name in self.required:
            if name not in seen:
                raise reader.located(BodyError(f"missing field `{name}`"))
        if self.rest and (problem := self.rest(value)):
            raise reader.located(BodyError(problem))
        return value

    @staticmethod
    def closed(reader: Reader, error: BodyError) -> BodyError:
        """The error at the end of this object, if that is where the reader is."""
        if reader.peek() == b"}":
            reader.at += 1
        return reader.located(error)


@dataclass(frozen=True, slots=True)
class Untagged:
    """One of several types. serde reads the value as a whole before it tries them, so the position is the value's end,
    or the end of the object when the value comes last."""

    name: str
    kinds: tuple[JsonType, ...]
    problem: Callable[[Any], str] | None = None
    """What is wrong with a value that fits one of the types; empty for nothing."""

    def accepts(self, value: Any) -> bool:
        return any(kind.accepts(value) for kind in self.kinds) and not (self.problem and self.problem(value))

    def read(self, reader: Reader) -> Any:
        value = reader.any()
        if not any(kind.accepts(value) for kind in self.kinds):
            message = f"data did not match any variant of untagged enum {self.name}"
            raise Struct.closed(reader, BodyError(message))
        if self.problem and (problem := self.problem(value)):
            raise Struct.closed(reader, BodyError(problem))
        return value


def _missing_or_wrong(reader: Reader, expected: str) -> BodyError:
    if not reader.peek():
        return reader.unexpected("EOF while parsing a value")
    return reader.wrong_type(expected)


def _named(value: Any) -> str:
    """A value in serde's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value!r}`"
    return f"string {json.dumps(value, ensure_ascii=False)}"
