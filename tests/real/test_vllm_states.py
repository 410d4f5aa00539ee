"""Facts that a real vLLM states about each request: cached tokens, and times in the queue and in prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.real.conftest import running_vllm
from tests.real.test_vllm import counted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.conftest import Burst, Engine

N, INPUT_TOKENS = 16, 512
LOAD = ("--n", N, "--input-tokens", INPUT_TOKENS, "--output-tokens", 8, "--seed", 37)


@pytest.fixture(scope="module")
def stating_vllm(tmp_path_factory: pytest.TempPathFactory, burst: Burst) -> Iterator[Engine]:
    """A vLLM that states cached tokens and times in each response. Its first requests, which are slow, are over."""
    folder = tmp_path_factory.mktemp("vllm")
    options = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")
    with running_vllm(folder, *options) as engine:
        for endpoint in ("completions", "chat"):
            burst(engine, folder / endpoint, "--n", 2, "--output-tokens", 8, "--endpoint", endpoint)
        yield engine


def test_the_hit_rate_is_that_of_vllms_counters(stating_vllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """Of two bursts with one seed, the first finds nothing in the cache, and the second three quarters of its prompts.

    Both hit rates are exactly those of vLLM's counters."""
    shares = []
    for name in ("first", "second"):
        measured = counted(stating_vllm, N, lambda name=name: burst(stating_vllm, tmp_path / name, *LOAD))
        measured.outcome.check_all_complete(N)
        cached = measured.summary["cached_prompts"]
        assert cached["source"] == "responses"
        assert cached["tokens"] == measured.gained["vllm:prefix_cache_hits_total"]
        assert cached["prompt_tokens"] == measured.gained["vllm:prefix_cache_queries_total"] == N * INPUT_TOKENS
        shares.append(cached["share"])
    assert shares[0] == 0
    assert shares[1] == 0.75  # a block has 128 tokens on a CPU, and the last block of a prompt is always computed


def test_ttft_is_split_by_vllms_own_times(stating_vllm: Engine, burst: Burst, tmp_path: Path) -> None:
    """The sums of queue and prefill over all requests are those of vLLM's histograms, and TTFT is longer than both."""
    for endpoint in ("completions", "chat"):
        options = (*LOAD[:-2], "--server-timing", "--endpoint", endpoint)
        measured = counted(
            stating_vllm, N, lambda options=options: burst(stating_vllm, tmp_path / options[-1], *options)
        )
        measured.outcome.check_all_complete(N)
        timing = measured.summary["server_timing"]
        assert (timing["requests"], timing["longer"], timing["sources"]) == (N, 0, ["metrics"])
        assert [part["name"] for part in timing["parts"]] == ["queue", "prefill", "network", "remainder"]
        for mark, histogram in (("queue", "request_queue_time"), ("prefill", "request_prefill_time")):
            stated_s = sum(record.marks[f"server_{mark}_us"] for record in measured.outcome.records) / 1e6
            counted_s = measured.gained[f"vllm:{histogram}_seconds_sum"]
            assert stated_s == pytest.approx(counted_s, rel=0.05, abs=0.02)
