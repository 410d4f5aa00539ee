"""Answers to canaries under load, compared with those without load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.canaries import Kind, classify, compare_canaries
from loadgen.analysis.frame import build_frame
from loadgen.analysis.objectives import parse
from loadgen.analysis.report.findings import canary_findings, expected_finding
from loadgen.analysis.report.run_document import page_document
from loadgen.analysis.report.tables import canaries as canaries_table
from loadgen.analysis.run import runfile
from loadgen.analysis.run.canary import Canary
from loadgen.analysis.run.record import Record
from loadgen.analysis.slo import judge
from loadgen.analysis.stats import wilson_interval
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary
from loadgen.analysis.telemetry import growth_by_canaries
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, footer, header, healthy, part_of, run_of, write

ANSWERS = ("bado1000 and a long sentence", "fiku1001 and another sentence", "solo1002 with its own end")


def canary(number: int, text: str, moment: Any = "during", *, at_ms: int = 0, **changes: Any) -> Canary:
    """Return the answer to a canary, sent `at_ms` after the start of the load."""
    values: dict[str, Any] = {"state": "complete", "sent_ns": at_ms * MS, "end_ns": (at_ms + 50) * MS}
    code = ANSWERS[number].split()[0]
    return Canary(number=number, code=code, moment=moment, text=text, **{**values, **changes})


BEFORE = [canary(number, text, "before", at_ms=-1_000) for number, text in enumerate(ANSWERS)]
AFTER = [canary(number, text, "after", at_ms=9_000) for number, text in enumerate(ANSWERS)]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ANSWERS[0], "same"),
        (ANSWERS[1], "other_prompt"),
        ("my word is solo1002", "other_prompt"),
        ("", "empty"),
        ("bado1000 and \ufffd\ufffd", "replacement"),
        ("bado1000 and a short one", "diverges"),
        ("something else", "different"),
    ],
)
def test_answers_are_classified(text: str, kind: Kind) -> None:
    """A common beginning may be a rounding error. The code word of another canary never is."""
    assert classify(canary(0, text), {answer.number: answer for answer in BEFORE}) == kind


def ramp() -> list[Record]:
    """Return 100 requests of which one more is in flight every 10 ms. All of them end together."""
    return [
        complete(row, [(row * 10 + 5) * MS, 1_100 * MS], sent_ns=row * 10 * MS, end_ns=1_100 * MS) for row in range(100)
    ]


def test_answers_to_one_canary_are_one_trial() -> None:
    """Three canaries that are asked ten times each prove as much as three trials, not as thirty."""
    during = [canary(number, ANSWERS[number], at_ms=5 + at_ms) for number in range(3) for at_ms in range(10)]
    figures = compare_canaries([*BEFORE, *during, *AFTER], build_frame(ramp()), wilson_interval)
    assert figures is not None
    assert (figures.answers, figures.share) == (30, 1)
    assert figures.share_ci95 == pytest.approx(wilson_interval(3, 3))
    once = compare_canaries([*BEFORE, *during[::10], *AFTER], build_frame(ramp()), wilson_interval)
    assert once is not None
    assert once.share_ci95 == figures.share_ci95


def test_wrong_answers_name_the_level_of_load() -> None:
    """Right answers up to 64 requests in flight and wrong ones above: the figures name the levels next to the fault."""
    frame = build_frame(ramp())
    during = [
        canary(0, ANSWERS[0] if at_ms < 640 else ANSWERS[1], at_ms=at_ms)
        for at_ms in (5, 55, 155, 305, 455, 605, 655, 755, 905)
    ]
    figures = compare_canaries([*BEFORE, *during, *AFTER], frame, wilson_interval)
    assert figures is not None
    assert (figures.answers, figures.same, figures.wrong) == (9, 6, 3)
    assert (figures.right_to, figures.wrong_from) == (61, 66)
    assert [(level.low, level.high, level.same, level.answers) for level in figures.levels] == [
        (1, 1, 1, 1),
        (6, 16, 2, 2),
        (31, 61, 3, 3),
        (66, 91, 0, 3),
    ]
    assert (figures.alone, figures.alone_same) == (3, 3)


def test_a_canary_after_the_last_response_is_not_under_load() -> None:
    """A client may ask its last canary when no request of the load is left. This answer is not compared."""
    frame = build_frame(ramp())
    late_ms = int(np.nanmax(frame.end_ns) // 1_000_000) + 1
    figures = compare_canaries(
        [*BEFORE, canary(0, ANSWERS[0], at_ms=5), canary(0, "x", at_ms=late_ms)], frame, wilson_interval
    )
    assert figures is not None
    assert (figures.answers, figures.same) == (1, 1)


def test_canaries_without_a_complete_answer_are_counted() -> None:
    """A failed canary is no wrong answer. A canary that an interrupt cut off is nothing."""
    failed = canary(0, "", state="failed", error_kind="timeout")
    cut_off = canary(1, "", state="failed", error_kind="cancelled")
    figures = compare_canaries([*BEFORE, failed, cut_off], build_frame(ramp()), wilson_interval)
    assert figures is not None
    assert (figures.answers, figures.share, figures.failed) == (0, None, 1)
    assert compare_canaries([], build_frame(ramp()), wilson_interval) is None


def summary_of(folder: Path, canaries: list[Canary]) -> Summary:
    """Return the summary of a burst with these answers to canaries, read from its run file."""
    records = burst(20, 8)
    write(folder, [header(20), *records, *canaries, *healthy(), footer(records)])
    return summarise(runfile.read(folder))


def test_the_page_has_a_table_of_answers_by_load(tmp_path: Path) -> None:
    """One row per level of load. A level with wrong answers is marked. A run without canaries has no such section."""
    records = ramp()
    during = [canary(0, ANSWERS[0] if at_ms < 640 else ANSWERS[1], at_ms=at_ms) for at_ms in (5, 155, 305, 755)]
    lines = [header(100), *records, *BEFORE, *during, *AFTER, *healthy(), footer(records)]
    run = runfile.read(write(tmp_path / "run", lines))
    table = canaries_table([summarise(run)])
    assert [[cell.text for cell in row.cells][:4] for row in table.rows] == [
        ["1", "1", "1", "100%"],
        ["16", "1", "1", "100%"],
        ["31", "1", "1", "100%"],
        ["76", "1", "0", "0%"],
    ]
    assert [row.cells[-1].level for row in table.rows] == ["", "", "", "error"]
    sections = {section.id: section.title for section in page_document([part_of(run)]).sections}
    assert sections["canaries"] == "Canaries"
    without = run_of(tmp_path / "without", burst(20, 4))
    assert "canaries" not in {section.id for section in page_document([part_of(without)]).sections}


def test_the_server_counts_rejected_canaries() -> None:
    """A server that rejects canaries counts them as rejections, which the load does not contain."""
    asked = [canary(0, "", state="rejected"), canary(1, "", state="failed"), canary(2, ANSWERS[2])]
    counters = ("rejections", "requests_finished")
    assert [growth_by_canaries(asked, counter) for counter in counters] == [1, 1]


def test_a_run_file_keeps_canaries_apart_from_the_load(tmp_path: Path) -> None:
    """Canaries have lines of their own, and change no figure of the load."""
    with_canaries = summary_of(tmp_path / "a", [*BEFORE, canary(0, ANSWERS[0]), *AFTER])
    without = summary_of(tmp_path / "b", [])
    assert with_canaries.canaries is not None
    assert without.canaries is None
    assert (with_canaries.throughput, with_canaries.requests) == (without.throughput, without.requests)
    assert with_canaries.run.damaged_lines == 0


@pytest.mark.parametrize(
    ("during", "after", "level", "said"),
    [
        ([ANSWERS[0]], ANSWERS[0], "ok", "1 of 1 canaries had the same answer under load as without load (100%"),
        ([ANSWERS[1]], ANSWERS[0], "error", "1 answers are wrong: 1 to another prompt."),
        ([ANSWERS[1]], "x", "warning", "so the server's answers are not reproducible."),
        (["bado1000 and a cat"], ANSWERS[0], "note", "which rounding errors in other batches also cause."),
        ([], ANSWERS[0], "warning", "Answers under load were not checked"),
    ],
)
def test_the_finding_weighs_the_evidence(during: list[str], after: str, level: str, said: str, tmp_path: Path) -> None:
    """Wrong answers are an error, unless the server answers differently without load too."""
    canaries = [*BEFORE, *(canary(0, text) for text in during), canary(0, after, "after")]
    (finding,) = canary_findings(summary_of(tmp_path / "run", canaries))
    assert finding.level == level
    assert said in finding.sentence


def test_wrong_answers_without_a_check_after_the_load_are_a_warning(tmp_path: Path) -> None:
    """If no canary was answered after the load, it is unknown whether the server's answers are reproducible."""
    (finding,) = canary_findings(summary_of(tmp_path / "run", [*BEFORE, canary(0, ANSWERS[1])]))
    assert finding.level == "warning"
    assert "None was answered after the load" in finding.sentence


@pytest.mark.parametrize(("same", "verdict"), [(20, "pass"), (19, "fail")])
def test_an_objective_judges_canaries(same: int, verdict: str, tmp_path: Path) -> None:
    """`--assert 'canary >= 99%'` fails if one of 20 answers differs."""
    during = [canary(0, ANSWERS[0] if number < same else "other") for number in range(20)]
    records = burst(20, 8)
    write(tmp_path / "run", [header(20), *records, *BEFORE, *during, footer(records)])
    run = runfile.read(tmp_path / "run")
    (result,) = judge(parse(["canary >= 99%"]), frame_of_run(run), summarise(run))
    assert (result.verdict, result.requests) == (verdict, 20)


def test_expected_texts_and_suspect_texts_are_counted(tmp_path: Path) -> None:
    """Marks of responses become shares and findings. Loops alone are a note, because models often loop."""
    records = burst(20, 8)
    for record in records:
        record.marks = {"expected_text": int(record.id > 0), "checked_text": 1}
    records[0].marks["looping_text"] = 1
    run = run_of(tmp_path / "loops", records)
    summary = summarise(run)
    assert summary.suspect_texts is not None
    assert (summary.suspect_texts.checked, summary.suspect_texts.counts) == (20, {"looping_text": 1})
    assert [finding.level for finding in canary_findings(summary)] == ["note"]
    finding = expected_finding(summary)
    assert finding is not None
    assert finding.sentence.startswith("19 of 20 responses contain the expected text (95%")
    (result,) = judge(parse(["expected >= 99%"]), frame_of_run(run), summary)
    assert result.verdict == "fail"
    records[1].marks["replacement_text"] = 1
    assert [finding.level for finding in canary_findings(summarise(run_of(tmp_path / "bytes", records)))] == ["warning"]
