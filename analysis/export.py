"""Exports a run as tables for pandas, polars, DuckDB or a spreadsheet: Parquet or CSV, one file per table.

Rows are written while the run file is read. Only the data that is needed to choose the measurement window stays in
memory, about 0.3 kB per Record. A file gets its final name only when all tables are complete, so an interrupted export
leaves no incomplete table.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict, replace

from loadgen.analysis.build_summary import server_info
from loadgen.analysis.frame import FrameBuilder, Window, build_frame
from loadgen.analysis.frame_parts import class_indices
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.packed_values import unpack_values
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run, Telemetry, TrafficFacts, scan
from loadgen.analysis.steady_window import with_window

Row = tuple[Any, ...]
Write = Callable[[Sequence[Row]], object]
"""A function that writes rows to one table."""

RECORDS_PER_BLOCK = 1024
FORMULA = re.compile(r"^[=+\-@\t\r]")
"""Text that a spreadsheet would execute as a formula. CSV files have an apostrophe before such text. Parquet files
contain the text unchanged."""


class Column(NamedTuple):
    """A column of a table.

    A null value means that an event, such as the first token, never happened, or that the value is unknown.
    """

    name: str
    kind: Literal["int64", "float64", "string", "bool"]
    meaning: str


def _instant(name: str, meaning: str) -> Column:
    return Column(name, "int64", f"{meaning}, in nanoseconds from the run's start.")


REQUESTS = (
    Column("request", "int64", "Id of the request, from 0 in planned order."),
    Column("phase", "string", "`measured`, or `warmup` for a request that is excluded from all figures."),
    Column("state", "string", "`complete`, `truncated`, `failed`, `rejected`, `dropped` or `abandoned`."),
    Column("class", "string", "Class of traffic; null if the plan has no classes."),
    Column("model", "string", "Model that the request named; null if it is the model of the run."),
    Column("worker", "int64", "Worker process that sent the request."),
    Column("session", "int64", "Id of the first request of the session; null for a request without a session."),
    Column("turn", "int64", "Index of the turn in its session, from 0; null for a request without a session."),
    Column("role", "string", "Role of the request in a session that is a graph; null for other requests."),
    Column("parents", "string", "Requests that it waited for, as JSON: [[id, `end` or `start`, delay in ns], ...]."),
    Column("tool_ns", "int64", "Time for tools before the request, by the session file; null if there is none."),
    _instant("due_ns", "Scheduled send time"),
    _instant("released_ns", "Time when a request that had waited because of --concurrency could be sent"),
    _instant("connected_ns", "Time when the connection was established"),
    _instant("sent_ns", "Time right before the first byte was sent, in the second attempt if there were two"),
    _instant(
        "first_sent_ns",
        "Time right before the first byte was sent in the first of two attempts",
    ),
    _instant("sent_end_ns", "Time when the kernel had accepted the last byte"),
    _instant("first_byte_ns", "Arrival of the first byte of the response"),
    _instant("first_token_ns", "Arrival of the first chunk with a token"),
    _instant("last_token_ns", "Arrival of the last chunk with a token"),
    _instant("end_ns", "Arrival of the end marker, or time when the request was given up"),
    Column("chunks", "int64", "Number of chunks with at least one token."),
    Column("chunk_tokens", "int64", "Total number of tokens in the chunks of `chunks`."),
    Column("prompt_tokens_asked", "int64", "Requested prompt length."),
    Column("prompt_tokens", "int64", "Prompt length as counted by the server."),
    Column("output_tokens_asked", "int64", "Requested output length."),
    Column("output_tokens", "int64", "Output length; `counted_by` names the source of the count."),
    Column("counted_by", "string", "Source of `output_tokens`: `server`, `wire`, `tokenizer` or `chunks`."),
    *(
        Column(metric.name, "float64", f"{metric.title} of complete requests: {metric.definition}")
        for metric in METRICS.values()
        if metric.per == "request"
    ),
    Column("marks", "string", "Further facts of the response as a JSON object: instants (`*_ns`) and counts."),
    Column("http_status", "int64", "HTTP status of the response."),
    Column("finish_reason", "string", "Finish reason as reported by the server."),
    Column("error_kind", "string", "Kind of error of an incomplete request."),
    Column("error_detail", "string", "Error message, from the server if it sent one."),
    Column(
        "stamps",
        "string",
        "Source of the timestamps: `ring` (kernel, per packet), `socket` (kernel, per read) or `user` (user space).",
    ),
    Column(
        "late_ns_max", "int64", "Largest delay from the kernel's timestamp until the client had read the bytes, in ns."
    ),
    Column("reads", "int64", "Number of reads for the response."),
    Column("coalesced_reads", "int64", "Number of reads that held more than one event."),
    Column(
        "first_token_merged",
        "bool",
        "True if the first token was read together with later ones, so that TTFT is an upper bound.",
    ),
    Column("reopened", "int64", "Number of connections that had to be reopened for the request."),
)
CHUNKS = (
    Column("request", "int64", "Id of the request."),
    Column("chunk", "int64", "Number of the chunk in its request, from 1."),
    Column("token", "int64", "Number of the chunk's first token in the response, from 1."),
    Column("tokens", "int64", "Number of tokens in the chunk."),
    _instant("at_ns", "Arrival of the chunk"),
    Column("gap_ns", "int64", "Time since the previous chunk of the request, in ns; null for the first chunk."),
)
TELEMETRY = (
    Column("source", "string", "`client`, `server`, `gpu` or `host`; also `clock` in a distributed run."),
    Column("worker", "int64", "Worker process that wrote the sample."),
    _instant("at_ns", "Time of the reading"),
    Column("figure", "string", "Name of the figure; parts of nested names are joined by dots, as in `late_counts.20`."),
    Column("value", "float64", "Value of the figure; 1 or 0 for a boolean; null for text."),
    Column("text", "string", "Value of a figure that is text; null for a number."),
)
RUN = (
    Column("run", "string", "Name of the run's folder."),
    Column("label", "string", "Label of the run."),
    Column("server", "string", "Name of the server."),
    Column("server_version", "string", "Version that the server reported."),
    Column("model", "string", "Model that the server reported."),
    Column("platform", "string", "Hardware of the server, if the plan states it or a simulated server models it."),
    Column("simulated", "bool", "True for a simulated server."),
    Column(
        "speed",
        "float64",
        "Clock speed of a simulated server, as a multiple of real time. All times and rates are at this speed. Null if "
        "it is unknown, or for a real server.",
    ),
    Column("started_at", "string", "Wall-clock start, RFC 3339, UTC."),
    Column("start_ns", "int64", "CLOCK_MONOTONIC at the run's start."),
    Column("start_realtime_ns", "int64", "CLOCK_REALTIME at the same instant."),
    Column("window_from_ns", "int64", "Start of the measurement window; null if the whole run counts."),
    Column("window_to_ns", "int64", "End of the window; null if the whole run counts."),
    Column("interrupted", "bool", "True if the run was interrupted."),
    Column(
        "damaged_lines", "int64", "Lines of the run file that could not be read. They are excluded from all tables."
    ),
    Column("version", "string", "Version of loadgen."),
    Column("command", "string", "Arguments of the command that repeats the run, as a JSON list."),
    Column("plan", "string", "The resolved plan, as JSON."),
    Column("server_facts", "string", "Facts about the server from the probe, as JSON."),
    Column("host", "string", "The client's machine, as JSON."),
    Column("client", "string", "Facts about timestamps and token counts of the client, as JSON."),
    Column("footer", "string", "Last line of the run file, as JSON; null if it is missing."),
)
TABLES: Mapping[str, tuple[Column, ...]] = {"requests": REQUESTS, "chunks": CHUNKS, "telemetry": TELEMETRY, "run": RUN}
MEANINGS = {
    "requests": "One row per request, warm-up included, in the order of the run file.",
    "chunks": "One row per chunk of every request, in the order of the table `requests`.",
    "telemetry": "One row per figure of each sample.",
    "run": "One row for the whole run.",
}


def export(run: Path, folder: Path, form: str) -> list[Path]:
    """Write the tables of a run into a folder, and return the paths of the written files.

    `run` is the path of the run, and `form` is `csv` or `parquet`. Raises RunFileError if there is no run at this path,
    and OSError if the folder cannot be written. Raises ImportError if Parquet is requested and pyarrow is not
    installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    builder, pending = FrameBuilder(), list[Record]()
    traffic: list[TrafficFacts] = []
    with _tables(folder, form) as write:

        def add(record: Record) -> None:
            # The measurement window needs only the last chunk of each request.
            builder.add(replace(record, chunk_ns=record.chunk_ns[-1:], chunk_tokens=record.chunk_tokens[-1:]))
            pending.append(record)
            if len(pending) == RECORDS_PER_BLOCK:
                write_pending()

        def write_pending() -> None:
            write["requests"](list(request_rows(pending, traffic)))
            write["chunks"]([row for record in pending for row in chunk_rows(record)])
            pending.clear()

        read = scan(run, add, lambda header: traffic.extend(header.traffic))
        write_pending()
        write["telemetry"]([row for sample in read.telemetry for row in telemetry_rows(sample)])
        write["run"]([run_row(read, with_window(builder.frame(), read.header).window)])
    return [folder / f"{name}.{form}" for name in TABLES]


@contextmanager
def _tables(folder: Path, form: str) -> Iterator[Mapping[str, Write]]:
    """Open a `.part` file for each table, and yield a dict that maps each table to a function that writes its rows.

    The files get their final names when all tables are complete. If an error occurs, the files are deleted.
    """
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
    """Yield a function that writes rows to a CSV file (RFC 4180, UTF-8) with a header line. Null is an empty field."""
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([column.name for column in columns])
        yield lambda rows: writer.writerows([_csv_value(value) for value in row] for row in rows)


@contextmanager
def _parquet(file: Path, columns: Sequence[Column]) -> Iterator[Write]:
    """Yield a function that writes rows to a Parquet file with zstd compression. Each call adds one row group."""
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


def _csv_value(value: Any) -> Any:
    """Return a value as it is written to a CSV file.

    Booleans become `true` and `false`. Text that a spreadsheet would execute as a formula gets an apostrophe in front.
    """
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def request_rows(records: Sequence[Record], traffic: Sequence[TrafficFacts] = ()) -> Iterator[Row]:
    """Yield one row of the exported table `requests` for each Record. The rows contain None instead of empty strings.

    `traffic` contains the classes of traffic of the run.
    """
    frame = build_frame(records)
    classes = class_indices(frame.id, traffic) if traffic else frame.id
    latencies = {}
    for name, metric in METRICS.items():
        if metric.per == "request":
            column = metric.rows(frame)
            defined = frame.complete & ~np.isnan(column)
            latencies[name] = [value if known else None for value, known in zip(column.tolist(), defined, strict=True)]
    for index, record in enumerate(records):
        values: dict[str, Any] = {
            **{name: column[index] for name, column in latencies.items()},
            "request": record.id,
            "class": traffic[classes[index]].name if traffic else None,
            "turn": None if record.session is None else record.turn,
            "first_token_ns": record.chunk_ns[0] if record.chunk_ns else None,
            "last_token_ns": record.chunk_ns[-1] if record.chunk_ns else None,
            "chunks": len(record.chunk_ns),
            "chunk_tokens": sum(record.chunk_tokens),
            "marks": json.dumps(record.marks) if record.marks else None,
            "parents": msgspec.json.encode(record.parents).decode() if record.parents else None,
            "tool_ns": record.tool_ns or None,
        }
        row = (values[name] if name in values else getattr(record, name) for name, *_ in REQUESTS)
        yield tuple(None if value == "" else value for value in row)


def chunk_rows(record: Record) -> Iterator[Row]:
    """Yield one row of the `chunks` table for each chunk of the Record."""
    token, previous_ns = 1, None
    for number, (at_ns, tokens) in enumerate(zip(record.chunk_ns, record.chunk_tokens, strict=True), 1):
        yield record.id, number, token, tokens, at_ns, None if previous_ns is None else at_ns - previous_ns
        token += tokens
        previous_ns = at_ns


def telemetry_rows(sample: Telemetry) -> Iterator[Row]:
    """Yield one row of the `telemetry` table for each figure of the sample."""
    for name, value in _flatten("", unpack_values(sample.values)):
        number, text = (float(value), None) if isinstance(value, int | float) else (None, str(value))
        yield sample.source, sample.worker, sample.at_ns, name, number, text


def run_row(run: Run, window: Window | None) -> Row:
    """Return the single row of the table `run`: facts about the run, its server and its measurement window.

    `window` is None if the run has no measurement window.
    """
    header, footer = run.header, run.footer
    server = server_info(run)
    folder = run.path.resolve().parent.name
    from_ns, to_ns = None, None
    if window is not None and window.chosen != "whole":
        from_ns, to_ns = round(window.from_ns), round(window.to_ns)
    footer_text = None
    if footer is not None:
        footer_text = json.dumps({name: value for name, value in asdict(footer).items() if value is not None})
    values = {
        "run": folder,
        "label": header.plan.get("label") or folder,
        "server": server.name,
        "server_version": server.version,
        "model": server.model,
        "platform": server.platform or None,
        "simulated": server.simulated,
        "speed": server.speed,
        "started_at": header.started_at,
        "start_ns": header.start_ns,
        "start_realtime_ns": header.start_realtime_ns,
        "window_from_ns": from_ns,
        "window_to_ns": to_ns,
        "interrupted": footer is None or footer.interrupted,
        "damaged_lines": run.damaged_lines,
        "version": header.version,
        "command": json.dumps(header.command),
        "plan": json.dumps(header.plan),
        "server_facts": json.dumps(header.server),
        "host": json.dumps(header.host),
        "client": json.dumps(header.client),
        "footer": footer_text,
    }
    return tuple(values[column.name] for column in RUN)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of a nested value, without leaves that are None.

    `name` is the path of the nested value. The keys of a path are joined by dots.
    """
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flatten(f"{name}.{key}" if name else str(key), part)
    elif value is not None:
        yield name, value
