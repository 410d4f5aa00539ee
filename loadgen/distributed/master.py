"""The master: waits for worker machines, splits the plan over them, starts them at one instant, and writes the Run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from loadgen import folders
from loadgen import machine as host
from loadgen.analysis.run.record import Record, shift_record
from loadgen.analysis.run.runfile import Footer, Header, Telemetry, append_lines, open_run
from loadgen.distributed import DistributedError, TokenError, protocol
from loadgen.distributed.protocol import VARIABLE, Address, ClockSample, Event, Frames
from loadgen.engine import prepare
from loadgen.engine.client_health import LiveCounters
from loadgen.engine.clock import ClockPairs
from loadgen.engine.merge_parts import WorkerExit, merge_parts
from loadgen.engine.prepare import OnProgress
from loadgen.engine.priority import least_raised
from loadgen.engine.resolve_server import Say
from loadgen.engine.signals import Interrupts
from loadgen.engine.telemetry_sampler import Sampler, open_sampler
from loadgen.engine.worker import WorkerTask
from loadgen.plan import Plan
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.wire.timestamp_sources import least_exact_source

LISTEN_S = 0.1
LEAD_NS = 300_000_000
"""From the order to start to the start, beside twice the longest round trip: enough for each machine's workers to be
watching their clocks."""
MEASURE_LIMIT_S = 30.0
SAMPLES_MOST = 10_000
"""At one exchange a second, the last hours."""
DRIFT_LEAST_NS = 1_000
"""Less than this between the clocks is left alone."""


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """How a run is spread over machines."""

    machines: int
    bind: Address
    join_timeout_s: float


@dataclass(slots=True, eq=False)
class Machine:
    """One worker machine, as the master sees it."""

    node: str
    """Its name in Locust."""
    name: str
    """Its host's name, and a number where several have the same."""
    folder: str
    host: dict[str, Any]
    tasks: Sequence[WorkerTask] = ()
    """Of its workers; none without a place in the run."""
    drawn: protocol.PromptsReady | None = None
    connecting: bool = False
    ready: protocol.Ready | None = None
    measured: bool = False
    """Whether the series of exchanges that was asked for last is over."""
    samples: list[ClockSample] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    offset: ClockOffset = field(init=False)
    """As of the start, and then of the end."""
    ended: protocol.Ended | None = None
    lost: str = ""
    """Why nothing more comes from it."""

    @property
    def workers(self) -> list[int]:
        """Their numbers."""
        return [task.worker for task in self.tasks]

    @property
    def kept_there(self) -> str:
        """Where to look for what a lost machine did not send."""
        return f"What it recorded and did not send is on that machine, in {self.folder}"


def run(
    plan: Plan, spread: MachinePlan, folder: Path, *, command: list[str], say: Say, on_progress: OnProgress
) -> Footer:
    """Run the plan on worker machines, `plan.workers` processes on each, and write `folder/run.jsonl`. Raises
    DistributedError before anything is sent, and what `prepare.run` raises."""
    protocol.require_locust()
    bind = spread.bind.numeric
    if not protocol.token_of(os.environ) and not host.is_loopback(bind.host):  # strangers could reach the master
        raise TokenError(
            f"--bind {bind}: without a token the master listens on this machine only",
            f"Give the same token to every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    total = plan.replaced(workers=plan.workers * spread.machines)
    with (
        folders.FolderClaim(folder),
        prepare.prepare(total, folder, say) as prepared,
        protocol.locust_process("master", bind.host, bind.port) as link,
    ):
        folders.check_room(folder, prepared.bytes)
        prepared.header.command = command
        places = [prepared.tasks[first : first + plan.workers] for first in range(0, total.workers, plan.workers)]
        master = Master(link, prepared.header, places, spread, folder, say, on_progress)
        with master.interrupts.counting():
            return master.run(open_sampler(total, prepared.header.server, prepared.schedule.due_ns))


@dataclass(slots=True)
class Master:
    """One run over several machines. Takes events from Locust and keeps the machines' states."""

    _link: Frames[Event]
    _header: Header
    _tasks: Sequence[Sequence[WorkerTask]]
    """What each machine gets that has a place in the run."""
    _spread: MachinePlan
    _folder: Path
    _say: Say
    _on_progress: OnProgress
    interrupts: Interrupts = field(default_factory=Interrupts)
    _port: int | None = None
    _places: list[Machine | None] = field(init=False)
    _started: bool = False
    _known: dict[str, Machine] = field(default_factory=dict)
    _joined: set[str] = field(default_factory=set)
    """Let in and not gone, also those that have not said anything yet."""

    def __post_init__(self) -> None:
        self._places = [None] * len(self._tasks)

    def run(self, sampler: Sampler) -> Footer:
        """From the first machine to the footer. However it ends, each machine is told."""
        ended, retained = "the master failed", False
        try:
            sampler.idle()
            self._assemble()
            sampler.start()
            self._header.telemetry = sampler.facts
            self._start()
            sampler.begin(self._header.start_ns, self._folder, self.counts)
            self._watch()
            beside = sampler.end(patient=not self.interrupts.count)
            self._measure()
            footer = self._gather(beside)
            ended, retained = "the run is over", True
            return footer
        except (DistributedError, KeyboardInterrupt) as error:
            ended = f"the run was called off: {error or 'interrupted'}"
            raise
        finally:
            sampler.stop()
            for node in self._joined:
                machine = self._known.get(node)
                self._link.tell(protocol.Bye(ended, retained and machine is not None and bool(machine.tasks)), node)

    def _assemble(self) -> None:
        """Until every place is taken by a machine that is ready and whose clock is known."""
        spread = self._spread
        soon = time.monotonic() + MEASURE_LIMIT_S
        self._until(lambda: self._port is not None, soon, "Locust's master does not come up")
        self._say(f"waiting for {spread.machines} worker machines on {spread.bind.numeric.host}:{self._port}")
        deadline = time.monotonic() + spread.join_timeout_s
        late = f"not every machine was ready after {spread.join_timeout_s:g} s"
        while not self._all("ready"):
            self._until(lambda: self._all("drawn"), deadline, late)
            self._measure()
            if None in self._places:
                continue
            # Only now, and all at the same time, so that no connection idles for long before the start.
            for machine in self.present:
                if not machine.connecting:
                    self._check(machine)
                    machine.connecting = True
                    self._link.tell(protocol.Connect(), machine.node)
            self._until(lambda: None in self._places or self._all("ready"), deadline, late)

    def _all(self, word: str) -> bool:
        """Whether every place is taken by a machine that has said this."""
        return all(machine is not None and getattr(machine, word) for machine in self._places)

    def _until(self, reached: Callable[[], bool], deadline: float, late: str) -> None:
        while not reached():
            if self.interrupts.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                there = ", ".join(machine.name for machine in self.present) or "none"
                raise DistributedError(late, f"Present: {there}. --join-timeout waits longer.")
            self.listen()
            self._on_progress("connecting", self.counts())

    def _check(self, machine: Machine) -> None:
        """The same server and the same bytes everywhere, or the run would be of something else."""
        assert machine.drawn is not None
        for fact in ("name", "version", "model", "simulated"):
            ours, theirs = self._header.server[fact], machine.drawn.server.get(fact)
            if ours != theirs:
                raise DistributedError(
                    f"{machine.name} finds another server at {self._header.server['url']}: {fact} {theirs}, not {ours}",
                    "Give a --url that leads every machine to the same server.",
                )
        ours = [protocol.fingerprint(task.requests(), task.dialect, task.model) for task in machine.tasks]
        if machine.drawn.fingerprints != ours:
            raise DistributedError(
                f"{machine.name} draws other prompts from the same seed",
                "Its tokenizer, dataset or trace file is not the master's: copy the file, under the same path.",
            )

    def _measure(self) -> None:
        """A series of exchanges with every machine, now. One that does not answer keeps what is known of it."""
        there = [machine for machine in self.present if not machine.lost]
        for machine in there:
            machine.measured = False
            self._link.post(protocol.ClockSeries(machine.node))
        deadline = time.monotonic() + MEASURE_LIMIT_S
        while time.monotonic() < deadline and not all(machine.measured or machine.lost for machine in there):
            self.listen()

    def _start(self) -> None:
        machines = self.present
        longest = max(sample.round_trip_ns for machine in machines for sample in machine.samples)
        start_ns = time.monotonic_ns() + LEAD_NS + 2 * longest
        about = self._header.client["machines"] = []
        for machine in machines:
            machine.offset = offset_of(machine.samples, start_ns)
            facts = {"name": machine.name, "workers": machine.workers, "host": machine.host}
            about.append(facts | machine.offset.before.facts | {"exchanges": len(machine.samples)})
        ready = [machine.ready for machine in machines if machine.ready is not None]
        stamps = least_exact_source(message.stamps for message in ready)
        self._header.client["scheduling"] = least_raised(message.scheduling for message in ready)
        open_run(self._folder, self._header, stamps, start_ns, ClockPairs().to_realtime(start_ns))
        self._started = True
        for machine in machines:
            self._link.tell(protocol.StartAt(start_ns + machine.offset.before.offset_ns), machine.node)

    def _watch(self) -> None:
        """Until each machine has sent everything or is lost. The first interrupt stops them all; the second gives them
        up."""
        told = 0
        while not all(machine.ended or machine.lost for machine in self.present):
            self.listen()
            if self.interrupts.count > told:
                told = self.interrupts.count
                for machine in self.present:
                    if not machine.lost:
                        self._link.tell(protocol.Stop(), machine.node)
                    if told > 1 and not (machine.ended or machine.lost):
                        machine.lost = "given up by a second interrupt"
                        self._say(f"{machine.name}: {machine.lost}. {machine.kept_there}")
            self._on_progress("running", self.counts())
        self._on_progress("ended", self.counts())

    def _gather(self, beside: Sequence[Path]) -> Footer:
        start_ns, main = self._header.start_ns, self._folder / "run.jsonl"
        machines = self.present
        for machine in machines:
            machine.offset = offset_of(machine.samples, start_ns)
        append_lines(main, chain.from_iterable(map(self._clock_lines, machines)))
        outcomes = list(chain.from_iterable(map(self._outcomes, machines)))
        notes = [
            f"{machine.name} was interrupted there"
            for machine in machines
            if machine.ended and machine.ended.interrupted
        ]
        notes += [
            f"{machine.name} is lost: {machine.lost}. {machine.kept_there}" for machine in machines if not machine.ended
        ]
        ends = (machine.ended.at_ns - machine.offset.after.offset_ns for machine in machines if machine.ended)
        interrupted, ended_ns = self.interrupts.count > 0, max(ends, default=None)
        return merge_parts(
            outcomes, self._header, main, interrupted=interrupted, ended_ns=ended_ns, beside=beside, notes=notes
        )

    def _clock_lines(self, machine: Machine) -> Iterator[bytes]:
        for sample in dict.fromkeys((machine.offset.before, machine.offset.after)):
            values = {"machine": machine.name, "workers": machine.workers} | sample.facts
            at_ns = sample.at_ns - self._header.start_ns
            line = Telemetry(source="clock", at_ns=at_ns, worker=machine.workers[0], values=values)
            yield msgspec.json.encode(line) + b"\n"

    def _outcomes(self, machine: Machine) -> Iterator[WorkerExit]:
        """How each of its workers ended. Of a lost machine every request that the plan gave it counts as due, because
        nobody else sends it."""
        tasks = machine.tasks
        measured = tasks[0].schedule.due_ns is None or tasks[0].prompts.has_sessions
        convert = None
        if abs(machine.offset.drift_ns) > DRIFT_LEAST_NS:
            convert = partial(converted, machine.offset, self._header.start_ns, closed=measured)
        known = machine.due or [0] * len(tasks)
        exits = machine.ended.exits if machine.ended else [f"its machine {machine.name} ({machine.lost})"] * len(tasks)
        for task, due, exit_ in zip(tasks, known, exits, strict=True):
            yield WorkerExit(task, due if machine.ended else task.planned(due), exit_, None, convert)

    # What the machines say.

    @property
    def present(self) -> list[Machine]:
        """Those with a place."""
        return [machine for machine in self._places if machine is not None]

    def listen(self) -> None:
        """Take what comes, after a short wait for the first of it. Raises DistributedError when nothing can come."""
        try:
            for event in self._link.available(LISTEN_S):
                self._take(event)
        except EOFError:
            raise DistributedError(
                "Locust's master process ended on its own", "What came is in the part files."
            ) from None

    def counts(self) -> LiveCounters:
        """Sums over the machines."""
        told = [machine.counts for machine in self.present if machine.counts]
        return LiveCounters(*map(sum, zip(*told, strict=True)))

    def _take(self, event: Event) -> None:
        if isinstance(event, protocol.Listening):
            self._port = event.port
        elif isinstance(event, protocol.Joined):
            self._joined.add(event.node)
        elif isinstance(event, protocol.Sealed):
            self._heard(event.node, protocol.WORKER_WORD.decode(event.body))
        elif isinstance(event, protocol.PeerLost):
            self._gone(event)
        elif (machine := self._known.get(event.node)) is None:
            pass
        elif isinstance(event, protocol.ClockSeries):
            machine.measured = True
        else:
            machine.samples.append(event.sample)
            if len(machine.samples) > SAMPLES_MOST:
                del machine.samples[SAMPLES_MOST // 2]

    def _heard(self, node: str, word: protocol.WorkerWord) -> None:
        machine = self._known.get(node)
        if isinstance(word, protocol.Hello):
            self._greet(node, word)
        elif machine is None or machine.lost:
            pass  # who was given up has been told so
        elif isinstance(word, protocol.PromptsReady):
            machine.drawn = word
        elif isinstance(word, protocol.Ready):
            machine.ready = word
        elif isinstance(word, protocol.Unable):
            raise DistributedError(f"{machine.name} cannot take part: {word.message}", word.hint)
        elif isinstance(word, protocol.Progress):
            machine.counts, machine.due = word.counts, word.due
            if word.ahead_ns < 0:
                self._say(f"{machine.name} got the order to start {-word.ahead_ns / 1e6:.1f} ms after the start")
        elif isinstance(word, protocol.Piece):
            part = next((task.part for task in machine.tasks if task.worker == word.worker), None)
            if part is None:
                raise DistributedError(f"{machine.name} sent the part of worker {word.worker}, which is not its own")
            self._link.tell(protocol.write_down(word, part), machine.node)
        else:
            machine.ended, machine.due = word, word.due

    def _greet(self, node: str, hello: protocol.Hello) -> None:
        if hello.version != (ours := version("llm-loadgen")):
            reason = f"the master is loadgen {ours}, and this machine has {hello.version}"
            self._link.tell(protocol.Bye(reason, kept=False), node)
            self._say(f"refused {_host_of(node)}: it has loadgen {hello.version}, not {ours}")
            return
        names = {machine.name for machine in self._known.values()}
        name = hostname = str(hello.host.get("hostname", node))
        number = 1
        while name in names:
            number += 1
            name = f"{hostname} ({number})"
        machine = Machine(node, name, hello.folder, hello.host)
        self._known[node] = machine
        there = f"{len(self._places)} machines are there already"
        if self._started:
            self._link.tell(protocol.Wait("the run has begun"), node)
            self._say(f"{machine.name} came after the start and has no part in this run")
        elif None in self._places:
            self._place(machine)
        else:
            self._link.tell(protocol.Wait(there), node)
            self._say(f"{machine.name} waits: {there}")

    def _place(self, machine: Machine) -> None:
        index = self._places.index(None)
        self._places[index], machine.tasks = machine, self._tasks[index]
        self._say(f"{machine.name} joined: {len(self.present)} of {len(self._places)} machines")
        plan = {**self._header.plan, "url": self._header.server["url"]}
        self._link.tell(protocol.Assign(plan, machine.workers[0], len(machine.tasks)), machine.node)

    def _gone(self, gone: protocol.PeerLost) -> None:
        if self._port is None:
            raise DistributedError(f"cannot listen: {gone.reason}", "Name another address with --bind HOST:PORT.")
        if gone.node not in self._joined:
            self._say(f"refused {_host_of(gone.node)}: {gone.reason}")
        self._joined.discard(gone.node)
        machine = self._known.get(gone.node)
        if machine is None:
            return
        machine.lost = gone.reason
        if machine not in self.present:
            del self._known[gone.node]
        elif not self._started:
            self._places[self._places.index(machine)] = None
            del self._known[gone.node]
            self._say(f"{machine.name} is gone before the start ({gone.reason}); waiting for another")
            waiting = next((each for each in self._known.values() if each not in self.present), None)
            if waiting is not None:
                self._place(waiting)
        elif machine.ended is None:
            self._say(f"{machine.name} is lost: {gone.reason}. {machine.kept_there}")


def _host_of(node: str) -> str:
    """Locust calls a worker <host name>_<random number>."""
    return node.rpartition("_")[0] or node


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A worker machine's clock against the master's, over a run: by the exchange with the smallest round trip of before
    the start, and that of after it. In between the clock drifts evenly."""

    before: ClockSample
    after: ClockSample
    """The same as `before` as long as nothing was exchanged since the start."""

    @property
    def drift_ns(self) -> int:
        """How much further ahead the clock was in the end."""
        return self.after.offset_ns - self.before.offset_ns

    def correction(self, start_ns: int, instant_ns: int) -> int:
        """What to add to a worker machine's instant, counted from its own start, to count it from the master's
        `start_ns`: the worker's start was set with the offset of before, and its clock has drifted since."""
        span = self.after.at_ns - self.before.at_ns
        passed = min(max(start_ns + instant_ns - self.before.at_ns, 0), span)
        return -(self.drift_ns * passed // max(span, 1))


def offset_of(samples: Sequence[ClockSample], start_ns: int) -> ClockOffset:
    """The best exchange before the start and the best after it. Raises ValueError when there is none before."""
    quickest = partial(min, key=attrgetter("round_trip_ns"))
    before = quickest(sample for sample in samples if sample.at_ns <= start_ns)
    return ClockOffset(before, quickest((sample for sample in samples if sample.at_ns > start_ns), default=before))


def converted(offset: ClockOffset, start_ns: int, line: bytes, *, closed: bool = False) -> bytes:
    """A line of a worker machine's part, with its Record on the master's clock. The Record moves as a whole, by the
    drift until it was sent: durations stay as that machine's clock measured them. So does the due instant of an open
    loop, which is the plan's own."""
    try:
        record = msgspec.json.decode(line, type=Record)
    except DECODE_ERRORS:
        return line
    at_ns = record.due_ns if record.sent_ns is None else record.sent_ns
    moved = shift_record(record, offset.correction(start_ns, at_ns))
    if not closed:
        moved.due_ns = record.due_ns
    return msgspec.json.encode(moved) + b"\n"
