"""The server dies in the middle of the burst."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadgen import runfile

if TYPE_CHECKING:
    from tests.real.conftest import Engine, FinishBurst, StartBurst

N = 64


def wait_until_generating(engine: Engine, tokens: int) -> None:
    """Return when vLLM has generated `tokens` tokens: the burst is then under way, and far from done."""
    deadline = time.monotonic() + 60
    while engine.counters()["vllm:generation_tokens_total"] < tokens:
        if time.monotonic() > deadline:
            pytest.fail("the burst did not get under way")
        time.sleep(0.1)


def test_killed_mid_burst_every_request_is_accounted_for(
    vllm_of_my_own: Engine, start_burst: StartBurst, finish_burst: FinishBurst, tmp_path: Path
) -> None:
    """vLLM gets SIGKILL while 64 streams of 1024 tokens run: exit code 1, no traceback, no request without a state."""
    folder = tmp_path / "run"
    options = ("--n", N, "--input-tokens", 512, "--output-tokens", 1024, "--seed", 1)
    process = start_burst(vllm_of_my_own, folder, *options)
    wait_until_generating(vllm_of_my_own, 2000)
    vllm_of_my_own.kill()
    outcome = finish_burst(process, folder)

    assert outcome.exit_code == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    requests = outcome.summary["requests"]
    assert requests["sent"] == N
    assert requests["complete"] + requests["truncated"] + requests["failed"] == N
    assert requests["complete"] < N
    run = runfile.read(folder)
    assert run.footer is not None
    assert len(run.records) == N
    assert sum(len(record.chunk_ns) for record in run.records) > 0, "what had arrived must be kept"
