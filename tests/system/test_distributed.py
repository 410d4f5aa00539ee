"""`loadgen burst --distributed` and `loadgen worker` on loopback: joining, coming late, leaving, interrupts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgpack
import pytest
import zmq

from loadgen.analysis.run import runfile
from loadgen.errors import install_hint
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import accounted, events_sent, in_process, start, summary_of, wait_for
from tests.support.simulated import running

MS = 1_000_000
TOKEN = "a token of the tests"
SLOW = {"ttft_s": 1.0, "itl_s": 60.0}
"""Streams that do not end by themselves while a test looks."""

Process = subprocess.Popen[str]


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Whatever a test starts ends with it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Machines:
    """A master, and worker machines that find it."""

    def __init__(
        self,
        folder: Path,
        started: list[Process],
        url: str,
        machines: int,
        *options: str,
        port: str = "0",
        command: str = "burst",
    ) -> None:
        self.folder = folder
        self._started = started
        common = ["--server", "tgi", "--url", url, "--no-report", "--output-tokens", "8", "--input-tokens", "16"]
        several = ["--distributed", "--expect-workers", str(machines), "--bind", f"127.0.0.1:{port}"]
        self.master = start(folder, *common, *several, *options, command=command, LOADGEN_TOKEN=TOKEN)
        started.append(self.master)
        self.said: list[str] = []
        self.port = re.findall(r":(\d+)$", self.until("waiting for"))[0]

    def until(self, word: str) -> str:
        """The next line of the master's that begins with, or holds, this."""
        assert self.master.stdout is not None
        for line in self.master.stdout:
            self.said.append(line)
            if word in line:
                return line.strip()
        raise AssertionError(f"the master never said {word!r}: {self.said} {self.master.communicate()}")

    def worker(self, name: str, *options: str, token: str = TOKEN) -> Process:
        """Another machine."""
        own = self.folder / name
        own.mkdir()
        words = ("--master", f"127.0.0.1:{self.port}", *options)
        # A machine that stays starts several runs. The event loop of a fork may lose the pipe to a process that it
        # starts, so such a machine gets a new interpreter.
        stays = "--stay" in options
        process = start(own, *words, command="worker", new_interpreter=stays, LOADGEN_TOKEN=token)
        self._started.append(process)
        return process


def shout(port: str) -> None:
    """What a stranger may send to the master's port: bytes that are no message, and Locust's own messages."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"a_stranger")
    socket.connect(f"tcp://127.0.0.1:{port}")
    nonce, words = {"step": "hello", "nonce": b"1234"}, {"step": "words", "number": 1, "body": b"", "code": b""}
    said = [("locustfile", None, "a_stranger"), ("quit", None, "somebody_else"), ("stats", {}, "a_stranger")]
    said += [("loadgen", each, "a_stranger") for each in (nonce, words, {"step": "proof"}, {"step": []}, "hello", None)]
    for message in (b"", b"\xc1", b"\x93\xa1", msgpack.dumps(7), msgpack.dumps((1, 2)), *map(msgpack.dumps, said)):
        socket.send(message)
    socket.close(linger=2000)
    context.term()


def end_of(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def test_who_is_let_in_and_who_leaves(tmp_path: Path, started: list[Process]) -> None:
    """Whoever sends nonsense is not heard. Whoever has another token gets exit code 2 and a reason, and the master says
    so. Who comes after the start is told, and has nothing to do. The requests of a machine whose command is killed are
    lost at once, by its name. One that is interrupted sends back what came, and the master says who did it. The run
    ends when nobody is left, and everything adds up."""
    with running(SimulatedConfig(server="tgi", **SLOW)) as simulated:
        machines = Machines(tmp_path, started, simulated.url, 2, "--n", "12", "--workers", "2")
        shout(machines.port)
        stranger = machines.worker("stranger", token="another token entirely")
        workers = [machines.worker("one"), machines.worker("two")]
        machines.until("LOADGEN_TOKEN is not ours")
        code, _, err = end_of(stranger)
        assert (code, "its LOADGEN_TOKEN is not the master's" in err) == (2, True), err
        wait_for(lambda: events_sent(simulated.url) == 12, machines.master)
        late = end_of(machines.worker("late"))
        machines.until("joined after the start")
        assert (late[0], "the run has begun" in late[1]) == (0, True), late
        workers[0].kill()
        machines.until("is lost: it left")
        workers[1].send_signal(signal.SIGINT)
        assert end_of(machines.master)[0] == 1
        assert end_of(workers[1])[0] == 130
    assert accounted(tmp_path, 12) == {"failed": 12}
    run = runfile.read(tmp_path / "run")
    assert Counter(record.error_kind for record in run.records) == {"worker_lost": 6, "cancelled": 6}
    assert all("its machine" in record.error_detail for record in run.records if record.error_kind == "worker_lost")
    assert all(len(record.chunk_ns) == 1 for record in run.records if record.error_kind == "cancelled")
    assert {record.worker for record in run.records} == {0, 1, 2, 3}
    assert {"client", "clock", "server"} <= {line.source for line in run.telemetry}
    assert [machine["requests"] for machine in summary_of(tmp_path)["machines"]] == [6, 6]
    assert run.footer is not None
    assert "was interrupted on its machine" in " ".join(run.footer.notes)
    assert all(TOKEN.encode() not in file.read_bytes() for file in (tmp_path / "run").iterdir())
    assert not (tmp_path / "two" / "run").exists()  # the master has everything that was recorded


def test_machines_share_the_concurrency(tmp_path: Path, started: list[Process]) -> None:
    """Each worker keeps its share of the requests in flight, and the others wait. No machine drops one."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=0.0)) as simulated:
        load = ("--rate", "200", "--concurrency", "3", "--n", "24")
        machines = Machines(tmp_path, started, simulated.url, 2, *load, command="run")
        workers = [machines.worker("one"), machines.worker("two")]
        code, out, _ = end_of(machines.master)
        assert [end_of(worker)[0] for worker in workers] == [0, 0]
    assert code in (0, 5)
    assert accounted(tmp_path, 24) == {"complete": 24}
    records = runfile.read(tmp_path / "run").records
    for worker, limit in ((0, 2), (1, 1)):
        own = [record for record in records if record.worker == worker]
        changes = sorted([(record.sent_ns or 0, 1) for record in own] + [(record.end_ns or 0, -1) for record in own])
        assert max(accumulate(step for _, step in changes)) == limit
    assert "requests waited because of --concurrency" in " ".join(out.split())


@pytest.mark.parametrize("balance", ["even", "least-busy"])
def test_machines_share_the_replicas(balance: str, tmp_path: Path, started: list[Process]) -> None:
    """Both machines get both URLs. Even dealing is exact over all machines, and counters of both replicas are read."""
    config = SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=0.005)
    with running(config) as one, running(config) as other:
        machines = Machines(tmp_path, started, one.url, 2, "--url", other.url, "--n", "40", "--balance", balance)
        workers = [machines.worker(name) for name in ("a", "b")]
        for process in (*workers, machines.master):
            code, _, err = end_of(process)
            assert code in (0, 5), err
    run = runfile.read(tmp_path / "run")
    answered = Counter(record.replica for record in run.records)
    if balance == "even":
        assert answered == {one.url: 20, other.url: 20}
    assert answered.total() == 40
    assert min(answered[url] for url in (one.url, other.url)) >= 19
    assert summary_of(tmp_path)["server_counters"]["requests_finished"]["agree"]


def test_more_workers_than_requests_in_flight_are_refused(tmp_path: Path) -> None:
    """A worker without a share would send nothing. The master says so before it waits for machines."""
    with running(SimulatedConfig(server="tgi")) as simulated:
        load = ("--server", "tgi", "--url", simulated.url, "--rate", "200", "--concurrency", "1", "--n", "24")
        code, _, err = in_process(
            tmp_path, "run", *load, "--distributed", "--expect-workers", "2", "--bind", "127.0.0.1:0"
        )
    assert (code, "2 workers cannot share --concurrency 1" in err) == (2, True), err


def test_a_machine_that_stays_outlives_a_run_and_not_its_master(tmp_path: Path, started: list[Process]) -> None:
    """An interrupt at the master ends the run everywhere: what came is kept, and every request has a Record. With
    --stay the machine finds the next master at the same address. That one is killed in the middle: the machine ends its
    run, and says where what it recorded is."""
    with running(SimulatedConfig(server="tgi", **SLOW)) as simulated:
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir()
        machines = Machines(first, started, simulated.url, 1, "--n", "4")
        staying = machines.worker("staying", "--stay")
        wait_for(lambda: events_sent(simulated.url) == 4, machines.master)
        machines.master.send_signal(signal.SIGINT)
        assert end_of(machines.master)[0] == 130
        again = Machines(second, started, simulated.url, 1, "--n", "6", port=machines.port)
        wait_for(lambda: events_sent(simulated.url) >= 10, again.master)
        again.master.kill()
        code, _, err = end_of(staying)
    assert accounted(first, 4) == {"failed": 4}
    run = runfile.read(first / "run")
    assert [(record.error_kind, len(record.chunk_ns)) for record in run.records] == [("cancelled", 1)] * 4
    assert run.footer is not None
    assert run.footer.interrupted
    assert code == 2
    (kept,) = re.findall(r"records are in (\S+)", err)
    lines = (Path(kept) / "part-0.jsonl").read_text().splitlines()
    assert sum('"type":"request"' in line for line in lines) == 6


SPAWN = {"timestamp": 1.0, "host": None, "stop_timeout": 0.0, "parsed_options": {}, "user_classes_count": {"A": 1}}
ROGUE = (
    b"",
    b"\xc1",
    b"\xff" * 40,
    b"not msgpack",
    msgpack.dumps([]),
    msgpack.dumps(7),
    msgpack.dumps(["ack", 5, None]),
    msgpack.dumps(["ack", {"index": "A"}, None]),
    msgpack.dumps(["spawn", None, None]),
    msgpack.dumps(["spawn", SPAWN, None]),
    msgpack.dumps(["update_user_class", {"x": 1}, None]),
    msgpack.dumps(["spawning_complete", {}, None]),
    msgpack.dumps(["loadgen", {"step": "challenge", "nonce": 7}, None]),
    msgpack.dumps(["loadgen", {"step": "welcome", "proof": b"x"}, None]),
    msgpack.dumps(["loadgen", [1], None]),
)
"""Messages of a program that is no loadgen master. The worker that receives them must not print a traceback."""


def test_a_worker_survives_a_program_that_is_no_master(tmp_path: Path, started: list[Process]) -> None:
    """Whatever a program at the master's address sends, the worker ends with one sentence and exit code 2."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        worker = start(tmp_path, "--master", f"127.0.0.1:{port}", command="worker", LOADGEN_TOKEN=TOKEN)
        started.append(worker)
        node = socket.recv_multipart()[0]
        for message in ROGUE:
            socket.send_multipart([node, message])
        _, err = worker.communicate(timeout=60)
    finally:
        context.destroy(linger=0)
    assert worker.returncode == 2, err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2, err


BURST = ("burst", "--server", "tgi", "--n", "2", "--distributed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*BURST, "--expect-workers", "2", "--bind", "bench:port"), "--bind bench:port: not an address"),
        (BURST, "--expect-workers is missing"),
        ((*BURST, "--expect-workers", "2"), install_hint("ui")),
        (("worker", "--master", "127.0.0.1"), install_hint("ui")),
    ],
)
def test_what_cannot_begin_says_why(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 before anything else is done; here Locust is not installed."""
    monkeypatch.setitem(sys.modules, "locust", None)
    code, _, err = in_process(tmp_path, *arguments)
    assert (code, said in err) == (2, True), err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("load", [("--concurrency", "3"), ()])
def test_machines_share_the_sessions_of_a_file(load: tuple[str, ...], tmp_path: Path, started: list[Process]) -> None:
    """Two machines run every session once, each on one machine, with its order and its delays."""
    nodes = [
        {"id": "a", "input_tokens": 48, "output_tokens": 4, "blocks": [1, 2, 3]},
        {"id": "b", "after": [{"node": "a", "delay_s": 0.05}], "input_tokens": 60, "output_tokens": 5}
        | {"blocks": [1, 2, 3, 4]},
        {"id": "c", "after": ["a"], "role": "sub-agent", "history": "fresh", "input_tokens": 30, "output_tokens": 3},
        {"id": "d", "after": ["b", "c"], "history": "fresh", "input_tokens": 20, "output_tokens": 2, "tool_s": 0.02},
    ]
    rows = [{"session": f"{number}", "at_s": 0.05 * number, "block_tokens": 16, "nodes": nodes} for number in range(12)]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.002)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--no-report", "--workload", f"sessions:{trace}", *load]
        several = ["--distributed", "--expect-workers", "2", "--bind", "127.0.0.1:0", "--endpoint", "completions"]
        master = start(tmp_path, *common, *several, command="run", LOADGEN_TOKEN=TOKEN)
        started.append(master)
        assert master.stdout is not None
        port = next(found[1] for line in master.stdout if (found := re.search(r":(\d+)$", line.strip())))
        workers = [
            start(tmp_path / name, "--master", f"127.0.0.1:{port}", command="worker", LOADGEN_TOKEN=TOKEN)
            for name in ("one", "two")
        ]
        started += workers
        out, err = master.communicate(timeout=120)
        assert master.returncode in (0, 5), out + err
        assert [worker.wait(timeout=60) for worker in workers] == [0, 0]
    records = {record.id: record for record in runfile.read(tmp_path / "run").records}
    assert sorted(records) == list(range(48))
    assert {record.state for record in records.values()} == {"complete"}
    assert len({record.worker for record in records.values()}) == 2
    for first in range(0, 48, 4):
        a, b, c, d = (records[first + node] for node in range(4))
        assert {record.session for record in (a, b, c, d)} == {first}
        assert len({record.worker for record in (a, b, c, d)}) == 1
        # Each machine's times are converted to the master's clock, which moves due times and ends by microseconds.
        assert b.due_ns == pytest.approx((a.end_ns or 0) + 50_000_000, abs=MS)
        assert c.due_ns == pytest.approx(a.end_ns, abs=MS)
        assert d.due_ns == pytest.approx(max(b.end_ns or 0, c.end_ns or 0) + 20_000_000, abs=MS)
        if not load:
            assert a.due_ns == pytest.approx(first // 4 * 50_000_000, abs=MS)
    assert all(record.prompt_tokens == record.prompt_tokens_asked for record in records.values())
