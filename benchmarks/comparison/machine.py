"""Where the figures come from: the machine, and how its cores are shared out."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cores() -> tuple[int, tuple[int, ...]]:
    """The server's core and the client's: the first and the second, or the same where there is one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], (usable[1] if len(usable) > 1 else usable[0],)


def described() -> str:
    """One line: processor, kernel, Python, and how busy it is."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    python = platform.python_version()
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores ({name}), Linux {platform.release()}, Python {python}, load average {load:.2f}"


def _lines(file: str) -> list[str]:
    return Path(file).read_text("utf-8").splitlines()
