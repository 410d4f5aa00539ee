"""A published trace, of which a twin has seen the first third."""

from __future__ import annotations

import pytest

from benchmarks import hardware_model, twin, twin_transfer


def test_the_first_third_predicts_the_other_two() -> None:
    """Median TTFT and TPOT within 15%, and the number running within 10% of its mean."""
    constants, compared, off = twin.trace()
    assert [each.case for each in compared] == ["TTFT", "TPOT"]
    assert max(abs(each.error) for each in compared) < 0.15
    assert off < 0.10
    assert 0.5 < constants["bandwidth"] < 2
    assert 0.5 < constants["compute"] < 2


def test_a_twin_predicts_another_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin of SGLang at one TP predicts another TP, and the table has the errors without a twin next to it."""
    rows = [row for row in hardware_model.read_rows("closed_loops") if row["framework"] == "SGLang"]
    rows = [row for row in rows if row["tp"] in ("2", "4") and int(row["in_flight"]) <= 64]
    monkeypatch.setattr(hardware_model, "read_rows", lambda _: rows)
    twin_transfer.main([])
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ["changed", "rows", "TTFT:", "twin", "no", "twin", "TPOT:", "twin", "no", "twin"]
    assert [line.split()[:3] for line in lines] == [["SGLang", "TP", "8"], ["SGLang", "all", "8"], ["all", "all", "8"]]
    points = twin_transfer.points(twin_transfer.transfers(rows), "TPOT", with_twin=True)
    assert max(point.error for point in points) < 0.2
