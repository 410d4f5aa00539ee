"""The real vLLM with our plugin: it serves a converted checkpoint as a ladder, on one process and on two."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.real.conftest import ENGINE, ROOT, running_vllm
from tests.real.test_launch import loadgen

if TYPE_CHECKING:
    from tests.real.conftest import Burst

PROMPT = [5 + 31 * place % 2000 for place in range(48)]
SIZE = ("--n", 24, "--input-tokens", 64, "--output-tokens", 8, "--warmup", 4, "--repeats", 3)
NEAR = 0.02
"""How far logarithms of probabilities in bf16 may be from those in fp32."""


@dataclass(frozen=True)
class Served:
    """What one server gave."""

    logprobs: list[float]
    repeats: list[Path]


@pytest.fixture(scope="module")
def ladder_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "ladder-tiny"
    assert loadgen(folder.parent, "servers", "convert", ENGINE / "model", folder).returncode == 0
    return folder


@pytest.fixture(scope="module")
def on_two(ladder_tiny: Path, burst: Burst, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """The standard model and the ladder of the same weights, each on a vLLM of two processes."""
    found = {}
    for name, model in (("standard", ENGINE / "model"), ("ladder", ladder_tiny)):
        folder = tmp_path_factory.mktemp(name)
        with running_vllm(folder, "--no-enable-prefix-caching", model=model, tensor_parallel=2) as engine:
            outcome = burst(engine, folder / "run", *SIZE)
            assert outcome.exit_code in (0, 5), outcome.stderr
            found[name] = Served(logprobs(engine.url), sorted((folder / "run").glob("repeat-*")))
    return found


@pytest.fixture(scope="module")
def up(ladder_tiny: Path) -> Iterator[dict[str, Any]]:
    """`loadgen servers up` as a person would write it, on one process."""
    folder = ladder_tiny.parent
    python = ("--python", ENGINE / "vllm" / "bin" / "python", "--timeout", "240s", "--json")
    options = ("--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager")
    model = ("--model", "ladder-tiny", "--launch", "process")
    done = loadgen(folder, "servers", "up", "--server", "vllm", *model, *python, "--", *options)
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)
    assert "stopped" in loadgen(folder, "servers", "down", "--server", "vllm").stdout


def test_a_converted_checkpoint_is_served_as_a_ladder(up: dict[str, Any], ladder_tiny: Path) -> None:
    """By its folder's name alone. The probabilities are those of the recurrence in plain PyTorch, and others than the
    standard model's; a burst is complete."""
    assert up["model"] == "ladder-tiny"
    served = logprobs(up["url"])
    assert distance(served, computed("ladder")) < NEAR
    assert distance(served, computed("standard")) > 5 * NEAR
    burst = ("burst", "--server", "vllm", "--url", up["url"], "--n", 16, "--output-tokens", 8, "--no-report", "--json")
    sent = loadgen(ladder_tiny.parent, *burst, "--out", ladder_tiny.parent / "run")
    assert sent.returncode in (0, 5), sent.stderr
    assert json.loads(sent.stdout)["requests"]["complete"] == 16


def test_two_processes_serve_the_same_ladder(on_two: dict[str, Served]) -> None:
    """Each all-reduce is done when its sum is read: on two processes the probabilities are the same too."""
    assert distance(on_two["ladder"].logprobs, computed("ladder")) < NEAR
    assert distance(on_two["standard"].logprobs, computed("standard")) < NEAR


def test_both_are_compared(on_two: dict[str, Served], tmp_path: Path) -> None:
    """Bursts of the standard model and of the ladder are equal work, and each figure has a verdict. Which is faster on
    shared cores, with nothing to hide all-reduces behind, is not asserted; that it is not another kind of speed, is."""
    runs = [str(each) for each in (*on_two["standard"].repeats, "--", *on_two["ladder"].repeats)]
    done = loadgen(tmp_path, "compare", "--json", *runs)
    assert done.returncode in (0, 6), done.stderr
    rows = {row["figure"]: row for row in json.loads(done.stdout)["rows"]}
    assert {"output_tokens_per_s", "ttft.p50", "tpot.p50"} <= set(rows)
    assert 0.2 < rows["output_tokens_per_s"]["ratio"] < 5


def logprobs(url: str) -> list[float]:
    """Of each token of the prompt but the first, by the server."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]
    return [each[str(token)]["logprob"] for token, each in zip(PROMPT[1:], choice["prompt_logprobs"][1:], strict=True)]


def computed(architecture: str) -> list[float]:
    """The same, in plain PyTorch."""
    command = [ENGINE / "vllm" / "bin" / "python", ROOT / "tests" / "real" / "engine" / "logprobs.py"]
    ids = ",".join(map(str, PROMPT))
    done = subprocess.run(
        [*map(str, command), str(ENGINE / "model"), architecture, ids],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[float] = json.loads(done.stdout)
    return found


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
