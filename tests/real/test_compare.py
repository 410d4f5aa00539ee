"""Two vLLMs with a deliberate difference are told apart, and one against itself is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.real.conftest import ROOT, running_vllm

if TYPE_CHECKING:
    from tests.real.conftest import Burst

N = 64
SIZE = ("--n", N, "--input-tokens", 128, "--output-tokens", 32, "--warmup", 8)
REPEATS = {"wide": 8, "narrow": 8}
SEQUENCES = {"wide": 64, "narrow": 4}


@pytest.fixture(scope="module")
def repeats(burst: Burst, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Repeats of one burst on a vLLM that runs 64 sequences at a time, and on one that runs 4.

    Both get the same prompts, and neither has a prefix cache that could know them.
    """
    folder = tmp_path_factory.mktemp("repeats")
    found = {}
    for name, sequences in SEQUENCES.items():
        log = folder / f"server-{name}"
        log.mkdir()
        with running_vllm(log, "--no-enable-prefix-caching", "--max-num-seqs", str(sequences)) as engine:
            outcome = burst(engine, folder / name, *SIZE, "--repeats", REPEATS[name])
            assert outcome.exit_code in (0, 5), outcome.stderr
        found[name] = [folder / name / f"repeat-{place}" for place in range(1, REPEATS[name] + 1)]
    return found


def compare(a: Sequence[Path], b: Sequence[Path]) -> dict[str, Any]:
    """The client shares the engine's cores: a repeat in which it was held back is left out, and the work is equal."""
    command = [sys.executable, "-m", "loadgen", "compare", "--json", *map(str, a), "--", *map(str, b)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_fewer_sequences_at_once_are_worse(repeats: dict[str, list[Path]]) -> None:
    """--max-num-seqs 4 against 64: less throughput, later first tokens, a later last end; the work was otherwise equal.
    The median end says nothing: with 64 at once all end together, with 4 half of them before half of the time."""
    found = compare(repeats["wide"], repeats["narrow"])
    verdicts = {row["figure"]: row["verdict"] for row in found["rows"]}
    assert {verdicts[name] for name in ("output_tokens_per_s", "ttft.p50", "e2e.p99")} == {"worse"}


def test_the_same_server_is_not_called_different(repeats: dict[str, list[Path]]) -> None:
    """Every other repeat against those between them, so that what drifts on the machine is in both: no figure is better
    or worse."""
    found = compare(repeats["wide"][0::2], repeats["wide"][1::2])
    assert {row["verdict"] for row in found["rows"]} <= {"no difference", "inconclusive"}
