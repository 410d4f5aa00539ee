"""What this machine's error bar is: bursts against the script clock, and the memory of what they showed.

The simulated server runs in a process of its own and logs the instant of every send; the burst is the command itself,
in a process of its own too, so that what is measured is what a run does. What the numbers mean is `analysis`'s.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen import host
from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED, CalibrationError

if TYPE_CHECKING:
    from analysis.client import StampComparison

TTFT_S = 0.5
"""True time to the first token: the whole burst is out and being listened to by then."""
INPUT_TOKENS = 512
ITL_S_MIN = 0.002
ITL_S_MAX = 0.2
"""How close together and how far apart `search` puts tokens."""
SAME_MACHINE = ("hostname", "kernel", "cpu", "python")
"""Facts of the host that make it another machine, as far as stamps go."""


@dataclass(frozen=True, slots=True)
class Point:
    """One burst: n streams of so many tokens, one event each, so far apart."""

    server: str
    n: int
    itl_s: float
    output_tokens: int
    workers: int
    stamps: str = "kernel"


class Calibration(msgspec.Struct, kw_only=True, frozen=True):
    """What was found about one machine."""

    made_at: str
    """RFC 3339, UTC."""
    version: str
    """Of loadgen."""
    load: Point
    """What the errors are of."""
    errors: dict[str, dict[str, Any]]
    """An analysis.client.StampComparison by kind of stamps, `kernel` or `user`."""
    events_per_s: float
    """The largest rate seen at which TTFT was exact (analysis.client.EXACT_S); 0 for none."""
    limited_by: str
    """What kept it from being larger."""


def drive(point: Point, folder: Path) -> tuple[Path, Path]:
    """Run the burst in `folder`, which must exist and be empty. The run's folder and the server's log.

    Raises CalibrationError when the burst did not take place, servers.simulated.StartError.
    """
    from servers.simulated.config import SimulatedConfig
    from servers.simulated.server import spawn

    host.allow_open_files(point.n)  # the child inherits the limit
    run, log = folder / "run", folder / "sim.jsonl"
    config = SimulatedConfig(
        server=point.server,
        ttft_s=TTFT_S,
        itl_s=point.itl_s,
        max_concurrent_requests=point.n,
        max_model_len=max(4096, INPUT_TOKENS + point.output_tokens),
        log=log,
    )
    with spawn(config) as url:
        values = {"url": url, "out": run, "input-tokens": INPUT_TOKENS} | {
            name.replace("_", "-"): value for name, value in asdict(point).items() if name != "itl_s"
        }
        options = [f"--{name}={value}" for name, value in values.items()]
        command = [sys.executable, "-m", "loadgen", "burst", "--no-report", "--quiet", *options]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own command
    if ended.returncode not in (EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_CLIENT_LIMITED):
        raise CalibrationError(f"the burst did not take place: {ended.stderr.strip()[-1000:]}")
    return run, log


def search(
    first: StampComparison,
    point: Point,
    measure: Callable[[Point], StampComparison],
    more_time: Callable[[], bool],
) -> tuple[StampComparison | None, str]:
    """The fastest burst that was exact, and what was in the way of a faster one: `client`, `server` or `time`.

    From `first`, which is of `point`, tokens come twice as close as long as that is exact and the server keeps up. When
    `first` is not exact they come twice as far apart until it is.
    """
    fastest, last = first if first.exact else None, first
    faster = first.exact
    while last.server_kept_up or not faster:
        point = replace(point, itl_s=point.itl_s * (0.5 if faster else 2.0))
        if not (more_time() and ITL_S_MIN <= point.itl_s <= ITL_S_MAX):
            return fastest, "time"
        last = measure(point)
        if not faster and last.exact:
            return last, "client"
        if faster and not last.exact:
            return fastest, "client"
        if fastest is not None and last.events_per_s > fastest.events_per_s:
            fastest = last
    return fastest, "server"


def remember(found: Calibration, machine: Mapping[str, object]) -> Path:
    """Keep what was found about this machine (host.facts) beside what is known of others; the file. Raises OSError."""
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    known = {**_known(lambda _: None), _key(machine): msgspec.Raw(msgspec.json.encode(found))}
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(known)) + b"\n")
    fresh.replace(file)  # at once: a run that starts meanwhile reads the old one or the new one
    return file


def recall(machine: Mapping[str, object], say: Callable[[str], None]) -> Calibration | None:
    """What is known of this machine (host.facts), or None. `say` gets a line when that cannot be read."""
    raw = _known(say).get(_key(machine))
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Calibration)
    except msgspec.DecodeError as error:
        say(f"the calibration of this machine is left out ({error}); run `loadgen calibrate` again")
        return None


def _known(say: Callable[[str], None]) -> dict[str, msgspec.Raw]:
    """Every machine's calibration. A file that holds none is as good as no file, and said to be so."""
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, msgspec.Raw])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, RecursionError) as error:
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
    return ", ".join(str(machine.get(name, "")) for name in SAME_MACHINE)
