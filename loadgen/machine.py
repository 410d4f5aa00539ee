"""This machine: facts for the header, the limit on open files, and the result of its last `loadgen calibrate`."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadgen.errors import OpenFilesError, PortsError
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.wire.local_limits import port_range

FILES_RESERVED = 64
"""Open files a process needs for itself: libraries, pipes, the run file, the event loop."""
FILES_PER_WORKER = 4
"""Open files that the coordinator needs for each worker, and that each worker inherits."""
IDENTITY_FACTS = ("hostname", "kernel", "cpu", "python")
"""Facts of the host that make it another machine, as far as stamps go."""


def facts() -> dict[str, object]:
    """hostname, os, kernel, python, cpu, cores (those this process may use), memory_bytes."""
    file = Path("/proc/cpuinfo")  # some sandboxes have none
    about = file.read_text(encoding="utf-8", errors="replace").splitlines() if os.access(file, os.R_OK) else []
    models = (line.partition(":")[2].strip() for line in about if line.startswith("model name"))
    return {
        "hostname": platform.node(),
        "os": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": next(models, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def is_loopback(name: str) -> bool:
    """Whether a host of this name or address is reached from this machine only."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def allow_open_files(sockets: int) -> None:
    """Raise the limit of open files (RLIMIT_NOFILE) as far as `sockets` need. Raises OpenFilesError when the hard limit
    is too low and may not be raised."""
    needed = sockets + FILES_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    enough = hard >= needed or hard == resource.RLIM_INFINITY
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard if enough else needed))
    except (ValueError, OSError) as error:
        raise OpenFilesError(
            f"{sockets} connections in one process need {needed} open files; this machine allows {hard}. "
            "Nothing was sent.",
            f"Raise the limit (ulimit -Hn {needed}, as root), or share the burst: --workers {-(-needed // hard) + 1}",
        ) from error


def check_ports(at_once: int, addresses: int) -> None:
    """Raise PortsError if this machine has too few local ports for `at_once` requests to so many addresses."""
    first, last = port_range()
    allowed = (last - first + 1) * addresses
    if at_once > allowed:
        raise PortsError(
            f"{at_once:,} requests at once need as many connections; net.ipv4.ip_local_port_range ({first} to {last}) "
            f"allows {allowed:,} to this server. Nothing was sent.",
            "Widen it: sysctl -w net.ipv4.ip_local_port_range='1024 65535'. Or have fewer requests in flight.",
        )


class CalibrationPoint(msgspec.Struct, frozen=True):
    """One burst: n streams of so many tokens, one event each, so far apart."""

    server: str
    n: int
    itl_s: float
    output_tokens: int
    workers: int
    stamps: str = "auto"


class Calibration(msgspec.Struct, kw_only=True, frozen=True):
    """What was found about one machine."""

    made_at: str
    """RFC 3339, UTC."""
    version: str
    """Of loadgen."""
    load: CalibrationPoint
    """What the errors are of."""
    errors: dict[str, dict[str, Any]]
    """An loadgen.analysis.client_health.StampComparison by kind of stamps, `ring`, `socket` or `user`."""
    events_per_s: float
    """The largest rate seen at which TTFT was exact (loadgen.analysis.client_health.EXACT_TTFT_ERROR_S); 0 for none."""
    limited_by: str
    """What kept it from being larger."""


def save_calibration(found: Calibration, machine: Mapping[str, object]) -> Path:
    """Keep what was found about this machine (host.facts) beside what is known of others; the file. Raises OSError."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {**_known(lambda _: None), _key(machine): msgspec.Raw(msgspec.json.encode(found))}
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(known)) + b"\n")
    fresh.replace(file)  # at once: a run that starts meanwhile reads the old one or the new one
    return file


def load_calibration(machine: Mapping[str, object], say: Callable[[str], None]) -> Calibration | None:
    """What is known of this machine (host.facts), or None. `say` gets a line when that cannot be read."""
    raw = _known(say).get(_key(machine))
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Calibration)
    except DECODE_ERRORS as error:
        say(f"the calibration of this machine is left out ({error}); run `loadgen calibrate` again")
        return None


def _known(say: Callable[[str], None]) -> dict[str, msgspec.Raw]:
    """Every machine's calibration. A file that holds none is as good as no file, and said to be so."""
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, msgspec.Raw])
    except FileNotFoundError:
        return {}
    except (OSError, *DECODE_ERRORS) as error:
        say(f"calibrations of earlier days are left out ({error}); `loadgen calibrate` makes a new one")
        return {}


def _file() -> Path:
    """By the XDG Base Directory Specification, where a relative path counts as none. Raises OSError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home
        raise OSError(f"there is no folder to remember in: {error}") from error
    return folder / "llm-loadgen" / "calibration.json"


def _key(machine: Mapping[str, object]) -> str:
    return ", ".join(str(machine.get(name, "")) for name in IDENTITY_FACTS)
