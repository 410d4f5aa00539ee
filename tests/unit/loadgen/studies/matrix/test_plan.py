"""The plan of a matrix: every mistake at once, and the runs it leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.errors import PlanError
from loadgen.studies.matrix import MatrixPlan, plan_starts, read_matrix_plan, resolve_hosts, run_settings

PLAN = """
name = "small"
launch = "simulated"
servers = ["vllm", {name = "tgi-eos", server = "tgi", options = {eos_mean_tokens = 20}}]
models = ["llama"]

[[hosts]]
name = "here"
platform = "A800"

[[workloads]]
name = "burst"
n = 10
output_tokens = 8

[[workloads]]
name = "paper"
catalog = "paper-burst"
n = 20

[run]
timeout_s = 30
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "plan.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_settings_come_from_the_catalog_the_common_ones_and_the_workload(tmp_path: Path) -> None:
    """The workload's own win over those for all runs, and those over the catalog; the label names matrix and load."""
    plan = read_matrix_plan(written(tmp_path, PLAN))
    burst, paper = (run_settings(plan, name, server="vllm", platform="A800") for name in ("burst", "paper"))
    assert (burst.n, burst.output_tokens, burst.timeout_s, burst.platform) == (10, 8, 30, "A800")
    assert (paper.n, paper.input_tokens, paper.output_tokens, paper.timeout_s) == (20, 512, 128, 30)
    assert (burst.label, paper.label) == ("small-burst", "small-paper")


def test_a_server_may_stand_there_twice_under_two_names(tmp_path: Path) -> None:
    """Its kind is its name unless it says otherwise."""
    plan = read_matrix_plan(written(tmp_path, PLAN))
    assert [(each.name, each.server) for each in plan.servers] == [("vllm", "vllm"), ("tgi-eos", "tgi")]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('name = "small"', 'name = "../small"', "name: String should match pattern"),
        ('"vllm"', '"ollama"', "'ollama' is unknown; choose 'vllm', 'tgi', 'lightllm', 'sglang', 'tei' or 'openai'"),
        ('"vllm"', '"tgi-eos"', "unknown"),
        ('name = "paper"', 'name = "burst"', "workloads: burst: this name is used twice"),
        ("n = 20", "n = 20\ncolour = 1", "workload paper: colour: unknown setting"),
        ("n = 20", "n = 0", "workload paper: --n 0: must be from 1 to 1,000,000"),
        ("n = 20", 'url = "http://x"', "workload paper: url is set by the matrix"),
        ("timeout_s = 30", "seed = 3", "run: seed is set by the matrix"),
        ('catalog = "paper-burst"', 'catalog = "papers"', "workload paper: unknown workload 'papers'"),
        ('models = ["llama"]', 'models = ["llama"]\nstarts = 4', "starts: 3 repeats cannot be spread over 4 starts"),
        ('models = ["llama"]', 'models = ["llama"]\nequal_work = "tgi"', "equal_work: unknown server 'tgi'"),
        ('models = ["llama"]', 'models = ["llama"]\ncolour = 1', "colour: unknown setting"),
        ('models = ["llama"]', "", "models is missing"),
        ("[run]", '[[cases]]\nhost = "there"\nskip = "x"\n[run]', "cases: unknown host 'there'; choose here"),
        ("[run]", '[[cases]]\nhost = "here"\n[run]', "cases: a case needs options or skip"),
        ("n = 20", "n = 20\nsweep = {}", "workload paper: sweep.objectives is missing; or name loads"),
        ("n = 20", 'sweep = {rates = "2,1"}', "workload paper: sweep.rate 2,1: not a list of increasing numbers"),
        ("n = 20", 'sweep = {rates = "1", concurrency = "1"}', "are two sweeps; name one of them"),
        ("n = 20", 'sweep = {objective = "x"}', "workload paper: sweep.objective: unknown setting"),
        ("n = 20", 'sweep = {rates = "1"}\narrivals = "burst"', "workload paper: arrivals is set by the sweep"),
        ('platform = "A800"', 'platfrom = "A800"', "hosts.0.platfrom: unknown setting"),
    ],
)
def test_each_mistake_says_where_it_is(tmp_path: Path, before: str, after: str, message: str) -> None:
    """One line per mistake, with the place and what would be right."""
    assert before in PLAN
    with pytest.raises(PlanError) as caught:
        read_matrix_plan(written(tmp_path, PLAN.replace(before, after, 1)))
    assert message in str(caught.value)
    assert caught.value.hint


def test_all_mistakes_of_the_runs_are_told_at_once(tmp_path: Path) -> None:
    """Also those that only show when a workload becomes the plan of a run."""
    text = PLAN.replace("n = 10", "n = 0").replace("n = 20", 'n = "x"').replace("timeout_s = 30", "url = 1\nstarts = 9")
    with pytest.raises(PlanError) as caught:
        read_matrix_plan(written(tmp_path, text))
    lines = str(caught.value).splitlines()
    assert len([line for line in lines if "workload burst" in line]) >= 1
    assert len([line for line in lines if "workload paper" in line]) >= 1
    assert any("run: url" in line for line in lines)


def test_a_host_is_in_the_hosts_file_or_says_its_platform(tmp_path: Path) -> None:
    """A host that nobody described is a mistake, not this machine by accident."""
    (tmp_path / "hosts.toml").write_text('[gpu1]\nplatform = "A800"\naddress = "10.0.0.1"\n', encoding="utf-8")
    known = {"name": "gpu1"}
    base = {
        "name": "x",
        "servers": ["vllm"],
        "models": ["m"],
        "workloads": [{"name": "b", "n": 1}],
        "hosts_file": tmp_path / "hosts.toml",
    }
    plan = MatrixPlan(**base, hosts=[known, {"name": "desk", "platform": "RTX4090"}])
    found = resolve_hosts(plan)
    assert (found["gpu1"].platform, found["gpu1"].address) == ("A800", "10.0.0.1")
    assert (found["desk"].platform, found["desk"].address) == ("RTX4090", "127.0.0.1")
    with pytest.raises(PlanError, match="gpu2 is not in the hosts file"):
        resolve_hosts(MatrixPlan(**base, hosts=[known, "gpu2"]))


def test_a_sweep_is_measured_once_whatever_the_repeats(tmp_path: Path) -> None:
    """On the first start of each server; other workloads as often as asked."""
    sweep = 'n = 10\nsweep = {objectives = ["ttft.p99 < 1s"], concurrency = "1,2"}'
    plan = read_matrix_plan(written(tmp_path, PLAN.replace("n = 10", sweep) + "[options]\nspeed = 2.0\n"))
    plan = plan.model_copy(update={"repeats": 2, "starts": 2})
    found = [[each.cell.workload for each in start.repeats] for start in plan_starts(plan)]
    assert [sorted(each) for each in found] == [["burst", "paper"], ["burst", "paper"], ["paper"], ["paper"]]
    assert run_settings(plan, "burst", server="vllm").arrivals == "closed:1"
    assert len(plan_starts(plan.model_copy(update={"workloads": plan.workloads[:1]}))) == 2
