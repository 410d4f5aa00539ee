"""`loadgen calibrate`: what is this machine's error bar?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from loadgen.cli.options import seconds
from servers.kinds import any_of, simulated_kinds

if TYPE_CHECKING:
    from analysis.client import StampComparison
    from loadgen.calibration import Point

SEARCH_S = 45.0
"""No burst begins later than this, so that the whole command ends after about a minute."""


def calibrate(
    server: Annotated[str, Option(help=f"Whose protocol: {any_of(simulated_kinds())}.")] = "vllm",
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

    One burst with the kernel's receive stamps, one with user-space stamps, then bursts with tokens closer together (or
    further apart) to find the largest event rate at which TTFT is exact to a millisecond at p99. What is found is
    remembered for this machine, and later runs quote it. Exit codes: 0 found, 2 not found.
    """
    from importlib.metadata import version
    from tempfile import TemporaryDirectory

    from msgspec import json

    from analysis.client import exact_up_to, stamps_heading
    from loadgen import host
    from loadgen.calibration import Calibration, Point, remember, search

    def say(line: str) -> None:
        if not as_json:
            print(line, flush=True)

    point = Point(server, n, itl_s, output_tokens, workers)
    until_s = time.monotonic() + (0 if quick else SEARCH_S)
    say(stamps_heading())
    with TemporaryDirectory(prefix="loadgen-") as folder:
        measure = partial(_measure, Path(folder), say)
        kernel = measure(point)
        pair = [kernel] if kernel.stamps == "user" else [kernel, measure(replace(point, stamps="user"))]
        fastest, limited_by = search(kernel, point, measure, lambda: time.monotonic() < until_s)
    say(exact_up_to(fastest, limited_by))
    found = Calibration(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version("llm-loadgen"),
        load=point,
        errors={comparison.stamps: asdict(comparison) for comparison in pair},
        events_per_s=fastest.events_per_s if fastest else 0.0,
        limited_by=limited_by,
    )
    try:
        say(f"Remembered in {remember(found, host.facts())}.")
    except OSError as error:
        say(f"Not remembered: {error}")
    if as_json:
        print(json.format(json.encode(found)).decode())


def _measure(folder: Path, say: Callable[[str], None], point: Point) -> StampComparison:
    """One burst, said as it ends."""
    from tempfile import mkdtemp

    from analysis.client import compare_with_log, read_log, stamps_notes, stamps_row
    from loadgen.calibration import drive
    from loadgen.errors import CalibrationError
    from loadgen.runfile import read

    run, log = drive(point, Path(mkdtemp(dir=folder)))
    try:
        comparison = compare_with_log(read(run), read_log(log))
    except ValueError as error:
        raise CalibrationError(f"nothing to compare: {error}", "Fewer streams (--n) may help.") from error
    for line in (stamps_row(comparison), *stamps_notes(comparison)):
        say(line)
    return comparison
