"""`loadgen burst --url` against servers that speak the OpenAI protocol as others write it: nobody names them."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.backends import BACKENDS
from loadgen.servers.discovery import open_tokenizer, probe
from loadgen.servers.errors import UnreachableError
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, accounted, burst
from tests.support.simulated import running
from tests.support.small_servers import LLAMA_CPP, SGLANG, small_server
from tests.support.stub_server import Answer, Stub, answering
from tests.support.tiny_tokenizers import byte_level, save

TOKENIZER = byte_level()
LENGTHS = ("--n", "4", "--input-tokens", "32", "--output-tokens", "6")
HIDDEN: dict[str, Answer] = {f"GET {path}": (403, b"") for path in ("/info", "/token_load", "/simulated/status")}


class Spoken:
    """One server's way with the protocol: the fields it takes, and how its streams are written."""

    def __init__(self, *, refuses: tuple[str, ...] = (), done: bool = True, usage: str = "last") -> None:
        self.refuses, self.done, self.usage = refuses, done, usage

    def __call__(self, body: dict[str, Any]) -> Any:
        given = [*body, *(f"stream_options.{field}" for field in body.get("stream_options", ()))]
        if refused := [field for field in self.refuses if field in given]:
            return 422, {"detail": f"Unsupported fields in the request: {{'{refused[0]}'}}"}
        chat = "messages" in body
        text = body["messages"][0]["content"] if chat else body["prompt"]
        tokens = len(text if isinstance(text, list) else TOKENIZER.encode(text).ids)  # a list has the token ids
        asked = body["max_completion_tokens" if "max_tokens" in self.refuses else "max_tokens"]
        usage = {"prompt_tokens": tokens, "completion_tokens": asked, "total_tokens": tokens + asked}
        if not body.get("stream"):
            return {"object": "text_completion", "choices": [{"index": 0}], "usage": usage}
        chunks: list[dict[str, Any]] = [self.chunk(chat, {"role": "assistant", "content": ""}, "")] if chat else []
        chunks += [self.chunk(chat, {"content": " word"}, " word") for _ in range(asked)]
        chunks.append(self.chunk(chat, {}, "") | ({"usage": usage} if self.usage == "last" else {}))
        chunks[-1]["choices"][0]["finish_reason"] = "length"
        if self.usage == "own" and body.get("stream_options"):
            chunks.append({"choices": [], "usage": usage})
        events = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if self.done else [])
        return "".join(f"data: {event}\n\n" for event in events).encode()

    def chunk(self, chat: bool, delta: dict[str, str], text: str) -> dict[str, Any]:
        said = {"delta": delta} if chat else {"text": text, "logprobs": None}
        return {"id": "c", "object": "chunk", "choices": [{"index": 0, "finish_reason": None, **said}]}


def models(owner: str, **more: Any) -> Answer:
    return 200, {"object": "list", "data": [{"id": "org/model", "object": "model", "owned_by": owner, **more}]}


NO_GET = (404, {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}})
SERVERS: dict[str, dict[str, Answer]] = {
    "llama.cpp": {
        "GET /v1/models": (
            200,
            {
                "models": [{"name": "org/model", "model": "org/model", "type": "model", "details": {"format": "gguf"}}],
                "object": "list",
                "data": [{"id": "org/model", "aliases": [], "owned_by": "llamacpp", "meta": {"n_ctx": 4096}}],
            },
        ),
        "GET /v1/completions": NO_GET,
        "GET /v1/chat/completions": NO_GET,
        "POST /v1/completions": Spoken(),
        "POST /v1/chat/completions": Spoken(usage="own"),
        "POST /tokenize": lambda body: {"tokens": TOKENIZER.encode(body["content"]).ids},
    },
    "SGLang": {
        "GET /v1/models": models("sglang", root="org/model", parent=None, max_model_len=4096),
        "POST /v1/completions": Spoken(usage="own"),
        "POST /v1/chat/completions": Spoken(usage="own"),
        "GET /get_server_info": (200, {"version": "0.5.2", "max_total_num_tokens": 100_000}),
    },
    "TensorRT-LLM": {
        "GET /v1/models": models("tensorrt_llm", created=1),
        "GET /version": (200, {"version": "1.0.0"}),
        "POST /v1/completions": Spoken(refuses=("ignore_eos_token", "min_new_tokens"), usage="own"),
        "POST /v1/chat/completions": Spoken(usage="own"),
    },
    "transformers serve": {
        "GET /v1/models": models("org", created=1),
        "POST /v1/chat/completions": Spoken(refuses=("stream_options",), done=False),
        "POST /v1/responses": (422, {"detail": []}),
    },
    "hosted": {
        **HIDDEN,
        "GET /v1/models": models("system"),
        "POST /v1/chat/completions": Spoken(
            refuses=("stream_options.continuous_usage_stats", "max_tokens", "temperature"), usage="own"
        ),
    },
}
LEFT_OUT = {
    "transformers serve": ["stream_options"],
    "hosted": ["continuous_usage_stats", "max_tokens", "temperature"],
}


def sent(stub: Stub) -> list[dict[str, Any]]:
    """The requests of the run: those that were streamed, but for the one that found out what is refused."""
    streamed = [body for body in stub.bodies if body and body.get("stream")]
    return streamed[-4:]


@pytest.mark.parametrize("name", SERVERS)
def test_it_is_measured_by_its_url_alone(name: str, tmp_path: Path) -> None:
    """It is told apart, on an endpoint that it has, without the fields that it refuses; every answer is whole."""
    with answering(SERVERS[name]) as stub:
        file = save("byte_level", tmp_path)
        code, out, err = burst(tmp_path, "--url", f"{stub.url}/v1", *LENGTHS, "--tokenizer", str(file))
        bodies = sent(stub)
    assert code in (0, 5), err
    assert accounted(tmp_path, 4) == {"complete": 4}
    run = runfile.read(tmp_path / "run")
    server = "sglang" if name == "SGLang" else "openai"
    assert out.splitlines()[1].startswith(server)  # after the line with the seed
    assert (run.header.plan["server"], run.header.server["model"]) == (server, "org/model")
    chat_only = "POST /v1/completions" not in SERVERS[name]
    assert run.header.plan["endpoint"] == ("chat" if chat_only else "completions")
    assert {record.output_tokens for record in run.records} == {6}
    assert {record.prompt_tokens for record in run.records} == {32}
    refused = LEFT_OUT.get(name, [])
    assert run.header.client.get("left_out", []) == refused
    assert ("refuses" in out) == bool(refused)
    assert not [field for body in bodies for field in refused if field in {**body, **body.get("stream_options", {})}]


@pytest.mark.parametrize("name", SERVERS)
def test_the_url_alone_is_enough(name: str, tmp_path: Path) -> None:
    """Without a tokenizer or a tokenize route, prompts have about the requested length. Every output says estimated."""
    with answering(SERVERS[name]) as stub:
        code, out, err = burst(tmp_path, "--url", f"{stub.url}/v1", *LENGTHS)
    assert code in (0, 5), err
    assert accounted(tmp_path, 4) == {"complete": 4}
    text = " ".join(out.split())
    tokens = "32 tokens" if "POST /tokenize" in SERVERS[name] else "about 32 tokens (estimated)"
    assert f": 4 requests, all at once, {tokens} in, 6 out" in text
    assert f"4 prompts of {tokens} " in text
    assert f"4 requests of {tokens}, all at once" in text


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("routes", [LLAMA_CPP, SGLANG], ids=["llama.cpp", "SGLang"])
def test_a_tokenize_route_makes_lengths_exact(
    routes: dict[str, Callable[[Any], Any]], endpoint: str, tmp_path: Path
) -> None:
    """Special tokens and the chat template are counted too. The server reports the requested lengths."""
    with small_server(routes) as server:
        more = ("--endpoint", endpoint, "--lengths", "exact")
        code, _, err = burst(tmp_path, "--url", server.url, *more, *LENGTHS)
        generated = [body for name, body in server.requests if name.startswith("POST /v1/") and body]
    assert code in (0, 5), err
    run = runfile.read(tmp_path / "run")
    assert {(record.prompt_tokens, record.prompt_tokens_asked) for record in run.records} == {(32, 32)}
    samples = len(generated) - len(run.records)
    counts_chats = routes is SGLANG or endpoint == "completions"
    assert samples == (1 if counts_chats else 3), "the test request, and two samples of the template"


def test_a_tokenize_route_of_another_model_is_not_used(tmp_path: Path) -> None:
    """Its counts do not fit what the chat endpoint reports, so the lengths are estimated by samples."""
    routes = LLAMA_CPP | {"POST /tokenize": lambda body: {"tokens": [7] * len(body["content"])}}
    with small_server(routes) as server:
        code, out, err = burst(tmp_path, "--url", server.url, "--endpoint", "chat", *LENGTHS)
    assert code in (0, 5), err
    assert "4 prompts of about 32 tokens (estimated)" in " ".join(out.split())


def test_a_probe_that_generates_waits_as_long_as_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a slow first token is not still loading: --timeout says how long."""

    def slowly(_: Any) -> Any:
        time.sleep(0.3)
        return {"usage": {"prompt_tokens": 1}}

    slow: dict[str, Answer] = {**SERVERS["SGLang"], "POST /v1/completions": slowly}
    dialect = BACKENDS["openai"].dialects["completions"]
    with answering(slow) as stub:
        facts = probe(stub.url, "openai")
        monkeypatch.setattr("loadgen.servers.json_client.TIMEOUT_S", 0.1)
        with open_tokenizer(facts, dialect, timeout_s=20) as server:
            assert server.count(["a"]) == [1]
        with open_tokenizer(facts, dialect, timeout_s=0.05) as server, pytest.raises(UnreachableError) as caught:
            server.count(["a"])
    assert "within 0.05 s" in str(caught.value)
    assert "--timeout" in caught.value.hint


@pytest.mark.parametrize("status", [200, 503])
def test_a_compressed_answer_is_named_or_read(status: int, tmp_path: Path) -> None:
    """A stream that is compressed hides its tokens, and says so; an error in one is read."""
    spoken = Spoken()

    def compressed(body: Any) -> Any:
        if not body.get("stream"):
            return spoken(body)
        return status, gzip.compress(spoken(body) if status == 200 else b'{"error": {"message": "no room"}}')

    with answering({**SERVERS["SGLang"], "POST /v1/completions": compressed}) as stub:
        file = save("byte_level", tmp_path)
        code, _, err = burst(tmp_path, "--url", stub.url, *LENGTHS, "--tokenizer", str(file))
    assert code == 1, err
    (found,) = {
        (record.state, record.error_kind, record.error_detail) for record in runfile.read(tmp_path / "run").records
    }
    if status == 200:
        ending, words = ("failed", "protocol"), "compressed (gzip)"
    else:
        ending, words = ("rejected", "rejected"), "no room"
    assert found[:2] == ending
    assert words in found[2]


def test_a_missing_key_suggests_the_variable_of_other_tools(tmp_path: Path) -> None:
    """A server that requires a key, and OPENAI_API_KEY is set: the hint has the option to add, and not the key."""
    key = "sk-of-another-tool"
    with answering({"GET /v1/models": (401, b"")}) as stub:
        code, out, err = burst(tmp_path, "--url", stub.url, OPENAI_API_KEY=key)
        assert (code, "--api-key-env OPENAI_API_KEY" in err) == (3, True), err
        assert key not in out + err
        code, _, err = burst(tmp_path, "--url", stub.url, "--api-key-env", "OPENAI_API_KEY", OPENAI_API_KEY=key)
    assert (code, "--api-key-env OPENAI_API_KEY" in err) == (3, False), err


def test_a_key_that_is_not_set_and_a_model_that_is_not_there_are_told(tmp_path: Path) -> None:
    """A key that is missing is a mistake of the command line. A model is refused by the server, in its own words."""
    refusal = (404, {"error": {"message": "The model `nope` does not exist.", "type": "NotFoundError"}})
    refusing: dict[str, Answer] = {"POST /v1/completions": refusal, "POST /v1/chat/completions": refusal}
    with answering(SERVERS["SGLang"] | refusing) as stub:
        code, _, err = burst(tmp_path, "--url", stub.url, "--api-key-env", "NOT_SET_ANYWHERE")
        assert (code, "--api-key-env NOT_SET_ANYWHERE: the variable is empty or not set" in err) == (2, True)
        assert not stub.heard
        code, _, err = burst(tmp_path, "--url", stub.url, "--model", "nope")
        assert (code, "The model `nope` does not exist." in err, "it lists: org/model" in err) == (3, True, True)
    assert not (tmp_path / "run" / "run.jsonl").exists()


def test_a_vllm_that_refuses_the_model_is_not_measured(tmp_path: Path) -> None:
    """One request is enough to find out: a run would only collect the same refusal many times."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        code, _, err = burst(tmp_path, "--url", server.url, "--model", "nope", *LENGTHS)
    assert (code, "it lists: llama-2-7b; name one with --model" in err) == (3, True), err


def test_a_content_type_from_another_command_line_is_sent_once(tmp_path: Path) -> None:
    """Servers refuse a request that has the header twice, and a command for curl or hey always names it."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        header = ("--header", "Content-Type: application/json")
        code, _, err = burst(tmp_path, "--url", server.url, *header, *LENGTHS)
    assert code in (0, 5), err
    assert accounted(tmp_path, 4) == {"complete": 4}
