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


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The space for the whole duration is foreseen. With --keep-records less is needed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(1 << 30, 0, 200_000_000))
    with running(SimulatedConfig(server="vllm")) as server:
        day = {"arrivals": "poisson:5", "n": None, "duration_s": 86_400.0, "output_tokens": 64}
        with pytest.raises(OutputError, match="this run needs about"):
            run(plan_for(server.url, **day), out=tmp_path / "run")
        assert server.log == []


def test_keep_records_needs_soak() -> None:
    """A mistake in the options is found before the run."""
    with pytest.raises(PlanError, match="--keep-records removes files of --soak: add --soak"):
        Plan(server="vllm", n=100, keep_records_s=3600.0)
    with pytest.raises(PlanError, match="--keep-records 60s is shorter than --timeout 600s"):
        Plan(server="vllm", n=100, soak=True, keep_records_s=60.0)
