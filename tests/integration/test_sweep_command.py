"""`loadgen sweep` as people run it: in virtual time, over HTTP, stopped and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.summary import from_json
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.studies.sweep import measured_steps, read_lines
from tests.support import command
from tests.support.command import ROOT, Forked
from tests.support.simulated import running

VIRTUAL = ("sweep", "--server", "vllm", "--virtual", "H100", "--model", "llama-3.1-8b", "--duration", "20s")
OBJECTIVES = ("--objective", "ttft.p99 < 500ms", "--objective", "tpot.p99 < 50ms")


def loadgen(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return command.loadgen(ROOT, *words)


def found(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "sweep.json").read_text("utf-8")))


def test_a_capacity_and_its_interval(tmp_path: Path) -> None:
    """As JSON and text, with each step a run of its own that `report` and `compare` know, and a page of them all."""
    folder = tmp_path / "s"
    done = loadgen(*VIRTUAL, *OBJECTIVES, "--start", "8", "--gpu-hour-cost", "2.5", "--out", str(folder), "--json")
    said = json.loads(done.stdout)
    assert done.returncode == {"found": 0, "open": 6}[said["state"]]
    assert 0 < said["capacity_low"] <= said["capacity"] <= said["capacity_high"] < 64
    assert said == found(folder)
    assert said["mark"] == "SIMULATED (virtual)"
    assert [step["load"] for step in said["steps"]] == sorted(step["load"] for step in said["steps"])
    for step in said["steps"]:
        summary = from_json((folder / step["folder"] / "summary.json").read_bytes())
        assert summary.run.arrivals == f"poisson:{step['load']:g}"
        assert summary.goodput is not None
        assert step["output_tokens_per_s_per_gpu"] == summary.throughput.output_tokens_per_s
        assert step["cost_per_million_tokens"] > 0
        assert step["joules_per_token"] > 0
        assert f"{step['folder']}/report.html" in (folder / "frontier.html").read_text("utf-8")
    first, second = (str(folder / step["folder"]) for step in said["steps"][:2])
    before = from_json((Path(first) / "summary.json").read_bytes())
    assert loadgen("report", first, "--quiet").returncode == 0
    after = from_json((Path(first) / "summary.json").read_bytes())
    assert (after.goodput, after.objectives) == (before.goodput, before.objectives)
    assert loadgen("compare", first, second, "--anyway", "--quiet").returncode == 0
    shown = loadgen("report", str(folder))
    assert shown.returncode == 0
    assert "Capacity" in shown.stdout


def test_objectives_that_never_or_always_hold(tmp_path: Path) -> None:
    """Exit code 4 with capacity 0 where nothing holds; `at least` where nothing breaks."""
    few = ("--over", "concurrency", "--n", "8", "--output-tokens", "4", "--json")
    done = loadgen(*VIRTUAL[:-2], "--objective", "ttft.p99 < 1us", *few, "--out", str(tmp_path / "never"))
    assert done.returncode == 4
    never = json.loads(done.stdout)
    assert (never["state"], never["capacity"], never["capacity_low"]) == ("below", 0, 0)
    done = loadgen(
        *VIRTUAL[:-2], "--objective", "e2e.p50 < 1000s", *few, "--out", str(tmp_path / "ever"), "--max-runs", "3"
    )
    ever = json.loads(done.stdout)
    assert (done.returncode, ever["state"], ever["ended"]) == (6, "open", "runs")
    assert (ever["capacity_low"], ever["capacity_high"]) == (16, None)


def test_a_list_of_loads_needs_no_objective(tmp_path: Path) -> None:
    """Each is measured, and there is a frontier of two such sweeps; what is not a list is refused."""
    for tensor in ("1", "2"):
        done = loadgen(
            *(*VIRTUAL, "--concurrency", "1,2,4,...,16", "--tp", tensor, "--n", "40", "--quiet"),
            *("--out", str(tmp_path / tensor)),
        )
        assert (done.returncode, done.stdout) == (0, "")
    one = found(tmp_path / "1")
    assert [step["load"] for step in one["steps"]] == [1, 2, 4, 8, 16]
    assert (one["state"], one["capacity"], one["gpus"]) == (None, None, 1)
    page = tmp_path / "both.html"
    assert loadgen("report", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(page)).returncode == 0
    text = page.read_text("utf-8")
    assert "2 sweeps" in text
    assert "2/step-5/report.html" in text
    assert len(text.encode()) < 1_000_000
    wrong = loadgen(*VIRTUAL, "--concurrency", "4,2")
    assert (wrong.returncode, "1,2,4,...,256" in wrong.stderr) == (2, True)
    missing = loadgen(*VIRTUAL, "--over", "concurrency")
    assert (missing.returncode, "--objective" in missing.stderr) == (2, True)
    mixed = loadgen("report", str(tmp_path / "1"), str(tmp_path / "2/step-1"))
    assert (mixed.returncode, "Name only sweeps" in mixed.stderr) == (2, True)


def test_without_objectives_the_largest_rate_without_a_queue_is_found(tmp_path: Path) -> None:
    """A pilot and four runs are enough. Their files are kept, and a finished sweep is not measured again."""
    folder = tmp_path / "s"
    search = ("sweep", "--server", "vllm", "--virtual", "H100", "--model", "llama-3.1-8b", "--out", str(folder))
    done = loadgen(*search)
    assert done.returncode == 0, done.stderr
    result = found(folder)
    assert (result["state"], result["objectives"], result["fixed_loads"]) == ("found", [], False)
    assert result["capacity_low"] < 44 < result["capacity_high"]
    assert result["capacity_high"] - result["capacity_low"] <= 0.2 * result["capacity"]
    assert {step["verdict"] for step in result["steps"]} <= {"met", "overload", "inconclusive"}
    lines = read_lines(folder)
    assert sum(line["run_s"] for line in lines if line["type"] in ("pilot", "end")) < 400
    summary = from_json((folder / "step-1/summary.json").read_bytes())
    assert summary.run.arrivals.startswith("constant:")
    assert (folder / "pilot-1/run.jsonl").is_file()
    text = " ".join(done.stdout.split())
    assert "the largest rate that the server keeps up with" in text
    assert "keeps up" in text
    assert " met" not in text
    again = loadgen(*search, "--resume", "--json")
    assert json.loads(again.stdout)["capacity"] == result["capacity"]
    assert len(measured_steps(read_lines(folder))) == len(result["steps"])


def test_an_interrupted_pilot_goes_on(tmp_path: Path) -> None:
    """Levels that the journal has are not measured again."""
    folder = tmp_path / "s"
    search = ("sweep", "--server", "vllm", "--virtual", "H100", "--model", "llama-3.1-8b", "--out", str(folder))
    assert loadgen(*search).returncode == 0
    journal = folder / "sweep.jsonl"
    lines = journal.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"type": "plan"' in line or '"concurrency": 4,' in line]
    journal.write_text("".join(kept), "utf-8")
    assert loadgen(*search, "--resume").returncode == 0
    assert [line["concurrency"] for line in read_lines(folder) if line["type"] == "pilot"][:2] == [4, 16]
    assert (folder / "pilot-2-unfinished-1").is_dir()


def test_a_server_that_refuses_every_request_ends_the_sweep(tmp_path: Path) -> None:
    """The error names the server's answer, and the exit code is that of an unusable server."""
    refusals = tuple(parse_rule(f"500:{number}") for number in range(40))
    with running(SimulatedConfig(server="tgi", faults=refusals, ttft_s=0.01, itl_s=0.001)) as server:
        where = ("--server", "tgi", "--url", server.url, "--input-tokens", "16", "--output-tokens", "4")
        began_s = time.monotonic()
        done = loadgen("sweep", *where, "--out", str(tmp_path / "s"))
        assert time.monotonic() - began_s < 30
    assert done.returncode == 3
    assert "refused all of the first" in done.stderr


def test_a_sweep_is_not_resumed_at_another_speed(tmp_path: Path) -> None:
    """Rates at one speed of a simulated clock say nothing about rates at another."""
    load = ("--input-tokens", "16", "--output-tokens", "4", "--n", "8", "--rates", "4,8", "--out", str(tmp_path / "s"))
    for speed, options, code in ((1.0, (), {0, 5}), (4.0, ("--resume",), {2})):
        config = SimulatedConfig(server="vllm", clock="batching", speed=speed)
        with running(config) as server:
            done = loadgen("sweep", "--server", "vllm", "--url", server.url, *load, *options)
        assert done.returncode in code, done.stderr
    assert "speed" in done.stderr


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """Against a server over HTTP: after SIGKILL nothing measured is repeated, and another plan is refused."""
    folder = tmp_path / "s"
    load = ("--duration", "3s", "--input-tokens", "64", "--output-tokens", "16")
    asked = ["sweep", "--simulated", "--rates", "4,8,16", *load, "--out", str(folder)]
    process = Forked(asked, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while not measured_steps(read_lines(folder)) and time.monotonic() < until_s:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = [line["at"] for line in measured_steps(read_lines(folder))]
    assert before
    done = loadgen(*asked, "--resume")
    assert done.returncode in {0, 5}, done.stderr  # 5 on a machine that is busy otherwise
    lines = measured_steps(read_lines(folder))
    assert [line["at"] for line in lines][: len(before)] == before
    assert [line["load"] for line in lines] == [4, 8, 16]
    changed = loadgen(*asked, "--resume", "--duration", "4s")
    assert (changed.returncode, "duration_s" in changed.stderr) == (2, True)


def test_an_overload_lasts_no_longer_than_needed(tmp_path: Path) -> None:
    """A run that the server does not keep up with is ended; its note says why, and higher loads are left out."""
    folder = tmp_path / "s"
    load = ("--duration", "10s", "--input-tokens", "2000", "--output-tokens", "16")
    began_s = time.monotonic()
    with running(SimulatedConfig(server="vllm", clock="batching", gpu="A800")) as server:
        loadgen("sweep", "--url", server.url, "--rates", "60,120", *load, "--out", str(folder), "--quiet")
    assert time.monotonic() - began_s < 60
    (line,) = measured_steps(read_lines(folder))
    assert (line["stopped"], line["load"]) == ("overload", 60)
    summary = from_json((folder / "step-1/summary.json").read_bytes())
    assert any("did not keep up" in note for note in summary.run.notes)
    assert found(folder)["steps"][0]["verdict"] == "overload"


def test_the_time_is_a_limit_and_the_sweep_goes_on_later(tmp_path: Path) -> None:
    """Past --max-time no other step is begun, the exit code says that the capacity is not known as asked."""
    folder = tmp_path / "s"
    asked = (*VIRTUAL, *OBJECTIVES, "--out", str(folder), "--json")
    done = loadgen(*asked, "--max-time", "1ms")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ended"], len(said["steps"]) < 2) == (6, "time", True)
    done = loadgen(*asked, "--resume", "--max-runs", "3")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ended"], len(said["steps"])) == (6, "runs", 3)


def test_a_sweep_goes_past_the_limit_that_the_server_states(tmp_path: Path) -> None:
    """At 4 of at most 8 at a time every request is complete. At 16 the server rejects some, which the sweep reports and
    takes for too much load; nothing is refused beforehand."""
    folder = tmp_path / "s"
    load = ("--n", "40", "--input-tokens", "16", "--output-tokens", "8", "--objective", "e2e.p50 < 100s")
    with running(SimulatedConfig(server="tgi", max_concurrent_requests=8, ttft_s=0.05, itl_s=0.005)) as server:
        where = ("--server", "tgi", "--url", server.url, "--concurrency", "4,16")
        done = loadgen("sweep", *where, *load, "--out", str(folder))
    assert done.returncode in {0, 5}, done.stderr
    few, many = found(folder)["steps"]
    assert (few["complete"], few["rejected"], few["over"] < 0.5) == (40, 0, True)
    assert many["complete"] + many["rejected"] == 40
    assert many["rejected"] >= 8
    assert many["over"] > 0.5
    assert f"{many['rejected']} rejected" in " ".join(done.stdout.split())
    assert "rejected" in (folder / "frontier.html").read_text("utf-8")


MIX = """
server = "vllm"
duration_s = 20
[[traffic]]
name = "chat"
rate = 8
input_tokens = 300
objectives = ["ttft.p99 < BOUND"]
[[traffic]]
name = "documents"
rate = 2
input_tokens = 3000
output_tokens = 40
[[traffic]]
name = "batch"
concurrency = 2
"""


def test_a_mix_of_classes_is_scaled_until_an_objective_fails(tmp_path: Path) -> None:
    """All rates grow by one factor, from the load of the plan on. The objective of one class decides, and goodput
    refers to it. The result says how often the load of the plan the server carries. The sweep can be resumed."""
    capacities = []
    for bound in ("100ms", "400ms"):
        plan, folder = tmp_path / f"{bound}.toml", tmp_path / bound
        plan.write_text(MIX.replace("BOUND", bound))
        words = ("sweep", str(plan), "--virtual", "H100", "--model", "llama-3.1-8b", "--out", str(folder))
        done = loadgen(*words, "--max-runs", "2", "--json")
        assert "the load of the plan is 10 requests/s: chat 80%, documents 20%; batch stays at closed:2" in done.stderr
        done = loadgen(*words, "--max-runs", "6", "--resume", "--json")
        result = json.loads(done.stdout)
        capacities.append(result["capacity"])
        assert result["objectives"] == [f"chat: ttft.p99 < {bound}"]
        assert (result["plan_load"], result["workload"]) == (10, "classes chat, documents, batch")
        assert len(result["steps"]) == 6
        for step in result["steps"]:
            summary = from_json((folder / step["folder"] / "summary.json").read_bytes())
            header = runfile.read(folder / step["folder"]).header
            rates = {part.name: part.load.rate_per_s for part in header.traffic}
            assert rates["chat"] == pytest.approx(0.8 * step["load"], rel=1e-5)
            assert rates["documents"] == pytest.approx(0.2 * step["load"], rel=1e-5)
            assert [part.goodput.bounds for part in summary.traffic if part.goodput] == [[f"ttft < {bound}"]]
        assert min(step["load"] for step in result["steps"] if step["step"] == 1) == 10
        shown = loadgen("report", str(folder)).stdout
        assert "times the load of the plan" in " ".join(shown.split())
    assert capacities[0] < capacities[1]


def test_a_list_of_loads_of_a_mix_over_http(tmp_path: Path) -> None:
    """The server receives each class at its part of the load."""
    plan = tmp_path / "plan.toml"
    with running(SimulatedConfig(server="vllm", ttft_s=0.005, itl_s=0.001)) as server:
        plan.write_text(MIX.replace("BOUND", "1h").replace("duration_s = 20", "duration_s = 2\noutput_tokens = 4"))
        done = loadgen("sweep", str(plan), "--url", server.url, "--rates", "10,30", "--out", str(tmp_path / "s"))
        assert done.returncode == 0, done.stderr
        lengths = [line.prompt_tokens for line in server.log if line.request_id]
    documents = sum(length == 3000 for length in lengths)
    assert documents / (documents + sum(length == 300 for length in lengths)) == pytest.approx(0.2, abs=0.15)
    assert [step["verdict"] for step in found(tmp_path / "s")["steps"]] == ["met", "met"]


def test_objectives_of_a_plan_file_decide(tmp_path: Path) -> None:
    """Without --objective, the objectives of the plan file count, also those of a plan without classes."""
    plan = tmp_path / "plan.toml"
    plan.write_text('server = "vllm"\nobjectives = ["e2e.p50 < 1us"]\n')
    words = ("--virtual", "H100", "--model", "llama-3.1-8b", "--rates", "1,2", "--duration", "5s", "--json")
    result = json.loads(loadgen("sweep", str(plan), *words, "--out", str(tmp_path / "s")).stdout)
    assert (result["objectives"], result["state"]) == (["e2e.p50 < 1us"], "below")
    plan.write_text(MIX.replace("BOUND", "1s").replace("rate = 8", "rat = 8"))
    done = loadgen("sweep", str(plan), *words, "--out", str(tmp_path / "t"))
    assert done.returncode == 2
    assert "plan.toml:\n[[traffic]] 'chat': rat: unknown setting; did you mean rate?" in done.stderr
    plan.write_text(MIX.replace("BOUND", "1s"))
    done = loadgen("sweep", str(plan), *words[:4], "--over", "sessions", "--out", str(tmp_path / "t"))
    assert done.returncode == 2
    assert "--over sessions: the plan has classes of traffic" in done.stderr
