"""Several replicas, each with its own --url: how requests are dealt, and what the run says about each replica."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import loadgen
from loadgen import Plan
from loadgen.analysis.run.runfile import Run, read
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, summary_of
from tests.support.simulated import equal, replicas, urls_of

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""
LOAD = ("--input-tokens", "16", "--output-tokens", "4")


def answered(run: Run) -> Counter[str]:
    """Return the number of measured requests that each replica answered."""
    return Counter(record.replica for record in run.records if record.phase != "warmup")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_burst_is_dealt_evenly_and_counters_add_up(workers: str, tmp_path: Path) -> None:
    """Three replicas get exactly a third each. Counters of all replicas are those of the client, warm-up and canaries
    included, and the report names each URL."""
    with replicas(*equal(3)) as servers:
        words = ("--n", "30", "--warmup", "6", "--verify", "3", "--workers", workers, *urls_of(servers), *LOAD)
        code, out, err = burst(tmp_path, *words)
    assert code in SUCCESS, err
    names = {server.url for server in servers}
    assert answered(read(tmp_path / "run")) == dict.fromkeys(names, 10)
    assert "3 replicas: requests go to them in turn: 10 for each" in out
    summary = summary_of(tmp_path)
    assert {part["name"]: part["requests"]["complete"] for part in summary["replicas"]} == dict.fromkeys(names, 10)
    assert all(url in out for url in names)
    assert all(check["agree"] for check in summary["server_counters"].values() if check["agree"] is not None)
    assert summary["server_counters"]["requests_finished"]["agree"]
    assert summary["memory"]["kv_cache"]["engines"] == 3


def test_sessions_stay_on_their_replica(tmp_path: Path) -> None:
    """Six sessions of four turns: three sessions for each replica, and no session changes it."""
    with replicas(*equal(2)) as servers:
        words = ("--workload", "multi-turn:turns=4", "--concurrency", "3", "--n", "6", "--balance", "session")
        code, _, err = burst(tmp_path, *words, *urls_of(servers), *LOAD, command="run")
    assert code in SUCCESS, err
    by_session: dict[int | None, set[str]] = {}
    for record in read(tmp_path / "run").records:
        by_session.setdefault(record.session, set()).add(record.replica)
    assert all(len(used) == 1 for used in by_session.values())
    assert sorted(Counter(url for used in by_session.values() for url in used).values()) == [3, 3]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_least_busy_replica_gets_more(workers: str, tmp_path: Path) -> None:
    """One replica is five times slower. Even dealing ignores that, and least-busy gives the fast one more requests.
    The difference between the replicas is a finding."""
    slow, fast = (SimulatedConfig(server="vllm", ttft_s=ttft_s, itl_s=0.002) for ttft_s in (0.3, 0.03))
    shares = {}
    for balance in ("even", "least-busy"):
        folder = tmp_path / balance
        folder.mkdir()
        with replicas(slow, fast) as servers:
            words = ("--concurrency", "8", "--n", "96", "--workers", workers, "--balance", balance)
            code, out, err = burst(folder, *words, *urls_of(servers), *LOAD, command="run")
        assert code in SUCCESS, err
        shares[balance] = answered(read(folder / "run"))[servers[1].url]
        assert "The replicas differ" in " ".join(out.split()) or shares[balance] > 76
    assert shares["even"] == 48
    assert shares["least-busy"] > 60


def test_workers_of_a_closed_loop_deal_evenly(tmp_path: Path) -> None:
    """Each of two workers sends to both replicas in turn. A fast replica gets no more requests than a slow one."""
    slow, fast = (SimulatedConfig(server="vllm", ttft_s=ttft_s, itl_s=0.002) for ttft_s in (0.2, 0.01))
    with replicas(slow, fast) as servers:
        words = ("--concurrency", "4", "--duration", "2s", "--workers", "2")
        code, _, err = burst(tmp_path, *words, *urls_of(servers), *LOAD, command="run")
    assert code in SUCCESS, err
    counts = answered(read(tmp_path / "run"))
    assert abs(counts[servers[0].url] - counts[servers[1].url]) <= 2
    assert counts.total() >= 8


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (SimulatedConfig(server="tgi", **FAST), "backend is tgi, not vllm"),
        (SimulatedConfig(server="vllm", model="other", **FAST), "model is other, not llama-2-7b"),
    ],
)
def test_a_server_that_is_no_replica_is_named(other: SimulatedConfig, fact: str, tmp_path: Path) -> None:
    """A server of another kind or with another model is refused before anything is sent."""
    with replicas(*equal(1), other) as servers:
        code, _, err = burst(tmp_path, "--n", "4", *urls_of(servers), *LOAD)
    assert code == 3
    assert f"{servers[1].url} is no replica of {servers[0].url}: its {fact}" in err
    assert not servers[0].log


def test_one_server_is_not_two_replicas(tmp_path: Path) -> None:
    """`localhost` and 127.0.0.1 lead to the same server, which would be compared with itself."""
    with replicas(*equal(1)) as servers:
        other = servers[0].url.replace("127.0.0.1", "localhost")
        words = ("--n", "4", "--url", servers[0].url, "--url", other, "--expect-replicas", "2")
        code, _, err = burst(tmp_path, *words, *LOAD)
    assert code == 2
    assert f"--url {servers[0].url} and --url {other} lead to the same server, at 127.0.0.1" in err
    assert not servers[0].log


def test_plan_files_and_the_api_take_several_urls(tmp_path: Path) -> None:
    """`url` may be a list. The command that the header stores names every URL, and runs of a stored plan are equal."""
    with replicas(*equal(2)) as servers:
        plan = tmp_path / "plan.toml"
        plan.write_text(f"url = {json.dumps([server.url for server in servers])}\nn = 8\ninput_tokens = 16\n")
        code, _, err = burst(tmp_path, str(plan), "--output-tokens", "4", command="run")
        assert code in SUCCESS, err
        settings = {"n": 8, "input_tokens": 16, "output_tokens": 4}
        measured = loadgen.run(Plan(url=[server.url for server in servers], **settings), out=tmp_path / "api")
    run = read(tmp_path / "run")
    expected = {server.url: 4 for server in servers}
    assert answered(run) == expected
    assert answered(read(tmp_path / "api")) == expected
    assert {part.name for part in measured.summary.replicas} == {*expected}
    assert run.header.plan["more_urls"] == [servers[1].url]
    assert [part["url"] for part in run.header.server["replicas"]] == [*expected]


def test_cold_empties_every_replica(tmp_path: Path) -> None:
    """A second run with the same seed finds no prompt in any cache."""
    config = SimulatedConfig(server="vllm", clock="batching", gpu="H100", speed=20, kv_tokens=100_000)
    with replicas(config, config) as servers:
        words = ("--n", "8", "--input-tokens", "256", "--output-tokens", "8", "--seed", "7", *urls_of(servers))
        shares = []
        for name, more in (("first", ()), ("again", ()), ("cold", ("--cold",))):
            (tmp_path / name).mkdir()
            code, out, err = burst(tmp_path / name, *words, *more)
            assert code in SUCCESS, err
            shares.append(summary_of(tmp_path / name)["cached_prompts"]["share"])
    assert (shares[0], shares[2]) == (0, 0)
    assert shares[1] > 0.9
    assert all(f"--cold: {server.url}: the server emptied" in out for server in servers)


@pytest.mark.parametrize("connections", ["session", "new"])
def test_connections_of_sessions_lead_to_the_right_replica(connections: str, tmp_path: Path) -> None:
    """Turns that go to the replicas in turn never use the connection to another replica."""
    with replicas(*equal(2)) as servers:
        words = ("--workload", "multi-turn:turns=4", "--concurrency", "2", "--n", "4", "--connections", connections)
        code, _, err = burst(tmp_path, *words, *urls_of(servers), *LOAD, command="run")
    assert code in SUCCESS, err
    assert [len(server.log) for server in servers] == [8, 8]
    assert answered(read(tmp_path / "run")) == {server.url: 8 for server in servers}
