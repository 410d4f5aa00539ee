"""Exports a Run as tables for pandas, polars, DuckDB or a spreadsheet: Parquet or CSV, one file per table.

Rows are written as the run file is read: of each Record only what the measuring window needs is kept, a third of a
kilobyte. A table gets its name only when it is whole: an export that broke off leaves no file that looks like one.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import asdict, replace

from loadgen.analysis.build_summary import server_info
from loadgen.analysis.frame import FrameBuilder, Window, build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry, scan
from loadgen.analysis.steady_window import with_window

Row = tuple[Any, ...]
Write = Callable[[Sequence[Row]], object]
"""Takes rows of one table."""

RECORDS_PER_BLOCK = 1024
FORMULA = re.compile(r"^[=+\-@\t\r]")
"""What a spreadsheet would run. CSV gets an apostrophe before it; Parquet holds the text as it came."""


class Column(NamedTuple):
    """One column. Any may be null: null means that it never happened or was not said."""

    name: str
    kind: Literal["int64", "float64", "string", "bool"]
    meaning: str


def _instant(name: str, meaning: str) -> Column:
    return Column(name, "int64", f"{meaning}, in nanoseconds from the run's start.")


REQUESTS = (
    Column("request", "int64", "The request's id, from 0 in the order planned."),
    Column("phase", "string", "`measured`, or `warmup` for a request that is in no figure."),
    Column("state", "string", "`complete`, `truncated`, `failed`, `rejected` or `dropped`."),
    Column("worker", "int64", "The process that sent it."),
    Column("session", "int64", "Id of the first turn of its session; null for a request on its own."),
    Column("turn", "int64", "Which turn of its session, from 0; null for a request on its own."),
    _instant("due_ns", "When it was to leave"),
    _instant("connected_ns", "When its connection was there"),
    _instant("sent_ns", "Right before its first byte was sent; of a request sent again, right before the second time"),
    _instant("first_sent_ns", "Right before its first byte was sent the first time, where it was sent again"),
    _instant("sent_end_ns", "When the kernel had taken its last byte"),
    _instant("first_byte_ns", "When the first byte of the answer came"),
    _instant("first_token_ns", "When the first chunk with a token came"),
    _instant("last_token_ns", "When the last chunk with a token came"),
    _instant("end_ns", "When the end marker came, or the request was given up"),
    Column("chunks", "int64", "Chunks that held at least one token."),
    Column("chunk_tokens", "int64", "Tokens in those chunks, together."),
    Column("prompt_tokens_asked", "int64", "Prompt length that was asked for."),
    Column("prompt_tokens", "int64", "Prompt length by the server's count."),
    Column("output_tokens_asked", "int64", "Answer length that was asked for."),
    Column("output_tokens", "int64", "Answer length by the count of `counted_by`."),
    Column("counted_by", "string", "`server`, `wire`, `tokenizer` or `chunks`."),
    *(
        Column(each.name, "float64", f"{each.title}, of complete requests: {each.definition}")
        for each in METRICS.values()
        if each.per == "request"
    ),
    Column("http_status", "int64", "Status of the answer."),
    Column("finish_reason", "string", "In the server's words."),
    Column("error_kind", "string", "Why it is not complete."),
    Column("error_detail", "string", "The same in words, the server's own where it said something."),
    Column(
        "stamps", "string", "Who stamped its tokens: `ring` (the kernel, each packet), `socket` (each read) or `user`."
    ),
    Column("late_ns_max", "int64", "Largest delay between the kernel's stamp and this program's reading, nanoseconds."),
    Column("reads", "int64", "Reads that its answer took."),
    Column("coalesced_reads", "int64", "Reads that held more than one event."),
    Column("first_token_merged", "bool", "Its first token was read with later ones: TTFT is an upper bound."),
    Column("reopened", "int64", "Connections that had to be opened again for it."),
)
CHUNKS = (
    Column("request", "int64", "The request's id."),
    Column("chunk", "int64", "Place among the request's chunks, from 1."),
    Column("token", "int64", "Place of its first token in the answer, from 1."),
    Column("tokens", "int64", "Tokens it holds."),
    _instant("at_ns", "When it came"),
    Column("gap_ns", "int64", "Since the request's chunk before it, nanoseconds; null for the first."),
)
TELEMETRY = (
    Column("source", "string", "`client`, `server`, `gpu` or `host`; `clock` of a run over several machines."),
    Column("worker", "int64", "The process that wrote it."),
    _instant("at_ns", "When it was read"),
    Column("figure", "string", "Its name; parts of a nested one are joined by dots, such as `late_counts.20`."),
    Column("value", "float64", "The figure; 1 and 0 for yes and no; null where it is text."),
    Column("text", "string", "What it says where it is no number."),
)
RUN = (
    Column("run", "string", "The run's folder."),
    Column("label", "string", "The word it was given."),
    Column("server", "string", "Which server answered."),
    Column("server_version", "string", "Its version, by its own word."),
    Column("model", "string", "Its model, by its own word."),
    Column("platform", "string", "What it runs on, where that was said."),
    Column("simulated", "bool", "Whether the server was a simulated one."),
    Column("started_at", "string", "Wall-clock start, RFC 3339, UTC."),
    Column("start_ns", "int64", "CLOCK_MONOTONIC at the run's start."),
    Column("start_realtime_ns", "int64", "CLOCK_REALTIME at the same instant."),
    Column("window_from_ns", "int64", "Start of the measuring window; null where the whole run counts."),
    Column("window_to_ns", "int64", "End of it. Figures are of complete, measured requests due in between."),
    Column("interrupted", "bool", "Whether the run ended before its time."),
    Column("damaged_lines", "int64", "Lines of the run file that could not be read and are in no table."),
    Column("version", "string", "Of loadgen."),
    Column("command", "string", "The arguments of the command that repeats the run, as a JSON list."),
    Column("plan", "string", "The resolved plan, as JSON."),
    Column("server_facts", "string", "What the probe found, as JSON."),
    Column("host", "string", "The client's machine, as JSON."),
    Column("client", "string", "How the client stamped and counted, as JSON."),
    Column("footer", "string", "The run file's last line, as JSON; null where there is none."),
)
TABLES: Mapping[str, tuple[Column, ...]] = {"requests": REQUESTS, "chunks": CHUNKS, "telemetry": TELEMETRY, "run": RUN}
MEANINGS = {
    "requests": "One row per request, warm-up included, in the order of the run file.",
    "chunks": "One row per chunk of every request, in the same order.",
    "telemetry": "One row per figure of each sample.",
    "run": "One row.",
}


def export(run: Path, folder: Path, form: str) -> list[Path]:
    """Write the tables of the run at this path into the folder, in the form `csv` or `parquet`; the files written.
    Raises RunFileError where there is no run, OSError where the folder cannot be written, ImportError where Parquet is
    asked for and pyarrow is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    outline, pending = FrameBuilder(), list[Record]()
    with _tables(folder, form) as write:

        def add(record: Record) -> None:
            outline.add(replace(record, chunk_ns=record.chunk_ns[-1:], chunk_tokens=record.chunk_tokens[-1:]))
            pending.append(record)
            if len(pending) == RECORDS_PER_BLOCK:
                hand_on()

        def hand_on() -> None:
            write["requests"](list(request_rows(pending)))
            write["chunks"]([row for record in pending for row in chunk_rows(record)])
            pending.clear()

        read = scan(run, add)
        hand_on()
        write["telemetry"]([row for sample in read.telemetry for row in telemetry_rows(sample)])
        write["run"]([run_row(read, with_window(outline.frame(), read.header).window)])
    return [folder / f"{name}.{form}" for name in TABLES]


@contextmanager
def _tables(folder: Path, form: str) -> Iterator[Mapping[str, Write]]:
    """Each table, in a file under a name that says that it is not whole; renamed when all of them are."""
    files = {name: folder / f"{name}.{form}.part" for name in TABLES}
    try:
        with ExitStack() as opened:
            yield {name: opened.enter_context(FORMS[form](file, TABLES[name])) for name, file in files.items()}
    except BaseException:
        for file in files.values():
            file.unlink(missing_ok=True)
        raise
    for file in files.values():
        file.replace(file.with_suffix(""))


@contextmanager
def _csv(file: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Comma-separated values as RFC 4180 has them, with a header line, UTF-8; null is nothing between two commas."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([column.name for column in columns])
        yield lambda rows: writer.writerows([_harmless(value) for value in row] for row in rows)


@contextmanager
def _parquet(file: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Parquet with zstd, one row group per block."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    schema = pyarrow.schema([(column.name, pyarrow.type_for_alias(column.kind)) for column in columns])

    def write(rows: Sequence[Row]) -> None:
        if rows:
            values = dict(zip(schema.names, zip(*rows, strict=True), strict=True))
            writer.write_table(pyarrow.Table.from_pydict(values, schema=schema))

    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        yield write


FORMS = {"csv": _csv, "parquet": _parquet}


def _harmless(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def request_rows(records: Sequence[Record]) -> Iterator[Row]:
    """Records as rows of `requests`. An empty text is one that was never said."""
    frame = build_frame(records)
    latencies = {}
    for name in (name for name, each in METRICS.items() if each.per == "request"):
        result = METRICS[name].rows(frame)
        has_one = frame.complete & ~np.isnan(result)
        latencies[name] = [value if known else None for value, known in zip(result.tolist(), has_one, strict=True)]
    for index, record in enumerate(records):
        values: dict[str, Any] = {
            **{name: result[index] for name, result in latencies.items()},
            "request": record.id,
            "turn": None if record.session is None else record.turn,
            "first_token_ns": record.chunk_ns[0] if record.chunk_ns else None,
            "last_token_ns": record.chunk_ns[-1] if record.chunk_ns else None,
            "chunks": len(record.chunk_ns),
            "chunk_tokens": sum(record.chunk_tokens),
        }
        row = (values[name] if name in values else getattr(record, name) for name, *_ in REQUESTS)
        yield tuple(None if value == "" else value for value in row)


def chunk_rows(record: Record) -> Iterator[Row]:
    """The Record's chunks as rows of `chunks`."""
    token, before = 1, None
    for index, (at_ns, tokens) in enumerate(zip(record.chunk_ns, record.chunk_tokens, strict=True), 1):
        yield record.id, index, token, tokens, at_ns, None if before is None else at_ns - before
        token, before = token + tokens, at_ns


def telemetry_rows(sample: Telemetry) -> Iterator[Row]:
    """Each figure of the sample as a row of `telemetry`."""
    for name, value in _flat("", sample.values):
        figure = (float(value), None) if isinstance(value, int | float) else (None, str(value))
        yield sample.source, sample.worker, sample.at_ns, name, *figure


def run_row(run: Run, window: Window | None) -> Row:
    """The row of `run`."""
    header, footer, server, folder = run.header, run.footer, server_info(run), run.path.resolve().parent.name
    ends: tuple[int | None, int | None] = (None, None)
    if window is not None and window.chosen != "whole":
        ends = round(window.from_ns), round(window.to_ns)
    told = (header.command, header.plan, header.server, header.host, header.client)
    last_line = None
    if footer is not None:
        last_line = json.dumps({name: value for name, value in asdict(footer).items() if value is not None})
    return (
        *(folder, header.plan.get("label") or folder),
        *(server.name, server.version, server.model, server.platform or None, server.simulated),
        *(header.started_at, header.start_ns, header.start_realtime_ns, *ends),
        *(footer is None or footer.interrupted, run.damaged_lines, header.version, *map(json.dumps, told)),
        last_line,
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif value is not None:
        yield name, value
