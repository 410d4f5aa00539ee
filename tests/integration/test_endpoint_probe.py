"""The requests for one token before a run: which endpoint, which fields, and when no run is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from loadgen.servers.auth import Access
from loadgen.servers.backends import BACKENDS
from loadgen.servers.backends.base import ServerFacts
from loadgen.servers.backends.dialect import Dialect
from loadgen.servers.discovery import probe
from loadgen.servers.endpoint_probe import choose_endpoint, relocated
from loadgen.servers.errors import NoEndpointError, RefusedModelError, UnauthorizedError, WrongServerError
from loadgen.workloads.request import Request
from tests.support.command import accounted, burst
from tests.support.stub_server import OPENAI, Answer, Stub, answering

ONE_TOKEN = Request(0, "Hello", 0, 1)
COMPLETIONS, CHAT = "POST /v1/completions", "POST /v1/chat/completions"
STREAM = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


def chosen(
    stub: Stub, *endpoints: str, server: str = "openai", facts: ServerFacts | None = None, say: Any = None
) -> Dialect:
    """Return the dialect that is chosen of the server's endpoints."""
    facts = facts or ServerFacts(server, stub.url, model="gpt")
    dialects = [relocated(BACKENDS[server].dialects[endpoint], facts) for endpoint in endpoints]
    return choose_endpoint(dialects, facts, ONE_TOKEN, say or (lambda _: None), timeout_s=10)


@pytest.mark.parametrize("missing", [(404, {"error": "no route"}), (405, b""), (501, b"x"), (200, b"<html>Home")])
def test_an_endpoint_that_is_missing_is_passed_over(missing: Answer) -> None:
    """The next one is used, and the line names both."""
    lines: list[str] = []
    with answering({COMPLETIONS: missing, CHAT: (200, STREAM)}) as stub:
        assert chosen(stub, "completions", "chat", say=lines.append).endpoint == "chat"
    assert lines[0].startswith("POST /v1/completions answers")
    assert lines[0].endswith("using /v1/chat/completions (--endpoint chat)")


def test_an_endpoint_that_a_key_does_not_open_is_passed_over() -> None:
    """Gateways answer 403 to what they do not publish. If nothing else is there, the key is the reason."""
    with answering({COMPLETIONS: (403, b"forbidden"), CHAT: (200, STREAM)}) as stub:
        assert chosen(stub, "completions", "chat").endpoint == "chat"
    with (
        answering({COMPLETIONS: (403, {"error": "no tenant"}), CHAT: (404, b"")}) as stub,
        pytest.raises(UnauthorizedError, match="403: no tenant") as caught,
    ):
        chosen(stub, "completions", "chat")
    assert "--header" in caught.value.hint


def test_without_any_endpoint_no_run_is_started(tmp_path: Path) -> None:
    """Exit code 3, with every request that was tried and its answer, and no folder with a run."""
    with answering(OPENAI) as stub:
        code, _, err = burst(tmp_path, "--url", stub.url, "--n", "4")
    assert code == 3
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert f"POST {path} answers 404: Not Found" in err
    assert not (tmp_path / "run" / "run.jsonl").exists()


COUNTED_STREAM = (
    b'data: {"choices": [{"text": " a"}]}\n\ndata: {"choices": [{"text": " b", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
)
LITELLM_HEADER = "x-litellm-version: 1.99.4"


def test_an_endpoint_on_which_a_gateway_counts_is_passed_over() -> None:
    """LiteLLM replaces the counts of completions by its own. Chat, which has the server's counts, is used instead."""
    lines: list[str] = []
    routes: dict[str, Answer] = {COMPLETIONS: (200, STREAM, LITELLM_HEADER), CHAT: (200, STREAM, LITELLM_HEADER)}
    with answering(routes) as stub:
        assert chosen(stub, "completions", "chat", say=lines.append).endpoint == "chat"
    assert lines[0].startswith("LiteLLM counts the tokens of /v1/completions itself")
    assert lines[0].endswith("using /v1/chat/completions (--endpoint chat)")


def test_counts_of_a_gateway_are_ignored() -> None:
    """If only completions may be used, chunks are counted, because LiteLLM's count may exceed the requested length."""
    lines: list[str] = []
    with answering({COMPLETIONS: (200, COUNTED_STREAM, LITELLM_HEADER)}) as stub:
        dialect = chosen(stub, "completions", say=lines.append)
    events = [event.removeprefix(b"data: ") for event in COUNTED_STREAM.split(b"\n\n") if event]
    answer = dialect.decode(events)
    assert (answer.output_tokens, answer.counted_by, answer.prompt_tokens) == (2, "chunks", None)
    assert "chunks are counted instead (--endpoint chat" in lines[-1]


def test_a_redirect_is_shown_with_its_target() -> None:
    """The hint is the base of the target if it is an endpoint, and a key if it is a login page."""
    target = "https://llm.example.net/v1/chat/completions"
    with (
        answering({CHAT: (308, b"<html>", f"Location: {target}")}) as stub,
        pytest.raises(NoEndpointError, match=f"redirects POST /v1/chat/completions to {target}") as caught,
    ):
        chosen(stub, "chat")
    assert caught.value.hint.endswith("--url https://llm.example.net")
    with (
        answering({CHAT: (302, b"", "Location: /login?next=x")}) as stub,
        pytest.raises(NoEndpointError, match="to /login") as caught,
    ):
        chosen(stub, "chat")
    assert "--api-key-env" in caught.value.hint
    with (
        answering({"GET /v1/models": (302, b"", "Location: http://sso/login")}) as stub,
        pytest.raises(WrongServerError, match="answers 302, a redirect to http://sso/login"),
    ):
        probe(stub.url)


@pytest.mark.parametrize(
    "refusal",
    [
        (404, {"error": {"message": "The model `gpt` does not exist.", "code": 404}}),
        (404, {"error": {"message": 'model "gpt" not found, try pulling it first'}}),
        (400, {"error": {"message": "invalid model ID", "type": "invalid_request_error"}}),
        (400, {"error": {"message": "nope", "code": "model_not_found"}}),
        (503, {"error": "No available workers for model gpt"}),
        (400, b"litellm: Invalid model name passed in model=gpt. Call `/v1/models` to view available models"),
    ],
)
def test_a_refused_model_ends_the_command(refusal: Answer) -> None:
    """With the server's own words and with the models that it lists."""
    routes = {COMPLETIONS: refusal, CHAT: refusal, "GET /v1/models": (200, {"data": [{"id": "a"}, {"id": "b"}]})}
    with answering(routes) as stub, pytest.raises(RefusedModelError, match="refuses the model gpt: POST") as caught:
        chosen(stub, "completions", "chat")
    assert "it lists: a, b" in caught.value.hint


def test_a_model_of_another_endpoint_is_found_there() -> None:
    """OpenAI answers 404 for a chat model on completions; that is no reason to refuse the model."""
    words = "This is a chat model and not supported in the v1/completions endpoint."
    with answering({COMPLETIONS: (404, {"error": {"message": words}}), CHAT: (200, STREAM)}) as stub:
        assert chosen(stub, "completions", "chat").endpoint == "chat"


def test_a_model_that_is_not_listed_is_said_to_be_accepted() -> None:
    """One line, because an alias is ordinary and a misspelt name is not."""
    lines: list[str] = []
    with answering({CHAT: (200, STREAM)}) as stub:
        chosen(stub, "chat", facts=ServerFacts("openai", stub.url, model="alias", listed=False), say=lines.append)
    assert lines == [f"{stub.url} does not list the model alias, but accepts requests for it"]


def test_another_refusal_is_left_to_the_run() -> None:
    """A server that is overloaded or fails has the endpoint: the run records what it answers."""
    lines: list[str] = []
    with answering({COMPLETIONS: (404, b""), CHAT: (500, {"error": "CUDA out of memory"})}) as stub:
        assert chosen(stub, "completions", "chat", say=lines.append).endpoint == "chat"
    assert lines == [f"{stub.url} refuses a request for one token: POST {CHAT[5:]} answers 500: CUDA out of memory"]


def refusing(fields: set[str], write: Callable[[str], Any], status: int) -> Answer:
    """Refuse the first of the fields that a request has; otherwise answer."""

    def answer(body: dict[str, Any]) -> Any:
        options = body.get("stream_options", {})
        refused = [field for field in [*body, *options] if field in fields]
        return (status, write(refused[0])) if refused else (200, STREAM)

    return answer


WRITTEN: dict[str, Callable[[str], Any]] = {
    "pydantic": lambda field: {"detail": [{"type": "extra_forbidden", "loc": ["body", field], "msg": "Extra inputs"}]},
    "pydantic with the whole request": lambda field: {
        "detail": [{"loc": ["body", field], "input": {"temperature": 0, "stream_options": {}, "max_tokens": 1}}]
    },
    "nested": lambda field: {"object": "error", "message": {"detail": [{"loc": ["body", field], "msg": "no"}]}},
    "param": lambda field: {"error": {"message": "Unsupported value", "param": field}},
    "plain text": lambda field: f"unknown field `{field}`, expected one of `max_tokens`, `temperature`".encode(),
    "another text": lambda field: f"Unrecognized request argument supplied: {field}".encode(),
    "no name at all": lambda _: {"error": "Bad Request"},
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize(
    "fields", [{"continuous_usage_stats"}, {"stream_options"}, {"temperature"}, {"stream_options", "temperature"}]
)
def test_refused_fields_are_found_in_every_form(fields: set[str], written: Callable[[str], Any], status: int) -> None:
    """By their names in any body, or by asking without them. No other field is left out."""
    with answering({CHAT: refusing(fields, written, status)}) as stub:
        dialect = chosen(stub, "chat")
    assert set(dialect.dropped_fields) - {"continuous_usage_stats"} == fields - {"continuous_usage_stats"}
    body = json.loads(dialect.encode(ONE_TOKEN, "gpt"))
    assert not fields & {*body, *body.get("stream_options", {})}
    if "stream_options" not in fields:
        assert body["stream_options"]["include_usage"] is True
    if not fields & {"continuous_usage_stats", "stream_options"}:
        assert "continuous_usage_stats" not in dialect.dropped_fields


@pytest.mark.parametrize("server", ["vllm", "lightllm", "openai"])
def test_a_strict_gateway_in_front_of_any_server(server: str) -> None:
    """Fields that only some servers know are left out too."""
    fields = {"ignore_eos", "min_tokens", "do_sample", "continuous_usage_stats"}
    write = WRITTEN["another text"]
    with answering({CHAT: refusing(fields, write, 400)}) as stub:
        dialect = chosen(stub, "chat", server=server)
    body = json.loads(dialect.encode(ONE_TOKEN, "gpt"))
    assert not fields & {*body, *body.get("stream_options", {})}


@pytest.mark.parametrize("named", [True, False])
def test_a_server_that_refuses_one_token_is_asked_for_more(named: bool) -> None:
    """The field itself is accepted, so the run uses it, and samples are counted with the accepted length."""

    def answer(body: dict[str, Any]) -> Any:
        if body["max_tokens"] < 16:
            field = "max_tokens" if named else "value"
            return 400, {"error": {"message": f"Invalid '{field}': expected a value >= 16, but got 1 instead."}}
        return 200, STREAM

    with answering({CHAT: answer}) as stub:
        dialect = chosen(stub, "chat")
    assert dialect.dropped_fields == ()
    assert json.loads(dialect.encode(structs.replace(ONE_TOKEN, output_tokens=32), "gpt"))["max_tokens"] == 32
    assert dialect.count_by_running.body("a", "gpt")["max_tokens"] == 16


def test_a_newer_name_of_the_output_length_is_used() -> None:
    """The refusal may name it; then a single token is enough."""
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with answering({CHAT: refusing({"max_tokens"}, lambda _: {"error": {"message": words}}, 400)}) as stub:
        dialect = chosen(stub, "chat")
    assert (dialect.dropped_fields, dialect.test_tokens) == (("max_tokens",), 1)
    assert json.loads(dialect.encode(ONE_TOKEN, "gpt"))["max_completion_tokens"] == 1


def test_a_field_that_was_not_sent_is_not_left_out() -> None:
    """A refusal may name it all the same, as vLLM's does: min_tokens must not exceed max_tokens."""

    def answer(body: dict[str, Any]) -> Any:
        words = "min_tokens must be less than or equal to max_tokens=1"
        return (400, {"error": {"message": words}}) if body["max_tokens"] < 16 else (200, STREAM)

    with answering({CHAT: answer}) as stub:
        facts = ServerFacts("vllm", stub.url, model="m")
        request = structs.replace(ONE_TOKEN, ignore_eos=False)
        chat = BACKENDS["vllm"].dialects["chat"]
        dialect = choose_endpoint([chat], facts, request, lambda _: None, timeout_s=10)
    assert (dialect.dropped_fields, dialect.test_tokens) == ((), 16)


def test_a_refusal_that_no_field_explains_changes_nothing() -> None:
    """The run records it. Few requests are sent to find out."""
    with answering({CHAT: (400, {"error": "the prompt is too short"})}) as stub:
        assert chosen(stub, "chat").dropped_fields == ()
    assert len(stub.heard) <= 6


@pytest.mark.parametrize("base", ["/api/paas/v4", "/v1beta/openai", ""])
def test_routes_directly_below_the_base_are_found(base: str, tmp_path: Path) -> None:
    """Hosted servers have no `/v1`: the list of models shows it, with the base or with the endpoint as the URL."""
    routes: dict[str, Answer] = {
        f"GET {base}/models": (200, {"data": [{"id": "gpt"}]}),
        f"POST {base}/chat/completions": (200, STREAM),
    }
    with answering(routes) as stub:
        for path in (base, f"{base}/", f"{base}/chat/completions"):
            facts = probe(stub.url + path)
            assert (facts.url, facts.api_path, facts.model) == (stub.url + base, "", "gpt")
            assert chosen(stub, "completions", "chat", facts=facts).path == "/chat/completions"


def test_a_query_is_sent_with_every_request(tmp_path: Path) -> None:
    """Azure wants `api-version`; there is no list of models, so the model is named."""
    path = "/openai/deployments/d/chat/completions?api-version=1"
    with answering({f"POST {path}": (200, STREAM)}) as stub:
        code, out, err = burst(
            tmp_path,
            "--url",
            stub.url + path,
            "--model",
            "d",
            "--n",
            "2",
            "--input-tokens",
            "8",
            "--output-tokens",
            "1",
        )
        assert code in (0, 1, 5), err
    assert "with ?api-version=1 on every request" in out
    assert accounted(tmp_path, 2) == {"complete": 2}
    assert not [heard for heard in stub.heard if heard.startswith("POST") and "api-version=1" not in heard]


def busy(times: int, then: Answer, more: str = "", status: int = 429) -> Answer:
    """Refuse the first requests as a busy server does, then answer."""
    left = [times]

    def answer(body: Any) -> Any:
        if left[0]:
            left[0] -= 1
            return (status, {"error": "slow down"}, more) if more else (status, {"error": "slow down"})
        return then(body) if callable(then) else then

    return answer


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("more", ["", "Retry-After: 0", "Retry-After: Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_busy_server_is_asked_again(status: int, more: str) -> None:
    """After the time that it states, or a few times shortly after; a line says so."""
    lines: list[str] = []
    with answering({"GET /v1/models": busy(2, OPENAI["GET /v1/models"], more, status), CHAT: (200, STREAM)}) as stub:
        assert probe(stub.url, "openai", say=lines.append).model == "gpt"
    assert f"{stub.url}/v1/models answers {status}: slow down; trying again in" in lines[0]


def test_a_server_that_stays_busy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words and a hint; a time that is too long is not waited for."""
    waits: list[float] = []
    monkeypatch.setattr("loadgen.servers.json_client.sleep", waits.append)
    for more in ("", "Retry-After: 3600"):
        with (
            answering({"GET /v1/models": (503, {"error": {"message": "Loading model"}}, more or "X: y")}) as stub,
            pytest.raises(WrongServerError, match="/v1/models answers 503: Loading model") as caught,
        ):
            probe(stub.url)
        assert "still be loading" in caught.value.hint
    assert sum(waits) < 2


def test_a_gateway_that_wants_another_header_is_quoted() -> None:
    """A 403 or 400 says in the gateway's words what is missing."""
    with (
        answering({"GET /v1/models": (403, {"message": "X-Tenant is missing"})}) as stub,
        pytest.raises(UnauthorizedError, match="403: X-Tenant is missing") as caught,
    ):
        probe(stub.url)
    assert "--header" in caught.value.hint
    with (
        answering({"GET /v1/models": (400, {"error": {"message": "Invalid proxy server token"}})}) as stub,
        pytest.raises(WrongServerError, match="/v1/models answers 400: Invalid proxy server token"),
    ):
        probe(stub.url, access=Access({"Authorization": "Bearer wrong-key"}))


def test_a_list_of_models_that_is_not_published_is_not_needed() -> None:
    """With a model's name, only the endpoint has to be published."""
    with answering({"GET /v1/models": (403, b"no"), CHAT: (200, STREAM)}) as stub:
        with pytest.raises(UnauthorizedError):
            probe(stub.url)
        facts = probe(stub.url, model="gpt")
        assert chosen(stub, "completions", "chat", facts=facts).endpoint == "chat"


@pytest.mark.parametrize("base", ["/v1", ""])
def test_a_server_without_a_list_of_models_may_take_any_name(base: str, tmp_path: Path) -> None:
    """Servers of a single model often ignore its name, so the URL alone is enough. The name in requests is said."""
    with answering({f"POST {base}/chat/completions": (200, STREAM)}) as stub:
        facts = probe(stub.url)
        assert (facts.name, facts.model, facts.listed, facts.api_path) == ("openai", "default", False, base)
        code, out, err = burst(tmp_path, "--url", stub.url, "--n", "2", "--input-tokens", "8", "--output-tokens", "1")
    assert code in (0, 1, 5), err
    assert "does not list the model default, but accepts requests for it" in out
    assert accounted(tmp_path, 2) == {"complete": 2}


def test_the_probe_takes_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, each request delays the run, so there are at most 11. The server is probed once."""
    monkeypatch.setattr("loadgen.servers.discovery.FAR_S", inf)  # a busy machine must not look like a long way

    def chat(body: dict[str, Any]) -> Any:
        if body.get("stream"):
            return 200, STREAM
        return {"choices": [{}], "usage": {"prompt_tokens": len(body["messages"][0]["content"].split())}}

    load = ("--n", "1", "--input-tokens", "8", "--output-tokens", "1", "--metrics-every", "0")
    with answering({**OPENAI, CHAT: chat}) as stub:
        code, _, err = burst(tmp_path, "--url", stub.url, *load)
    assert code in (0, 1, 5), err
    assert len(stub.heard) - 1 <= 11, stub.heard
    assert stub.heard.count("GET /v1/models") == 1
