"""The acceptance of draft tokens from each source, and tokens per event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.frame import build_frame
from loadgen.analysis.report.findings import findings
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Telemetry
from loadgen.analysis.speculation import tokens_per_event
from loadgen.analysis.summary import Summary
from tests.support.runs import complete, run_of

S = 10**9
INSTANTS = [S, 2 * S, 3 * S, 4 * S]


def readings(*values: dict[str, Any]) -> list[Telemetry]:
    """Return readings of the server: before the run, at its start, during the run and after it."""
    moments = ("idle", "start", "run", "after")
    return [
        Telemetry(source="server", at_ns=index * S, values={"moment": moment, **value})
        for index, (moment, value) in enumerate(zip(moments, values, strict=True))
    ]


def summary_of(folder: Path, records: list[Record], samples: list[Telemetry], server: str = "vllm") -> Summary:
    return summarise(run_of(folder / "run", records, telemetry=samples, server=server))


def drafted(number: int, **marks: int) -> Record:
    record = complete(number, INSTANTS, tokens=[1, 3, 2, 3])
    record.marks = marks
    return record


def test_the_counts_of_responses_take_precedence(tmp_path: Path) -> None:
    """They cover exactly the requests of the run. Ratios are those of the sums."""
    records = [
        drafted(0, draft_steps=3, draft_tokens=9, accepted_draft_tokens=5),
        drafted(1, draft_steps=1, draft_tokens=1, accepted_draft_tokens=0),
    ]
    grown = {"draft_steps": 100.0, "draft_tokens": 300.0, "accepted_draft_tokens": 100.0}
    found = summary_of(tmp_path, records, readings({}, {}, grown, grown)).speculation
    assert found is not None
    assert (found.source, found.acceptance_length, found.acceptance_rate) == ("responses", 2.25, 0.5)
    assert (found.steps, found.draft_tokens, found.accepted_tokens) == (4, 10, 5)


def test_counters_are_used_by_their_growth(tmp_path: Path) -> None:
    """What they counted before the run does not matter."""
    before = {"draft_steps": 50.0, "draft_tokens": 150.0, "accepted_draft_tokens": 0.0}
    after = {"draft_steps": 150.0, "draft_tokens": 450.0, "accepted_draft_tokens": 120.0}
    summary = summary_of(tmp_path, [drafted(0)], readings(before, before, after, after))
    found = summary.speculation
    assert found is not None
    assert (found.source, found.acceptance_length, found.acceptance_rate) == ("counters", 2.2, 0.4)
    sentence = next(each.sentence for each in findings(summary) if each.id == "speculation")
    assert sentence == (
        "Speculative decoding: 2.20 tokens per decode step on average, 40% of the draft tokens accepted "
        "(from the server's counters)."
    )


@pytest.mark.parametrize(("accepted", "length"), [(60.0, 1 + 60 / 90), (0.0, None)])
def test_steps_of_tgi_include_the_prefill(tmp_path: Path, accepted: float, length: float | None) -> None:
    """Its metric has one value per step of a request. Without accepted tokens, it does not use speculation."""
    before = {"draft_steps": 0.0, "accepted_draft_tokens": 0.0, "requests_finished": 0.0}
    after = {"draft_steps": 100.0, "accepted_draft_tokens": accepted, "requests_finished": 10.0}
    summary = summary_of(tmp_path, [drafted(0)], readings(before, before, after, after), server="tgi")
    found = summary.speculation
    assert (None if found is None else found.acceptance_length) == (length and round(length, 3))
    assert ("draft_steps" in summary.server_counters) == (accepted > 0)


def test_gauges_are_averaged_over_the_run(tmp_path: Path) -> None:
    """SGLang publishes the values of its latest steps. 0 means that there were no drafts."""
    zero = {"acceptance_length": 0.0, "acceptance_rate": 0.0}
    samples = readings(zero, zero, {"acceptance_length": 2.5, "acceptance_rate": 0.5}, zero)
    found = summary_of(tmp_path, [drafted(0)], samples, server="sglang").speculation
    assert found is not None
    assert (found.source, found.acceptance_length, found.acceptance_rate) == ("gauges", 2.5, 0.5)


def test_a_server_without_speculation_reports_nothing(tmp_path: Path) -> None:
    """Nor does a run without readings."""
    zero = {"draft_steps": 0.0, "draft_tokens": 0.0, "accepted_draft_tokens": 0.0}
    summary = summary_of(tmp_path, [complete(0, INSTANTS)], readings(zero, zero, zero, zero))
    assert (summary.speculation, summary.tokens_per_event) == (None, None)
    assert not {"draft_steps", "draft_tokens"} & summary.server_counters.keys()


def test_events_are_counted_by_their_tokens() -> None:
    """Events of more than sixteen tokens are counted together."""
    found = tokens_per_event(build_frame([drafted(0), complete(1, INSTANTS, tokens=[1, 1, 17, 40])]))
    assert found is not None
    assert (found.mean, found.events) == (68 / 8, 8)
    assert found.counts == {"1": 3, "2": 1, "3": 2, "17+": 2}


def test_a_total_that_is_spread_has_a_mean_only() -> None:
    """How many tokens each event contains is unknown."""
    spread = {"output_tokens": 16, "output_tokens_asked": 16, "chunk_counts": "chunk", "text_bytes": 99}
    found = tokens_per_event(build_frame([complete(0, INSTANTS, phrase_chunks=4, **spread)]))
    assert found is not None
    assert (found.mean, found.counts) == (4, {})
