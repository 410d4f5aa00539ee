"""`loadgen burst` as a person runs it: against simulated servers, with every kind of bad input and every fault."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from loadgen import runfile
from servers.resolve import PORTS
from servers.simulated.config import SimulatedConfig
from servers.simulated.faults import parse_rule
from servers.simulated.server import running, spawn

ROOT = Path(__file__).parents[2]
FAST = {"ttft_s": 0.02, "itl_s": 0.002}


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `loadgen burst --out folder/run ...`."""
    return subprocess.Popen(
        [sys.executable, "-m", "loadgen", "burst", "--out", str(folder / "run"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )


def burst(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run it to its end; exit code, stdout, stderr. A traceback is never right."""
    process = start(folder, *arguments, **environment)
    out, err = process.communicate(timeout=100)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def summary_of(folder: Path) -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = json.loads((folder / "run" / "summary.json").read_text())
    return loaded


def accounted(folder: Path, n: int) -> Counter[str]:
    """Every request has exactly one Record; how many ended in each state."""
    run = runfile.read(folder / "run")
    assert sorted(record.id for record in run.records) == list(range(n))
    assert run.footer is not None
    states = Counter[str](record.state for record in run.records)
    assert run.footer.sent == n == run.footer.complete + run.footer.truncated + run.footer.failed
    assert states["complete"] == run.footer.complete
    return states


@pytest.mark.parametrize(
    ("server", "endpoint"),
    [("vllm", "native"), ("vllm", "chat"), ("tgi", "native"), ("tgi", "chat"), ("lightllm", "native")],
)
def test_every_server_is_measured_end_to_end(server: str, endpoint: str, tmp_path: Path) -> None:
    """Complete, exact prompts and outputs, files in place, the folder's name printed last."""
    chosen = [] if endpoint == "native" else ["--endpoint", endpoint]
    with running(SimulatedConfig(server=server, **FAST)) as simulated:
        code, out, _ = burst(
            tmp_path, "--server", server, "--url", simulated.url, "--n", "20", "--output-tokens", "16", *chosen
        )
    assert accounted(tmp_path, 20) == {"complete": 20}
    assert code in (0, 5)  # 5: this machine was too busy for 20 requests, which is not what is tested here
    summary = summary_of(tmp_path)
    assert summary["tokens"]["prompt_mismatches"] == summary["tokens"]["output_mismatches"] == 0
    assert summary["tokens"]["prompt_reported"] == 20 * 512
    assert summary["tokens"]["output_reported"] == 20 * 16
    assert summary["server"]["simulated"] is True
    assert out.splitlines()[0].startswith(f"SIMULATED {server}")
    assert out.splitlines()[-1].endswith("report.html")
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert [line.prompt_tokens for line in simulated.log[-20:]] == [512] * 20


def test_a_prompt_that_cannot_be_counted_is_an_error_that_says_why(tmp_path: Path) -> None:
    """LightLLM counts a chat only by running it, which would fill its cache: a tokenizer is asked for."""
    with running(SimulatedConfig(server="lightllm", **FAST)) as simulated:
        code, _, err = burst(tmp_path, "--server", "lightllm", "--url", simulated.url, "--endpoint", "chat")
    assert code == 2
    assert "--tokenizer" in err
    assert simulated.log == []


def test_without_a_url_the_built_in_server_answers_and_is_named(tmp_path: Path) -> None:
    """Nothing listens on the usual port: the first line says that the server is simulated."""
    server = next(name for name, port in PORTS.items() if not _listens(port))
    code, out, _ = burst(tmp_path, "--server", server, "--n", "5", "--output-tokens", "8", "--speed", "50")
    assert out.splitlines()[0].startswith(f"SIMULATED {server}")
    assert code in (0, 5)
    assert accounted(tmp_path, 5) == {"complete": 5}


DIGEST = """
import hashlib, sys
from pathlib import Path
from urllib.request import urlopen
from loadgen import api
from loadgen.plan import plan_of
from loadgen.worker import slots_of
plan = plan_of(server="tgi", url=sys.argv[1], n=20, seed=int(sys.argv[2]))
with api.prepared(plan, Path("."), lambda line: None) as (shares, header):
    sent = b"".join(slot.payload for share in shares for slot in slots_of(share))
print(hashlib.sha256(sent).hexdigest(), len(sent))
"""


def test_the_same_seed_makes_the_same_bytes() -> None:
    """Whatever the process and its hash seed: byte-identical requests for one seed, others for another."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        digests = [
            subprocess.run(
                [sys.executable, "-c", DIGEST, simulated.url, seed],
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed, hash_seed in (("7", "1"), ("7", "2"), ("8", "1"))
        ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_several_workers_share_one_burst(tmp_path: Path) -> None:
    """Requests are split, started together, and all accounted for in one file without parts left over."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        burst(
            tmp_path, "--server", "tgi", "--url", simulated.url, "--n", "30", "--workers", "3", "--output-tokens", "8"
        )
    assert accounted(tmp_path, 30) == {"complete": 30}
    run = runfile.read(tmp_path / "run")
    assert {record.worker for record in run.records} == {0, 1, 2}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["report.html", "run.jsonl", "summary.json"]


def test_json_prints_the_summary_and_nothing_else(tmp_path: Path) -> None:
    """stdout is exactly summary.json; quiet prints nothing at all."""
    with running(SimulatedConfig(server="tgi", **FAST)) as simulated:
        common = ["--server", "tgi", "--url", simulated.url, "--n", "3", "--output-tokens", "4", "--no-report"]
        _, out, _ = burst(tmp_path, *common, "--json")
        assert json.loads(out) == summary_of(tmp_path)
        _, out, err = burst(tmp_path / "run", *common, "--quiet")
    assert (out, err) == ("", "")


def test_the_api_key_is_used_and_never_written(tmp_path: Path) -> None:
    """The key comes from the environment, goes into each request, and is in no file. Without it: exit 3 and a hint."""
    with running(SimulatedConfig(server="vllm", api_key="hunter2", **FAST)) as simulated:
        common = ["--server", "vllm", "--url", simulated.url, "--n", "3", "--output-tokens", "4"]
        code, _, err = burst(tmp_path, *common)
        assert code == 3
        assert "LOADGEN_API_KEY" in err
        burst(tmp_path, *common, "--api-key-env", "MY_KEY", MY_KEY="hunter2")
    assert accounted(tmp_path, 3) == {"complete": 3}
    assert all(b"hunter2" not in path.read_bytes() for path in (tmp_path / "run").iterdir())


BAD_INPUT = [
    (["--server", "sglang"], 2, "choose 'vllm', 'tgi', 'lightllm' or 'openai'"),
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
    (["--server", "vllm", "--url", "{vllm}", "--out", "/dev/null/run"], 2, "cannot make"),
    (["--server", "vllm", "--url", "{vllm}", "--out", "/proc/run"], 2, "cannot make"),
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
    ("429", "failed", "http_status"),
    ("500", "failed", "http_status"),
    ("503", "failed", "http_status"),
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
            "3",
        )
    assert code == 1
    accounted(tmp_path, n)
    told = {int(line.request_id): line.fault for line in simulated.log if line.request_id}
    for record in runfile.read(tmp_path / "run").records:
        fault = told.get(record.id, "")
        expected = next(
            ((state, kind) for name, state, kind in FAULTS if name.partition("@")[0] == fault), ("complete", "")
        )
        if expected[0]:
            assert (record.state, record.error_kind) == expected, (fault, record)
    assert "429" in out


def test_an_interrupt_ends_the_run_and_keeps_what_came(tmp_path: Path) -> None:
    """Ctrl-C once: nothing more is sent, what came is kept, the footer says interrupted, exit 130."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.1, itl_s=1.0)) as url:
        process = start(tmp_path, "--server", "tgi", "--url", url, "--n", "10")
        _wait_for(lambda: _events(url) >= 10, process)
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


def test_a_killed_worker_loses_its_requests_by_name_only(tmp_path: Path) -> None:
    """SIGKILL to one of two workers: its requests are `worker_lost`, the other's are complete, exit 1."""
    with spawn(SimulatedConfig(server="tgi", ttft_s=0.5, itl_s=0.1)) as url:
        process = start(
            tmp_path, "--server", "tgi", "--url", url, "--n", "10", "--workers", "2", "--output-tokens", "20"
        )
        _wait_for(lambda: _events(url) >= 10, process)
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
        _wait_for(lambda: _events(url) >= 10, process)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    states = accounted(tmp_path, 10)
    assert states["complete"] == 0
    assert "truncated" in out


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _events(url: str) -> int:
    """How many events the simulated server has sent."""
    with urlopen(f"{url}/simulated/status", timeout=10) as answer:
        return int(json.load(answer)["events"])


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
