"""What this machine is, and what it allows: facts for the header, open files, room on the disk."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import shutil
from pathlib import Path

from loadgen.errors import OpenFilesError, OutputError

FILES_BESIDE_SOCKETS = 64
"""Open files a process needs for itself: libraries, pipes, the run file, the event loop."""


def facts() -> dict[str, object]:
    """hostname, os, kernel, python, cpu, cores (those this process may use), memory_bytes."""
    return {
        "hostname": platform.node(),
        "os": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def is_loopback(name: str) -> bool:
    """Whether a host of this name or address is reached from this machine only."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def allow_open_files(sockets: int) -> int:
    """Raise this process's open-file limit (RLIMIT_NOFILE) as far as `sockets` need; returns the limit.

    Raises OpenFilesError before anything was sent when the hard limit is too low and may not be raised.
    """
    needed = sockets + FILES_BESIDE_SOCKETS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return soft
    if hard >= needed or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return needed
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
    except (ValueError, PermissionError, OSError) as error:
        raise OpenFilesError(
            f"{sockets} connections in one process need {needed} open files; this machine allows {hard}. "
            "Nothing was sent.",
            f"Raise the limit (ulimit -Hn {needed}, as root), or share the burst: --workers {-(-needed // hard) + 1}",
        ) from error
    return needed


def make_folder(folder: Path, bytes_needed: int) -> None:
    """Make the run's folder, which must be new or empty, on a disk with that much room. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OutputError(
                f"{folder} exists and is not empty.", "Name a new folder with --out: no run is overwritten."
            )
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise OutputError(
            f"cannot make {folder}: {error.strerror}", "Name a folder on a disk that can be written with --out."
        ) from error
    if free < bytes_needed:
        raise OutputError(
            f"{folder}: this run needs about {bytes_needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free. "
            "Nothing was sent.",
            "Free some space, or name a folder on another disk with --out.",
        )


def _cpu_model() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
