"""Two vLLMs with a deliberate difference are told apart, and one against itself is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.real.conftest import ROOT, running_vllm

if TYPE_CHECKING:
    from tests.real.conftest import Burst

REPEATS, N = 4, 64
SIZE = ("--n", N, "--input-tokens", 128, "--output-tokens", 32, "--warmup", 8)
NO_CACHE = ("--no-enable-prefix-caching",)
"""The runs that are compared send the same prompts: a cache would help the later ones."""


@pytest.fixture(scope="module")
def repeats(burst: Burst, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Repeats of one burst on a vLLM that runs 64 sequences at a time, the same again, and on one that runs 4."""
    folder = tmp_path_factory.mktemp("repeats")
    found = {}
    for name, sequences, again in (("wide", 64, "wide-again"), ("narrow", 4, "")):
        log = folder / f"server-{name}"
        log.mkdir()
        with running_vllm(log, *NO_CACHE, "--max-num-seqs", str(sequences)) as engine:
            for each in filter(None, (name, again)):
                found[each] = folder / each
                outcome = burst(engine, found[each], *SIZE, "--repeats", REPEATS)
                assert outcome.exit_code in (0, 5), outcome.stderr
    return found


def compare(a: Path, b: Path) -> dict[str, Any]:
    """Forced, because the client shares the engine's cores and may have been held back."""
    command = [sys.executable, "-m", "loadgen", "compare", "--json", "--anyway", str(a), str(b)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_fewer_sequences_at_once_are_worse(repeats: dict[str, Path]) -> None:
    """--max-num-seqs 4 against 64: less throughput, later first tokens, later ends; nothing that is worse is called
    better, and the work was otherwise equal."""
    found = compare(repeats["wide"], repeats["narrow"])
    verdicts = {row["figure"]: row["verdict"] for row in found["rows"]}
    assert {verdicts[name] for name in ("output_tokens_per_s", "ttft.p50", "e2e.p50")} == {"worse"}
    assert {each["what"] for each in found["unequal"]} <= {"client verdict", "server limits"}


def test_the_same_server_is_not_called_different(repeats: dict[str, Path]) -> None:
    """The same vLLM again, with the same prompts: no figure is better or worse."""
    found = compare(repeats["wide"], repeats["wide-again"])
    assert {row["verdict"] for row in found["rows"]} <= {"no difference", "cannot tell"}
