"""Readers of request logs, in which a server or gateway has recorded the requests of its users.

`loadgen anonymise` turns such a log into a trace without text. Each reader yields one `LoggedRequest` per request, and
counts the requests that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen.workloads.request_logs import bodies, litellm, spans, vllm
from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes
from loadgen.workloads.session_formats.rows import file_lines
from loadgen.workloads.spec_syntax import WorkloadError


class LogFormat(NamedTuple):
    """A format of request logs."""

    title: str
    fields: tuple[frozenset[str], ...]
    """Sets of fields. A file whose first entry has all fields of one set has this format."""
    read: Callable[[Path, LogNotes], Iterator[LoggedRequest]]


LOG_FORMATS: dict[str, LogFormat] = {
    "opentelemetry": LogFormat("OpenTelemetry spans", (frozenset(("resourceSpans",)),), spans.read),
    "litellm": LogFormat(
        "LiteLLM log",
        (frozenset(("startTime", "call_type")), frozenset(("startTime", "prompt_tokens"))),
        litellm.read,
    ),
    "requests": LogFormat("request bodies", (frozenset(("body",)),), bodies.read),
    "vllm": LogFormat("vLLM log", (), vllm.read),
}
"""Formats by the name that `--format` takes. A file whose first line is not JSON is a vLLM log."""


def recognise_log(path: Path) -> str:
    """Return the name of a log's format, a key of LOG_FORMATS. Raises WorkloadError if no format fits the file."""
    _, text = next(file_lines(path, "the log"), (1, ""))
    if not text:
        raise WorkloadError(f"{path}: the file is empty", "name a log that has requests")
    start = text.lstrip("\ufeff").lstrip()
    if not start.startswith(("{", "[{", "[\n", "[\r")) and start.strip() != "[":
        return "vllm"
    fields = _first_fields(path, start)
    for name, known in LOG_FORMATS.items():
        if any(needed <= fields for needed in known.fields):
            return name
    names = ", ".join(sorted(map(repr, fields))) or "no fields"
    raise WorkloadError(
        f"{path}: its first entry has {names[:200]}, which no known format of logs has",
        f"name the format with --format: {', '.join(LOG_FORMATS)}",
    )


def _first_fields(path: Path, start: str) -> set[str]:
    """Return the field names of the first entry in a JSON Lines file or in a file with a JSON array.

    `start` is the first line of the file.
    """
    from loadgen.workloads.datasets import elements

    if start.startswith("["):
        first: Any = next(elements(path, lambda item: item, "the log"), None)
    else:
        try:
            first = msgspec.json.decode(start)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WorkloadError(
                f"{path}, line 1: is not JSON: {error}",
                "write one JSON object per line; for a file with one object over several lines: jq -c . FILE",
            ) from None
    return set(first) if isinstance(first, dict) else set()
