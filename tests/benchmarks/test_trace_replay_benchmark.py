"""The comparison of a replayed trace with the server's log keeps working."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trace_replay import main, read_azure, read_mooncake
from tests.support.command import ROOT

TRACES = ROOT / "tests/data/traces"


@pytest.mark.parametrize("trace", ["mooncake.jsonl", "azure-2023.csv"])
def test_every_request_of_a_trace_arrives(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's log has every request with the lengths of the trace."""
    assert main([str(TRACES / trace), "--n", "2", "--speed", "20"]) == 0
    shown = capsys.readouterr().out
    assert "not received by the server          0" in shown
    assert "with other lengths than the trace   0" in shown


def test_another_length_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A request whose prompt is one token longer than the trace says gives exit code 1."""

    def altered(trace: Path, limit: int) -> list[object]:
        first, *others = read_mooncake(trace, limit)
        return [first._replace(input_tokens=first.input_tokens - 1), *others]

    monkeypatch.setattr("benchmarks.trace_replay.read_mooncake", altered)
    assert main([str(TRACES / "mooncake.jsonl"), "--n", "2", "--speed", "20"]) == 1
    assert "with other lengths than the trace   1" in capsys.readouterr().out


def test_dates_with_seven_decimals_are_read() -> None:
    """Azure's traces of 2023 have seven decimals, of which six are kept."""
    first, second = read_azure(TRACES / "azure-2023.csv", 2)
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 410, 12)
    assert second.at_s == pytest.approx(0.25)
