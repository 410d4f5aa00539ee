"""The pages of TGI that make no tokens (router/src/server.rs at v3.3.7)."""

from __future__ import annotations

from typing import Any

from servers.simulated import metrics_pages, tokenizer
from servers.simulated.bodies import chat_text, mapping, ok
from servers.simulated.tgi_answers import DOCKER_LABEL, VERSION
from servers.simulated.wire import TEXT_TYPE, Refused, Reply, Site

DEFAULT_LIMIT = 128
"""--max-concurrent-requests (launcher/src/main.rs)."""
MOST_STOPS = 4
MOST_PROMPTS = 4


def max_input_tokens(site: Site) -> int:
    """One token must be left for the output (launcher/src/main.rs: max_total_tokens - 1)."""
    return site.config.max_model_len - 1


def untyped(message: str) -> Refused:
    """What axum says about JSON that does not fit: plain text."""
    said = f"Failed to deserialize the JSON body into the target type: {message}"
    return Refused(Reply(said.encode(), 422, TEXT_TYPE))


def _info(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    config = site.config
    return ok(
        {
            "model_id": config.model,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": config.max_concurrent_requests or DEFAULT_LIMIT,
            "max_best_of": 2,
            "max_stop_sequences": MOST_STOPS,
            "max_input_tokens": max_input_tokens(site),
            "max_total_tokens": config.max_model_len,
            "validation_workers": 2,
            "max_client_batch_size": MOST_PROMPTS,
            "router": "text-generation-router",
            "version": VERSION,
            "sha": "dfb3fbe7",
            "docker_label": DOCKER_LABEL,
        }
    )


def _models(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    model = site.config.model
    return ok({"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": model}]})


def _tokenize(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    asked = mapping(body)
    if not isinstance(asked.get("inputs"), str):
        raise untyped("missing field `inputs`")
    return ok(_token_list(asked["inputs"]))


def _chat_tokenize(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    asked = mapping(body)
    if not isinstance(asked.get("messages"), list):
        raise untyped("missing field `messages`")
    text = chat_text(asked["messages"])
    return ok({"tokenize_response": _token_list(text), "templated_text": text})


def _token_list(text: str) -> list[dict[str, Any]]:
    """With the token that the server puts before every text; it has no place in it."""
    bos = {"id": tokenizer.BOS_ID, "text": "", "start": 0, "stop": 0}
    found = tokenizer.offsets(text)
    return [bos] + [
        {"id": token, "text": text[start:stop], "start": start, "stop": stop} for token, start, stop in found
    ]


def _empty(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return Reply(headers=())


def _metrics(site: Site, body: bytes) -> Reply:  # noqa: ARG001
    return Reply(metrics_pages.tgi(site).encode(), headers=TEXT_TYPE)


PAGES = {
    ("GET", "/"): _empty,
    ("GET", "/health"): _empty,
    ("GET", "/ping"): _empty,
    ("GET", "/info"): _info,
    ("GET", "/v1/models"): _models,
    ("GET", "/metrics"): _metrics,
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/chat_tokenize"): _chat_tokenize,
}
