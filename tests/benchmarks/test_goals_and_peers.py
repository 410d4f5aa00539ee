"""The comparison with other load generators and the goals keep working, at tiny size and with peers made up here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import firehose, goals, peers
from benchmarks.comparison import keeper
from benchmarks.comparison.client import Client, Reported
from benchmarks.comparison.install import ensure, nothing

HASTY = ("--tries", "1", "--patience-s", "0")
FAKE = """
import json, pathlib, sys, threading, urllib.request
url, n, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = {"model": "benchmark", "prompt": [9] * 4, "max_tokens": tokens, "stream": True}
request = lambda: urllib.request.urlopen(urllib.request.Request(
    url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})).read()
threads = [threading.Thread(target=request) for _ in range(n)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
pathlib.Path("result.json").write_text('{"ttft_ms": 70, "tpot_ms": 2}')
"""


def test_the_keeper_counts_what_is_left_behind(tmp_path: Path) -> None:
    """CPU time of a grandchild whose parent has gone already is the command's all the same."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    assert keep(tmp_path, "60", "no", sys.executable, "-c", leave)["cpu_s"] >= 0.3


def test_the_keeper_ends_what_takes_too_long(tmp_path: Path) -> None:
    """A command past its time is ended with everything below it, and the result says so."""
    facts = keep(tmp_path, "0.2", "no", "sh", "-c", "sleep 600 & sleep 600")
    assert facts["timed_out"]
    assert facts["exit_code"] == -9


def test_the_keeper_leaves_nobody_behind(tmp_path: Path) -> None:
    """Told to end, as when the benchmark itself has died, it ends the command and what that has started."""
    result, core = tmp_path / "usage.json", str(peers.machine.cores()[1][0])
    waiting = ["sh", "-c", "sleep 600 & echo $! > started; wait"]
    with subprocess.Popen(
        [sys.executable, keeper.__file__, str(result), core, "60", "no", *waiting], cwd=tmp_path
    ) as it:
        until(lambda: (tmp_path / "started").exists() and (tmp_path / "started").read_text().strip())
        it.terminate()
    until(lambda: not psutil.pid_exists(int((tmp_path / "started").read_text())))


def until(true: Callable[[], object], limit_s: float = 10) -> None:
    """Waits for other processes to have got somewhere."""
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def test_the_keeper_adds_up_the_memory_of_the_tree(tmp_path: Path) -> None:
    """Two processes that hold 40 MB each are counted together."""
    hold = "import time; held = bytearray(40_000_000); held[::4096] = b'x' * len(held[::4096]); time.sleep(1)"
    both = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {hold!r}]); exec({hold!r})"
    assert keep(tmp_path, "60", "yes", sys.executable, "-c", both)["peak_bytes"] > 80_000_000


def keep(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the keeper wrote about a command."""
    limit_s, memory, *command = arguments
    result = folder / "usage.json"
    core = str(peers.machine.cores()[1][0])
    started = [sys.executable, keeper.__file__, str(result), core, limit_s, memory, *command]
    subprocess.run(started, cwd=folder, check=True, timeout=60)
    facts: dict[str, Any] = json.loads(result.read_text())
    return facts


def test_a_client_is_installed_once_per_version(tmp_path: Path) -> None:
    """What is there is left alone; another version is made from nothing."""
    made: list[str] = []

    def install(folder: Path) -> None:
        made.append(folder.name)
        (folder / f"file-{len(made)}").touch()

    client = fake(install=install)
    for version in ("1", "1", "2"):
        folder = ensure(dataclasses.replace(client, version=version), tmp_path)
    assert made == ["a-fake", "a-fake"]
    assert not (folder / "file-1").exists()


def test_the_comparison_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that works has a row of figures; one that breaks and one that cannot be installed say why."""
    monkeypatch.setitem(peers.CLIENTS, "a fake", fake())
    monkeypatch.setitem(peers.CLIENTS, "broken", fake("import sys; sys.exit('its own words')", name="broken"))
    monkeypatch.setitem(peers.CLIENTS, "absent", fake(name="absent", install=_refuse))
    shape = ["--n", "4", "--output-tokens", "5", "--ttft-ms", "60", "--itl-ms", "1", "--repeats", "1", *HASTY]
    peers.main(["--only", "a fake", "broken", "absent", "--envs", str(tmp_path), *shape])
    rows = {row[1]: row for row in map(_cells, capsys.readouterr().out.splitlines()) if len(row) > 2}
    figures = dict(zip(rows["tool"], rows["a fake 1"], strict=True))
    assert float(figures[peers.TTFT]) == 70
    assert float(figures[peers.TTFT_ERROR].strip("*")) < 10
    assert all(figures[column.title] for column in peers.COLUMNS)
    assert "exit code 1: its own words" in rows["broken 1"][2]
    assert "not installed: no such package" in rows["absent 1"][2]


def test_the_goals_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size there is a row with errors of single requests for each load, with one worker and with two."""
    goals.main(["--tiny", "--repeats", "1", *HASTY, "--envs", str(tmp_path)])
    rows = [row for row in map(_cells, capsys.readouterr().out.splitlines()) if len(row) > 2]
    found = [dict(zip(rows[0], row, strict=True)) for row in rows if row[1].startswith("loadgen")]
    assert len(found) == len(goals.TINY)
    assert all(float(row[goals.TTFT_P99]) >= 0 and float(row[goals.TPOT_P99]) >= 0 for row in found)


def fake(script: str = FAKE, *, name: str = "a fake", install: Any = nothing) -> Client:
    """A peer that is a Python script."""
    return Client(
        name=name,
        version="1",
        install=install,
        command=lambda _, load: [sys.executable, "-c", script, load.url, str(load.n), str(load.output_tokens)],
        reported=lambda scratch: Reported(**json.loads((scratch / "result.json").read_text())),
    )


def _refuse(folder: Path) -> None:
    raise subprocess.CalledProcessError(1, "pip", "no such package")


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]


def test_the_firehose_is_taken_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny size: what the server in C says that it sent has come, and it says how fast."""
    firehose.main(["--tiny"])
    sent, came, dropped, _ = capsys.readouterr().out.splitlines()
    assert sent.startswith("200 tokens sent in ")
    assert came.startswith("200 came, by ")
    assert dropped.startswith("the ring dropped ")
