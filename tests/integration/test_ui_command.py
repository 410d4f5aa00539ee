"""`loadgen ui --headless` as a person runs it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, in_process
from tests.support.simulated import running
from tests.support.ui import headless

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
SMALL = ("--input-tokens", "16", "--output-tokens", "8", "--run-time", "3s", "--no-report")


def test_a_run_by_hand_is_as_any_other(tmp_path: Path) -> None:
    """Exact prompts and outputs in the server's own dialect; the run and its summary are those of any other run."""
    with running(SimulatedConfig(server="lightllm", **FAST)) as simulated:
        named = ("--server", "lightllm", "--url", simulated.url)
        code, out, err = headless(tmp_path, *named, *SMALL, "--users", "4", "--json")
    assert code in OK, err
    assert "Aggregated" not in err  # nothing but the summary was asked for, so not Locust's tables either
    summary = json.loads(out)
    assert summary["requests"]["complete"] == summary["requests"]["sent"] > 4
    assert summary["tokens"]["prompt_mismatches"] == summary["tokens"]["output_mismatches"] == 0
    assert summary["server"]["simulated"] is True
    assert summary["window"]["chosen"] == "whole"
    # The server is read beside the run, and its own count is held against ours.
    assert summary["server_counters"]["requests_finished"]["agree"]
    run = runfile.read(tmp_path / "run")
    assert {line.values["moment"] for line in run.telemetry if line.source == "server"} >= {"idle", "start", "end"}
    assert [path.name for path in (tmp_path / "run").iterdir()].count("part-telemetry.jsonl") == 0
    # This process keeps its session, for its terminal's sake: nice alone is raised.
    scheduling = summary["client"]["scheduling"]
    assert (scheduling["requested"], scheduling["autogroup_nice"]) == ("auto", None)
    assert all("realtime" in line.values for line in run.telemetry if line.source == "client")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--run-time", "1s", "--input-tokens", "abc"), "--input-tokens abc"),
        ((), "--run-time"),
        (("--run-time", "1s", "--users", "0"), "--headless with --users 0 would send nothing"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_starts(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Bad words, no end: a line that says so, exit code 2, and no folder."""
    code, _, err = in_process(tmp_path, "ui", "--server", "vllm", "--headless", "--out", "run", *arguments)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_in_use_is_a_sentence(tmp_path: Path) -> None:
    """Exit code 2 before Locust starts, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = in_process(tmp_path, "ui", "--server", "vllm", "--simulated", "--port", str(port))
    assert code == 2
    assert err == (
        f"loadgen: the page cannot listen on port {port} of 127.0.0.1: Address already in use\n  Name another --port.\n"
    )


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-machine.invalid", "--host no-such-machine.invalid: no machine has this name or address"),
        ("256.1.1.1", "--host 256.1.1.1: no machine has this name or address"),
        ("203.0.113.9", "cannot listen on port 8089 of 203.0.113.9: Cannot assign requested address"),
    ],
)
def test_an_address_of_no_use_is_a_sentence(host: str, message: str, tmp_path: Path) -> None:
    """Exit code 2 before Locust starts. The hint names addresses, because another port would not help."""
    code, _, err = in_process(tmp_path, "ui", "--server", "vllm", "--simulated", "--host", host)
    assert (code, message in err) == (2, True), err
    assert in_process(tmp_path, "ui", "--server", "vllm", "--simulated", "--web-host", host)[2] == err
    assert "Name an address of this machine: 127.0.0.1" in err


def test_without_a_server_it_ends(tmp_path: Path) -> None:
    """A line that says why, exit code 3, and no folder."""
    code, _, err = headless(tmp_path, "--server", "vllm", "--run-time", "1s", "--url", "http://127.0.0.1:9")
    assert (code, "nothing listens" in err) == (3, True), err
    assert not (tmp_path / "run").exists()
