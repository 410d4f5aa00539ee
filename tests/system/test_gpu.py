"""GPUs through nvidia-ml-py itself, over a stand-in of the driver's library with the real symbols and structs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.runfile import read
from loadgen.analysis.telemetry import all_series
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import ROOT, burst, start, summary_of, wait_for
from tests.support.nvml import A800, LIBRARY, LOST, compiled, environment, state
from tests.support.simulated import running

MIB = 1 << 20
TELL = """
import json, sys
from loadgen.servers.telemetry import GapError, Nvml
told = []
try:
    gpus = Nvml()
    told.append(gpus.facts)
    for step in sys.argv[1:]:
        if step == "close":
            gpus.close()
            continue
        try:
            told.append(gpus.read(1.0))
        except GapError as gap:
            told.append({"gap": str(gap)})
except GapError as gap:
    told.append({"not measured": str(gap)})
print(json.dumps(told))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled once."""
    return compiled(tmp_path_factory.mktemp("nvml"))


def told(asked: dict[str, str], *steps: str) -> list[dict[str, Any]]:
    """The facts, and what each `read` gives, in a process of its own: the library is looked for once in its life."""
    done = subprocess.run(
        [sys.executable, "-c", TELL, *(steps or ("read",))],
        env=environment(asked) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_everything_a_card_says(library: Path) -> None:
    """Bytes, shares, watts and Hz per card; memory per process, unknown where the driver does not say."""
    asked = state(library.parent / "all", A800 + " 4712:-", "0 H800 10 500 81920 0 70500 345")
    facts, read = told(asked)
    assert facts["driver"] == "535.129.03"
    assert [gpu["name"] for gpu in facts["gpus"]] == ["A800", "H800"]
    assert facts["gpus"][0]["memory_total_bytes"] == 81_920 * MIB
    assert facts["gpus"][1]["uuid"].startswith("GPU-")
    first, second = read["gpus"]
    assert first == {
        "index": 0,
        "memory_used_bytes": 73_000 * MIB,
        "memory_reserved_bytes": 600 * MIB,
        "busy": 0.97,
        "power_w": 312.0,
        "sm_clock_hz": 1.41e9,
        "processes": [{"pid": 4711, "memory_used_bytes": 72_000 * MIB}, {"pid": 4712, "memory_used_bytes": None}],
    }
    assert (second["power_w"], second["processes"]) == (70.5, [])


def test_what_a_card_does_not_support_is_left_out(library: Path) -> None:
    """No power, no utilisation, no second version of the memory's figures: the rest is there."""
    facts, read = told(state(library.parent / "old", "0 GTX 100 - 8192 - - 300"))
    assert read["gpus"] == [{"index": 0, "memory_used_bytes": 100 * MIB, "sm_clock_hz": 3e8, "processes": []}]
    assert facts["gpus"][0]["memory_total_bytes"] == 8192 * MIB


def test_a_driver_before_510_names_its_processes(tmp_path: Path) -> None:
    """Its library has the older of two functions only."""
    compiled(tmp_path, "-DBEFORE_510")
    _, read = told(state(tmp_path / "before", A800, driver="470.82.01"))
    assert read["gpus"][0]["processes"] == [{"pid": 4711, "memory_used_bytes": 72_000 * MIB}]


def test_one_lost_card_is_a_gap_of_its_own(library: Path) -> None:
    """The others go on; when all are lost, the reading is a gap."""
    _, read = told(state(library.parent / "one", LOST, A800))
    assert read["gpus"][0] == {"index": 0, "gap": "GPU is lost"}
    assert read["gpus"][1]["memory_used_bytes"] == 73_000 * MIB
    assert told(state(library.parent / "both", LOST, LOST))[1] == {"gap": "GPU is lost"}


def test_what_cannot_be_read_at_all_says_why(library: Path, tmp_path: Path) -> None:
    """No driver loaded, no card, and no library."""
    assert told(state(library.parent / "none", init=9)) == [{"not measured": "NVML: Driver Not Loaded"}]
    assert told(state(library.parent / "empty")) == [{"not measured": "NVML: the driver shows no GPU"}]
    (tmp_path / LIBRARY).write_bytes(b"no library")
    assert told({"LD_LIBRARY_PATH": str(tmp_path)}) == [{"not measured": "NVML: NVML Shared Library Not Found"}]


def test_it_can_be_closed_and_asked_again(library: Path) -> None:
    """Between the first reading and the run the library is let go of."""
    _, first, second = told(state(library.parent / "again", A800), "read", "close", "read")
    assert first["gpus"][0]["memory_used_bytes"] == 73_000 * MIB
    assert first == second


def test_a_run_tells_what_the_cards_held(library: Path, tmp_path: Path) -> None:
    """Asked for with --gpu, the figures are in the summary and in the terminal; the facts are in the header."""
    asked = state(library.parent / "run", A800)
    code, out, _ = burst(
        tmp_path, "--server", "tgi", "--n", "4", "--output-tokens", "8", "--gpu", "--no-report", **asked
    )
    assert code in (0, 5)
    memory: Any = summary_of(tmp_path)["memory"]
    (gpu,) = memory["gpus"]
    assert (gpu["of"], gpu["name"], gpu["total_bytes"]) == ("GPU 0", "A800", 81_920 * MIB)
    assert gpu["idle_bytes"] == gpu["loaded_bytes"] == gpu["peak_bytes"] == 73_000 * MIB
    assert {"of": "process 4711", "on": "GPU 0", "peak_bytes": 72_000 * MIB}.items() <= memory["processes"][0].items()
    assert memory["taken_at_start"] is None  # a simulated server takes nothing of a card
    assert "GPU 0 (A800): 71.3 GiB before the first request, peak 71.3 GiB of 80.0 GiB." in " ".join(out.split())


def test_a_card_lost_during_the_run_is_a_gap_from_then_on(library: Path, tmp_path: Path) -> None:
    """The other card's curve goes on, the lost one's ends in gaps, and the run is none the worse."""
    asked = state(library.parent / "lost", A800, A800)
    part = tmp_path / "run" / "part-telemetry.jsonl"
    with running(SimulatedConfig(server="tgi", ttft_s=0.2, itl_s=0.1)) as simulated:
        options = (
            "--server",
            "tgi",
            "--url",
            simulated.url,
            "--n",
            "2",
            "--output-tokens",
            "30",
            "--gpu",
            "--no-report",
        )
        process = start(tmp_path, *options, **asked)
        wait_for(lambda: part.exists() and b'"start"' in part.read_bytes(), process)
        state(library.parent / "lost", LOST, A800)
        process.communicate(timeout=100)
    assert process.returncode in (0, 5)
    curves = {each.of: each.y for each in all_series(read(tmp_path / "run")) if each.name == "gpu_memory_used"}
    known = sum(y is not None for y in curves["GPU 0"])
    assert 2 <= known < len(curves["GPU 0"])
    assert curves["GPU 0"] == [73_000 * MIB] * known + [None] * (len(curves["GPU 1"]) - known)
    assert curves["GPU 1"] == [73_000 * MIB] * len(curves["GPU 1"])


def test_asked_for_and_missing_is_refused(tmp_path: Path) -> None:
    """--gpu without a driver ends before anything is sent; without the option the run goes on and says why."""
    (tmp_path / LIBRARY).write_bytes(b"no library")
    asked = {"LD_LIBRARY_PATH": str(tmp_path)}
    common = ["--server", "tgi", "--n", "2", "--output-tokens", "4", "--no-report"]
    code, _, err = burst(tmp_path, *common, "--gpu", **asked)
    assert code == 2
    assert "--gpu: NVML: NVML Shared Library Not Found" in err
    code, _, _ = burst(tmp_path, *common, **asked)
    assert code in (0, 5)
    why: Any = summary_of(tmp_path)["memory"]
    assert why["not_measured"] == {"gpu": "the server is simulated and uses none"}
