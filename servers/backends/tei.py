"""The backend Text Embeddings Inference (TEI) of Hugging Face, checked with version 1.9.3.

The endpoints are `/embed`, `/v1/embeddings`, `/rerank` and `/predict`. A server has one model, which either embeds,
ranks or classifies. `/info` reports which of these tasks the model has. The task determines the default endpoint.

All endpoints except `/v1/embeddings` report the number of tokens in the header `x-compute-tokens`. By default, the
server truncates inputs that are longer than the model's limit, and reports the truncated length.

If a request contains token ids, the server decodes them into text and encodes this text again. The number of tokens may
change. Only an input that is sent as text therefore has an exact length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadgen.servers.backends import base, pooling
from loadgen.servers.backends.dialect import Answer, Dialect, Route, encode_body
from loadgen.servers.backends.error_messages import one_line
from loadgen.servers.backends.stream_events import finalise, note_error
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.workloads.request import Request

TOKENS_HEADER = "x-compute-tokens"
ENDPOINTS = {
    "embedding": ("embed", "embeddings"),
    "reranker": ("rerank", "classify"),
    "classifier": ("classify",),
}
"""The endpoints for each type of model, the default first."""

_RESULTS = msgspec.json.Decoder(list[msgspec.Raw])


def _decode(payloads: Sequence[bytes]) -> Answer:
    """Decode a response of a native endpoint: a list with one result per input."""
    answer = Answer([0] * len(payloads))
    broken = ""
    for index, payload in enumerate(payloads):
        try:
            results = _RESULTS.decode(payload)
        except DECODE_ERRORS as error:
            note_error(answer, payload)
            broken = one_line(f"event {index} is not of this dialect ({error}): {payload[:100]!r}")
            break
        pooling.note_results(answer, results, index, payload)
    return finalise(answer, 0, broken)


def _embed_fields(request: Request) -> dict[str, Any]:
    return {"inputs": pooling.one_or_all(request)}


def _rerank_fields(request: Request) -> dict[str, Any]:
    query, documents = pooling.query_and_documents(request, "texts")
    return {"query": query, "texts": documents} if documents else {"query": query}


def _classify_fields(request: Request) -> dict[str, Any]:
    """Return the fields of a request to `/predict`.

    Each text is sent as a list of one text, because the server reads a plain list of two texts as one pair. A single
    text is sent in this form too, because the server's counter `te_request_success` misses requests with a plain text.
    """
    return {"inputs": [[text] for text in (request.prompt, *request.batch)]}


def _dialect(endpoint: str, path: str, fields: Callable[[Request], dict[str, Any]], **others: Any) -> Dialect:
    return Dialect(
        server="tei",
        endpoint=endpoint,
        path=path,
        encode=lambda request, _: encode_body(fields(request), request),
        decode=_decode,
        text=lambda _: "",
        count_by_running=Route(
            path, lambda text, _: fields(Request(0, text, 0, 0)), int, generates=True, header=TOKENS_HEADER
        ),
        streams=False,
        complete=pooling.check_inputs,
        inputs=pooling.inputs_of(endpoint),
        prompt_tokens_header=TOKENS_HEADER,
        **others,
    )


def _identify(get_json: base.GetJson, url: str) -> base.ServerFacts | None:
    status, answer = get_json("/info")
    info = base.as_dict(answer)
    if status != 200 or "model_id" not in info or not base.as_dict(info.get("model_type")):
        return None
    model_type = next(iter(info["model_type"]))
    limits = base.known_limits(TEI.limits, info)
    notes: dict[str, Any] = {}
    if info.get("auto_truncate") is True and "max_input_length" in limits:
        notes["truncates_to"] = limits.pop("max_input_length")
    routes = ("/tokenize",) if base.route_exists(get_json, "/tokenize") else ()
    model = str(info.get("served_model_name") or info["model_id"])
    version = base.version_text(info.get("version"))
    endpoints = ENDPOINTS.get(model_type, ())
    return base.ServerFacts("tei", url, version, model, limits, routes, endpoints=endpoints, notes=notes)


# The server adds special tokens to a text, as it does before it runs the model. It does not truncate the text.
_COUNT_TEXT: Route[int] = Route(
    "/tokenize", lambda text, _: {"inputs": text, "add_special_tokens": True}, lambda answer: len(answer[0])
)

TEI = base.Backend(
    name="tei",
    title="TEI",
    request_times="TEI states them in headers of every response. A gateway may have removed them.",
    native="embed",
    dialects={
        "embed": _dialect("embed", "/embed", _embed_fields, count=_COUNT_TEXT),
        "embeddings": pooling.pooling_dialect("tei", "embeddings", count=_COUNT_TEXT),
        # A pair of query and document has more special tokens than a text.
        "rerank": _dialect("rerank", "/rerank", _rerank_fields, count_text=_COUNT_TEXT),
        "classify": _dialect("classify", "/predict", _classify_fields, count=_COUNT_TEXT),
    },
    identify=_identify,
    probe_paths=("/info", "/tokenize"),
    port=8005,
    limits={
        # Without --auto-truncate, the server refuses longer inputs. The limit is that of the model.
        "max_input_length": base.ServerLimit("", "prompt"),
        "max_client_batch_size": base.ServerLimit("--max-client-batch-size", "batch"),
        # Each input of a request takes one of these places (`try_acquire_permit` in router/src/http/server.rs).
        "max_concurrent_requests": base.ServerLimit("--max-concurrent-requests", "inputs"),
        "max_batch_tokens": base.ServerLimit("--max-batch-tokens"),
        "max_batch_requests": base.ServerLimit("--max-batch-requests"),
    },
    metrics=base.MetricNames(
        prefix="te_",
        names={
            "waiting": ("te_queue_size",),
            "prompt_tokens": ("te_request_input_length_sum",),
            "rejections": ("te_request_failure{err=overloaded}",),
            "requests_finished": ("te_request_success",),
            "requests_failed": (
                "te_request_failure{err=validation|tokenization|inference|model_type|batch_size|dropped}",
            ),
            "queue_s_sum": ("te_request_queue_duration_sum",),
            "queue_s_count": ("te_request_queue_duration_count",),
            "inference_s_sum": ("te_request_inference_duration_sum",),
            "inference_s_count": ("te_request_inference_duration_count",),
        },
    ),
    simulated="loadgen.servers.simulated.tei:PROTOCOL",
    simulated_models={
        "embed": "bge-base-en-v1.5",
        "embeddings": "bge-base-en-v1.5",
        "rerank": "bge-reranker-base",
        "classify": "emotion-classifier",
    },
    simulated_shapes=dict.fromkeys(("embed", "embeddings", "rerank", "classify"), "Qwen3-0.6B"),
)
