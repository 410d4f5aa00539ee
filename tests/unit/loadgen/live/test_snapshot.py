"""Snapshots of a run and their history."""

from itertools import pairwise

from loadgen.engine.client_health import LiveCounters, sum_counters
from loadgen.live.snapshot import MAX_SNAPSHOTS, History, LiveSnapshot, PlannedEnd, SnapshotTaker


def test_a_snapshot_has_the_figures_of_the_counters() -> None:
    """Latencies and figures of the server that are not measured are None."""
    clock_s = 100.0
    taker = SnapshotTaker(PlannedEnd(requests=10), lambda: clock_s)
    clock_s = 102.5
    counts = LiveCounters(sent=7, complete=3, failed=1, dropped=1)
    counts.ttft.add(2e9)
    snapshot = taker.take("running", counts)
    assert (snapshot.elapsed_s, snapshot.running_s, snapshot.in_flight, snapshot.ended) == (2.5, 0.0, 3, 5)
    assert snapshot.ttft_p50_s is not None
    assert abs(snapshot.ttft_p50_s - 2) < 0.02
    assert snapshot.tpot_p50_s is snapshot.server_running is snapshot.server_waiting is snapshot.kv_used is None
    assert snapshot.done == 0.5
    clock_s = 103.5
    counts.set_server_gauges({"running": 4, "waiting": 0, "kv_used": 0.25})
    later = taker.take("running", counts)
    assert (later.running_s, later.server_running, later.server_waiting, later.kv_used) == (1.0, 4, 0, 0.25)


def test_never_more_requests_stream_than_are_in_flight() -> None:
    """The counters of workers are read one after the other, so their sums may contradict each other for a moment."""
    snapshot = SnapshotTaker(PlannedEnd(), lambda: 0.0).take("running", LiveCounters(sent=16, streaming=17))
    assert (snapshot.in_flight, snapshot.streaming) == (16, 16)


def test_summed_counters_have_no_figures_of_the_server() -> None:
    """Workers do not measure the server, so the zeros in their shared memory are not figures."""
    worker = LiveCounters.from_buffer_copy(bytes(len(bytes(LiveCounters()))))
    snapshot = SnapshotTaker(PlannedEnd(), lambda: 0.0).take("running", sum_counters([worker, worker]))
    assert snapshot.server_running is snapshot.kv_used is None


def test_a_run_with_a_duration_is_done_when_its_time_is_over() -> None:
    """After the planned duration the end is unknown, because requests in flight may take any time."""
    clock_s = 0.0
    taker = SnapshotTaker(PlannedEnd(requests=None, duration_s=10.0), lambda: clock_s)
    taker.take("running", LiveCounters())
    clock_s = 5.0
    snapshot = taker.take("running", LiveCounters(sent=3))
    assert (snapshot.done, snapshot.remaining_text) == (0.5, "0:05 left")
    clock_s = 11.0
    snapshot = taker.take("running", LiveCounters(sent=3))
    assert (snapshot.done, snapshot.remaining_text) == (None, "3 in flight")


def test_a_long_history_is_thinned_evenly() -> None:
    """A day of snapshots needs little memory, begins with the first one, ends with the last one, and has equal gaps."""
    history = History()
    seconds = 0.0
    while seconds < 86_400:
        history.add(LiveSnapshot(elapsed_s=seconds, phase="running"))
        seconds += 0.5
    history.add(LiveSnapshot(elapsed_s=86_400.1, phase="ended"))
    times_s = [snapshot.elapsed_s for snapshot in history.snapshots]
    assert MAX_SNAPSHOTS / 2 <= len(times_s) <= MAX_SNAPSHOTS
    assert (times_s[0], times_s[-1]) == (0.0, 86_400.1)
    gaps_s = {later - earlier for earlier, later in pairwise(times_s[:-1])}
    assert max(gaps_s) <= 2.5 * min(gaps_s)
