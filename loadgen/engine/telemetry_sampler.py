"""The sampler: reads the server's metrics, the GPUs and the host's memory beside a run, in the coordinator's process.

    idle     before the workers connect, so before the first warm-up request
    start    when every connection is open and warm-up is over
    run      every `every_s` from the run's instant 0, a thread per source; never while a burst is being sent
    end      as soon as the last request has ended
    after    a little later, when the server's counters have come to rest

No token passes through this process, so nothing here is in the measuring path. What it takes is a share of the machine:
tried with vLLM's page of 55 kB, one GPU and one process, 7 ms of processor time per second, 0.7 % of a core.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.analysis.run.runfile import RunWriter, Telemetry
from loadgen.engine.client_health import LiveCounters
from loadgen.errors import LoadgenError, OutputError, PlanError
from loadgen.servers.lifeline import end_with_parent
from loadgen.servers.telemetry import (
    Dcgm,
    GapError,
    HostMemory,
    NotMeasuredError,
    Nvml,
    ServerMetrics,
    Source,
    is_this_machine,
)

if TYPE_CHECKING:
    from loadgen.plan import Plan

NS_PER_S = 1_000_000_000
LIMIT_S = 5.0
"""A reading during the run: a server that is reading a thousand prompts answers late."""
EDGE_LIMIT_S = 2.0
"""A reading that the run waits for, before it and after it."""
REST_S = (0.1, 0.2, 0.4, 0.8)
"""How long the server is given to come to rest after the last answer: it is read again after each of these."""
MIN_BURST = 16
"""So many requests due at one instant are a burst: nothing is read until they have been sent."""
GUARD_NS = 100_000_000
"""No reading begins this shortly before a burst."""
LOOK_AGAIN_S = 0.01
HOLD_NS = 5 * NS_PER_S
"""A burst is waited for this long, no longer: one of its requests may be waiting for a connection."""
PART = "part-telemetry.jsonl"
ELSEWHERE = "the server is not on this machine"
ANSWER_LIMIT_S = 15.0
"""Of a sampler in a process of its own: readings have limits of their own, below five seconds each."""


class Bursts(msgspec.Struct, frozen=True):
    """By the instants at which many requests are due at once, as offsets from the start: how many are due by then."""

    due_by: Mapping[int, int] = {}

    def hold_s(self, now_ns: int, counts: LiveCounters) -> tuple[float, float]:
        """How long to wait at this offset before reading anything, and how long a reading may then take. Requests that
        failed count as sent: of those that never got a connection no byte will be."""
        gone = counts.sent + counts.dropped + counts.failed
        for due_ns, number in self.due_by.items():
            if due_ns - GUARD_NS <= now_ns <= due_ns + HOLD_NS and gone < number:
                return max(LOOK_AGAIN_S, (due_ns - now_ns) / NS_PER_S), 0.0
            if due_ns > now_ns:
                return 0.0, min(LIMIT_S, (due_ns - now_ns) / NS_PER_S)
        return 0.0, LIMIT_S


def find_bursts(due_ns: Iterable[int] | None) -> Bursts:
    """Where an open loop has bursts. A closed loop (None) begins with one as well, of which nothing is known here."""
    result: dict[int, int] = {}
    number = 0
    for instant, together in groupby(due_ns or ()):
        size = sum(1 for _ in together)
        number += size
        if size >= MIN_BURST:
            result[instant] = number
    return Bursts(result)


class Sampler:
    """Reads `sources` and keeps what they say. Its methods are called in the order of the module's table."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        every_s: float = 1.0,
        bursts: Bursts | None = None,
        not_measured: Mapping[str, str] | None = None,
    ) -> None:
        """`sources` by their name in Telemetry. `not_measured` says of others why they are missing."""
        self._sources = dict(sources)
        self._every_ns = round(every_s * NS_PER_S)
        self._bursts = bursts or Bursts()
        self._not_measured = dict(not_measured or {})
        self._lock = threading.Lock()
        self._early: list[Telemetry] = []
        """Lines from before the run's instant 0 is known; `at_ns` is on the clock itself."""
        self._part: RunWriter | None = None
        self._start_ns = 0
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def facts(self) -> dict[str, Any]:
        """What is measured and how, and what is not and why: for the header, once the run is about to start."""
        measured = {name: dict(source.facts) for name, source in self._sources.items()}
        return {"every_s": self._every_ns / NS_PER_S, **measured, "not_measured": self._not_measured}

    def idle(self) -> None:
        """The first reading of everything. What cannot be read at all is left out from here on. Connections are closed
        again: what is forked next would inherit them."""
        self._look("idle")
        for name, source in list(self._sources.items()):
            source.close()
            if name in self._not_measured:
                del self._sources[name]

    def start(self) -> None:
        """The last reading before the run."""
        self._look("start")

    def begin(self, start_ns: int, folder: Path, counts: Callable[[], LiveCounters]) -> None:
        """The run will start at `start_ns` on the monotonic clock: from now on lines go to a part file in `folder`.
        Raises OutputError when it cannot be written."""
        if not self._early:
            return
        self._start_ns = start_ns
        try:
            self._part = RunWriter(folder / PART)
        except OSError as error:
            raise OutputError(f"cannot write {folder / PART}: {error.strerror}", "Nothing was sent.") from error
        for line in self._early:
            self._keep(line)
        for name in self._sources:
            thread = threading.Thread(target=self._watch, args=(name, counts), name=f"telemetry-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self, *, patient: bool) -> list[Path]:
        """The last readings. Returns the files that hold the lines. `patient` gives the server time to come to rest."""
        self.stop()
        if self._part is None:
            return []
        self._settle(self._look("end").get("server", {}), REST_S if patient else ())
        for source in self._sources.values():
            source.close()
        rescued = self._part.close()
        return [self._part.path, *([rescued] if rescued else [])]

    def stop(self) -> None:
        """No more readings during the run; those under way are waited for."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _settle(self, last: Mapping[str, Any], pauses: Sequence[float]) -> None:
        """Read everything once more, and the server again until its counters stand still and nothing is under way."""
        for turn, pause in enumerate(pauses):
            time.sleep(pause)
            now = self._look("after", () if turn == 0 else ("server",)).get("server", {})
            if now == last and not now.get("running") and not now.get("waiting"):
                return
            last = now

    def _watch(self, name: str, counts: Callable[[], LiveCounters]) -> None:
        """One source's readings during the run, at absolute instants; those that a slow reading has passed are left
        out."""
        number = 0
        while True:
            number = max(number + 1, (time.monotonic_ns() - self._start_ns) // self._every_ns + 1)
            due_ns = self._start_ns + number * self._every_ns
            hold_s, limit_s = (due_ns - time.monotonic_ns()) / NS_PER_S, 0.0
            while not limit_s:
                if self._ended.wait(max(0.0, hold_s)):
                    return
                hold_s, limit_s = self._bursts.hold_s(time.monotonic_ns() - self._start_ns, counts())
            self._take(name, "run", limit_s)

    def _look(self, moment: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Read these sources (all by default) at one time."""
        chosen = [name for name in self._sources if not names or name in names]
        if not chosen:
            return {}
        with ThreadPoolExecutor(len(chosen)) as pool:
            return dict(zip(chosen, pool.map(lambda name: self._take(name, moment, EDGE_LIMIT_S), chosen), strict=True))

    def _take(self, name: str, moment: str, limit_s: float) -> dict[str, Any]:
        """One reading: its values, none in a gap. Kept, with the reason of a gap."""
        began_ns, gap = time.monotonic_ns(), {}
        values: dict[str, Any] = {}
        try:
            values = self._sources[name].read(limit_s)
        except GapError as error:
            gap = {"gap": str(error)}
            if moment == "idle" and isinstance(error, NotMeasuredError):
                self._not_measured[name] = str(error)
        now_ns = time.monotonic_ns()
        told = {"moment": moment, "took_ns": now_ns - began_ns, **values, **gap}
        self._keep(Telemetry(source=name, at_ns=now_ns, values=told))
        return values

    def _keep(self, line: Telemetry) -> None:
        """Write a line whose `at_ns` is on the clock itself; before the run it waits for the instant 0."""
        with self._lock:
            if self._part is None:
                self._early.append(line)
                return
            self._part.add(msgspec.structs.replace(line, at_ns=line.at_ns - self._start_ns))
            self._part.flush()


def open_sampler(plan: Plan, server: Mapping[str, Any], due_ns: Sequence[int] | None) -> Sampler:
    """What reads `server` (ServerFacts as the header has them), the GPUs and the host beside the load. What is missing
    by default is noted. Raises PlanError when something is missing that the plan asks for."""
    if not plan.metrics_every_s:
        return Sampler(
            {}, 0.0, not_measured=dict.fromkeys(("server", "gpu", "host"), "switched off: --metrics-every 0")
        )
    sources: dict[str, Source] = {}
    missing: dict[str, str] = {}
    for name, opening in _openings(plan, server).items():
        if isinstance(opening, str):
            missing[name] = opening
            continue
        try:
            sources[name] = opening()
        except NotMeasuredError as error:
            missing[name] = str(error)
    gpu = "--dcgm-url" if plan.dcgm_url else "--gpu" if plan.gpu else ""
    wanted = {"gpu": gpu, "host": "--server-pid" if plan.server_pid else ""}
    lines = [f"{option}: {missing[name]}" for name, option in wanted.items() if option and name in missing]
    if lines:  # what was asked for by name must be there
        raise PlanError(
            "\n".join(lines), "Nothing was sent. Without these options the run goes on without the figures."
        )
    return Sampler(sources, plan.metrics_every_s, find_bursts(due_ns), missing)


def _openings(plan: Plan, server: Mapping[str, Any]) -> dict[str, Callable[[], Source] | str]:
    """What opens each source, or why nothing does."""
    from loadgen.engine.resolve_server import access_for

    access, here = access_for(plan), is_this_machine(server["url"])
    gpu: Callable[[], Source] | str = f"{ELSEWHERE}: --dcgm-url reads its GPUs"
    if plan.dcgm_url:
        gpu = partial(Dcgm, plan.dcgm_url, access.tls)
    elif plan.gpu is False:
        gpu = "switched off: --no-gpu"
    elif plan.gpu or (here and not server["simulated"]):
        gpu = Nvml
    elif server["simulated"]:
        gpu = "the server is simulated and uses none"
    pids = (*server.get("pids", ()), *plan.server_pid)
    return {
        "server": partial(ServerMetrics, server["url"], server["name"], access),
        "gpu": gpu,
        "host": partial(HostMemory, pids) if plan.server_pid or here else ELSEWHERE,
    }


class SamplerProcess:
    """A Sampler in a process of its own, for one run. gevent has made greenlets of the threads of Locust's process, and
    a reading there would stand between the kernel and the streams. Made early, because it takes a while to start.

    One JSON object per line goes in and one comes out for each; when nothing more comes in, the process ends.

                                starts                                 -> {}
        {"plan", "server"}      reads everything for the first time    -> {"facts"}, or {"error", "hint"}
        {"start_ns", "folder"}  reads on, into the folder              -> {}
        {"patient"}             reads everything for the last time     -> {"files"}
    """

    def __init__(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.engine.telemetry_sampler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt is for the run: this process ends with it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._started = False

    def ready(self) -> None:
        """Wait until it has started."""
        if not self._started:
            self._started = True
            self._heard()

    def facts(self, plan: Plan, server: Mapping[str, Any]) -> dict[str, Any]:
        """Read everything for the first time; what is measured and what is not, as in the header. Raises PlanError when
        something is missing that the plan asks for."""
        self.ready()
        result = self._ask({"plan": plan.to_dict() | {"header": plan.header}, "server": server})
        if result is None:
            return {"not_measured": dict.fromkeys(("server", "gpu", "host"), "the process that reads them has ended")}
        if "error" in result:
            raise PlanError(result["error"], result["hint"])
        return dict(result["facts"])

    def begin(self, start_ns: int, folder: Path) -> None:
        """From now on read into a part file in this folder."""
        self._ask({"start_ns": start_ns, "folder": str(folder.resolve())})

    def end(self, *, patient: bool) -> list[Path]:
        """Read everything for the last time; the files that hold the lines. `patient` lets the server come to rest."""
        result = self._ask({"patient": patient}) or {}
        self.close()
        return [Path(name) for name in result.get("files", ())]

    def close(self) -> None:
        """Let it go."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._stdout.close()

    def _ask(self, told: Mapping[str, Any]) -> dict[str, Any] | None:
        """Its answer, or None where there is none any more."""
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(told).encode() + b"\n")
            self._stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any] | None:
        line = b""
        with contextlib.suppress(OSError):
            if select.select([self._stdout], [], [], ANSWER_LIMIT_S)[0]:
                line = self._stdout.readline()
        if not line:
            self._process.kill()
            return None
        return dict(json.loads(line))


def main() -> None:
    """Answer each line of a SamplerProcess in turn, in the child process."""
    end_with_parent(pipe=sys.stdin.fileno())
    from loadgen.plan import Plan
    from loadgen.servers import json_client as calls  # noqa: F401 - not in the time of the run

    sampler: Sampler | None = None
    answer: Mapping[str, Any] = {}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        told, answer = json.loads(line), {}
        try:
            if sampler is None:
                sampler = open_sampler(Plan(**told["plan"]), told["server"], None)  # nobody knows the load beforehand
                sampler.idle()
                sampler.start()
                answer = {"facts": sampler.facts}
            elif "folder" in told:
                sampler.begin(told["start_ns"], Path(told["folder"]), LiveCounters)
            else:
                answer = {"files": [str(path) for path in sampler.end(patient=told["patient"])]}
        except LoadgenError as error:
            answer = {"error": str(error), "hint": error.hint}


if __name__ == "__main__":
    main()
