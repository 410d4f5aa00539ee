"""Simulated servers whose clock runs faster than real time: each command keeps to one speed, or refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import burst, in_process, summary_of
from tests.support.simulated import running

pytestmark = pytest.mark.xdist_group("speed")  # they share the runs
HARDWARE: dict[str, Any] = {"server": "vllm", "clock": "batching", "gpu": "H100", "model_shape": "llama-3.1-8b"}
LOAD = ("--n", "24", "--output-tokens", "16", "--input-tokens", "64", "--quiet", "--no-report")
SPEEDS = {"real": 1.0, "fast": 4.0}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a burst at real speed and one at four times that, on the model of one GPU."""
    folder = tmp_path_factory.mktemp("speed")
    for name, speed in SPEEDS.items():
        (folder / name).mkdir()
        with running(SimulatedConfig(**HARDWARE, speed=speed)) as server:
            code, _, problems = burst(folder / name, "--server", "vllm", "--url", server.url, *LOAD)
        assert code in {0, 5}, problems
    return folder


@pytest.fixture(scope="module")
def twin(runs: Path) -> Path:
    """The twin that is fitted to the burst at real speed."""
    code, _, problems = in_process(runs, "twin", "fit", "real/run", "--out", "real.json")
    assert code == 0, problems
    return runs / "real.json"


def swept(folder: Path, url: str, *more: str) -> tuple[int, str, str]:
    """Sweep two loads for a moment."""
    load = ("--rates", "20,40", "--n", "20", "--output-tokens", "8", "--input-tokens", "32")
    return in_process(folder, "sweep", "--server", "vllm", "--url", url, *load, *more)


def test_a_report_scales_the_hardware_limit_and_says_so(runs: Path) -> None:
    """What one GPU allows is four times as much where its clock runs four times faster, and the sentence has the
    speed; at real speed it has none."""
    limits = {name: summary_of(runs / name)["limit"] for name in SPEEDS}
    assert {name: limit["speed"] for name, limit in limits.items()} == SPEEDS
    code, fast, _ = in_process(runs, "report", "fast/run")
    _, real, _ = in_process(runs, "report", "real/run")
    assert code == 0
    assert "Hardware limit at 4 times speed (1 x H100 SXM" in " ".join(fast.split())
    assert "Hardware limit (1 x H100 SXM" in " ".join(real.split())


def test_a_page_of_runs_at_different_speeds_says_that_they_differ(runs: Path) -> None:
    """Both speeds are in the mark, and a warning stands above the figures."""
    assert in_process(runs, "report", "real/run", "fast/run", "--out", "both.html", "--quiet")[0] == 0
    page = (runs / "both.html").read_text("utf-8")
    assert "SIMULATED at 1 and 4 times speed" in page
    assert "These runs are at different speeds, so their figures cannot be compared." in page
    assert in_process(runs, "report", "fast/run", "fast/run", "--out", "same.html", "--quiet")[0] == 0
    assert "different speeds" not in (runs / "same.html").read_text("utf-8")


def test_an_index_of_runs_at_different_speeds_keeps_them_apart(runs: Path) -> None:
    """Each run's server has its speed, so that no line over time joins two of them, and a warning says why."""
    assert in_process(runs, "report", str(runs), "--out", "index.html", "--quiet")[0] == 0
    page = (runs / "index.html").read_text("utf-8")
    assert "SIMULATED at 1 and 4 times speed" in page
    assert "These runs are at different speeds, so their figures cannot be compared." in page
    assert len(set(re.findall(r'"group":"([^"]*)"', page))) == 2


def test_runs_at_different_speeds_are_not_compared(runs: Path) -> None:
    """Exit code 2 with the two speeds."""
    code, _, problems = in_process(runs, "compare", "real/run", "fast/run")
    assert (code, "SIMULATED at 4 times speed" in problems) == (2, True)


@pytest.mark.parametrize("command", ["fit", "check"])
def test_a_twin_takes_runs_at_real_speed_only(command: str, runs: Path, twin: Path) -> None:
    """Times of a faster clock are those of no hardware: a fit would find 400% of the memory bandwidth."""
    words = ("fit", "real/run", "fast/run") if command == "fit" else ("check", twin.name, "fast/run")
    code, _, problems = in_process(runs, "twin", *words)
    assert code == 2
    assert "fast/run is a run of a simulated server at 4 times real time" in problems
    assert "--speed 1" in problems


def test_a_sweep_at_another_speed_has_no_costs(tmp_path: Path) -> None:
    """A price is refused before anything is sent. Without one, nothing that is of real time stands beside the figures:
    all of them, the hardware limit too, are of the server's speed."""
    with running(SimulatedConfig(**HARDWARE, speed=4.0)) as server:
        code, _, problems = swept(tmp_path, server.url, "--gpu-hour-cost", "2.5", "--out", "priced")
        assert code == 2
        assert "--gpu-hour-cost needs real time" in problems
        assert "4 times" in problems
        assert "--speed 1" in problems
        assert not (tmp_path / "priced").exists()
        assert server.log == []
        code, out, problems = swept(tmp_path, server.url, "--out", "fast")
    assert code in {0, 5}, problems
    found = json.loads((tmp_path / "fast/sweep.json").read_text("utf-8"))
    assert found["speed"] == 4.0
    assert {step["cost_per_million_tokens"] for step in found["steps"]} == {None}
    assert {step["joules_per_token"] for step in found["steps"]} == {None}
    assert "No energy or cost" in " ".join(out.split())


def test_sweeps_at_different_speeds_share_no_page(tmp_path: Path) -> None:
    """Costs stand beside rates of real time, and a frontier is of one speed."""
    for name, speed in SPEEDS.items():
        with running(SimulatedConfig(**HARDWARE, speed=speed)) as server:
            price = ("--gpu-hour-cost", "2.5") if speed == 1 else ()
            code, _, problems = swept(tmp_path, server.url, *price, "--quiet", "--out", name)
        assert code in {0, 5}, problems
    (step, *_) = json.loads((tmp_path / "real/sweep.json").read_text("utf-8"))["steps"]
    per_hour = step["output_tokens_per_s"] * 3600
    assert step["cost_per_million_tokens"] == pytest.approx(2.5 / per_hour * 1e6)
    code, _, problems = in_process(tmp_path, "report", "real", "fast", "--out", "both.html")
    assert (code, "at different speeds" in problems) == (2, True)
    assert not (tmp_path / "both.html").exists()


def test_a_twin_predicts_no_sweep_at_another_speed(twin: Path, tmp_path: Path) -> None:
    """A twin predicts real time."""
    with running(SimulatedConfig(**HARDWARE, speed=4.0)) as server:
        code, _, problems = swept(tmp_path, server.url, "--twin", str(twin), "--out", "s")
    assert (code, "--twin needs real time" in problems, "--speed 1" in problems) == (2, True, True)


def test_the_built_in_server_is_priced_at_real_speed_only(tmp_path: Path) -> None:
    """Another speed is refused with the option that helps."""
    load = ("--rates", "20", "--n", "8", "--output-tokens", "4", "--input-tokens", "16", "--gpu-hour-cost", "2.5")
    code, _, problems = in_process(tmp_path, "sweep", "--simulated", *load, "--speed", "5", "--out", "fast")
    assert (code, "--speed 1" in problems, (tmp_path / "fast").exists()) == (2, True, False)
    code, _, problems = in_process(tmp_path, "sweep", "--simulated", *load, "--out", "one")
    assert code in {0, 5}, problems
    found = json.loads((tmp_path / "one/sweep.json").read_text("utf-8"))
    assert (found["speed"], found["mark"]) == (1.0, "SIMULATED")
    assert found["steps"][0]["cost_per_million_tokens"] > 0


def test_a_capacity_plan_knows_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made in virtual time: the speed of a plan file changes nothing."""
    monkeypatch.setattr("loadgen.studies.capacity.REQUEST_COUNTS", range(100, 501))  # simulations of fewer requests
    told = []
    for name, more in (("plain", ""), ("fast", "speed = 5.0\n")):
        file = tmp_path / f"{name}.toml"
        file.write_text(f'server = "vllm"\ninput_tokens = 64\noutput_tokens = 16\n{more}')
        words = ("--rate", "5", "--objective", "ttft.p99 < 200ms", "--gpu", "H100=2.5", "--tp", "1", "--json")
        code, out, problems = in_process(tmp_path, "plan-capacity", str(file), *words)
        assert code == 0, problems
        found = json.loads(out)
        del found["search"]["seconds"]
        told.append(found)
    assert told[0] == told[1]


MATRIX = """
name = "speeds"
launch = "simulated"
servers = ["vllm", {{name = "tgi", options = {{speed = {tgi}}}}}]
repeats = 1
hosts = [{{name = "here", platform = "H100", gpu = "H100"{price}}}]
models = [{{name = "tiny", shape = "TinyLlama-1.1B"}}]
options = {{speed = {speed}}}

[[workloads]]
name = "load"
n = 4
input_tokens = 16
output_tokens = 4
{sweep}
"""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speed": 1.0, "tgi": 5.0}, "servers at 1 and 5 times real time cannot be compared"),
        (
            {"speed": 5.0, "tgi": 5.0, "price": ", gpu_hour_cost = 2.0", "sweep": 'sweep = {rates = "10"}'},
            "gpu_hour_cost",
        ),
    ],
    ids=["mixed", "priced"],
)
def test_a_matrix_is_of_one_speed(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Cells are compared with each other, and costs with rates: both are refused before anything is started."""
    (tmp_path / "plan.toml").write_text(MATRIX.format(**{"price": "", "sweep": ""} | fields))
    code, _, problems = in_process(tmp_path, "matrix", "plan.toml", "--out", "m")
    assert (code, said in problems, "speed" in problems) == (2, True, True), problems
    assert not (tmp_path / "m").exists()
