"""Bursts of 1000 against SGLang's own front end: loadgen's counts and times must be SGLang's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadgen.analysis.run import runfile
from tests.real.conftest import running_sglang

if TYPE_CHECKING:
    from tests.real.conftest import Burst, Engine, Outcome

N, INPUT_TOKENS, OUTPUT_TOKENS = 1000, 512, 128
ENDPOINTS = ("completions", "chat", "generate")
STREAM_INTERVALS = (1, 8)


@dataclass(frozen=True)
class Measured:
    """One burst, what SGLang's counters gained meanwhile, and the lines of its token log."""

    outcome: Outcome
    stream_interval: int
    gained: dict[str, float]
    log: list[dict[str, Any]]

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = self.outcome.summary
        return summary


@pytest.fixture(scope="module", params=STREAM_INTERVALS, ids=lambda interval: f"interval-{interval}")
def sglang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path, int]]:
    """A running SGLang, its token log, and its `--stream-interval`."""
    folder = tmp_path_factory.mktemp("sglang")
    log = folder / "tokens.jsonl"
    with running_sglang(folder, log, "--stream-interval", str(request.param)) as engine:
        yield engine, log, request.param


@pytest.fixture(scope="module", params=ENDPOINTS)
def measured(
    request: pytest.FixtureRequest,
    sglang: tuple[Engine, Path, int],
    burst: Burst,
    tmp_path_factory: pytest.TempPathFactory,
) -> Measured:
    """A burst of 1000 x (512 in, 128 out) on one endpoint, with no option that helps to make prompts exact."""
    engine, log, stream_interval = sglang
    folder = tmp_path_factory.mktemp(request.param) / "run"
    # A prompt of its own per endpoint: an earlier burst's prompts would be in the prefix cache.
    seed = 10 * stream_interval + ENDPOINTS.index(request.param)
    size = ("--n", N, "--input-tokens", INPUT_TOKENS, "--output-tokens", OUTPUT_TOKENS)
    before, lines_before = engine.counters(), len(log.read_text().splitlines())
    outcome = burst(engine, folder, *size, "--endpoint", request.param, "--seed", seed)
    after = wait_for_requests(engine, before["sglang:num_requests_total"] + N)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    lines = [json.loads(line) for line in log.read_text().splitlines()[lines_before:]]
    return Measured(outcome, stream_interval, gained, lines)


def wait_for_requests(engine: Engine, total: float) -> dict[str, float]:
    """Return the counters once SGLang has booked `total` requests, or after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        counters = engine.counters()
        if counters["sglang:num_requests_total"] >= total or time.monotonic() > deadline:
            return counters
        time.sleep(0.1)


def test_it_is_recognised_and_every_request_is_complete(measured: Measured) -> None:
    """loadgen finds out by itself which server answers, and its version."""
    measured.outcome.check_all_complete(N)
    server = measured.summary["server"]
    assert (server["name"], server["version"]) == ("sglang", "0.5.23")


def test_prompts_are_exact_by_sglangs_own_count(measured: Measured) -> None:
    """The responses and the token log have 512 prompt tokens for each request."""
    records = runfile.read(measured.outcome.folder).records
    assert [record.prompt_tokens for record in records] == [INPUT_TOKENS] * N
    counted = [line["prompt_tokens"] for line in measured.log if line["output_tokens"] == OUTPUT_TOKENS]
    assert counted == [INPUT_TOKENS] * N


def test_outputs_are_exact_by_sglangs_own_count(measured: Measured) -> None:
    """A token that gets no event of its own in a chat is still counted in the event that follows it."""
    records = runfile.read(measured.outcome.folder).records
    assert [record.output_tokens for record in records] == [OUTPUT_TOKENS] * N
    assert sum(sum(record.chunk_tokens) for record in records) == N * OUTPUT_TOKENS


def test_sglangs_counters_agree(measured: Measured) -> None:
    """The counters gained the tokens of the burst and of the few short requests that loadgen sends before it."""
    counts = {name: (entry["server"], entry["agree"]) for name, entry in measured.summary["server_counters"].items()}
    assert counts["prompt_tokens"] == (N * INPUT_TOKENS, True)
    assert counts["output_tokens"] == (N * OUTPUT_TOKENS, True)
    assert measured.gained["sglang:generation_tokens_total"] == sum(line["output_tokens"] for line in measured.log)
    assert measured.gained["sglang:prompt_tokens_total"] == sum(line["prompt_tokens"] for line in measured.log)


def test_itl_and_tpot_agree(measured: Measured) -> None:
    """Several tokens per event must not change the time per token.

    Both are means over all responses, which are equally long. In a burst of this size the HTTP process, not the
    scheduler, limits the rate, so an event has several tokens also with `--stream-interval 1`."""
    latency = measured.summary["latency"]
    assert latency["itl_s"]["mean"] == pytest.approx(latency["tpot_s"]["mean"], rel=0.02)
