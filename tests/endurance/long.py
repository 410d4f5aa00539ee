"""Many requests for a long time: none is lost, and memory does not grow with their number.

    PYTHONPATH=. python tests/endurance/long.py [REQUESTS] [SPEED]

A simulated vLLM whose clock goes SPEED times faster, and a closed loop: the number of requests in flight stays the
same, so whatever a process holds per request that has ended shows as growth.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loadgen.analysis.run import runfile
from loadgen.analysis.run.record import Record
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.simulated.process import spawn_process
from loadgen.servers.simulated.stream_sender import LogLine
from loadgen.workloads.request import number_of_wire_id
from tests.endurance.kills import children
from tests.support.command import prepare_forks, start

CLIENTS = 64
MIB = 1 << 20


@dataclass
class Found:
    """Of one run."""

    requests: int
    took_s: float
    speed: float
    states: Counter[str]
    """As recorded; `lost`: received by the server, and in no Record or the other way round."""
    rss: dict[str, list[int]] = field(default_factory=dict)
    """Bytes, of each process, four times a second of the run itself."""

    def growth(self, process: str) -> int:
        """Bytes from the run's second fifth to its last."""
        samples = self.rss[process]
        fifth = max(1, len(samples) // 5)
        return round(statistics.median(samples[-fifth:]) - statistics.median(samples[fifth : 2 * fifth]))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def endured(folder: Path, requests: int, speed: float, workers: int = 1) -> Found:
    """Run it, sample it, and hold the run file against the server's log."""
    log, rss = folder / "log.jsonl", dict[str, list[int]]()
    config = SimulatedConfig(server="vllm", clock="batching", speed=speed, log=log)
    words = ["--server", "vllm", "--arrivals", f"closed:{CLIENTS}", "--n", str(requests), "--workers", str(workers)]
    words += ["--input-tokens", "8", "--output-tokens", "1", "--quiet"]
    with spawn_process(config) as (url, server):
        process = start(folder, "--url", url, *words, command="run")
        began = 0.0
        while process.poll() is None:
            parts = folder / "run" / "run.jsonl"
            own = children(process.pid)
            if len(own) == workers and parts.exists():
                began = began or time.monotonic()
                named = {"command": process.pid, "server": server}
                for name, pid in {**named, **{f"worker {place}": pid for place, pid in enumerate(own)}}.items():
                    rss.setdefault(name, []).append(resident(pid))
            time.sleep(0.25)
        took_s = time.monotonic() - began
        _, err = process.communicate()
        assert process.returncode in {0, 5, 130}, err
    states, known = Counter[str](), set[int]()

    def take(record: Record) -> None:
        states[record.state] += 1
        known.add(record.id)

    footer = runfile.scan(folder / "run", take).footer
    assert footer is not None
    assert footer.complete == states["complete"]
    received = set[int]()
    with log.open("rb") as lines:
        for line in lines:
            if not line.startswith(b'{"summary"') and (told := msgspec.json.decode(line, type=LogLine)).request_id:
                received.add(number_of_wire_id(told.request_id))
    requests = len(known) if process.returncode == 130 else requests  # somebody had enough
    states["lost"] = len(received ^ known) + len(set(range(requests)) ^ known)
    return Found(requests, took_s, speed, states, {name: [*filter(None, samples)] for name, samples in rss.items()})


def main(requests: str = "1000000", speed: str = "10") -> None:
    """A table for docs/results/endurance.md."""
    with tempfile.TemporaryDirectory() as folder:
        found = endured(Path(folder), int(requests), float(speed), workers=1)
    each = f"{found.requests / found.took_s:,.0f} requests/s"
    print(f"{found.requests:,} requests in {found.took_s:,.0f} s ({each}), {CLIENTS} in flight;", end=" ")
    print(f"{found.took_s * found.speed / 3600:.2f} hours of the server's clock")
    print(", ".join(f"{number:,} {state}" for state, number in found.states.items()))
    print("\n| process | RSS at first, MiB | median | at last | growth, MiB | per request, bytes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for process, samples in found.rss.items():
        figures = [samples[0], statistics.median(samples), samples[-1], found.growth(process)]
        print(f"| {process} | {' | '.join(f'{figure / MIB:.1f}' for figure in figures)}", end=" | ")
        print(f"{found.growth(process) / (0.7 * found.requests):.2f} |")
    sys.exit(bool(found.states["lost"] or found.states["complete"] != found.requests))


if __name__ == "__main__":
    prepare_forks()
    main(*sys.argv[1:])
