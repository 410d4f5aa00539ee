"""Gaps between tokens over the life of an answer, on runs small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

import analysis.frame
from analysis.gather import frame_of
from analysis.report.lifetime import BUCKET, lifetime
from loadgen.record import Record
from tests.runs import MILLISECOND_NS as MS
from tests.runs import burst, complete, dropped, failed, truncated


def test_a_gap_belongs_to_the_token_that_ends_it() -> None:
    """A chunk of several tokens counts once, before its first; the longest gaps have their place."""
    drawn = lifetime(
        frame_of(
            [
                complete(5, [10 * MS, 20 * MS, 320 * MS], tokens=[1, 2, 1]),
                complete(6, [10 * MS, 11 * MS]),
                truncated(7, [10 * MS, 9000 * MS]),
            ]
        )
    )
    assert (drawn["token"], drawn["n"], drawn["max"]) == ([2, 4], [2, 1], [0.01, 0.3])
    assert drawn["longest"] == [
        {"request": 5, "token": 4, "from_s": 0.02, "gap_s": 0.3},
        {"request": 5, "token": 2, "from_s": 0.01, "gap_s": 0.01},
        {"request": 6, "token": 2, "from_s": 0.01, "gap_s": 0.001},
    ]


def test_percentiles_are_within_one_bucket_and_absent_where_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 700 answers each percentile per token is that of the samples to 1 %; of 40 there is a median alone. It makes
    no difference in how many blocks the chunks are walked through."""
    records = burst(700, 5)
    gaps = np.diff([record.chunk_ns for record in records], axis=1) / 1e9
    drawn = lifetime(frame_of(records))
    monkeypatch.setattr(analysis.frame, "ENTRIES_PER_BLOCK", 64)
    assert lifetime(frame_of(records)) == drawn
    assert drawn["token"] == [2, 3, 4, 5]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        exact = np.quantile(gaps, share, axis=0, method="inverted_cdf")
        assert np.array(drawn[name]) == pytest.approx(exact, rel=BUCKET - 1)
    assert drawn["max"] == pytest.approx(gaps.max(axis=0), abs=1e-7)
    few = lifetime(frame_of(burst(40, 5)))
    assert None not in few["p50"]
    assert few["p90"] == few["p99"] == [None] * 4


def test_long_answers_are_drawn_in_groups_of_tokens() -> None:
    """1,000 tokens make groups of 10; the first token of a group names it, token 0 does not exist."""
    drawn = lifetime(frame_of(burst(12, 1000)))
    assert drawn["width"] == 10
    assert drawn["token"][:3] == [1, 10, 20]
    assert sum(drawn["n"]) == 12 * 999


@pytest.mark.parametrize("records", [[], [dropped(1)], [failed(1)], [complete(1, [])], [complete(1, [5 * MS])]])
def test_without_a_gap_there_is_nothing(records: list[Record]) -> None:
    """No request, none complete, no chunk, one chunk: empty, and nothing raises."""
    drawn = lifetime(frame_of(records))
    assert drawn["token"] == drawn["p50"] == drawn["longest"] == []
