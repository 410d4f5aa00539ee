"""Embeddings and rerank: what is asked, and what an answer says."""

from __future__ import annotations

import pytest

from loadgen.servers.backends import pooling
from loadgen.workloads.request import Request
from tests.support.dialects import POOLING

TEXT = "the one and the other of them"
ANSWER = b'{"object":"list","data":[{"index":0,"embedding":[0.5]}],"usage":{"prompt_tokens":7,"total_tokens":7}}'
SCORES = b'{"results":[{"index":0,"relevance_score":0.5}],"usage":{"total_tokens":9}}'


def asked(prompt: str | tuple[int, ...] = TEXT, **more: object) -> Request:
    return Request(1, prompt, 7, 0, **more)  # type: ignore[arg-type]


def test_a_request_is_these_bytes() -> None:
    """Alike on every server; ids where the API takes them; a text to rank is cut in two at a blank, which stays."""
    assert {server for server, _ in POOLING} == {"vllm", "sglang", "tei", "openai"}
    for server in ("vllm", "sglang", "tei", "openai"):
        body = POOLING[server, "embeddings"].encode(asked(), "m")
        assert body == b'{"model":"m","input":"the one and the other of them"}'
    for server in ("vllm", "sglang", "openai"):
        body = POOLING[server, "rerank"].encode(asked(), "m")
        assert body == b'{"model":"m","query":"the one and","documents":[" the other of them"]}'
    assert POOLING["vllm", "embeddings"].encode(asked((5, 6)), "m") == b'{"model":"m","input":[5,6]}'


def test_several_inputs_are_a_list_or_documents_of_one_query() -> None:
    """The common beginning of the inputs, at most half of the shortest one, is the query."""
    request = asked("the one of us", batch=("the one with no name", "the one we see"), inputs=3)
    listed = b'["the one of us","the one with no name","the one we see"]'
    for endpoint in ("embeddings", "classify"):
        assert POOLING["vllm", endpoint].encode(request, "m") == b'{"model":"m","input":%b}' % listed
    body = b'{"model":"m","%b":"the one","%b":[" of us"," with no name"," we see"]}'
    assert POOLING["vllm", "rerank"].encode(request, "m") == body % (b"query", b"documents")
    assert POOLING["openai", "score"].encode(request, "m") == body % (b"text_1", b"text_2")
    labels = b'"label_token_ids":[0,1]}'
    assert POOLING["sglang", "score"].encode(request, "m") == body[:-1] % (b"query", b"items") + b"," + labels
    assert POOLING["sglang", "classify"].encode(request, "m") == b'{"model":"m","input":%b}' % listed
    ids = asked((5, 6), batch=((7, 8),), inputs=2)
    assert POOLING["vllm", "embeddings"].encode(ids, "m") == b'{"model":"m","input":[[5,6],[7,8]]}'


def test_results_are_counted() -> None:
    """One per input: the Record counts inputs per second with them."""
    answer = b'{"data":[{"index":0,"probs":[1]},{"index":1,"probs":[1]}],"usage":{"prompt_tokens":7}}'
    assert pooling.decode([answer]).counts == {"inputs": 2}
    assert pooling.decode([SCORES]).counts == {"inputs": 1}


def test_documents_of_the_user_make_the_whole_text_the_query() -> None:
    """As a line of a JSONL file has them."""
    body = POOLING["vllm", "rerank"].encode(asked(body={"documents": ["a", "b"], "top_n": 1}), "m")
    assert body == b'{"model":"m","query":"the one and the other of them","documents":["a","b"],"top_n":1}'
    body = POOLING["vllm", "score"].encode(asked(body={"text_2": ["a", "b"]}), "m")
    assert body == b'{"model":"m","text_1":"the one and the other of them","text_2":["a","b"]}'


@pytest.mark.parametrize(("payload", "tokens"), [(ANSWER, 7), (SCORES, 9)])
def test_an_answer_is_one_payload_without_tokens(payload: bytes, tokens: int) -> None:
    """It ends with itself and says how long the prompt was."""
    found = pooling.decode([payload])
    assert (found.tokens, found.end_event, found.prompt_tokens, found.output_tokens) == ([0], 0, tokens, 0)
    assert (found.error_kind, found.counted_by) == ("", "server")


@pytest.mark.parametrize(
    ("payload", "kind", "said"),
    [
        (b'{"error":{"message":"no room","type":"x","code":400}}', "in_band_error", "no room (x, 400)"),
        (b'{"data":[],"usage":{"prompt_tokens":7}}', "protocol", "neither embeddings nor scores"),
        (ANSWER[:40], "protocol", "event 0 is not of this dialect"),
        (ANSWER.replace(b"7", b"-7"), "protocol", "event 0 is not of this dialect"),
        (ANSWER.replace(b"7", b"1e30"), "protocol", "event 0 is not of this dialect"),
        (b"<html>", "protocol", "event 0 is not of this dialect"),
    ],
)
def test_what_is_no_answer_is_an_error(payload: bytes, kind: str, said: str) -> None:
    """The server's own error, an answer with nothing in it, half of one, an impossible number."""
    found = pooling.decode([payload])
    assert (found.end_event, found.error_kind) == (None, kind)
    assert found.error_detail.startswith(said)


RANKED = b'[{"score":0.5,"index":1,"meta_info":{"prompt_tokens":7}},{"score":0.1,"index":0,"meta_info":%b}]'


@pytest.mark.parametrize(("info", "tokens"), [(b'{"prompt_tokens":9}', 16), (b"null", None)])
def test_a_ranking_of_sglang_is_a_list(info: bytes, tokens: int | None) -> None:
    """Each document has its number of tokens, except with a model that generates text."""
    found = POOLING["sglang", "rerank"].decode([RANKED % info])
    assert (found.end_event, found.counts, found.prompt_tokens) == (0, {"inputs": 2}, tokens)
    assert found.error_kind == ""


@pytest.mark.parametrize(
    ("payload", "kind", "said"),
    [
        (b'{"object":"error","message":"no room","type":"x","code":400}', "in_band_error", "no room (x, 400)"),
        (b"[]", "protocol", "neither embeddings nor scores"),
        (RANKED[:20], "protocol", "event 0 is not of this dialect"),
    ],
)
def test_what_is_no_ranking_is_an_error(payload: bytes, kind: str, said: str) -> None:
    """The error of the server is an object, not a list."""
    found = POOLING["sglang", "rerank"].decode([payload])
    assert (found.end_event, found.error_kind) == (None, kind)
    assert found.error_detail.startswith(said)


def test_scores_of_sglang_are_counted() -> None:
    """One row of label probabilities per item."""
    answer = b'{"scores":[[0.5,0.5],[0.1,0.9]],"usage":{"prompt_tokens":7,"total_tokens":7},"object":"scoring"}'
    found = POOLING["sglang", "score"].decode([answer])
    assert (found.counts, found.prompt_tokens, found.end_event) == ({"inputs": 2}, 7, 0)


def test_nothing_is_no_end() -> None:
    """What was cut off is no answer at all."""
    assert pooling.decode([]).end_event is None
