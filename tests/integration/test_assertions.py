"""`--assert` and `--junit` as a CI job uses them, on every command that takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from typer import Exit

from loadgen.cli.report import report
from loadgen.errors import PlanError
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from tests.support.command import FAST, burst, summary_of
from tests.support.runs import complete, failed, footer, header, healthy, write
from tests.support.simulated import Running, running

KEPT = ["--assert", "ttft.p50 < 100s", "--assert", "complete >= 50%"]
BROKEN = ["--assert", "ttft.p50 < 1us"]
OK = {0, 5}  # 5: a busy machine may be the limit, which is not what is tested here


@pytest.fixture(scope="module")
def simulated() -> Iterator[Running]:
    """A simulated TGI for the whole module."""
    with running(SimulatedConfig(server="tgi", **FAST)) as server:
        yield server


@pytest.fixture
def common(simulated: Running) -> list[str]:
    """A small burst to it."""
    return ["--server", "tgi", "--url", simulated.url, "--n", "20", "--output-tokens", "4", "--no-report"]


def test_objectives_that_are_kept_pass(common: list[str], tmp_path: Path) -> None:
    """Exit code 0, a line for each, and each in summary.json and in the JUnit file."""
    code, out, err = burst(tmp_path, *common, *KEPT, "--junit", str(tmp_path / "junit.xml"))
    assert code in OK, err
    assert "SIMULATED  Objectives" in out
    assert "pass     ttft.p50 < 100s " in out
    entries = summary_of(tmp_path)["objectives"]
    assert [(each["objective"], each["verdict"]) for each in entries] == [(text, "pass") for text in KEPT[1::2]]
    (suite,) = Xml.parse(tmp_path / "junit.xml").getroot()
    assert [case.get("name") for case in suite.iter("testcase")] == KEPT[1::2]
    assert suite.get("failures") == "0"


def test_an_objective_that_is_broken_fails_the_command(common: list[str], tmp_path: Path) -> None:
    """Exit code 4, whatever else passes; --quiet still says what failed, and only that."""
    code, out, err = burst(tmp_path, *common, *KEPT, *BROKEN, "--quiet", "--junit", str(tmp_path / "junit.xml"))
    assert (code, out) == (4, "")
    said = [line for line in err.splitlines() if not line.startswith("loadgen: Invalid: the client was the limit")]
    assert said[0].startswith("loadgen: fail: ttft.p50 < 1us: ")
    assert len(said) == 1
    (suite,) = Xml.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")


def test_the_measured_figure_decides_and_says_when_it_is_marginal(common: list[str], tmp_path: Path) -> None:
    """20 of 20 complete requests meet 99%: exit code 0, with the interval and the number of requests that would
    decide in the text, in summary.json and in the JUnit file."""
    junit = tmp_path / "junit.xml"
    code, out, err = burst(tmp_path, *common, "--assert", "complete >= 99%", "--junit", str(junit))
    assert code in OK, err
    said = "100%, 95% CI 83.16\u2013100%; marginal, about 368 requests would decide"
    assert said in " ".join(out.split())
    assert "Marginal: the bound lies inside the interval" in out
    (entry,) = summary_of(tmp_path)["objectives"]
    assert (entry["verdict"], entry["marginal"], entry["requests_needed"]) == ("pass", True, 368)
    assert entry["interval"] == [pytest.approx(0.83157, abs=1e-5), 1.0]
    (suite,) = Xml.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "0")
    assert f"pass: complete >= 99%: {said}" in (suite.findtext("system-out") or "")


def test_a_confidence_that_cannot_be_reached_is_inconclusive(common: list[str], tmp_path: Path) -> None:
    """Exit code 6, or what --inconclusive says, and the number of requests that would decide; with --json it stands on
    stderr too. The run file keeps the confidence."""
    asked = ["--assert", "complete >= 99%", "--confidence", "95%"]
    code, out, err = burst(tmp_path, *common, *asked, "--json")
    assert code in {6, 5}
    assert json.loads(out)["objectives"][0]["requests_needed"] == 368
    said = "complete >= 99%: 100%, 95% CI 83.16\u2013100%; about 368 requests would decide"
    assert f"loadgen: inconclusive: {said}" in err
    code, out, _ = burst(tmp_path / "run", *common, *asked, "--inconclusive", "fail")
    assert code == 4
    assert "1 objective inconclusive" in out
    code, _, err = burst(tmp_path / "run" / "run", *common, *asked, "--inconclusive", "pass", "--quiet")
    assert code in OK
    assert "inconclusive" not in err
    stored = tmp_path / "run"
    report([stored], None, as_json=False, quiet=True)
    assert summary_of(tmp_path)["objectives"][0]["verdict"] == "inconclusive"
    with pytest.raises(Exit) as end:
        report([stored], None, as_json=False, quiet=True, assertions=["complete >= 99%"])
    assert end.value.exit_code in OK


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--confidence", "95%"], "--confidence has nothing to judge without --assert"),
        (["--assert", "complete >= 99%", "--confidence", "5%"], "is not between 50% and 100%"),
        (["--assert", "complete >= 99%", "--confidence", "high"], "'high' is not a confidence level"),
    ],
)
def test_a_wrong_confidence_stops_before_anything_is_sent(
    asked: list[str], message: str, common: list[str], tmp_path: Path
) -> None:
    """Exit code 2 and what to write instead."""
    code, _, err = burst(tmp_path, *common, *asked)
    assert code == 2
    assert message in " ".join(err.split())


@pytest.mark.parametrize(
    ("asked", "codes"),
    [([], {1}), (["ttft.p50 < 100s"], {1}), (["complete >= 10%"], OK), (["failed <= 10"], OK), (["failed < 10"], {4})],
)
def test_failed_requests_are_the_business_of_who_asked(asked: list[str], codes: set[int], tmp_path: Path) -> None:
    """Half of the burst fails: exit code 1, unless an objective speaks of that and then decides."""
    config = SimulatedConfig(server="tgi", faults=tuple(parse_rule(f"500:{place}") for place in range(10)), **FAST)
    with running(config) as refusing:
        where = ["--server", "tgi", "--url", refusing.url, "--n", "20", "--output-tokens", "4", "--no-report"]
        code, _, err = burst(tmp_path, *where, *(word for text in asked for word in ("--assert", text)))
    assert code in codes, err
    for each in summary_of(tmp_path).get("objectives", []):
        assert each["left_out"] == (10 if each["figure"] == "ttft" else 0)


@pytest.mark.parametrize("command", ["burst", "run"])
def test_a_wrong_expression_stops_before_anything_is_sent(
    command: str, simulated: Running, common: list[str], tmp_path: Path
) -> None:
    """Exit code 2 with every mistake and what is allowed; the server saw nothing and no folder was made."""
    before = len(simulated.log)
    asked = ["--assert", "ttft < 1s", "--assert", "complete >= 1", "--assert", "goodness > 5"]
    code, _, err = burst(tmp_path, *common, *asked, command=command)
    assert code == 2
    assert err.splitlines()[0].startswith("loadgen: --assert 'ttft < 1s': ttft is a distribution")
    assert err.splitlines()[1].startswith("--assert 'goodness > 5': 'goodness' is not a figure")
    assert "output_tokens_per_s" in err
    assert len(simulated.log) == before
    assert not (tmp_path / "run").exists()


def test_any_load_has_objectives(simulated: Running, tmp_path: Path) -> None:
    """`loadgen run` takes them as `loadgen burst` does."""
    load = ["--server", "tgi", "--url", simulated.url, "--arrivals", "closed:4", "--n", "60", "--output-tokens", "4"]
    code, _, err = burst(tmp_path, *load, "--no-report", *KEPT, *BROKEN, command="run")
    assert code == 4, err
    assert [each["verdict"] for each in summary_of(tmp_path)["objectives"]] == ["pass", "pass", "fail"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A run of 30 requests, 2 of which failed; each first token came after 50 ms."""
    records = [*(complete(place, [50_000_000, 60_000_000]) for place in range(28)), failed(28), failed(29)]
    return write(tmp_path / "stored", [header(30), *records, *healthy(), footer(records)])


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (["ttft.p90 < 40ms"], 4),
        (["ttft.p50 < 60ms"], 1),
        (["ttft.p50 < 60ms", "complete >= 50%"], 0),
        (["ttft.p50 < 60ms", "complete >= 99.9%"], 4),
        (["ttft.p50 < 60ms", "complete >= 90%"], 0),
        (["failed <= 2"], 0),
    ],
)
def test_a_stored_run_is_judged_as_if_it_had_just_ended(stored: Path, asked: list[str], code: int) -> None:
    """`loadgen report` gives the exit code that the run would have had, and writes the verdicts to summary.json."""
    with pytest.raises(Exit) as end:
        report([stored], None, as_json=False, quiet=True, assertions=asked)
    assert end.value.exit_code == code
    entries = json.loads((stored / "summary.json").read_text("utf-8"))["objectives"]
    assert [each["objective"] for each in entries] == asked


def test_a_stored_run_is_only_reported_when_nothing_is_asked(stored: Path) -> None:
    """Without --assert failed requests are no matter of the exit code, and summary.json has no verdicts."""
    report([stored], None, as_json=False, quiet=True)
    assert "objectives" not in json.loads((stored / "summary.json").read_text("utf-8"))


def test_several_stored_runs_share_a_junit_file(stored: Path, tmp_path: Path) -> None:
    """A suite for each; one failing run is enough for exit code 4."""
    slow = [complete(place, [900_000_000, 910_000_000]) for place in range(30)]
    other = write(tmp_path / "other", [header(30), *slow, *healthy(), footer(slow)])
    with pytest.raises(Exit) as end:
        report(
            [stored, other],
            tmp_path / "both.html",
            as_json=False,
            quiet=True,
            assertions=["ttft.p50 < 100ms"],
            junit=tmp_path / "junit.xml",
        )
    assert end.value.exit_code == 4
    assert [suite.get("failures") for suite in Xml.parse(tmp_path / "junit.xml").getroot()] == ["0", "1"]


def test_a_stored_run_is_left_alone_when_an_expression_is_wrong(stored: Path) -> None:
    """The mistake comes first: nothing is written."""
    with pytest.raises(PlanError, match="nonsense"):
        report([stored], None, as_json=False, quiet=True, assertions=["nonsense"])
    assert not (stored / "summary.json").exists()


def test_quiet_says_what_failed(tmp_path: Path) -> None:
    """Without any objective: how many requests were not complete, and why."""
    config = SimulatedConfig(server="tgi", faults=(parse_rule("500:3"),), **FAST)
    with running(config) as refusing:
        where = ["--server", "tgi", "--url", refusing.url, "--n", "20", "--output-tokens", "4", "--no-report"]
        code, out, err = burst(tmp_path, *where, "--quiet")
    assert (code, out) == (1, "")
    assert "loadgen: 1 of 20 requests not complete (5.0%): 1 " in err
    assert "loadgen: http_status: HTTP 500" in err
