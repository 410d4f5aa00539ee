"""`loadgen burst` where something is wrong: bad input, every fault, interrupts, workers and servers that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.process import spawn
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import FAST, accounted, burst, events_sent, start, summary_of, wait_for
from tests.support.simulated import running

BAD_INPUT = [
    (["--server", "ollama"], 2, "choose 'vllm', 'tgi', 'lightllm', 'sglang', 'tei' or 'openai'"),
    (["--server", "tgi", "--n", "0"], 2, "--n 0"),
    (["--server", "tgi", "--n", "-3"], 2, "--n -3"),
    (["--server", "tgi", "--n", "many"], 2, "--n"),
    (["--server", "tgi", "--url", "http://127.0.0.1:9"], 3, "nothing listens"),
    (["--server", "tgi", "--url", "http://no.such.name.invalid"], 3, "no.such.name.invalid"),
    (["--server", "tgi", "--real"], 3, "8002"),
    (["--server", "openai"], 3, "--url"),
    (["--server", "openai", "--endpoint", "generate", "--url", "{vllm}"], 2, "completions, chat"),
    (["--server", "tgi", "--url", "{vllm}"], 3, "vLLM"),
    (["--server", "vllm", "--url", "{vllm}", "--input-tokens", "5000"], 2, "max_model_len of 4096"),
    (["--server", "vllm", "--url", "{vllm}", "--tokenizer", "{junk}"], 2, "not a tokenizer"),
    (["--server", "vllm", "--url", "{vllm}", "--tokenizer", "/nowhere"], 2, "no file /nowhere"),
    (["--server", "vllm", "--url", "{vllm}", "--out", "{used}"], 2, "not empty"),
    (["--server", "vllm", "--url", "{vllm}", "--out", "/dev/null/run"], 2, "cannot create"),
    (["--server", "vllm", "--url", "{vllm}", "--out", "/proc/run"], 2, "cannot create"),
]


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    """A simulated vLLM for the whole module."""
    with running(SimulatedConfig(server="vllm", **FAST)) as simulated:
        yield simulated.url


@pytest.mark.parametrize(("arguments", "code", "message"), BAD_INPUT, ids=lambda value: str(value)[:60])
def test_bad_input_gets_a_message_and_its_exit_code(
    arguments: list[str], code: int, message: str, vllm: str, tmp_path: Path
) -> None:
    """What is wrong, what to do, the right code, and nothing sent."""
    junk, used = tmp_path / "junk.json", tmp_path / "used"
    junk.write_text("{}")
    used.mkdir()
    (used / "run.jsonl").write_text("precious")
    places = {"vllm": vllm, "junk": junk, "used": used}
    got, _, err = burst(tmp_path, *[argument.format(**places) for argument in arguments])
    assert got == code, err
    assert message in err
    assert (used / "run.jsonl").read_text() == "precious"


FAULTS = [
    ("refuse", "failed", "connect"),
    ("429", "rejected", "rejected"),
    ("500", "failed", "http_status"),
    ("503", "rejected", "rejected"),
    ("reset@4", "truncated", "truncated"),
    ("cut@4", "truncated", "truncated"),
    ("truncate@4", "truncated", "truncated"),
    ("stall@4", "failed", "timeout"),
    ("error@4", "failed", "in_band_error"),
    ("malformed@4", "failed", "protocol"),
    ("content-length", "", ""),
    ("slow-headers@50", "complete", ""),
    ("merged@4", "complete", ""),
    ("coalesced@4", "complete", ""),
    ("early-stop@4", "", ""),
]
"""Each fault of the simulated server: the state and the error kind that its requests must get."""


@pytest.mark.parametrize("server", ["vllm", "tgi", "lightllm"])
def test_each_fault_gets_its_state_beside_requests_without(server: str, tmp_path: Path) -> None:
    """One request per fault and as many without, in one burst: each gets its own state, the others are complete."""
    rules = [parse_rule(f"{fault}:{2 * place}") for place, (fault, _, _) in enumerate(FAULTS)]
    n = 2 * len(FAULTS)
    with running(SimulatedConfig(server=server, faults=tuple(rules), **FAST)) as simulated:
        code, out, _ = burst(
            tmp_path,
            "--server",
            server,
            "--url",
            simulated.url,
            "--n",
            str(n),
            "--output-tokens",
            "16",
            "--timeout",
            "5",
        )
    assert code == 1
    accounted(tmp_path, n)
    told = {number_of_wire_id(line.request_id): line.fault for line in simulated.log if line.request_id}
    for record in runfile.read(tmp_path / "run").records:
        fault = told.get(record.id, "")
        expected = next(
            ((state, kind) for name, state, kind in FAULTS if name.partition("@")[0] == fault), ("complete", "")
        )
        if fault == "early-stop":  # TGI cannot be made to go on: a shorter answer is complete, and its length told
            expected = ("complete", "") if server == "tgi" else ("truncated", "truncated")
            assert record.output_tokens == 4
        if expected[0]:
            assert (record.state, record.error_kind) == expected, (fault, record)
    assert "429" in out


def test_an_interrupt_ends_the_run_and_keeps_what_came(tmp_path: Path) -> None:
    """Ctrl-C once: nothing more is sent, what came is kept, the footer says interrupted, exit 130."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=1.0)) as url:
        process = start(tmp_path, "--server", "tgi", "--url", url, "--n", "10")
        wait_for(lambda: events_sent(url) >= 10, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert accounted(tmp_path, 10) == {"failed": 10}
    run = runfile.read(tmp_path / "run")
    assert run.footer is not None
    assert run.footer.interrupted
    assert {record.error_kind for record in run.records} == {"cancelled"}
    assert all(record.chunk_ns for record in run.records)
    assert summary_of(tmp_path)["run"]["interrupted"] is True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_every_process_interrupts_the_run(number: int, tmp_path: Path) -> None:
    """A service manager ends, a terminal hangs up all processes at once: the workers leave it to the coordinator."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=1.0)) as url:
        process = start(tmp_path, "--server", "tgi", "--url", url, "--n", "10")
        wait_for(lambda: events_sent(url) >= 10, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (*map(int, children), process.pid):
            os.kill(pid, number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert accounted(tmp_path, 10) == {"failed": 10}
    assert {record.error_kind for record in runfile.read(tmp_path / "run").records} == {"cancelled"}


def test_of_a_lost_worker_what_was_to_come_is_named_too(tmp_path: Path) -> None:
    """An open loop whose only worker is killed: what was not due yet is lost with it, at the instants of the plan."""
    with spawn(SimulatedConfig(server="tgi", **FAST)) as url:
        plan = ["--arrivals", "constant:20", "--n", "200"]
        process = start(tmp_path, "--server", "tgi", "--url", url, *plan, command="run")
        wait_for(lambda: events_sent(url) >= 10, process)
        worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(worker, signal.SIGKILL)
        process.communicate(timeout=30)
    assert process.returncode == 1
    accounted(tmp_path, 200)
    last = max(runfile.read(tmp_path / "run").records, key=lambda record: record.id)
    assert (last.error_kind, last.due_ns) == ("worker_lost", 199 * 50_000_000)


def test_a_second_interrupt_ends_workers_that_do_not_answer(tmp_path: Path) -> None:
    """The worker is stopped and hears nothing: Ctrl-C twice kills it, and every request is accounted for."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=1.0)) as url:
        process = start(tmp_path, "--server", "tgi", "--url", url, "--n", "10")
        wait_for(lambda: events_sent(url) >= 10, process)
        worker = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        os.kill(worker, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals at once would be one
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert accounted(tmp_path, 10) == {"failed": 10}
    assert {record.error_kind for record in runfile.read(tmp_path / "run").records} == {"cancelled"}


def test_a_killed_worker_loses_its_requests_by_name_only(tmp_path: Path) -> None:
    """SIGKILL to one of two workers: its requests are `worker_lost`, the other's are complete, exit 1."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.5, itl_s=0.1)) as url:
        process = start(
            tmp_path, "--server", "tgi", "--url", url, "--n", "10", "--workers", "2", "--output-tokens", "20"
        )
        wait_for(lambda: events_sent(url) >= 10, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert accounted(tmp_path, 10) == {"complete": 5, "failed": 5}
    lost = [record for record in runfile.read(tmp_path / "run").records if record.state == "failed"]
    assert {(record.error_kind, record.error_detail) for record in lost} == {
        ("worker_lost", "its worker process ended with signal SIGKILL")
    }


def test_a_server_that_dies_in_the_middle_is_told_request_by_request(tmp_path: Path) -> None:
    """The server is killed mid-burst: every request is truncated with its tokens kept, exit 1."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=0.5)) as url:
        process = start(tmp_path, "--server", "tgi", "--url", url, "--n", "10")
        wait_for(lambda: events_sent(url) >= 10, process)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    states = accounted(tmp_path, 10)
    assert states["complete"] == 0
    assert "truncated" in out
