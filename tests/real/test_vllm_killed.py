"""vLLM dies in the middle of the burst."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record

if TYPE_CHECKING:
    from tests.real.conftest import Engine, FinishBurst, Outcome, StartBurst

N = 128


def wait_until_generating(engine: Engine, tokens: int) -> None:
    """Return when vLLM has generated `tokens` tokens: the burst is then under way, and far from done."""
    deadline = time.monotonic() + 60
    while engine.counters()["vllm:generation_tokens_total"] < tokens:
        if time.monotonic() > deadline:
            pytest.fail("the burst did not get under way")
        time.sleep(0.1)


@dataclass(frozen=True)
class Died:
    """How a burst ended whose server died when all of it was streaming."""

    outcome: Outcome
    records: list[Record]


@pytest.fixture
def burst_until(
    vllm_of_my_own: Engine, start_burst: StartBurst, finish_burst: FinishBurst, tmp_path: Path
) -> Callable[[Callable[[], None]], Died]:
    def run(kill: Callable[[], None]) -> Died:
        folder = tmp_path / "run"
        options = ("--n", N, "--input-tokens", 512, "--output-tokens", 1500, "--seed", 1)
        process = start_burst(vllm_of_my_own, folder, *options)
        wait_until_generating(vllm_of_my_own, 2000)
        kill()
        outcome = finish_burst(process, folder)
        return Died(outcome, runfile.read(folder).records)

    return run


def check_all_is_accounted_for(died: Died) -> None:
    assert died.outcome.exit_code == 1, died.outcome.stderr
    assert "Traceback" not in died.outcome.stderr
    requests = died.outcome.summary["requests"]
    assert requests["sent"] == requests["complete"] + requests["truncated"] + requests["failed"] == N
    assert requests["complete"] == 0
    assert sorted(record.id for record in died.records) == list(range(N))
    # On a busy machine vLLM puts several tokens into one event.
    assert sum(sum(record.chunk_tokens) for record in died.records) >= 1000, "what had arrived is kept"


def test_server_killed_mid_burst(vllm_of_my_own: Engine, burst_until: Callable[..., Died]) -> None:
    """All of vLLM gets SIGKILL: exit code 1, no traceback, each request truncated or failed, its chunks kept."""
    died = burst_until(vllm_of_my_own.kill)
    check_all_is_accounted_for(died)
    assert all(record.error_detail for record in died.records)


def test_model_process_killed_mid_burst(vllm_of_my_own: Engine, burst_until: Callable[..., Died]) -> None:
    """Only its engine process does: each stream ends in an error and a normal [DONE], and none passes for whole."""
    died = burst_until(vllm_of_my_own.kill_model)
    check_all_is_accounted_for(died)
    assert {record.error_kind for record in died.records} == {"in_band_error"}
