"""The HTTP API of a simulated Text Embeddings Inference 1.9.3 (source: router/src/http/server.rs of this version).

A server has one model, which embeds, ranks or classifies. The simulated server derives the type from the model's name:
a name with `rerank` is a reranker, a name with `classif` is a classifier, and any other model embeds. A response is
sent when its inputs have been computed. The numbers in a response have no meaning.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loadgen.servers.simulated import protocol, serde, tei_bodies, tokenizer
from loadgen.servers.simulated.pooling import VECTOR
from loadgen.servers.simulated.protocol import Completion, CompletionRequest, Encoding, ErrorReply, Headers, Reply
from loadgen.servers.simulated.scheduler import Job
from loadgen.servers.simulated.state import (
    DURATION_HISTOGRAMS,
    LENGTH_HISTOGRAMS,
    Page,
    ServerProtocol,
    ServerState,
)

VERSION = "1.9.3"
SHA = "06670157fb6c1523482219bdb2d1660277d38088"  # the commit that the tag reports
MAX_CLIENT_BATCH_SIZE = 32
MAX_CONCURRENT_REQUESTS = 512
MAX_BATCH_TOKENS = 16_384
SPECIAL_TOKENS = 2
"""Special tokens of a text: one at each end. A pair of texts has another one between them."""
LABELS = ("negative", "positive")
_STATUSES = {"Overloaded": 429, "Validation": 422, "Tokenizer": 422, "Backend": 424, "Empty": 400, "Unhealthy": 503}
_EMPTY_INPUTS = "Input validation error: `inputs` cannot be empty"


def _error(message: str, error_type: str, *, openai: bool = False) -> Reply:
    """Return an error response. `error_type` determines the HTTP status.

    The error has the field names of the OpenAI route if `openai` is True, and those of the native routes otherwise.
    """
    status = _STATUSES[error_type]
    if openai:
        return Reply(protocol.dumps({"message": message, "code": status, "type": error_type}), status)
    return Reply(protocol.dumps({"error": message, "error_type": error_type}), status)


def _refusal(request: CompletionRequest, message: str, error_type: str = "Validation") -> ErrorReply:
    return ErrorReply(_error(message, error_type, openai="embeddings" in request.path))


def model_type(model: str) -> str:
    """Return the type of a model, as /info reports it: `embedding`, `reranker` or `classifier`."""
    if "rerank" in model:
        return "reranker"
    return "classifier" if "classif" in model else "embedding"


def embed(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /embed. Raises ErrorReply for a request that TEI refuses."""
    inputs, counts = _embedded(state, request, "inputs")
    vectors = [_vector(request.body)] * len(counts)
    return _encoding(request, counts, _characters(inputs), vectors, method=_method(request.body["inputs"]))


def openai_embed(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /v1/embeddings. Raises ErrorReply for a request that TEI refuses."""
    inputs, counts = _embedded(state, request, "input")
    vector: Any = _vector(request.body)
    if request.body.get("encoding_format") == "base64":
        vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    data = [{"object": "embedding", "embedding": vector, "index": index} for index in range(len(counts))]
    usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    content = {"object": "list", "data": data, "model": state.config.model, "usage": usage}
    return _encoding(request, counts, _characters(inputs), content, method=_method(request.body["input"]))


def rerank(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /rerank. Raises ErrorReply for a request that TEI refuses."""
    query, texts = request.body["query"], request.body["texts"]
    if not texts:
        raise _refusal(request, "`texts` cannot be empty", "Empty")
    if model_type(state.config.model) != "reranker":
        raise _refusal(request, "Backend error: model is not a re-ranker model", "Backend")
    _check_batch(request, texts)
    pairs = [(query, text) for text in texts]
    counts = [_count(state, request, pair) for pair in pairs]
    ranks: list[dict[str, Any]] = []  # the last text has the highest score
    for index, text in reversed([*enumerate(texts)]):
        shown = {"text": text} if request.body.get("return_text") else {}
        ranks.append({"index": index, **shown, "score": round(1 - 1 / (2 + index), 8)})
    return _encoding(request, counts, _characters(pairs), ranks, method="batch")


def predict(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /predict. Raises ErrorReply for a request that TEI refuses."""
    inputs = request.body["inputs"]
    single = isinstance(inputs, str) or bool(inputs and isinstance(inputs[0], str))
    listed = [inputs] if single else inputs
    _check_batch(request, listed)
    if model_type(state.config.model) == "embedding":
        raise _refusal(request, "Backend error: Model is not a classifier model", "Backend")
    texts = [(text,) if isinstance(text, str) else tuple(text) for text in listed]
    if not all(len(pair) in (1, 2) for pair in texts or [()]):
        raise _refusal(request, "an input of the model is a text or a pair of texts")
    counts = [_count(state, request, pair) for pair in texts]
    labels = LABELS if model_type(state.config.model) == "classifier" else ("LABEL_0",)
    predictions = [{"score": 0.625, "label": labels[0]}]
    content: Any = predictions if single else [predictions] * len(texts)
    # The real server counts only requests with several inputs as successful.
    return _encoding(request, counts, _characters(texts), content, method="uncounted" if single else "batch")


def root(state: ServerState, request: CompletionRequest) -> Encoding:
    """Encode the response to POST /. The type of the model determines its content.

    Raises ErrorReply for an invalid request.
    """
    handlers = {
        "embedding": (embed, tei_bodies.EMBED),
        "reranker": (rerank, tei_bodies.RERANK),
        "classifier": (predict, tei_bodies.PREDICT),
    }
    handler, json_type = handlers[model_type(state.config.model)]
    if not json_type.accepts(request.body):
        raise _refusal(request, "Failed to deserialize the JSON body into the target type")
    return handler(state, request)


def _unsupported(message: str) -> Any:
    """Return a handler that refuses every request to a route that the simulated model does not support.

    `message` is the error message.
    """

    def refuse(_state: ServerState, request: CompletionRequest) -> Encoding:
        raise _refusal(request, message, "Backend")

    return refuse


Texts = tuple[Any, ...]
"""One input: a text or token ids, or a pair of texts."""


def _embedded(state: ServerState, request: CompletionRequest, field: str) -> tuple[list[Texts], list[int]]:
    """Return the inputs of a request for embeddings, and the number of tokens of each input.

    `field` is the name of the field with the inputs. Raises ErrorReply for an invalid request.
    """
    value = request.body[field]
    several = _method(value) == "batch"
    listed = value if several else [value]
    if not all(listed):
        raise _refusal(request, _EMPTY_INPUTS, "Empty")
    _check_batch(request, listed)
    if model_type(state.config.model) != "embedding":
        raise _refusal(request, "Backend error: Model is not an embedding model", "Backend")
    inputs = [(item,) for item in listed]
    return inputs, [_count(state, request, item) for item in inputs]


def _method(value: Any) -> str:
    """Return `batch` if `value` is a list of inputs, and `single` if it is one input: a text or its token ids."""
    return "batch" if isinstance(value, list) and value and not isinstance(value[0], int) else "single"


def _check_batch(request: CompletionRequest, inputs: Sequence[Any]) -> None:
    if len(inputs) > MAX_CLIENT_BATCH_SIZE:
        message = f"batch size {len(inputs)} > maximum allowed batch size {MAX_CLIENT_BATCH_SIZE}"
        raise _refusal(request, message)


def _count(state: ServerState, request: CompletionRequest, texts: Texts) -> int:
    """Return the number of tokens of one input, which consists of one or more texts or lists of token ids.

    Special tokens are included. An input that exceeds the maximum length is truncated. If the field `truncate` of the
    request is false, ErrorReply is raised instead. An empty input always raises ErrorReply.
    """
    if not any(texts):
        raise _refusal(request, _EMPTY_INPUTS, "Empty")
    tokens = SPECIAL_TOKENS + len(texts) - 1
    tokens += sum(tokenizer.count(text) if isinstance(text, str) else len(text) for text in texts)
    limit = state.max_model_len
    if tokens > limit and request.body.get("truncate") is False:
        message = f"Input validation error: `inputs` must have less than {limit} tokens. Given: {tokens}"
        raise _refusal(request, message)
    return min(tokens, limit)


def _characters(inputs: Sequence[Texts]) -> int:
    return sum(len(text) for texts in inputs for text in texts)


def _vector(body: Mapping[str, Any]) -> list[float]:
    return VECTOR[: body.get("dimensions") or None]


def _encoding(
    request: CompletionRequest, counts: Sequence[int], characters: int, content: Any, *, method: str
) -> Encoding:
    """Return the encoding of a response. `content` is its JSON value.

    `counts` contains the number of tokens of each input, and `characters` is the total length of the inputs. `method`
    is the label of the request in the counters of the metrics page.
    """
    body = protocol.dumps(content)
    jobs: list[Job] = []

    def answer(duration_s: float) -> Reply:
        total_ms = round(duration_s * 1000)
        queue_ms = min(total_ms, jobs[0].queue_ns // 1_000_000) if jobs else 0  # a refused request never queued
        return Reply(body, headers=_compute_headers(characters, sum(counts), total_ms, queue_ms))

    completion = Completion(
        False,
        sum(counts),
        0,
        [0],
        [b""],
        method,
        inputs=len(counts),
        metric_requests=tuple((tokens, 0) for tokens in counts),
    )
    openai = (b"",) if "embeddings" in request.path else ()
    return Encoding(completion, lambda *_: b"", answer, (), closing=openai, on_job=jobs.append)


def _compute_headers(characters: int, tokens: int, total_ms: int, queue_ms: int) -> Headers:
    times = str(total_ms)
    return (
        *protocol.JSON_TYPE,
        ("x-compute-type", "gpu+optimized"),
        ("x-compute-time", times),
        ("x-compute-characters", str(characters)),
        ("x-compute-tokens", str(tokens)),
        ("x-total-time", times),
        ("x-tokenization-time", "0"),
        ("x-queue-time", str(queue_ms)),
        ("x-inference-time", str(total_ms - queue_ms)),
    )


def _info(state: ServerState, _: Mapping[str, Any]) -> Reply:
    config = state.config
    kind = model_type(config.model)
    details: dict[str, Any] = {"pooling": "cls"}
    if kind != "embedding":
        labels = LABELS if kind == "classifier" else ("LABEL_0",)
        details = {
            "id2label": {str(index): label for index, label in reversed([*enumerate(labels)])},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
    return protocol.json_reply(
        {
            "model_id": config.model,
            "model_sha": None,
            "model_dtype": "float16",
            "served_model_name": config.model,
            "model_type": {kind: details},
            "max_concurrent_requests": config.max_concurrent_requests,
            "max_input_length": state.max_model_len,
            "max_batch_tokens": MAX_BATCH_TOKENS,
            "max_batch_requests": None,
            "max_client_batch_size": MAX_CLIENT_BATCH_SIZE,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": VERSION,
            "sha": SHA,
            "docker_label": state.mark_word,
            **state.mark,
        }
    )


def _tokenize(_: ServerState, fields: Mapping[str, Any]) -> Reply:
    inputs = fields["inputs"]
    texts = [inputs] if isinstance(inputs, str) else inputs
    special = fields.get("add_special_tokens", True)
    return protocol.json_reply([_token_list(text, special=special) for text in texts])


def _token_list(text: str, *, special: bool) -> list[dict[str, Any]]:
    """Return the tokens of a text, in the format of /tokenize. If `special` is True, both ends have a special token."""
    tokens = [
        {"id": token, "text": text[start:stop], "special": False, "start": start, "stop": stop}
        for token, start, stop in tokenizer.offsets(text)
    ]
    if not special:
        return tokens
    ends = [
        {"id": token, "text": name, "special": True, "start": None, "stop": None}
        for token, name in ((tokenizer.BOS_ID, "<s>"), (tokenizer.EOS_ID, "</s>"))
    ]
    return [ends[0], *tokens, ends[1]]


def _metrics(state: ServerState, _: Mapping[str, Any]) -> Reply:
    """Return the metrics page, without the metrics that are not simulated."""
    finished = state.finished_by_reason
    failures = {**state.refused_by_reason, "dropped": finished["abort"]}
    methods = [method for method in ("single", "batch") if finished[method]]
    by_method = {("method", method): finished[method] for method in methods}
    extra = {
        "requests_by_method": by_method,
        "finished_by_method": by_method,
        "failed_by_kind": {("err", reason): number for reason, number in failures.items() if number},
    }
    return Reply(state.metrics("te_", {}, extra) + state.mark_metrics(), headers=protocol.TEXT_TYPE)


def _overloaded(encoding: Encoding) -> Reply:
    """Return the refusal of a request that exceeds the limit on concurrent inputs.

    `encoding` is the response that the request would have received.
    """
    return _error("Model is overloaded", "Overloaded", openai=bool(encoding.closing))


def _failure(status: int) -> Reply:
    errors = {503: ("unhealthy", "Unhealthy"), 429: ("Model is overloaded", "Overloaded")}
    if status not in errors:
        return Reply(protocol.dumps({"error": "Backend error: failed", "error_type": "Backend"}), status)
    return _error(*errors[status])


def _buckets(max_model_len: int) -> dict[str, Sequence[float]]:
    """Return the bucket bounds of each histogram. TEI sets them in the function `prepare` (router/src/prometheus.rs).

    The bounds of durations are those of TGI. The bounds of lengths are powers of two up to `max_model_len`, but at most
    2**19.
    """
    durations = [0.00001 * 1.5 ** (power + 1) for power in range(35)]
    lengths = [1 << power for power in range(20) if 1 << power <= max_model_len]
    return {**dict.fromkeys(DURATION_HISTOGRAMS, durations), **dict.fromkeys(LENGTH_HISTOGRAMS, lengths)}


_EMPTY = Reply(headers=())
_PAGES: Mapping[str, Page | Reply] = {  # axum answers HEAD on every GET route
    "/": _EMPTY,
    "/health": _EMPTY,
    "/ping": _EMPTY,
    "/info": _info,
    "/metrics": _metrics,
}

PROTOCOL = ServerProtocol(
    head_prefix="date: {date}\r\n",
    head_suffix=(
        "vary: origin, access-control-request-method, access-control-request-headers\r\n"
        "access-control-allow-origin: *\r\n"
    ),
    hyper_order=True,
    keep_alive_s=3600,
    body_limit=2_000_000,
    generate={
        "/": root,
        "/embed": embed,
        "/embed_all": _unsupported("Backend error: raw embeddings are not supported for the Python backend."),
        "/embed_sparse": _unsupported("Backend error: Model is not an embedding model with SPLADE pooling"),
        "/embeddings": openai_embed,
        "/v1/embeddings": openai_embed,
        "/rerank": rerank,
        "/predict": predict,
    },
    pages={
        **{(method, path): page for path, page in _PAGES.items() for method in ("GET", "HEAD")},
        ("POST", "/tokenize"): _tokenize,
    },
    wrong_content_type=Reply(b"Expected request with `Content-Type: application/json`", 415, protocol.TEXT_TYPE),
    read_body=partial(serde.read_fields, tei_bodies.ROUTES),
    too_large=Reply(b"Failed to buffer the request body: length limit exceeded", 413, protocol.TEXT_TYPE),
    not_found=Reply(status=404, headers=()),
    not_allowed=lambda methods: Reply(status=405, headers=(("allow", methods.replace(", ", ",")),)),
    reason_phrases={413: "Payload Too Large", 422: "Unprocessable Entity"},
    failure=_failure,
    unhealthy=_failure(503),
    generation_failure=_error("Backend error: failed", "Backend"),
    overloaded=_overloaded,
    needs_api_key=lambda path: path not in ("/", "/health", "/ping", "/metrics"),
    unauthorized=Reply(status=401, headers=()),
    default_limit=MAX_CONCURRENT_REQUESTS,
    limit_counts_inputs=True,
    buckets=_buckets,
)
