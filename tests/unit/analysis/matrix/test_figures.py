"""What cells gave over their repeats, and which differences are larger than the noise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.analysis.compare import compare, read_run
from loadgen.analysis.matrix import (
    CellDifference,
    CellMemory,
    CellSummary,
    MatrixSummary,
    _differences,
    merge_cell_memory,
)
from loadgen.analysis.matrix.document import MatrixReport
from loadgen.analysis.report.terminal import render
from loadgen.analysis.summary import Memory, Summary
from tests.support.matrices import fabricate

pytestmark = pytest.mark.xdist_group("figures")  # the matrix takes seconds to fabricate, so one process makes it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a matrix of six measured cells, on the second host twice as slow."""
    return fabricate(tmp_path_factory.mktemp("m") / "m")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """matrix.json of that matrix."""
    found: dict[str, Any] = json.loads((folder / "matrix.json").read_text("utf-8"))
    return found


def runs_of(folder: Path, cell: CellSummary) -> list[Summary]:
    """Return the summaries of the runs of a cell."""
    return [read_run(folder / run.folder).summary for run in cell.runs]


def terminal(folder: Path) -> str:
    found = msgspec.json.decode((folder / "matrix.json").read_bytes(), type=MatrixSummary)
    return render(MatrixReport(found).brief_document(), width=120)


def test_only_cells_that_differ_in_one_thing_are_paired(found: dict[str, Any]) -> None:
    """Servers on one platform, and one server on two platforms."""
    pairs = {(tuple(each["a"].values()), tuple(each["b"].values())) for each in found["differences"]}
    assert len(pairs) == 2 * 3 + 3
    for a, b in pairs:
        assert sum(one != other for one, other in zip(a, b, strict=True)) == 1


def test_a_large_difference_is_told_from_noise(found: dict[str, Any]) -> None:
    """About twice as slow on the other host, and called different."""
    for each in found["differences"]:
        if each["by"] == "host" and each["figure"] == "e2e.p50":
            assert 0.45 < each["ratio"] < 0.6
            assert each["verdict"] == "better"
            assert each["equal_work"]


def test_every_verdict_is_that_of_compare(found: dict[str, Any], folder: Path) -> None:
    """`loadgen compare` of the same runs gives the same interval and the same verdict on each figure."""
    cells = {cell.cell: cell for cell in msgspec.convert(found["cells"], list[CellSummary])}
    seen = set()
    for difference in msgspec.convert(found["differences"], list[CellDifference]):
        sides = [[read_run(folder / run.folder) for run in cells[cell].runs] for cell in (difference.b, difference.a)]
        row = next(row for row in compare(*sides).rows if row.figure == difference.figure)
        assert difference.verdict == row.verdict
        assert difference.needs_more == row.needs_more
        assert difference.ci95 == pytest.approx(row.ratio_ci95, abs=1e-5)
        seen.add(difference.verdict)
    assert {"better", "worse"} <= seen


def test_no_winner_within_the_margin_of_compare(tmp_path: Path) -> None:
    """A lead of 2% between repeats that vary in the same way lies within 5%: nobody wins and nothing is marked."""
    folder = fabricate(tmp_path / "m", pace={"vllm": 1.0, "tgi": 1.02}, servers=["tgi", "vllm"], repeats=3, starts=1)
    found = json.loads((folder / "matrix.json").read_text("utf-8"))
    told = [each for each in found["differences"] if each["by"] == "server"]
    assert {each["verdict"] for each in told if each["figure"] == "output_tokens_per_s"} == {"no difference"}
    text = " ".join(terminal(folder).split())
    assert re.search(r"A800: No winner: vLLM \+[\d.]+% compared with TGI \(95% CI [^)]+; within 5.0%\)\.", text)
    assert "▲" not in text


def test_the_ranking_says_by_how_much_and_marks_it(found: dict[str, Any], tmp_path: Path) -> None:
    """The leader of each platform with its interval; of two repeats their values stand in place of an interval."""
    (tmp_path / "matrix.json").write_text(json.dumps(found), "utf-8")
    text = " ".join(terminal(tmp_path).split())
    assert re.search(
        r"A800: LightLLM leads vLLM by \+[\d.]+% \(95% CI \+[\d.]+ to \+[\d.]+%\)\. LightLLM [\d,]+ ", text
    )
    assert re.search(r"LightLLM 2/2 ([\d,]+) tokens/s ▲", text)
    assert re.search(r"TGI 2/2 ([\d,]+) tokens/s ▼", text)
    rate = found["cells"][0]["figures"]["output_tokens_per_s"]
    assert (rate["n"], rate["ci95"]) == (2, None)
    assert "runs: " in text


def test_no_winner_comes_of_invalid_runs(tmp_path: Path) -> None:
    """In every run of the fastest server the client was the limit: it is ranked last, leads nobody, and nothing is
    marked better or worse than it."""
    folder = fabricate(tmp_path / "m", limited="lightllm", servers=["lightllm", "vllm"])
    told = json.loads((folder / "matrix.json").read_text("utf-8"))["differences"]
    assert {each["verdict"] for each in told if "lightllm" in (each["a"]["server"], each["b"]["server"])} == {
        "inconclusive"
    }
    text = " ".join(terminal(folder).split())
    assert "A800: No ranking: the client was the limit in every run of LightLLM." in text
    assert "leads" not in text
    assert "Invalid: the client was the limit in 4 of 8 runs" in text


def test_cells_of_different_speeds_are_not_compared(found: dict[str, Any], folder: Path) -> None:
    """Nobody leads, and a warning names the speeds."""
    summary = msgspec.convert(found, MatrixSummary)
    cells = [msgspec.structs.replace(cell, speed=5.0 if cell.server == "vllm" else None) for cell in summary.cells]
    told = list(_differences(cells, {cell.cell: runs_of(folder, cell) for cell in cells}))
    pairs = {frozenset((each.a.server, each.b.server)) for each in told if each.by == "server"}
    assert pairs == {frozenset(("lightllm", "tgi"))}
    mixed = msgspec.structs.replace(summary, cells=cells, differences=told)
    text = " ".join(render(MatrixReport(mixed).brief_document(), width=120).split())
    assert "No ranking: the cells ran at 1 and 5 times speed." in text
    assert "Cells ran at 1 and 5 times speed: those of different speeds are not compared." in text


def test_a_cell_says_which_of_its_runs_met_a_cold_server(found: dict[str, Any]) -> None:
    """The first of each start; here every run had a start of its own."""
    for cell in found["cells"]:
        assert [run["cold"] for run in cell["runs"]] == [True, True]
        assert len({run["start"] for run in cell["runs"]}) == 2


def test_what_failed_is_in_the_table_and_below_it(tmp_path: Path) -> None:
    """The cell stands there without figures, and the reason in the server's words, without control characters."""
    folder = fabricate(tmp_path / "m", failing="tgi", nasty="\x1b[31mred")
    text = terminal(folder)
    assert "0/2" in text
    assert "failed: TGI on A800, llama-2-7b, burst, repeat 1: out of memory" in text
    assert "\x1b" not in text
    assert "4 of 6 cells measured, 8 of 12 runs; 2 failed." in text


def test_memory_over_repeats_is_the_mean_and_the_largest_peak() -> None:
    """Processes of two starts are one row, though their ids differ; notes are said once."""

    def of(pid: int, peak: int) -> dict[str, Any]:
        levels = {"idle_bytes": 100, "loaded_bytes": 200 + peak, "peak_bytes": peak, "readings": 3}
        return {
            "gpus": [{"of": "GPU 0", "name": "A800", "total_bytes": 1000, **levels}],
            "gaps": {},
            "processes": [{"of": f"process {pid}", "on": "host", "name": "vllm", **levels}],
            "host": None,
            "kv_cache": {"idle_share": 0.0, "mean_share": 0.5, "peak_share": peak / 1000, "readings": 3, "tokens": 64}
            | {"peak_fullest_share": peak / 800, "engines": 2},
            "taken_at_start": {"share": 0.9, "note": "It takes 90%"},
            "not_measured": {"host": "it is elsewhere"},
        }

    found = merge_cell_memory(msgspec.convert([of(11, 700), of(12, 900)], list[Memory]))
    assert [each.of for each in found.levels] == ["GPU 0 A800", "process vllm on host"]
    assert msgspec.to_builtins(found.levels[0]) == {
        "of": "GPU 0 A800",
        "total_bytes": 1000,
        "idle_bytes": 100.0,
        "loaded_bytes": 1000.0,
        "peak_bytes": 900,
    }
    assert msgspec.to_builtins(found.kv_cache) == {
        **{"mean_share": 0.5, "peak_share": 0.9},
        **{"peak_fullest_share": 1.125, "tokens": 64},
    }
    assert found.notes == ["It takes 90%.", "Not read, host: it is elsewhere."]
    assert merge_cell_memory([]) == CellMemory()


def test_a_matrix_of_which_nothing_was_measured_has_a_report(tmp_path: Path) -> None:
    """It says what failed, in text and on the page."""
    folder = fabricate(tmp_path / "m", failing="tgi", servers=["tgi"])
    assert "Nothing was measured yet." in (folder / "matrix.html").read_text("utf-8")
    found = json.loads((folder / "matrix.json").read_text("utf-8"))
    assert {cell["state"] for cell in found["cells"]} == {"failed"}
    assert "0 of 2 cells measured, 0 of 4 runs; 2 failed." in terminal(folder)


def test_lengths_that_the_plan_wants_are_no_warning(found: dict[str, Any], tmp_path: Path) -> None:
    """Responses of the server of `equal_work` end by themselves. Other servers must send the requested length."""
    found = json.loads(json.dumps(found))
    for cell in found["cells"]:
        cell["lengths"]["differ"] = 5 * (cell["server"] in ("tgi", "vllm"))
    for equal_work, servers in ((None, "vLLM, TGI"), ({"server": "tgi", "lengths": []}, "vLLM")):
        found["equal_work"] = equal_work
        (tmp_path / "matrix.json").write_text(json.dumps(found), "utf-8")
        assert f"Output lengths of {servers} not as requested." in terminal(tmp_path)


def test_the_status_strip_counts_each_request_once(found: dict[str, Any]) -> None:
    """Each request counts by its outcome, and not also as sent."""
    summary = msgspec.convert(found, MatrixSummary)
    chips = {chip.label: chip for chip in MatrixReport(summary).brief_document().chips}
    complete = sum(cell.requests["complete"] for cell in summary.cells)
    assert chips["Requests"].text == f"{complete:,} of {complete:,} complete"
    assert chips["Requests"].level == "ok"
