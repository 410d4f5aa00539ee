"""A run with --soak: files of Records during the run, and figures of all of them at the end."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from loadgen.analysis.parallel_scan import read_columns
from loadgen.analysis.run.record_files import record_files
from loadgen.api import run
from loadgen.engine import prepare
from loadgen.errors import OutputError, PlanError
from loadgen.plan import Plan
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import running

DiskUsage = namedtuple("DiskUsage", "total used free")


def plan_for(url: str, **changes: object) -> Plan:
    settings = {"arrivals": "closed:4", "n": 200, "input_tokens": 16, "output_tokens": 4, "timeout_s": 30.0}
    return Plan(server="vllm", url=url, soak=True, **{**settings, **changes})  # type: ignore[arg-type]


def test_all_records_are_in_compressed_files_and_in_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file but the last one of a worker is compressed at the end, no request is lost, and the footer counts all
    of them.
    """
    monkeypatch.setattr(prepare, "ROTATE_BYTES", 10_000)
    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.01)) as server:
        result = run(plan_for(server.url, workers=2), out=tmp_path / "run")
    files = record_files(tmp_path / "run")
    assert {file.name.rsplit("-", 1)[0] for file in files} == {"records-0", "records-1"}
    assert all(file.name.endswith(".jsonl.gz") for file in files)
    assert not list((tmp_path / "run").glob("part-*"))
    read, frame = read_columns(tmp_path / "run")
    assert sorted(frame.id.tolist()) == list(range(200))
    assert read.footer is not None
    assert read.footer.complete == 200
    assert result.summary.requests.complete == 200


@pytest.mark.parametrize(
    "load",
    [
        {"arrivals": "poisson:5", "n": None, "duration_s": 86_400.0},
        {"arrivals": "closed:4", "n": 400_000},
        {"arrivals": "burst", "n": 400_000, "concurrency": 4},
    ],
    ids=["duration", "closed", "burst"],
)
def test_a_disk_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: dict[str, object]
) -> None:
    """The space for the whole run is foreseen whenever the number of requests is known."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(1 << 30, 0, 200_000_000))
    with running(SimulatedConfig(server="vllm")) as server:
        with pytest.raises(OutputError, match="this run needs about"):
            run(plan_for(server.url, output_tokens=64, **load), out=tmp_path / "run")
        assert server.log == []


@pytest.mark.parametrize(("keep_s", "fits"), [(None, False), (36_000.0, False), (3_600.0, True)])
def test_less_space_is_needed_if_few_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_s: float | None, *, fits: bool
) -> None:
    """A day at 5 requests/s needs 0.28 GB and the files in work. The last hour needs 0.01 GB and the files in work."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(1 << 30, 0, 200_000_000))
    lines: list[str] = []
    load = {"arrivals": "poisson:5", "n": None, "duration_s": 86_400.0, "output_tokens": 64, "keep_records_s": keep_s}
    with running(SimulatedConfig(server="vllm")) as server:
        plan = plan_for(server.url, **load)
        with prepare.prepare(plan, tmp_path, lines.append) as prepared:
            if fits:
                prepare.check_disk(plan, prepared, tmp_path, lines.append)
            else:
                with pytest.raises(OutputError, match="this run needs about"):
                    prepare.check_disk(plan, prepared, tmp_path, lines.append)
    assert "GB per day at 5.0" in lines[-1]
    assert "e+" not in lines[-1]


def test_old_records_are_removed_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is counted, either in the Records that are left or in the figures of removed Records."""
    monkeypatch.setattr(prepare, "ROTATE_BYTES", 5_000)
    load = {"n": None, "duration_s": 12.0, "timeout_s": 1.0, "keep_records_s": 1.0}
    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.01)) as server:
        result = run(plan_for(server.url, **load), out=tmp_path / "run")
        requests = len(server.log)
    read, frame = read_columns(tmp_path / "run")
    removed = sum(part.requests for part in read.removed)
    assert removed > 0
    assert len(frame.id) + removed == requests
    assert read.footer is not None
    assert read.footer.sent == requests
    assert result.summary.removed is not None


def test_keep_records_needs_soak() -> None:
    """A mistake in the options is found before the run."""
    with pytest.raises(PlanError, match="--keep-records removes files of --soak: add --soak"):
        Plan(server="vllm", n=100, keep_records_s=3600.0)
    with pytest.raises(PlanError, match="--keep-records 60s is shorter than --timeout 600s"):
        Plan(server="vllm", n=100, soak=True, keep_records_s=60.0)
    with pytest.raises(PlanError, match="--keep-records 1,000,000s is shorter than --timeout 2,000,000s"):
        Plan(server="vllm", n=100, soak=True, keep_records_s=1e6, timeout_s=2e6)


def test_keep_records_would_remove_the_baseline_of_canaries() -> None:
    """Without the answers before the load, a wrong answer under load could not be found."""
    with pytest.raises(PlanError, match="leave --keep-records or --verify out"):
        Plan(server="vllm", n=100, soak=True, keep_records_s=3600.0, verify=4)
