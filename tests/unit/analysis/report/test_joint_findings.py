"""The findings on all repeats of a plan together."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.joint_findings import joint_findings, joint_objectives, joint_verdict
from loadgen.analysis.summary import Summary
from loadgen.results import load_and_summarise
from tests.support.runs import burst, failed, healthy, run_of


def repeat(folder: Path, number: int, *, failures: int = 0, stalled: bool = False) -> Summary:
    """Return the summary of one repeat of three, with this number of failed requests after 20 complete ones."""
    records = [*burst(20, 4, seed=number), *(failed(20 + index) for index in range(failures))]
    telemetry = healthy(**({"stall_ns_max": 2_000_000_000} if stalled else {}))
    run = run_of(folder / str(number), records, telemetry=telemetry)
    run.header.plan.update(repeat=number, repeats=3)
    return summarise(run)


def test_checks_that_passed_are_told_once(tmp_path: Path) -> None:
    """Three good repeats have one sentence per check, with the total number of requests."""
    summaries = [repeat(tmp_path, number) for number in (1, 2, 3)]
    joint = joint_findings(summaries)
    sentences = {finding.id: finding.sentence for finding in joint}
    assert len(sentences) == len(joint)
    assert sentences["complete"] == "All 60 requests of 3 repeats complete."
    assert sentences["client"].startswith("The client was not the limit in any repeat; ")
    assert joint_verdict(summaries, joint).sentence == "Valid: every check passed in all 3 repeats."


def test_problems_name_their_repeats(tmp_path: Path) -> None:
    """Incomplete requests are counted over all repeats. An invalid repeat makes the joint figures invalid."""
    summaries = [repeat(tmp_path, 1), repeat(tmp_path, 2, failures=4), repeat(tmp_path, 3, stalled=True)]
    joint = joint_findings(summaries)
    sentences = [finding.sentence for finding in joint]
    assert "4 of 64 requests not complete (6.2%): 4 x HTTP 429 (repeat 2)." in sentences
    assert any(sentence.startswith("Repeat 3: Invalid: ") for sentence in sentences)
    assert [finding.level for finding in joint] == sorted(
        (finding.level for finding in joint), key=("error", "warning", "ok").index
    )
    verdict = joint_verdict(summaries, joint)
    assert (verdict.level, verdict.sentence[-11:]) == ("error", "(repeat 3).")
    two_failed = [summaries[1], replace(summaries[1], run=replace(summaries[1].run, repeat=4)), summaries[0]]
    assert "(repeats 2 and 4)." in " ".join(finding.sentence for finding in joint_findings(two_failed))


def test_objectives_are_counted_over_the_repeats(tmp_path: Path) -> None:
    """Each objective states in how many repeats it passed. Without objectives there is no finding."""
    from loadgen.analysis.objectives import parse

    objectives = parse(["e2e.p50 < 1000s", "e2e.p50 < 1us"])
    run_of(tmp_path / "run", burst(20, 4))
    summary = load_and_summarise(tmp_path / "run", objectives, (), drawn=False).summary
    joint = joint_objectives([summary, summary])
    assert joint is not None
    assert joint.level == "error"
    assert joint.sentence == "`e2e.p50 < 1000s` met in 2 of 2 repeats; `e2e.p50 < 1us` met in 0 of 2 repeats."
    assert joint_objectives([repeat(tmp_path, 1)]) is None
