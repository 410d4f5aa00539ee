"""Describes the machine of a benchmark, and assigns its cores to server and client."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOOK_S = 2.0


def cores() -> tuple[int, tuple[int, ...]]:
    """Return the core of the server and the cores of the client: the first and the second usable core.

    If there is only one core, server and client share it.
    """
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], (usable[1] if len(usable) > 1 else usable[0],)


@contextmanager
def pinned(*numbers: int) -> Iterator[None]:
    """Pin this process to these cores while the context is open. Processes that are started in it inherit the cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def described() -> str:
    """Return one line about the machine: cores, processor, kernel, Python version and load average."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    python = platform.python_version()
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({name}), Linux {platform.release()}, Python {python}, load average {load:.2f}"


def watch_others() -> Callable[[], float]:
    """Start to measure the CPU use of other processes.

    Return a function that returns the average number of cores that other processes have used since. This process, and
    its children that have been waited for, are not counted.
    """
    start_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()

    def others() -> float:
        used_s = (_busy_s() - busy_s) - (_own_s() - own_s)
        return max(0.0, used_s) / max(time.monotonic() - start_s, 1e-9)

    return others


def wait_for_quiet(cores: float, limit_s: float) -> None:
    """Wait until other processes use less than `cores` cores, or until `limit_s` seconds have passed."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        others = watch_others()
        time.sleep(_LOOK_S)
        if others() < cores:
            return


def _busy_s() -> float:
    """Return the CPU time of the whole machine that was neither idle nor waiting for I/O (proc(5), /proc/stat), in
    seconds.
    """
    user, nice, system, _, _, interrupts, soft, *_ = map(int, _lines("/proc/stat")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _lines(file: str) -> list[str]:
    return Path(file).read_text("utf-8").splitlines()
