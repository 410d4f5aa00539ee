"""The error bars of TTFT, TPOT and ITL where tokens came together in one read."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis import frame as frames
from loadgen.analysis.frame import build_frame
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import stamp_facts
from loadgen.analysis.timestamp_errors import BUCKETS_PER_OCTAVE, StampError, error_bars
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, healthy, run_of, said, summarise, truncated

ALONE_S = stamp_facts("socket").error_s or 0.0
"""What a kernel stamp is off by that stands for one token alone."""
OWN = StampError(ALONE_S, 2 * ALONE_S, None)
ROUNDED_UP = 2 ** (1 / BUCKETS_PER_OCTAVE)


def stalled(truth_ns: Sequence[int], stall_ns: tuple[int, int], request_id: int = 0, sent_ns: int = 0) -> Record:
    """What a client writes down of tokens that arrive at these instants while it is away: it reads once when it is
    back, and the read has the stamp of its newest token."""
    begins, ends = stall_ns
    waiting = [instant for instant in truth_ns if begins <= instant < ends]
    instants = [waiting[-1] if begins <= instant < ends else instant for instant in truth_ns]
    values: dict[str, Any] = {
        "sent_ns": sent_ns,
        "first_byte_ns": instants[0],
        "coalesced_reads": int(len(waiting) > 1),
        "first_token_merged": len(instants) > 1 and instants[0] == instants[1],
        "late_ns_max": ends - waiting[-1] if waiting else 400_000,
        "reads": len(set(instants)) + 1,
    }
    return complete(request_id, instants, **values)


def every(gap_ms: int, number: int, first_ms: int = 500) -> list[int]:
    return [(first_ms + gap_ms * step) * MS for step in range(number)]


def test_a_stall_within_which_tokens_merged_is_in_the_error_bar(tmp_path: Path) -> None:
    """100 streams, a token every 20 ms, and a client away for 400 ms over the first tokens. No read is late by more
    than 20 ms; TTFT is off by up to 380 ms, which the bar holds, and TPOT by that per token. The verdict says so."""
    truths = [[instant + each * 150_000 for instant in every(20, 64)] for each in range(100)]
    records = [stalled(truth, (490 * MS, 890 * MS), each) for each, truth in enumerate(truths)]
    telemetry = healthy(stall_ns_max=380 * MS, late_counts={"20": 5_900, "56": 100})
    client = summarise(run_of(tmp_path / "run", records, telemetry=telemetry))["client"]
    off_ns = [record.chunk_ns[0] - truth[0] for record, truth in zip(records, truths, strict=True)]
    assert max(record.late_ns_max for record in records) <= 20 * MS
    assert 360 * MS <= max(off_ns) <= client["error_bar_ttft_s"] * 1e9 <= (380 + 50 + 1) * MS
    off_tpot_s = [off / 63 / 1e9 for off in off_ns]
    assert max(off_tpot_s) <= client["error_bar_tpot_s"] <= (380 + 50 + 1) / 63 * 1e-3
    gaps = zip((np.diff(record.chunk_ns) for record in records), map(np.diff, truths), strict=True)
    off_gaps = np.sort(np.concatenate([np.abs(seen - true) for seen, true in gaps]))
    assert off_gaps[int(0.99 * len(off_gaps))] <= client["error_bar_itl_s"] * 1e9
    assert client["verdict"] == "limited"
    assert any(reason.startswith("median TTFT uncertain by") for reason in client["reasons"])


def test_a_stall_within_an_answer_leaves_ttft_alone(tmp_path: Path) -> None:
    """Away for 400 ms of 1.3 s, after the first tokens: gaps may be off by 400 ms, from the stamp before to the newest
    of the read; TTFT, TPOT and E2E are as exact as ever, and the sentence names them one by one."""
    records = [stalled(every(20, 64), (700 * MS, 1_100 * MS), each) for each in range(20)]
    summary = summarise(run_of(tmp_path / "run", records, telemetry=healthy(stall_ns_max=380 * MS)))
    client = summary["client"]
    assert client["error_bar_ttft_s"] == client["error_bar_e2e_s"] == ALONE_S
    assert client["error_bar_tpot_s"] == pytest.approx(2 * ALONE_S / 63, abs=1e-9)
    assert 0.4 <= client["error_bar_itl_s"] - 2 * ALONE_S <= 0.4 * ROUNDED_UP
    assert 0.4 <= client["error_bar_s"] - ALONE_S <= 0.4 * ROUNDED_UP
    sentence = said(summary, "error")
    assert "coalesced reads: TTFT ±20 µs, TPOT ±635 ns, ITL ±414 ms; ITL uncertain by" in sentence
    assert sentence.endswith("of the median (limit 5%).")
    assert summary["throughput"]["error_share"] < 1e-4, "a whole run begins and ends with exact stamps"


def test_one_token_a_read_keeps_tens_of_microseconds(tmp_path: Path) -> None:
    """An ordinary run: 20 us for a stamp and TTFT, twice that for a gap, next to nothing for TPOT."""
    summary = summarise(run_of(tmp_path / "run", burst(200, 16)))
    bars = [summary["client"][f"error_bar{of}_s"] for of in ("", "_ttft", "_itl", "_tpot", "_e2e")]
    assert bars == pytest.approx([ALONE_S, ALONE_S, 2 * ALONE_S, 2 * ALONE_S / 15, ALONE_S], abs=1e-9)
    assert "error ±20 µs" in said(summary, "client")


@pytest.mark.parametrize(("changes", "since_ms"), [({"first_byte_ns": 120 * MS}, 120), ({}, 50)])
def test_what_came_before_a_merged_first_token_bounds_it(changes: dict[str, Any], since_ms: int) -> None:
    """It came after the first byte of the answer, where that was read before; else after the request was sent."""
    merged = complete(1, [500 * MS, 500 * MS, 600 * MS], sent_ns=50 * MS, **changes)
    bars = error_bars(build_frame([merged]), OWN)
    assert bars["error_bar_ttft_s"] == pytest.approx(ALONE_S + (500 - since_ms) / 1e3)
    assert bars["error_bar_tpot_s"] == pytest.approx((2 * ALONE_S + (500 - since_ms) / 1e3) / 2)


def test_nothing_is_off_by_more_than_the_client_was_away() -> None:
    """A first token read with others by a client that was away for 80 ms at most is off by 80 ms at most."""
    merged = complete(1, [500 * MS, 500 * MS, 600 * MS])
    bars = error_bars(build_frame([merged]), replace(OWN, away_s=0.08))
    assert bars["error_bar_ttft_s"] == pytest.approx(ALONE_S + 0.08)
    assert 0.08 <= (bars["error_bar_itl_s"] or 0) - 2 * ALONE_S <= 0.08 * ROUNDED_UP


def test_the_newest_token_of_a_read_is_exact() -> None:
    """The last of three in a read has its own stamp: two stamps of 200 are off, which 99% are not."""
    instants = [*every(20, 100), *[3_000 * MS] * 3, *every(20, 97, 3_100)]
    assert error_bars(build_frame([complete(1, instants)]), OWN)["error_bar_s"] == ALONE_S
    instants[103] = 3_000 * MS
    bars = error_bars(build_frame([complete(1, instants)]), OWN)
    assert (bars["error_bar_s"] or 0) > 0.5 < (bars["error_bar_itl_s"] or 0)


def test_a_hundredth_may_be_worse() -> None:
    """One merged first token of 100 is the hundredth that the bar does not hold for; two are not."""
    alone = [complete(each, [500 * MS, 600 * MS]) for each in range(98)]
    merged = [complete(98 + each, [500 * MS, 500 * MS]) for each in range(2)]
    one = build_frame([*alone, complete(200, [500 * MS, 600 * MS]), merged[0]])
    assert error_bars(one, OWN)["error_bar_ttft_s"] == ALONE_S
    assert error_bars(build_frame([*alone, *merged]), OWN)["error_bar_ttft_s"] == pytest.approx(ALONE_S + 0.5)


def test_a_few_merged_first_tokens_do_not_touch_the_median(tmp_path: Path) -> None:
    """Three of 100 first tokens that waited for others widen the bar of TTFT; the median, and the verdict, stay."""
    alone = [complete(each, [(500 + each) * MS, 900 * MS]) for each in range(97)]
    merged = [complete(97 + each, [600 * MS, 600 * MS], first_byte_ns=590 * MS) for each in range(3)]
    telemetry = healthy(late_counts={"56": 100}, stall_ns_max=60 * MS)
    client = summarise(run_of(tmp_path / "few", [*alone, *merged], telemetry=telemetry))["client"]
    assert client["error_bar_ttft_s"] == pytest.approx(ALONE_S + 0.01)
    assert client["error_ttft_p50_s"] == ALONE_S
    assert client["verdict"] == "ok"
    most = [complete(each, [600 * MS, 600 * MS], first_byte_ns=500 * MS) for each in range(100, 160)]
    client = summarise(run_of(tmp_path / "most", [*alone[:40], *most], telemetry=telemetry))["client"]
    assert client["error_ttft_p50_s"] == pytest.approx(ALONE_S + 0.1)
    assert client["verdict"] == "limited"


def test_only_complete_measured_answers_count() -> None:
    """What was cut off is in no latency, and so in no error bar; without any answer there is no TPOT's."""
    records = [truncated(1, [5 * MS] * 9), complete(2, [5 * MS] * 9, phase="warmup"), complete(3, [])]
    bars = error_bars(build_frame(records), OWN)
    assert [bars["error_bar_ttft_s"], bars["error_bar_tpot_s"]] == [ALONE_S, None]
    assert bars["error_bar_itl_s"] == 2 * ALONE_S


def test_a_server_that_sends_several_at_once_does_not_make_the_client_the_limit(tmp_path: Path) -> None:
    """Two tokens in each packet and a client that is prompt: the bar is wide, as nothing tells the two apart, and the
    verdict stays ok."""
    records = [complete(each, [100 * MS, 100 * MS, 200 * MS, 200 * MS], coalesced_reads=2) for each in range(20)]
    client = summarise(run_of(tmp_path / "run", records, telemetry=healthy(late_counts={"30": 100})))["client"]
    assert client["error_bar_ttft_s"] == pytest.approx(ALONE_S + 0.002 + 0.05)
    assert client["verdict"] == "ok"


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many answers, some of no token, some merged at the start or the end: the same bars in one block and in many."""
    random = np.random.default_rng(3)
    records = [
        complete(each, np.sort(random.integers(1, 40, random.integers(0, 30)) * 10 * MS).tolist())
        for each in range(300)
    ]
    frame = build_frame(records)
    whole = error_bars(frame, OWN)
    monkeypatch.setattr(frames, "ENTRIES_PER_BLOCK", 64)
    assert error_bars(frame, OWN) == whole


def test_the_room_it_takes_does_not_grow_with_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 chunks a request, half of them merged: beside a few columns per request only blocks are held."""
    monkeypatch.setattr(frames, "ENTRIES_PER_BLOCK", 1 << 14)
    frame = build_frame(complete(each, [instant * MS for instant in range(32) for _ in "ab"]) for each in range(4_000))
    tracemalloc.start()
    error_bars(frame, OWN)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < len(frame.chunk_ns) * 8 * 0.75
