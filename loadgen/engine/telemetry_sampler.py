"""Reads the server's metrics, the GPUs and the host's memory during a run.

Each reading belongs to one phase of the run. The field `moment` names the phase:

    idle     Before the workers connect, and so before the first warm-up request.
    start    When every connection is open and warm-up is over.
    run      Every `every_s` seconds from the start of the run. Each source has its own thread. No reading begins while
             a burst is sent.
    end      As soon as the last request has ended.
    after    A little later, when the server's counters no longer change.

The sampler runs in the coordinator's process, or in a separate process for `loadgen ui`. No token passes through this
process, so the sampler does not disturb the measurement. It takes 0.7% of a core, which is 7 ms of CPU time per second.
This was measured with a metrics page of vLLM (55 kB), one GPU and one process.
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
from loadgen.servers.own_process import own_process
from loadgen.servers.telemetry import (
    Dcgm,
    GapError,
    HostMemory,
    NotMeasuredError,
    Nvml,
    ReplicaMetrics,
    ServerMetrics,
    Source,
    is_this_machine,
)

if TYPE_CHECKING:
    from loadgen.plan import Plan

NS_PER_S = 1_000_000_000
LIMIT_S = 5.0
"""Time limit in seconds of a reading during the run. A server that processes a thousand prompts responds late."""
EDGE_LIMIT_S = 2.0
"""Time limit in seconds of a reading before or after the run, for which the run waits."""
REST_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds after the last response. After each pause the server is read again, until its counters no longer
change."""
MIN_BURST = 16
"""Minimum number of requests due at the same time that count as a burst. No reading begins until a burst has been
sent."""
GUARD_NS = 100_000_000
"""No reading begins within this time in ns before a burst."""
LOOK_AGAIN_S = 0.01
HOLD_NS = 5 * NS_PER_S
"""Maximum time in ns to wait until a burst has been sent. One of its requests may wait even longer for a connection."""
PART = "part-telemetry.jsonl"
ELSEWHERE = "the server is not on this machine"
SOME_ELSEWHERE = "not all replicas are on this machine"
ANSWER_LIMIT_S = 15.0
"""Maximum time in seconds to wait for an answer of a SamplerProcess. Its readings have time limits of five seconds or
less."""


class Bursts(msgspec.Struct, frozen=True):
    """The bursts of an open loop: groups of requests that are due at the same time. No telemetry is read during a
    burst.
    """

    due_by: Mapping[int, int] = {}
    """Maps the offset of each burst in ns to the number of requests that are due up to and including this burst."""

    def hold_s(self, now_ns: int, counts: LiveCounters) -> tuple[float, float]:
        """Return how long a telemetry reading must wait, and the time limit of the reading, both in seconds.

        `now_ns` is the current time in ns since the start of the run. There are two cases:

        - A burst is being sent, or is due within GUARD_NS. The reading must wait, and its time limit is 0. After the
          wait, the caller must call this method again.
        - Otherwise the wait is 0. The time limit is LIMIT_S, or less if the next burst is due earlier.

        The sending of a burst is over when, according to `counts`, every request of the burst and every earlier request
        was sent, dropped or failed. If this takes longer than HOLD_NS, readings no longer wait for the burst.
        """
        handled = counts.sent + counts.dropped + counts.failed
        for due_ns, number in self.due_by.items():
            if due_ns - GUARD_NS <= now_ns <= due_ns + HOLD_NS and handled < number:
                return max(LOOK_AGAIN_S, (due_ns - now_ns) / NS_PER_S), 0.0
            if due_ns > now_ns:
                return 0.0, min(LIMIT_S, (due_ns - now_ns) / NS_PER_S)
        return 0.0, LIMIT_S


def find_bursts(due_ns: Iterable[int] | None) -> Bursts:
    """Return the bursts of an open loop. `due_ns` contains the due times of its requests in ascending order.

    A burst consists of at least MIN_BURST requests that are due at the same time. For a closed loop, `due_ns` is None
    and the result contains no bursts. A closed loop does begin with a burst, but its size is not known here.
    """
    result: dict[int, int] = {}
    number = 0
    for instant, together in groupby(due_ns or ()):
        size = sum(1 for _ in together)
        number += size
        if size >= MIN_BURST:
            result[instant] = number
    return Bursts(result)


class Sampler:
    """Reads telemetry sources and stores their values.

    The methods are called in this order: `idle`, `start`, `begin`, `end`. `stop` may be called at any time.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        every_s: float = 1.0,
        bursts: Bursts | None = None,
        not_measured: Mapping[str, str] | None = None,
    ) -> None:
        """Create a sampler of these sources.

        `sources` maps names, such as `server` or `gpu`, to the sources. `not_measured` maps the name of each missing
        source to the reason why it is missing.
        """
        self._sources = dict(sources)
        self._every_ns = round(every_s * NS_PER_S)
        self._bursts = bursts or Bursts()
        self._not_measured = dict(not_measured or {})
        self._lock = threading.Lock()
        self._early: list[Telemetry] = []
        """Readings from before the start time of the run was known. Their `at_ns` is CLOCK_MONOTONIC."""
        self._part: RunWriter | None = None
        self._start_ns = 0
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.latest: dict[str, dict[str, Any]] = {}
        """The values of the latest successful reading of each source, by the name of the source."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return facts for the header of the run file: how each source is measured, and why a missing source is not
        measured.
        """
        measured = {name: dict(source.facts) for name, source in self._sources.items()}
        return {"every_s": self._every_ns / NS_PER_S, **measured, "not_measured": self._not_measured}

    def idle(self) -> None:
        """Read every source for the first time, and remove the sources that cannot be read.

        Afterwards, the connections to the sources are closed. Otherwise the worker processes, which are forked next,
        would inherit open connections.
        """
        self._read_sources("idle")
        for name, source in list(self._sources.items()):
            source.close()
            if name in self._not_measured:
                del self._sources[name]

    def start(self) -> None:
        """Read every source when all connections are open and the warm-up is over, right before the run starts."""
        self._read_sources("start")

    def begin(self, start_ns: int, folder: Path, counts: Callable[[], LiveCounters]) -> None:
        """Begin the regular readings of a run that starts at `start_ns` (CLOCK_MONOTONIC).

        The readings are written to a part file in `folder`. Raises OutputError if that file cannot be written.
        """
        if not self._early:
            return
        self._start_ns = start_ns
        try:
            self._part = RunWriter(folder / PART)
        except OSError as error:
            raise OutputError(f"cannot write {folder / PART}: {error.strerror}", "Nothing was sent.") from error
        for line in self._early:
            self._store(line)
        for name in self._sources:
            thread = threading.Thread(target=self._watch, args=(name, counts), name=f"telemetry-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self, *, patient: bool) -> list[Path]:
        """Read every source for the last time, and return the files that hold the readings.

        If `patient` is True, wait until the server's counters no longer change.
        """
        self.stop()
        if self._part is None:
            return []
        self._wait_for_rest(self._read_sources("end").get("server", {}), REST_S if patient else ())
        for source in self._sources.values():
            source.close()
        rescued = self._part.close()
        return [self._part.path, *([rescued] if rescued else [])]

    def stop(self) -> None:
        """Stop the regular readings, and wait for readings in progress."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _wait_for_rest(self, last: Mapping[str, Any], pauses: Sequence[float]) -> None:
        """Wait until the server is at rest after the load, or until every pause is over.

        After each of the `pauses` (in seconds), the method takes a reading. The server is at rest if it has no
        requests, and if its counters are equal to those of the previous reading. `last` is the reading of the server
        before the first pause.

        The first reading covers every telemetry source. Later readings cover only the server.
        """
        for turn, pause in enumerate(pauses):
            time.sleep(pause)
            now = self._read_sources("after", () if turn == 0 else ("server",)).get("server", {})
            if now == last and not now.get("running") and not now.get("waiting"):
                return
            last = now

    def _watch(self, name: str, counts: Callable[[], LiveCounters]) -> None:
        """Read one telemetry source at regular times until the run ends.

        If a reading takes so long that the next times have already passed, these times are skipped.
        """
        number = 0
        while True:
            number = max(number + 1, (time.monotonic_ns() - self._start_ns) // self._every_ns + 1)
            due_ns = self._start_ns + number * self._every_ns
            hold_s = (due_ns - time.monotonic_ns()) / NS_PER_S
            limit_s = 0.0
            while not limit_s:
                if self._ended.wait(max(0.0, hold_s)):
                    return
                hold_s, limit_s = self._bursts.hold_s(time.monotonic_ns() - self._start_ns, counts())
            self._read_source(name, "run", limit_s)

    def _read_sources(self, moment: str, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Read the telemetry sources in `names` at the same time, and return the values of each source by its name.

        If `names` is empty, all sources are read. `moment` is the phase of the run, such as `idle` or `end`.
        """
        chosen = [name for name in self._sources if not names or name in names]
        if not chosen:
            return {}
        with ThreadPoolExecutor(len(chosen)) as pool:
            return dict(
                zip(chosen, pool.map(lambda name: self._read_source(name, moment, EDGE_LIMIT_S), chosen), strict=True)
            )

    def _read_source(self, name: str, moment: str, limit_s: float) -> dict[str, Any]:
        """Read the telemetry source `name`, store the reading, and return its values.

        `moment` is the phase of the run, such as `idle` or `end`. `limit_s` is the time limit in seconds.

        If the reading fails, the method returns an empty dict. The stored reading then contains the reason under the
        key `gap`. If only some replicas of the server could be read, it also contains the values of these replicas.
        """
        began_ns = time.monotonic_ns()
        gap: dict[str, Any] = {}
        values: dict[str, Any] = {}
        try:
            values = self._sources[name].read(limit_s)
            self.latest[name] = values
        except GapError as error:
            gap = {**error.values, "gap": str(error)}
            if moment == "idle" and isinstance(error, NotMeasuredError):
                self._not_measured[name] = str(error)
        now_ns = time.monotonic_ns()
        line_values = {"moment": moment, "took_ns": now_ns - began_ns, **values, **gap}
        self._store(Telemetry(source=name, at_ns=now_ns, values=line_values))
        return values

    def _store(self, line: Telemetry) -> None:
        """Write a reading to the part file. Before the start of the run, keep it in memory.

        On entry, `line.at_ns` is a time of CLOCK_MONOTONIC. It is converted to the time since the start of the run.
        """
        with self._lock:
            if self._part is None:
                self._early.append(line)
                return
            self._part.add(msgspec.structs.replace(line, at_ns=line.at_ns - self._start_ns))
            self._part.flush()


def open_sampler(plan: Plan, server: Mapping[str, Any], due_ns: Sequence[int] | None) -> Sampler:
    """Open the sampler for a server, its GPUs and the host. `server` holds the ServerFacts from the header.

    If a source is missing, `Sampler.facts` contains the reason. Raises PlanError if an option of the plan requests a
    source that is missing.
    """
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
    options = [
        ("gpu", "--dcgm-url", bool(plan.dcgm_url)),
        ("gpu", "--gpu", bool(plan.gpu) and not plan.dcgm_url),
        ("host", "--server-pid", bool(plan.server_pid)),
    ]
    lines = [f"{option}: {missing[name]}" for name, option, used in options if used and name in missing]
    if lines:
        raise PlanError(
            "\n".join(lines), "Nothing was sent. Without these options the run goes on without the figures."
        )
    return Sampler(sources, plan.metrics_every_s, find_bursts(due_ns), missing)


def _openings(plan: Plan, server: Mapping[str, Any]) -> dict[str, Callable[[], Source] | str]:
    """Return a dict with an entry for each telemetry source. The keys are the names `server`, `gpu` and `host`.

    The value is a function that opens the source, or a text with the reason why the source is not measured.
    """
    from loadgen.engine.resolve_server import access_for

    access = access_for(plan)
    replicas = server.get("replicas") or [server]
    # With a proxy, the URLs are those of the proxy's network.
    local = [is_this_machine(replica["url"]) for replica in replicas]
    here = not plan.proxy and all(local)
    elsewhere = SOME_ELSEWHERE if any(local) and not plan.proxy else ELSEWHERE
    gpu: Callable[[], Source] | str = f"{elsewhere}: --dcgm-url reads its GPUs"
    if plan.dcgm_url:
        gpu = partial(Dcgm, plan.dcgm_url, access.tls, access.proxy)
    elif plan.gpu is False:
        gpu = "switched off: --no-gpu"
    elif plan.gpu or (here and not server["simulated"]):
        gpu = Nvml
    elif server["simulated"]:
        gpu = "the server is simulated and uses none"
    pids = (*server.get("pids", ()), *plan.server_pid)

    def open_metrics() -> Source:
        sources = {
            replica["url"]: ServerMetrics(replica["url"], server["name"], access, replica.get("query", ""))
            for replica in replicas
        }
        return ReplicaMetrics(sources) if len(sources) > 1 else sources[server["url"]]

    return {
        "server": open_metrics,
        "gpu": gpu,
        "host": partial(HostMemory, pids) if plan.server_pid or here else elsewhere,
    }


class SamplerProcess:
    """Runs a Sampler of telemetry in a separate process, for runs of `loadgen ui`.

    `loadgen ui` runs in Locust's process, where gevent has replaced threads with greenlets. In this process, a
    telemetry reading would delay the reads of responses. Create the object early, because the sampler process takes a
    while to start.

    The sampler process reads messages from its standard input, until the input ends. A message is one line with a JSON
    object. The process answers each message with a JSON object, too. When it has started, it sends a first answer
    without a message:

        message                 action of the process                    answer
        (none)                  start                                    {}
        {"plan", "server"}      read every source for the first time     {"facts"}, or {"error", "hint"}
        {"start_ns", "folder"}  begin the regular readings               {}
        {"patient"}             read every source for the last time      {"files"}

    The field `patient` has the value that was passed to the method `end`.
    """

    def __init__(self) -> None:
        self._process = process = subprocess.Popen(  # noqa: S603 - our own module
            own_process("loadgen.engine.telemetry_sampler"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not end this process before the run
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._started = False

    def ready(self) -> None:
        """Wait until the sampler process has started."""
        if not self._started:
            self._started = True
            self._receive()

    def facts(self, plan: Plan, server: Mapping[str, Any]) -> dict[str, Any]:
        """Read every source for the first time, and return the facts for the header (as `Sampler.facts`).

        Raises PlanError if an option of the plan requests a source that is missing.
        """
        self.ready()
        result = self._request({"plan": plan.to_dict() | {"header": plan.header}, "server": server})
        if result is None:
            return {"not_measured": dict.fromkeys(("server", "gpu", "host"), "the process that reads them has ended")}
        if "error" in result:
            raise PlanError(result["error"], result["hint"])
        return dict(result["facts"])

    def begin(self, start_ns: int, folder: Path) -> None:
        """Begin the regular readings of the run. The readings are written to a part file in this folder."""
        self._request({"start_ns": start_ns, "folder": str(folder.resolve())})

    def end(self, *, patient: bool) -> list[Path]:
        """Read every source for the last time, and return the files that hold the readings.

        If `patient` is True, wait until the server's counters no longer change.
        """
        result = self._request({"patient": patient}) or {}
        self.close()
        return [Path(name) for name in result.get("files", ())]

    def close(self) -> None:
        """End the sampler process. If the process does not end in time, it is killed."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._stdout.close()

    def _request(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a message to the sampler process and return the answer, or None if no answer arrives in time."""
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any] | None:
        """Return the next answer of the sampler process. If no answer arrives in time, kill the process and return
        None."""
        line = b""
        with contextlib.suppress(OSError):
            if select.select([self._stdout], [], [], ANSWER_LIMIT_S)[0]:
                line = self._stdout.readline()
        if not line:
            self._process.kill()
            return None
        return dict(json.loads(line))


def main() -> None:
    """Run the sampler process: answer the messages of its SamplerProcess until standard input ends."""
    end_with_parent(pipe=sys.stdin.fileno())
    from loadgen.plan import Plan
    from loadgen.servers import json_client  # noqa: F401 - imported now, so that it takes no time during the run

    sampler: Sampler | None = None
    answer: Mapping[str, Any] = {}
    while True:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        message = json.loads(line)
        answer = {}
        try:
            if sampler is None:
                # In an interactive session the load is not known beforehand.
                sampler = open_sampler(Plan(**message["plan"]), message["server"], None)
                sampler.idle()
                sampler.start()
                answer = {"facts": sampler.facts}
            elif "folder" in message:
                sampler.begin(message["start_ns"], Path(message["folder"]), LiveCounters)
            else:
                answer = {"files": [str(path) for path in sampler.end(patient=message["patient"])]}
        except LoadgenError as error:
            answer = {"error": str(error), "hint": error.hint}


if __name__ == "__main__":
    main()
