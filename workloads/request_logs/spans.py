"""Reads OpenTelemetry spans as a request log, with the parser of loadgen.workloads.session_formats.opentelemetry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes
from loadgen.workloads.request_logs.prompt_text import prompt_of
from loadgen.workloads.session_formats.opentelemetry import recorded_sessions

NO_REQUEST = "spans that are no request to a model"


def read(path: Path, notes: LogNotes) -> Iterator[LoggedRequest]:
    """Yield the model requests in a file of spans. Raises WorkloadError for an invalid span."""
    others: Counter[str] = Counter()
    for session, calls in recorded_sessions(path, others):
        for span, draft in calls:
            body: dict[str, Any] = {"messages": list(draft.messages), **draft.body}
            yield LoggedRequest(
                name=span.id,
                where=f"{path}, line {span.line}, span {span.id}",
                session=session,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                prompt=prompt_of(body, notes) if draft.messages else None,
                input_tokens=span.input_tokens or None,
                output_tokens=span.output_tokens or None,
                model=span.model,
                after=tuple(draft.after),
                branch=span.agent,
                role=draft.role,
                tool_ns=draft.tool_ns,
            )
    if others:
        notes.left_out[NO_REQUEST] += others.total()
