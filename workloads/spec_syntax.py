"""Parses the numbers, rates, durations and options in the text of arrivals, lengths and workloads.

Numbers are exact fractions, and durations are whole nanoseconds. Formatting a value and parsing the result therefore
gives the same value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fractions import Fraction
from io import BufferedReader, BytesIO, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from loadgen.workloads.input_files import open_input

NS_PER_S = 1_000_000_000
DURATION_LIMIT_NS = 30 * 86_400 * NS_PER_S  # a month; the longest public traces have a week per file
RATE_LIMIT = 1_000_000
TOKENS_LIMIT = 10_000_000  # maximum length of a prompt or response
CV_LOW, CV_HIGH = Fraction(1, 100), 100
"""Minimum and maximum of a coefficient of variation. Below 0.01 gaps are practically constant. Above 100 no run is long
enough to show the mean."""

_NUMBER = re.compile(r"\d{1,12}(?:\.\d{1,9})?")
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|ms|s|min|m|h)?", re.ASCII)
_UNIT_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9, "h": 3_600 * 10**9}
DURATION_EXAMPLES = "500ms, 10s, 2m, 1m30s or 1h"
"""Durations that `parse_duration_ns` accepts, for error messages."""


GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_CHECK_BYTES = 1 << 18
"""Number of bytes of a file that are unpacked to check it. A block of zstd has at most half of them."""
NOT_TEXT = (
    (b"\xfd7zXZ\0", "compressed with xz", "unpack it first: xz -dk FILE"),
    (b"BZh", "compressed with bzip2", "unpack it first: bunzip2 -k FILE"),
    (b"PK\3\4", "a ZIP archive", "unpack it first: unzip FILE"),
    (b"PAR1", "a Parquet file", "convert it to JSON Lines or CSV first"),
    (b"\xff\xfe", "in UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 FILE"),
    (b"\xfe\xff", "in UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 FILE"),
)
"""First bytes of files that are not UTF-8 text, with the type of the file and a hint."""


class UnknownCountError(Exception):
    """A server does not report the number of tokens of a text."""


class WorkloadError(ValueError):
    """The user's text for arrivals, lengths or a workload is invalid, or a file that it names is invalid.

    The message names the invalid part, and `hint` says what to write instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def parse_confidence(level: float | str) -> float:
    """Parse a confidence level such as `95%` or `0.95`, and return it as a number between 0 and 1.

    Raises ValueError if the level is not a number above 50% and below 100%.
    """
    text = str(level).strip()
    number = text.removesuffix("%").strip()
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"{text!r} is not a confidence level: write 95% or 0.95")
    share = float(Fraction(number) / (100 if text.endswith("%") else 1))
    if not 0.5 < share < 1:
        raise ValueError(f"{text} is not between 50% and 100%: write 95% or 0.95")
    return share


def parse_number(text: str, name: str, low: Fraction | int, high: Fraction | int) -> Fraction:
    """Parse a decimal number in the range `low` to `high`, both included.

    Raises WorkloadError for invalid text. `name` is the name of the number in the message."""
    if not _NUMBER.fullmatch(text):
        raise WorkloadError(f"{name} {text!r} is not a plain decimal number (at most 9 decimals)")
    value = Fraction(text)
    if not low <= value <= high:
        raise WorkloadError(
            f"{name} {text} is outside {format_number(Fraction(low))} to {format_number(Fraction(high))}"
        )
    return value


def parse_integer(text: str, name: str, low: int, high: int) -> int:
    """Parse a whole number in the range `low` to `high`, both included.

    Raises WorkloadError for invalid text. `name` is the name of the number in the message."""
    if not re.fullmatch(r"\d{1,12}", text):
        raise WorkloadError(f"{name} {text!r} is not a whole number")
    return int(parse_number(text, name, low, high))


def parse_rate(text: str, *, zero: bool = False) -> Fraction:
    """Parse a rate in requests per second, such as `20` or `20/s`. `zero` is True if the rate may be 0.

    Raises WorkloadError if the text is invalid."""
    value = parse_number(text.removesuffix("/s"), "rate", 0, RATE_LIMIT)
    if not (value or zero):
        raise WorkloadError("a rate of 0 sends no requests")
    return value


def parse_duration_ns(text: str, name: str, *, zero: bool = False) -> int:
    """Parse a duration such as `10s`, `500ms`, `2m`, `1m30s` or `2` (seconds), and return it in ns.

    If the text has several units, they must be in descending order, as in `1m30s`. `zero` is True if the duration may
    be 0. `name` is the name of the duration in error messages. Raises WorkloadError if the text is invalid.
    """
    parts = list(_DURATION.finditer(text))
    units_ns = [_UNIT_NS[part[2] or "s"] for part in parts]
    is_complete = "".join(part[0] for part in parts) == text != ""
    has_units = len(parts) == 1 or all(part[2] for part in parts)
    if not (is_complete and has_units and units_ns == sorted(set(units_ns), reverse=True)):
        raise WorkloadError(f"{name} {text!r} is not a duration: write {DURATION_EXAMPLES}")
    value = sum((Fraction(part[1]) * unit_ns for part, unit_ns in zip(parts, units_ns, strict=True)), Fraction())
    if value.denominator != 1:
        raise WorkloadError(f"{name} {text} is finer than a nanosecond")
    if not (zero or value) or value > DURATION_LIMIT_NS:
        raise WorkloadError(f"{name} {text} is outside {'0s' if zero else '1ns'} to 720h")
    return int(value)


def parse_seconds(text: str) -> float:
    """Parse a duration such as `0`, `500ms`, `1m30s` or `2` (seconds), and return it in seconds.

    Raises WorkloadError for invalid text."""
    try:
        return parse_duration_ns(text.strip(), "duration", zero=True) / NS_PER_S
    except WorkloadError as error:
        raise WorkloadError(str(error).removeprefix("duration ")) from None


def parse_options(parts: list[str], known: Collection[str]) -> dict[str, str]:
    """Parse options of the form `key=value`, and return the values by key.

    Raises WorkloadError if a key is unknown or repeated, or if an option has no `=`."""
    result: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise WorkloadError(f"{part!r} is not one of {', '.join(f'{key}=...' for key in known)}")
        if key in result:
            raise WorkloadError(f"{key}= is given twice")
        result[key] = value
    return result


def parse_path_and_options(text: str, known: Collection[str]) -> tuple[str, dict[str, str]]:
    """Split `FILE,key=value,...` into the file name and its options.

    The file name may contain commas, because only the keys in `known` start an option. Raises WorkloadError if the file
    name is missing or an option is invalid."""
    parts = text.split(",")
    first = len(parts)
    while first > 1 and parts[first - 1].partition("=")[0] in known:
        first -= 1
    path = ",".join(parts[:first])
    if not path:
        raise WorkloadError("the file's name is missing")
    return path, parse_options(parts[first:], known)


@contextmanager
def open_text(path: Path, name: str) -> Iterator[TextIO]:
    """Open the user's file `path` as UTF-8 text, and unpack it if it is compressed with gzip or zstd.

    Line ends are not changed. `name` is what error messages call the file, such as `the dataset`.

    Raises WorkloadError if the file cannot be read or unpacked, or if it begins like a file of another format, such as
    Parquet or UTF-16.
    """
    try:
        raw = open_input(path)
        begin = raw.read(8)
        raw.seek(0)
    except OSError as error:
        raise WorkloadError(f"cannot read {name} {path}: {error.strerror}") from error
    content = raw
    gzip_errors: tuple[type[Exception], ...] = ()
    if begin.startswith(GZIP_MAGIC):
        import gzip
        import zlib

        content = cast("BinaryIO", gzip.GzipFile(fileobj=raw))
        gzip_errors = (EOFError, gzip.BadGzipFile, zlib.error)
    elif begin.startswith(ZSTD_MAGIC):
        content, gzip_errors = _zstd_content(raw, name, path), (OSError,)
    # A byte that is not UTF-8 becomes half of a surrogate pair, which every reader refuses with its line.
    with raw, TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            if begin.startswith(GZIP_MAGIC):
                begin = content.read(8)
                content.seek(0)
            for magic, form, hint in NOT_TEXT:
                if begin.startswith(magic):
                    raise WorkloadError(f"{name} {path} is {form}, not text in UTF-8", hint)
            yield file
        except gzip_errors as error:
            hint = "the file is damaged or incomplete"
            program = "zstd" if begin.startswith(ZSTD_MAGIC) else "gzip"
            raise WorkloadError(f"{name} {path} cannot be unpacked with {program}: {error}", hint) from error


def _zstd_content(raw: BinaryIO, name: str, path: Path) -> BinaryIO:
    """Return the unpacked content of a file compressed with zstd. Raises WorkloadError if PyArrow is not installed."""
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        raw.close()
        raise WorkloadError(
            f"{name} {path} is compressed with zstd, and PyArrow, which unpacks it, is not installed",
            "unpack it first: zstd -d FILE; or install PyArrow: pip install 'llm-loadgen[parquet]'",
        ) from None
    head = raw.read(ZSTD_CHECK_BYTES)
    raw.seek(0)
    try:
        pyarrow.CompressedInputStream(BytesIO(head), "zstd").read(1)
    except OSError as error:
        raw.close()
        hint = "the file is damaged or incomplete"
        raise WorkloadError(f"{name} {path} cannot be unpacked with zstd: {error}", hint) from error
    return BufferedReader(_ZstdReader(lambda: pyarrow.CompressedInputStream(raw, "zstd"), raw))


class _ZstdReader(RawIOBase):
    """A file-like object with the unpacked content of a file compressed with zstd.

    It can be read again from the beginning, but not from any other position.
    """

    def __init__(self, unpacked: Callable[[], Any], raw: BinaryIO) -> None:
        """Prepare to read `raw`, the compressed file.

        Each call of `unpacked` returns a new stream of unpacked content. The stream begins at the current position of
        `raw`.
        """
        self._unpacked = unpacked
        self._raw = raw
        self._streams = [unpacked()]  # earlier ones are kept, because PyArrow's streams close the file when deleted
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Return to the beginning if `offset` and `whence` are 0, and do not move otherwise. Return the position."""
        if (offset, whence) == (0, 0) and self._position:
            self._raw.seek(0)
            self._streams.append(self._unpacked())
            self._position = 0
        return self._position

    def readinto(self, buffer: Any) -> int:
        content: bytes = self._streams[-1].read(len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def format_number(value: Fraction) -> str:
    """Return a number as text with at most 9 decimals, which `parse_number` can parse."""
    whole_part, rest = divmod(round_ratio(value.numerator * NS_PER_S, value.denominator), NS_PER_S)
    return f"{whole_part}.{rest:09d}".rstrip("0").rstrip(".")


def format_duration(value_ns: int) -> str:
    """Return a duration as text in seconds, such as `2.5s`, which `parse_duration_ns` can parse."""
    return format_number(Fraction(value_ns, NS_PER_S)) + "s"


def round_ratio(numerator: int, denominator: int) -> int:
    """Return `numerator / denominator` rounded to the nearest integer. Halves are rounded up."""
    return (2 * numerator + denominator) // (2 * denominator)
