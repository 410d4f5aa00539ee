"""Reads traces: recorded loads that say when requests came and how long they were.

    layout        recognised by                            timestamps, and where the layout is described
    Mooncake      JSON objects, one per line               ms; kvcache-ai/Mooncake, FAST25-release/README.md
    Qwen-Bailian  the same with chat_id, parent_chat_id    s; alibaba-edu/qwen-bailian-usagetraces-anon, README.md
    Azure         TIMESTAMP,ContextTokens,GeneratedTokens  date and time, in 2023 with 7 decimals and no zone, in 2024
                                                           with 0 or 6 and +00:00; Azure/AzurePublicDataset,
                                                           AzureLLMInferenceDataset2023.md and ...2024.md
    BurstGPT      Timestamp,...,Request tokens,            s; HPMLL/BurstGPT, README.md (later files have more
                  Response tokens,...                      columns)

Files with Mooncake's field names are also written with timestamps in other units and with blocks of other sizes. So a
unit that is not stated must give a plausible rate, and the number of hash ids must fit the length of the prompt. A
trace that fails one of these checks is refused: the user then states `unit=` or `block=`.

A row that asks for no tokens, or got none, cannot be replayed: in BurstGPT those are the failed requests. Such rows are
left out and counted. Whatever else does not fit its layout is an error with its place.
"""

from __future__ import annotations

import csv
import json
import re
from calendar import timegm
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from loadgen.workloads.datasets import LINE_HINT, lines, placed
from loadgen.workloads.json_values import check_file_text
from loadgen.workloads.spec_syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError, open_text

LINE_LIMIT = 4 * 1024 * 1024
"""Characters of a trace's line; a Mooncake line of a million tokens has 2,000 hash ids, about 20 kB."""
UNITS_NS = {"s": NS_PER_S, "ms": 1_000_000, "us": 1_000, "ns": 1}
MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
"""Tokens that one hash id stands for, as the layouts' documents say."""
BLOCK_TOKENS_MAX = 1 << 20
COMMON_BLOCK_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Sizes that an error suggests."""
HASH_ID_LIMIT = 1 << 63
CHECKED_ROWS = 1_000
"""The unit of the timestamps is judged by this many rows at the beginning of the file."""
PLAUSIBLE_PER_S = (0.01, 100.0)
"""Mean requests per second of a recorded load. A unit that is wrong by a factor of 1,000 leaves this range."""
OFFSET_LIMIT_NS = 400 * 86_400 * NS_PER_S
"""Longest time after the first row, more than any published trace has."""


class Entry(NamedTuple):
    """One recorded request."""

    at_ns: int  # Since the trace's first request
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks, in order. Equal leading ids mean an equal prefix."""
    block_tokens: int = 0
    """Tokens that one id stands for. 0: the layout has no ids."""

    @property
    def has_tokens(self) -> bool:
        """Whether the request can be replayed: it asks for tokens and got some."""
        return bool(self.input_tokens and self.output_tokens)


class TraceFormat(msgspec.Struct, frozen=True):
    """How a trace file is read."""

    layout: str
    unit: str = ""
    """A key of UNITS_NS. Empty: dates."""
    block_tokens: int = 0
    """Tokens per hash id. 0: the layout has no hash ids."""
    columns: tuple[str, str, str] | None = None
    """The columns of a table for timestamp, input and output tokens."""

    @property
    def text(self) -> str:
        """The unit and the size of blocks in words."""
        unit = f"timestamps in {self.unit}" if self.unit else "timestamps are dates"
        return unit + (f", blocks of {self.block_tokens} tokens" if self.block_tokens else "")


class TimestampRow(msgspec.Struct):
    """The part of a JSON row that the check of the unit needs."""

    timestamp: float


def trace(path: Path, unit: str | None = None, block_tokens: int | None = None) -> Iterator[Entry]:
    """Return every row, in order of time. `unit` and `block_tokens` are what the user states.
    Raises WorkloadError for a file that is no trace, for a damaged line, and for a unit that is not plausible."""
    with open_text(path, "the trace") as file:
        trace_format = _format_of(file, path, unit, block_tokens)
        rows = _table if trace_format.columns else _json_rows
        first_ns = last_ns = None
        for line, at_ns, input_tokens, output_tokens, blocks in rows(file, path, trace_format):
            first_ns = at_ns if first_ns is None else first_ns
            if last_ns is not None and at_ns < last_ns:
                raise WorkloadError(f"{path}, line {line}: comes before the line above it", "sort the trace by time")
            if trace_format.unit and at_ns - first_ns > OFFSET_LIMIT_NS:
                days = (at_ns - first_ns) // (86_400 * NS_PER_S)
                raise WorkloadError(
                    f"{path}, line {line}: read in {trace_format.unit}, comes {days:,} days after the first",
                    "if the timestamps are in another unit, state it: trace:FILE,unit=us",
                )
            last_ns = at_ns
            yield Entry(at_ns - first_ns, input_tokens, output_tokens, blocks, trace_format.block_tokens)


def format_of(path: Path, unit: str | None = None, block_tokens: int | None = None) -> TraceFormat:
    """Return how `trace` reads a file. Raises as `trace` does."""
    with open_text(path, "the trace") as file:
        return _format_of(file, path, unit, block_tokens)


def _format_of(file: TextIO, path: Path, unit: str | None, block_tokens: int | None) -> TraceFormat:
    first = file.readline(LINE_LIMIT).strip()
    header = {name.strip() for name in first.split(",")}
    columns = next((columns for columns in TABLES if header.issuperset(columns)), None)
    if columns is None and not first.startswith("{"):
        raise WorkloadError(
            f"{path}: its first line {first[:80]!r} is that of no known trace",
            "give a Mooncake JSONL, an Azure LLM inference CSV or a BurstGPT CSV file, with its header",
        )
    file.seek(0)
    if columns is None:
        return _json_format(file, path, first, unit, block_tokens)
    layout, default_unit = TABLES[columns]
    if block_tokens is not None:
        raise WorkloadError(f"{path}: a trace in the layout of {layout} has no hash ids", "leave block= out")
    if unit is not None and not default_unit:
        raise WorkloadError(f"{path}: the timestamps of a trace in the layout of {layout} are dates", "leave unit= out")
    return TraceFormat(layout, unit or default_unit, columns=columns)


def _json_format(file: TextIO, path: Path, first: str, unit: str | None, block_tokens: int | None) -> TraceFormat:
    try:
        names = set(json.loads(first))
    except (ValueError, RecursionError):
        names = set()  # the reader names what is wrong with the line
    if {"chat_id", "parent_chat_id"} <= names:
        result = TraceFormat("Qwen-Bailian", unit or "s", block_tokens or BAILIAN_BLOCK_TOKENS)
    else:
        result = TraceFormat("Mooncake", unit or "ms", block_tokens or MOONCAKE_BLOCK_TOKENS)
    if unit is None:
        _check_unit(_first_timestamps(file), result, path)
        file.seek(0)
    return result


def _first_timestamps(file: TextIO) -> list[float]:
    """Return the timestamps of the first rows, up to the first row that is damaged."""
    decoder = msgspec.json.Decoder(TimestampRow)
    stamps = []
    for _, text in islice(lines(file, LINE_LIMIT), CHECKED_ROWS):
        try:
            stamps.append(decoder.decode(text).timestamp)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # the reader names what is wrong with it
            break
    return stamps


def _check_unit(stamps: Sequence[float], found: TraceFormat, path: Path) -> None:
    """Raise WorkloadError if the layout's unit is not plausible for these timestamps, so that the user has to state it.

    Two signs count: a mean rate outside PLAUSIBLE_PER_S, and fractions in a layout of whole milliseconds unless seconds
    are implausible."""
    span = stamps[-1] - stamps[0] if stamps else 0
    if span <= 0:
        return  # one instant is the same in every unit; the reader names rows that are out of order

    def per_s(unit: str) -> float:
        return (len(stamps) - 1) / (span * UNITS_NS[unit]) * NS_PER_S

    def plausible(unit: str) -> bool:
        return PLAUSIBLE_PER_S[0] <= per_s(unit) <= PLAUSIBLE_PER_S[1]

    fractions = found.unit == "ms" and any(stamp % 1 for stamp in stamps)
    if plausible(found.unit) and not (fractions and plausible("s")):
        return
    others = [unit for unit in UNITS_NS if unit != found.unit and plausible(unit)]
    readings = [f"read in {unit} at {rate_text(per_s(unit))}" for unit in others]
    written = "timestamps have fractions, and " if fractions else ""
    raise WorkloadError(
        f"{path}: it is not clear what unit its timestamps are in: {written}read in {found.unit}, as {found.layout} "
        f"traces are, its first {len(stamps):,} requests come at {rate_text(per_s(found.unit))}"
        + "".join(f", {reading}" for reading in readings),
        f"state the unit: {' or '.join(f'trace:FILE,unit={unit}' for unit in (*others, found.unit))}",
    )


def rate_text(per_s: float) -> str:
    """Return a rate in words, such as `1,234 per second` or `2.5 per hour`."""
    periods = ((1, "second"), (60, "minute"), (3_600, "hour"))
    rates = [(per_s * length_s, name) for length_s, name in periods]
    rate, name = next((result for result in rates if result[0] >= 0.1), rates[-1])
    return f"{rate:,.0f} per {name}" if rate >= 100 else f"{rate:.3g} per {name}"


Row = tuple[int, int, int, int, tuple[int, ...]]
"""Line number, instant in ns by the file's own clock, input tokens, output tokens, ids of blocks."""


def _json_rows(file: TextIO, path: Path, trace_format: TraceFormat) -> Iterator[Row]:
    unit_ns = UNITS_NS[trace_format.unit]
    for line, text in lines(file, LINE_LIMIT):
        with placed(f"{path}, line {line}", LINE_HINT):
            check_file_text(text)
            item = json.loads(text)
            at = item["timestamp"]
            if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e20:
                raise ValueError(f"has no timestamp in {trace_format.unit}: {at!r}"[:120])
            input_tokens, output_tokens = _tokens(item["input_length"]), _tokens(item["output_length"])
            blocks = _blocks(item.get("hash_ids"), input_tokens, trace_format.block_tokens)
        yield line, round(at * unit_ns), input_tokens, output_tokens, blocks


def _blocks(hash_ids: Any, input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Return the ids of a prompt's blocks. Raises ValueError, and WorkloadError if their number contradicts the length
    of the prompt."""
    if not isinstance(hash_ids, list | None):
        raise ValueError(f"has hash_ids that are no list: {hash_ids!r}"[:120])
    ids = tuple(_count(hash_id) for hash_id in hash_ids or ())
    if ids and max(ids) >= HASH_ID_LIMIT:
        raise ValueError(f"has a hash id of more than 63 bits: {max(ids)}"[:120])
    needed = -(-input_tokens // block_tokens)
    if not ids or not input_tokens or len(ids) == needed:
        return ids
    fitting = next((size for size in COMMON_BLOCK_TOKENS if -(-input_tokens // size) == len(ids)), None)
    state = f"state the size of its blocks, such as trace:FILE,block={fitting}, or " if fitting else ""
    has = f"has {len(ids):,} {'hash id' if len(ids) == 1 else 'hash_ids'}"
    blocks = f"{needed:,} {'block' if needed == 1 else 'blocks'}"
    raise WorkloadError(
        f"{has} for an input_length of {input_tokens:,}, which is {blocks} of {block_tokens} tokens",
        f"{state}remove hash_ids to replay the lengths alone",
    )


def _table(file: TextIO, path: Path, trace_format: TraceFormat) -> Iterator[Row]:
    reader = csv.reader(_utf8_lines(file, path), strict=True)
    header = [name.strip() for name in next(reader)]
    at, requested, answered = (header.index(name) for name in trace_format.columns or ())
    instant: Callable[[str], int] = partial(_number, unit=trace_format.unit) if trace_format.unit else _date
    try:
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise ValueError(f"has {len(fields)} fields, not {len(header)}")
            yield reader.line_num, instant(fields[at]), _digits(fields[requested]), _digits(fields[answered]), ()
    except WorkloadError:
        raise
    except (ValueError, csv.Error) as error:
        raise WorkloadError(f"{path}, line {reader.line_num}: {str(error)[:200]}", LINE_HINT) from None


def _utf8_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Return the lines of a table. Raises WorkloadError for a byte that is not UTF-8."""
    for line, text in enumerate(iter(lambda: file.readline(LINE_LIMIT), ""), 1):
        with placed(f"{path}, line {line}", LINE_HINT):
            check_file_text(text)
        yield text


def _number(text: str, unit: str) -> int:
    """Return a timestamp in ns. Raises ValueError."""
    if not re.fullmatch(r"\d{1,19}(\.\d{1,9})?", text):
        raise ValueError(f"has no timestamp in {unit}: {text[:40]!r}")
    return int(Fraction(text) * UNITS_NS[unit])


_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):(\d\d))?")


def _date(text: str) -> int:
    """Return a date and time in ns since 1970; in UTC where it names no zone."""
    rest = text[_WHOLE + 1 :]
    part = rest[:-_ZONE] if rest[-_ZONE : 1 - _ZONE] in ("+", "-") else rest
    if text[_WHOLE : _WHOLE + 1] == "." and part.isdecimal() and len(part) <= 9:
        return _whole_date(text[:_WHOLE] + rest[len(part) :]) + int(part.ljust(9, "0"))
    return _whole_date(text)


_WHOLE, _ZONE = len("2024-05-10 00:00:00"), len("+00:00")


@lru_cache
def _whole_date(text: str) -> int:
    """Return the same as `_date`, which calls this many times for the requests of one second."""
    match = _DATE.fullmatch(text)
    year, month, day, hour, minute, second = map(int, match.groups()[:6]) if match else (0,) * 6
    if not match or not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        raise ValueError(f"has no date and time: {text[:40]!r}")
    east_of_utc_s = int(f"{match[9]}1") * (int(match[10]) * 3_600 + int(match[11]) * 60) if match[9] else 0
    seconds = timegm((year, month, day, hour, minute, second)) - east_of_utc_s
    return seconds * NS_PER_S + int((match[7] or "").ljust(9, "0"))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"has {value!r} where a count belongs"[:120])
    return value


def _tokens(value: Any) -> int:
    if _count(value) > TOKENS_LIMIT:
        raise ValueError(f"has {value} tokens, more than {TOKENS_LIMIT}")
    return int(value)


def _digits(text: str) -> int:
    return _tokens(int(text) if (digits := text.strip()).isdecimal() and len(digits) <= 12 else text[:40])


TABLES: dict[tuple[str, str, str], tuple[str, str]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): ("Azure", ""),
    ("Timestamp", "Request tokens", "Response tokens"): ("BurstGPT", "s"),
}
"""The columns that a trace's header must have for timestamp, input and output tokens; the layout's name and its unit,
which is empty for dates."""
