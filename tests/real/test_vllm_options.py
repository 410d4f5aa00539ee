"""Options of a run against vLLM itself: that it reads them, and that our counts are still its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from loadgen.servers.backends import BACKENDS
from loadgen.servers.wire import sse
from loadgen.workloads.request import Request
from tests.real.conftest import running_vllm
from tests.real.test_vllm import counted

if TYPE_CHECKING:
    from tests.real.conftest import Burst, Engine

N = 32
SIZE = ("--n", N, "--input-tokens", 64)
SAMPLED = {"temperature": 1, "logit_bias": {"1": 6}}
"""Token 1 ends an answer: with this it does so every now and then."""


@pytest.fixture(scope="module")
def long_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One with a context of 32768 tokens."""
    longer = ("--hf-overrides", '{"max_position_embeddings": 32768}', "--max-model-len", "32768")
    with running_vllm(tmp_path_factory.mktemp("long"), *longer) as engine:
        yield engine


@pytest.fixture(scope="module")
def pooling_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One that makes embeddings of what the model knows, and ranks by them."""
    with running_vllm(tmp_path_factory.mktemp("pooling"), "--runner", "pooling", "--convert", "embed") as engine:
        yield engine


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_chunks_hold_as_many_tokens_as_vllm_sent(vllm: Engine, endpoint: str) -> None:
    """While the process that answers stands still its engine goes on, and several tokens share an event. By the running
    usage, which a run asks for, each event holds as many as by the ids of its tokens, which these requests ask for
    besides."""
    dialect = BACKENDS["vllm"].dialects[endpoint]

    def ask(number: int) -> list[dict[str, Any]]:
        request = Request(number, f"Number {number}.", 0, 128, body={"return_token_ids": True})
        body = dialect.encode(request, "tiny")
        reply = httpx.post(vllm.url + dialect.path, content=body, headers={"Content-Type": "application/json"})
        return [json.loads(data) for data in sse.split_events(reply.content)[0][:-1]]

    def answers_of(stopped_s: float) -> list[list[dict[str, Any]]]:
        """Ask 64 times at once, and stop the process that answers again and again, for this time."""
        with ThreadPoolExecutor(64) as pool:
            asked = [pool.submit(ask, number) for number in range(64)]
            while not all(each.done() for each in asked):
                os.kill(vllm.pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(vllm.pid, signal.SIGCONT)
                time.sleep(0.2)
            return [each.result() for each in asked]

    largest = 0
    for stopped_s in (1.0, 3.0, 6.0):  # on a busy machine, a step of the engine may take longer than a second
        for events in answers_of(stopped_s):
            ids = [choice.pop("token_ids", None) or [] for event in events for choice in event["choices"]]
            answer = dialect.decode([*map(msgspec.json.encode, events), b"[DONE]"])
            assert [tokens for event, tokens in zip(events, answer.tokens, strict=False) if event["choices"]] == [
                *map(len, ids)
            ]
            assert sum(map(len, ids)) == answer.output_tokens == 128
            largest = max(largest, *map(len, ids))
        if largest > 1:
            break
    assert largest > 1, "no event held several tokens: nothing was tried"


@pytest.mark.parametrize("options", [("--output-tokens", "max:96"), ("--output-tokens", 96, "--no-ignore-eos")])
def test_answers_may_end(vllm: Engine, burst: Burst, tmp_path: Path, options: tuple[object, ...]) -> None:
    """Some do before their limit, none before `min_tokens`; all are complete, and each token is in vLLM's counter."""
    mine = ("--extra-body", json.dumps(SAMPLED | {"min_tokens": 8}))
    measured = counted(vllm, N, lambda: burst(vllm, tmp_path / "run", *SIZE, *options, *mine))
    measured.outcome.check_all_complete(N)
    records = measured.outcome.records
    lengths = [record.output_tokens or 0 for record in records]
    assert 8 <= min(lengths) < max(lengths) <= 96
    assert {record.finish_reason for record in records} >= {"stop"}
    assert [sum(record.chunk_tokens) for record in records] == lengths
    assert sum(lengths) == measured.gained["vllm:generation_tokens_total"]
    assert measured.summary["tokens"]["output_mismatches"] == 0


def test_fields_of_the_user_reach_it(vllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """A model that would end its answers goes on to their length; a temperature that vLLM refuses it does refuse."""
    options = (*SIZE, "--output-tokens", 96, "--extra-body")
    outcome = burst(vllm, tmp_path / "run", *options, json.dumps(SAMPLED))
    outcome.check_all_complete(N)
    assert [record.output_tokens for record in outcome.records] == [96] * N
    refused = burst(vllm, tmp_path / "refused", *options, '{"temperature": -1}')
    assert refused.exit_code == 1
    assert refused.summary["requests"]["errors"] == {"http_status": N}
    assert all("temperature" in record.error_detail for record in refused.records)


def test_a_file_says_how_long_answers_are(vllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """Each line's `output_tokens` is the length asked for and had, 128 where there is none; its `body` goes along."""
    lines: list[dict[str, Any]] = [{"prompt": f"Line {n}.", "output_tokens": 5 + n} for n in range(N - 2)]
    lines += [{"prompt": "No length."}, {"prompt": "Of its own.", "output_tokens": 7, "body": {"logprobs": 1}}]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--n", N, "--workload", f"jsonl:{file}")
    measured = counted(vllm, N, lambda: burst(vllm, tmp_path / "run", *options))
    measured.outcome.check_all_complete(N)
    lengths = [line.get("output_tokens", 128) for line in lines]
    assert [record.output_tokens for record in measured.outcome.records] == lengths
    assert measured.gained["vllm:generation_tokens_total"] == sum(lengths)


def test_a_model_that_it_does_not_have(vllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """vLLM refuses it, so no run is started; the hint has the name of the one there is."""
    measured = counted(vllm, 0, lambda: burst(vllm, tmp_path / "run", *SIZE, "--model", "nope"))
    assert measured.outcome.exit_code == 3
    assert "it lists: tiny" in measured.outcome.stderr
    assert measured.gained["vllm:prompt_tokens_total"] == 0


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_long_prompts(long_vllm: Engine, burst: Burst, tmp_path: Path, endpoint: str) -> None:
    """Prompts of 16,000 tokens are exact, and nothing in their answers is too long for a read."""
    options = ("--endpoint", endpoint, "--n", 3, "--input-tokens", "16k", "--output-tokens", 8)
    measured = counted(long_vllm, 3, lambda: burst(long_vllm, tmp_path / "run", *options))
    measured.outcome.check_all_complete(3)
    assert measured.gained["vllm:prompt_tokens_total"] == 3 * 16_000
    assert not [reason for reason in measured.summary["client"]["reasons"] if "window" in reason]


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank"])
def test_prompts_without_answers(pooling_vllm: Engine, burst: Burst, tmp_path: Path, endpoint: str) -> None:
    """Embeddings and scores: all complete, each prompt of the requested length by vLLM's count, no figure of tokens. It
    ranks by the embeddings of query and document, which it finishes one by one."""
    outcome = burst(pooling_vllm, tmp_path / "run", *SIZE, "--endpoint", endpoint)
    outcome.check_all_complete(N)
    assert [record.prompt_tokens for record in outcome.records] == [64] * N
    assert outcome.summary["server_counters"]["prompt_tokens"]["server"] == 64 * N
    assert outcome.summary["throughput"]["input_tokens_per_s"] > 0
    assert outcome.summary["latency"]["ttft_s"]["n"] == 0
    finished = outcome.summary["server_counters"]["requests_finished"]
    texts_per_request = 2 if endpoint == "rerank" else 1
    assert finished["server"] == texts_per_request * N
    assert ("counts each text" in finished["why"]) == (endpoint == "rerank")
