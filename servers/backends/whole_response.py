"""Decodes generated responses that arrive in one piece, as one JSON object instead of a stream.

The token counts come from the server. A response in one piece has no chunks, so it has no time to first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgen.servers.backends.dialect import Answer
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.stream_events import finalise, note_error, note_finish
from loadgen.servers.errors import DECODE_ERRORS

PROMPT_FIELDS = ("prompt_tokens", "input_tokens")
OUTPUT_FIELDS = ("completion_tokens", "output_tokens", "generated_tokens", "count_output_tokens")
COUNT_OBJECTS = ("usage", "details", "meta_info")
"""Objects of a response that hold token counts: of the OpenAI and Anthropic APIs, of TGI, and of SGLang. LightLLM has
the counts at the top level."""
TOKENS_MAX = 10_000_000


def decode(payloads: Sequence[bytes]) -> Answer:
    """Decode a response that consists of one JSON object.

    The Answer has the token counts that the server reported. Its events have no tokens, because nothing was streamed.
    """
    answer = Answer([0] * len(payloads))
    total: int | None = None
    broken = ""
    for index, payload in enumerate(payloads):
        response = _read(payload)
        if response is None:
            broken = one_line(f"the response is not a JSON object: {payload[:100]!r}")
            break
        note_error(answer, payload)
        counts = _counts(response)
        answer.prompt_tokens = _first_count(counts, PROMPT_FIELDS)
        total = _first_count(counts, OUTPUT_FIELDS)
        reason = _finish_reason(response)
        if reason:
            note_finish(answer, reason, payload)
        if not answer.error_kind:
            answer.end_event = index
    return finalise(answer, total, broken)


def text(payloads: Sequence[bytes]) -> str:
    """Return the generated text of a response, without reasoning and tool calls."""
    response = _read(payloads[0]) if payloads else None
    if response is None:
        return ""
    choice = _first(response.get("choices"))
    message = choice.get("message") or {}
    parts = [choice.get("text"), message.get("content") if isinstance(message, Mapping) else None]
    parts += [response.get("generated_text"), response.get("text"), response.get("output_text")]
    content = response.get("content")
    parts += [part.get("text") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return "".join(part for part in parts if isinstance(part, str))


def _read(payload: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a response, or None if the response contains no JSON object.

    If the response is a list, its first element is used.
    """
    try:
        value = msgspec.json.decode(payload)
    except DECODE_ERRORS:
        return None
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else None


def _first(value: Any) -> Mapping[str, Any]:
    """Return the first object of a list, or an empty mapping if there is none."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], Mapping) else {}


def _counts(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of `response` that contains the token counts, such as its object `usage`.

    If `response` has none of the objects in COUNT_OBJECTS, its counts are at the top level, and the result is
    `response`.
    """
    objects = (response.get(name) for name in COUNT_OBJECTS)
    return next((value for value in objects if isinstance(value, Mapping)), response)


def _first_count(counts: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first valid count under one of `names` in `counts`, or None if there is none."""
    values = (counts.get(name) for name in names)
    return next((value for value in values if type(value) is int and 0 <= value <= TOKENS_MAX), None)


def _finish_reason(response: Mapping[str, Any]) -> str:
    """Return the reason why the response ended, or an empty text if the response states none."""
    reasons = [_first(response.get("choices")).get("finish_reason"), response.get("stop_reason")]
    for name in COUNT_OBJECTS:
        inner = response.get(name)
        reason = inner.get("finish_reason") if isinstance(inner, Mapping) else None
        reasons.append(reason.get("type") if isinstance(reason, Mapping) else reason)
    reasons.append(response.get("finish_reason"))
    return next((reason for reason in reasons if isinstance(reason, str)), "")
