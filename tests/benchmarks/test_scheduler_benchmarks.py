"""Published measurements of servers under load, against virtual time."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import schedulers


def test_the_engines_of_2023_are_as_fast_as_they_were() -> None:
    """Throughput of 12 bursts within 10% on average and none off by 15%, and the servers in the order measured."""
    found = schedulers.bursts()
    assert len(found) == 12
    assert schedulers.mean_error(found) < 0.05
    assert max(abs(each.error) for each in found) < 0.10
    kept, pairs = schedulers.order_kept(found)
    assert pairs == 12
    assert kept >= 11


def test_their_latencies_under_poisson_arrivals() -> None:
    """Of TGI and vLLM at each rate, of LightLLM where it is not nearly full: within a quarter."""
    calm = [each for each in schedulers.poisson() if not (each.group == "lightllm" and each.case.startswith("8/s"))]
    assert max(abs(each.error) for each in calm) < 0.25
    assert schedulers.median_error(calm) < 0.12


def test_closed_loops() -> None:
    """TPOT, TTFT and tokens per second of the engines of 2024 and 2025: median error at most 15%."""
    by = schedulers.closed_loops()
    assert len(by["TPOT"]) > 200
    assert schedulers.median_error(by["TPOT"]) < 0.08
    assert schedulers.median_error(by["tokens/s"]) < 0.08
    assert schedulers.median_error(by["TTFT"]) < 0.12
    for group in {each.group for each in by["TPOT"]}:
        assert schedulers.median_error([each for each in by["TPOT"] if each.group == group]) < 0.15


def test_a_trace_of_vllm_unfitted() -> None:
    """300 requests of their own lengths: TPOT, and how many run in each second, within a fifth."""
    found, off = schedulers.trace()
    tpot = [each for each in found if each.group == "TPOT"]
    ratio = statistics.median(each.simulated for each in tpot) / statistics.median(each.measured for each in tpot)
    assert 0.8 < ratio < 1.2
    assert off < 0.2


def test_every_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """With what was measured beside what was simulated."""
    schedulers.main([])
    out = capsys.readouterr().out
    assert "of 12 pairs of servers in the order measured" in out
    assert "| all | 236 |" in out
    assert "Median TPOT: 33.4 ms measured" in out
