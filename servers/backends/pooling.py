"""Dialects (request and response formats) for the embeddings and rerank endpoints of OpenAI-style servers.

The server sends one JSON response per request and generates no tokens:

    embeddings  POST /v1/embeddings  {"model", "input"}                -> {"data": [...], "usage": {...}}
    rerank      POST /v1/rerank      {"model", "query", "documents"}   -> {"results": [...], "usage": {...}}

For rerank, the prompt is split in two: its first words are the query, and the remaining text is the only document. If
the user's request fields contain `documents`, the whole prompt is the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from loadgen.servers.backends.dialect import Answer, Dialect, Route, TokenCount, encode_body
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.stream_events import decode_events, finalise, note_error
from loadgen.workloads.request import Request

PATHS = {"embeddings": "/v1/embeddings", "rerank": "/v1/rerank"}
QUERY_WORDS = 8


class PoolingUsage(msgspec.Struct, gc=False):
    """The `usage` object of an embeddings or rerank response.

    Some servers report only the total, which equals the number of prompt tokens because nothing is generated."""

    prompt_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None


class PoolingAnswer(msgspec.Struct, gc=False):
    """An embeddings or rerank response.

    `data` holds embeddings, `results` holds rerank scores. Their content is not decoded."""

    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    usage: PoolingUsage | None = None


_ANSWERS = msgspec.json.Decoder(PoolingAnswer)


def decode(payloads: Sequence[bytes]) -> Answer:
    """Decode an embeddings or rerank response, which consists of one payload."""
    events, broken = decode_events(payloads, _ANSWERS)
    answer = Answer([0] * len(payloads))
    for index, event in enumerate(events):
        usage = event.usage or PoolingUsage()
        answer.prompt_tokens = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        if event.data or event.results:
            answer.end_event = index
            continue
        note_error(answer, payloads[index])
        if not answer.error_kind:
            content = payloads[index].decode("utf-8", "replace")
            answer.error_kind = "protocol"
            answer.error_detail = one_line(f"neither embeddings nor scores: {content}")
    return finalise(answer, 0, broken)


def pooling_dialect(server: str, endpoint: str, **others: Any) -> Dialect:
    """Return the dialect (the request and response format) of a server for the endpoint `embeddings` or `rerank`.

    `others` are further fields of Dialect."""
    fields = partial(_fields, endpoint)
    return Dialect(
        server,
        endpoint,
        PATHS[endpoint],
        encode=lambda request, model: encode_body(_body(fields, request, model), request),
        decode=decode,
        text=lambda _: "",
        count_by_running=Route(PATHS[endpoint], fields, _prompt_tokens, generates=True),
        streams=False,
        **others,
    )


def _body(fields: Any, request: Request, model: str) -> dict[str, Any]:
    if "documents" in request.body:
        return {"model": model, "query": request.prompt}
    result: dict[str, Any] = fields(request.prompt, model)
    return result


def _fields(endpoint: str, prompt: str | Sequence[int], model: str) -> dict[str, Any]:
    if endpoint == "embeddings":
        return {"model": model, "input": prompt}
    assert isinstance(prompt, str), "rerank takes text"
    words = prompt.split(" ")
    query = " ".join(words[: max(1, min(QUERY_WORDS, len(words) // 2))])
    # The document keeps the space before it, so that both parts together have as many tokens as the whole text.
    return {"model": model, "query": query, "documents": [prompt[len(query) :]]}


def _prompt_tokens(answer: Any) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["total_tokens"])
