"""Dialects (request and response formats) for the pooling endpoints of OpenAI-style servers.

A pooling endpoint returns one result per input, such as an embedding or a score. The server sends one JSON response per
request and generates no tokens:

    embeddings  POST /v1/embeddings  {"model", "input"}                -> {"data": [...], "usage": {...}}
    classify    POST /classify       {"model", "input"}                -> {"data": [...], "usage": {...}}
    rerank      POST /v1/rerank      {"model", "query", "documents"}   -> {"results": [...], "usage": {...}}
    score       POST /v1/score       {"model", "text_1", "text_2"}     -> {"data": [...], "usage": {...}}

A request may have several inputs. For rerank and score, an input is split in two: its first words are the query, and
the remaining text is a document. All inputs of a request begin with the same query. If the user's request fields
contain the documents, the whole prompt is the query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from loadgen.servers.backends.dialect import Answer, Dialect, Inputs, Route, TokenCount, encode_body
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.stream_events import decode_events, finalise, note_error
from loadgen.workloads.request import Request

PATHS = {
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "classify": "/classify",
}
QUERY_WORDS = 8
"""Number of words of the query. If an input is short, the query has half of its words."""
QUERY_FIELDS = {"rerank": ("query", "documents"), "score": ("text_1", "text_2")}
"""The fields of the query and of the documents, by endpoint. SGLang has other names for `score`."""


class PoolingUsage(msgspec.Struct, gc=False):
    """The `usage` object of a response from a pooling endpoint.

    Some servers report only the total, which equals the number of prompt tokens because nothing is generated."""

    prompt_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None


class PoolingAnswer(msgspec.Struct, gc=False):
    """A response from a pooling endpoint.

    `results` holds rerank scores, `scores` the scores of SGLang, and `data` the results of the other endpoints. Their
    content is not decoded."""

    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    scores: list[msgspec.Raw] | None = None
    usage: PoolingUsage | None = None


_ANSWERS = msgspec.json.Decoder(PoolingAnswer)


def decode(payloads: Sequence[bytes]) -> Answer:
    """Decode the response of a pooling endpoint, such as embeddings or rerank. The response is one payload."""
    events, broken = decode_events(payloads, _ANSWERS)
    answer = Answer([0] * len(payloads))
    for index, event in enumerate(events):
        usage = event.usage or PoolingUsage()
        answer.prompt_tokens = usage.total_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        note_results(answer, event.data or event.results or event.scores or (), index, payloads[index])
    return finalise(answer, 0, broken)


def note_results(answer: Answer, results: Sequence[Any], index: int, payload: bytes) -> None:
    """Store the number of results in the answer, or an error if there are none.

    `payload` is the event with the index `index`."""
    if results:
        answer.end_event = index
        answer.counts["inputs"] = len(results)
        return
    note_error(answer, payload)
    if not answer.error_kind:
        answer.error_kind = "protocol"
        answer.error_detail = one_line(f"neither embeddings nor scores: {payload.decode('utf-8', 'replace')}")


def prompt_tokens(answer: Any) -> int:
    """Return the number of prompt tokens in a decoded response with a `usage` object."""
    usage = answer["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["total_tokens"])


def check_inputs(answer: Answer, request: Request) -> None:
    """Store an error in `answer` if its response has fewer results than `request` has inputs.

    A response may have fewer results if the request contains the user's field `top_n`. It may always have more results,
    because fields that the user added can contain further inputs, which `request.inputs` does not count.

    Before the call, `answer.counts["inputs"]` is the number of results. If `request.inputs` is larger, this function
    stores `request.inputs` there instead.
    """
    results = answer.counts.get("inputs")
    if results is None:
        return
    if results < request.inputs and not request.body.get("top_n"):
        answer.error_kind = "protocol"
        answer.error_detail = (
            f"the response has fewer results than the request has inputs: {results} of {request.inputs}"
        )
    answer.counts["inputs"] = max(results, request.inputs)


class PoolingFormat(NamedTuple):
    """Those parts of the request and response format of a pooling endpoint that differ between servers."""

    path: str
    query_fields: tuple[str, str] | None = None
    """The fields of the query and of the documents. None for an endpoint whose inputs have no query."""
    constants: Mapping[str, Any] = {}
    """Fields with fixed values that the server requires."""
    decode: Callable[[Sequence[bytes]], Answer] = decode
    prompt_tokens: Callable[[Any], int] = prompt_tokens
    """Function that reads the number of prompt tokens from a decoded response."""


def pooling_dialect(server: str, endpoint: str, format_: PoolingFormat | None = None, **others: Any) -> Dialect:
    """Return the dialect (the request and response format) of a server for an endpoint in PATHS.

    By default, the format is that of vLLM. `others` sets further fields of the Dialect.
    """
    used = format_ or PoolingFormat(PATHS[endpoint], QUERY_FIELDS.get(endpoint))
    fields = partial(_fields, used)
    return Dialect(
        server,
        endpoint,
        used.path,
        encode=lambda request, model: encode_body({"model": model, **fields(request)}, request),
        decode=used.decode,
        text=lambda _: "",
        count_by_running=Route(
            used.path,
            lambda text, model: {"model": model, **fields(Request(0, text, 0, 0))},
            used.prompt_tokens,
            generates=True,
        ),
        streams=False,
        complete=check_inputs,
        inputs=inputs_of(endpoint),
        **others,
    )


def inputs_of(endpoint: str) -> Inputs:
    """Return the form of the inputs in a request to a pooling endpoint.

    - `pairs`: one query and several documents.
    - `several`: several independent texts.
    """
    return "pairs" if endpoint in QUERY_FIELDS else "several"


def _fields(format_: PoolingFormat, request: Request) -> dict[str, Any]:
    if format_.query_fields is None:
        return {"input": one_or_all(request), **format_.constants}
    query_field, documents_field = format_.query_fields
    query, documents = query_and_documents(request, documents_field)
    inputs: dict[str, Any] = {query_field: query, documents_field: documents} if documents else {query_field: query}
    return {**inputs, **format_.constants}


def one_or_all(request: Request) -> Any:
    """Return the input of a request, or a list of all inputs if the request has several."""
    return [request.prompt, *request.batch] if request.batch else request.prompt


def query_and_documents(request: Request, documents_field: str) -> tuple[str, list[str]]:
    """Split the inputs of `request` into one query and one document per input. Return the query and the documents.

    All inputs begin with the same words. These words become the query, and the rest of each input becomes a document.
    The query has at least one word, at most QUERY_WORDS words, and at most half of the words of the shortest input.

    If the user has put documents into the field `documents_field` of the request, the prompt is the query, and the list
    of documents is empty.
    """
    texts = [text for text in (request.prompt, *request.batch) if isinstance(text, str)]
    assert len(texts) == 1 + len(request.batch), "queries and documents are text"
    if documents_field in request.body:
        return texts[0], []
    words = [text.split(" ") for text in texts]
    limit = max(1, min(QUERY_WORDS, min(map(len, words)) // 2))
    common = 1
    while common < limit and len({text_words[common] for text_words in words}) == 1:
        common += 1
    query = " ".join(words[0][:common])
    # A document keeps the space before it, so that both parts together have as many tokens as the whole text.
    return query, [text[len(query) :] for text in texts]
