"""The formats of session files: a table of loaders, and the recognition of a file's format by its first line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.workloads.json_values import check_file_text
from loadgen.workloads.session_formats import aiperf_dag, flat, opentelemetry, own, weka
from loadgen.workloads.session_formats.rows import Options, file_lines
from loadgen.workloads.session_graph import TraceSession
from loadgen.workloads.spec_syntax import WorkloadError


class SessionFormat(NamedTuple):
    """A format of session files."""

    title: str
    fields: frozenset[str]
    """Fields of the first line by which the format is recognised."""
    sessions: Callable[[Path, Options], Iterator[TraceSession]]
    has_messages: bool = False
    """True if requests contain chat messages, or continue the conversation with the server's answers."""


FORMATS: dict[str, SessionFormat] = {
    "sessions": SessionFormat("loadgen sessions", frozenset(("session", "nodes")), own.sessions, has_messages=True),
    "bailian": SessionFormat("Qwen-Bailian", frozenset(("chat_id", "parent_chat_id")), flat.bailian),
    "weka": SessionFormat("WEKA agent traces", frozenset(("id", "requests")), weka.sessions),
    "aiperf-dag": SessionFormat(
        "AIPerf DAG", frozenset(("session_id", "turns")), aiperf_dag.sessions, has_messages=True
    ),
    "opentelemetry": SessionFormat(
        "OpenTelemetry spans", frozenset(("resourceSpans",)), opentelemetry.sessions, has_messages=True
    ),
    "mooncake": SessionFormat("Mooncake", frozenset(("input_length", "output_length")), flat.mooncake),
}
"""Formats by the name that `format=` takes. Of several formats that fit a file, the first one counts."""


def recognise(path: Path) -> str:
    """Return the name of a file's format, a key of FORMATS. Raises WorkloadError if no format fits its first line."""
    line, text = next(file_lines(path), (1, ""))
    hint = f"name the format, such as format=mooncake, or use one of: {', '.join(FORMATS)}"
    try:
        check_file_text(text)
        first = msgspec.json.decode(text)
    except WorkloadError as error:
        raise WorkloadError(f"{path}, line {line}: {error}", error.hint) from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "the file is empty" if not text else f"is not JSON: {error}"
        raise WorkloadError(f"{path}, line {line}: {reason}", hint) from None
    fields = set(first) if isinstance(first, dict) else set()
    name = next((name for name, known in FORMATS.items() if known.fields <= fields), None)
    if name is None:
        names = ", ".join(sorted(map(repr, fields))) or "no fields"
        raise WorkloadError(f"{path}, line {line}: has no known format of sessions: it has {names[:200]}", hint)
    return name
