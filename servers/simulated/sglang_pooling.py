"""Routes of a simulated SGLang 0.5.23 that return embeddings, scores or classes. The returned numbers have no meaning.

The real server has the routes for embeddings, reranking and classification only with the option `--is-embedding`. The
simulated server decides by the model's name whether it has this option (see `is_embedding`). Every server has
`/v1/score`.

The sources in SGLang 0.5.23 are serving_embedding.py, serving_rerank.py, serving_score.py and serving_classify.py in
entrypoints/openai.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from loadgen.servers.simulated import protocol, sglang_checks, tokenizer
from loadgen.servers.simulated.pooling import VECTOR, pooled
from loadgen.servers.simulated.protocol import CompletionRequest, Encoding
from loadgen.servers.simulated.state import ServerState

NOT_EMBEDDING = (
    "This model does not appear to be an embedding model by default. Please add `--is-embedding` when launching the "
    "server or try another model."
)
NO_LABELS = "label_token_ids is required for generation (CausalLM) models."
_EMBEDDING_NAME = re.compile("embed|rerank|classif", re.IGNORECASE)


def is_embedding(state: ServerState) -> bool:
    """Return True if the simulated server behaves as with `--is-embedding`. The model's name decides."""
    return _EMBEDDING_NAME.search(state.config.model) is not None


def embeddings(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/embeddings. Raises ErrorReply for an invalid request.

    The field `input` is a text, a list of token ids, or a list of several such inputs.
    """
    counts = _input_counts(state, request)
    data = [{"embedding": VECTOR, "index": index, "object": "embedding"} for index in range(len(counts))]
    answer = {"data": data, "model": state.config.model, "object": "list", "usage": _usage(counts)}
    return pooled(counts, protocol.json_reply(answer | state.mark))


def classify(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/classify. Raises ErrorReply for an invalid request.

    The field `input` is a text, a list of token ids, or a list of several such inputs.
    """
    counts = _input_counts(state, request)
    data = [
        {"index": index, "label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2} for index in range(len(counts))
    ]
    answer = {
        "id": f"classify-{state.mark_word}-{request.index:032x}",
        "object": "list",
        "created": request.created_s,
        "model": state.config.model,
        "data": data,
        "usage": _usage(counts),
    }
    return pooled(counts, protocol.json_reply(answer))


def rerank(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/rerank: the documents, ordered by score, the highest score first.

    The prompt for each document consists of the query and the document. Raises ErrorReply for an invalid request.
    """
    body = request.body
    for name in ("query", "documents"):
        if name not in body:
            raise sglang_checks.missing_field(request.path, name, body)
    query, documents = body["query"], body["documents"]
    if not isinstance(query, str) or not query.strip():
        raise sglang_checks.bad_request(
            "Query cannot be empty or whitespace only" if query else "Query cannot be empty"
        )
    if not isinstance(documents, list) or not documents:
        raise sglang_checks.bad_request("Documents cannot be empty")
    if not all(isinstance(document, str) and document.strip() for document in documents):
        raise sglang_checks.bad_request("Each document must be a non-empty string")
    _check_embedding(state)
    counts = [_text_tokens(state, request, query + document) for document in documents]
    top_n = protocol.integer(body.get("top_n")) or None
    results = []
    for index, (document, tokens) in enumerate(zip(documents, counts, strict=True)):
        shown = {} if body.get("return_documents") is False else {"document": document}
        info = {
            "id": f"{state.mark_word}-{request.index:032x}-{index}",
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": tokens,
            "weight_version": "default",
            "num_retractions": 0,
        }
        results.append({"score": round(1 / (2 + index), 6), **shown, "index": index, "meta_info": info})
    return pooled(counts, protocol.json_reply(results[:top_n]))


def score(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/score. Raises ErrorReply for an invalid request.

    The prompt for each item consists of the query and the item.
    """
    body = request.body
    query = body.get("query") or ""
    items = body.get("items")
    labels = body.get("label_token_ids")
    if not is_embedding(state) and labels is None:
        raise sglang_checks.bad_request(NO_LABELS)
    if items is None:
        raise sglang_checks.bad_request("items must be provided")
    texts = [items] if isinstance(items, str) else items
    if not (isinstance(query, str) and isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise sglang_checks.bad_request("The simulated server takes a query and items of text")
    counts = [_text_tokens(state, request, query + text) for text in texts]
    answer = {
        "scores": [[0.75, 0.25][: len(labels or (0, 1))] for _ in texts],
        "pooled_hidden_states": None,
        "token_logprobs": None,
        "model": body.get("model", "default"),
        "usage": _usage(counts),
        "object": "scoring",
    }
    return pooled(counts, protocol.json_reply(answer | state.mark))


def _input_counts(state: ServerState, request: CompletionRequest) -> list[int]:
    """Return the number of tokens of each input in the field `input`. Raises ErrorReply for an invalid input."""
    if "input" not in request.body:
        raise sglang_checks.missing_field(request.path, "input", request.body)
    value = request.body["input"]
    if not value or (isinstance(value, str) and not value.strip()):
        blank = isinstance(value, str) and value
        raise sglang_checks.bad_request(f"Input cannot be empty{' or whitespace only' if blank else ''}")
    _check_embedding(state)
    inputs = value if isinstance(value, list) and not isinstance(value[0], int) else [value]
    return [_tokens(state, request, sglang_checks.prompt_ids(request, input_)) for input_ in inputs]


def _check_embedding(state: ServerState) -> None:
    if not is_embedding(state):
        raise sglang_checks.bad_request(NOT_EMBEDDING)


def _text_tokens(state: ServerState, request: CompletionRequest, text: str) -> int:
    return _tokens(state, request, [tokenizer.BOS_ID, *tokenizer.encode(text)])


def _tokens(state: ServerState, request: CompletionRequest, ids: Sequence[int]) -> int:
    """Return the number of tokens of an input, which is the number of its token ids (`ids`).

    Raises ErrorReply if the input does not fit the context.
    """
    sglang_checks.output_limit(state, request, len(ids), 0)
    return len(ids)


def _usage(counts: Sequence[int]) -> dict[str, Any]:
    details = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
    return {"prompt_tokens": sum(counts), "total_tokens": sum(counts), "completion_tokens": 0, **details}
