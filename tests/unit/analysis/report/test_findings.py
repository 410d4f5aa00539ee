"""The findings of a run: each says what is so, and nothing that is not; and what they amount to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.format import start_time
from loadgen.analysis.objectives import ObjectiveVerdict
from loadgen.analysis.report import findings, status, tables
from loadgen.analysis.run.runfile import read
from loadgen.analysis.summary import QueueWait, Summary
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import (
    burst,
    complete,
    dropped,
    failed,
    footer,
    header,
    healthy,
    rejected,
    run_of,
    said,
    summarise,
    typed,
    write,
)


def summary_of(folder: Path, records: list[Any], **changes: Any) -> Summary:
    """The summary of a run that ended well."""
    return typed(summarise(run_of(folder / "run", records, **changes)))


def test_an_exact_run_is_called_exact(tmp_path: Path) -> None:
    """All complete, all lengths as requested: nothing but what is fine."""
    summary = summary_of(tmp_path, burst(12, 4))
    assert said(summary, "complete") == "All 12 requests complete."
    assert said(summary, "lengths") == "All prompt and output lengths as requested."
    cut = replace(summary, requests=replace(summary.requests, truncated=1))
    assert said(cut, "lengths") == "All prompt and output lengths of complete requests as requested."
    assert {each.level for each in findings.findings(summary)} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt_tokens": 513}, "1 of 2 prompt lengths not as requested; all output lengths as requested."),
        ({"prompt_tokens": None}, "Prompt length not reported for 1 request; all output lengths as requested."),
        (
            {"output_tokens_asked": 9},
            "All prompt lengths as requested; 1 of 2 responses ended early, after 2 of 9 tokens; TGI cannot be told to "
            "ignore the end-of-text token.",
        ),
        (
            {"output_tokens_asked": 1},
            "All prompt lengths as requested; 1 of 2 responses was longer than requested: 2 tokens instead of 1.",
        ),
    ],
)
def test_other_lengths_are_counted(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    """A length that differs, or that nobody reported, is never called exact."""
    records = [complete(1, [500 * MS]), complete(2, [500 * MS, 600 * MS], **changes)]
    assert said(summary_of(tmp_path, records), "lengths") == sentence


def test_estimated_prompt_lengths_differ_from_an_estimate(tmp_path: Path) -> None:
    """A difference is expected, so it is a note with both totals, and not called a length other than requested."""
    records = [complete(1, [500 * MS]), complete(2, [500 * MS, 600 * MS], prompt_tokens=513)]
    summary = summary_of(tmp_path, records, client={"prompts": "approximate", "exact": False})
    sentence = said(summary, "lengths")
    assert sentence.startswith(
        "1 of 2 prompt lengths differ from the estimate: 1,025 tokens in total, 1,024 requested;"
    )
    assert {found.level for found in findings.findings(summary) if found.id == "lengths"} == {"note"}


@pytest.mark.parametrize(
    ("asked", "changes", "level", "sentence"),
    [
        (
            "max:9",
            {"output_tokens_asked": 9},
            "note",
            "All prompt lengths as requested; 1 of 2 responses ended early, after 2 of 9 tokens; responses were "
            "allowed to end early, so runs are not strictly comparable.",
        ),
        (
            "max:1",
            {"output_tokens_asked": 1},
            "warning",
            "All prompt lengths as requested; 1 of 2 responses was longer than requested: 2 tokens instead of 1; "
            "responses were allowed to end early, so runs are not strictly comparable.",
        ),
        (
            64,
            {"counted_by": "chunks"},
            "warning",
            "All prompt lengths as requested; output lengths unknown for 1 request, as only chunks were counted.",
        ),
        (64, {"prompt_tokens_asked": 0}, "ok", "Prompt lengths as requested for 1 request, and not known beforehand "
         "for 1, as they included more than text; all output lengths as requested."),
    ],
)  # fmt: skip
def test_lengths_that_were_not_fixed_are_not_called_so(
    asked: int | str, changes: dict[str, Any], level: str, sentence: str, tmp_path: Path
) -> None:
    """Answers that might end early, and answers of which only chunks were counted, had no length that was checked."""
    records = [complete(1, [500 * MS]), complete(2, [500 * MS, 600 * MS], **changes)]
    summary = summary_of(tmp_path, records, plan=header(2).plan | {"output_tokens": asked})
    (found,) = (each for each in findings.findings(summary) if each.id == "lengths")
    assert (found.level, found.sentence) == (level, sentence)


def of_length(place: int, asked: int, tokens: int, **changes: Any) -> Any:
    """A complete response of this length, which its server counted."""
    known = {"output_tokens_asked": asked, "output_tokens": tokens}
    return complete(place, [(500 + step) * MS for step in range(2)], **{**known, **changes})


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([of_length(1, 128, 50)], "1 of 1 response ended early, after 50 of 128 tokens; TGI cannot be told to ignore "
         "the end-of-text token"),
        ([of_length(place, 128, 40 + 20 * (place % 2)) for place in range(100)],
         "100 of 100 responses ended early, after 50 of 128 tokens on average; TGI cannot be told to ignore the "
         "end-of-text token"),
        ([of_length(place, 128, 127 + (place % 3 > 0)) for place in range(3)],
         "1 of 3 responses ended early, after 127 of 128 tokens; TGI cannot be told to ignore the end-of-text token"),
        ([of_length(place, 100 + place, 50 + place % 2) for place in range(4)],
         "4 of 4 responses ended early, after 50.5 of 101.5 tokens on average; TGI cannot be told to ignore the "
         "end-of-text token"),
        ([of_length(place, 128, (50, 128, 140, 150)[place % 4]) for place in range(8)],
         "2 of 8 responses ended early, after 50 of 128 tokens on average, and 4 were longer than requested: 145 "
         "tokens instead of 128 on average; TGI cannot be told to ignore the end-of-text token"),
        ([of_length(place, 128, (50, 129)[place]) for place in range(2)],
         "1 of 2 responses ended early, after 50 of 128 tokens, and 1 was longer than requested: 129 tokens instead of "
         "128; TGI cannot be told to ignore the end-of-text token"),
        ([of_length(place, 1200, 2048) for place in range(128)],
         "128 of 128 responses were longer than requested: 2,048 tokens instead of 1,200 on average; TGI generates in "
         "pieces of 1,024 tokens"),
        ([of_length(place, 1200, 1024) for place in range(128)],
         "128 of 128 responses ended early, after 1,024 of 1,200 tokens on average; TGI generates in pieces of 1,024 "
         "tokens, and the next did not fit"),
        ([of_length(1, 1200, 1024), of_length(2, 1200, 700)],
         "2 of 2 responses ended early, after 862 of 1,200 tokens on average; TGI cannot be told to ignore the "
         "end-of-text token"),
    ],
)  # fmt: skip
def test_responses_of_another_length_are_described(records: list[Any], sentence: str, tmp_path: Path) -> None:
    """The sentence says how many were shorter or longer, by how much, and why, if the server's kind tells it."""
    summary = summary_of(tmp_path, records)
    assert said(summary, "lengths") == f"All prompt lengths as requested; {sentence}."


def test_the_lengths_of_failed_requests_are_not_compared(tmp_path: Path) -> None:
    """A failed request has one of two lengths, and the other request has the requested length."""
    records = [of_length(1, 1, 50, state="failed", error_kind="in_band_error"), of_length(2, 128, 128)]
    assert said(summary_of(tmp_path, records), "lengths") == "All prompt and output lengths as requested."


def test_the_reason_of_an_early_end_comes_from_the_header(tmp_path: Path) -> None:
    """What the registry said of the server's kind when the run was made counts, and no table of servers."""
    records = [of_length(1, 128, 50)]

    def sentence(folder: str, *, ignores_eos: bool) -> str:
        facts = {**header(1).server, "title": "Newcomer", "notes": {"ignores_eos": ignores_eos}}
        lines = [replace(header(1), server=facts), *records, *healthy(), footer(records)]
        return said(summarise(read(write(tmp_path / folder, lines))), "lengths")

    cause = "; Newcomer cannot be told to ignore the end-of-text token."
    assert sentence("cannot", ignores_eos=False).endswith(cause)
    assert sentence("can", ignores_eos=True).endswith("1 of 1 response ended early, after 50 of 128 tokens.")


def test_a_summary_of_an_older_version_still_says_that_lengths_differ(tmp_path: Path) -> None:
    """Its file has the number of responses of another length, and not how far they were off."""
    summary = summary_of(tmp_path, [of_length(1, 128, 50)])
    summary.tokens.output_early = None
    assert findings.lengths_sentence(summary).endswith("; 1 of 1 output length not as requested.")


def test_prompt_lengths_are_those_of_complete_requests(tmp_path: Path) -> None:
    """A server that rejects a request may report a prompt of 0 tokens, which is no wrong length."""
    refused = [rejected(10 + place, prompt_tokens=0) for place in range(60)]
    sentence = said(summary_of(tmp_path, [*burst(12, 4), *refused]), "lengths")
    assert sentence == "All prompt and output lengths as requested."


def test_prompts_that_nobody_counted_are_not_called_as_requested(tmp_path: Path) -> None:
    """A file sent to a server that counts nothing beforehand: what it reports is held against nothing."""
    records = [complete(number, [500 * MS], prompt_tokens_asked=0) for number in (1, 2)]
    sentence = said(summary_of(tmp_path, records), "lengths")
    assert sentence == "Prompt lengths not known beforehand; all output lengths as requested."


def test_user_space_stamps_are_named(tmp_path: Path) -> None:
    """Where the kernel gave no stamps the sentence says who did, and how wide the error bar is."""
    records = [complete(1, [5000 * MS], stamps="user")]
    summary = summary_of(tmp_path, records, telemetry=healthy(stall_ns_max=3 * MS))
    assert said(summary, "client") == ("Valid: the client was not the limit; user-space timestamps, error ±3.0 ms.")


def test_a_calibration_of_this_machine_is_quoted(tmp_path: Path) -> None:
    """The date, the p99 of TTFT for the stamps that were used, and the rate; no rate where none was exact."""
    spread = {"p50": 1e-6, "p99": 5e-6, "max": 2e-5}
    found = {
        "made_at": "2026-11-20T09:00:00+00:00",
        "version": "0.1.0",
        "errors": {"socket": {"ttft_s": spread}},
        "events_per_s": 50_123.0,
    }
    for folder, rate, ending in (("a", 50_123.0, ", 50,123 events/s."), ("b", 0.0, ".")):
        client = {"stamps": "socket", "calibration": found | {"events_per_s": rate}}
        sentence = said(summary_of(tmp_path / folder, burst(12, 4), client=client), "client")
        assert sentence.endswith(f"error ±20 µs; calibrated 2026-11-20: TTFT ±5.0 µs at p99{ending}")


def test_an_unknown_error_is_called_unknown(tmp_path: Path) -> None:
    """Without kernel stamps and without health samples there is no error bar to state."""
    summary = summary_of(tmp_path, [complete(1, [500 * MS], stamps="user")], telemetry=[])
    assert said(summary, "client").endswith("user-space timestamps, error unknown.")


def test_everything_that_limits_belief_is_a_warning(tmp_path: Path) -> None:
    """A proxy in between, interruption, damage, merged first tokens, connections opened again, requests sent again,
    pauses of a closed loop and the run's own notes each have a line."""
    records = [complete(1, [500 * MS], first_token_merged=True, reopened=2, first_sent_ns=0)]
    end = footer(records, interrupted=True, notes=["worker 0 ended with signal SIGKILL"])
    start = header(1)
    start.server["proxied_to"] = "http://172.18.0.2:80"
    samples = healthy(pauses=3, paused_ns=1_200 * MS)
    folder = write(tmp_path / "run", [start, *records, *samples, b"{damaged", end])
    found = findings.findings(typed(summarise(read(folder))))
    assert [each.sentence for each in found if each.level == "warning"] == [
        "docker-proxy forwards every byte from http://127.0.0.1:8002, and its delay is in every latency. "
        'Measure http://172.18.0.2:80, or set "userland-proxy": false for the Docker engine.',
        "Interrupted: figures cover the part that was recorded.",
        "1 damaged line of the run file left out.",
        "1 of 1 first tokens coalesced with later ones: TTFT is an upper bound.",
        "2 connections closed by the server and reopened.",
        "1 request sent again, because the server closed idle connections just then. TTFT counts from the second send; "
        "latency from the due time includes both.",
        f"The closed loop paused {len(samples) * 3} times, for {len(samples) * 1.2:.1f} s of client time in total, "
        "because requests failed or were rejected at once (no connection, overload, status 5xx).",
        "worker 0 ended with signal SIGKILL.",
    ]


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ("2026-11-21T09:00:00Z", "2026-11-21 09:00:00 UTC"),
        ("2026-11-21T10:00:00.655+01:00", "2026-11-21 09:00:00 UTC"),
        ("yesterday", "yesterday"),
    ],
)
def test_the_start_is_shown_in_utc(tmp_path: Path, stored: str, shown: str) -> None:
    """Whatever the zone it was written in; what is not a time stays as it is."""
    assert start_time(summary_of(tmp_path, [], started_at=stored)) == shown


def poisson(folder: Path, *, rate: float = 200, named: float = 200, late_ms: float = 0.05) -> Summary:
    """A Poisson load of 4,000 requests that stay for a quarter of a second."""
    random = np.random.default_rng(1)
    due_ns = np.cumsum(random.exponential(1000 * MS / rate, 4000)).astype(np.int64).tolist()
    late_ns = round(late_ms * MS)
    records = [
        complete(
            number,
            [due + 100 * MS, due + 250 * MS],
            due_ns=due,
            sent_ns=due + late_ns,
            sent_end_ns=due + late_ns,
            end_ns=due + 250 * MS,
        )
        for number, due in enumerate(due_ns)
    ]
    return summary_of(folder, records, plan=header(4000).plan | {"arrivals": f"poisson:{named:g}"})


def test_a_load_that_went_out_as_named_is_said_to_have(tmp_path: Path) -> None:
    """Number, rate and variation beside those named, the check of the gaps, and lateness, in one sentence."""
    summary = poisson(tmp_path)
    assert findings.delivered_as_requested(summary)
    sentence = findings.delivery_sentence(summary)
    assert re.fullmatch(
        r"4,000 of 4,000 requests sent, \d{3}\.\d /s \(target 200\.0\), inter-arrival CV \d\.\d\d+ \(target 1\.00\), "
        r"distribution as requested \(Kolmogorov-Smirnov p = 0\.\d+\), p99 dispatch delay 50\.0 µs\.",
        sentence,
    )


def test_a_load_of_another_rate_is_found_out(tmp_path: Path) -> None:
    """Half the rate that was named: not delivered, and the sentence says that the gaps are not of the name."""
    summary = poisson(tmp_path, rate=100, named=200)
    assert not findings.delivered_as_requested(summary)
    assert "distribution not as requested" in findings.delivery_sentence(summary)


def test_a_load_sent_too_late_is_not_said_to_fit(tmp_path: Path) -> None:
    """Late by more than a tenth of the mean gap: any gaps would pass, so the sentence claims nothing."""
    summary = poisson(tmp_path, late_ms=0.6)
    assert summary.delivery.ks.sent is None
    assert "distribution" not in findings.delivery_sentence(summary)
    assert said(summary, "distribution").startswith("Arrival distribution not tested: dispatch delays of 600 µs are ")
    assert [each.level for each in findings.findings(summary) if each.id == "distribution"] == ["note"]


def test_a_rate_that_the_concurrency_limited_is_named(tmp_path: Path) -> None:
    """The run is valid, but its verdict must not hide that less than the target rate was sent."""
    summary = poisson(tmp_path)
    assert findings.capped_rate_sentence(summary) == ""
    summary.delivery.queue_wait = QueueWait(requests=3_000, p50=1.0, p99=2.0, max=2.0)
    summary.delivery.rate_per_s.sent = 195.0
    assert findings.capped_rate_sentence(summary) == ""
    summary.delivery.rate_per_s.sent = 58.0
    sentence = "--concurrency limited the rate to 58.0 of 200 requests per second."
    assert said(summary, "capped") == f"{sentence} Raise --concurrency to send at the target rate."
    assert findings.verdict(summary, []).sentence == f"Valid: every check passed. {sentence}"


def test_a_run_without_a_complete_request_is_nowhere_called_valid(tmp_path: Path) -> None:
    """The client was not the limit, but there is nothing valid to report."""
    summary = summary_of(tmp_path, [failed(0), failed(1)])
    assert said(summary, "client").startswith("Invalid: no request was complete; ")
    assert not any(finding.sentence.startswith("Valid") for finding in findings.findings(summary))


def test_a_burst_that_was_sent_says_how_late(tmp_path: Path) -> None:
    """All due at once have no rate to name: number and lateness are all there is to say."""
    summary = summary_of(tmp_path, burst(12, 4))
    assert findings.delivered_as_requested(summary)
    assert findings.delivery_sentence(summary) == "12 of 12 requests sent, p99 dispatch delay 98.0 µs."


def test_dropped_requests_are_not_delivered(tmp_path: Path) -> None:
    """What was never sent is missing from the count, and the load was not the one named."""
    summary = summary_of(tmp_path, [*burst(3, 4), dropped(7)])
    assert not findings.delivered_as_requested(summary)
    assert findings.delivery_sentence(summary).startswith("3 of 4 requests sent,")


def test_a_run_of_nothing_says_nothing_of_delivery(tmp_path: Path) -> None:
    """Nothing was asked, so nothing was or was not delivered."""
    assert findings.delivery_sentence(summary_of(tmp_path, [])) == ""


def test_the_window_is_named_with_its_reason(tmp_path: Path) -> None:
    """From where to where, why, and how many requests it holds; of a whole run there is nothing to say."""
    sentence = said(poisson(tmp_path / "poisson"), "window")
    assert re.fullmatch(
        r"Measured from 0\.\d+ s to \d\d\.\d s of the run \(about \d\d in flight\): 3,\d{3} requests due within\.",
        sentence,
    )
    assert said(summary_of(tmp_path / "burst", burst(3, 4)), "window") == ""


@pytest.mark.parametrize(
    ("records", "changes", "level", "sentence"),
    [
        (burst(30, 4), {}, "ok", "Valid: every check passed."),
        ([*burst(30, 4), failed(30)], {}, "warning", "Valid, with 1 error below."),
        ([failed(0), dropped(1)], {}, "error", "Invalid: no request was complete."),
        (
            burst(30, 4),
            {"telemetry": healthy(stall_ns_max=2_000 * MS)},
            "error",
            "Invalid: the client was the limit.",
        ),
    ],
)
def test_the_verdict_is_the_sum_of_the_findings(
    tmp_path: Path, records: list[Any], changes: dict[str, Any], level: str, sentence: str
) -> None:
    """Nothing against it, a warning, nothing complete, a client that stood still."""
    summary = summary_of(tmp_path, records, **changes)
    found = findings.verdict(summary, findings.findings(summary))
    assert (found.level, found.sentence) == (level, sentence)


def test_objectives_are_counted_at_the_level_of_the_worst(tmp_path: Path) -> None:
    """Two passed and one inconclusive are a warning; marginal ones are counted; a run without any says nothing."""

    def entry(verdict: Any, *, marginal: bool = False) -> ObjectiveVerdict:
        figures: dict[str, Any] = {"figure": "failed", "unit": "requests", "bound": 1.0, "measured": 0.0}
        figures |= {"interval": None, "confidence": 0.95, "marginal": marginal, "whole_interval": False}
        rest: dict[str, Any] = {"requests": 9, "left_out": 0, "requests_needed": None, "said": "0"}
        return ObjectiveVerdict(objective="failed < 1", verdict=verdict, **figures, **rest)

    summary = summary_of(tmp_path, burst(12, 4))
    assert findings.objectives_finding(summary) is None
    summary.objectives = [entry("pass"), entry("inconclusive"), entry("pass")]
    found = findings.objectives_finding(summary)
    assert found
    assert (found.level, found.sentence) == ("warning", "2 passed, 1 inconclusive.")
    summary.objectives = [entry("pass"), entry("pass", marginal=True), entry("fail", marginal=True)]
    found = findings.objectives_finding(summary)
    assert found
    assert (found.level, found.sentence) == ("error", "2 passed (1 marginal), 1 failed (1 marginal).")


def test_what_was_stopped_with_the_run_is_no_failure(tmp_path: Path) -> None:
    """Counted apart, in the sentence and above the table."""
    records = [
        *burst(12, 4),
        failed(20, "http_status", "busy"),
        *(failed(30 + i, "cancelled", "cut") for i in range(3)),
    ]
    summary = summary_of(tmp_path, records)
    assert said(summary, "complete") == "4 of 16 requests not complete (25%): 3 stopped with the run, 1 x HTTP 429."
    assert tables.failures(summary).title == "1 failed, 3 stopped with the run"


def test_rejected_requests_are_told_apart_from_failed_ones(tmp_path: Path) -> None:
    """They have a count of their own in the sentence, above the table and on the first card, and are a warning where
    nothing else is missing."""
    refused = [rejected(30 + place) for place in range(3)]
    mixed = summary_of(
        tmp_path / "mixed", [*burst(12, 4), failed(20, "http_status", "boom", http_status=500), *refused]
    )
    assert said(mixed, "complete") == "4 of 16 requests not complete (25%): 3 rejected (HTTP 429), 1 x HTTP 500."
    table = tables.failures(mixed)
    assert table.title == "1 failed, 3 rejected"
    assert [(row.key, row.cells[1].level) for row in table.rows] == [("rejected", "warning"), ("http_status", "error")]
    assert "; 3 rejected" in tables.cards(mixed)["requests"].note
    assert [each.level for each in findings.findings(mixed) if each.id == "complete"] == ["error"]
    alone = summary_of(tmp_path / "alone", [*burst(12, 4), *refused])
    assert said(alone, "complete") == "3 of 15 requests not complete (20%): 3 rejected (HTTP 429)."
    assert [each.level for each in findings.findings(alone) if each.id == "complete"] == ["warning"]


def test_reasons_that_differ_in_numbers_are_one(tmp_path: Path) -> None:
    """Grouped with numbers left out, the most frequent first."""
    cut = [failed(20 + each, "cut", f"closed after {each} of 64 tokens", state="truncated") for each in range(8)]
    other = [failed(40 + each, "cut", word, state="truncated") for each, word in enumerate(("a", "a", "b", "c", "d"))]
    summary = summary_of(tmp_path, [*burst(12, 4), *cut, *other])
    shown = [(each.count, each.detail, each.request) for each in summary.requests.examples["cut"]]
    assert shown[:2] == [(8, "closed after N of N tokens", 20), (2, "a", 40)]
    assert len(shown) == 3
    lines = tables.failures(summary).rows[0].cells[-1].lines
    assert lines[-1] == "and 2 others"


def test_an_error_beyond_a_twentieth_of_its_figure_is_a_warning(tmp_path: Path) -> None:
    """A worst-case error is named as one, beside what it is an error of; a wide one never has a green tick."""
    for bar_s, level in ((1e-6, "ok"), (1.0, "warning")):
        summary = summary_of(tmp_path / level, burst(40, 4))
        summary.client.error_bar_e2e_s, summary.client.error_bar_itl_s = 1e-7, bar_s
        (found,) = (each for each in findings.findings(summary) if each.id == "error")
        assert found.level == level
        assert ("uncertain by" in found.sentence) == (level == "warning")


def test_the_validity_in_tables_is_that_of_the_chip(tmp_path: Path) -> None:
    """A run with failed requests and without other concerns is valid in both: its requests are stated beside it."""
    records = [*burst(12, 4), failed(12)]
    summary = summary_of(tmp_path, records)
    assert "error" in {finding.level for finding in findings.findings(summary)}
    assert tables.validity_cell(summary).text == "valid"
    assert status.validity([summary]).text.startswith("valid")
