"""The formulas, on requests small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.analysis.frame import build_frame
from loadgen.analysis.metrics import METRICS
from loadgen.analysis.run.record import Record
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, dropped, failed, truncated

MERGED = complete(1, [200 * MS, 250 * MS, 300 * MS], tokens=[2, 1, 3], sent_ns=100 * MS, due_ns=60 * MS)
"""Sent 40 ms late; 6 tokens in 3 chunks; end marker 0.1 ms after the last."""


def values(name: str, *records: Record) -> list[float]:
    """What a metric makes of these requests."""
    metric, frame = METRICS[name], build_frame(records)
    if metric.per == "run":
        return [] if (found := metric.formula(frame)) is None else [found]
    return metric.values(frame).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ttft_s", [0.1]),
        ("ttft_due_s", [0.14]),
        ("tpot_s", [0.1 / 4]),
        ("icl_s", [0.05, 0.05]),
        ("itl_s", [0.05, 0.05, 0.0, 0.0, 0.0]),
        ("e2e_s", [0.2]),
        ("e2e_due_s", [0.24]),
        ("e2e_stream_s", [0.2001]),
        ("normalised_s", [0.2 / 6]),
    ],
)
def test_each_latency_is_what_its_definition_says(name: str, expected: list[float]) -> None:
    """A request with merged tokens gives the figures of design section 6, worked out by hand."""
    assert values(name, MERGED) == pytest.approx(expected)


def test_an_answer_without_tokens_has_an_end_and_nothing_between() -> None:
    """E2E is to the answer's end; no TTFT, TPOT, ITL or normalised latency; its prompt counts once it has ended."""
    asked = Record(id=1, state="complete", sent_ns=100 * MS, end_ns=350 * MS, prompt_tokens=512, output_tokens=0)
    assert values("e2e_s", asked) == pytest.approx([0.25])
    assert not any(values(name, asked) for name in ("ttft_s", "tpot_s", "icl_s", "itl_s", "normalised_s"))
    assert values("input_tokens_per_s", asked) == values("total_tokens_per_s", asked) == pytest.approx([2048])
    assert values("output_tokens_per_s", asked) == [0]


@pytest.mark.parametrize("tokens", [[1], [4]])
def test_tpot_is_undefined_without_a_later_token(tokens: list[int]) -> None:
    """All tokens in the first chunk, n <= c_1, give no TPOT: neither zero nor infinity."""
    assert values("tpot_s", complete(1, [10 * MS], tokens=tokens)) == []


def test_a_total_is_spread_over_chunks_of_unknown_length() -> None:
    """Nine tokens in five chunks of which nobody knows more: 7.2 of them came after the first chunk."""
    record = complete(1, [0, 20 * MS, 40 * MS, 60 * MS, 72 * MS], output_tokens=9)
    assert values("tpot_s", record) == pytest.approx([0.01])


def test_the_first_chunk_gives_zeros_but_no_gap() -> None:
    """A request of one chunk of 3 tokens has two inter-token times of zero and no inter-chunk time."""
    record = complete(1, [10 * MS], tokens=[3])
    assert values("itl_s", record) == [0.0, 0.0]
    assert values("icl_s", record) == []


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.per != "run"])
def test_only_complete_requests_have_latencies(name: str) -> None:
    """Failed, truncated and dropped requests add no sample to any distribution, whatever they received."""
    others = [failed(2), truncated(3, [1 * MS, 2 * MS, 3 * MS]), dropped(4)]
    assert values(name, others[0], MERGED, *others[1:]) == values(name, MERGED)
    assert values(name, *others) == []


def test_gaps_never_cross_from_one_request_to_the_next() -> None:
    """Inter-chunk times of several requests, a failed one between them, are each within one request, in order."""
    records = [
        complete(1, [10 * MS, 11 * MS]),
        truncated(2, [1 * MS, 90 * MS]),
        complete(3, [20 * MS, 23 * MS, 28 * MS], tokens=[1, 2, 1]),
        complete(4, [7 * MS]),
    ]
    assert values("icl_s", *records) == pytest.approx([0.001, 0.003, 0.005])
    assert values("itl_s", *records) == pytest.approx([0.001, 0.003, 0.005, 0.0])
    frame = build_frame(records)
    assert np.asarray(METRICS["icl_s"].groups(frame)).tolist() == [0, 1, 3, 3]
    assert np.asarray(METRICS["itl_s"].groups(frame)).tolist() == [0, 1, 4, 4]
    assert METRICS["ttft_s"].groups(frame) is None


def test_throughput_is_over_the_whole_burst() -> None:
    """The window runs from the first byte sent to the last end, the failed request's included; its tokens count too."""
    records = [
        complete(1, [100 * MS, 200 * MS], sent_ns=100 * MS, end_ns=300 * MS),
        truncated(2, [100 * MS, 200 * MS, 300 * MS]),
        failed(3, sent_ns=150 * MS, end_ns=1100 * MS),
    ]
    records[1].sent_ns = 150 * MS
    assert values("requests_per_s", *records) == pytest.approx([1.0])
    assert values("output_tokens_per_s", *records) == pytest.approx([5.0])
    assert values("total_tokens_per_s", *records) == pytest.approx([5.0 + 2 * 512])


def test_prompts_count_by_the_server_where_it_said_so() -> None:
    """Total throughput takes the reported prompt length, and the one asked for where none was reported."""
    records = [complete(1, [10 * MS], prompt_tokens=500, end_ns=1000 * MS), complete(2, [10 * MS], prompt_tokens=None)]
    assert values("total_tokens_per_s", *records) == pytest.approx([2 + 500 + 512])


def test_a_prompt_of_unknown_length_adds_nothing() -> None:
    """A turn of a session that broke off before the server counted its prompt leaves total throughput a number."""
    records = [
        complete(1, [10 * MS], prompt_tokens=500, end_ns=1000 * MS),
        complete(2, [10 * MS], prompt_tokens=None, prompt_tokens_asked=None),
    ]
    assert values("total_tokens_per_s", *records) == pytest.approx([2 + 500])


def test_the_tail_begins_when_under_a_tenth_is_in_flight() -> None:
    """Twenty requests: when the nineteenth ends at 190 ms of 1 s, a twentieth is left, and the tail begins."""
    records = [complete(i, [10 * MS], end_ns=i * 10 * MS) for i in range(1, 20)] + [
        complete(20, [10 * MS], end_ns=1000 * MS)
    ]
    assert values("tail_share", *records) == pytest.approx([(1000 - 190) / 1000])


def test_skew_runs_to_the_last_byte_sent() -> None:
    """First send to last byte accepted, over all requests, failed ones included."""
    records = [
        complete(1, [10 * MS], sent_ns=2 * MS, sent_end_ns=3 * MS),
        failed(2, sent_ns=1 * MS, sent_end_ns=9 * MS),
    ]
    assert values("skew_s", *records) == pytest.approx([0.008])


@pytest.mark.parametrize("name", list(METRICS))
def test_nothing_gives_nothing(name: str) -> None:
    """Without requests, and with none ever sent, every metric is undefined, without a warning."""
    assert values(name) == []
    assert values(name, dropped(1), failed(2, "connect", sent_ns=None, sent_end_ns=None, end_ns=None)) == []
