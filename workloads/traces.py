"""Reads traces: recorded loads with the arrival time and the token counts of each request.

The beginning of a file shows its layout. There are four layouts:

- Mooncake: a JSON object per line, and timestamps in ms. Documented in kvcache-ai/Mooncake, FAST25-release/README.md.
- Qwen-Bailian: the fields of Mooncake and also `chat_id` and `parent_chat_id`, and timestamps in s. Documented in
  alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
- Azure: the columns `TIMESTAMP,ContextTokens,GeneratedTokens`. A timestamp is a date and a time: in 2023 with 7
  decimals and no zone, in 2024 with 0 or 6 decimals and the zone +00:00. Documented in Azure/AzurePublicDataset,
  AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md.
- BurstGPT: the columns `Timestamp,...,Request tokens,Response tokens,...`, and timestamps in s. Later files have more
  columns. Documented in HPMLL/BurstGPT, README.md.

Some files have Mooncake's field names, but other units and block sizes. Two checks detect such files:

- The mean rate of the trace must be plausible.
- The number of `hash_ids` must match the length of the prompt. A hash id identifies a block of tokens in a prompt.

If a check fails, a WorkloadError tells the user to state `unit=` or `block=`.

A row without input or output tokens, such as a failed request in BurstGPT, cannot be replayed. Such rows are skipped
and counted. Any other deviation from the layout is an error that names the line.
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

from loadgen.workloads.datasets import LINE_HINT, error_location, lines
from loadgen.workloads.json_values import check_file_text
from loadgen.workloads.spec_syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError, open_text

LINE_LIMIT = 4 * 1024 * 1024
"""Maximum characters of a line. A Mooncake line of a million tokens has 2,000 hash ids, about 20 kB."""
UNITS_NS = {"s": NS_PER_S, "ms": 1_000_000, "us": 1_000, "ns": 1}
MOONCAKE_BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
"""Tokens per hash id, from the documents of the layouts."""
BLOCK_TOKENS_MAX = 1 << 20
COMMON_BLOCK_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that an error message may suggest."""
HASH_ID_LIMIT = 1 << 63
CHECKED_ROWS = 1_000
"""Number of rows at the start of the file that are used to check the unit of the timestamps."""
PLAUSIBLE_PER_S = (0.01, 100.0)
"""Range of plausible mean rates of a recorded load, in requests per second. A unit that is wrong by a factor of 1,000
usually gives a rate outside this range."""
OFFSET_LIMIT_NS = 400 * 86_400 * NS_PER_S
"""Maximum time from the first row to any other row. No published trace is that long."""


class Entry(NamedTuple):
    """One recorded request of a trace."""

    at_ns: int  # Time since the trace's first request
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks, in order. Prompts with equal leading ids share a prefix."""
    block_tokens: int = 0
    """Tokens per block. 0: the layout has no block ids."""

    @property
    def has_tokens(self) -> bool:
        """True if the request has input and output tokens. A request without them cannot be replayed."""
        return bool(self.input_tokens and self.output_tokens)


class TraceFormat(msgspec.Struct, frozen=True):
    """The format of a trace file: its layout (such as Mooncake), the unit of its timestamps, and its columns."""

    layout: str
    unit: str = ""
    """A key of UNITS_NS. Empty: timestamps are dates."""
    block_tokens: int = 0
    """Tokens per hash id. 0: the layout has no hash ids."""
    columns: tuple[str, str, str] | None = None
    """For a table: names of the columns with timestamp, input tokens and output tokens."""

    @property
    def text(self) -> str:
        """A description of the timestamp unit and of the block size, for messages."""
        unit = f"timestamps in {self.unit}" if self.unit else "timestamps are dates"
        return unit + (f", blocks of {self.block_tokens} tokens" if self.block_tokens else "")


class TimestampRow(msgspec.Struct):
    """A row of a JSON trace, of which only the timestamp is decoded. It serves to check the unit of the timestamps."""

    timestamp: float


def trace(path: Path, unit: str | None = None, block_tokens: int | None = None) -> Iterator[Entry]:
    """Yield every row of a trace file, in ascending order of time.

    `unit` is the unit of the timestamps, and `block_tokens` is the number of tokens per hash id. If they are None, the
    layout of the file (such as Mooncake) defines them. Raises WorkloadError if the file is not a trace, if a line is
    malformed, if the rows are not in order of time, or if the timestamps are implausible in the layout's unit."""
    with open_text(path, "the trace") as file:
        trace_format = _format_of(file, path, unit, block_tokens)
        rows = _table if trace_format.columns else _json_rows
        first_ns = last_ns = None
        for line, at_ns, input_tokens, output_tokens, blocks in rows(file, path, trace_format):
            first_ns = at_ns if first_ns is None else first_ns
            if last_ns is not None and at_ns < last_ns:
                raise WorkloadError(
                    f"{path}, line {line}: its time is before the time of the line above", "sort the trace by time"
                )
            if trace_format.unit and at_ns - first_ns > OFFSET_LIMIT_NS:
                days = (at_ns - first_ns) // (86_400 * NS_PER_S)
                raise WorkloadError(
                    f"{path}, line {line}: read in {trace_format.unit}, the request comes {days:,} days after the "
                    "first",
                    "if the timestamps are in another unit, state it: trace:FILE,unit=us",
                )
            last_ns = at_ns
            yield Entry(at_ns - first_ns, input_tokens, output_tokens, blocks, trace_format.block_tokens)


def format_of(path: Path, unit: str | None = None, block_tokens: int | None = None) -> TraceFormat:
    """Return the format of a trace file: its layout, such as `Mooncake`, its timestamp unit and its block size.

    The first line of the file shows which layout the file has. `unit` and `block_tokens` replace the usual timestamp
    unit and block size of this layout.

    Raises WorkloadError in these cases:

    - The file is not a trace.
    - `unit` is given, but the timestamps of this layout are dates, which have no unit.
    - `block_tokens` is given, but this layout has no blocks.
    - `unit` is None, and with the usual unit of this layout, the timestamps are implausible.
    """
    with open_text(path, "the trace") as file:
        return _format_of(file, path, unit, block_tokens)


def _format_of(file: TextIO, path: Path, unit: str | None, block_tokens: int | None) -> TraceFormat:
    first = file.readline(LINE_LIMIT).strip()
    header = {name.strip() for name in first.split(",")}
    columns = next((columns for columns in TABLES if header.issuperset(columns)), None)
    if columns is None and not first.startswith("{"):
        raise WorkloadError(
            f"{path}: its first line {first[:80]!r} is not that of a known trace",
            "use a Mooncake JSONL, an Azure LLM inference CSV or a BurstGPT CSV file, with its header",
        )
    file.seek(0)
    if columns is None:
        return _json_format(file, path, first, unit, block_tokens)
    layout, default_unit = TABLES[columns]
    if block_tokens is not None:
        raise WorkloadError(f"{path}: a trace in the layout of {layout} has no hash ids", "leave out block=")
    if unit is not None and not default_unit:
        raise WorkloadError(f"{path}: the timestamps of a trace in the layout of {layout} are dates", "leave out unit=")
    return TraceFormat(layout, unit or default_unit, columns=columns)


def _json_format(file: TextIO, path: Path, first: str, unit: str | None, block_tokens: int | None) -> TraceFormat:
    try:
        names = set(json.loads(first))
    except (ValueError, RecursionError):
        names = set()  # the reader reports the problem with the line
    if {"chat_id", "parent_chat_id"} <= names:
        result = TraceFormat("Qwen-Bailian", unit or "s", block_tokens or BAILIAN_BLOCK_TOKENS)
    else:
        result = TraceFormat("Mooncake", unit or "ms", block_tokens or MOONCAKE_BLOCK_TOKENS)
    if unit is None:
        check_unit(_first_timestamps(file), result.unit, result.layout, path)
        file.seek(0)
    return result


def _first_timestamps(file: TextIO) -> list[float]:
    """Return the timestamps of the first CHECKED_ROWS rows. The list ends before the first malformed row."""
    decoder = msgspec.json.Decoder(TimestampRow)
    timestamps = []
    for _, text in islice(lines(file, LINE_LIMIT), CHECKED_ROWS):
        try:
            timestamps.append(decoder.decode(text).timestamp)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # the reader reports the problem
            break
    return timestamps


def check_unit(timestamps: Sequence[float], unit: str, layout: str, path: Path, source: str = "trace") -> None:
    """Raise WorkloadError if `timestamps` are probably not in `unit`, the usual unit of the file format `layout`.

    The hint of the error tells the user to state the unit. The error is raised in two cases:

    - With this unit, the mean rate of requests is outside PLAUSIBLE_PER_S.
    - The unit is milliseconds, some timestamps have fractions, and the mean rate would also be plausible with seconds.

    `path` is the file with the timestamps. `source` is the workload in the hint: `trace`, as in `trace:FILE,unit=s`, or
    `sessions`.
    """
    span = timestamps[-1] - timestamps[0] if timestamps else 0
    if span <= 0:
        return  # equal timestamps have no unit, and the reader reports rows that are out of order

    def per_s(unit: str) -> float:
        return (len(timestamps) - 1) / (span * UNITS_NS[unit]) * NS_PER_S

    def plausible(unit: str) -> bool:
        return PLAUSIBLE_PER_S[0] <= per_s(unit) <= PLAUSIBLE_PER_S[1]

    fractions = unit == "ms" and any(timestamp % 1 for timestamp in timestamps)
    if plausible(unit) and not (fractions and plausible("s")):
        return
    others = [other for other in UNITS_NS if other != unit and plausible(other)]
    readings = [f"read in {other} at {rate_text(per_s(other))}" for other in others]
    reason = "timestamps have fractions, and " if fractions else ""
    raise WorkloadError(
        f"{path}: the unit of its timestamps is unclear: {reason}read in {unit}, as {layout} "
        f"traces are, its first {len(timestamps):,} requests come at {rate_text(per_s(unit))}"
        + "".join(f", {reading}" for reading in readings),
        f"state the unit: {' or '.join(f'{source}:FILE,unit={name}' for name in (*others, unit))}",
    )


def rate_text(per_s: float) -> str:
    """Return a rate as text, such as `1,234 per second` or `2.5 per hour`."""
    periods = ((1, "second"), (60, "minute"), (3_600, "hour"))
    rates = [(per_s * length_s, name) for length_s, name in periods]
    rate, name = next((pair for pair in rates if pair[0] >= 0.1), rates[-1])
    return f"{rate:,.0f} per {name}" if rate >= 100 else f"{rate:.3g} per {name}"


Row = tuple[int, int, int, int, tuple[int, ...]]
"""Line number, timestamp in ns, input tokens, output tokens, block ids."""


def _json_rows(file: TextIO, path: Path, trace_format: TraceFormat) -> Iterator[Row]:
    unit_ns = UNITS_NS[trace_format.unit]
    for line, text in lines(file, LINE_LIMIT):
        with error_location(f"{path}, line {line}", LINE_HINT):
            check_file_text(text)
            item = json.loads(text)
            timestamp = item["timestamp"]
            is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
            if not is_number or not 0 <= timestamp < 1e20:
                raise ValueError(f"has no timestamp in {trace_format.unit}: {timestamp!r}"[:120])
            input_tokens = _tokens(item["input_length"])
            output_tokens = _tokens(item["output_length"])
            blocks = _blocks(item.get("hash_ids"), input_tokens, trace_format.block_tokens)
        yield line, round(timestamp * unit_ns), input_tokens, output_tokens, blocks


def _blocks(hash_ids: Any, input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Check the hash ids of a row, and return them. A hash id stands for one block of tokens in the prompt.

    `hash_ids` is the value of the row's field with this name. It may be empty. `input_tokens` is the length of the
    prompt, and `block_tokens` is the length of a block. Raises ValueError for an invalid id, and WorkloadError if the
    number of ids is not the number of blocks in the prompt.
    """
    if not isinstance(hash_ids, list | None):
        raise ValueError(f"has hash_ids that are not a list: {hash_ids!r}"[:120])
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
    time_column, input_column, output_column = (header.index(name) for name in trace_format.columns or ())
    parse_time: Callable[[str], int] = partial(_number, unit=trace_format.unit) if trace_format.unit else parse_date
    try:
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise ValueError(f"has {len(fields)} fields, not {len(header)}")
            at_ns = parse_time(fields[time_column])
            yield reader.line_num, at_ns, _digits(fields[input_column]), _digits(fields[output_column]), ()
    except WorkloadError:
        raise
    except (ValueError, csv.Error) as error:
        raise WorkloadError(f"{path}, line {reader.line_num}: {str(error)[:200]}", LINE_HINT) from None


def _utf8_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a CSV file. Raises WorkloadError for a line with a byte that is not UTF-8."""
    for line, text in enumerate(iter(lambda: file.readline(LINE_LIMIT), ""), 1):
        with error_location(f"{path}, line {line}", LINE_HINT):
            check_file_text(text)
        yield text


def _number(text: str, unit: str) -> int:
    """Convert a numeric timestamp from the given unit to ns. Raises ValueError if the text is not a number."""
    if not re.fullmatch(r"\d{1,19}(\.\d{1,9})?", text):
        raise ValueError(f"has no timestamp in {unit}: {text[:40]!r}")
    return int(Fraction(text) * UNITS_NS[unit])


_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):(\d\d))?")


def parse_date(text: str) -> int:
    """Convert a date and time to ns since 1970. UTC is assumed if the text has no time zone.

    Raises ValueError if the text is not a date and time."""
    rest = text[_SECONDS_LENGTH + 1 :]
    fraction = rest[:-_ZONE_LENGTH] if rest[-_ZONE_LENGTH : 1 - _ZONE_LENGTH] in ("+", "-") else rest
    if text[_SECONDS_LENGTH : _SECONDS_LENGTH + 1] == "." and fraction.isdecimal() and len(fraction) <= 9:
        return _whole_date(text[:_SECONDS_LENGTH] + rest[len(fraction) :]) + int(fraction.ljust(9, "0"))
    return _whole_date(text)


_SECONDS_LENGTH = len("2024-05-10 00:00:00")
_ZONE_LENGTH = len("+00:00")


@lru_cache
def _whole_date(text: str) -> int:
    """Convert the date and time `text` to ns since 1970. Results are cached.

    `parse_date` usually removes the fraction of the second before it calls this function. Many rows of a trace then
    have the same text, and the cache avoids most conversions.
    """
    match = _DATE.fullmatch(text)
    year, month, day, hour, minute, second = map(int, match.groups()[:6]) if match else (0,) * 6
    if not match or not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        raise ValueError(f"has no date and time: {text[:40]!r}")
    east_of_utc_s = int(f"{match[9]}1") * (int(match[10]) * 3_600 + int(match[11]) * 60) if match[9] else 0
    seconds = timegm((year, month, day, hour, minute, second)) - east_of_utc_s
    return seconds * NS_PER_S + int((match[7] or "").ljust(9, "0"))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, found {value!r}"[:120])
    return value


def _tokens(value: Any) -> int:
    if _count(value) > TOKENS_LIMIT:
        raise ValueError(f"has {value} tokens, more than {TOKENS_LIMIT}")
    return int(value)


def _digits(text: str) -> int:
    digits = text.strip()
    is_count = digits.isdecimal() and len(digits) <= 12
    return _tokens(int(text) if is_count else text[:40])


TABLES: dict[tuple[str, str, str], tuple[str, str]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): ("Azure", ""),
    ("Timestamp", "Request tokens", "Response tokens"): ("BurstGPT", "s"),
}
"""Layouts of tables. The key has the columns for timestamp, input tokens and output tokens. The value is the name of
the layout and the unit of its timestamps, which is empty for dates."""
