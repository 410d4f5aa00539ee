"""Runs one command, and reports its time, CPU time and memory.

This is a separate script, so that the CPU time of other Python code is not counted.

    python keeper.py RESULT.json CORE,CORE SECONDS yes|no COMMAND...

All processes of the command run on the given cores. Processes that outlive their parents are adopted, waited for and
counted. The CPU time is the kernel's total for all child processes that have ended, including their start-up.

With `yes`, memory is sampled ten times a second: the sum of the proportional set sizes of all processes. A page that
four processes share counts as a quarter in each. Sampling uses CPU time on the same cores, so the CPU time of such a
run is meaningless.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""prctl(2): a signal when the parent dies; orphans below this process become its children, and not init's."""
_SAMPLE_S = 0.1
_STRAGGLERS_S = 5.0
"""Maximum time for which child processes may run after the command itself has ended, in s."""
_KIB = 1024


def main(result: str, cores: str, limit_s: str, memory: str, *command: str) -> None:
    """Run the command and write its resource usage to the file `result`, as JSON.

    The keys are `launched_ns` (CLOCK_REALTIME), `wall_s`, `cpu_s`, `exit_code`, `timed_out` and `peak_bytes`.
    """
    _die_with_parent()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    peak = Peak() if memory == "yes" else None
    launched_ns, start_s = time.time_ns(), time.monotonic()
    with Path("output.txt").open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    timed_out = _wait(child, float(limit_s))
    wall_s = time.monotonic() - start_s
    _reap_the_rest()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = {
        "launched_ns": launched_ns,
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "exit_code": child.returncode,
        "timed_out": timed_out,
        "peak_bytes": peak.stop() if peak else None,
    }
    Path(result).write_text(json.dumps(facts), "utf-8")


class Peak:
    """Measures the peak memory of all descendants of this process, by sampling in a thread."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop sampling. Return the peak memory in bytes."""
        self._ended.set()
        self._thread.join()
        return self._bytes

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._bytes = max(self._bytes, sum(map(_proportional_bytes, descendants(os.getpid()))))


def descendants(process: int) -> Iterator[int]:
    """Yield the ids of all current descendants of a process. Processes that end during the search may be missed."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text("ascii").split()):
                yield child
                yield from descendants(child)


def _proportional_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    return 0


def _die_with_parent() -> None:
    """Kill all child processes when this process receives SIGTERM or when its parent dies."""

    def end(*_: object) -> None:
        _kill_all()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for the command. Kill it after `limit_s` seconds. Return True if it was killed."""
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        _kill_all()
        child.wait()
        return True
    return False


def _reap_the_rest() -> None:
    timer = threading.Timer(_STRAGGLERS_S, _kill_all)
    timer.start()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    timer.cancel()


def _kill_all() -> None:
    for process in list(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
