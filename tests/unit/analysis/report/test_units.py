"""Units of latencies in tables, and bounds that goodput names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.goodput import goodput
from loadgen.analysis.objectives import parse_bounds
from loadgen.analysis.report import tables
from loadgen.analysis.report.findings import goodput_sentences
from loadgen.analysis.run.record import Record
from loadgen.analysis.summary import Summary
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, run_of, summarise, text_of, typed


def summary_of(folder: Path, records: Sequence[Record]) -> Summary:
    return typed(summarise(run_of(folder, records)))


def answers(ttft_ms: float, gaps_ms: Sequence[float], number: int = 8) -> list[Record]:
    """Equal answers with their first token after `ttft_ms` and these gaps between tokens."""
    instants = [ttft_ms]
    for gap_ms in gaps_ms:
        instants.append(instants[-1] + gap_ms)
    return [complete(place, [round(instant * MS) for instant in instants]) for place in range(number)]


def units(*summaries: Summary) -> dict[str, str]:
    """The unit of each row of the latency table, by the latency's name."""
    shown = tables.latency(summaries)
    place = [column.title for column in shown.columns].index("unit")
    return {row.key: row.cells[place].text for row in shown.rows}


def test_itl_has_the_unit_of_tpot(tmp_path: Path) -> None:
    """Tokens that come in pairs have a median gap of microseconds. ITL still reads as TPOT does, in milliseconds."""
    summary = summary_of(tmp_path / "run", answers(100, [0.02, 20, 0.02, 20, 0.02, 900, 0.02]))
    assert summary.latency.itl.p50 is not None
    assert summary.latency.itl.p50 < 1e-3
    found = units(summary)
    assert {found[name] for name in ("tpot_s", "itl_s", "icl_s", "normalised_s")} == {"ms"}
    row = next(line for line in text_of(summary).splitlines() if line.startswith("ITL"))
    assert row.split()[1] == "ms"
    assert row.split()[-1] == "900.0"


def test_a_median_gap_of_zero_names_no_unit(tmp_path: Path) -> None:
    """When most tokens share a read, the mean names the unit of ITL where TPOT cannot."""
    summary = summary_of(tmp_path / "run", answers(0.5, [0, 0, 0, 0.3]))
    assert summary.latency.itl.p50 == 0
    assert units(summary)["itl_s"] == "µs"


@pytest.mark.parametrize(
    ("ttft_ms", "gap_ms", "ttft", "e2e"),
    [(200, 20, "ms", "ms"), (50, 4000, "ms", "ms"), (0.4, 5, "µs", "µs"), (0.4, 5000, "µs", "s"), (3000, 20, "s", "s")],
)
def test_e2e_has_the_unit_of_ttft_unless_it_is_far_away(
    ttft_ms: float, gap_ms: float, ttft: str, e2e: str, tmp_path: Path
) -> None:
    """A reader compares the two. A median of more than five digits in that unit takes its own."""
    found = units(summary_of(tmp_path / "run", answers(ttft_ms, [gap_ms] * 10)))
    assert (found["ttft_s"], found["e2e_s"]) == (ttft, e2e)


def test_several_runs_share_the_unit_of_the_middle_one(tmp_path: Path) -> None:
    """One run with a median of another size does not decide for all."""
    runs = [
        summary_of(tmp_path / str(place), answers(ttft_ms, [20] * 4)) for place, ttft_ms in enumerate((0.3, 200, 210))
    ]
    assert units(*runs)["ttft_s"] == "ms"


def test_goodput_names_no_bound_of_zero(tmp_path: Path) -> None:
    """Answers whose tokens came in one read have a TPOT of 0 and meet any bound, so there is none to name."""
    records = answers(100, [0, 0, 0])
    summary = summary_of(tmp_path / "run", records)
    summary.goodput = goodput(build_frame(records), parse_bounds(["tpot < 30ms"]))
    text = " ".join(goodput_sentences(summary))
    assert text.endswith("90% would have met any bounds, however tight: their tpot is 0 or undefined.")
    assert tables.goodput([summary]).rows[0].cells[-1].text == "any bounds"


def test_one_latency_of_zero_leaves_the_other_bounds(tmp_path: Path) -> None:
    """All bounds are scaled together, so the latency that is not 0 decides by how much."""
    records = answers(100, [0, 0, 0])
    summary = summary_of(tmp_path / "run", records)
    summary.goodput = goodput(build_frame(records), parse_bounds(["tpot < 30ms", "ttft < 50ms"]))
    assert goodput_sentences(summary)[1] == "90% would have met tpot < 60.0 ms and ttft < 100 ms (bounds x2.00)."


def test_a_tiny_scale_is_not_zero(tmp_path: Path) -> None:
    """Bounds far above the latencies are met at a scale that has its significant digits."""
    records = answers(0.002, [0.001] * 3)
    summary = summary_of(tmp_path / "run", records)
    summary.goodput = goodput(build_frame(records), parse_bounds(["ttft < 10s"]))
    assert goodput_sentences(summary)[1] == "90% would have met ttft < 2.00 µs (bounds x0.000000200)."
