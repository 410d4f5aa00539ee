"""What a Run says without formulas: endings, lengths, and that it is not whole."""

from __future__ import annotations

import json
from pathlib import Path

from loadgen.analysis.run.runfile import Run, read
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
    summarise,
    text_of,
    truncated,
    write,
)


def test_every_request_is_accounted_for(tmp_path: Path) -> None:
    """Sent is complete, truncated, failed and rejected together, dropped ones were not sent, and kinds are counted."""
    records = [complete(1, [MS]), truncated(2, [MS]), failed(3), failed(4, "timeout", "no end"), dropped(5)]
    records += [rejected(6), rejected(7)]
    requests = summarise(run_of(tmp_path / "run", records))["requests"]
    states = ("sent", "complete", "truncated", "failed", "rejected", "dropped", "unrecorded")
    assert [requests[name] for name in states] == [6, 1, 1, 2, 2, 1, 0]
    assert requests["errors"] == {"truncated": 1, "http_status": 1, "timeout": 1, "dropped": 1, "rejected": 2}


def test_a_rejection_of_an_older_run_stays_a_failure(tmp_path: Path) -> None:
    """A state is a recorded fact: what a version without this state has recorded as failed is not counted anew."""
    old = [complete(1, [MS]), failed(2, "http_status", "Model is overloaded (overloaded)", http_status=429)]
    requests = summarise(run_of(tmp_path / "run", old))["requests"]
    assert (requests["failed"], requests["rejected"]) == (1, 0)


def test_a_rejected_request_has_no_latency(tmp_path: Path) -> None:
    """However quickly it was refused: no distribution holds it, and the adjusted ones count it as infinitely slow."""
    records = [*burst(20, 4), *(rejected(100 + place, end_ns=MS) for place in range(20))]
    summary = summarise(run_of(tmp_path / "run", records))
    assert {described["n"] for name, described in summary["latency"].items() if name in ("ttft_s", "e2e_s")} == {20}
    assert summary["latency_adjusted"]["e2e_s"]["failures"] == 20


def test_the_commonest_words_of_each_error_are_kept(tmp_path: Path) -> None:
    """Each error kind has its three most frequent details, with their counts, HTTP status and one request each."""
    details = ["busy", "busy", "full", "full", "full", "gone", "odd"]
    records = [failed(number, detail=detail) for number, detail in enumerate(details)]
    examples = summarise(run_of(tmp_path / "run", records))["requests"]["examples"]["http_status"]
    assert [(each["count"], each["detail"], each["request"]) for each in examples] == [
        (3, "full", 2),
        (2, "busy", 0),
        (1, "gone", 5),
    ]
    assert examples[0]["http_status"] == 429


def test_lengths_are_compared_where_both_are_known(tmp_path: Path) -> None:
    """A prompt or answer of another length counts as one mismatch; a length nobody reported is counted apart."""
    records = [
        complete(1, [MS, 2 * MS]),
        complete(2, [MS, 2 * MS], prompt_tokens=513),
        complete(3, [MS, 2 * MS], prompt_tokens=None, counted_by="wire"),
        complete(4, [MS, 2 * MS], output_tokens_asked=64),
        truncated(5, [MS]),
    ]
    tokens = summarise(run_of(tmp_path / "run", records))["tokens"]
    assert (tokens["prompt_asked"], tokens["prompt_reported"]) == (5 * 512, 4 * 512 + 1)
    assert (tokens["prompt_mismatches"], tokens["prompt_unreported"]) == (1, 1)
    assert (tokens["output_asked"], tokens["output_reported"]) == (2 + 2 + 2 + 64 + 64, 8)
    assert tokens["output_mismatches"] == 1
    assert tokens["counted_by"] == {"server": 3, "wire": 1}


def test_a_killed_run_is_summarised_as_far_as_it_came(tmp_path: Path) -> None:
    """Without a footer the run is interrupted, its duration is the last instant known, and what is missing counted."""
    folder = write(tmp_path / "run", [header(100), *burst(30, 4), *healthy(2), b'{"type":"request","id":7'])
    summary = summarise(read(folder))
    assert summary["run"]["interrupted"]
    assert summary["run"]["damaged_lines"] == 1
    assert summary["run"]["duration_s"] == 2
    assert (summary["requests"]["complete"], summary["requests"]["unrecorded"]) == (30, 70)
    assert summary["latency"]["ttft_s"]["n"] == 30


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    """A footer that says interrupted is believed, and its notes are kept."""
    records = burst(4, 2)
    notes = ["worker 0 ended with signal SIGKILL"]
    folder = write(tmp_path / "run", [header(4), *records, footer(records, interrupted=True, notes=notes)])
    run = summarise(read(folder))["run"]
    assert (run["interrupted"], run["notes"]) == (True, notes)


def test_the_summary_says_which_run_it_is(tmp_path: Path) -> None:
    """Folder, label, start, seed and command are there, and a simulated server is called simulated with its speed."""
    summary = summarise(run_of(tmp_path / "20261121-tgi", burst(4, 2), simulated=True))
    assert summary["run"]["id"] == "20261121-tgi"
    assert (summary["run"]["label"], summary["run"]["seed"], summary["run"]["arrivals"]) == ("burst", 7, "burst")
    assert summary["run"]["command"] == "loadgen burst --server tgi --n 4 --seed 7"
    assert (summary["server"]["simulated"], summary["server"]["speed"]) == (True, 5.0)
    assert summary["memory"] == {}


def test_warm_up_requests_are_in_no_figure(tmp_path: Path) -> None:
    """They are counted, and everything else is as if they were not there."""
    measured = burst(20, 4)
    alone = summarise(run_of(tmp_path / "alone" / "run", measured))
    warmup = [
        complete(900, [-800 * MS, -700 * MS], sent_ns=-900 * MS, phase="warmup", prompt_tokens=1, late_ns_max=10**9),
        failed(901, phase="warmup", sent_ns=-900 * MS),
    ]
    plan = header(20).plan
    both = summarise(run_of(tmp_path / "both" / "run", [*warmup, *measured], plan=plan, command=header(20).command))
    assert both["requests"].pop("warmup") == 2
    assert alone["requests"].pop("warmup") == 0
    assert both["requests"].pop("warmup_incomplete") == 1
    assert alone["requests"].pop("warmup_incomplete") == 0
    assert both == alone


def test_throughput_has_an_error_bar(tmp_path: Path) -> None:
    """Both ends of a window of 2 s may be off by 20 us each, so throughput may be off by 20 millionths."""
    throughput = summarise(run_of(tmp_path / "run", [complete(0, [MS], end_ns=2000 * MS)]))["throughput"]
    assert throughput["error_share"] == 20e-6


def test_every_run_gives_strict_json(tmp_path: Path) -> None:
    """No NaN and no infinity: what is undefined is null, from an empty run to one in which all failed."""
    kinds = {"none": [], "one": [complete(0, [MS])], "failed": [failed(i) for i in range(5)], "many": burst(20, 4)}
    for name, records in kinds.items():
        summary = summarise(run_of(tmp_path / name, records))
        assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_a_run_without_telling_header_is_still_summarised(tmp_path: Path) -> None:
    """Facts that an older or foreign header lacks are null, and nothing raises."""
    run: Run = run_of(tmp_path / "run", [complete(0, [MS])], plan={}, server="", client={}, command=[])
    summary = summarise(run)
    assert summary["server"]["name"] is None
    assert summary["requests"]["unrecorded"] == 0


def test_without_a_complete_request_there_is_no_throughput(tmp_path: Path) -> None:
    """Not even of tokens that came: the terminal begins with what is missing."""
    summary = summarise(run_of(tmp_path / "run", [truncated(1, [MS, 2 * MS]), failed(2)]))
    assert summary["throughput"]["output_tokens_per_s"] is summary["throughput"]["requests_per_s"] is None
    text = text_of(summary)
    assert "throughput" not in text
    assert "Requests complete" in text


def test_a_length_that_is_not_believed_is_in_no_rate(tmp_path: Path) -> None:
    """Of an answer that the server says is longer than asked, what arrived counts."""
    told = {"state": "failed", "error_kind": "wrong_length", "output_tokens": 9_999_999}
    records = [complete(1, [MS, 1000 * MS]), complete(2, [MS, 1000 * MS], **told)]
    summary = summarise(run_of(tmp_path / "run", records))
    assert 3.9 < summary["throughput"]["output_tokens_per_s"] < 4.1
