"""Prompts that a server has in its prefix cache, the warning about them, and `--cold`, which empties the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, loadgen
from tests.support.simulated import running

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""


def measured(folder: Path, url: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the summary and the text of a burst with a stated seed."""
    load = ("--url", url, "--n", "8", "--input-tokens", "256", "--output-tokens", "8", "--seed", "7")
    folder.mkdir()
    code, out, err = burst(folder, *load, *arguments)
    assert code in SUCCESS, err
    return json.loads((folder / "run" / "summary.json").read_text()), " ".join(out.split())


@pytest.mark.parametrize(("server", "endpoint"), [("vllm", "completions"), ("sglang", "generate")])
def test_prompts_of_an_earlier_run_are_found_and_a_cold_run_has_none(
    server: str, endpoint: str, tmp_path: Path
) -> None:
    """The second run with a seed gets a warning, which vanishes with --cold. The share is that of the counters."""
    config = SimulatedConfig(server=server, clock="batching", gpu="H100", speed=20, kv_tokens=100_000)
    with running(config) as simulated:
        url, options = simulated.url, ("--endpoint", endpoint)
        first, _ = measured(tmp_path / "first", url, *options)
        again, text = measured(tmp_path / "again", url, *options)
        cold, cold_text = measured(tmp_path / "cold", url, *options, "--cold")
    shares = [summary["cached_prompts"]["share"] for summary in (first, again, cold)]
    assert (shares[0], shares[2]) == (0, 0)
    assert shares[1] > 0.9
    assert again["cached_prompts"]["server_share"] == shares[1]
    assert again["cached_prompts"]["source"] == ("responses" if server == "sglang" else "counters")
    assert "came from the server's prefix cache" in text
    assert "came from the server's prefix cache" not in cold_text
    assert "--cold: the server emptied its prefix cache, and a repeated prompt is computed again" in cold_text
    assert "The server's prefix cache was emptied before the run, which was checked (--cold)." in cold_text
    assert cold["run"]["cold"] == "emptied"


def test_a_server_that_cannot_empty_its_cache_is_an_error(tmp_path: Path) -> None:
    """Nothing is sent, and the message says what to do. Virtual time has nothing to empty."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        code, _, err = burst(tmp_path, "--url", simulated.url, "--n", "2", "--cold")
    assert code == 3
    assert "TGI has no route that empties its prefix cache" in err
    assert "leave --cold out" in err
    virtual = loadgen(tmp_path, "simulate", "--server", "vllm", "--gpu", "H100", "--n", "2", "--cold")
    assert virtual.returncode == 2
    assert "is always empty" in virtual.stderr
