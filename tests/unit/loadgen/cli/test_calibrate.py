"""The error bar: stamps against a server's log, the search for the fastest exact burst, and what is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from loadgen import machine as host
from loadgen.analysis import calibration as compared
from loadgen.analysis.client_health import quoted_calibration
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run
from loadgen.analysis.summary import QuotedCalibration
from loadgen.cli.calibrate import search
from loadgen.engine import driver
from loadgen.machine import Calibration, CalibrationPoint, load_calibration, save_calibration
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import complete, failed, healthy, run_of

START_NS = 1_700_000_000_000_000_000
"""CLOCK_REALTIME at the instant 0 of the runs here."""
POINT = CalibrationPoint("vllm", 1000, 0.02, 64, 1)
MACHINE = {"hostname": "bench-1", "kernel": "6.1", "cpu": "EPYC", "python": "3.11.9", "cores": 2}


def sends(*sent_ms: float, late_ms: float = 0) -> compared.ServerLogLine:
    """What the log says of a request whose tokens left at these instants of the run, so late."""
    sent_ns = [START_NS + round(instant * MS) for instant in sent_ms]
    return compared.ServerLogLine(sent_ns=sent_ns, due_ns=[instant - round(late_ms * MS) for instant in sent_ns])


def run_with(folder: Path, records: Sequence[Record], **health: int) -> Run:
    """A run that these Records came from."""
    return run_of(folder / "run", records, telemetry=healthy(1, **health), start_realtime_ns=START_NS)


def found(**changes: Any) -> Calibration:
    """A calibration as the command makes it."""
    spread = {"p50": 1e-6, "p99": 5e-6, "max": 2e-5}
    errors = {stamps: {"ttft_s": spread, "tpot_s": spread, "icl_s": spread} for stamps in ("socket", "user")}
    values = {"made_at": "2026-11-21T09:00:00+00:00", "version": "0.1.0", "load": POINT, "errors": errors}
    return Calibration(**(values | {"events_per_s": 50_000.0, "limited_by": "server"} | changes))


def test_errors_are_ours_against_what_the_server_did(tmp_path: Path) -> None:
    """A first stamp 2 ms late, the next two 1 ms: TTFT is off by 2 ms, TPOT by half a ms, the gaps by 1 and 0."""
    run = run_with(tmp_path, [complete(1, [502 * MS, 521 * MS, 541 * MS])])
    seen = compared.compare_with_log(run, {1: sends(500, 520, 540, late_ms=70)})
    assert seen.ttft_s == compared.ErrorSizes(0.002, 0.002, 0.002)
    assert seen.tpot_s == compared.ErrorSizes(0.0005, 0.0005, 0.0005)
    assert (seen.icl_s.p50, seen.icl_s.max) == (0.0005, 0.001)
    assert (seen.exact, seen.server_late_p99_s) == (False, 0.07)


def test_only_what_can_be_compared_is(tmp_path: Path) -> None:
    """A failed request, one that the server does not know, and one with other events than it sent are left out."""
    records = [complete(1, [500 * MS, 520 * MS]), failed(2), complete(3, [MS, 2 * MS]), complete(4, [MS, 2 * MS])]
    seen = compared.compare_with_log(
        run_with(tmp_path, records), {1: sends(500, 520), 2: sends(500), 4: sends(1, 2, 3)}
    )
    assert (seen.requests, seen.not_compared, seen.ttft_s.max, seen.exact) == (1, 3, 0, True)


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    """No error bar is made up for a burst of which nothing came back."""
    with pytest.raises(ValueError, match="no complete request"):
        compared.compare_with_log(run_with(tmp_path, [failed(1)]), {1: sends(500)})


def test_merged_first_tokens_are_held_against_the_lag(tmp_path: Path) -> None:
    """A first token that waited for later ones is off by up to as long as the client was away; more is an anomaly."""
    merged = [complete(i, [540 * MS, 540 * MS, 540 * MS, 560 * MS], first_token_merged=True) for i in (1, 2)]
    log = {1: sends(500, 520, 540, 560), 2: sends(200, 520, 540, 560)}
    seen = compared.compare_with_log(run_with(tmp_path, merged, stall_ns_max=30 * MS), log)
    assert seen.lag_s == pytest.approx(0.03 + driver.TICK_S)
    assert (seen.merged, seen.merged_s_max, seen.merged_beyond) == (2, 0.34, 1)
    assert seen.coalesced_share == pytest.approx(2 / 3)
    said = "\n".join(compared.stamps_notes(seen))
    assert "2 of 2 first tokens were read together with later ones: off by up to 340 ms" in said
    assert "67% of the gaps are within one read" in said
    assert "1 of them by more than the 80.0 ms for which the client may not have read" in said


def test_a_server_that_falls_behind_is_named(tmp_path: Path) -> None:
    """The rate is the one reached. Below nine tenths of the rate asked the note says so, and whose doing it is."""
    run = run_with(tmp_path, [complete(1, [500 * MS, 540 * MS, 580 * MS])])
    line = compared.ServerLogLine(sent_ns=sends(500, 540, 580).sent_ns, due_ns=sends(500, 520, 540).sent_ns)
    seen = compared.compare_with_log(run, {1: line})
    assert (seen.events_per_s, seen.asked_per_s, seen.server_kept_up) == (25, 50, False)
    assert "sent 25 of the 50 requested events/s" in compared.stamps_notes(seen)[0]
    kept_up = compared.compare_with_log(run, {1: sends(500, 540, 580)})
    assert (kept_up.server_kept_up, compared.stamps_notes(kept_up)) == (True, [])


def test_user_space_stamps_are_called_so(tmp_path: Path) -> None:
    """One answer without kernel stamps makes the whole comparison one of user-space stamps."""
    records = [complete(1, [500 * MS, 520 * MS]), complete(2, [500 * MS, 520 * MS], stamps="user")]
    seen = compared.compare_with_log(run_with(tmp_path, records), {1: sends(500, 520), 2: sends(500, 520)})
    assert compared.stamps_row(seen).startswith("user ")


def test_the_row_stands_below_its_heading(tmp_path: Path) -> None:
    """Figures are in ms, each below the name of its percentile."""
    run = run_with(tmp_path, [complete(1, [502 * MS, 522 * MS])])
    row = compared.stamps_row(compared.compare_with_log(run, {1: sends(500, 520)}))
    names = compared.stamps_heading().splitlines()[-1]
    assert len(row) == len(names)
    assert row[names.index("p50") - 6 : names.index("p50") + 3] == "   2.0000"


def test_the_log_is_read_by_request(tmp_path: Path) -> None:
    """Lines of requests without our id, and the line at the end that sums up, are passed over."""
    log = tmp_path / "sim.jsonl"
    line = {"request_id": "7", "received_ns": 1, "due_ns": [2], "sent_ns": [3], "tokens": [1]}
    log.write_text("\n".join(json.dumps(each) for each in (line, line | {"request_id": ""}, {"summary": {}})))
    assert compared.read_log(log) == {7: compared.ServerLogLine("7", [2], [3])}


@dataclass(frozen=True)
class Seen:
    """A burst as `search` sees it."""

    exact: bool
    server_kept_up: bool
    events_per_s: float


def machine(client_per_s: float, server_per_s: float) -> Callable[[CalibrationPoint], Seen]:
    """A machine whose client is exact, and whose server keeps up, to such rates."""

    def measure(point: CalibrationPoint) -> Seen:
        asked = point.n / point.itl_s
        return Seen(asked <= client_per_s, asked <= server_per_s, min(asked, server_per_s))

    return measure


@pytest.mark.parametrize(
    ("client_per_s", "server_per_s", "rate", "limited_by"),
    [
        (120_000, 1e9, 100_000, "client"),
        (1e9, 60_000, 60_000, "server"),
        (20_000, 1e9, 12_500, "client"),
        (1e9, 1e9, 400_000, "time"),
        (1, 1e9, None, "time"),
        (20_000, 30_000, 12_500, "client"),
    ],
)
def test_the_search_finds_the_fastest_exact_burst(
    client_per_s: float, server_per_s: float, rate: float | None, limited_by: str
) -> None:
    """Twice as fast while that is exact and the server keeps up, else twice as slow until it is exact."""
    measure = machine(client_per_s, server_per_s)
    fastest, by = search(measure(POINT), POINT, measure, lambda: True)
    assert (fastest and fastest.events_per_s, by) == (rate, limited_by)


def test_the_search_ends_in_time() -> None:
    """When there is no time left nothing more is measured."""
    first = Seen(exact=True, server_kept_up=True, events_per_s=50_000)
    assert search(first, POINT, _never, lambda: False) == (first, "time")


def test_what_was_found_is_said(tmp_path: Path) -> None:
    """The last line names the rate and what was in the way; without an exact burst it promises nothing."""
    run = run_with(tmp_path, [complete(1, [500 * MS, 520 * MS])])
    fastest = structs.replace(compared.compare_with_log(run, {1: sends(500, 520)}), events_per_s=51_234.0)
    assert compared.exact_up_to(fastest, "server") == (
        "TTFT is exact to 1.00 ms at p99 up to 51,234 events/s: the simulated server sent no faster."
    )
    assert compared.exact_up_to(None, "time") == "TTFT was never exact to 1.00 ms at p99."


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that calibrations are remembered in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "llm-loadgen" / "calibration.json"


def test_each_machine_has_its_own_memory(cache: Path) -> None:
    """What is remembered of one machine comes back there, not on another, and a newer one takes its place."""
    other = MACHINE | {"kernel": "6.2"}
    assert save_calibration(found(), MACHINE) == cache
    save_calibration(found(limited_by="time"), other)
    save_calibration(found(limited_by="client"), MACHINE)
    said: list[str] = []
    assert load_calibration(MACHINE, said.append) == found(limited_by="client")
    assert load_calibration(other, said.append) == found(limited_by="time")
    assert load_calibration(MACHINE | {"python": "3.12.1"}, said.append) is None
    assert (said, [path.name for path in cache.parent.iterdir()]) == ([], ["calibration.json"])


KEY = "bench-1, 6.1, EPYC, 3.11.9"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"17",
        json.dumps({KEY: {"made_at": 5}}).encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_damaged_memory_is_left_out_with_a_note(cache: Path, content: bytes) -> None:
    """Whatever is in the file: nothing is quoted, one line says so, and the next calibration writes it anew."""
    cache.parent.mkdir()
    cache.write_bytes(content)
    said: list[str] = []
    assert load_calibration(MACHINE, said.append) is None
    assert len(said) == 1
    assert "loadgen calibrate" in said[0]
    save_calibration(found(), MACHINE)
    assert load_calibration(MACHINE, said.append) == found()


def test_an_unreadable_memory_is_left_out_with_a_note(cache: Path) -> None:
    """A folder in the file's place is as unreadable as a file without permission, also to root."""
    cache.mkdir(parents=True)
    said: list[str] = []
    assert load_calibration(MACHINE, said.append) is None
    assert len(said) == 1


def test_without_a_home_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home gets a note, and an OSError where something was to be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/none")
    monkeypatch.setattr(host.Path, "home", _no_home)
    said: list[str] = []
    assert load_calibration(MACHINE, said.append) is None
    assert len(said) == 1
    with pytest.raises(OSError, match="there is no cache folder"):
        save_calibration(found(), MACHINE)


def test_a_run_quotes_the_calibration_of_its_stamps() -> None:
    """The header's calibration becomes the figure of the stamps used; what is none becomes nothing."""
    header = msgspec.to_builtins(found())
    header["errors"]["user"]["ttft_s"]["p99"] = 0.4
    del header["errors"]["socket"]["tpot_s"]
    expected = {"made_at": "2026-11-21T09:00:00+00:00", "version": "0.1.0", "events_per_s": 50_000.0}
    for stamps, ttft_p99_s in (("socket", 5e-6), ("user", 0.4)):
        assert quoted_calibration(header, stamps) == QuotedCalibration(**expected, ttft_p99_s=ttft_p99_s)
    assert [
        quoted_calibration(other, "socket") for other in (None, 5, {}, {"errors": {}}, header | {"errors": {}})
    ] == ([None] * 5)


def _never(point: CalibrationPoint) -> Seen:
    pytest.fail(f"measured {point}")


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
