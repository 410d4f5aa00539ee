"""`loadgen twin` and `simulate --twin`, as somebody uses them: on runs of a simulated server that batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import burst, in_process, summary_of
from tests.support.twins import LOADS, fit_twin

pytestmark = pytest.mark.xdist_group("twin")  # they share the runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a server on the model of an H100, which they name, and the twin of two of them."""
    folder = tmp_path_factory.mktemp("twin")
    fit_twin(folder, *LOADS)
    return folder


def test_fit_says_what_it_found_and_writes_it(runs: Path) -> None:
    """Constants with intervals, limits, each run replayed, the next command; GPU and model as the runs say."""
    told, found = (runs / "told.txt").read_text(), json.loads((runs / "twin.json").read_text())
    assert told.startswith("Twin of vllm ")
    for words in (
        "1 x H100",
        "bandwidth: memory bandwidth",
        "Limits: kv_tokens",
        "run, replayed",
        "next: loadgen simulate",
    ):
        assert words in told
    assert (found["gpu"], found["model"], found["tensor"]) == ("H100 SXM", "Llama-3.1-8B", 1)
    assert found["constants"]["bandwidth"]["low"] < found["constants"]["bandwidth"]["value"]
    assert [each["requests"] for each in found["runs"]] == [32, 20]
    assert "memory bandwidth, relative to" in (runs / "fit.html").read_text("utf-8")


def test_prompts_that_the_server_knew_are_a_warning(runs: Path) -> None:
    """The same seed twice: the second run computed next to nothing of its prompts."""
    code, _, told = in_process(runs, "twin", "fit", "burst/run", "again/run", "--out", "again.json")
    assert (code, "of its prompt tokens were in the server's prefix cache" in told) == (0, True)


def test_check_compares_the_twin_with_another_run(runs: Path) -> None:
    """The table and the page show measured and predicted figures, with the interval. --json has the same figures."""
    code, out, _ = in_process(runs, "twin", "check", "twin.json", "poisson/run", "--page", "check.html")
    assert (code, "measured" in out, "TTFT p50" in out) == (0, True, True)
    assert out.splitlines()[-1] == "check.html"
    assert "Inside the interval" in (runs / "check.html").read_text("utf-8")
    code, out, _ = in_process(runs, "twin", "check", "twin.json", "poisson/run", "--json")
    (rows,) = json.loads(out).values()
    tpot: dict[str, Any] = next(row for row in rows if row["figure"] == "tpot.p50")
    assert (code, tpot["low"] < tpot["predicted"] < tpot["high"]) == (0, True)


def test_simulate_predicts_with_intervals(runs: Path, tmp_path: Path) -> None:
    """In summary.json, in text and on the page; the server is the twin's, and what if is an option."""
    twin = ("--twin", str(runs / "twin.json"), "--n", "40", "--arrivals", "poisson:20")
    code, out, _ = burst(tmp_path, *twin, command="simulate")
    assert (code, "Predicted by the twin" in out, "twin of" in out) == (0, True, True)
    predicted: Any = summary_of(tmp_path)["prediction"]
    by_figure = {each["figure"]: each for each in predicted}
    assert by_figure["ttft.p50"]["low"] < by_figure["ttft.p50"]["value"] < by_figure["ttft.p50"]["high"]
    assert "Predicted by the twin" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "four").mkdir()
    code, _, _ = burst(tmp_path / "four", *twin, "--tp", "4", command="simulate")
    four: Any = summary_of(tmp_path / "four")["prediction"]
    tpot_s = {each["figure"]: each["value"] for each in four}["tpot.p50"]
    assert (code, tpot_s < by_figure["tpot.p50"]["value"]) == (0, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fit", "none"), "none"),
        (("fit", "burst/run", "--gpu", "H100", "--model", "nope"), "unknown model 'nope'"),
        (("fit", "burst/run", "--rules", "triton"), "the scheduler of triton is not modelled"),
        (("check", "burst/run/run.jsonl", "burst/run"), "is not a twin"),
    ],
)
def test_what_is_wrong_is_said(runs: Path, words: tuple[str, ...], said: str) -> None:
    """Exit code 2 and a sentence."""
    code, _, problems = in_process(runs, "twin", *words)
    assert (code, said in problems) == (2, True), problems


def test_what_was_simulated_is_no_measurement(runs: Path, tmp_path: Path) -> None:
    """A run in virtual time is refused."""
    burst(tmp_path, "--server", "vllm", "--n", "12", "--no-report", command="simulate")
    code, _, problems = in_process(runs, "twin", "fit", str(tmp_path / "run"))
    assert (code, "is a simulated run" in problems) == (2, True)


def test_a_sweep_follows_the_twin(runs: Path, tmp_path: Path) -> None:
    """What it predicts stands beside what is measured, and says where to begin; or it is itself swept."""
    asked = (
        "sweep",
        "--twin",
        str(runs / "twin.json"),
        "--objective",
        "ttft.p90 < 2s",
        "--output-tokens",
        "16",
        "--json",
    )
    code, out, problems = in_process(tmp_path, *asked, "--virtual", "twin", "--duration", "10s", "--out", "virtual")
    assert code in {0, 6}, problems
    alone = json.loads(out)
    assert alone["mark"] == "SIMULATED (virtual)"
    assert alone["predicted"] == []
    load = ("--rates", "8,16", "--n", "20", "--simulated", "--out", "real")
    code, out, problems = in_process(tmp_path, *asked, *load)
    assert code in {0, 5, 6}, problems
    found = json.loads(out)
    assert [point["load"] for point in found["predicted"]] == [8, 16]
    assert all(point["tokens_per_s_per_user"] > 0 for point in found["predicted"])
    assert '"predicted":[{"load":8' in (tmp_path / "real/frontier.html").read_text("utf-8")
    code, _, problems = in_process(tmp_path, *asked[:1], "--virtual", "twin", *asked[3:])
    assert (code, "--virtual twin needs --twin" in problems) == (2, True)
