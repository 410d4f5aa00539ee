"""Real servers for these tests: each started on a free port, its log kept, stopped by its own process group."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record
from loadgen.servers.errors import LaunchError
from loadgen.servers.launch import LaunchSpec
from loadgen.servers.launch.process import Command, command_of, end_process, free_port, start_and_wait
from loadgen.servers.launch.spec import Host

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".engine"
READY_TIMEOUT_S = 240
"""vLLM takes about 35 s on two idle cores."""
BURST_TIMEOUT_S = 240


@dataclass(frozen=True)
class Engine:
    """A running server, in a process group of its own."""

    name: str
    url: str
    pid: int
    log: Path

    def kill(self) -> None:
        """SIGKILL to every process of the server: no goodbye on any connection but the kernel's."""
        server = psutil.Process(self.pid)
        for process in [server, *server.children(recursive=True)]:
            # Python's resource tracker serves nobody; it lives a moment longer, to remove the shared memory.
            if not any("resource_tracker" in argument for argument in process.cmdline()):
                process.kill()

    def kill_model(self) -> None:
        """SIGKILL to vLLM's engine process alone: its API process lives on and has to explain."""
        children = psutil.Process(self.pid).children()
        (engine,) = [child for child in children if child.cmdline()[0].startswith("VLLM::EngineCore")]
        engine.kill()

    def counters(self) -> dict[str, float]:
        """Its `/metrics`, summed over labels, because each series is one of this engine's only model."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(http_get(f"{self.url}/metrics")):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


@dataclass(frozen=True)
class Outcome:
    """What one `loadgen burst` left behind."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def records(self) -> list[Record]:
        """In order of request."""
        return sorted(runfile.read(self.folder).records, key=lambda record: record.id)

    def check_all_complete(self, n: int) -> None:
        """All `n` arrived whole. Exit code 5 is right where the client, on the engine's own cores, was the limit."""
        assert self.exit_code in (0, 5), self.stderr
        assert "Traceback" not in self.stderr
        requests = self.summary["requests"]
        assert (requests["sent"], requests["complete"], requests["truncated"], requests["failed"]) == (n, n, 0, 0)
        assert self.summary["client"]["verdict"] == {0: "ok", 5: "limited"}[self.exit_code]


Burst = Callable[..., Outcome]
"""(engine, folder of the run, further options...): `loadgen burst` from start to end."""
StartBurst = Callable[..., subprocess.Popen[str]]
FinishBurst = Callable[[subprocess.Popen[str], Path], Outcome]


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM on CPU, shared by all tests: look at what its counters gained, never at what they say."""
    with running_vllm(tmp_path_factory.mktemp("vllm")) as engine:
        yield engine


@pytest.fixture
def vllm_of_my_own(tmp_path: Path) -> Iterator[Engine]:
    """A vLLM that the test may kill."""
    with running_vllm(tmp_path) as engine:
        yield engine


@pytest.fixture(scope="session")
def lightllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """LightLLM's own front end, scheduler and detokenizer over random tokens."""
    options = "--tokenizer_mode auto --max_total_token_num 120000 --max_req_input_len 1536 --max_req_total_len 2048"
    # This port names its shared memory: two instances with the same one would share their books.
    nccl_port = free_port()
    words = (
        *(ENGINE / "lightllm" / "bin" / "python", ROOT / "tests" / "real" / "engine" / "lightllm_front.py"),
        *("--model_dir", ENGINE / "model", "--eos_id", "1", "--nccl_port", nccl_port, *options.split()),
    )

    def command(port: int) -> Command:
        return Command((*map(str, words), "--host", "127.0.0.1", "--port", str(port)), {"HF_HUB_OFFLINE": "1"})

    with running("lightllm", command, tmp_path_factory.mktemp("lightllm")) as engine:
        yield engine
    for left_behind in Path("/dev/shm").glob(f"{nccl_port}_*"):
        left_behind.unlink()


@pytest.fixture(scope="session")
def tokenizer() -> Path:
    """The tokenizer of the model that both servers hold."""
    return ENGINE / "model" / "tokenizer.json"


@pytest.fixture(scope="session")
def start_burst() -> StartBurst:
    """Start `loadgen burst` against an engine in a process of its own, as a user would. Who answers it has to find out
    by itself."""

    def start(engine: Engine, folder: Path, *options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "loadgen", "burst", "--url", engine.url]
        return subprocess.Popen(
            [*command, "--out", str(folder), "--json", "--no-report", *map(str, options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def finish_burst() -> FinishBurst:
    def finish(process: subprocess.Popen[str], folder: Path) -> Outcome:
        with process:
            try:
                stdout, stderr = process.communicate(timeout=BURST_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Outcome(process.returncode, stdout, stderr, folder)

    return finish


@pytest.fixture(scope="session")
def burst(start_burst: StartBurst, finish_burst: FinishBurst) -> Burst:
    def run(engine: Engine, folder: Path, *options: object) -> Outcome:
        return finish_burst(start_burst(engine, folder, *options), folder)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the last lines of each server it used."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Engine):
                report.sections.append((f"end of {value.log}", tail(value.log)))
    return report


@contextmanager
def running_vllm(
    folder: Path, *more: str, model: Path = ENGINE / "model", tensor_parallel: int = 1
) -> Iterator[Engine]:
    """As `loadgen servers up --launch process` starts it, but with prefix caching on: then "no token came from the
    cache" is a finding, not a setting. Of `more` the last word on anything counts."""
    options = "--enable-prefix-caching --max-model-len 2048 --dtype bfloat16 --enforce-eager"
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if tensor_parallel > 1 else {}  # it would want a core each
    host = Host("local", env={"VLLM_CPU_KVCACHE_SPACE": "1", **bind})
    given = {"python": ENGINE / "vllm" / "bin" / "python", "name": "tiny", "arguments": [*options.split(), *more]}
    wanted = LaunchSpec("vllm", host, str(model), "process", given | {"tensor_parallel": tensor_parallel})
    with running("vllm", lambda port: command_of(wanted, "127.0.0.1", port), folder) as engine:
        yield engine


@contextmanager
def running_sglang(folder: Path, token_log: Path, *more: str) -> Iterator[Engine]:
    """Start SGLang's front end and scheduler with a forward pass of known duration; see `engine/sglang_front.py`."""
    token_log.touch()
    options = (
        *("--model-path", ENGINE / "model", "--served-model-name", "tiny", "--token-log", token_log),
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
        *("--mem-fraction-static", "0.05", "--max-running-requests", "1024", "--enable-metrics", *more),
    )
    program = (ENGINE / "sglang" / "bin" / "python", ROOT / "tests" / "real" / "engine" / "sglang_front.py")
    environment = {
        "LD_LIBRARY_PATH": str(ENGINE / "sglang" / "stub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def command(port: int) -> Command:
        return Command((*map(str, program + options), "--host", "127.0.0.1", "--port", str(port)), environment)

    with running("sglang", command, folder) as engine:
        yield engine


@contextmanager
def running(name: str, command: Callable[[int], Command], folder: Path) -> Iterator[Engine]:
    port, log = free_port(), folder / f"{name}.log"
    url = f"http://127.0.0.1:{port}"
    try:
        pid, _ = start_and_wait(name, command(port), url, log, print, timeout_s=READY_TIMEOUT_S)
    except LaunchError as problem:
        pytest.fail(f"{problem}: {problem.hint}; is it made? `make engine`\n{problem.log_tail}", pytrace=False)
    try:
        yield Engine(name, url, pid, log)
    finally:
        end_process(pid)


def http_get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
    return text


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
