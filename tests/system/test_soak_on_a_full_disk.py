"""Long runs (--soak --keep-records) on a disk that is completely full."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from loadgen.analysis.run import runfile
from loadgen.analysis.run.removed_records import RemovedRecords
from loadgen.api import run
from loadgen.engine import coordinator
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.record_keeper import PART, RecordKeeper
from loadgen.engine.signals import Interrupts
from loadgen.errors import OutputError
from loadgen.plan import Plan
from loadgen.servers.simulated.config import SimulatedConfig
from tests.endurance.full_disk import fill, small_disk
from tests.support.runs import complete, write
from tests.support.simulated import running

PATIENCE_S = 60.0
MS = 1_000_000


def test_old_records_are_removed_from_a_full_disk(tmp_path: Path) -> None:
    """The figures of the Records are written into reserved space. The removal then makes room for new Records."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk) as mounted:
        assert mounted, "needs the right to mount a tmpfs"
        folder = disk / "run"
        write(folder, [complete(0, [MS]), complete(1, [MS])])
        old = folder / "records-0-000001.jsonl"
        records = (folder / "run.jsonl").read_bytes()
        keeper = RecordKeeper()
        keeper.begin(folder, 3600.0)
        wait_until(folder / PART)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            old.write_bytes(records)
            while True:
                filler.write(b"x" * 512)
        os.utime(old, (0, 0))
        limit_s = time.monotonic() + PATIENCE_S
        while old.exists() and time.monotonic() < limit_s:
            time.sleep(0.05)
        notes: list[str] = []
        assert keeper.end(notes, Interrupts()) == [folder / PART]
        assert notes == []
        assert not old.exists()
        [line] = (folder / PART).read_bytes().splitlines()
        assert msgspec.json.decode(line, type=RemovedRecords).states == {"complete": 2}


def test_a_run_ends_before_too_many_records_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress shows the Records that wait. The error says that the disk is full, and no Record is lost."""
    monkeypatch.setattr(coordinator, "MAX_UNWRITTEN_BYTES", 100_000)
    disk, unwritten = tmp_path / "disk", list[int]()
    disk.mkdir()

    def fill_disk(_phase: str, counts: LiveCounters) -> None:
        unwritten.append(counts.unwritten_bytes)
        if counts.complete > 20 and not (disk / "filler").exists():
            fill(disk, 0)

    with running(SimulatedConfig(server="vllm", ttft_s=0.02, itl_s=0.01)) as server, small_disk(disk) as mounted:
        assert mounted, "needs the right to mount a tmpfs"
        plan = Plan(
            server="vllm",
            url=server.url,
            arrivals="closed:16",
            duration_s=600.0,
            input_tokens=16,
            output_tokens=16,
            soak=True,
        )
        with pytest.raises(OutputError, match="No space left") as caught:
            run(plan, out=disk / "run", progress=fill_disk)
        assert max(unwritten) > 0
        assert "free some space" in (caught.value.hint or "")
        (disk / "filler").unlink()
        rescued = Path(re.findall(r"/\S+part-0.jsonl", caught.value.hint or "")[0])
        with (disk / "run" / "part-0.jsonl").open("ab") as part:
            part.write(rescued.read_bytes())
        rescued.unlink()
        records = runfile.read(disk / "run").records
        sent = len(server.log)
    assert len(records) == sent


def wait_until(file: Path) -> None:
    """Wait until a file with reserved space exists."""
    limit_s = time.monotonic() + PATIENCE_S
    while not (file.exists() and file.stat().st_blocks) and time.monotonic() < limit_s:
        time.sleep(0.02)
    assert file.exists()
