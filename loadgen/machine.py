"""This machine: facts for the run's header, limits on files and ports, and the last result of `loadgen calibrate`."""

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
"""Number of file descriptors that a process needs in addition to its sockets: libraries, pipes, the run file, the event
loop."""
FILES_PER_WORKER = 4
"""Number of file descriptors that the coordinator needs for each worker. Each worker inherits them."""
IDENTITY_FACTS = ("hostname", "kernel", "cpu", "python")
"""Facts that identify a machine for calibration. A change of any of them can change the error of timestamps."""


def facts() -> dict[str, object]:
    """Return hostname, os, kernel, python, cpu, cores and memory_bytes of this machine.

    `cores` counts only the cores that this process may use.
    """
    cpuinfo = Path("/proc/cpuinfo")  # some sandboxes do not have it
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if os.access(cpuinfo, os.R_OK) else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
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
    """Return True if a host name or address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def allow_open_files(sockets: int) -> None:
    """Raise the limit on open files (RLIMIT_NOFILE) if this process needs more open files for `sockets` sockets.

    Raises OpenFilesError if the system does not permit the higher limit.
    """
    needed = sockets + FILES_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    enough = hard >= needed or hard == resource.RLIM_INFINITY
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard if enough else needed))
    except (ValueError, OSError) as error:
        raise OpenFilesError(
            f"{sockets} connections in one process need {needed} open files, but this machine allows only {hard}. "
            "Nothing was sent.",
            f"Raise the limit (ulimit -Hn {needed}, as root) or use more processes: --workers {-(-needed // hard) + 1}",
        ) from error


def check_ports(concurrency: int, addresses: int) -> None:
    """Raise PortsError if this machine has too few local ports for `concurrency` requests in flight.

    `addresses` is the number of addresses of the server. The kernel can use every local port once for each address.
    """
    first, last = port_range()
    allowed = (last - first + 1) * addresses
    if concurrency > allowed:
        raise PortsError(
            f"{concurrency:,} concurrent requests need {concurrency:,} connections, but "
            f"net.ipv4.ip_local_port_range ({first} to {last}) allows only {allowed:,} to this server. "
            "Nothing was sent.",
            "Widen the range: sysctl -w net.ipv4.ip_local_port_range='1024 65535'. Or reduce the concurrency.",
        )


class CalibrationPoint(msgspec.Struct, frozen=True):
    """The load of one burst of `loadgen calibrate`: `n` streams that start together.

    Each stream has `output_tokens` tokens. They come from a simulated server, which sends one token every `itl_s`
    seconds, each in a separate event. `server` is the simulated backend, such as `vllm`. The client has `workers`
    worker processes, and takes its timestamps from the source `stamps`.
    """

    server: str
    n: int
    itl_s: float
    output_tokens: int
    workers: int
    stamps: str = "auto"
    endpoint: str | None = None  # None: the native endpoint of the server


class Calibration(msgspec.Struct, kw_only=True, frozen=True):
    """The timestamp errors and the event rate that `loadgen calibrate` measured on one machine."""

    made_at: str
    """Time of the calibration (RFC 3339, UTC)."""
    version: str
    """Version of loadgen."""
    load: CalibrationPoint
    """Load under which the errors were measured."""
    errors: dict[str, dict[str, Any]]
    """The timestamp errors, as a loadgen.analysis.calibration.StampComparison per timestamp source: `ring`, `socket` or
    `user`."""
    events_per_s: float
    """Highest measured event rate in 1/s at which TTFT was exact, or 0 if TTFT was exact at no rate.

    TTFT is exact if the p99 of its error is less than loadgen.analysis.calibration.EXACT_TTFT_ERROR_S.
    """
    limited_by: str
    """Reason why no higher event rate was reached: `client`, `server` or `time`."""


def save_calibration(calibration: Calibration, machine: Mapping[str, object]) -> Path:
    """Save the calibration of a machine, and return the path of the calibration file.

    `machine` holds the machine's facts, as `facts` returns them. The calibration file holds the calibrations of all
    machines that share this home directory. Raises OSError if the file cannot be written.
    """
    file = _calibration_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    calibrations = _load_all(lambda _: None) | {_key(machine): msgspec.Raw(msgspec.json.encode(calibration))}
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(calibrations)) + b"\n")
    temporary.replace(file)  # atomic: a run that starts now reads either the old or the new file
    return file


def load_calibration(machine: Mapping[str, object], say: Callable[[str], None]) -> Calibration | None:
    """Return the saved calibration of a machine, or None if there is none.

    `machine` holds the machine's facts, as `facts` returns them. If a saved calibration cannot be read, `say` is called
    with a message, and the result is None.
    """
    raw = _load_all(say).get(_key(machine))
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Calibration)
    except DECODE_ERRORS as error:
        say(f"ignoring the calibration of this machine, which cannot be read ({error}); run `loadgen calibrate` again")
        return None


def _load_all(say: Callable[[str], None]) -> dict[str, msgspec.Raw]:
    """Return the saved calibrations by machine, or an empty dict if there is no calibration file.

    If the file is damaged, return an empty dict and call `say` with a message.
    """
    try:
        return msgspec.json.decode(_calibration_file().read_bytes(), type=dict[str, msgspec.Raw])
    except FileNotFoundError:
        return {}
    except (OSError, *DECODE_ERRORS) as error:
        say(f"ignoring saved calibrations, which cannot be read ({error}); run `loadgen calibrate` again")
        return {}


def cache_folder() -> Path:
    """Return the folder in which a run stores data for later runs.

    It is a subfolder of XDG_CACHE_HOME, or of ~/.cache if this variable is not set to an absolute path (XDG Base
    Directory Specification). Raises OSError if the user has no home directory.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:  # the user has no home
        raise OSError(f"there is no cache folder: {error}") from error
    return folder / "llm-loadgen"


def _calibration_file() -> Path:
    """Return the path of the calibration file. Raises OSError if the user has no home directory."""
    return cache_folder() / "calibration.json"


def _key(machine: Mapping[str, object]) -> str:
    return ", ".join(str(machine.get(name, "")) for name in IDENTITY_FACTS)
