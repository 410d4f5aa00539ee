"""Small forms of the scripts in tests/endurance: answers spoiled on the wire, kills, full disks, and a long run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadgen.errors import OutputError
from loadgen.results import write_text
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn, spawn_process
from tests.endurance.full_disk import full_disks
from tests.endurance.hostile import KEYS, ordeal
from tests.endurance.kills import children, logged
from tests.endurance.long import MIB, endured
from tests.endurance.spoil import SPOILS, body, payloads_of, proven, whole
from tests.support.command import FAST, ROOT, accounted, burst, events_sent, start, summary_of, wait_for
from tests.support.simulated import running


@pytest.mark.parametrize(("key", "tls"), [(key, False) for key in KEYS] + [(KEYS[0], True)])
def test_what_is_recorded_of_spoiled_answers_is_what_they_prove(
    key: tuple[str, str], tls: bool, tmp_path: Path
) -> None:
    """Every way to spoil an answer, on the wire: each request has its Record, complete only where an oracle of its own
    finds the bytes whole, and no connection is used again on which anything may come."""
    cases, lost, ended = ordeal(tmp_path, f"suite/{key}/{tls}", key, len(SPOILS), tls=tls)
    assert not lost, "\n".join(lost)
    assert cases == ended.total() == len(SPOILS)
    assert min(ended[state] for state in ("complete", "truncated", "failed")) > 0


def test_the_oracle_knows_a_whole_answer() -> None:
    """Or nothing would be proven by its agreeing."""
    from random import Random

    events = [b'{"choices":[{"text":"a"}]}', b'{"choices":[],"usage":{"completion_tokens":1}}', b"[DONE]"]
    assert payloads_of(b"data: 1\r\rdata:2\ndata: 3\n\ndata: 4\n") == [b"1", b"2\n3"]
    assert payloads_of(b"data: 1\n\ndata: [DONE]") == [b"1", b"[DONE]"]
    assert payloads_of(b'data: 1\n\ndata: {"a":1}') == [b"1", b'{"a":1}']
    assert payloads_of(b'data: 1\n\ndata: {"a":') == [b"1"]
    raw = whole(Random(1), body(events))
    assert proven("vllm", "completions", raw, closed=False, asked=1)
    assert not proven("vllm", "completions", raw, closed=False, asked=2)
    assert not proven("vllm", "completions", raw.replace(b"DONE", b"DO"), closed=False, asked=1)
    first = b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":0}}'
    late = [whole(Random(1), body([first, b"[DONE]", last])) for last in (events[1], events[0])]
    assert [proven("lightllm", "completions", raw, closed=False, asked=1) for raw in late] == [True, False]


def test_after_kills_everything_is_accounted_for_and_nothing_stays() -> None:
    """Five kills at random instants: in a process of its own, which is the reaper of every orphan."""
    script = [sys.executable, str(ROOT / "tests/endurance/kills.py"), "suite", "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False, timeout=110)
    assert (done.returncode, "5 kills, 5 survived" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.alone
@pytest.mark.parametrize("what", ["worker", "server", "clock"])
def test_a_pause_loses_nothing_and_is_told(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two seconds amid a run the worker or the server stands still, or the server's clock jumps by an hour: every
    request is complete. What was late is the client's fault where the worker stood, else the server's latency; what the
    server takes for the time is in no figure."""
    config = SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.002, log=tmp_path / "log.jsonl")
    server = running(config) if what == "clock" else spawn_process(config)
    with server as there:
        url, pid = there if isinstance(there, tuple) else (there.url, 0)
        words = [
            "--url",
            url,
            "--n",
            "120",
            "--arrivals",
            "constant:40",
            "--output-tokens",
            "8",
            "--input-tokens",
            "16",
        ]
        process = start(tmp_path, "--server", "tgi", *words, "--workers", "1", command="run")
        wait_for(lambda: events_sent(url) > 160, process)
        now_ns = time.time_ns
        if what == "clock":
            monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 3_600_000_000_000)
        else:
            stopped = pid if what == "server" else children(process.pid)[0]
            os.kill(stopped, signal.SIGSTOP)
            time.sleep(2)
            os.kill(stopped, signal.SIGCONT)
        _, err = process.communicate(timeout=100)
    assert accounted(tmp_path, 120) == {"complete": 120}, err
    (client, latency), log = (summary_of(tmp_path)[each] for each in ("client", "latency")), logged(config.log)
    assert len(log) == 120
    assert (client["send_late_p99_s"] > 1, latency["ttft_s"]["max"] > 1) == (what == "worker", what == "server")
    assert what != "worker" or (client["verdict"], process.returncode) == ("limited", 5)
    assert client["clock_disagreement_s"] < 1


def test_full_disks_are_sentences() -> None:
    """No file may grow any more, at random instants of four commands."""
    cases, lost = full_disks("suite", 4, ("burst", "run", "report", "csv"), mounts=False)
    assert not lost, "\n".join(lost)
    assert cases.total() == 4


def test_a_long_run_loses_nothing_and_does_not_grow(tmp_path: Path) -> None:
    """With as many in flight at the end as at the beginning no process takes more memory."""
    found = endured(tmp_path, 3_000, 10.0)
    assert found.states == {"complete": 3_000, "lost": 0}
    assert max(found.growth(process) for process in found.rss if process != "server") < 2 * MIB


def test_results_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays if the new one cannot be written. A device is written to directly."""

    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = tmp_path / "summary.json"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OutputError, match="cannot write"):
            write_text(file, "new")
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("old", [file])
    write_text(file, "new")
    write_text(Path("/dev/null"), "new")
    assert (file.read_text(), Path("/dev/null").is_char_device(), [*tmp_path.iterdir()]) == ("new", True, [file])


def test_a_full_standard_output_is_a_sentence(tmp_path: Path) -> None:
    """The text is all that these commands are for: exit code 2."""
    for words in (["--version"], ["mock-server", "--help"]):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "loadgen", *words]
            done = subprocess.run(
                command,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                check=False,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
        assert (done.returncode, done.stderr.splitlines()[0]) == (
            2,
            f"loadgen: cannot write standard output: {os.strerror(errno.ENOSPC)}",
        )


def test_a_simulated_server_outlives_its_log(tmp_path: Path) -> None:
    """It says that the log ends, and goes on answering."""
    with spawn(SimulatedConfig(server="tgi", log=Path("/dev/full"), **FAST)) as url:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            assert burst(tmp_path / name, "--server", "tgi", "--url", url, "--n", "4")[0] in {0, 5}
            assert accounted(tmp_path / name, 4) == {"complete": 4}
