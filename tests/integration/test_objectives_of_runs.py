"""Objectives belong to the run: `loadgen report` and the Python API judge a recorded run by those it was made with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loadgen import Plan, read, run
from loadgen.cli import app
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst, summary_of
from tests.support.runs import burst as records_of_burst
from tests.support.runs import footer, header, healthy, write
from tests.support.simulated import Running, running

ASSERTED = ["ttft.p50 < 100s", "ttft.p50 < 1us", "attainment >= 1%"]
GOOD = ["ttft < 100s", "e2e < 100s"]
GIVEN = [word for text in ASSERTED for word in ("--assert", text)] + [
    word for text in GOOD for word in ("--goodput", text)
]


@pytest.fixture(scope="module")
def simulated() -> Iterator[Running]:
    """A simulated TGI for the whole module."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        yield server


def common(simulated: Running) -> list[str]:
    return ["--server", "tgi", "--url", simulated.url, "--n", "12", "--output-tokens", "4"]


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)])


def judged(summary: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The objectives and bounds in a summary."""
    return [each["objective"] for each in summary.get("objectives", [])], summary.get("goodput", {}).get("bounds", [])


def recorded(folder: Path, objectives: Sequence[str] | None = None, **changes: Any) -> Path:
    """A run file, whose plan holds these objectives."""
    records = records_of_burst(40, 4)
    plan = header(40).plan | ({} if objectives is None else {"objectives": list(objectives)})
    return write(folder, [header(40, plan=plan, **changes), *records, *healthy(), footer(records)])


def test_a_report_keeps_the_objectives_of_the_run(simulated: Running, tmp_path: Path) -> None:
    """summary.json is the same again, and the page has the verdicts; rebuilding them is no failure."""
    code, _, err = burst(tmp_path, *common(simulated), *GIVEN)
    assert code == 4, err
    before = summary_of(tmp_path)
    assert judged(before) == (ASSERTED, GOOD)
    done = report(tmp_path / "run")
    assert done.exit_code == 0, done.output
    after = summary_of(tmp_path)
    assert (after["objectives"], after["goodput"]) == (before["objectives"], before["goodput"])
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert 'id="objectives"' in page
    assert 'id="goodput"' in page
    assert "1 of 3 failed: " in page


def test_several_runs_keep_theirs(tmp_path: Path) -> None:
    """On one page each run is judged by its own objectives, and so is each repeat of a folder."""
    paths = [recorded(tmp_path / f"run-{place}", [f"ttft.p50 < {place}s"]) for place in (1, 2)]
    done = report(*paths, "--out", tmp_path / "page.html", "--json")
    assert [judged(each)[0] for each in json.loads(done.stdout)] == [["ttft.p50 < 1s"], ["ttft.p50 < 2s"]]
    repeats = tmp_path / "repeats"
    for place in (1, 2):
        recorded(repeats / f"repeat-{place}", ["ttft.p50 < 3s"])
    done = report(repeats, "--json")
    assert [judged(each)[0] for each in json.loads(done.stdout)["runs"]] == [["ttft.p50 < 3s"]] * 2


def test_other_objectives_replace_those_of_the_run_once(tmp_path: Path) -> None:
    """--assert judges by what it says; the next report without it judges by the run's own again."""
    run_folder = recorded(tmp_path / "run", ["ttft.p50 < 1us"])
    assert report(run_folder, "--assert", "complete >= 1", "--quiet").exit_code == 0
    assert judged(summary_of(tmp_path))[0] == ["complete >= 1"]
    assert report(run_folder, "--quiet").exit_code == 0
    assert judged(summary_of(tmp_path))[0] == ["ttft.p50 < 1us"]


def test_a_junit_file_is_of_the_objectives_of_the_run(tmp_path: Path) -> None:
    """With --junit alone the run is judged as if it had just ended; without any objective there is nothing to write."""
    broken = recorded(tmp_path / "run", ["ttft.p50 < 1us"])
    assert report(broken, "--junit", tmp_path / "junit.xml", "--quiet").exit_code == 4
    assert "ttft.p50 &lt; 1us" in (tmp_path / "junit.xml").read_text("utf-8")
    done = report(recorded(tmp_path / "plain"), "--junit", tmp_path / "none.xml")
    assert isinstance(done.exception, Exception)
    assert "without --assert" in str(done.exception)


def test_a_run_of_an_older_version_is_judged_by_its_command(tmp_path: Path) -> None:
    """Its plan held no objectives, and its command line did."""
    command = ["loadgen", "burst", "--assert", "complete >= 50%", "--assert=ttft.p50 < 9s", "--goodput", "ttft < 9s"]
    found = report(recorded(tmp_path / "run", command=command), "--json")
    assert judged(json.loads(found.stdout)) == (["complete >= 50%", "ttft.p50 < 9s"], ["ttft < 9s"])


def test_an_objective_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A run file may come from a version that knows more. The rest is judged, and a warning says what is not."""
    done = report(recorded(tmp_path / "run", ["warmth.p50 < 9s", "complete >= 1"]))
    assert done.exit_code == 0, done.output
    summary = summary_of(tmp_path)
    assert judged(summary)[0] == ["complete >= 1"]
    assert summary["run"]["notes"] == [
        "an objective of the run is not judged: --assert 'warmth.p50 < 9s': 'warmth.p50' is not a figure of a run"
    ]


def test_a_plan_file_states_objectives(simulated: Running, tmp_path: Path) -> None:
    """A run of it is judged by them, unless the command line has others."""
    file = tmp_path / "plan.toml"
    file.write_text('n = 12\noutput_tokens = 4\nobjectives = ["ttft.p50 < 1us"]\ngoodput = "ttft < 100s"\n', "utf-8")
    words = ["run", str(file), "--server", "tgi", "--url", simulated.url, "--quiet"]
    assert CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")]).exit_code == 4
    assert judged(summary_of(tmp_path)) == (["ttft.p50 < 1us"], ["ttft < 100s"])
    others = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "others"), "--assert", "complete >= 1"])
    assert others.exit_code in (0, 5)


def test_the_python_api_keeps_them(simulated: Running, tmp_path: Path) -> None:
    """`run` stores what it was given, or what its plan states, and `read` judges by it."""
    plan = Plan(server="tgi", url=simulated.url, n=8, output_tokens=4, goodput=["e2e < 100s"])
    made = run(plan, out=tmp_path / "run", objectives=["ttft.p50 < 100s"])
    again = read(tmp_path / "run")
    for summary in (made.summary, again.summary):
        assert [each.objective for each in summary.objectives] == ["ttft.p50 < 100s"]
        assert summary.goodput is not None
        assert summary.goodput.bounds == ["e2e < 100s"]
    other = read(tmp_path / "run", objectives=["complete >= 1"])
    assert [each.objective for each in other.summary.objectives] == ["complete >= 1"]
    command = again.summary.run.command
    assert "--assert 'ttft.p50 < 100s'" in command
    assert "--goodput 'e2e < 100s'" in command
