"""`loadgen ui --headless` and locustfiles: exact to the server's own log, every request accounted for."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme

from loadgen.analysis.calibration import compare_with_log, read_log
from loadgen.analysis.run import runfile
from loadgen.errors import install_hint
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.process import spawn
from tests.support.command import FAST, ROOT
from tests.support.simulated import running
from tests.support.ui import behind_tls, environment, headless

OK = (0, 5)  # 5: this machine was too busy, which is not what is tested here
SMALL = ("--input-tokens", "16", "--output-tokens", "8", "--run-time", "3s", "--no-report")


@pytest.mark.alone
def test_two_hundred_users_are_timed_as_exactly_as_a_burst(tmp_path: Path) -> None:
    """TTFT and TPOT of 200 users stay within 1 ms of the server's own log, 99 of 100."""
    config = SimulatedConfig(server="vllm", ttft_s=0.5, itl_s=0.2, log=tmp_path / "sim.jsonl")
    with spawn(config) as url:
        users = ("--users", "200", "--spawn-rate", "100", "--output-tokens", "6", "--run-time", "7s")
        code, _, err = headless(tmp_path, "--server", "vllm", "--url", url, *users, "--no-report")
    assert code in OK, err
    run = runfile.read(tmp_path / "run")
    assert {record.state for record in run.records} == {"complete"}
    found = compare_with_log(run, read_log(tmp_path / "sim.jsonl"))
    # A response whose packet timestamps contradict each other gets socket timestamps. This must be rare.
    sources = Counter(record.stamps for record in run.records)
    assert sources["ring"] >= 0.99 * sources.total(), sources
    assert found.requests >= 400
    assert found.not_compared == 0
    assert found.ttft_s.p99 < 0.001, found
    assert found.tpot_s.p99 < 0.001, found


def test_failures_keep_their_kinds(tmp_path: Path) -> None:
    """A reset, a cut, an error in the stream and a refusal are told apart, and nothing is lost; exit code 1."""
    rules = tuple(map(parse_rule, ("reset@2:1", "cut@2:3", "error@2:5", "500:7")))
    with running(SimulatedConfig(server="vllm", faults=rules, **FAST)) as simulated:
        code, _, err = headless(tmp_path, "--server", "vllm", "--url", simulated.url, *SMALL, "--users", "2")
    assert code == 1, err
    run = runfile.read(tmp_path / "run")
    kinds = Counter(record.error_kind for record in run.records if record.state != "complete")
    assert kinds["truncated"] == 2
    assert kinds["http_status"] >= 1
    assert kinds["in_band_error"] >= 1
    assert sorted(record.id for record in run.records) == list(range(len(run.records)))
    assert run.footer is not None
    assert run.footer.sent == len(run.records)
    assert "POST /v1/completions: RequestError('truncated: " in err  # Locust's own table has them too


def test_an_interrupt_keeps_what_was_in_flight(tmp_path: Path) -> None:
    """Stopped in the middle of its streams, each request has a Record of what had come; exit code 130."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.05)) as url:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadgen",
                "ui",
                "--headless",
                "--out",
                str(tmp_path / "run"),
                "--server",
                "vllm",
                "--url",
                url,
                "--users",
                "5",
                "--output-tokens",
                "1000",
                "--run-time",
                "60s",
                "--no-report",
            ],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _streams(url, 5, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    run = runfile.read(tmp_path / "run")
    assert [(record.state, record.error_kind) for record in run.records] == [("failed", "cancelled")] * 5
    assert all(record.chunk_ns for record in run.records)
    assert run.footer is not None
    assert run.footer.interrupted


def test_tls_is_stamped(tmp_path: Path) -> None:
    """Over https with our authority the stamps are the kernel's."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated, behind_tls(simulated.url, context) as url:
        trusted = ("--url", url, "--ca-file", str(tmp_path / "ca.pem"))
        code, _, err = headless(tmp_path, "--server", "vllm", *trusted, *SMALL)
    assert code in OK, err
    run = runfile.read(tmp_path / "run")
    assert {(record.state, record.stamps) for record in run.records} == {("complete", "ring")}


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """Where Locust is not installed: exit code 2, and the line that installs it."""
    (tmp_path / "locust.py").write_text("raise ModuleNotFoundError(\"No module named 'locust'\")")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", "ui", "--server", "vllm"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert install_hint("ui") in done.stderr


def _streams(url: str, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many streams have sent tokens."""
    deadline = time.monotonic() + 40
    while True:
        with urlopen(f"{url}/simulated/status", timeout=10) as answer:
            if json.load(answer)["events"] > 5 * number:
                return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
