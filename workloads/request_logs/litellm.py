"""Reads request logs of LiteLLM: JSON Lines, or a JSON array.

Two forms exist (https://docs.litellm.ai/docs/proxy/logging_spec, and the table LiteLLM_SpendLogs of its database):

    StandardLoggingPayload   `startTime` in seconds since 1970, `trace_id`, `messages`, `response`. Callbacks for S3,
                             GCS and others write one object per request.
    spend logs               `startTime` as text (ISO 8601), `session_id`, `request_id`. Messages are stored only if
                             `store_prompts_in_spend_logs` is set.

Both forms have `prompt_tokens`, `completion_tokens`, `model`, `call_type` and `status`. Failed requests, responses from
LiteLLM's cache and calls that generate no text are left out, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec

from loadgen.workloads.datasets import LINE_HINT, elements
from loadgen.workloads.request_logs.logged import LoggedRequest, LogNotes, PromptContent
from loadgen.workloads.request_logs.prompt_text import output_of, prompt_of
from loadgen.workloads.spec_syntax import NS_PER_S, TOKENS_LIMIT, WorkloadError
from loadgen.workloads.traces import parse_date

TEXT_CALLS = {"completion", "text_completion", "responses", "anthropic_messages", "generate_content", ""}
"""Values of `call_type` without a leading `a` (asynchronous), for calls whose responses are generated text."""
SECONDS_LIMIT = 1e11
"""A time in seconds since 1970 is below this limit. A time in milliseconds is above it."""
REDACTED = "redacted-by-litellm"
TRUNCATED = "litellm_truncated"
FAILED = "failed requests"
CACHED = "responses from LiteLLM's cache, which no server computed"
NO_TEXT_CALL = "calls that generate no text, such as embeddings"
EMPTY = "requests with neither a prompt nor its length"
CUT = "prompts that LiteLLM has cut before it stored them: beginnings that they share end there"

Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_LIMIT)]


class LiteLlmRow(msgspec.Struct):
    """One request of a LiteLLM log. LiteLLM has two log forms, and this class contains the fields of both.

    All other fields of the log are ignored.
    """

    startTime: float | str  # noqa: N815 - LiteLLM's name
    endTime: float | str | None = None  # noqa: N815 - LiteLLM's name
    id: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    trace_id: str | None = None
    call_type: str | None = ""
    status: str | None = ""
    cache_hit: bool | str | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    model: str | None = ""
    model_group: str | None = ""
    messages: Any = None
    response: Any = None
    proxy_server_request: Any = None
    model_parameters: Any = None


def read(path: Path, notes: LogNotes) -> Iterator[LoggedRequest]:
    """Yield the requests of a log. Raises WorkloadError for an invalid line or element."""
    numbers = count(1)

    def convert(item: Any) -> LoggedRequest | None:
        number = next(numbers)
        if not isinstance(item, Mapping):
            raise WorkloadError("is no JSON object", LINE_HINT)
        try:
            row = msgspec.convert(item, LiteLlmRow)
        except msgspec.ValidationError as error:
            raise WorkloadError(f"has a wrong field: {str(error).replace('$.', '')[:200]}", LINE_HINT) from None
        reason = _reason_to_leave_out(row)
        if reason:
            notes.left_out[reason] += 1
            return None
        return _request(row, f"{path}, entry {number}", notes)

    yield from elements(path, convert, "the log", LINE_HINT)


def _reason_to_leave_out(row: LiteLlmRow) -> str:
    """Return the reason why a request is not replayed, or an empty string if the request is replayed."""
    call = (row.call_type or "").split(".")[-1]
    if call not in TEXT_CALLS and call.removeprefix("a") not in TEXT_CALLS:
        return NO_TEXT_CALL
    if row.status == "failure":
        return FAILED
    if row.cache_hit is True or str(row.cache_hit).lower() == "true":
        return CACHED
    return ""


def _request(row: LiteLlmRow, where: str, notes: LogNotes) -> LoggedRequest | None:
    start_ns = _time_ns(row.startTime, "startTime")
    end_ns = None if row.endTime is None else _time_ns(row.endTime, "endTime")
    if end_ns is not None and end_ns < start_ns:
        raise WorkloadError("its endTime is before its startTime", LINE_HINT)
    prompt = _prompt(row, notes)
    if prompt is None and not row.prompt_tokens:
        notes.left_out[EMPTY] += 1
        return None
    return LoggedRequest(
        name=row.request_id or row.id or where,
        where=where,
        session=row.session_id or row.trace_id,
        start_ns=start_ns,
        end_ns=end_ns,
        prompt=prompt,
        input_tokens=row.prompt_tokens or None,
        output=None if row.completion_tokens else output_of(_decoded(row.response), notes),
        output_tokens=row.completion_tokens or None,
        model=row.model_group or row.model or "",
    )


def _time_ns(value: float | str, name: str) -> int:
    """Convert `value`, a time in a log, to ns since 1970. The value is a number of seconds since 1970 or an ISO 8601
    date.

    Raises WorkloadError for any other value. `name` is the name of the field in the error message.
    """
    if isinstance(value, str):
        try:
            return parse_date(value)
        except ValueError:
            raise WorkloadError(
                f"its {name} {value[:40]!r} is no time", "write seconds since 1970, or 2026-01-31T12:00:00.123Z"
            ) from None
    if not 0 <= value < SECONDS_LIMIT:
        raise WorkloadError(
            f"its {name} {value} is no time in seconds since 1970",
            "convert milliseconds first: jq -c '.startTime /= 1000 | .endTime /= 1000' FILE",
        )
    return round(value * NS_PER_S)


def _prompt(row: LiteLlmRow, notes: LogNotes) -> PromptContent | None:
    """Return the prompt that the log has stored, or None if it has stored none."""
    body = _decoded(row.messages) or _decoded(row.proxy_server_request)
    if isinstance(body, Mapping) and isinstance(body.get("body"), Mapping):
        body = body["body"]
    if isinstance(body, str):
        body = {"prompt": body}
    elif isinstance(body, list):
        is_chat = all(isinstance(item, Mapping) for item in body)
        body = {"messages" if is_chat else "prompt": body}
    if not isinstance(body, Mapping):
        return None
    parameters = _decoded(row.model_parameters)
    if isinstance(parameters, Mapping) and parameters.get("tools") and not body.get("tools"):
        body = {**body, "tools": parameters["tools"]}
    prompt = prompt_of(body, notes)
    if isinstance(prompt, str):
        if REDACTED in prompt:
            return None
        if TRUNCATED in prompt:
            notes.remarks[CUT] += 1
            prompt = prompt[: prompt.index(TRUNCATED)]
    return prompt


def _decoded(value: Any) -> Any:
    """Return a value of the log. JSON that is stored as text is decoded. An empty object counts as missing."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value or None
