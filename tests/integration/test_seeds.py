"""Seeds of runs: new for each command on a real server, fixed on a simulated one, and reproducible with `--seed`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, loadgen
from tests.support.plain_openai import PlainServer, Talk, plain_openai
from tests.support.simulated import running

LOAD = ("--n", "4", "--output-tokens", "2", "--input-tokens", "4", "--lengths", "approximate", "--no-report")

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""


@pytest.fixture
def real() -> Iterator[PlainServer]:
    """A server that is not simulated, as far as loadgen can tell."""
    with plain_openai(Talk.stream) as server:
        yield server


def plan_of(folder: Path) -> dict[str, Any]:
    """Return the plan in the header of a run."""
    return runfile.read(folder).header.plan


def test_each_command_sends_new_prompts_to_a_real_server(real: PlainServer, tmp_path: Path) -> None:
    """Two commands without a seed send different requests. The recorded command repeats the first one."""
    for name in ("one", "two"):
        done = loadgen(tmp_path, "burst", "--url", real.url, *LOAD, "--out", str(tmp_path / name))
        assert done.returncode in SUCCESS, done.stderr
        seed = plan_of(tmp_path / name)["seed"]
        assert f"random seed; --seed {seed} sends the same requests again" in done.stdout
        assert f"--seed {seed} sends the same requests again" in " ".join(done.stdout.split("Valid")[-1].split())
    one, two = (plan_of(tmp_path / name) for name in ("one", "two"))
    assert one["seed"] != two["seed"]
    assert (one["seed_choice"], two["seed_choice"]) == ("random", "random")
    recorded = runfile.read(tmp_path / "one").header.command
    assert recorded[-2:] == ["--seed", str(one["seed"])]
    bodies = [request.split(b"\r\n\r\n", 1)[1] for _, request in real.requests]
    again = [str(tmp_path / "again") if word == str(tmp_path / "one") else word for word in recorded[1:]]
    assert loadgen(tmp_path, *again).returncode in SUCCESS
    repeated = [request.split(b"\r\n\r\n", 1)[1] for _, request in real.requests[8:]]
    assert sorted(repeated) == sorted(bodies[:4]) != sorted(bodies[4:])
    assert plan_of(tmp_path / "again")["seed_choice"] == "stated"


def test_repeats_have_consecutive_seeds(real: PlainServer, tmp_path: Path) -> None:
    """The first repeat has the random seed, and the command records the seed of the first repeat."""
    done = loadgen(
        tmp_path, "burst", "--url", real.url, *LOAD, "--repeats", "3", "--out", str(tmp_path / "runs"), "--json"
    )
    assert done.returncode in SUCCESS, done.stderr
    first, *others = (plan_of(tmp_path / "runs" / f"repeat-{number}")["seed"] for number in (1, 2, 3))
    assert others == [first + 1, first + 2]
    assert json.loads(done.stdout)["repeats"]["seeds"] == [first, first + 1, first + 2]
    assert runfile.read(tmp_path / "runs" / "repeat-3").header.command[-2:] == ["--seed", str(first)]


def test_a_stated_seed_is_used(real: PlainServer, tmp_path: Path) -> None:
    """Zero is a seed too."""
    done = loadgen(tmp_path, "burst", "--url", real.url, *LOAD, "--seed", "0", "--out", str(tmp_path / "run"))
    assert done.returncode in SUCCESS, done.stderr
    assert (plan_of(tmp_path / "run")["seed"], plan_of(tmp_path / "run")["seed_choice"]) == (0, "stated")
    assert "--seed" not in done.stdout


def test_a_simulated_server_gets_the_fixed_seed(tmp_path: Path) -> None:
    """A simulated server that runs by itself and the built-in one give reproducible runs."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        named = ("--url", server.url, "--n", "2", "--output-tokens", "2", "--no-report")
        assert loadgen(tmp_path, "burst", *named, "--out", str(tmp_path / "url")).returncode in SUCCESS
    built_in = ("--simulated", "--n", "2", "--output-tokens", "2", "--no-report", "--speed", "100")
    assert loadgen(tmp_path, "burst", *built_in, "--out", str(tmp_path / "built-in")).returncode in SUCCESS
    for name in ("url", "built-in"):
        plan = plan_of(tmp_path / name)
        assert (plan["seed"], plan["seed_choice"]) == (0, "fixed")
        assert "--seed" not in runfile.read(tmp_path / name).header.command


def test_a_resumed_sweep_keeps_its_random_seed(real: PlainServer, tmp_path: Path) -> None:
    """Every step has a seed of its own, counted from the random seed of the sweep."""
    words = ("sweep", "--url", real.url, *LOAD[:-1], "--concurrency", "1,2,4", "--out", str(tmp_path / "sweep"))
    done = loadgen(tmp_path, *words, "--max-runs", "1")
    first = plan_of(tmp_path / "sweep" / "step-1")
    assert first["seed_choice"] == "random", done.stderr
    done = loadgen(tmp_path, *words, "--max-runs", "2", "--resume")
    assert plan_of(tmp_path / "sweep" / "step-2")["seed"] == first["seed"] + 1, done.stderr


def test_runs_with_random_seeds_are_compared(real: PlainServer, tmp_path: Path) -> None:
    """Different random seeds are a note with a remedy, not a refusal."""
    for name in ("a", "b"):
        assert loadgen(tmp_path, "burst", "--url", real.url, *LOAD, "--out", str(tmp_path / name)).returncode in SUCCESS
    done = loadgen(tmp_path, "compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "did not do equal work" not in done.stderr
    seed = plan_of(tmp_path / "a")["seed"]
    assert re.search(rf"Seeds differ.*run B with --seed {seed}\.", " ".join(done.stdout.split()))


def test_a_run_knows_when_its_seed_was_sent_before(real: PlainServer, tmp_path: Path) -> None:
    """The cache folder remembers servers and seeds as hashes. Another seed, or another user, was not sent before."""
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sent_before = []
    for number, seed in enumerate(("7", "8", "7")):
        out = str(tmp_path / f"run-{number}")
        done = loadgen(tmp_path, "burst", "--url", real.url, *LOAD, "--seed", seed, "--out", out, **home)
        assert done.returncode in SUCCESS, done.stderr
        sent_before.append(runfile.read(Path(out)).header.client.get("sent_before", ""))
    assert sent_before[:2] == ["", ""]
    assert datetime.fromisoformat(sent_before[2]).tzinfo == UTC
    stored = (tmp_path / "cache/llm-loadgen/sent-seeds.json").read_text()
    assert "127.0.0.1" not in stored
    assert len(json.loads(stored)) == 2
