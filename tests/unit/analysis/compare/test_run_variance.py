"""What `compare` calls: differences beyond any plausible variation between runs, by one rule for table and gates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadgen.analysis.compare import Comparison, compare, document, headline, read_run
from loadgen.analysis.compare.gates import parse_gates
from loadgen.analysis.report.terminal import render
from tests.support.compared import limited, run, scripted
from tests.support.runs import burst, footer, header, healthy, write

SLOWER = {"itl_ms": 29.0}


def verdicts(found: Comparison) -> dict[str, str]:
    return {each.figure: each.verdict for each in found.rows}


@pytest.mark.parametrize("chunks", [6, 24, 64, 200])
def test_slower_tokens_are_called_in_single_runs_of_any_length(chunks: int, tmp_path: Path) -> None:
    """45% more between tokens after the same first one, in runs too short to show how the server varies: worse in the
    table, failed by the gate. A script against itself is never called, and B has room for the bound."""
    a, again = (scripted(tmp_path / f"a{seed}", chunks=chunks, seed=seed) for seed in (1, 2))
    b = scripted(tmp_path / "b", chunks=chunks, **SLOWER)
    found = compare([a], [b], gates=parse_gates(["tpot.p50 worse by 5%", "output_tokens_per_s worse"]))
    assert verdicts(found)["tpot.p50"] == "worse"
    assert [each.verdict for each in found.gates] == ["fail", "fail"]
    same = compare([a], [again], gates=parse_gates(["tpot.p50 worse by 5%"]))
    assert not {"better", "worse"} & set(verdicts(same).values())
    assert same.gates[0].verdict in ("pass", "inconclusive")


def test_slower_first_tokens_are_called(tmp_path: Path) -> None:
    """Half as long again, with the same pace afterwards."""
    found = compare([scripted(tmp_path / "a", chunks=64)], [scripted(tmp_path / "b", chunks=64, ttft_ms=300)])
    assert verdicts(found)["ttft.p50"] == "worse"


def test_figures_are_always_shown(tmp_path: Path) -> None:
    """Every row of two short bursts has A, B, their difference and its interval; where the samples are too few for one
    it is unbounded, and the verdict says so. The JSON holds no number that is none."""
    found = compare([scripted(tmp_path / "a")], [scripted(tmp_path / "b", **SLOWER)])
    assert all(None not in (each.a, each.b, each.difference) for each in found.rows)
    told = [each for each in found.rows if not each.why]
    assert {"output_tokens_per_s", "ttft.p50", "tpot.p50", "e2e.p50", "complete"} <= {each.figure for each in told}
    assert all(each.ratio_ci95 or each.difference_ci95 for each in told)
    text = render(document(found))
    line = next(line for line in text.splitlines() if line.startswith("ttft.p99"))
    assert "unbounded" in line
    assert line.endswith("unclear")
    assert "by at most 10%" in " ".join(text.split())
    json.dumps(found.json(), allow_nan=False)


def test_the_bound_can_be_set(tmp_path: Path) -> None:
    """Who expects runs to differ by 60% is told nothing by 45%; who expects 1% is told that nothing changed."""
    a, again, b = scripted(tmp_path / "a"), scripted(tmp_path / "c", seed=3), scripted(tmp_path / "b", **SLOWER)
    assert verdicts(compare([a], [b], run_variation=0.6))["tpot.p50"] == "inconclusive"
    assert verdicts(compare([a], [again], run_variation=0.01))["tpot.p50"] == "no difference"


def test_table_and_gate_say_the_same(tmp_path: Path) -> None:
    """Two runs of each, one server 46% slower: worse in the table with and without a gate, which fails."""
    a = [run(tmp_path / f"a{place}", seed=place) for place in range(2)]
    b = [run(tmp_path / f"b{place}", seed=place + 9, pace=1.46) for place in range(2)]
    found = compare(a, b, gates=parse_gates(["tpot.p50 worse by 5%"]))
    assert verdicts(found)["tpot.p50"] == verdicts(compare(a, b))["tpot.p50"] == "worse"
    assert found.gates[0].verdict == "fail"
    assert re.fullmatch(
        r"[\d.]+ to [\d.]+ ms, \+[\d.]+% \(\+ is worse\), 95% limits \+[\d.]+% and \+[\d.]+%", found.gates[0].said
    )


def test_groups_tell_what_single_runs_have_too_few_samples_for(tmp_path: Path) -> None:
    """p99 of 60 requests: repeats show how it varies."""
    a = [run(tmp_path / f"a{place}", seed=place) for place in range(2)]
    b = [run(tmp_path / f"b{place}", seed=place + 9, pace=2.0) for place in range(2)]
    assert verdicts(compare(a, b))["e2e.p99"] == "worse"
    assert verdicts(compare(a[:1], b[:1]))["e2e.p99"] == "inconclusive"


def test_servers_that_differ_unalike_in_each_phase_are_called(tmp_path: Path) -> None:
    """First tokens a third sooner, the others 45% slower: that is no chance, however unlike the pieces of the runs."""
    found = compare(
        [scripted(tmp_path / "a", chunks=64, ttft_ms=600)], [scripted(tmp_path / "b", chunks=64, ttft_ms=400, **SLOWER)]
    )
    called = verdicts(found)
    assert (called["tpot.p50"], called["ttft.p50"]) == ("worse", "better")


def test_a_repeat_that_was_no_measurement_is_left_out(tmp_path: Path) -> None:
    """One whose client was the limit; where all were, nothing is called, by a condition neither."""
    a = [run(tmp_path / f"a{place}", seed=place) for place in range(3)]
    found = compare([a[0], limited(a[1]), a[2]], a)
    assert (found.runs_a, found.runs_b, found.unequal) == (2, 3, [])
    assert found.left_out == ["Run 2 of A is left out: the client was the limit (reads were late)."]
    slower = limited(run(tmp_path / "slower", pace=3.0))
    doubtful = compare([a[0]], [slower], gates=parse_gates(["tpot.p50 worse by 5%"]))
    assert (doubtful.runs_a, doubtful.unequal) == (1, [])
    assert doubtful.left_out == ["The run of B is in doubt: the client was the limit (reads were late)."]
    assert set(verdicts(doubtful).values()) == {"inconclusive"}
    assert doubtful.gates[0].verdict == "inconclusive"
    assert headline(doubtful).sentence == "No verdict: the client was the limit in every run of B."


def test_a_part_of_a_run_is_left_out_too(tmp_path: Path) -> None:
    """Of several; a single one did a part of the work, which is unequal."""
    whole = run(tmp_path / "whole")
    records = burst(30, 8)
    part = read_run(write(tmp_path / "part", [header(60), *records, *healthy(), footer(records, interrupted=True)]))
    found = compare([whole, part], [whole])
    assert (found.runs_a, found.unequal) == (1, [])
    assert found.left_out == ["Run 2 of A is left out: it is incomplete, as it was interrupted."]
    assert "run" in {each.what for each in compare([part], [whole]).unequal}
