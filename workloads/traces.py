"""Recorded loads: when requests came and how long they were. Streamed, so a file may be larger than memory.

    layout     recognised by                              instants, and where the layout is described
    mooncake   JSON objects, one per line                 ms; kvcache-ai/Mooncake, FAST25-release/README.md
    azure      TIMESTAMP,ContextTokens,GeneratedTokens    date and time, in 2023 with 7 decimals and no zone, in 2024
                                                          with 0 or 6 and +00:00; Azure/AzurePublicDataset,
                                                          AzureLLMInferenceDataset2023.md and ...2024.md
    burstgpt   Timestamp,...,Request tokens,              s; HPMLL/BurstGPT, README.md (later files have more columns)
               Response tokens,...

A row that asks for no tokens, or got none, cannot be replayed: in BurstGPT those are the failed requests. Such rows
are left out. Any other line that does not fit its layout is an error with its number.
"""

from __future__ import annotations

import csv
import json
import re
from calendar import timegm
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

from workloads.syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError, nearest, opened, reason

BLOCK_TOKENS = 512
"""Tokens that one Mooncake hash id stands for (its README)."""
LINE_LIMIT = 4 * 1024 * 1024
"""Characters; a Mooncake line of a million tokens has 2,000 hash ids, about 20 kB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded request."""

    at_ns: int
    """Counted from the trace's first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of BLOCK_TOKENS, in order. Equal leading ids mean an equal prefix."""


def read(path: Path) -> Iterator[Entry]:
    """Every row, in order of time. Raises WorkloadError for a file that is no trace, and on a damaged line."""
    with opened(path, "the trace") as file:
        rows = _layout(file, path)
        first_ns = last_ns = None
        for line, at_ns, entry_of in rows(file, path):
            first_ns = at_ns if first_ns is None else first_ns
            if last_ns is not None and at_ns < last_ns:
                raise _damaged(path, line, "comes before the line above it", "sort the trace by time")
            last_ns = at_ns
            if (entry := entry_of(at_ns - first_ns)).input_tokens and entry.output_tokens:
                yield entry


Row = tuple[int, int, Callable[[int], Entry]]
"""(line number, instant in ns by the file's own clock, what makes the Entry from the offset)."""
Rows = Callable[[TextIO, Path], Iterator[Row]]


def _layout(file: TextIO, path: Path) -> Rows:
    """The reader, by the first line. Leaves the file at its beginning."""
    first = file.readline(LINE_LIMIT).strip()
    file.seek(0)
    columns = {name.strip() for name in first.split(",")}
    for needed, rows in LAYOUTS.values():
        if first.startswith("{") if not needed else needed <= columns:
            return rows
    raise WorkloadError(
        f"{path}: its first line {first[:80]!r} is that of no known trace",
        "give a Mooncake JSONL, an Azure LLM inference CSV or a BurstGPT CSV file, with its header",
    )


def _mooncake(file: TextIO, path: Path) -> Iterator[Row]:
    lines = iter(lambda: file.readline(LINE_LIMIT), "")
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            item = json.loads(text)
            at_ns = _milliseconds(item["timestamp"])
            tokens = _count(item["input_length"], TOKENS_LIMIT), _count(item["output_length"], TOKENS_LIMIT)
            blocks = tuple(_count(block) for block in item.get("hash_ids", ()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, line, reason(error)) from None
        yield line, at_ns, _maker(*tokens, blocks)


def _table(file: TextIO, path: Path, columns: tuple[str, str, str], instant_ns: Callable[[str], int]) -> Iterator[Row]:
    reader = csv.reader(iter(lambda: file.readline(LINE_LIMIT), ""), strict=True)
    header = [name.strip() for name in next(reader)]
    at, asked, answered = (header.index(name) for name in columns)
    try:
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise ValueError(f"has {len(fields)} fields, not {len(header)}")
            yield reader.line_num, instant_ns(fields[at]), _maker(_digits(fields[asked]), _digits(fields[answered]))
    except (ValueError, csv.Error) as error:
        raise _damaged(path, reader.line_num, reason(error)) from None


def _maker(input_tokens: int, output_tokens: int, blocks: tuple[int, ...] = ()) -> Callable[[int], Entry]:
    return lambda at_ns: Entry(at_ns, input_tokens, output_tokens, blocks)


def _milliseconds(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError(f"has no timestamp in ms: {value!r}"[:120])
    return round(value * 1_000_000)


def _seconds(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        raise ValueError(f"has no timestamp in s: {text[:40]!r}")
    return nearest((value := Fraction(text) * NS_PER_S).numerator, value.denominator)


_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):(\d\d))?")


def _date(text: str) -> int:
    """A date and time, in UTC where it names no zone, in ns since 1970."""
    match = _DATE.fullmatch(text)
    if not match:
        raise ValueError(f"has no date and time: {text[:40]!r}")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 60):
        raise ValueError(f"has no date and time: {text[:40]!r}")
    east_of_utc_s = int(f"{match[9]}1") * (int(match[10]) * 3_600 + int(match[11]) * 60) if match[9] else 0
    return (timegm((year, month, day, hour, minute, second)) - east_of_utc_s) * NS_PER_S + int(
        (match[7] or "").ljust(9, "0")
    )


def _count(value: Any, limit: int | None = None) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"has {value!r} where a count belongs"[:120])
    if limit is not None and value > limit:
        raise ValueError(f"has {value} tokens, more than {limit}")
    return value


def _digits(text: str) -> int:
    return _count(int(text) if re.fullmatch(r"\d{1,12}", text.strip()) else text[:40], TOKENS_LIMIT)


def _damaged(path: Path, line: int, problem: str, hint: str = "mend or remove the line") -> WorkloadError:
    return WorkloadError(f"{path}, line {line}: {problem}", hint)


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
LAYOUTS: dict[str, tuple[set[str], Rows]] = {
    "mooncake": (set(), _mooncake),
    "azure": (set(AZURE_COLUMNS), lambda file, path: _table(file, path, AZURE_COLUMNS, _date)),
    "burstgpt": (set(BURSTGPT_COLUMNS), lambda file, path: _table(file, path, BURSTGPT_COLUMNS, _seconds)),
}
"""Name to (columns its header must have, its reader). No columns: JSON objects, one per line."""
