"""Parses length distributions of prompts and responses, and draws token counts from them with a seed.

The distributions `lognormal` and `exponential` have two optional limits:

- `max=K`: If a length is above K, another length is drawn, as in llm-infer-bench. The mean becomes lower than
  requested.
- `min=K`: If a length is below K, it is replaced by K.

The requested mean and coefficient of variation are those of the distribution without limits. Lengths are rounded to
whole numbers of at least 1.
"""

from __future__ import annotations

import csv
import math
import re
import stat
from array import array
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from statistics import NormalDist
from typing import Protocol, TypeAlias

import msgspec

from loadgen.workloads import random_streams, spec_syntax
from loadgen.workloads.input_files import LongLineError, limited_lines
from loadgen.workloads.spec_syntax import TOKENS_LIMIT, WorkloadError

VALUES_LIMIT = 20_000_000  # Maximum number of lengths in one file; they take 80 MB
WORD_LIMIT = 40
"""Maximum number of characters of one number. Errors show only the beginning of longer text."""
DEFAULT_OUTPUT_TOKENS = 128
"""Length of a response in tokens if neither the file nor the user states one."""
ANSWERS = "answers"
"""Keyword for output lengths that equal the lengths of the recorded answers in a file."""
_THOUSANDS = re.compile(r"(?<!\w)(\d+(?:\.\d+)?)([kK])(?!\w)")
CAP_SHARE = 0.01
"""Minimum share of draws that a maximum must accept. A lower maximum is an error: it changes the distribution."""


class Lengths(Protocol):
    """A distribution of lengths in tokens. `str()` returns its canonical text."""

    def tokens(self, seed: int, purpose: str) -> Iterator[int]:
        """Yield random lengths in tokens, without end.

        `seed` and `purpose` (such as `input` or `output`) determine the random numbers. Raises WorkloadError if the
        distribution is read from a file that is malformed, empty or unreadable."""


class Fixed(msgspec.Struct, frozen=True):
    """A constant length in tokens."""

    length: int

    def tokens(self, _seed: int, _purpose: str) -> Iterator[int]:
        return repeat(self.length)

    def __str__(self) -> str:
        return str(self.length)


class Uniform(msgspec.Struct, frozen=True):
    """A uniform distribution over the whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def tokens(self, seed: int, purpose: str) -> Iterator[int]:
        draw = random_streams.random_stream(seed, purpose)
        while True:
            yield self.low + int(draw() * (self.high - self.low + 1))

    def __str__(self) -> str:
        return f"uniform:{self.low}..{self.high}"


class Lognormal(msgspec.Struct, frozen=True):
    """A lognormal distribution: `exp(X)`, where X has a normal distribution.

    X has the variance `ln(1 + cv**2)` and the mean `ln(mean) - variance / 2`."""

    mean: Fraction
    cv: Fraction
    low: int = 1
    high: int | None = None

    def tokens(self, seed: int, purpose: str) -> Iterator[int]:
        draw = random_streams.random_stream(seed, purpose)
        exponent = self._exponent()
        mu = exponent.mean
        sigma = exponent.stdev
        return _bounded(lambda: math.exp(mu + sigma * random_streams.normal(draw)), self.low, self.high)

    def share_below(self, length: float) -> float:
        """Return the probability that a draw is at most `length`, ignoring minimum and maximum."""
        return self._exponent().cdf(math.log(length))

    def _exponent(self) -> NormalDist:
        variance = math.log1p(float(self.cv**2))
        return NormalDist(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def __str__(self) -> str:
        mean, cv = spec_syntax.format_number(self.mean), spec_syntax.format_number(self.cv)
        return f"lognormal:mean={mean},cv={cv}{_show_bounds(self.low, self.high)}"


class Exponential(msgspec.Struct, frozen=True):
    """An exponential distribution with the given mean."""

    mean: Fraction
    low: int = 1
    high: int | None = None

    def tokens(self, seed: int, purpose: str) -> Iterator[int]:
        draw, mean = random_streams.random_stream(seed, purpose), float(self.mean)
        return _bounded(lambda: mean * random_streams.exponential(draw), self.low, self.high)

    def share_below(self, length: float) -> float:
        return -math.expm1(-length / float(self.mean))

    def __str__(self) -> str:
        return f"exponential:mean={spec_syntax.format_number(self.mean)}{_show_bounds(self.low, self.high)}"


class Empirical(msgspec.Struct, frozen=True):
    """A distribution that draws lengths from the numbers in a file, with replacement."""

    path: Path
    column: str | None = None

    def tokens(self, seed: int, purpose: str) -> Iterator[int]:
        values = _values(self.path, self.column)
        draw = random_streams.random_stream(seed, purpose)
        return (values[int(draw() * len(values))] for _ in repeat(None))

    def __str__(self) -> str:
        return f"empirical:{self.path}" + (f",column={self.column}" if self.column else "")


LengthDistribution: TypeAlias = Fixed | Uniform | Lognormal | Exponential | Empirical


class OutputLengths(msgspec.Struct, frozen=True):
    """The requested lengths of responses. `may_end` is True if responses may end earlier."""

    lengths: LengthDistribution | None
    """None: the lengths of the recorded answers in the dataset."""
    may_end: bool = False
    """True if responses may end before the requested length, as in real chats. Runs are then not strictly
    comparable."""

    def __str__(self) -> str:
        return f"{'max:' if self.may_end else ''}{ANSWERS if self.lengths is None else self.lengths}"


@lru_cache(256)
def parse_outputs(text: str) -> OutputLengths:
    """Parse output lengths: a distribution (see `parse`), or `answers` for the lengths of the dataset's answers.

    The prefix `max:` allows responses to end early. Raises WorkloadError if the text is invalid."""
    stripped = text.strip()
    lengths = stripped.removeprefix("max:")
    return OutputLengths(None if lengths == ANSWERS else parse(lengths), lengths != stripped)


@lru_cache(256)
def parse(text: str) -> LengthDistribution:
    """Parse a length distribution, such as `512` or `uniform:128..384`.

    Raises WorkloadError for invalid text. Its message names the invalid part, and its hint shows the syntax."""
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        kind, rest = "fixed", kind
    if kind not in LENGTH_DISTRIBUTIONS:
        raise WorkloadError(
            f"lengths {text!r}: unknown distribution {kind!r}",
            f"write a number, or {', '.join(list(LENGTH_DISTRIBUTIONS)[1:])}",
        )
    parse_rest, syntax = LENGTH_DISTRIBUTIONS[kind]
    try:
        return parse_rest(rest if kind == "empirical" else _THOUSANDS.sub(_spelled_out, rest))
    except WorkloadError as error:
        raise WorkloadError(f"lengths {text!r}: {error}", f"write {syntax}") from None


def _spelled_out(number: re.Match[str]) -> str:
    """Convert a number with the suffix k or K to digits.

    As in vLLM's --max-model-len, 32k is 32000 and 32K is 32768.
    """
    return spec_syntax.format_number(Fraction(number[1]) * {"k": 1000, "K": 1024}[number[2]])


def _bounded(draw_length: Callable[[], float], low: int, high: int | None) -> Iterator[int]:
    while True:
        length = round(draw_length())
        if high is None or length <= high:
            yield max(low, length)


def _show_bounds(low: int, high: int | None) -> str:
    return (f",min={low}" if low > 1 else "") + (f",max={high}" if high is not None else "")


def _values(path: Path, column: str | None) -> array[int]:
    """Return the lengths in a file, cached until the file changes. Raises WorkloadError if the file is invalid."""
    try:
        result = path.stat()
    except OSError as error:
        raise WorkloadError(f"cannot read the lengths in {path}: {error.strerror}") from None
    changed = result.st_mtime_ns if stat.S_ISREG(result.st_mode) else 0  # Reading changes the time of a pipe
    return _read_values(path, column, (result.st_dev, result.st_ino, changed))


@lru_cache(maxsize=2)  # One file for inputs, one for outputs
def _read_values(path: Path, column: str | None, _version: tuple[int, int, int]) -> array[int]:
    values = array("I")
    with spec_syntax.open_text(path, "the lengths in") as file:
        for line, text in _numbers(limited_lines(file), path, column):
            if len(values) == VALUES_LIMIT:
                raise WorkloadError(f"{path}: has more than {VALUES_LIMIT:,} lengths", "use a sample of them")
            try:
                values.append(spec_syntax.parse_integer(text[:WORD_LIMIT], "length", 1, TOKENS_LIMIT))
            except WorkloadError as error:
                raise WorkloadError(f"{path}, line {line}: {error}", "correct or remove the line") from None
    if not values:
        raise WorkloadError(f"{path}: holds no lengths", "write one number per line")
    return values


def _numbers(file: Iterator[str], path: Path, column: str | None) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each number in a file of lengths.

    If `column` is None, the file has one number per line. Otherwise it is a CSV file with this column. Raises
    WorkloadError if the column is missing, a line is too long, or the CSV is malformed."""
    try:
        if column is None:
            yield from ((line, text.strip()) for line, text in enumerate(file, 1) if text.strip())
            return
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        if column not in header:
            raise WorkloadError(f"{path}: has no column {column!r}", f"its columns are {', '.join(header)}"[:300])
        index = header.index(column)
        yield from ((reader.line_num, (*fields, *repeat("", index))[index].strip()) for fields in reader if fields)
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not CSV: {error}") from error
    except LongLineError as error:
        raise WorkloadError(f"{path}: {error}", "name a file with one number per line, or a CSV file") from None


def _uniform(rest: str) -> Uniform:
    low, dots, high = rest.partition("..")
    if not dots:
        raise WorkloadError("write two lengths with .. between them")
    lowest = spec_syntax.parse_integer(low, "shortest length", 1, TOKENS_LIMIT)
    return Uniform(lowest, spec_syntax.parse_integer(high, "longest length", lowest, TOKENS_LIMIT))


def _capped(make: Callable[..., Lognormal | Exponential], rest: str, *parameters: str) -> Lognormal | Exponential:
    """Parse the options of a distribution, and return the distribution that `make` builds from them.

    `rest` is the text of the options, such as `mean=512,cv=0.5,max=2048`. The options in `parameters` are required. The
    limits `min` and `max` are optional. Raises WorkloadError if the options are invalid, or if `max` is far below the
    mean.
    """
    result = spec_syntax.parse_options(rest.split(","), (*parameters, "min", "max"))
    missing = [f"{key}=" for key in parameters if key not in result]
    if missing:
        raise WorkloadError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    values = [spec_syntax.parse_number(result[key], key, *PARAMETERS[key]) for key in parameters]
    low = spec_syntax.parse_integer(result.get("min", "1"), "min", 1, TOKENS_LIMIT)
    high = spec_syntax.parse_integer(result["max"], "max", low, TOKENS_LIMIT) if "max" in result else None
    lengths = make(*values, low, high)
    if high is not None and lengths.share_below(high) < CAP_SHARE:
        raise WorkloadError(f"max={high} is so far below the mean that almost every draw would exceed it")
    return lengths


def _empirical(rest: str) -> Empirical:
    path, result = spec_syntax.parse_path_and_options(rest, ("column",))
    return Empirical(Path(path), result.get("column"))


PARAMETERS = {"mean": (Fraction(1), TOKENS_LIMIT), "cv": (spec_syntax.CV_LOW, spec_syntax.CV_HIGH)}
"""Minimum and maximum of each distribution parameter."""
LENGTH_DISTRIBUTIONS: dict[str, tuple[Callable[[str], LengthDistribution], str]] = {
    "fixed": (
        lambda rest: Fixed(spec_syntax.parse_integer(rest, "length", 1, TOKENS_LIMIT)),
        "a number of tokens, such as 512 or 32k",
    ),
    "uniform": (_uniform, "uniform:A..B, such as uniform:128..384"),
    "lognormal": (
        lambda rest: _capped(Lognormal, rest, "mean", "cv"),
        "lognormal:mean=M,cv=C[,min=K][,max=K], such as lognormal:mean=161,cv=1.5,max=2048",
    ),
    "exponential": (
        lambda rest: _capped(Exponential, rest, "mean"),
        "exponential:mean=M[,min=K][,max=K], such as exponential:mean=128,max=512",
    ),
    "empirical": (_empirical, "empirical:FILE or empirical:FILE,column=NAME"),
}
"""Distributions that `parse` accepts, by name: the parser of the text after the colon, and the syntax."""
