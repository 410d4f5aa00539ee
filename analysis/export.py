"""Exports a Run as tables for pandas, polars, DuckDB or a spreadsheet: Parquet or CSV, one file per table.

Rows are written as the run file is read: of each Record only what the measuring window needs is kept, a third of a
kilobyte. A table gets its name only when it is whole: an export that broke off leaves no file that looks like one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from analysis.exported import TABLES, Row, chunk_rows, request_row, run_row, telemetry_rows
from analysis.gather import Gathering
from analysis.window import windowed
from loadgen.record import Record
from loadgen.runfile import Run, scan

Put = Callable[[str, Sequence[Row]], None]
"""Takes rows of the table of this name."""

RECORDS_PER_BLOCK = 1024
FORMULA = re.compile(r"^[=+\-@\t\r]")
"""What a spreadsheet would run. CSV gets an apostrophe before it; Parquet holds the text as it came."""


def export(run: Path, folder: Path, form: str) -> list[Path]:
    """Write the tables of the run at this path into the folder, in the form `csv` or `parquet`; the files written.

    Raises RunFileError where there is no run, OSError where the folder cannot be written, ImportError where Parquet is
    asked for and pyarrow is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FORMS[form](folder) as put:
        blocks = Blocks(put)
        read = scan(run, blocks.add)
        blocks.close(read)
    return [folder / f"{name}.{form}" for name in TABLES]


class Blocks:
    """Takes Records one by one and hands on their rows in blocks; keeps of each what the measuring window needs."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._pending: list[Record] = []
        self._outline = Gathering()

    def add(self, record: Record) -> None:
        """Take one Record."""
        self._pending.append(record)
        self._outline.add(replace(record, chunk_ns=record.chunk_ns[-1:], chunk_tokens=record.chunk_tokens[-1:]))
        if len(self._pending) == RECORDS_PER_BLOCK:
            self._hand_on()

    def close(self, run: Run) -> None:
        """Hand on the rest, and what the Run holds beside its Records."""
        self._hand_on()
        self._put("telemetry", [row for sample in run.telemetry for row in telemetry_rows(sample)])
        window = windowed(self._outline.frame(), run.header).window
        ends = None if window is None else (round(window.from_ns), round(window.to_ns))
        self._put("run", [run_row(run, ends)])

    def _hand_on(self) -> None:
        records, self._pending = self._pending, []
        self._put("requests", [request_row(record) for record in records])
        self._put("chunks", [row for record in records for row in chunk_rows(record)])


@contextmanager
def csv_tables(folder: Path) -> Iterator[Put]:
    """Comma-separated values as RFC 4180 has them, with a header line, UTF-8; null is nothing between two commas."""
    with _files(folder, "csv") as files, ExitStack() as open_files:
        writers = {}
        for name, file in files.items():
            stream = open_files.enter_context(file.open("w", encoding="utf-8", newline=""))
            writers[name] = csv.writer(stream)
            writers[name].writerow([column.name for column in TABLES[name]])
        yield lambda name, rows: writers[name].writerows([_harmless(value) for value in row] for row in rows)


@contextmanager
def parquet_tables(folder: Path) -> Iterator[Put]:
    """Parquet with zstd, one row group per block."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    schemas = {
        name: pyarrow.schema([pyarrow.field(column.name, getattr(pyarrow, ARROW[column.kind])()) for column in columns])
        for name, columns in TABLES.items()
    }

    def put(name: str, rows: Sequence[Row]) -> None:
        if rows:
            values = zip(schemas[name], zip(*rows, strict=True), strict=True)
            arrays = [pyarrow.array(column, type=field.type) for field, column in values]
            writers[name].write_table(pyarrow.Table.from_arrays(arrays, schema=schemas[name]))

    with _files(folder, "parquet") as files, ExitStack() as open_files:
        writers: dict[str, Any] = {
            name: open_files.enter_context(parquet.ParquetWriter(file, schemas[name], compression="zstd"))
            for name, file in files.items()
        }
        yield put


FORMS: Mapping[str, Callable[[Path], Any]] = {"csv": csv_tables, "parquet": parquet_tables}
ARROW = {"int64": "int64", "float64": "float64", "string": "string", "bool": "bool_"}


@contextmanager
def _files(folder: Path, form: str) -> Iterator[dict[str, Path]]:
    """A file for each table, under a name that says that it is not whole; renamed when all of them are."""
    files = {name: folder / f"{name}.{form}.part" for name in TABLES}
    try:
        yield files
    except BaseException:
        for file in files.values():
            file.unlink(missing_ok=True)
        raise
    for file in files.values():
        file.replace(file.with_suffix(""))


def _harmless(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value
