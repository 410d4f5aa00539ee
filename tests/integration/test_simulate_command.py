"""`loadgen simulate` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from loadgen.analysis.run import runfile
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.simulated.disaggregated_engine import WorkerPools
from loadgen.studies.simulate import ServerModel, resolve_model
from loadgen.studies.twin import Twin
from tests.support.command import ROOT, burst, in_process, loadgen, summary_of

ENGINE = ("--server", "vllm", "--gpu", "A800", "--model", "llama-2-7b")
SMALL = ("--n", "30", "--input-tokens", "200", "--output-tokens", "20")


def test_it_prints_the_summary_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    """JSON alone with --json; exit code 0; nothing was sent, and the client was no limit."""
    code, out, _ = burst(tmp_path, *ENGINE, *SMALL, "--json", command="simulate")
    assert code == 0
    told = json.loads(out)
    assert told == summary_of(tmp_path)
    assert (told["server"]["simulated"], told["server"]["virtual"], told["client"]["verdict"]) == (True, True, "ok")
    assert told["requests"]["complete"] == 30


def test_the_text_and_the_page_carry_the_mark(tmp_path: Path) -> None:
    """SIMULATED (virtual), wherever figures are; the curves of the scheduler are in the report."""
    code, out, _ = burst(tmp_path, *ENGINE, *SMALL, command="simulate")
    assert code == 0
    assert "SIMULATED (virtual)" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "SIMULATED (virtual)" in page
    assert "Requests running" in page


def test_report_compare_export_and_objectives_work_on_it(tmp_path: Path) -> None:
    """A run file like any other."""
    code, _, _ = burst(tmp_path, *ENGINE, *SMALL, "--assert", "ttft.p99 < 1ms", "--no-report", command="simulate")
    assert code == 4
    (tmp_path / "old").mkdir()
    burst(tmp_path / "old", *ENGINE, *SMALL, "--vintage", "2023", "--no-report", command="simulate")
    first, second = str(tmp_path / "run"), str(tmp_path / "old" / "run")
    for words in (("compare", first, second), ("report", first), ("export", first, "--csv", str(tmp_path / "csv"))):
        done = loadgen(ROOT, *words)
        assert done.returncode in {0, 1}, done.stderr
        assert words[0] == "export" or "SIMULATED (virtual)" in done.stdout


@pytest.mark.parametrize("repeats", [(), ("--repeats", "2")])
def test_figures_are_those_of_the_file(tmp_path: Path, repeats: tuple[str, ...]) -> None:
    """Summary and page are made while it simulates: `loadgen report` of the run makes the same ones, byte by byte."""
    load = ("--n", "60", "--arrivals", "poisson:40", "--output-tokens", "uniform:1..90", "--timeout", "1s")
    few = ("--kv-tokens", "2000", "--max-in-flight", "40", "--goodput", "ttft < 1s", *repeats)
    code, _, err = burst(tmp_path, *ENGINE, *load, *few, command="simulate")
    assert code == 1, err
    run = tmp_path / "run"
    files = [*run.rglob("summary.json"), run / "report.html"]
    made = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    told = loadgen(ROOT, "report", str(run), "--goodput", "ttft < 1s")
    assert told.returncode == 0, told.stderr
    assert [file.read_bytes() for file in files] == made


def test_a_plan_file_and_repeats(tmp_path: Path) -> None:
    """As `loadgen run` reads them; options win."""
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'server = "tgi"\narrivals = "poisson:5"\nn = 20\noutput_tokens = "exponential:mean=20,min=4,max=60"\n'
    )
    words = (str(plan), "--gpu", "H100", "--model", "llama-3.1-8b", "--repeats", "2", "--n", "12", "--no-report")
    code, _, err = burst(tmp_path, *words, command="simulate")
    assert code == 0, err
    found = [runfile.read(tmp_path / "run" / f"repeat-{place}") for place in (1, 2)]
    assert [len(run.records) for run in found] == [12, 12]
    assert found[0].records != found[1].records
    assert found[0].header.plan["server"] == "tgi"


def test_separate_workers_and_pipelines(tmp_path: Path) -> None:
    """Every request completes, and the GPUs of all workers and stages count. No hardware limit is stated for them."""
    words = (*ENGINE, *SMALL, "--pp", "2", "--prefill-workers", "2", "--decode-workers", "3", "--json", "--no-report")
    code, out, _ = burst(tmp_path, *words, command="simulate")
    told = json.loads(out)
    assert (code, told["requests"]["complete"], told.get("limit")) == (0, 30, None)
    assert told["server"]["platform"] == "10 x A800-80GB SXM"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--decode-workers", "2"), "--decode-workers has no effect without --prefill-workers"),
        (("--prefill-workers", "1", "--chunked-prefill", "off"), "--chunked-prefill has no effect with"),
        (("--network", "NVLink 5"), "--network NVLink 5 has no effect: nothing is sent between the GPUs of a machine"),
        (("--tp", "2", "--set", "network=InfiniBand XDR"), "nothing is sent between machines; leave it out"),
        (("--tp", "3"), "--tp 3 does not divide the 32 attention heads of Llama-2-7B"),
        (("--tp", "8", "--pp", "2", "--gpus-per-node", "4"), "the 8 GPUs that share a layer must be in one machine"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """Exit code 2, as with `limits`."""
    code, _, err = burst(tmp_path, *ENGINE, *SMALL, *words, command="simulate")
    assert (code, message in err) == (2, True), err


def test_the_accuracy_of_the_model_is_in_every_output(tmp_path: Path) -> None:
    """In the text, in the JSON, in the page, and in a sweep."""
    measured = ("--model", "llama-3.1-8b", "--format", "fp8", "--tp", "2")
    loop = ("--n", "8", "--input-tokens", "900", "--output-tokens", "900")
    words = (*loop, "--server", "vllm", "--gpu", "H100", *measured, "--concurrency", "4")
    _, out, _ = burst(tmp_path, *words, command="simulate")
    assert "Accuracy of the model: TTFT " in " ".join(out.split())
    told = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["server"]["model_accuracy"]
    assert told.startswith("TTFT ")
    assert told.endswith(" rows")
    assert told in (tmp_path / "run" / "report.html").read_text("utf-8")
    load = ("--virtual", "H100", *measured, "--concurrency", "2,4", *loop)
    _, out, _ = in_process(tmp_path, "sweep", "--server", "vllm", *load, "--out", "sweep")
    assert f"Accuracy of the model: {told}." in " ".join(out.split())
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text("utf-8"))["model_accuracy"] == told
    assert told in (tmp_path / "sweep" / "frontier.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (("--rate", "5"), "in closed loops"),
        ((), "in closed loops"),
        (("--concurrency", "200"), "with at most 64 requests in flight"),
        (("--concurrency", "4", "--input-tokens", "uniform:5000..9000"), "with at most 922 tokens per prompt"),
        (("--concurrency", "4", "--output-tokens", "64"), "with at least 922 tokens per response"),
    ],
)
def test_loads_unlike_the_measured_ones_are_not_validated(load: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    """vLLM was measured on H100 in closed loops. The errors of these loops are stated, and which loops they are."""
    model = ("--gpu", "H100", "--model", "llama-3.1-8b", "--format", "fp8", "--tp", "2", "--no-report")
    lengths = ("--input-tokens", "900", "--output-tokens", "900", "-n", "2")
    _, out, _ = burst(tmp_path, "--server", "vllm", *model, *lengths, *load, command="simulate")
    assert f"15% (p90) off in 20 rows; not validated for this load (compared only {reason})" in " ".join(out.split())


def test_cached_prompts_can_be_read_from_a_run(tmp_path: Path) -> None:
    """The run states the share as a note, without a warning, and a later simulation takes the share from its folder."""
    words = (*ENGINE, *SMALL, "--cache-hit-rate", "0.25", "--chunked-prefill", "off", "--no-report")
    code, out, _ = burst(tmp_path, *words, command="simulate")
    assert code == 0
    assert "25% of prompt tokens cached, chunked prefill off" in out
    assert "prompt tokens (25%) came from the server's prefix cache." in " ".join(out.split())
    (tmp_path / "again").mkdir()
    words = (*ENGINE, *SMALL, "--cache-hit-rate", str(tmp_path / "run"), "--json", "--no-report")
    code, out, _ = burst(tmp_path / "again", *words, command="simulate")
    assert json.loads(out)["cached_prompts"]["share"] == 0.25


def test_a_twin_has_no_separate_workers() -> None:
    """The message says what to name instead."""
    model = ServerModel(twin=create_autospec(Twin, instance=True), workers=WorkerPools(1, 1))
    with pytest.raises(PlanError, match="a twin has no separate workers"):
        resolve_model(Plan(server="vllm", n=1), model)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--gpu", "A8000"), "A800"),
        (("--vintage", "1999"), "current or 2023"),
        (("--kv-tokens", "7"), "kv-tokens"),
        (("--url", "http://localhost"), "url"),
    ],
)
def test_mistakes_say_what_to_write(tmp_path: Path, words: tuple[str, ...], hint: str) -> None:
    """Exit code 2, and no folder."""
    code, _, err = burst(tmp_path, *ENGINE, *SMALL, *words, command="simulate")
    assert code == 2
    assert hint in err
    assert not (tmp_path / "run").exists()
