"""Figures per replica, and the comparison of replicas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.analysis.build_summary import summarise
from loadgen.analysis.replicas import compare_replicas
from loadgen.analysis.report.findings import replicas_finding
from loadgen.analysis.run.record import Record
from loadgen.analysis.steady_window import frame_of_run
from loadgen.analysis.summary import Summary
from tests.support.runs import complete, run_of

MS = 1_000_000


def answered(number: int, replica: str, ttft_ms: float) -> Record:
    """Return the Record of a complete request with this TTFT that `replica` answered."""
    sent_ns = number * 50 * MS
    chunks = [sent_ns + int(ttft_ms * MS) + index * 10 * MS for index in range(4)]
    return replace(complete(number, chunks, sent_ns=sent_ns), replica=replica)


def summary_of(tmp_path: Path, ttft_ms: dict[str, np.ndarray]) -> Summary:
    """Return the summary of a run that a balancer dealt to these replicas in turn."""
    names = list(ttft_ms)
    rounds = zip(*ttft_ms.values(), strict=True)
    pairs = [(name, ttft) for values in rounds for name, ttft in zip(names, values, strict=True)]
    records = [answered(number, name, ttft) for number, (name, ttft) in enumerate(pairs)]
    return summarise(run_of(tmp_path / "run", records))


def ttfts(mean_ms: float, count: int = 40, seed: int = 1) -> np.ndarray:
    return mean_ms * np.random.default_rng(seed).lognormal(0, 0.2, count)


def test_figures_of_replicas_add_up(tmp_path: Path) -> None:
    """Each replica has its requests and tokens, and together they are those of the run."""
    summary = summary_of(tmp_path, {"a": ttfts(100), "b": ttfts(100, seed=2)})
    assert [part.name for part in summary.replicas] == ["a", "b"]
    assert sum(part.requests.complete for part in summary.replicas) == summary.requests.complete == 80
    assert sum(part.output_tokens for part in summary.replicas) == summary.tokens.output_reported


def test_a_slow_replica_is_named(tmp_path: Path) -> None:
    """The warning names the fastest and the slowest of three replicas, with their medians."""
    summary = summary_of(tmp_path, {"a": ttfts(100), "b": ttfts(300, seed=2), "c": ttfts(110, seed=3)})
    difference = summary.replica_difference
    assert difference is not None
    assert (difference.fastest, difference.slowest) == ("a", "b")
    assert difference.p_value < 1e-6
    finding = replicas_finding(summary)
    assert finding is not None
    assert finding.level == "warning"
    assert "on a and" in finding.sentence


@pytest.mark.parametrize("seed", range(50))
def test_equal_replicas_raise_no_warning(tmp_path: Path, seed: int) -> None:
    """Replicas of equal speed differ only by chance."""
    ttft_ms = {name: ttfts(100, seed=10 * seed + index) for index, name in enumerate("abcd")}
    assert summary_of(tmp_path, ttft_ms).replica_difference is None


def test_a_replica_with_few_requests_is_not_compared(tmp_path: Path) -> None:
    """Ten requests of a replica are too few for a comparison."""
    records = [answered(number, "b" if number < 10 else "a", 900 if number < 10 else 100) for number in range(60)]
    run = run_of(tmp_path / "run", records)
    assert compare_replicas(frame_of_run(run)) is None


def test_requests_without_a_response_are_a_part_of_their_own(tmp_path: Path) -> None:
    """Requests that no replica answered have a row with a name, so that the parts add up, and are not compared."""
    records = [answered(number, "" if number % 4 == 0 else "node-0", 100) for number in range(80)]
    summary = summarise(run_of(tmp_path / "run", records))
    assert {part.name: part.requests.complete for part in summary.replicas} == {"(no replica)": 20, "node-0": 60}
    assert summary.replica_difference is None


def test_an_older_run_names_no_replica(tmp_path: Path) -> None:
    """Runs without names have no figures per replica."""
    summary = summary_of(tmp_path, {"": ttfts(100)})
    assert (summary.replicas, summary.replica_difference) == ([], None)


def test_a_pause_of_a_replica_is_no_difference(tmp_path: Path) -> None:
    """A replica that is slower in two fifths of the run had a pause. One that is slower all the time is named."""
    same, later = ttfts(100), ttfts(100, seed=2)
    later[25:] *= 3
    (tmp_path / "pause").mkdir()
    (tmp_path / "always").mkdir()
    assert summary_of(tmp_path / "pause", {"a": same, "b": later}).replica_difference is None
    difference = summary_of(tmp_path / "always", {"a": same, "b": 2 * same}).replica_difference
    assert difference is not None
    assert not difference.together


@pytest.mark.parametrize(("ratio", "level"), [(2, "note"), (5, "warning")])
def test_a_burst_may_hide_one_delay(ratio: int, level: str, tmp_path: Path) -> None:
    """Requests that are sent at once share a delay, so a moderate difference is a note that says so."""
    records = []
    for number in range(80):
        ttft_ms = (100 + number % 9) * (ratio if number % 2 else 1)
        chunks = [int((ttft_ms + index) * MS) for index in range(4)]
        records.append(replace(complete(number, chunks, sent_ns=number * 1_000), replica="ab"[number % 2]))
    summary = summarise(run_of(tmp_path / "run", records))
    finding = replicas_finding(summary)
    assert finding is not None
    assert (finding.level, "only --repeats shows" in finding.sentence) == (level, level == "note")


def test_a_pause_of_the_faster_replica_hides_no_difference(tmp_path: Path) -> None:
    """A replica that is three times as slow is named, although the other one pauses for a tenth of the run."""
    fast = ttfts(100, count=150)
    fast[60:75] *= 20
    difference = summary_of(tmp_path, {"a": fast, "b": ttfts(300, count=150, seed=2)}).replica_difference
    assert difference is not None
    assert (difference.fastest, difference.slowest) == ("a", "b")


def test_most_differences_of_half_a_ttft_are_found(tmp_path: Path) -> None:
    """With 50 varied requests of each replica, a factor of 1.5 is found in most runs."""
    found = 0
    for seed in range(20):
        fast, slow = np.exp(np.random.default_rng(seed).normal(0, 0.4, (2, 50)))
        (tmp_path / str(seed)).mkdir()
        found += summary_of(tmp_path / str(seed), {"a": 100 * fast, "b": 150 * slow}).replica_difference is not None
    assert found >= 12


def test_an_interval_without_a_replica_says_nothing(tmp_path: Path) -> None:
    """Intervals in which only one replica answered do not count for a difference, nor against one."""
    names = ["b" if 30 <= number < 60 and number % 2 else "a" for number in range(100)] + ["b"] * 30
    slow = {"a": 100, "b": 200}
    noise = ttfts(1, count=len(names))
    records = [answered(number, name, slow[name] * noise[number]) for number, name in enumerate(names)]
    assert compare_replicas(frame_of_run(run_of(tmp_path / "run", records))) is not None


def queued_runs(folder: Path, slower: float, busy: float, runs: int = 50, requests: int = 600) -> int:
    """Return in how many of `runs` simulated runs a difference of two replicas is reported.

    Each replica has a queue and serves one request at a time, in 100 ms on average (exponentially distributed). The
    second one needs `slower` times as long. `busy` is the share of time in which the first one is busy.
    """
    reported = 0
    for seed in range(runs):
        random = np.random.default_rng(seed)
        sent_ms = np.cumsum(random.exponential(100 / busy / 2, requests))
        replicas, service_ms = random.integers(0, 2, requests), random.exponential(100, requests)
        free_ms, records = [0.0, 0.0], []
        for number, (sent, replica, service) in enumerate(zip(sent_ms, replicas, service_ms, strict=True)):
            duration = service * (slower if replica else 1)
            start = max(sent, free_ms[replica])
            free_ms[replica] = start + duration
            chunks = [int((start + share * duration) * MS) for share in (0.1, 0.4, 0.7, 1)]
            records.append(replace(complete(number, chunks, sent_ns=int(sent * MS)), replica="ab"[replica]))
        frame = frame_of_run(run_of(folder / str(seed), records))
        reported += compare_replicas(frame) is not None
    return reported


def test_equal_replicas_with_long_queues_are_alike(tmp_path: Path) -> None:
    """One of two equal queues may be longer by chance for half of a run. Few such runs are called different."""
    assert queued_runs(tmp_path, 1, busy=0.9) <= 3


def test_a_slower_replica_with_a_queue_is_found(tmp_path: Path) -> None:
    """A replica that is slower by half is found by requests that met equally many requests in flight."""
    assert queued_runs(tmp_path, 1.5, busy=0.5) >= 40
