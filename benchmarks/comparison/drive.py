"""Runs one load generator against a new simulated server. The server and the load generator use different cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparison import judge, keeper, machine, model, table
from benchmarks.comparison.client import Client, Load, Reported
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn

OTHERS = "others, cores"
"""Title of the column with `Outcome.others_cores`."""
_QUIET_CORES = 0.1
_LAST_WORDS = 300


class FailedError(Exception):
    """The load generator failed. The message gives the reason, with the end of its output if there was any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a comparison that are the same for every load generator."""

    n: int = 1000
    input_tokens: int = 512
    output_tokens: int = 128
    ttft_s: float = 0.5
    itl_s: float = 0.02
    server_core: int
    client_cores: tuple[int, ...]
    limit_s: float = 600
    model: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of one run of a load generator."""

    truth: judge.Truth
    reported: Reported
    requests: list[dict[str, Any]]
    """Lines of the server's log, one per request."""
    scratch: Path
    wall_s: float
    cpu_s: float
    first_byte_s: float
    """Time from the start of the command to the arrival of its first request for tokens, in s."""
    peak_bytes: int | None
    others_cores: float
    """Average number of cores that other processes on this machine used during the run."""


def quietest(attempt: Callable[[], table.Row], tries: int, patience_s: float) -> table.Row:
    """Repeat a run until no other process has used much CPU during it, and return its row of figures.

    After `tries` runs, return the row of the run during which other processes used least CPU. Before each run, wait up
    to `patience_s` seconds until other processes use little CPU. Raises FailedError if a run fails.
    """
    rows: list[table.Row] = []
    while len(rows) < tries and (not rows or rows[-1][OTHERS] > _QUIET_CORES):
        machine.wait_for_quiet(_QUIET_CORES, patience_s)
        rows.append(attempt())
    return min(rows, key=lambda row: row[OTHERS])


@contextmanager
def once(client: Client, folder: Path, setting: Setting, *, memory: bool = False) -> Iterator[Outcome]:
    """Run the load generator that is installed in `folder`, and yield the outcome.

    The files that it wrote exist until the context ends. Raises FailedError if there are no results.
    """
    with tempfile.TemporaryDirectory() as place:
        scratch, log = Path(place) / "client", Path(place) / "server.jsonl"
        scratch.mkdir()
        others = machine.watch_others()
        with _server(setting, log) as url:
            load = Load(
                url=url,
                n=setting.n,
                input_tokens=setting.input_tokens,
                output_tokens=setting.output_tokens,
                model=setting.model,
                scratch=scratch,
            )
            usage = _kept(client, client.command(folder, load), scratch, setting, memory=memory)
        usage["others_cores"] = others()
        yield _outcome(client, scratch, log, usage, setting.n)


@contextmanager
def _server(setting: Setting, log: Path) -> Iterator[str]:
    """Start a simulated server on its core, and yield its URL.

    The current process stays on this core too, because it only waits during the run.
    """
    config = SimulatedConfig(
        server="vllm",
        model=model.NAME,
        max_model_len=model.CONTEXT_TOKENS,
        ttft_s=setting.ttft_s,
        itl_s=setting.itl_s,
        log=log,
    )
    with machine.pinned(setting.server_core), spawn(config) as url:
        yield url


def _kept(client: Client, command: list[str], scratch: Path, setting: Setting, *, memory: bool) -> dict[str, Any]:
    """Run the command under keeper.py, and return the resource usage that keeper.py has measured.

    Raises FailedError if the command failed or exceeded the time limit.
    """
    result = scratch.parent / "usage.json"
    cores = ",".join(map(str, setting.client_cores))
    options = [str(result), cores, str(setting.limit_s), "yes" if memory else "no"]
    kept = subprocess.run(  # our own script
        [sys.executable, keeper.__file__, *options, *command],
        cwd=scratch,
        env=_environment(client),
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    if kept.returncode:
        raise FailedError(_end_of(kept.stderr))
    usage: dict[str, Any] = json.loads(result.read_text("utf-8"))
    if usage["timed_out"]:
        raise FailedError(f"not done after {setting.limit_s:g} s")
    if usage["exit_code"] not in client.exit_codes:
        raise FailedError(f"exit code {usage['exit_code']}: {_last_words(scratch)}")
    return usage


def _environment(client: Client) -> dict[str, str]:
    """Return the environment variables for a load generator.

    Variables of Python are removed. With them, the load generator could import loadgen's packages, or could not cache
    its bytecode.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "HF_HUB_OFFLINE": "1", **client.environment}


def _outcome(client: Client, scratch: Path, log: Path, usage: dict[str, Any], n: int) -> Outcome:
    requests, summary = judge.read_log(log)
    try:
        truth = judge.judge(requests, summary, n)
        reported = client.reported(scratch)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise FailedError(f"no results to judge ({problem!r}): {_last_words(scratch)}") from problem
    return Outcome(
        truth=truth,
        reported=reported,
        requests=requests,
        scratch=scratch,
        wall_s=usage["wall_s"],
        cpu_s=usage["cpu_s"],
        first_byte_s=(truth.first_request_ns - usage["launched_ns"]) / 1e9,
        peak_bytes=usage["peak_bytes"],
        others_cores=usage["others_cores"],
    )


def _last_words(scratch: Path) -> str:
    return _end_of((scratch / "output.txt").read_text("utf-8", "replace"))


def _end_of(text: str) -> str:
    """Return the end of a text on one line, without the character `|` that would end a table cell."""
    return " ".join(text.replace("|", "/").split())[-_LAST_WORDS:]
