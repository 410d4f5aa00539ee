"""Runs on servers with the routes, headers and responses of Azure OpenAI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from tests.support.command import burst
from tests.support.stub_server import Answer, answering

KEY = "azure-key-0123456789"
VERSION = "api-version=2024-10-21"
DEPLOYMENT = "/openai/deployments/chat-eu"
SMALL = ("--n", "3", "--input-tokens", "16", "--output-tokens", "4", "--lengths", "approximate")
SAFE = {"hate": {"filtered": False, "severity": "safe"}, "custom_blocklists": {"details": [], "filtered": False}}
NOT_FOUND = (404, {"error": {"code": "404", "message": "Resource not found"}})
NO_DEPLOYMENT = (
    404,
    {"error": {"code": "DeploymentNotFound", "message": "The API deployment for this resource does not exist."}},
)
NOT_SUPPORTED = (
    400,
    {"error": {"code": "OperationNotSupported", "message": "The completion operation does not work with gpt-4o."}},
)
WRONG_KEY = (401, {"error": {"code": "401", "message": "Access denied due to invalid subscription key."}})
BUSY = (429, {"error": {"code": "429", "message": "Requests have exceeded the token rate limit."}}, "retry-after: 0")


def chat(body: dict[str, Any]) -> Any:
    """Answer a chat request as Azure does: filter results come before the text, in events of the text, and after it."""
    tokens = body.get("max_completion_tokens") or body["max_tokens"]
    usage = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}
    if not body.get("stream"):
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}], "usage": usage}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "content_filter_results": {}}
    events: list[dict[str, Any]] = [
        {"choices": [], "id": "", "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": SAFE}]},
        {"choices": [choice | {"delta": {"role": "assistant", "content": "", "refusal": None}}]},
        *(
            {"choices": [choice | {"delta": {"content": " word"}, "content_filter_results": SAFE}]}
            for _ in range(tokens)
        ),
        {"choices": [choice | {"delta": {}, "finish_reason": "length"}]},
        {"choices": [{"index": 0, "finish_reason": None, "content_filter_offsets": {"check_offset": 1}}]},
    ]
    if body.get("stream_options", {}).get("include_usage"):
        events.append({"choices": [], "usage": usage})
    return "".join(f"data: {text}\n\n" for text in (*map(json.dumps, events), "[DONE]")).encode()


DEPLOYMENT_ROUTES: dict[str, Answer] = {
    f"POST {DEPLOYMENT}/chat/completions?{VERSION}": chat,
    f"POST {DEPLOYMENT}/completions?{VERSION}": NOT_SUPPORTED,
}


@pytest.mark.parametrize("path", ["", "/chat/completions"], ids=["base", "full URL"])
def test_a_deployment_is_measured(tmp_path: Path, path: str) -> None:
    """The query and the header `api-key` are on every request, and the model is named like the deployment. Events with
    filter results count no tokens."""
    with answering(DEPLOYMENT_ROUTES) as stub:
        url = f"{stub.url}{DEPLOYMENT}{path}?{VERSION}"
        code, _, err = burst(tmp_path, "--url", url, *SMALL, LOADGEN_API_KEY=KEY)
    assert code in (0, 5), err
    measured = runfile.read(tmp_path / "run")
    assert [(record.state, record.output_tokens) for record in measured.records] == [("complete", 4)] * 3
    assert (measured.header.server["model"], measured.header.plan["endpoint"]) == ("chat-eu", "chat")
    assert all(request.endswith(f"?{VERSION}") for request in stub.heard), stub.heard
    assert {*stub.azure_keys} == {KEY}
    assert {*stub.keys} == {None}
    assert KEY.encode() not in (tmp_path / "run" / "run.jsonl").read_bytes()


def test_the_v1_routes_are_measured(tmp_path: Path) -> None:
    """The list of models contains models without a deployment. A deployment that --model names is used."""
    models = (200, {"object": "list", "data": [{"id": "gpt-4o-2024-11-20", "object": "model"}]})

    def answer(body: dict[str, Any]) -> Any:
        return chat(body) if body["model"] == "chat-eu" else NO_DEPLOYMENT

    routes: dict[str, Answer] = {"GET /openai/v1/models": models, "POST /openai/v1/chat/completions": answer}
    with answering(routes) as stub:
        options = ("--url", f"{stub.url}/openai/v1/", "--header", "api-key: $AZURE_KEY", *SMALL)
        unnamed = burst(tmp_path, *options, AZURE_KEY=KEY)
        code, _, err = burst(tmp_path, *options, "--model", "chat-eu", AZURE_KEY=KEY)
    assert unnamed[0] == 3
    assert "does not exist" in unnamed[2]
    assert "--model" in unnamed[2]
    assert code in (0, 5), err
    assert {*stub.azure_keys} == {KEY}


REFUSALS: dict[str, tuple[dict[str, Answer], str, tuple[str, ...]]] = {
    "without a version": ({}, "", ("Resource not found", "Azure needs its API version", "?api-version=")),
    "no such deployment": (
        {f"POST {DEPLOYMENT}/{name}?{VERSION}": NO_DEPLOYMENT for name in ("chat/completions", "completions")},
        f"?{VERSION}",
        ("The API deployment for this resource does not exist", "check the name of the deployment in --url"),
    ),
    "a wrong key": (
        {
            f"{method} {DEPLOYMENT}{path}?{VERSION}": WRONG_KEY
            for method, path in (("GET", "/v1/models"), ("POST", "/chat/completions"), ("POST", "/completions"))
        },
        f"?{VERSION}",
        ("Access denied due to invalid subscription key", "LOADGEN_API_KEY"),
    ),
}


@pytest.mark.parametrize(("routes", "query", "messages"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_are_explained(
    tmp_path: Path, routes: dict[str, Answer], query: str, messages: tuple[str, ...]
) -> None:
    """The run is not started. The message quotes Azure, and says what to change."""
    fallback = {f"POST {DEPLOYMENT}/{name}": NOT_FOUND for name in ("chat/completions", "completions")}
    with answering(fallback | routes) as stub:
        code, _, err = burst(tmp_path, "--url", f"{stub.url}{DEPLOYMENT}{query}", *SMALL, LOADGEN_API_KEY=KEY)
    assert code == 3, err
    assert all(message in " ".join(err.split()) for message in messages), err


def test_requests_beyond_the_rate_limit_are_rejected(tmp_path: Path) -> None:
    """Azure's 429 during a run is a rejection with Azure's words, not a failure."""
    count = 0

    def answer(body: dict[str, Any]) -> Any:
        nonlocal count
        measured = 4 in (body.get("max_tokens"), body.get("max_completion_tokens"))
        count += measured
        return BUSY if count > 1 and measured else chat(body)

    with answering(DEPLOYMENT_ROUTES | {f"POST {DEPLOYMENT}/chat/completions?{VERSION}": answer}) as stub:
        url = f"{stub.url}{DEPLOYMENT}/chat/completions?{VERSION}"
        code, _, err = burst(tmp_path, "--url", url, *SMALL)
    assert code == 1, err
    states = sorted(record.state for record in runfile.read(tmp_path / "run").records)
    assert states == ["complete", "rejected", "rejected"]
