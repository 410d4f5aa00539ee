"""Routes of a simulated vLLM that return embeddings or scores.

A response has no tokens and is sent when a first token would be due. The real server offers these routes for embedding
and ranking models only. The simulated server offers them for every model name, and its numbers have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadgen.servers.simulated import protocol
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply
from loadgen.servers.simulated.state import ServerState

PromptTokens = Callable[[ServerState, Mapping[str, Any], Any], int]
"""Function that returns the number of tokens of a prompt, from (state, body, prompt). Raises ErrorReply for an invalid
prompt."""
VECTOR = [round((index * 37 % 101 - 50) / 500, 4) for index in range(384)]


def embeddings(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/embeddings.

    The field `input` is a text, a list of token ids, or a list of several such inputs.
    """
    input_ = _required_field(request, "input")
    prompts = input_ if isinstance(input_, list) and not isinstance(input_[0], int) else [input_]
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise _bad_request("input: Input should be a valid string or list", "input")
    counts = [count_tokens(state, request.body, prompt) for prompt in prompts]
    vectors = [{"index": index, "object": "embedding", "embedding": VECTOR} for index in range(len(counts))]
    return _encoding(state, request, sum(counts), "embd", {"object": "list", "data": vectors})


def rerank(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/rerank. The prompt for each document consists of the query and the document."""
    query = _required_field(request, "query")
    documents = _required_field(request, "documents")
    if not isinstance(documents, list):
        documents = []
    texts: list[Any] = [document.get("text") if isinstance(document, Mapping) else document for document in documents]
    if not (texts and isinstance(query, str) and all(isinstance(text, str) for text in texts)):
        raise _bad_request("query and documents: Input should be a valid string", "documents")
    counts = [count_tokens(state, request.body, query + text) for text in texts]
    results = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": round(1 / (2 + index), 6)}
        for index, text in enumerate(texts)
    ]
    top_n = protocol.integer(request.body.get("top_n")) or None
    return _encoding(state, request, sum(counts), "rerank", {"results": results[:top_n]})


def _required_field(request: CompletionRequest, name: str) -> Any:
    value = request.body.get(name)
    if value:
        return value
    raise _bad_request(f"{name}: Field required", name)


def _bad_request(message: str, name: str) -> ErrorReply:
    return ErrorReply(protocol.openai_error(message, "BadRequestError", 400, name))


def _encoding(
    state: ServerState, request: CompletionRequest, prompt_tokens: int, prefix: str, content: Mapping[str, Any]
) -> Encoding:
    """Return the encoding of a response without tokens. The id of the response begins with `prefix`."""
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if prefix == "embd":
        usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
    identity = {
        "id": f"{prefix}-{state.mark_word}-{state.started_s:08x}{request.index:08x}",
        "created": request.created_s,
        "model": state.config.model,
    }
    reply = protocol.json_reply({**identity, **content, "usage": usage})
    completion = Completion(False, prompt_tokens, 0, [0], [b""], "stop")
    return Encoding(completion, lambda *_: b"", lambda _: reply, ())
