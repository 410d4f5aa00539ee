"""`loadgen calibrate`: what is this machine's error bar?

The simulated server runs in a process of its own and logs the instant of every send; the burst is the command itself,
in a process of its own too, so that what is measured is what a run does. What the numbers mean is `analysis`'s.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Annotated

from msgspec import json, to_builtins
from msgspec.structs import asdict, replace
from typer import Option

from loadgen.cli.options import seconds
from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED, LoadgenError
from loadgen.machine import Calibration, CalibrationPoint, allow_open_files, facts, save_calibration
from loadgen.servers.backends import join_or, simulated_backends

if TYPE_CHECKING:
    from loadgen.analysis.client_health import StampComparison

SEARCH_S = 45.0
"""No burst begins later than this, so that the whole command ends after about a minute."""
TTFT_S = 0.5
"""True time to the first token: the whole burst is out and being listened to by then."""
INPUT_TOKENS = 512
ITL_S_MIN = 0.002
ITL_S_MAX = 0.2
"""How close together and how far apart `search` puts tokens."""

PACKET_RING_HELP = """\
No packet ring: tokens that are read together share a stamp. It needs Linux and CAP_NET_RAW, for example
  sudo loadgen ...                                      root has it
  docker run --user 0 ...                               Docker grants it to root
  sudo setcap cap_net_raw+ep "$(readlink -f PYTHON)"    for all who run this Python (.venv/bin/python)"""


def calibrate(
    server: Annotated[str, Option(help=f"Whose protocol: {join_or(simulated_backends())}.")] = "vllm",
    n: Annotated[int, Option("--n", help="Streams, all at once.")] = 1000,
    itl_s: Annotated[
        float, Option("--itl", parser=seconds, metavar="T", help="Time between two tokens of a stream.")
    ] = 0.02,
    output_tokens: Annotated[int, Option(min=2, help="Tokens per stream.")] = 64,
    workers: Annotated[int, Option(help="Processes that share the burst.")] = 1,
    quick: Annotated[bool, Option("--quick", help="This load only, no search for the largest event rate.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print what was found as JSON and nothing else.")] = False,
) -> None:
    """Measure this machine's error bar, against the simulated server's own log of when it sent what.

    One burst with the best receive stamps there are, one with user-space stamps, then bursts with tokens closer
    together (or further apart) to find the largest event rate at which TTFT is exact to a millisecond at p99. What is
    found is remembered for this machine, and later runs quote it. Exit codes: 0 found, 2 not found.
    """
    from loadgen.analysis.client_health import exact_up_to, stamps_heading

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    point, until_s = (
        CalibrationPoint(server, n, itl_s, output_tokens, workers),
        time.monotonic() + (0 if quick else SEARCH_S),
    )
    say(stamps_heading())
    with TemporaryDirectory(prefix="loadgen-") as folder:
        measure = partial(_measure, Path(folder), say)
        best = measure(point)
        pair = [best] if best.stamps == "user" else [best, measure(replace(point, stamps="user"))]
        fastest, limited_by = search(best, point, measure, lambda: time.monotonic() < until_s)
    if best.stamps != "ring":
        say(PACKET_RING_HELP)
    say(exact_up_to(fastest, limited_by))
    result = Calibration(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version("llm-loadgen"),
        load=point,
        errors={comparison.stamps: to_builtins(comparison) for comparison in pair},
        events_per_s=fastest.events_per_s if fastest else 0.0,
        limited_by=limited_by,
    )
    try:
        say(f"Remembered in {save_calibration(result, facts())}.")
    except OSError as error:
        say(f"Not remembered: {error}")
    if as_json:
        print(json.format(json.encode(result)).decode())


def search(
    first: StampComparison,
    point: CalibrationPoint,
    measure: Callable[[CalibrationPoint], StampComparison],
    more_time: Callable[[], bool],
) -> tuple[StampComparison | None, str]:
    """The fastest burst that was exact, and what was in the way of a faster one: `client`, `server` or `time`. From
    `first`, which is of `point`, tokens come twice as close as long as that is exact and the server keeps up. When
    `first` is not exact they come twice as far apart until it is."""
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


def run_calibration_point(point: CalibrationPoint, folder: Path) -> tuple[Path, Path]:
    """Run the burst in `folder`, which must exist and be empty; the run's folder and the server's log. Raises
    LoadgenError when the burst did not take place, loadgen.servers.simulated.StartError."""
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn

    allow_open_files(point.n)  # the child inherits the limit
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
        raise LoadgenError(f"the burst did not take place: {ended.stderr.strip()[-1000:]}")
    return run, log


def _measure(folder: Path, say: Callable[[str], None], point: CalibrationPoint) -> StampComparison:
    """One burst, said as it ends."""
    from loadgen.analysis.client_health import compare_with_log, read_log, stamps_notes, stamps_row
    from loadgen.analysis.run.runfile import read

    run, log = run_calibration_point(point, Path(mkdtemp(dir=folder)))
    try:
        comparison = compare_with_log(read(run), read_log(log))
    except ValueError as error:
        raise LoadgenError(f"nothing to compare: {error}", "Fewer streams (--n) may help.") from error
    for line in (stamps_row(comparison), *stamps_notes(comparison)):
        say(line)
    return comparison
