"""`loadgen matrix` on simulated servers: whole, killed and resumed, interrupted, failing in part, with equal work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from tests.support.command import burst, start

pytestmark = pytest.mark.xdist_group("matrix")  # most of them look at one matrix

PLAN = """
name = "small"
launch = "simulated"
servers = ["vllm", "tgi"]
repeats = 2
starts = 2
seed = 3

[[hosts]]
name = "a800"
platform = "A800"
gpu = "A800-80GB SXM"

[[hosts]]
name = "rtx3090"
platform = "RTX3090"
gpu = "RTX 3090"

[[models]]
name = "tiny"
shape = "TinyLlama-1.1B"

[[workloads]]
name = "burst"
n = 24
input_tokens = 64
output_tokens = 24
warmup = 1

[options]
speed = 1.0
"""
ONE_HOST = PLAN.partition('[[hosts]]\nname = "rtx3090"')[0] + "[[models]]" + PLAN.partition("[[models]]")[2]
CELLS = 4


def matrix(folder: Path, text: str, *arguments: str) -> tuple[int, str, str]:
    """Run it to its end in `folder/run`."""
    (folder / "plan.toml").write_text(text, encoding="utf-8")
    return burst(folder, "plan.toml", *arguments, command="matrix")


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    try:
        texts = (folder / "run/matrix.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [line for text in texts if (line := json.loads(text))["type"] == kind]


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run/matrix.json").read_text("utf-8"))
    return found


def what_was_asked(folder: Path) -> dict[str, Any]:
    """Every run without its timings: its plan but for port and process, and what was recorded of each request."""
    facts = {}
    for file in sorted((folder / "run/cells").rglob("repeat-?/run.jsonl")):
        run = runfile.read(file)
        records = sorted(run.records, key=lambda record: record.id)
        facts[str(file.relative_to(folder))] = (
            {name: value for name, value in run.header.plan.items() if name not in ("url", "server_pid")},
            [(each.id, each.state, each.prompt_tokens, each.output_tokens, each.finish_reason) for each in records],
        )
    return facts


def killed_in_the_middle(folder: Path, runs_before: int) -> None:
    """Start it, and SIGKILL it while it is in a run, after so many."""
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    process = start(folder, "plan.toml", command="matrix")
    wait_in_a_run(folder, process, runs_before)
    process.kill()
    process.communicate()


def wait_in_a_run(folder: Path, process: subprocess.Popen[str], runs_before: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        begun, ended = lines_of(folder, "begin"), lines_of(folder, "end")
        if len(begun) == runs_before + 1 > len(ended) == runs_before:
            cell = begun[-1]["cell"]
            place = "/".join(cell[name] for name in ("host", "model", "server", "workload"))
            if (folder / f"run/cells/{place}/repeat-{begun[-1]['repeat']}/run.jsonl").exists():
                return
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A matrix that nobody disturbed: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("whole")
    code, out, _ = matrix(folder, PLAN)
    return folder, code, out


def test_every_cell_is_measured_and_reported(whole: tuple[Path, int, str]) -> None:
    """Two runs of each of four cells, in rounds; one report for all; every figure over its two repeats."""
    folder, code, out = whole
    assert code in (0, 5)
    found = found_in(folder)
    assert [cell["state"] for cell in found["cells"]] == ["measured"] * CELLS
    for cell in found["cells"]:
        assert [run["repeat"] for run in cell["runs"]] == [1, 2]
        assert [run["seed"] for run in cell["runs"]] == [3, 4]
        assert cell["requests"]["complete"] == 2 * 24
        assert (cell["lengths"]["mean"], cell["lengths"]["differ"]) == (24.0, 0)
        valid = cell["verdicts"].get("ok", 0)  # the others are left out
        assert len(cell["figures"]["output_tokens_per_s"]["values"]) == (valid or 2)
    assert "SIMULATED" in out
    assert "8 runs in 8 starts" in out
    page = (folder / "run/matrix.html").read_text("utf-8")
    assert all(text in page for text in ("SIMULATED", "A800", "RTX3090", "vLLM", "TGI"))


def test_a_run_says_which_platform_it_was_on(whole: tuple[Path, int, str]) -> None:
    """In its plan and in its summary, so that a report of this run alone names it."""
    folder = whole[0] / "run/cells/rtx3090/tiny/tgi/burst/repeat-1"
    assert runfile.read(folder).header.plan["platform"] == "RTX3090"
    assert json.loads((folder / "summary.json").read_text("utf-8"))["server"]["platform"] == "RTX3090"


def test_the_faster_card_is_faster(whole: tuple[Path, int, str]) -> None:
    """Each server gives more on the card with twice the memory bandwidth: cells are what their names say."""
    rates = {
        (cell["server"], cell["host"]): cell["figures"]["output_tokens_per_s"]["mean"]
        for cell in found_in(whole[0])["cells"]
    }
    for server in ("vllm", "tgi"):
        assert rates[server, "a800"] > rates[server, "rtx3090"]


def test_killed_and_resumed_it_is_the_same_matrix(whole: tuple[Path, int, str], tmp_path: Path) -> None:
    """SIGKILL in the middle of a run, then --resume: no finished run is touched or repeated, what the killed one left
    is kept aside, and all is as if nothing had happened, but for the timings."""
    killed_in_the_middle(tmp_path, runs_before=3)
    finished = {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("run.jsonl") if b'"footer"' in file.read_bytes()
    }
    assert len(finished) == 3
    code, out, err = matrix(tmp_path, PLAN, "--resume")
    assert code in (0, 5), err
    assert "3 runs are done" in out
    assert {file: file.read_bytes() for file in finished} == finished
    assert len(lines_of(tmp_path, "end")) == 8
    assert len(list((tmp_path / "run/cells").rglob("repeat-*-unfinished-1/run.jsonl"))) == 1
    assert what_was_asked(tmp_path) == what_was_asked(whole[0])
    assert [strip(cell) for cell in found_in(tmp_path)["cells"]] == [
        strip(cell) for cell in found_in(whole[0])["cells"]
    ]


def test_resumed_when_nothing_is_left_it_makes_its_report_again(whole: tuple[Path, int, str]) -> None:
    """And so does the folder's name alone; nothing is started."""
    folder = whole[0]
    before = len(lines_of(folder, "up"))
    (folder / "run/matrix.html").unlink()
    code, out, _ = matrix(folder, PLAN, "--resume", "--json")
    assert json.loads(out)["name"] == "small"
    assert code in (0, 5)
    assert (folder / "run/matrix.html").exists()
    assert len(lines_of(folder, "up")) == before


def test_another_plan_is_not_resumed(whole: tuple[Path, int, str], tmp_path: Path) -> None:
    """What changed is said, and nothing is done; nor is a matrix begun twice in one folder."""
    (tmp_path / "run").symlink_to(whole[0] / "run")
    code, _, err = matrix(tmp_path, PLAN.replace("n = 24", "n = 25"), "--resume")
    assert code == 2
    assert "workloads[0].n: 24 then, 25 now" in err
    code, _, err = matrix(tmp_path, PLAN)
    assert code == 2
    assert "--resume" in err


def test_interrupted_it_ends_tidily_and_can_be_resumed(tmp_path: Path) -> None:
    """SIGINT in a run: exit code 130, the server is gone, a report of what there is, and the way to go on."""
    plan = ONE_HOST.replace('["vllm", "tgi"]', '["vllm"]')
    (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
    process = start(tmp_path, "plan.toml", command="matrix")
    wait_in_a_run(tmp_path, process, runs_before=1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in err
    for line in lines_of(tmp_path, "up"):
        with pytest.raises(ProcessLookupError):
            os.kill(line["facts"]["pid"], 0)
    found = found_in(tmp_path)
    assert found["interrupted"]
    assert sum(len(cell["runs"]) for cell in found["cells"]) == 1
    code, _, err = matrix(tmp_path, plan, "--resume")
    assert code in (0, 5), err
    assert [cell["state"] for cell in found_in(tmp_path)["cells"]] == ["measured"]


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    """A server that does not come up, and one whose limits the burst exceeds: both with their reasons; exit code 3."""
    servers = """[
      {name = "no-card", server = "vllm", options = {gpu = "RTX 9999"}},
      {name = "narrow", server = "tgi", options = {max_concurrent_requests = 5}},
      "lightllm",
    ]"""
    text = ONE_HOST.replace('["vllm", "tgi"]', servers).replace("repeats = 2\nstarts = 2", "repeats = 1")
    code, out, _ = matrix(tmp_path, text)
    assert code == 3
    found = found_in(tmp_path)
    assert {cell["server"]: cell["state"] for cell in found["cells"]} == {
        "no-card": "failed",
        "narrow": "failed",
        "lightllm": "measured",
    }
    failures = {line["cell"]["server"]: line for line in found["failures"]}
    assert (failures["no-card"]["kind"], failures["narrow"]["kind"]) == ("LaunchError", "LimitError")
    assert "24 requests at once exceed its max_concurrent_requests of 5" in failures["narrow"]["reason"]
    assert "RTX 9999" in failures["no-card"]["reason"]
    assert "failed: no-card on A800" in out
    assert "RTX 9999" in (tmp_path / "run/matrix.html").read_text("utf-8")


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    """It prints the order, and about how long it takes; there is no folder afterwards."""
    code, out, _ = matrix(tmp_path, PLAN, "--dry-run")
    assert code == 0
    assert "8 runs to go: about" in out
    assert out.count("tgi (simulated)") == 4
    assert not (tmp_path / "run").exists()


def test_equal_work_gives_the_others_the_lengths_of_the_first(tmp_path: Path) -> None:
    """TGI's answers end by themselves; the other is asked for lengths drawn from those, and the report says so."""
    text = (
        ONE_HOST.replace('["vllm", "tgi"]', '["vllm", {name = "tgi", options = {eos_mean_tokens = 8}}]')
        .replace("repeats = 2\nstarts = 2", 'repeats = 1\nequal_work = "tgi"')
        .replace("n = 24", "n = 60")
    )
    code, _, err = matrix(tmp_path, text)
    assert code in (0, 5), err
    lengths = {}
    for server in ("tgi", "vllm"):
        run = runfile.read(tmp_path / f"run/cells/a800/tiny/{server}/burst/repeat-1")
        lengths[server] = [each.output_tokens or 0 for each in run.records if each.phase == "measured"]
    assert min(lengths["tgi"]) < 24
    given = (tmp_path / "run/equal-work/a800-tiny-burst.txt").read_text("ascii").split()
    assert [int(each) for each in given] == sorted(lengths["tgi"])
    assert set(lengths["vllm"]) <= set(lengths["tgi"])
    assert len(set(lengths["vllm"])) > 5
    found = found_in(tmp_path)
    assert found["equal_work"]["server"] == "tgi"
    assert {cell["server"]: cell["lengths"]["differ"] > 0 for cell in found["cells"]} == {"tgi": True, "vllm": False}
    assert "Equal work: TGI was measured first" in (tmp_path / "run/matrix.html").read_text("utf-8")


def strip(value: Any) -> Any:
    """A cell of matrix.json without what a clock had a part in."""
    timed = {"figures", "started_at", "duration_s", "verdict", "verdicts", "memory", "limit"}
    if isinstance(value, dict):
        return {
            name: strip(each)
            for name, each in value.items()
            if name not in timed and not name.endswith("_s") and "_per_s" not in name
        }
    return [strip(each) for each in value] if isinstance(value, list) else value
