"""A simulated TGI where it differs from other servers: pieces of long responses, several responses, tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import accounted, burst, summary_of
from tests.support.simulated import running

FAST: dict[str, Any] = {"ttft_s": 0.001, "itl_s": 0.00001, "speed": 100}


@pytest.fixture(scope="module")
def tgi() -> Iterator[httpx.Client]:
    """A simulated TGI with room for 4096 tokens."""
    config = SimulatedConfig(server="tgi", model="tiny", max_model_len=4096, **FAST)
    with running(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def generated(client: httpx.Client, asked: int, prompt: str = "a b c") -> tuple[int, str, int]:
    """Tokens by the last event's count, the finish reason, and tokens by the number of events."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": asked, "details": True}}
    answer = client.post("/generate_stream", json=body).text
    events = [json.loads(event.removeprefix("data: ")) for event in answer.split("\n\n") if event]
    details = events[-1]["details"]
    return details["generated_tokens"], details["finish_reason"], len(events)


@pytest.mark.parametrize(
    ("asked", "made"), [(1, 1), (1023, 1023), (1024, 1024), (1025, 2048), (1200, 2048), (2048, 2048), (2049, 3072)]
)
def test_long_responses_come_in_whole_pieces(tgi: httpx.Client, asked: int, made: int) -> None:
    """Up to 1,024 tokens are what was asked. A longer response ends with the piece that reaches the number."""
    assert generated(tgi, asked) == (made, "length", made)


def test_a_piece_that_does_not_fit_is_not_begun(tgi: httpx.Client) -> None:
    """The context of 4,096 has room for three pieces behind a prompt of four tokens, whatever the number is."""
    assert generated(tgi, 100_000) == (3072, "length", 3072)
    assert generated(tgi, 1200, "word " * 2500)[:2] == (1024, "length")


def test_without_a_number_a_response_fills_the_context(tgi: httpx.Client) -> None:
    """The last piece is shorter then."""
    answer = tgi.post("/generate", json={"inputs": "a b c", "parameters": {"details": True}}).json()["details"]
    assert (answer["generated_tokens"], answer["finish_reason"]) == (4092, "length")


def test_each_piece_counts_its_prompt() -> None:
    """The metrics count the prompt again for each piece, together with what was said before."""
    config = SimulatedConfig(server="tgi", model="tiny", max_model_len=4096, **FAST)
    with running(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert generated(client, 1200)[0] == 2048
        page = client.get("/metrics").text
    counted = {name: float(value) for name, value in re.findall(r"^tgi_request_(\w+) (\S+)$", page, re.MULTILINE)}
    assert (counted["input_length_count"], counted["input_length_sum"]) == (2, 4 + 4 + 1024)
    assert (counted["max_new_tokens_sum"], counted["generated_tokens_sum"]) == (2048, 2048)
    assert (counted["success"], counted["generated_tokens_count"]) == (1, 1)


def test_the_tgi_of_2023_has_no_pieces() -> None:
    """Before 3.0 a response ended at the number asked, and one that did not fit was refused."""
    config = SimulatedConfig(server="tgi", clock="batching", vintage="2023", max_model_len=2048, speed=1000)
    with running(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert generated(client, 1200) == (1200, "length", 1200)
        body = {"inputs": "a", "parameters": {"max_new_tokens": 100_000}}
        assert client.post("/generate", json=body).status_code == 422


def test_several_prompts_get_a_choice_each(tgi: httpx.Client) -> None:
    """Up to `max_client_batch_size`, streamed or not; each choice ends by itself, and usage adds up."""
    body = {"prompt": ["a b", "c"], "max_tokens": 3, "temperature": 0}
    whole = tgi.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    text = tgi.post("/v1/completions", json={**body, "stream": True}).text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    indexes = [event["choices"][0]["index"] for event in events]
    assert (indexes.count(0), indexes.count(1)) == (3, 3)
    assert [event["usage"]["completion_tokens"] for event in events if "usage" in event] == [3, 3]
    refused = tgi.post("/v1/completions", json={**body, "prompt": [*"abcde"]})
    assert refused.status_code == 422
    assert refused.json()["error_type"] == "batch size exceeded"


def test_the_best_of_several_responses_comes_with_the_others(tgi: httpx.Client) -> None:
    """`best_of` wants sampling and takes at most two; the others stand in the details."""
    parameters = {"max_new_tokens": 4, "details": True, "best_of": 2}
    greedy = tgi.post("/generate", json={"inputs": "a", "parameters": parameters})
    assert (greedy.status_code, "you must use sampling" in greedy.text) == (422, True)
    sampled = tgi.post("/generate", json={"inputs": "a", "parameters": {**parameters, "do_sample": True}}).json()
    (other,) = sampled["details"]["best_of_sequences"]
    assert other["generated_text"] != sampled["generated_text"]
    assert other["seed"] != sampled["details"]["seed"]
    many = tgi.post("/generate", json={"inputs": "a", "parameters": {**parameters, "do_sample": True, "best_of": 3}})
    assert "`best_of` must be > 0 and <= 2. Given: 3" in many.text


def test_a_tool_is_called(tgi: httpx.Client) -> None:
    """The answer is a call of the first tool that may be called; `none` and no tools give a text."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 100}
    message = tgi.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"description": None, "name": "f", "arguments": '{"a":7}'}
    text = tgi.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()["choices"][0]["message"]
    assert "tool_calls" not in text
    unknown = tgi.post("/v1/chat/completions", json={**body, "tool_choice": "g", "stream": True})
    assert (unknown.status_code, unknown.json()["error_type"]) == (422, "tool_error")
    cut = tgi.post("/v1/chat/completions", json={**body, "max_tokens": 3})
    assert (cut.status_code, "Failed to parse generated text" in cut.text) == (422, True)


def test_a_streamed_tool_call_hides_tokens(tgi: httpx.Client) -> None:
    """Only some of the tokens have an event, no event has a finish reason, and usage counts every token."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 100, "stream": True}
    text = tgi.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    assert {choice["finish_reason"] for choice in choices} == {None}
    assert choices[0]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{"}
    assert 0 < len(choices) < events[-1]["usage"]["completion_tokens"]


def test_a_grammar_decides_what_is_said(tgi: httpx.Client) -> None:
    """A document of the schema, then the end of the text; a limit that comes first cuts it."""
    schema = {"type": "json", "value": {"properties": {"a": {"type": "integer"}}}}
    parameters = {"max_new_tokens": 50, "details": True, "grammar": schema}
    answer = tgi.post("/generate", json={"inputs": "x", "parameters": parameters}).json()
    assert json.loads(answer["generated_text"]) == {"a": 7}
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["tokens"][-1]["special"] is True
    cut = tgi.post("/generate", json={"inputs": "x", "parameters": {**parameters, "max_new_tokens": 2}}).json()
    assert (cut["details"]["finish_reason"], cut["details"]["generated_tokens"]) == ("length", 2)
    bad = tgi.post("/generate", json={"inputs": "x", "parameters": {"grammar": {"type": "json", "value": {}}}})
    assert "Grammar must have a 'properties' field" in bad.text


def test_a_reason_phrase_is_rusts(tgi: httpx.Client) -> None:
    """Python calls the same status by another name."""
    large = tgi.post("/generate", json={"inputs": "a" * 2_000_001})
    assert (large.status_code, large.reason_phrase) == (413, "Payload Too Large")


def test_a_page_can_be_asked_for_its_head(tgi: httpx.Client) -> None:
    """axum answers HEAD wherever it answers GET, and says so in `allow`."""
    assert tgi.head("/info").status_code == 200
    assert tgi.post("/info").headers["allow"] == "GET,HEAD"


def test_long_responses_are_measured(tmp_path: Path) -> None:
    """A run is told beforehand what TGI makes of its lengths. Its requests are complete, and the report has figures and
    says that the lengths are not those requested."""
    config = SimulatedConfig(server="tgi", max_model_len=4096, ttft_s=0.01, itl_s=0.0001)
    with running(config) as server:
        load = ("--n", "3", "--input-tokens", "16", "--output-tokens", "1200", "--no-report")
        code, out, err = burst(tmp_path, "--server", "tgi", "--url", server.url, *load)
    advice = (
        "TGI 3.x generates in pieces of 1,024 tokens: 1,200 becomes 2,048. Ask for at most 1,024, or a multiple of it."
    )
    assert advice in out, err
    assert code in (0, 5)
    assert accounted(tmp_path, 3) == {"complete": 3}
    summary = summary_of(tmp_path)
    assert summary["tokens"]["output_reported"] == 3 * 2048
    assert summary["tokens"]["output_mismatches"] == 3
    assert summary["latency"]["tpot_s"]["n"] == 3
    longer = (
        "3 of 3 responses were longer than requested: 2,048 tokens instead of 1,200 on average; TGI generates in pieces"
    )
    assert longer in " ".join(out.split())


def test_the_built_in_tgi_has_room_for_whole_pieces(tmp_path: Path) -> None:
    """Without a server the simulated one is started with a context that the last piece fits into."""
    load = ("--n", "2", "--input-tokens", "3000", "--output-tokens", "2100", "--speed", "1000", "--no-report")
    code, out, err = burst(tmp_path, "--server", "tgi", *load)
    assert "2,100 becomes 3,072." in out, err
    assert code in (0, 5)
    assert summary_of(tmp_path)["tokens"]["output_reported"] == 2 * 3072
