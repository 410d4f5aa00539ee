"""The figures of a run that goes on are those of its report, and take a bounded amount of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.analysis.frame import OTHER_DETAIL, build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.record import Record
from loadgen.analysis.stats import describe
from loadgen.interactive import live_run
from loadgen.interactive.live_run import LiveFigures, NewestSamples, ServerReadings, summarise_samples


def _record(number: int, state: str = "complete", **changes: object) -> Record:
    """A request of three chunks with one, two and one tokens."""
    sent = 1_000_000 * number
    values = {
        "id": number,
        "state": state,
        "sent_ns": sent,
        "sent_end_ns": sent + 10,
        "chunk_ns": [sent + 5_000_000 + 7 * number, sent + 9_000_000, sent + 20_000_001],
        "chunk_tokens": [1, 2, 1],
        "end_ns": sent + 20_000_500,
        "output_tokens": 4,
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def test_they_are_the_figures_of_the_report() -> None:
    """Every percentile, mean and end of TTFT, TPOT, ITL and E2E, of complete requests only."""
    records = [_record(number) for number in range(50)]
    records += [_record(50, "failed", error_kind="timeout"), _record(51, output_tokens=None)]
    records += [_record(52, chunk_ns=[53_000_000], chunk_tokens=[4])]  # one chunk: no TPOT
    live = LiveFigures()
    for record in records:
        live.add(record)
    live.digest()
    frame = build_frame(records)
    for name, samples in live.samples.items():
        expected = describe(METRICS[name].values(frame))
        found = summarise_samples(samples.copy())
        assert found == pytest.approx({key: expected.of(key) for key in found}, abs=1e-9)


def test_the_newest_samples_are_kept_and_the_others_counted() -> None:
    """Past the limit the oldest give way, and how many did is known."""
    samples = NewestSamples(3)
    samples.extend(np.array([0.0, 1.0]))
    for value in range(2, 8):
        samples.extend(np.array([float(value)]))
    assert sorted(samples.copy()) == [5, 6, 7]
    assert samples.seen == 8


def test_no_samples_are_no_figures() -> None:
    """Before the first answer every figure is unknown rather than zero."""
    assert set(summarise_samples(np.empty(0)).values()) == {0, None}


def test_failures_are_counted_by_kind_and_words_without_numbers() -> None:
    """The same words with other numbers are one failure, shown by the first message. Words that never repeat do not
    grow without end. An HTTP status is the reason, as in reports."""
    live = LiveFigures()
    for number in range(20):
        live.add(_record(number, "failed", error_kind="truncated", error_detail=f"ended after {number % 9} tokens"))
    assert live.failures == {("truncated", "ended after # tokens"): 20}
    assert live.messages == {("truncated", "ended after # tokens"): "ended after 0 tokens"}
    live.add(_record(20, "failed", error_kind="http_status", http_status=503, error_detail="Busy (503)"))
    assert live.messages["HTTP 503", "Busy (###)"] == "Busy (503)"
    del live.failures["HTTP 503", "Busy (###)"]
    for number in range(live_run.MAX_FAILURE_TEXTS + 100):
        words = f"no {chr(0x4E00 + number)}"
        live.add(_record(number, "failed", error_kind="in_band_error", error_detail=words))
    assert len(live.failures) == live_run.MAX_FAILURE_TEXTS + 1
    assert live.failures["with an error inside the stream", OTHER_DETAIL] == 101


def test_a_point_is_of_the_requests_that_ended_since_the_last() -> None:
    """A second without an answer has no percentile, and the next one does not repeat the last."""
    live = LiveFigures()
    live.add(_record(0))
    live.add_point(1, streams=1)
    live.add_point(1, streams=0)
    assert [point["ttft_s_p50"] for point in live.points] == [0.005, None]
    assert [point["at"] for point in live.points] == [0, 1]


def test_requests_cut_off_with_their_users_are_no_failures() -> None:
    """They are counted apart; the run file has them among those that failed."""
    live = LiveFigures()
    live.add(_record(0))
    live.add(_record(1, "failed", error_kind="cancelled", error_detail="cut off, because its user was stopped"))
    assert (live.cut_off, live.states["failed"], dict(live.failures)) == (1, 1, {})


def test_latencies_of_the_last_seconds_of_a_level_and_of_the_run() -> None:
    """A level begins when the number of users has changed, and outlives its end; ten seconds are ten points."""
    live = LiveFigures()

    def second(users: int) -> None:
        live.add(_record(live.states["complete"]))
        live.add_point(users)

    def samples() -> list[int]:
        return [len(live.samples["ttft_s"].copy(live.since(span)["ttft_s"])) for span in live_run.SPANS]

    for _ in range(4):
        second(20)
    assert samples() == [4, 4, 4]
    for users in (60, 100, 100, 100):
        second(users)
    assert (samples(), live.level) == ([8, 2, 8], {"at": 5, "users": 100})
    for _ in range(9):
        second(100)
    second(0)
    assert (samples(), live.level["users"]) == ([10, 12, 18], 100)


def test_samples_since_are_the_newest_also_where_old_ones_gave_way() -> None:
    """In a ring that has been overwritten, and in one that has not."""
    samples = NewestSamples(4)
    for value in range(6):
        samples.extend(np.array([float(value)]))
    assert sorted(samples.copy(4)) == [4, 5]
    assert sorted(samples.copy(1)) == [2, 3, 4, 5]
    assert len(samples.copy(6)) == 0


def test_readings_of_the_server_are_followed(tmp_path: Path) -> None:
    """The newest complete line of the server counts. A line that is still being written is read later. Without a new
    reading, and without a file, the figures are None."""
    file = tmp_path / "part-telemetry.jsonl"
    readings = ServerReadings(file)
    nothing = {"server_running": None, "server_waiting": None, "kv_used": None}
    assert readings.new_figures() == nothing
    lines = [
        b'{"type":"telemetry","source":"server","at_ns":1,"values":{"running":1,"waiting":0,"kv_used":0.1}}\n',
        b'{"type":"telemetry","source":"server","at_ns":2,"values":{"running":7,"waiting":3,"kv_used":0.5}}\n',
        b'{"type":"telemetry","source":"host","at_ns":3,"values":{"used_bytes":1}}\n',
        b'{"type":"telemetry","source":"server","at_ns":4,"values":{"running":9}}\n',
    ]
    file.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    assert readings.new_figures() == {"server_running": 7, "server_waiting": 3, "kv_used": 0.5}
    assert readings.new_figures() == nothing
    file.write_bytes(b"".join(lines))
    assert readings.new_figures() == {"server_running": 9, "server_waiting": None, "kv_used": None}
