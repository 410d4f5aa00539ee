"""A published trace, of which a twin has seen the first third."""

from __future__ import annotations

from benchmarks import twin


def test_the_first_third_predicts_the_other_two() -> None:
    """Median TTFT and TPOT within 15%, and the number running within 10% of its mean."""
    constants, compared, off = twin.trace()
    assert [each.case for each in compared] == ["TTFT", "TPOT"]
    assert max(abs(each.error) for each in compared) < 0.15
    assert off < 0.10
    assert 0.5 < constants["bandwidth"] < 2
    assert 0.5 < constants["compute"] < 2
