"""Reads the traces of Mooncake and Qwen-Bailian, in which each line is one request.

    Mooncake      kvcache-ai/Mooncake, FAST25-release/README.md: `timestamp` in ms, `input_length`, `output_length`, and
                  `hash_ids` of blocks of 512 tokens. `session_id` and `delay` (ms after the previous response) are
                  fields of AIPerf's Mooncake traces (ai-dynamo/aiperf, docs/benchmark-modes/trace-replay.md).
    Qwen-Bailian  alibaba-edu/qwen-bailian-usagetraces-anon, README.md: `timestamp` in seconds, `chat_id`,
                  `parent_chat_id` (-1 for the first request of a chat), and `hash_ids` of blocks of 16 tokens.

Each prompt is complete: its length and its block ids include the conversation so far.

A request may follow an earlier request, its parent:

- Mooncake: the parent is the previous request with the same `session_id`.
- Qwen-Bailian: the parent is the request whose `chat_id` is the `parent_chat_id` of this request.

No request starts before the response to its parent has ended:

- A request with a `delay` is due this time after the end of that response.
- A request with a `timestamp` is due as long after the start of its parent as in the trace. If the response takes
  longer than this time, the request is due when the response has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.datasets import LINE_HINT
from loadgen.workloads.session_formats.rows import (
    Options,
    RowStore,
    block_spans,
    decode_row,
    file_lines,
    nanoseconds,
    row_store,
    tokens,
)
from loadgen.workloads.session_graph import After, DraftNode, TraceSession, graph_of
from loadgen.workloads.spec_syntax import NS_PER_S, WorkloadError
from loadgen.workloads.traces import BAILIAN_BLOCK_TOKENS, CHECKED_ROWS, MOONCAKE_BLOCK_TOKENS, UNITS_NS, check_unit

MIN_CHECKED_ROWS = 10
"""Minimum number of timestamps from which the unit of a file is checked."""


class MooncakeRow(msgspec.Struct):
    """One request of a Mooncake trace.

    The first row of a session has a timestamp. Each later row has a timestamp or a delay.
    """

    input_length: int
    output_length: int
    session_id: str | int | None = None
    timestamp: float | None = None
    delay: float | None = None
    hash_ids: list[int] = []


class BailianRow(msgspec.Struct):
    """One request of a Qwen-Bailian trace."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


MOONCAKE_ROW = msgspec.json.Decoder(MooncakeRow)
BAILIAN_ROW = msgspec.json.Decoder(BailianRow)


def mooncake(path: Path, options: Options) -> Iterator[TraceSession]:
    """Yield the sessions of a Mooncake trace, in the order of their first rows.

    All rows with the same `session_id` form a session. A row without `session_id` forms a session by itself. Raises
    WorkloadError for an invalid line.
    """
    with row_store() as store:
        last_ms = 0.0
        timestamps: list[float] = []
        for line, text in file_lines(path):
            row = decode_row(text, MOONCAKE_ROW, path, line)
            if row.timestamp is not None:
                if row.timestamp < last_ms:
                    raise _unsorted(path, line)
                last_ms = row.timestamp
                if len(timestamps) < CHECKED_ROWS:
                    timestamps.append(last_ms)
            name = f"row {line}"
            store.add(line, name if row.session_id is None else f"session {row.session_id}", name, text)
        if options.unit is None and len(timestamps) >= MIN_CHECKED_ROWS:
            check_unit(timestamps, "ms", "Mooncake", path, "sessions")
        for session, found in store.sessions():
            yield _mooncake_session(session, found, path, options)


def _mooncake_session(session: str, found: list[tuple[int, str]], path: Path, options: Options) -> TraceSession:
    drafts: list[DraftNode] = []
    start_ns = before_ns = 0
    per_second = NS_PER_S // UNITS_NS[options.unit or "ms"]
    for line, text in found:
        row = decode_row(text, MOONCAKE_ROW, path, line)
        where = f"{path}, line {line}"
        at_ns = None if row.timestamp is None else nanoseconds(row.timestamp, per_second, "timestamp", where)
        after: list[tuple[str, After, int]] = []
        if drafts:
            parent = drafts[-1].id
            if row.delay is not None:
                after = [(parent, "end", nanoseconds(row.delay, per_second, "delay", where))]
                at_ns = before_ns  # a later row with a timestamp cannot refer to this one's, which is unknown
            elif at_ns is not None:
                after = [(parent, "start", at_ns - before_ns), (parent, "end", 0)]
            else:
                raise WorkloadError(f"{where}: has neither a timestamp nor a delay", "add one of them, in ms")
        else:
            start_ns = at_ns or 0
        before_ns = start_ns if at_ns is None else at_ns
        block_tokens = options.block_tokens or MOONCAKE_BLOCK_TOKENS
        drafts.append(_draft(f"{len(drafts)}", after, line, row, block_tokens, where))
    return graph_of(session, start_ns, drafts, path)


def bailian(path: Path, options: Options) -> Iterator[TraceSession]:
    """Yield the chats of a Qwen-Bailian trace in order of their first requests.

    A chat is a tree of requests, in which each request names its parent. Raises WorkloadError for an invalid line, and
    for a request whose parent does not precede it in the file.
    """
    with row_store() as store:
        last_s = 0.0
        timestamps: list[float] = []
        for line, text in file_lines(path):
            row = decode_row(text, BAILIAN_ROW, path, line)
            if row.timestamp < last_s:
                raise _unsorted(path, line)
            last_s = row.timestamp
            if len(timestamps) < CHECKED_ROWS:
                timestamps.append(last_s)
            _add_chat(store, row, line, text, path, options)
        if options.unit is None and len(timestamps) >= MIN_CHECKED_ROWS:
            check_unit(timestamps, "s", "Qwen-Bailian", path, "sessions")
        for session, found in store.sessions():
            decoded = [(line, decode_row(text, BAILIAN_ROW, path, line)) for line, text in found]
            yield _chat(session, decoded, path, options)


def _add_chat(store: RowStore, row: BailianRow, line: int, text: str, path: Path, options: Options) -> None:
    session: str | None = f"chat {row.chat_id}"
    if row.parent_chat_id != -1:
        parent_session = store.session_of(str(row.parent_chat_id))
        if parent_session is None and not options.orphans:
            raise WorkloadError(
                f"{path}, line {line}: chat {row.chat_id} follows chat {row.parent_chat_id}, which no line above has",
                "add the missing request, or write orphans=yes after the file's name to start a chat with this one",
            )
        session = parent_session or session
    if not store.add(line, str(session), str(row.chat_id), text):
        raise WorkloadError(f"{path}, line {line}: chat_id {row.chat_id} occurs twice", LINE_HINT)


def _chat(session: str, found: list[tuple[int, BailianRow]], path: Path, options: Options) -> TraceSession:
    times_ns: dict[int, int] = {}
    per_second = NS_PER_S // UNITS_NS[options.unit or "s"]
    drafts: list[DraftNode] = []
    for line, row in found:
        where = f"{path}, line {line}"
        at_ns = times_ns[row.chat_id] = nanoseconds(row.timestamp, per_second, "timestamp", where)
        after: list[tuple[str, After, int]] = []
        if row.parent_chat_id in times_ns and drafts:
            parent = str(row.parent_chat_id)
            after = [(parent, "start", at_ns - times_ns[row.parent_chat_id]), (parent, "end", 0)]
        block_tokens = options.block_tokens or BAILIAN_BLOCK_TOKENS
        drafts.append(_draft(str(row.chat_id), after, line, row, block_tokens, where))
    start_ns = min(times_ns.values())
    return graph_of(session, start_ns, drafts, path)


def _draft(
    name: str, after: list[Any], line: int, row: MooncakeRow | BailianRow, block_tokens: int, where: str
) -> DraftNode:
    input_tokens = tokens(row.input_length, "input_length", where)
    return DraftNode(
        id=name,
        after=after,
        line=line,
        input_tokens=input_tokens,
        output_tokens=tokens(row.output_length, "output_length", where),
        spans=block_spans(row.hash_ids, input_tokens, block_tokens, where),
    )


def _unsorted(path: Path, line: int) -> WorkloadError:
    return WorkloadError(
        f"{path}, line {line}: its time is before the time of the line above", "sort the trace by time"
    )
