"""Embeddings and scores of a simulated vLLM: an answer when the prompts have been run, and no token. The real one has
these routes for models that embed or rank; the simulated one for whatever it is called. The numbers mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadgen.servers.simulated import protocol
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply
from loadgen.servers.simulated.state import ServerState

PromptTokens = Callable[[ServerState, Mapping[str, Any], Any], int]
"""How many tokens a prompt of this body has. Raises ErrorReply for what the server refuses."""
VECTOR = [round((place * 37 % 101 - 50) / 500, 4) for place in range(384)]


def embeddings(tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/embeddings: one text or list of ids, or several."""
    given = _needed(request, "input")
    prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise _refused("input: Input should be a valid string or list", "input")
    counts = [tokens(state, request.body, prompt) for prompt in prompts]
    vectors = [{"index": index, "object": "embedding", "embedding": VECTOR} for index in range(len(counts))]
    return _whole(state, request, sum(counts), "embd", {"object": "list", "data": vectors})


def rerank(tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """POST /v1/rerank: each document is read together with the query."""
    query, documents = _needed(request, "query"), _needed(request, "documents")
    listed = documents if isinstance(documents, list) else []
    texts: list[Any] = [each.get("text") if isinstance(each, Mapping) else each for each in listed]
    if not (texts and isinstance(query, str) and all(isinstance(text, str) for text in texts)):
        raise _refused("query and documents: Input should be a valid string", "documents")
    counts = [tokens(state, request.body, query + text) for text in texts]
    scored = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": round(1 / (2 + index), 6)}
        for index, text in enumerate(texts)
    ]
    maximum = protocol.integer(request.body.get("top_n")) or None
    return _whole(state, request, sum(counts), "rerank", {"results": scored[:maximum]})


def _needed(request: CompletionRequest, name: str) -> Any:
    if result := request.body.get(name):
        return result
    raise _refused(f"{name}: Field required", name)


def _refused(message: str, name: str) -> ErrorReply:
    return ErrorReply(protocol.openai_error(message, "BadRequestError", 400, name))


def _whole(
    state: ServerState, request: CompletionRequest, prompt_tokens: int, name: str, answer: Mapping[str, Any]
) -> Encoding:
    """An answer that is due when a first token would be."""
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    usage |= {"completion_tokens": 0, "prompt_tokens_details": None} if name == "embd" else {}
    number = f"{name}-{state.mark_word}-{state.started_s:08x}{request.index:08x}"
    identity = {"id": number, "created": request.created_s, "model": state.config.model}
    reply = protocol.json_reply({**identity, **answer, "usage": usage})
    completion = Completion(False, prompt_tokens, 0, [0], [b""], "stop")
    return Encoding(completion, lambda *_: b"", lambda _: reply, ())
