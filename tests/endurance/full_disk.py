"""Disks that fill up at random instants: a sentence, the documented exit code, and what was received stays readable.

    PYTHONPATH=. python tests/endurance/full_disk.py [SEED] [CASES]

A small tmpfs is filled where this may mount one (as root). Elsewhere, and in every other case, no file of the command's
processes may grow any more (RLIMIT_FSIZE), which they see as an error of the same kind.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn_process
from tests.endurance.kills import descendants, logged
from tests.support.command import prepare_forks, start
from tests.support.ui import environment

REQUESTS = 60
TMPFS_BYTES = 2 << 20
MATRIX = """
name = "full"
servers = ["tgi"]
hosts = [{{ name = "here", platform = "none", urls = {{ tgi = "{url}" }} }}]
models = ["llama-2-7b"]
launch = "none"
repeats = 2
workloads = [{{ name = "burst", n = 30, input_tokens = 8, output_tokens = 16 }}]
"""
KINDS = ("burst", "run", "report", "csv", "parquet", "compare", "matrix", "ui")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether `folder` is a tmpfs of its own."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, free: int) -> None:
    """All but about so many bytes."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while (room := shutil.disk_usage(folder).free - free) > 0:
            file.write(b"x" * min(room, 65_536))


def words_of(kind: str, url: str) -> tuple[str, list[str], list[str]]:
    """The command, its words, and the files that it makes of a run (whole, or not there)."""
    common = ["--server", "tgi", "--url", url, "--input-tokens", "8", "--output-tokens", "16"]
    loads = {
        "burst": ["--n", str(REQUESTS)],
        "run": ["--n", str(REQUESTS), "--arrivals", "constant:60", "--workers", "2"],
        "ui": ["--users", "4", "--run-time", "2s"],
    }
    if kind in loads:
        return kind, [*common, *loads[kind]], ["run/summary.json"]
    others = {
        "report": ["report", "good"],
        "csv": ["export", "good", "--csv", "tables"],
        "parquet": ["export", "good", "--parquet", "tables"],
        "compare": ["compare", "good", "good2", "--html", "compare.html"],
        "matrix": ["matrix", "plan.toml", "--out", "cells"],
    }
    return "", others[kind], ["good/summary.json", "cells/matrix.json"]


def begun(folder: Path, kind: str, url: str) -> tuple[subprocess.Popen[str], list[str]]:
    """The command, started, and the files of results that it may make."""
    command, words, files = words_of(kind, url)
    if kind in {"burst", "run"}:
        return start(folder, *words, command=command, report=True, TMPDIR=tempfile.gettempdir()), files
    if kind == "matrix":
        (folder / "plan.toml").write_text(MATRIX.format(url=url))
    words = [command, "--headless", "--out", "run", *words] if kind == "ui" else words
    pipe, own = subprocess.PIPE, [sys.executable, "-m", "loadgen", *words]
    variables = environment(folder) | {"TMPDIR": tempfile.gettempdir()}
    return subprocess.Popen(own, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=variables), files


def filled(folder: Path, kind: str, draw: random.Random, url: str, log: Path, *, mounted: bool) -> Iterator[str]:
    """What was lost when the disk of this command filled up."""
    process, files = begun(folder, kind, url)
    time.sleep(draw.uniform(0, {"ui": 6.0, "matrix": 4.0, "burst": 1.5, "run": 2.5}.get(kind, 1.5)))
    room = draw.choice((0, 0, 500, 5_000, 20_000, 60_000))
    if mounted:
        fill(folder, room)
    for pid in [] if mounted else [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        yield f"it did not end: {process.communicate()[1][-400:]}"
        return
    (folder / "filler").unlink(missing_ok=True)
    if "Traceback" in err or "Exception ignored" in err:
        yield f"traceback: {err[-1500:]}"
    if process.returncode not in {0, 2, 5} or (process.returncode == 2) != ("loadgen: " in err):
        yield f"exit code {process.returncode}: {err[-300:]}"
    yield from (f"{name} is cut off" for name in files if not _whole(folder / name))
    if left := [str(each) for each in folder.rglob("*.part")]:
        yield f"left: {left}"
    yield from kept(folder, logged(log) if kind in {"burst", "run"} else set(), err)


def _whole(file: Path) -> bool:
    try:
        return not file.exists() or msgspec.json.decode(file.read_bytes()) is not None
    except msgspec.DecodeError:
        return False


def kept(folder: Path, received: set[int], err: str) -> Iterator[str]:
    """What was sent and is neither in the run nor in the file that the message names."""
    header = folder / "run" / "run.jsonl"
    if not header.exists() or b"\n" not in header.read_bytes():
        if received:
            yield f"no run file, and {len(received)} requests were sent"
        return
    for rescued in sorted(Path(tempfile.gettempdir()).glob("loadgen-*-part-*.jsonl")):
        part = folder / "run" / rescued.name[rescued.name.rindex("part-") :]
        with part.open("ab") as file:
            file.write(rescued.read_bytes())
        rescued.unlink()
        if str(rescued) not in err:
            yield f"{rescued.name} is named nowhere"
    missing = received - {record.id for record in runfile.read(folder / "run").records}
    if missing and "cannot write all lines" not in err:
        yield f"{len(missing)} of {len(received)} requests that the server received are in no file"


def full_disks(
    seed: str, number: int, kinds: tuple[str, ...] = KINDS, *, mounts: bool = True
) -> tuple[Counter[str], list[str]]:
    """So many full disks: how many of which kind, and what was lost."""
    cases, lost = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="full-") as scratch, contextlib.ExitStack() as held:
        previous, tempfile.tempdir = tempfile.tempdir, scratch
        held.callback(setattr, tempfile, "tempdir", previous)
        good = Path(scratch, "good")
        with spawn_process(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.01)) as (url, _):
            good.mkdir()
            words = words_of("burst", url)[1]
            start(good, *words).communicate(timeout=60)
        for index in range(number):
            draw, kind = random.Random(f"{seed}/{index}"), kinds[index % len(kinds)]
            folder, log = Path(scratch, "disk"), Path(scratch, f"log-{index}.jsonl")
            folder.mkdir()
            with (
                small_disk(folder) if mounts and index // len(kinds) % 2 else contextlib.nullcontext(False) as mounted,
                spawn_process(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.01, log=log)) as (url, _),
            ):
                for name in ("good", "good2"):
                    shutil.copytree(good / "run", folder / name)
                found = list(filled(folder, kind, draw, url, log, mounted=mounted))
            shutil.rmtree(folder)
            cases[f"{kind}, {'a full tmpfs' if mounted else 'no file may grow'}"] += 1
            lost += [f"{index}, {kind}: {each}" for each in found]
            if found:
                print(*lost[-len(found) :], sep="\n", flush=True)
    return cases, lost


def main(seed: str = "7", number: str = "96") -> None:
    """Cases, survived, lost."""
    cases, lost = full_disks(seed, int(number))
    print(*(f"{what:>32}: {times}" for what, times in sorted(cases.items())), sep="\n")
    bad = {each.split(",")[0] for each in lost}
    print(f"{cases.total()} full disks, {cases.total() - len(bad)} survived, {len(lost)} lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    prepare_forks()
    main(*sys.argv[1:])
