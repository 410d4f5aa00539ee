"""The command `calibrate`: measure the timestamp errors of this machine.

A simulated server in a separate process logs the time of every send. A normal `loadgen burst`, also in a separate
process, receives the server's streams. `loadgen.analysis.calibration` compares the log with the timestamps of the
burst.
"""

from __future__ import annotations

import subprocess
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
from typer import BadParameter, Option

from loadgen.cli.options import seconds
from loadgen.errors import EXIT_CLIENT_LIMITED, EXIT_OK, EXIT_REQUESTS_FAILED, LoadgenError
from loadgen.machine import Calibration, CalibrationPoint, allow_open_files, facts, save_calibration
from loadgen.servers.backends import join_or, token_simulators
from loadgen.servers.own_process import own_process

if TYPE_CHECKING:
    from loadgen.analysis.calibration import StampComparison

SEARCH_S = 45.0
"""No further burst starts after this time, so that the command ends after about a minute."""
TTFT_S = 0.5
"""TTFT of the simulated server. It is long enough to send all requests before the first token arrives."""
INPUT_TOKENS = 512
MIN_ITL_S = 0.002
MAX_ITL_S = 0.2
"""Bounds of the inter-token latencies that `search` tries."""

PACKET_RING_HELP = """\
Packet timestamps are not available: tokens that are read together share a timestamp.
They need Linux and CAP_NET_RAW. To get it, use one of these:
  sudo loadgen ...                                      as root
  docker run --user 0 ...                               as root in a container
  sudo setcap cap_net_raw+ep "$(readlink -f PYTHON)"    for everyone who runs this Python (.venv/bin/python)"""


def calibrate(
    server: Annotated[str, Option(help=f"Type of the simulated server: {join_or(token_simulators())}.")] = "vllm",
    n: Annotated[int, Option("--n", help="Number of streams, all started at once.")] = 1000,
    itl_s: Annotated[
        float, Option("--itl", parser=seconds, metavar="T", help="Time between two tokens of a stream.")
    ] = 0.02,
    output_tokens: Annotated[int, Option(min=2, help="Number of tokens per stream.")] = 64,
    workers: Annotated[int, Option(help="Number of worker processes that share the burst.")] = 1,
    quick: Annotated[
        bool, Option("--quick", help="Measure this load only; do not search for the highest event rate.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Measure the timestamp errors of this machine.

    A simulated server logs every send. The times that loadgen measures are compared with this log. There is one burst
    with the best receive timestamps available and one with user-space timestamps. Further bursts with shorter (or
    longer) intervals between tokens find the highest event rate at which TTFT is exact to a millisecond at p99. The
    result is saved for this machine, and reports of later runs show it. Exit codes: 0 measured, 2 not measured.
    """
    from loadgen.analysis.calibration import exact_up_to, stamps_heading

    if server not in token_simulators():
        raise BadParameter(f"--server {server}: choose {join_or(token_simulators())}")

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    point = CalibrationPoint(server, n, itl_s, output_tokens, workers)
    deadline_s = time.monotonic() + (0 if quick else SEARCH_S)
    say(stamps_heading())
    with TemporaryDirectory(prefix="loadgen-") as folder:
        measure = partial(_measure, Path(folder), say)
        best = measure(point)
        comparisons = [best]
        if best.stamps != "user":
            comparisons.append(measure(replace(point, stamps="user")))
        fastest, limited_by = search(best, point, measure, lambda: time.monotonic() < deadline_s)
    if best.stamps != "ring":
        say(PACKET_RING_HELP)
    say(exact_up_to(fastest, limited_by))
    result = Calibration(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version("llm-loadgen"),
        load=point,
        errors={comparison.stamps: to_builtins(comparison) for comparison in comparisons},
        events_per_s=fastest.events_per_s if fastest else 0.0,
        limited_by=limited_by,
    )
    try:
        say(f"Saved in {save_calibration(result, facts())}.")
    except OSError as error:
        say(f"Not saved: {error}")
    if as_json:
        print(json.format(json.encode(result)).decode())


def search(
    first: StampComparison,
    point: CalibrationPoint,
    measure: Callable[[CalibrationPoint], StampComparison],
    more_time: Callable[[], bool],
) -> tuple[StampComparison | None, str]:
    """Run bursts to find the highest event rate at which timestamps are exact.

    Return two values. The first is the result of the exact burst with the highest event rate, or None if no burst was
    exact. The second names what prevented a higher rate: `client`, `server` or `time`.

    The search starts from `first`, the result of a burst with the load `point`. The next bursts have other inter-token
    latencies:

    - If the timestamps of `first` are exact, each burst halves the inter-token latency. The search ends when timestamps
      are not exact (`client`) or the server does not keep up (`server`).
    - Otherwise, each burst doubles the inter-token latency. The search ends when timestamps are exact (`client`).

    In both cases, the search also ends when `more_time` returns False or the next latency would be too extreme
    (`time`). `measure` runs a burst and returns its result.
    """
    fastest = first if first.exact else None
    last = first
    faster = first.exact
    while last.server_kept_up or not faster:
        point = replace(point, itl_s=point.itl_s * (0.5 if faster else 2.0))
        if not (more_time() and MIN_ITL_S <= point.itl_s <= MAX_ITL_S):
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
    """Run one burst in `folder`, which must be empty. Return the run's folder and the server's log.

    Raises LoadgenError if the burst could not run, and loadgen.servers.simulated.StartError if the server cannot start.
    """
    from loadgen.servers.simulated.config import SimulatedConfig
    from loadgen.servers.simulated.process import spawn

    allow_open_files(point.n)  # the child process inherits the limit
    run = folder / "run"
    log = folder / "sim.jsonl"
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
            name.replace("_", "-"): value
            for name, value in asdict(point).items()
            if name != "itl_s" and value is not None
        }
        options = [f"--{name}={value}" for name, value in values.items()]
        command = own_process("loadgen", "burst", "--no-report", "--quiet", *options)
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own command
    if ended.returncode not in (EXIT_OK, EXIT_REQUESTS_FAILED, EXIT_CLIENT_LIMITED):
        raise LoadgenError(f"the burst could not run: {ended.stderr.strip()[-1000:]}")
    return run, log


def _measure(folder: Path, say: Callable[[str], None], point: CalibrationPoint) -> StampComparison:
    """Run one burst with the load `point`, and compare its timestamps with the log of the simulated server.

    Print the result with `say`, and return it. `folder` is the folder for temporary files. Raises LoadgenError if there
    is nothing to compare.
    """
    from loadgen.analysis.calibration import compare_with_log, read_log, stamps_notes, stamps_row
    from loadgen.analysis.run.runfile import read

    run, log = run_calibration_point(point, Path(mkdtemp(dir=folder)))
    try:
        comparison = compare_with_log(read(run), read_log(log))
    except ValueError as error:
        raise LoadgenError(f"nothing to compare: {error}", "Try fewer streams (--n).") from error
    for line in (stamps_row(comparison), *stamps_notes(comparison)):
        say(line)
    return comparison
