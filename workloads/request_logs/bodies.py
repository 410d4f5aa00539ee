"""Reads a file of request bodies as a request log.

The file has the format of the workload `requests:FILE`, or of OpenAI's batch API.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadgen.workloads import raw_requests
from loadgen.workloads.datasets import LINE_HINT, error_location
from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes
from loadgen.workloads.request_logs.prompt_text import prompt_of

OTHER_ROUTES = {
    "embeddings",
    "embed",
    "rerank",
    "score",
    "classify",
    "predict",
    "pooling",
    "tokenize",
    "detokenize",
    "moderations",
    "generations",
    "transcriptions",
    "translations",
    "speech",
}
"""Last parts of paths whose responses are not generated text."""
NO_TEXT_GENERATED = "requests to routes that generate no text, such as embeddings"
NO_PROMPT = "requests without a prompt"
MAXIMUM = "responses: their length is the maximum that the request states"


def read(path: Path, notes: LogNotes) -> Iterator[LoggedRequest]:
    """Yield the requests of a file. Raises WorkloadError for an invalid line."""
    for entry in raw_requests.read(path):
        if entry.request.path.rpartition("/")[2] in OTHER_ROUTES:
            notes.left_out[NO_TEXT_GENERATED] += 1
            continue
        where = f"{path}, line {entry.line}"
        with error_location(where, LINE_HINT):
            prompt = prompt_of(msgspec.json.decode(entry.request.raw), notes)
        if prompt is None:
            notes.left_out[NO_PROMPT] += 1
            continue
        output_tokens = entry.request.output_tokens or None
        if output_tokens:
            notes.remarks[MAXIMUM] += 1
        yield LoggedRequest(
            name=where,
            where=where,
            session=None if entry.session is None else f"{entry.session}",
            start_ns=entry.at_ns,
            prompt=prompt,
            output_tokens=output_tokens,
            model=entry.request.model,
        )
