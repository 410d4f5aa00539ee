"""When the sampler reads, what it keeps, and what it leaves out, with sources that do as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadgen.analysis.run.runfile import Telemetry
from loadgen.engine import telemetry_sampler as telemetry
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.telemetry_sampler import PART, Bursts, Sampler, find_bursts, open_sampler
from loadgen.errors import OutputError
from loadgen.plan import Plan
from loadgen.servers.telemetry import GapError, NotMeasuredError

S = 1_000_000_000


class Scripted:
    """Gives its answers in turn, and the last one for ever."""

    facts: Mapping[str, Any] = {"from": "script"}

    def __init__(self, *answers: dict[str, Any] | GapError) -> None:
        self._answers = iter(answers)
        self._last: dict[str, Any] | GapError = {}
        self.limits_s: list[float] = []
        self.closed = 0

    def read(self, limit_s: float) -> dict[str, Any]:
        self.limits_s.append(limit_s)
        self._last = next(self._answers, self._last)
        if isinstance(self._last, GapError):
            raise self._last
        return self._last

    def close(self) -> None:
        self.closed += 1


def sent(number: int, **others: int) -> LiveCounters:
    return LiveCounters(sent=number, **others)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause after the run is worth waiting for here."""
    monkeypatch.setattr(telemetry, "REST_S", (0.0, 0.0, 0.0))


def lines(folder: Path) -> list[Telemetry]:
    return [msgspec.json.decode(line, type=Telemetry) for line in (folder / PART).read_bytes().splitlines()]


def moments(folder: Path, source: str = "server") -> list[str]:
    return [line.values["moment"] for line in lines(folder) if line.source == source]


BURST = find_bursts([0] * 1000)
TWO = find_bursts([*[0] * 20, *range(1, 11), *[10 * S] * 20])


@pytest.mark.parametrize(
    ("bursts", "now_ns", "counts", "hold_s", "limit_s"),
    [
        (Bursts(), 0, sent(0), 0.0, 5.0),
        (BURST, 0, sent(0), 0.01, 0.0),
        (BURST, S, sent(999), 0.01, 0.0),
        (BURST, S, sent(1000), 0.0, 5.0),
        (BURST, S, sent(990, failed=10), 0.0, 5.0),
        (BURST, S, sent(900, dropped=100), 0.0, 5.0),
        (BURST, 6 * S, sent(999), 0.0, 5.0),
        (TWO, S, sent(30), 0.0, 5.0),
        (TWO, 7 * S, sent(30), 0.0, 3.0),
        (TWO, 10 * S - 50_000_000, sent(30), 0.05, 0.0),
        (TWO, 10 * S, sent(30), 0.01, 0.0),
        (TWO, 10 * S, sent(50), 0.0, 5.0),
    ],
)
def test_nothing_is_read_while_a_burst_is_sent(
    bursts: Bursts, now_ns: int, counts: LiveCounters, hold_s: float, limit_s: float
) -> None:
    """From shortly before it is due until its last request is gone; a reading before it must end by then. One request
    that waits for a connection holds everything up for five seconds, no longer."""
    assert bursts.hold_s(now_ns, counts) == pytest.approx((hold_s, limit_s))


def test_a_burst_is_many_requests_at_one_instant() -> None:
    """A few together are none; a closed loop has no instants."""
    assert find_bursts([0, 0, 1, 2, 3]) == find_bursts(None) == Bursts()
    assert find_bursts([*[5] * 16, 7, *[9] * 20]) == Bursts({5: 16, 9: 37})


def test_every_moment_is_kept_on_the_runs_own_clock(tmp_path: Path) -> None:
    """Readings from before the instant 0 have negative instants and wait for the run to begin."""
    source = Scripted({"running": 0})
    sampler = Sampler({"server": source})
    sampler.idle()
    sampler.start()
    assert source.closed == 1
    sampler.begin(time.monotonic_ns() + S, tmp_path, lambda: sent(0))
    paths = sampler.end(patient=True)
    assert paths == [tmp_path / PART]
    assert moments(tmp_path) == ["idle", "start", "end", "after"]
    assert all(line.at_ns < 0 for line in lines(tmp_path))
    assert all(line.values["took_ns"] >= 0 for line in lines(tmp_path))
    assert sampler.facts == {"every_s": 1.0, "server": {"from": "script"}, "not_measured": {}}


def test_readings_go_on_while_the_run_does(tmp_path: Path) -> None:
    """At absolute instants, every source by itself: one that hangs does not hold the others up."""
    hanging, released = Scripted({"a": 1}), threading.Event()
    quick = Scripted({"b": 1})
    read = hanging.read

    def hang(limit_s: float) -> dict[str, Any]:
        if limit_s == telemetry.LIMIT_S:
            released.wait(30)
        return read(limit_s)

    hanging.read = hang  # type: ignore[method-assign]
    sampler = Sampler({"server": hanging, "gpu": quick}, 0.02)
    sampler.idle()
    sampler.begin(time.monotonic_ns(), tmp_path, lambda: sent(0))
    while moments(tmp_path, "gpu").count("run") < 3:
        time.sleep(0.01)
    released.set()
    sampler.end(patient=False)
    assert moments(tmp_path)[0] == "idle"
    assert moments(tmp_path).count("run") <= 1
    run = [line.at_ns for line in lines(tmp_path) if line.source == "gpu" and line.values["moment"] == "run"]
    assert all(at_ns >= number * 20_000_000 for number, at_ns in enumerate(run, 1))


def test_a_failed_reading_is_a_line_with_its_reason(tmp_path: Path) -> None:
    """A gap, not a zero; and the source is asked again."""
    source = Scripted(GapError("busy"), {"running": 1}, GapError("dead"))
    sampler = Sampler({"server": source})
    sampler.idle()
    sampler.start()
    sampler.begin(time.monotonic_ns() + S, tmp_path, lambda: sent(0))
    sampler.end(patient=False)
    told = [{**line.values, "took_ns": 0} for line in lines(tmp_path)]
    assert told == [
        {"moment": "idle", "took_ns": 0, "gap": "busy"},
        {"moment": "start", "took_ns": 0, "running": 1},
        {"moment": "end", "took_ns": 0, "gap": "dead"},
    ]


def test_a_gap_keeps_the_values_of_the_replicas_that_answered(tmp_path: Path) -> None:
    """The stored reading has them, and the live figures do not."""
    gap = GapError("http://b: busy")
    gap.values = {"replicas": [{"url": "http://a", "running": 1}]}
    sampler = Sampler({"server": Scripted(gap)})
    sampler.idle()
    sampler.begin(time.monotonic_ns() + S, tmp_path, lambda: sent(0))
    sampler.stop()
    stored = {**lines(tmp_path)[0].values, "took_ns": 0}
    assert stored == {"moment": "idle", "took_ns": 0, **gap.values, "gap": "http://b: busy"}
    assert sampler.latest == {}


def test_memory_is_that_of_the_server_only_if_all_replicas_are_here() -> None:
    """With a replica on another machine, this machine's memory and GPUs are not those of the server."""
    server = {"name": "vllm", "url": "http://127.0.0.1:1", "simulated": False}
    replicas = [{"url": "http://127.0.0.1:1"}, {"url": "http://192.0.2.1:1"}]
    sampler = open_sampler(Plan(server="vllm", n=1), {**server, "replicas": replicas}, None)
    reason = "not all replicas are on this machine"
    expected = {"host": reason, "gpu": f"{reason}: --dcgm-url reads its GPUs"}
    assert sampler.facts["not_measured"] == expected


def test_what_cannot_be_read_at_all_is_asked_once(tmp_path: Path) -> None:
    """A server without /metrics is noted and left alone; without any source there is no part file."""
    source = Scripted(NotMeasuredError("/metrics answers 404"))
    sampler = Sampler({"server": source}, not_measured={"gpu": "none here"})
    sampler.idle()
    sampler.start()
    assert sampler.facts["not_measured"] == {"gpu": "none here", "server": "/metrics answers 404"}
    assert len(source.limits_s) == 1
    silent = Sampler({})
    silent.idle()
    silent.begin(time.monotonic_ns(), tmp_path / "nowhere", lambda: sent(0))
    assert silent.end(patient=True) == []


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    """The part file is made before the order to start."""
    sampler = Sampler({"server": Scripted({})})
    sampler.idle()
    with pytest.raises(OutputError, match="part-telemetry"):
        sampler.begin(time.monotonic_ns(), tmp_path / "nowhere", lambda: sent(0))


def settling(*answers: dict[str, Any] | GapError) -> Iterator[dict[str, Any] | GapError]:
    yield from ({}, *answers)


@pytest.mark.parametrize(
    ("answers", "after"),
    [
        ([{"output_tokens": 5}, {"output_tokens": 5}], 1),
        ([{"output_tokens": 4}, {"output_tokens": 5}, {"output_tokens": 5}], 2),
        ([{"running": 1}, {"running": 1}, {"running": 0}, {"running": 0}], 3),
        ([{"waiting": 1}], 3),
        ([GapError("dead")], 1),
    ],
)
def test_the_server_is_given_time_to_come_to_rest(tmp_path: Path, answers: list[Any], after: int) -> None:
    """It is read again until nothing changes and nothing runs, a few times at most."""
    server, host = Scripted(*settling(*answers)), Scripted({"memory_used_bytes": 1})
    sampler = Sampler({"server": server, "host": host})
    sampler.idle()
    sampler.begin(time.monotonic_ns() + 60 * S, tmp_path, lambda: sent(0))
    sampler.end(patient=True)
    assert moments(tmp_path) == ["idle", "end", *["after"] * after]
    assert moments(tmp_path, "host") == ["idle", "end", "after"]


def test_a_reading_may_not_take_longer_than_its_moment_allows(tmp_path: Path) -> None:
    """The run waits for the readings at its edges, so they have less time than those beside it."""
    source = Scripted({})
    sampler = Sampler({"server": source}, 0.01)
    sampler.idle()
    sampler.begin(time.monotonic_ns(), tmp_path, lambda: sent(0))
    while len(source.limits_s) < 3:
        time.sleep(0.01)
    sampler.end(patient=False)
    assert source.limits_s[0] == source.limits_s[-1] == telemetry.EDGE_LIMIT_S
    assert set(source.limits_s[1:-1]) == {telemetry.LIMIT_S}
