"""The calibration of packet timestamps, which need the right to open packet sockets."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.accuracy import main
from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, ROOT, burst, loadgen, summary_of
from tests.support.simulated import running

SMALL = ("--n", "20", "--itl", "5ms", "--output-tokens", "8")


def calibrate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, remembering in `folder`."""
    return loadgen(folder, "calibrate", *SMALL, *options, XDG_CACHE_HOME=str(folder))


def test_later_runs_quote_what_was_found(tmp_path: Path) -> None:
    """A row for each kind of stamps, exact or not; a run on the same machine has it in its header and in its words."""
    done = calibrate(tmp_path, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("ring ", "user "))]
    assert [row[0] for row in rows] == ["ring", "user"]
    assert all(len(row) == 11 for row in rows)
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        common = ["--server", "tgi", "--url", simulated.url, "--n", "3", "--output-tokens", "4", "--no-report"]
        _, out, _ = burst(tmp_path, *common)
    kept = runfile.read(tmp_path / "run").header.client["calibration"]
    assert kept["load"] == {
        **{
            "server": "vllm",
            "n": 20,
            "itl_s": 0.005,
            "output_tokens": 8,
            "workers": 1,
            "stamps": "auto",
            "endpoint": None,
        }
    }
    assert f"calibrated {kept['made_at'][:10]}: TTFT ±" in " ".join(out.split())
    quoted = summary_of(tmp_path)["client"]["calibration"]
    assert isinstance(quoted, dict)
    assert quoted["ttft_p99_s"] == kept["errors"]["ring"]["ttft_s"]["p99"] > 0


def test_json_prints_what_is_remembered(tmp_path: Path) -> None:
    """stdout is one JSON object: the same as in the file, under this machine's name. The kernel is the better clock."""
    done = calibrate(tmp_path, "--quick", "--json")
    found = json.loads(done.stdout)
    assert list(json.loads((tmp_path / "llm-loadgen/calibration.json").read_text()).values()) == [found]
    assert found["errors"]["ring"]["ttft_s"]["p50"] < found["errors"]["user"]["ttft_s"]["p50"]
    assert found["errors"]["ring"]["requests"] == 20


def test_the_accuracy_benchmark_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At tiny size it compares every request and prints the row of `loadgen calibrate` with two distributions below."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "20 of 20 requests compared; 160 tokens, 160 events logged"
    assert sum(line.startswith(("ring ", "read lateness", "server lateness", "first send call")) for line in lines) == 4
    assert lines[-1] == "20 of 20 first tokens were timestamped before the server's send call had returned"


@pytest.mark.parametrize("load", [[], ["--concurrency", "3"]])
def test_the_accuracy_benchmark_runs_over_tls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, load: list[str]
) -> None:
    """A burst, or a closed loop over kept connections: every request is compared with the TLS server's own log, every
    timestamp is that of a packet, and the last line says whether the error is within its bound."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with suppress(SystemExit):  # this machine may be too busy for the bound
        main(["--tls", "--n", "12", "--output-tokens", "4", "--itl", "10ms", *load])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "12 of 12 requests compared; 48 tokens, 48 events logged"
    assert [line for line in lines if line.startswith("ring ")]
    assert lines[-1].startswith("TTFT error p99 ")
