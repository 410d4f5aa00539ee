"""SIGKILL at random instants: what was sent is accounted for, and nothing stays behind.

    PYTHONPATH=. python tests/endurance/kills.py [SEED] [KILLS]

Killed are a worker process, the command that coordinates them, both at once, the simulated server, and in a run over
machines the master and a machine. This process is the reaper of all orphans, so that none can hide.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from loadgen.analysis.run import runfile
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn_process
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.workloads.request import number_of_wire_id
from tests.support.command import in_process, prepare_forks, start, summary_of

PR_SET_CHILD_SUBREAPER = 36
LOCAL = ("worker", "coordinator", "both", "server")
SEVERAL = ("master", "machine")
REQUESTS, WORKERS = 60, 2
END_S = 30.0
SILENCE_S = 25.0
"""After 20 s a master that is silent is gone (loadgen.distributed.locust_process)."""


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    with suppress(OSError):
        return [int(each) for each in found.read_text().split()]
    return []


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def names(folder: Path | str) -> set[str]:
    return {each.name for each in Path(folder).iterdir()}


def shared_memory(before: set[str]) -> list[str]:
    """What processes of Python that are gone left in /dev/shm."""
    new = (each for each in names("/dev/shm") - before if each.startswith(("pym-", "psm_", "sem.")))
    return [each for each in new if not (pid := each.split("-")[1:2]) or not Path(f"/proc/{pid[0]}").exists()]


def ended(own: set[int]) -> list[str]:
    """Wait until nothing is left below this process but its `own`; the command lines of what is."""
    deadline = time.monotonic() + END_S
    while True:
        left = [pid for pid in children(os.getpid()) if pid not in own]
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not left:
            return []
        if time.monotonic() > deadline:
            said = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in left]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return said
        time.sleep(0.02)


def logged(log: Path) -> set[int]:
    """The requests that the server says it has received."""
    lines = (log.read_bytes() if log.exists() else b"").rpartition(b"\n")[0].splitlines()
    told = (msgspec.json.decode(line, type=LogLine) for line in lines if not line.startswith(b'{"summary"'))
    return {number_of_wire_id(each.request_id) for each in told if each.request_id}


def accounts(folder: Path, received: set[int], victim: str) -> Iterator[str]:
    """What does not add up in what is left of a run."""
    if not (folder / "run" / "run.jsonl").exists():
        if received:
            yield f"no run file, and {len(received)} requests were sent"
        return
    run = runfile.read(folder / "run")
    ids = [record.id for record in run.records]
    if len(ids) != len(set(ids)) or not set(ids) <= set(range(REQUESTS)):
        yield "a request has two records, or one that was never planned"
    code, _, err = in_process(folder, "report", "run")
    if code or "Traceback" in err:
        yield f"report: exit code {code}: {err[-300:]}"
        return
    counts = summary_of(folder)["requests"]
    named = [counts[each] for each in ("complete", "truncated", "failed", "dropped", "unrecorded")]
    if sum(map(int, map(str, named))) != REQUESTS:
        yield f"{REQUESTS} requests are not {counts}"
    missing = received - set(ids)
    if missing and (victim in {"worker", "coordinator", "server"} or len(missing) > int(str(counts["unrecorded"]))):
        yield f"the server received {len(missing)} requests that have no record"
    if victim in {"worker", "server"} and (run.footer is None or len(ids) != REQUESTS):
        yield f"the run went on, and has {len(ids)} records and {run.footer}"


def begun(folder: Path, url: str, shape: list[str], *, several: bool) -> list[subprocess.Popen[str]]:
    """The command that is to run, or a master and its machine."""
    words = ["--server", "tgi", "--url", url, "--n", str(REQUESTS), "--output-tokens", "16", "--input-tokens", "8"]
    words += ["--workers", str(WORKERS), *shape]
    command = "run" if shape else "burst"
    if not several:
        return [start(folder, *words, command=command)]
    secret = {"LOADGEN_TOKEN": "a token of the tests"}
    bind = ["--distributed", "--expect-workers", "1", "--bind", "127.0.0.1:0"]
    master = start(folder, *words, *bind, command=command, **secret)
    assert master.stdout is not None
    line = next((line for line in master.stdout if "waiting for" in line), "")
    assert line, f"the master did not listen: {master.communicate()[1][-400:]}"
    (folder / "machine").mkdir()
    address = f"127.0.0.1:{line.rpartition(':')[2].strip()}"
    return [master, start(folder / "machine", "--master", address, command="worker", **secret)]


def complaints(process: subprocess.Popen[str], codes: set[int], *, several: bool) -> Iterator[str]:
    """Wait for its end, and say what is wrong with it."""
    if several:  # the other side may wait for a new one, for minutes: whoever sits there ends it
        with suppress(subprocess.TimeoutExpired):
            process.wait(SILENCE_S)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        yield "it did not end"
        process.kill()
        _, err = process.communicate()
    if "Traceback" in err:
        yield f"traceback: {err[-600:]}"
    if process.returncode not in codes:
        yield f"exit code {process.returncode}: {err[-300:]}"


def killed(folder: Path, victim: str, draw: random.Random) -> tuple[str, list[str]]:
    """One run and one kill: when it hit, if it did, and what was lost."""
    before, log, several = names("/dev/shm"), folder / "log.jsonl", victim in SEVERAL
    shape = [] if draw.random() < 0.5 else ["--arrivals", "constant:80"]
    late = victim == "worker" or draw.random() < 0.7  # or most kills would hit nothing but the start
    config = SimulatedConfig(server="tgi", ttft_s=0.05, itl_s=0.02, log=log)
    with spawn_process(config) as (url, server):
        own = {server, *children(os.getpid())}
        processes = begun(folder, url, shape, several=several)
        of, loading = processes[victim == "machine"], processes[-1]
        while late and loading.poll() is None and len([*descendants(loading.pid)]) < WORKERS:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 6.0 if several and not late else 1.5))
        targets = {"worker": children(of.pid)[:1], "both": [of.pid, *descendants(of.pid)], "server": [server]}
        hit = [pid for pid in targets.get(victim, [of.pid]) if of.poll() is None]
        for pid in hit:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        codes = {0, 1, 2, 3, 5, 130, -9} if hit else {0, 5}
        lost = [each for process in processes for each in complaints(process, codes, several=several)]
        lost += [f"left running: {each}" for each in ended(own)]
    received = logged(log)
    lost += accounts(folder, received, victim)
    lost += [f"left in shared memory: {each}" for each in shared_memory(before)]
    known = {"run", "machine", "log.jsonl", "runs", "llm-loadgen"}  # the last one is the cache of vocabularies
    lost += [f"left: {each}" for each in names(folder) if each not in known and not each.startswith(("loadgen", "."))]
    return ("with requests sent" if received else "before the first request") if hit else "", lost


def kills(seed: str, number: int, victims: tuple[str, ...] = ()) -> tuple[Counter[str], list[str]]:
    """So many kills: whom they hit and when, and what was lost. What had ended by itself was not killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or our Ctrl-C is ignored by what a background job starts
    hits, lost = Counter[str](), list[str]()
    for index in range(3 * number):
        if hits.total() == number:
            break
        draw = random.Random(f"{seed}/{index}")
        victim = victims[index % len(victims)] if victims else (LOCAL * 12 + SEVERAL)[index % 50]
        with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
            previous, tempfile.tempdir = tempfile.tempdir, scratch  # theirs too: nothing may be left in it
            try:
                folder = Path(scratch, "of")
                folder.mkdir()
                when, found = killed(folder, victim, draw)
            finally:
                tempfile.tempdir = previous
            found += [f"left in the temporary folder: {each}" for each in names(scratch) - {"of"}]
        hits.update([f"{victim}, {when}"] if when else [])
        lost += [f"{index}, {victim}: {each}" for each in found]
        if found:
            print(*lost[-len(found) :], sep="\n", flush=True)
    return hits, lost


def main(seed: str = "7", number: str = "200") -> None:
    """Kills, survived, lost."""
    hits, lost = kills(seed, int(number))
    print(*(f"{what:>38}: {times}" for what, times in sorted(hits.items())), sep="\n")
    print(
        f"{hits.total()} kills, {hits.total() - len({each.split(',')[0] for each in lost})} survived, {len(lost)} lost"
    )
    sys.exit(bool(lost))


if __name__ == "__main__":
    prepare_forks()
    main(*sys.argv[1:])
