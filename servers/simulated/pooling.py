"""Routes of a simulated vLLM whose responses contain embeddings, scores or classes instead of generated text.

Such a response is sent at the time at which the first token of a generated text would be due.

The real server offers these routes only for models that embed, rank or classify. The simulated server offers them for
every model name. The numbers in its responses have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadgen.servers.simulated import protocol
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Reply
from loadgen.servers.simulated.state import ServerState

PromptTokens = Callable[[ServerState, Mapping[str, Any], Any], int]
"""Function that returns the number of tokens of a prompt, from (state, body, prompt). Raises ErrorReply for an invalid
prompt."""
VECTOR = [round((index * 37 % 101 - 50) / 500, 4) for index in range(384)]


def embeddings(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/embeddings. `count_tokens` counts the tokens of an input.

    The field `input` of the request is a text, a list of token ids, or a list of several such inputs.
    """
    counts = _input_counts(count_tokens, state, request)
    vectors = [{"index": index, "object": "embedding", "embedding": VECTOR} for index in range(len(counts))]
    return _encoding(state, request, counts, "embd", {"object": "list", "data": vectors})


def classify(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /classify.

    The field `input` is a text, a list of token ids, or a list of several such inputs.
    """
    counts = _input_counts(count_tokens, state, request)
    results = [
        {"index": index, "label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2} for index in range(len(counts))
    ]
    return _encoding(state, request, counts, "classify", {"object": "list", "data": results})


def _input_counts(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> list[int]:
    """Return the number of tokens of each input in the field `input`. Raises ErrorReply if the field is invalid."""
    input_ = _required_field(request, "input")
    prompts = input_ if isinstance(input_, list) and not isinstance(input_[0], int) else [input_]
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise _bad_request("input: Input should be a valid string or list", "input")
    return [count_tokens(state, request.body, prompt) for prompt in prompts]


def score(count_tokens: PromptTokens, state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/score.

    `text_1` and `text_2` are texts or lists of texts. A single `text_1` is paired with every text in `text_2`.
    Otherwise, both must have equally many texts.
    """
    first, second = _texts_of(request, "text_1"), _texts_of(request, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise _bad_request("Input lengths must be either 1:1, 1:N or N:N", "text_1")
    counts = [count_tokens(state, request.body, query + text) for query, text in zip(first, second, strict=True)]
    results = [{"index": index, "object": "score", "score": round(1 / (2 + index), 6)} for index in range(len(counts))]
    return _encoding(state, request, counts, "score", {"object": "list", "data": results})


def _texts_of(request: CompletionRequest, name: str) -> list[str]:
    value = _required_field(request, name)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise _bad_request(f"{name}: Input should be a valid string", name)
    return texts


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
    return _encoding(state, request, counts, "rerank", {"results": results[:top_n]})


def _required_field(request: CompletionRequest, name: str) -> Any:
    value = request.body.get(name)
    if value:
        return value
    raise _bad_request(f"{name}: Field required", name)


def _bad_request(message: str, name: str) -> ErrorReply:
    return ErrorReply(protocol.openai_error(message, "BadRequestError", 400, name))


def _encoding(
    state: ServerState, request: CompletionRequest, counts: Sequence[int], prefix: str, content: Mapping[str, Any]
) -> Encoding:
    """Encode a response without generated tokens, such as the response to a request for embeddings.

    - `counts` contains the number of tokens of each input.
    - `prefix` is the beginning of the response's id, such as `embd`.
    - `content` contains the JSON fields with the results.
    """
    prompt_tokens = sum(counts)
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if prefix != "rerank":
        usage |= {"completion_tokens": 0, "prompt_tokens_details": None}
    identity = {
        "id": f"{prefix}-{state.mark_word}-{state.started_s:08x}{request.index:08x}",
        "created": request.created_s,
        "model": state.config.model,
    }
    return pooled(counts, protocol.json_reply({**identity, **content, "usage": usage}))


def pooled(counts: Sequence[int], reply: Reply) -> Encoding:
    """Return the encoding of `reply`, a response to inputs that the model embeds, scores or classifies.

    Such a response contains no generated tokens. `counts` has the number of tokens of each input.
    """
    completion = Completion(
        False,
        sum(counts),
        0,
        [0],
        [b""],
        "stop",
        inputs=len(counts),
        finished_requests=len(counts),
        metric_requests=tuple((tokens, 0) for tokens in counts),
    )
    return Encoding(completion, lambda *_: b"", lambda _: reply, ())
