"""The tables that a Run is exported to: their columns, and how a row of each comes from the run file's lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from loadgen.record import Record
from loadgen.runfile import Run, Telemetry

Row = tuple[Any, ...]


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
    Column("state", "string", "`complete`, `truncated`, `failed` or `dropped`."),
    Column("worker", "int64", "The process that sent it."),
    Column("session", "int64", "Id of the first turn of its session; null for a request on its own."),
    Column("turn", "int64", "Which turn of its session, from 0; null for a request on its own."),
    _instant("due_ns", "When it was to leave"),
    _instant("connected_ns", "When its connection was there"),
    _instant("sent_ns", "Right before its first byte was sent"),
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
    Column("counted_by", "string", "`server`, `wire` or `tokenizer`."),
    Column("ttft_s", "float64", "Time to first token, from sent; complete requests only, as the next four."),
    Column("ttft_due_s", "float64", "The same from due."),
    Column("tpot_s", "float64", "Time per output token after the first chunk."),
    Column("e2e_s", "float64", "From sent to the last token."),
    Column("e2e_due_s", "float64", "From due to the last token."),
    Column("http_status", "int64", "Status of the answer."),
    Column("finish_reason", "string", "In the server's words."),
    Column("error_kind", "string", "Why it is not complete."),
    Column("error_detail", "string", "The same in words, the server's own where it said something."),
    Column("stamps", "string", "Who stamped its tokens: `kernel` or `user`."),
    Column("late_ns_max", "int64", "Largest delay between the kernel's stamp and this program's reading, nanoseconds."),
    Column("reads", "int64", "Reads that its answer took."),
    Column("coalesced_reads", "int64", "Reads that held more than one event."),
    Column("first_token_merged", "bool", "Its first token came together with later ones: TTFT is an upper bound."),
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
TABLES: Mapping[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "chunks": CHUNKS,
    "telemetry": TELEMETRY,
    "run": RUN,
}
MEANINGS = {
    "requests": "One row per request, warm-up included, in the order of the run file.",
    "chunks": "One row per chunk of every request, in the same order.",
    "telemetry": "One row per figure of each sample.",
    "run": "One row.",
}


def request_row(record: Record) -> Row:
    """A Record as a row of `requests`; figures as analysis.metrics defines them."""
    first = record.chunk_ns[0] if record.chunk_ns else None
    last = record.chunk_ns[-1] if record.chunk_ns else None
    arrived = sum(record.chunk_tokens)
    derived = {"first_token_ns": first, "last_token_ns": last, "chunks": len(record.chunk_ns), "chunk_tokens": arrived}
    values = derived | _latencies(record, first, last, arrived) | {"request": record.id}
    values["turn"] = None if record.session is None else record.turn
    return tuple(values[column.name] if column.name in values else _said(record, column) for column in REQUESTS)


def chunk_rows(record: Record) -> Iterator[Row]:
    """The Record's chunks as rows of `chunks`."""
    token, before = 1, None
    for place, (at_ns, tokens) in enumerate(zip(record.chunk_ns, record.chunk_tokens, strict=True), 1):
        yield record.id, place, token, tokens, at_ns, None if before is None else at_ns - before
        token, before = token + tokens, at_ns


def telemetry_rows(sample: Telemetry) -> Iterator[Row]:
    """Each figure of the sample as a row of `telemetry`."""
    for name, value in _flat("", sample.values):
        number = float(value) if isinstance(value, int | float) else None
        text = value if number is None else None
        yield sample.source, sample.worker, sample.at_ns, name, number, None if text is None else str(text)


def run_row(run: Run, window_ns: tuple[int, int] | None) -> Row:
    """The row of `run`."""
    header, footer = run.header, run.footer
    server, folder = header.server, run.path.resolve().parent.name
    return (
        folder,
        header.plan.get("label") or folder,
        server.get("name") or header.plan.get("server"),
        server.get("version"),
        server.get("model"),
        header.plan.get("platform") or None,
        bool(server.get("simulated", False)),
        header.started_at,
        header.start_ns,
        header.start_realtime_ns,
        *(window_ns or (None, None)),
        footer is None or footer.interrupted,
        run.damaged_lines,
        header.version,
        *(json.dumps(part) for part in (header.command, header.plan, server, header.host, header.client)),
        None if footer is None else json.dumps({name: getattr(footer, name) for name in footer.__struct_fields__}),
    )


def _said(record: Record, column: Column) -> Any:
    """As the Record has it; an empty text is one that was never said."""
    value = getattr(record, column.name)
    return None if value == "" else value


def _latencies(record: Record, first: int | None, last: int | None, arrived: int) -> dict[str, float | None]:
    sent, names = record.sent_ns, ("ttft_s", "ttft_due_s", "tpot_s", "e2e_s", "e2e_due_s")
    if record.state != "complete" or sent is None or first is None or last is None:
        return dict.fromkeys(names)
    tokens = arrived if record.output_tokens is None else record.output_tokens
    later = tokens - record.chunk_tokens[0]
    per_token = (last - first) / later if later > 0 else None
    spans = (first - sent, first - record.due_ns, per_token, last - sent, last - record.due_ns)
    return {name: None if span is None else span / 1e9 for name, span in zip(names, spans, strict=True)}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    elif value is not None:
        yield name, value
