"""Compares loadgen with other load generators: the same burst against the same simulated server, in one table.

    python -m benchmarks.peers                                # installs missing tools; about half an hour
    python -m benchmarks.peers --only loadgen evalscope       # some of them
    python -m benchmarks.peers --n 20 --output-tokens 16 --repeats 1

Each tool is installed from PyPI into a separate environment, at the version named in `benchmarks/comparison`. It runs
as a whole command against a new simulated vLLM server, which sends the first token after 500 ms and then one token
every 20 ms. Server and client use different cores. Run the benchmark on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.comparison import (
    aiperf,
    baseline,
    drive,
    evalscope,
    genai_bench,
    guidellm,
    machine,
    model,
    ours,
    table,
    vllm_bench,
)
from benchmarks.comparison.client import Client
from benchmarks.comparison.install import ensure

CLIENTS = {
    client.name: client
    for client in (
        ours.client(),
        vllm_bench.RUST,
        evalscope.CLIENT,
        vllm_bench.PYTHON,
        aiperf.CLIENT,
        genai_bench.CLIENT,
        guidellm.CLIENT,
        baseline.CLIENT,
    )
}
ENVIRONMENTS = Path("~/.cache/llm-loadgen-peers").expanduser()
MEMORY_TURN = 0
FEW = 10
FEW_TOKENS = 8
"""Numbers of requests and of output tokens of a small run, which shows how long a tool takes to start."""

RATE, WALL, BEGIN, BEGIN_FEW = "events per CPU-s", "wall, s", "first byte, s", f"first byte of {FEW}, s"
RUNS = "runs"
PEAK, SKEW = "peak memory, MB", "burst skew, ms"
TTFT, TTFT_ERROR, TPOT, TPOT_ERROR = "TTFT, ms", "TTFT error, ms", "TPOT, ms", "TPOT error, ms"
COLUMNS = (
    table.Column(RATE, 0, table.larger),
    table.Column(WALL, 1, table.smaller),
    table.Column(BEGIN_FEW, 2, table.smaller),
    table.Column(BEGIN, 2, table.smaller),
    table.Column(PEAK, 0, table.smaller),
    table.Column(SKEW, 1, table.smaller),
    table.Column(TTFT, 2),
    table.Column(TTFT_ERROR, 2, abs, signed=True),
    table.Column(TPOT, 3),
    table.Column(TPOT_ERROR, 3, abs, signed=True),
    table.Column(drive.OTHERS, 2),
    table.Column(RUNS, 0),
)
NOTES = """\
{n} requests of {input_tokens} tokens at once, {output_tokens} tokens each; medians over the runs. Bold: the best of the
column, C aside.

- events per CPU-s: token events that the server sent, by CPU time of the client's process tree, start-up included.
- first byte: from the start of the command to the arrival of its first request for tokens; of {few}, and of {n}.
- peak memory: proportional set sizes of the process tree together, sampled ten times a second in a run of its own.
- burst skew: from the arrival of the first request to that of the last.
- TTFT, TPOT: the median that the tool reports. Error: that less the true median. True TTFT: from the request's arrival
  to the server's send of its first token. True TPOT: between the server's sends.
- Arrivals are stamped by the kernel, before the server has read anything; where the server may not open packet sockets
  they are what it noted when it read a request, and skews are too large and TTFT errors too. Each run says which.
- others: CPU that processes of neither side used meanwhile. A run with more than 0.1 of a core is made again, {tries}
  times in all, and the quietest counts."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Install the tools, run them in turn, and print the table."""
    options = _options(arguments)
    rows: dict[str, list[table.Row] | str] = {}
    with tempfile.TemporaryDirectory() as place:
        server_core, client_cores = machine.cores()
        setting = drive.Setting(
            n=options.n,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            ttft_s=options.ttft_ms / 1e3,
            itl_s=options.itl_ms / 1e3,
            server_core=server_core,
            client_cores=client_cores,
            limit_s=options.limit_s,
            model=model.make(Path(place)),
        )
        clients = [CLIENTS[name] for name in options.only]
        folders = {client.name: _folder(client, options.envs, rows) for client in clients}
        if options.install_only:
            return
        print(machine.described(), end="\n\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # after an interrupt, print a table of the results so far
            for turn in (*range(1, options.repeats + 1), MEMORY_TURN):
                for client in clients:
                    _turn(client, folders[client.name], setting, turn, rows, options)
    shown = {
        _title(CLIENTS[name]): found if isinstance(found, str) else _summed_up(found) for name, found in rows.items()
    }
    print(table.markdown(COLUMNS, shown, floor=_title(baseline.CLIENT)), end="\n\n")
    print(NOTES.format(few=FEW, **vars(options)))


def measure(client: Client, folder: Path, setting: drive.Setting, turn: int) -> table.Row:
    """Run one client and return its figures. Raises drive.FailedError.

    In the turn MEMORY_TURN only the peak memory is measured, in all other turns everything else.
    """
    with drive.once(client, folder, setting, memory=turn == MEMORY_TURN) as outcome:
        _say(f"{client.name}: {outcome.truth}, {outcome.reported}, {outcome.cpu_s:.2f} s of CPU")
        if outcome.peak_bytes is not None:
            return {PEAK: outcome.peak_bytes / 1e6, drive.OTHERS: outcome.others_cores}
        truth, reported = outcome.truth, outcome.reported
        row = {
            drive.OTHERS: outcome.others_cores,
            RATE: truth.events / max(outcome.cpu_s, 1e-9),
            WALL: outcome.wall_s,
            BEGIN: outcome.first_byte_s,
            SKEW: truth.skew_ms,
            TTFT: reported.ttft_ms,
            TTFT_ERROR: reported.ttft_ms - truth.ttft_ms,
            TPOT: reported.tpot_ms,
            TPOT_ERROR: reported.tpot_ms - truth.tpot_ms,
        }
    few = replace(setting, n=min(FEW, setting.n), output_tokens=min(FEW_TOKENS, setting.output_tokens))
    with drive.once(client, folder, few) as outcome:
        return row | {BEGIN_FEW: outcome.first_byte_s}


def _summed_up(found: list[table.Row]) -> table.Row:
    return {**table.medians(found), RUNS: sum(RATE in row for row in found)}


def _turn(
    client: Client,
    folder: Path | None,
    setting: drive.Setting,
    turn: int,
    rows: dict[str, list[table.Row] | str],
    options: argparse.Namespace,
) -> None:
    """Run one client once, and append its figures to the client's list in `rows`.

    If the run fails and the client has no figures yet, the reason is stored instead.
    """
    if folder is None:
        return
    try:
        row = drive.quietest(partial(measure, client, folder, setting, turn), options.tries, options.patience_s)
    except drive.FailedError as problem:
        _say(f"{client.name} failed: {problem}")
        rows.setdefault(client.name, f"failed: {problem}")
        return
    found = rows.get(client.name)
    rows[client.name] = [*found, row] if isinstance(found, list) else [row]


def _folder(client: Client, environments: Path, rows: dict[str, list[table.Row] | str]) -> Path | None:
    """Return the folder in which the client is installed. Install it if necessary.

    If the client cannot be installed, return None and store the reason in `rows`.
    """
    _say(f"{client.name} {client.version}: looking whether it is installed")
    try:
        return ensure(client, environments)
    except (OSError, subprocess.CalledProcessError) as problem:
        said = getattr(problem, "stdout", None) or str(problem)
        rows[client.name] = f"not installed: {' '.join(said.split())[-200:]}"
        _say(f"{client.name} {rows[client.name]}")
        return None


def _title(client: Client) -> str:
    return f"{client.name} {client.version}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="TOOL", help="tools to run; default: all"
    )
    parser.add_argument("--envs", type=Path, default=ENVIRONMENTS, help="folder in which tools are installed")
    parser.add_argument("--install-only", action="store_true", help="install and stop")
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--ttft-ms", type=float, default=500)
    parser.add_argument("--itl-ms", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="maximum number of runs if other processes disturb a run")
    parser.add_argument("--patience-s", type=float, default=60, help="maximum wait for other processes before a run")
    parser.add_argument("--limit-s", type=float, default=600, help="time limit of one run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
