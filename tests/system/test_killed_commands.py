"""A command that is killed with SIGKILL leaves no process behind, and what it measured can be reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.worker import WorkerTask
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import ROOT, Forked, events_sent, loadgen, wait_for
from tests.support.processes import ProcessIdentity, descendants, left_over
from tests.support.simulated import running

TOKEN = "a token of these tests"
LONG = ("--server", "vllm", "--n", "400", "--output-tokens", "4000", "--input-tokens", "16", "--no-report")
Process = subprocess.Popen[str]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start `loadgen ...`, or another script, with an interpreter that ends with the test."""
    started: list[Process] = []

    def start(*words: str, interpreter: tuple[str, ...] = ("-m", "loadgen"), folder: Path = tmp_path) -> Process:
        folder.mkdir(exist_ok=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "LOADGEN_TOKEN": TOKEN}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *interpreter, *words], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        left = list(descendants(process.pid))
        process.kill()
        process.communicate(timeout=100)
        left_over(left)


def killed(process: Process, at_least: int) -> list[ProcessIdentity]:
    """Kill a command that has at least so many descendants. Return its descendants."""
    wait_for(lambda: len(list(descendants(process.pid))) >= at_least, process)
    children = list(descendants(process.pid))
    process.kill()
    return children


def has_begun(folder: Path) -> Callable[[], bool]:
    """Return whether a run below this folder has begun and has written records of its workers."""
    return lambda: any(part.stat().st_size for part in folder.rglob("part-[0-9]*.jsonl"))


def test_workers_and_the_simulated_server_end_with_a_run(tmp_path: Path, command: Callable[..., Process]) -> None:
    """Two workers and the simulated server end after the command was killed. Its run is reported as interrupted."""
    process = command("run", *LONG, "--workers", "2", "--arrivals", "constant:20", "--out", "run")
    wait_for(has_begun(tmp_path / "run"), process)
    assert not left_over(killed(process, 3))
    run = runfile.read(tmp_path / "run")
    assert run.footer is None
    assert not run.damaged_lines
    done = loadgen(tmp_path, "report", "run")
    assert (done.returncode, "interrupted" in done.stdout) == (0, True), done.stdout


def test_processes_of_a_sweep_end_with_the_sweep(tmp_path: Path, command: Callable[..., Process]) -> None:
    """The workers of the current step and the simulated server end. A sweep can be resumed after that."""
    words = ("--simulated", "--concurrency", "4,8", "--duration", "30s", "--workers", "2")
    process = command("sweep", *words, "--out", "sweep")
    wait_for(has_begun(tmp_path / "sweep"), process)
    assert not left_over(killed(process, 3))


def test_processes_of_the_interactive_command_end_with_it(tmp_path: Path, command: Callable[..., Process]) -> None:
    """The telemetry process and the simulated server end."""
    words = ("--server", "vllm", "--headless", "--users", "2", "--run-time", "60s", "--output-tokens", "8")
    process = command("ui", *words, "--out", "run")
    wait_for((tmp_path / "run" / "run.jsonl").exists, process)
    assert not left_over(killed(process, 2))


def test_processes_of_a_distributed_run_end_with_their_command(tmp_path: Path, command: Callable[..., Process]) -> None:
    """The workers and the Locust process of a worker machine end when its command is killed, and the Locust process of
    the master when the master is killed."""
    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.05)) as simulated:
        several = ("--distributed", "--expect-workers", "1", "--bind", "127.0.0.1:0", "--workers", "2")
        master = command("burst", *LONG, *several, "--url", simulated.url, "--out", "run")
        assert master.stdout is not None
        port = next(line for line in master.stdout if "waiting for" in line).rpartition(":")[2].strip()
        machine = command("worker", "--master", f"127.0.0.1:{port}", folder=tmp_path / "machine")
        wait_for(lambda: events_sent(simulated.url) > 400, machine)
        processes = killed(machine, 3)
        processes += killed(master, 1)
        assert not left_over(processes)


def test_processes_of_a_script_end_with_it(tmp_path: Path, command: Callable[..., Process]) -> None:
    """A Python script starts a simulated server and a run with two workers. All end when the script is killed."""
    script = (
        "from loadgen import Plan, run, simulated\n"
        "if __name__ == '__main__':\n"
        "    with simulated('vllm', itl_s=0.05) as url:\n"
        "        run(Plan(server='vllm', url=url, n=40, input_tokens=16, output_tokens=4000, workers=2), out='run')\n"
    )
    process = command(interpreter=("-c", script))
    wait_for((tmp_path / "run" / "run.jsonl").exists, process)
    assert not left_over(killed(process, 4))


def _busy(_task: WorkerTask, counts: LiveCounters) -> None:
    while True:
        pass


def _blocked(_task: WorkerTask, counts: LiveCounters) -> None:
    time.sleep(1e6)


@pytest.mark.parametrize("feed", [_busy, _blocked])
def test_a_worker_that_draws_prompts_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feed: Callable[[WorkerTask, LiveCounters], None]
) -> None:
    """A worker that computes without end, or waits without end, ends too when its command is killed."""
    monkeypatch.setattr(WorkerTask, "request_queue", feed)
    with running(SimulatedConfig(server="vllm")) as simulated:
        words = ["burst", *LONG, "--url", simulated.url, "--workers", "2", "--out", "run"]
        process = Forked(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        left = left_over(killed(process, 2))
        process.communicate(timeout=100)
        assert not left


def test_one_signal_ends_a_command_whose_worker_draws_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is busy before the start does not answer an interrupt. The command ends without a second one."""
    monkeypatch.setattr(WorkerTask, "request_queue", _busy)
    with running(SimulatedConfig(server="vllm")) as simulated:
        words = ["burst", *LONG, "--url", simulated.url, "--workers", "2", "--out", "run"]
        process = Forked(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: len(list(descendants(process.pid))) >= 2, process)
        workers = list(descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            left = left_over(workers)
    assert (process.returncode, left) == (130, []), err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_results_and_ends_every_process(
    tmp_path: Path, command: Callable[..., Process], number: signal.Signals
) -> None:
    """SIGTERM, and SIGHUP from a closed terminal, end a run as Ctrl-C does: exit code 130, a complete run file, and no
    process left."""
    process = command("run", *LONG, "--workers", "2", "--arrivals", "constant:20", "--out", "run")
    wait_for(has_begun(tmp_path / "run"), process)
    processes = list(descendants(process.pid))
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    run = runfile.read(tmp_path / "run")
    assert run.footer is not None
    assert run.footer.interrupted
    assert len(processes) == 3
    assert not left_over(processes)
