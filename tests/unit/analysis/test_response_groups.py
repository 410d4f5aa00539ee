"""Separate groups of TTFT, as behind a URL with unequal replicas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.report.findings import response_groups_finding
from loadgen.analysis.run.record import Record
from loadgen.analysis.summary import Summary
from tests.support.runs import complete, run_of

MS = 1_000_000
SEED = 7


def requests(ttft_ms: Sequence[float], *, every_ms: float = 50) -> list[Record]:
    """Return Records with these TTFTs. The requests are sent at regular intervals."""
    result = []
    for number, ttft in enumerate(ttft_ms):
        sent_ns = int(number * every_ms * MS)
        chunks = [sent_ns + int(ttft * MS) + index * 10 * MS for index in range(8)]
        result.append(complete(number, chunks, sent_ns=sent_ns))
    return result


def summary_of(tmp_path: Path, records: list[Record]) -> Summary:
    return summarise(run_of(tmp_path / "run", records))


def jitter(count: int) -> np.ndarray:
    return np.random.default_rng(SEED).lognormal(0, 0.1, count)


@pytest.mark.parametrize("choice", ["in turn", "random", "one in five"])
def test_unequal_replicas_form_groups(tmp_path: Path, choice: str) -> None:
    """Replicas of 100 ms and 1 s are found however the balancer deals the requests, and the warning names both."""
    numbers = np.arange(200)
    slow = {
        "in turn": numbers % 2 == 1,
        "random": np.random.default_rng(SEED).random(200) < 0.5,
        "one in five": numbers % 5 == 0,
    }[choice]
    summary = summary_of(tmp_path, requests(np.where(slow, 1000, 100) * jitter(200)))
    groups = summary.response_groups
    assert groups is not None
    assert (groups.fast_requests, groups.slow_requests) == (int((~slow).sum()), int(slow.sum()))
    assert groups.fast_ttft_s == pytest.approx(0.1, rel=0.1)
    assert groups.slow_ttft_s == pytest.approx(1, rel=0.1)
    finding = response_groups_finding(summary)
    assert finding is not None
    assert finding.level == "warning"
    assert f"{groups.fast_requests:,} requests of about" in finding.sentence


def test_equal_replicas_form_no_groups(tmp_path: Path) -> None:
    """One server, or replicas that are alike, have one group, also if TTFT varies widely."""
    ttft_ms = np.random.default_rng(SEED).lognormal(5, 1, 400)
    summary = summary_of(tmp_path, requests(ttft_ms))
    assert summary.response_groups is None
    assert response_groups_finding(summary) is None


def test_a_batch_that_waits_is_not_a_replica(tmp_path: Path) -> None:
    """In a burst, a second batch waits for the first. The requests of the batches were sent one after the other."""
    ttft_ms = np.concatenate((np.full(100, 100), np.full(100, 1000))) * jitter(200)
    assert summary_of(tmp_path, requests(ttft_ms, every_ms=0.01)).response_groups is None


def test_a_pause_of_the_server_is_not_a_replica(tmp_path: Path) -> None:
    """A server that is slow for a part of the run has slow requests that follow each other."""
    ttft_ms = np.full(300, 100.0)
    ttft_ms[120:200] = 1000
    assert summary_of(tmp_path, requests(ttft_ms * jitter(300))).response_groups is None


def test_requests_that_differ_explain_groups(tmp_path: Path) -> None:
    """Long prompts take longer than short ones, so a run with several lengths is not examined."""
    slow = np.arange(200) % 2 == 1
    records = requests(np.where(slow, 1000, 100) * jitter(200))
    records = [
        replace(record, prompt_tokens_asked=4096 if is_slow else 64)
        for record, is_slow in zip(records, slow, strict=True)
    ]
    assert summary_of(tmp_path, records).response_groups is None


def test_recordings_of_different_lengths_explain_groups(tmp_path: Path) -> None:
    """Long recordings take longer than short ones, although their number of tokens is unknown."""
    slow = np.arange(200) % 2 == 1
    records = requests(np.where(slow, 1000, 100) * jitter(200))
    records = [
        replace(record, marks={"audio_us": 30_000_000 if is_slow else 5_000_000})
        for record, is_slow in zip(records, slow, strict=True)
    ]
    assert summary_of(tmp_path, records).response_groups is None


def test_a_few_outliers_are_no_group(tmp_path: Path) -> None:
    """One request in twenty that is slow is a tail, and the percentiles describe it."""
    slow = np.arange(200) % 20 == 7
    assert summary_of(tmp_path, requests(np.where(slow, 1000, 100) * jitter(200))).response_groups is None


@pytest.mark.parametrize("seed", range(200))
def test_clean_runs_raise_no_warning(seed: int) -> None:
    """Of 200 runs with one server, whose TTFT varies in many ways, none is called two groups."""
    from loadgen.analysis import response_groups

    random = np.random.default_rng(seed)
    shape = random.uniform(0.05, 1.5)
    kind = seed % 4
    base = random.lognormal(4, shape, 300) if kind % 2 else 100 + random.gamma(1 / shape, 100 * shape, 300)
    waiting = np.maximum(0, np.cumsum(random.normal(0, 20, 300))) if kind >= 2 else 0  # a queue that grows and shrinks
    values = base + waiting
    split = response_groups._widest_gap(np.sort(values))
    found = split is not None and response_groups._changes_z(values > split) >= response_groups.MIXED_Z
    assert not found
