"""The master of a distributed run.

The master waits for worker machines, splits the plan among them, starts them at the same time, and writes the run file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgen import folders
from loadgen import machine as host
from loadgen.analysis.run.record import Record, shift_record
from loadgen.analysis.run.runfile import Footer, Header, Telemetry, append_lines, open_run
from loadgen.distributed import DistributedError, TokenError, protocol
from loadgen.distributed.protocol import VARIABLE, Address, ClockSample, Event, Frames
from loadgen.engine import prepare
from loadgen.engine.client_health import INTEGER_NAMES, LiveCounters, sum_counters
from loadgen.engine.clock import ClockPairs
from loadgen.engine.command_runner import CommandRunner
from loadgen.engine.merge_parts import WorkerExit, merge_parts
from loadgen.engine.prepare import OnProgress
from loadgen.engine.priority import least_raised
from loadgen.engine.resolve_server import Say
from loadgen.engine.signals import Interrupts
from loadgen.engine.telemetry_sampler import Sampler, open_sampler
from loadgen.engine.worker import WorkerTask
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.errors import DECODE_ERRORS
from loadgen.servers.wire.timestamp_sources import least_exact_source

LISTEN_S = 0.1
LEAD_NS = 300_000_000
"""Time in ns between the order to start and the start. Twice the longest round trip is added to it.

In this time the order reaches the workers of every machine, and the workers begin to wait for the start.
"""
FIELDS_OF_CLASSES = ("endpoint", "input_tokens", "output_tokens", "audio_seconds")
"""Fields of the header's plan that describe only the first class of traffic."""
MEASURE_LIMIT_S = 30.0
MAX_SAMPLES = 10_000
"""Maximum number of clock samples per machine. Beyond it, samples in the middle are deleted, and the first and newest
are kept."""
MIN_DRIFT_NS = 1_000
"""Drift between two clocks, in ns, up to which no correction is made."""


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """Settings of a distributed run.

    They state how many machines take part, where the master listens, and how long it waits for machines.
    """

    machines: int
    bind: Address
    join_timeout_s: float


@dataclass(slots=True, eq=False)
class Machine:
    """State of one worker machine, as the master tracks it."""

    node: str
    """Name of the machine in Locust."""
    name: str
    """Host name of the machine. A number is added if several machines have the same host name."""
    folder: str
    host: dict[str, Any]
    tasks: Sequence[WorkerTask] = ()
    """Tasks of the machine's workers. Empty while the machine has no share of the run."""
    drawn: protocol.PromptsReady | None = None
    connecting: bool = False
    ready: protocol.Ready | None = None
    measured: bool = False
    """True once the last requested series of clock exchanges has ended."""
    samples: list[ClockSample] = field(default_factory=list)
    counts: LiveCounters = field(default_factory=LiveCounters)
    due: list[int] = field(default_factory=list)
    offset: ClockOffset = field(init=False)
    """Offset of the machine's clock. It is measured at the start of the run and updated at the end."""
    ended: protocol.Ended | None = None
    lost: str = ""
    """Reason why the machine is lost. Empty if it is not lost."""

    @property
    def workers(self) -> list[int]:
        """Return the numbers of this machine's worker processes. Worker processes are numbered across all machines."""
        return [task.number for task in self.tasks]

    @property
    def unsent_hint(self) -> str:
        """Return the hint of the error for a lost machine.

        The hint names the folder in which this machine keeps the records that it has not sent.
        """
        return f"Its unsent records are on that machine, in {self.folder}"


def run(
    plan: Plan, spread: MachinePlan, folder: Path, *, command: list[str], say: Say, on_progress: OnProgress
) -> Footer:
    """Run the plan on worker machines, with `plan.workers` processes on each, and write `folder/run.jsonl`.

    `spread` contains the number of machines and the master's address. Raises DistributedError if the run cannot begin
    or if the Locust process ends too early. Also raises every error that `prepare.run` raises.
    """
    if plan.soak:
        raise PlanError("--soak: a distributed run keeps no separate files", "Leave --soak or --distributed out.")
    if plan.verify:
        raise PlanError("--verify: canaries are asked from one machine only", "Leave --verify or --distributed out.")
    protocol.require_locust()
    bind = spread.bind.numeric
    if not protocol.token_of(os.environ) and not host.is_loopback(bind.host):  # strangers could reach the master
        raise TokenError(
            f"--bind {bind}: without a token the master listens only on this machine",
            f"Set the same token on every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    total = plan.replaced(workers=plan.workers * spread.machines)
    with (
        folders.FolderClaim(folder),
        prepare.prepare(total, folder, say) as prepared,
        protocol.locust_process("master", bind.host, bind.port) as link,
    ):
        folders.check_room(folder, prepared.bytes)
        prepared.header.command = command
        tasks = prepared.tasks
        per_machine = len(tasks) // spread.machines
        shares = [tasks[first : first + per_machine] for first in range(0, len(tasks), per_machine)]
        fields = plan_of_machines(total, prepared.header.plan)
        master = Master(link, prepared.header, shares, spread, fields, folder, say, on_progress, plan.at)
        with master.interrupts.counting():
            return master.run(open_sampler(total, prepared.header.server, prepared.schedule.due_ns))


def plan_of_machines(plan: Plan, header_plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `plan` that the worker machines execute.

    `header_plan` contains the fields of the plan as they are in the header of the run. If the plan has no classes of
    traffic, these fields are returned unchanged.

    If the plan has classes of traffic, some fields in the header describe only the first class. The worker machines
    also send the requests of the other classes, so these fields are taken from `plan` instead.
    """
    if not plan.traffic:
        return dict(header_plan)
    stated = plan.to_dict()
    return dict(header_plan) | {name: stated.get(name) for name in FIELDS_OF_CLASSES}


@dataclass(slots=True)
class Master:
    """The master of one distributed run.

    It handles the events of its Locust process and tracks the state of each machine.
    """

    _link: Frames[Event]
    _header: Header
    _tasks: Sequence[Sequence[WorkerTask]]
    """Tasks of all workers, grouped into one share per machine."""
    _spread: MachinePlan
    _plan: Mapping[str, Any]
    """Fields of the plan that the machines carry out."""
    _folder: Path
    _say: Say
    _on_progress: OnProgress
    _timed_commands: Sequence[str] = ()
    """Commands of --at, as the user wrote them. The plan in the header has no secrets."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    _sampler: Sampler = field(default_factory=lambda: Sampler({}))
    _port: int | None = None
    _places: list[Machine | None] = field(init=False)
    _started: bool = False
    _known: dict[str, Machine] = field(default_factory=dict)
    _joined: set[str] = field(default_factory=set)
    """Nodes that have joined and are still connected, including those that have not sent a message yet."""

    def __post_init__(self) -> None:
        self._places = [None] * len(self._tasks)

    def run(self, sampler: Sampler) -> Footer:
        """Carry out the distributed run, from waiting for machines to writing the footer of the run file.

        Every machine that has joined is informed of the end, even if the run fails.
        """
        outcome, kept_all = "the master failed", False
        self._sampler = sampler
        commands = CommandRunner(self._timed_commands)
        try:
            sampler.idle()
            self._assemble()
            sampler.start()
            self._header.telemetry = sampler.facts
            self._start()
            sampler.begin(self._header.start_ns, self._folder, self.counts)
            commands.begin(self._header.start_ns, self._folder)
            self._watch()
            telemetry_parts = [*sampler.end(patient=not self.interrupts.count), *commands.end()]
            self._measure()
            footer = self._gather(telemetry_parts, commands.notes)
            outcome, kept_all = "the run is over", True
            return footer
        except (DistributedError, KeyboardInterrupt) as error:
            outcome = f"the run was cancelled: {error or 'interrupted'}"
            raise
        finally:
            sampler.stop()
            commands.end()
            for node in self._joined:
                machine = self._known.get(node)
                took_part = machine is not None and bool(machine.tasks)
                self._link.send(protocol.Bye(outcome, kept_all and took_part), node)

    def _assemble(self) -> None:
        """Wait until enough machines have joined, every machine is ready, and all clock offsets are known."""
        spread = self._spread
        listening_deadline = time.monotonic() + MEASURE_LIMIT_S
        self._until(lambda: self._port is not None, listening_deadline, "Locust's master did not start")
        self._say(f"waiting for {spread.machines} worker machines on {spread.bind.numeric.host}:{self._port}")
        deadline = time.monotonic() + spread.join_timeout_s
        message = f"not every machine was ready after {spread.join_timeout_s:g} s"
        while not self._all("ready"):
            self._until(lambda: self._all("drawn"), deadline, message)
            self._measure()
            if None in self._places:
                continue
            # All machines connect at the same time, so that no connection is idle for long before the start.
            for machine in self.present:
                if not machine.connecting:
                    self._check(machine)
                    machine.connecting = True
                    self._link.send(protocol.Connect(), machine.node)
            self._until(lambda: None in self._places or self._all("ready"), deadline, message)

    def _all(self, state: Literal["drawn", "ready"]) -> bool:
        """Return True if a machine has joined for every share of the plan, and all these machines are in `state`.

        The state `drawn` means that a machine has built its prompts, and `ready` means that it is connected to the
        server.
        """
        return all(machine is not None and getattr(machine, state) for machine in self._places)

    def _until(self, reached: Callable[[], bool], deadline: float, message: str) -> None:
        """Handle events until `reached` returns True.

        Raises DistributedError with `message` when `time.monotonic()` passes `deadline`. An interrupt
        raises KeyboardInterrupt.
        """
        while not reached():
            if self.interrupts.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                names = ", ".join(machine.name for machine in self.present) or "none"
                raise DistributedError(message, f"Present: {names}. To wait longer, use --join-timeout.")
            self.listen()
            self._on_progress("connecting", self.counts())

    def _check(self, machine: Machine) -> None:
        """Check that a machine reaches the same server as the master, and has built the same prompts as the master
        would.

        The prompts are compared by the digests of the first request bodies. Raises DistributedError if the server or a
        digest differs.
        """
        assert machine.drawn is not None
        for fact in ("name", "version", "model", "simulated"):
            ours, theirs = self._header.server[fact], machine.drawn.server.get(fact)
            if ours != theirs:
                raise DistributedError(
                    f"{machine.name} reaches another server at {self._header.server['url']}: "
                    f"{fact} {theirs}, not {ours}",
                    "Use a --url that leads every machine to the same server.",
                )
        expected = [protocol.fingerprint(task.requests(), task.dialect, task.model) for task in machine.tasks]
        if machine.drawn.fingerprints != expected:
            raise DistributedError(
                f"{machine.name} draws other prompts from the same seed",
                "Its tokenizer, dataset or trace file differs from the master's: copy the file to the same path.",
            )

    def _measure(self) -> None:
        """Run a series of clock exchanges with every machine.

        Machines that do not answer keep their earlier clock samples."""
        machines = [machine for machine in self.present if not machine.lost]
        for machine in machines:
            machine.measured = False
            self._link.post(protocol.ClockSeries(machine.node))
        deadline = time.monotonic() + MEASURE_LIMIT_S
        while time.monotonic() < deadline and not all(machine.measured or machine.lost for machine in machines):
            self.listen()

    def _start(self) -> None:
        """Choose the start time, open the run file, and order every machine to start."""
        machines = self.present
        longest = max(sample.round_trip_ns for machine in machines for sample in machine.samples)
        start_ns = time.monotonic_ns() + LEAD_NS + 2 * longest
        descriptions = self._header.client["machines"] = []
        for machine in machines:
            machine.offset = offset_of(machine.samples, start_ns)
            facts = {"name": machine.name, "workers": machine.workers, "host": machine.host}
            descriptions.append(facts | machine.offset.before.facts | {"exchanges": len(machine.samples)})
        ready = [machine.ready for machine in machines if machine.ready is not None]
        stamps = least_exact_source(message.stamps for message in ready)
        self._header.client["scheduling"] = least_raised(message.scheduling for message in ready)
        open_run(self._folder, self._header, stamps, start_ns, ClockPairs().to_realtime(start_ns))
        self._started = True
        for machine in machines:
            self._link.send(protocol.StartAt(start_ns + machine.offset.before.offset_ns), machine.node)

    def _watch(self) -> None:
        """Wait until every machine has sent all its records or is lost.

        The first interrupt stops all machines. After the second interrupt, machines that are still sending count as
        lost.
        """
        handled = 0
        while not all(machine.ended or machine.lost for machine in self.present):
            self.listen()
            if self.interrupts.count > handled:
                handled = self.interrupts.count
                for machine in self.present:
                    if not machine.lost:
                        self._link.send(protocol.Stop(), machine.node)
                    if handled > 1 and not (machine.ended or machine.lost):
                        machine.lost = "given up by a second interrupt"
                        self._say(f"{machine.name}: {machine.lost}. {machine.unsent_hint}")
            self._show("stopping" if self.interrupts.count else "running")
        self._show("ended")

    def _show(self, phase: str) -> None:
        """Report the phase and the progress of the run: its live counters and the latest figures of the server."""
        counts = self.counts()
        counts.set_server_gauges(self._sampler.latest.get("server", {}))
        self._on_progress(phase, counts)

    def _gather(self, telemetry_parts: Sequence[Path], command_notes: Sequence[str]) -> Footer:
        """Merge the part files of all machines into the run file, and return the footer of the run file.

        `telemetry_parts` are the part files of this machine. `command_notes` are messages about the commands of --at,
        which are added to the footer.
        """
        start_ns, main = self._header.start_ns, self._folder / "run.jsonl"
        machines = self.present
        for machine in machines:
            machine.offset = offset_of(machine.samples, start_ns)
        append_lines(main, chain.from_iterable(map(self._clock_lines, machines)))
        outcomes = list(chain.from_iterable(map(self._outcomes, machines)))
        notes = [
            f"{machine.name} was interrupted on its machine"
            for machine in machines
            if machine.ended and machine.ended.interrupted
        ]
        notes += [
            f"{machine.name} is lost: {machine.lost}. {machine.unsent_hint}"
            for machine in machines
            if not machine.ended
        ]
        notes += command_notes
        ends = (machine.ended.at_ns - machine.offset.after.offset_ns for machine in machines if machine.ended)
        return merge_parts(
            outcomes,
            self._header,
            main,
            interrupted=self.interrupts.count > 0,
            ended_ns=max(ends, default=None),
            telemetry_parts=telemetry_parts,
            notes=notes,
        )

    def _clock_lines(self, machine: Machine) -> Iterator[bytes]:
        for sample in dict.fromkeys((machine.offset.before, machine.offset.after)):
            values = {"machine": machine.name, "workers": machine.workers} | sample.facts
            at_ns = sample.at_ns - self._header.start_ns
            line = Telemetry(source="clock", at_ns=at_ns, worker=machine.workers[0], values=values)
            yield msgspec.json.encode(line) + b"\n"

    def _outcomes(self, machine: Machine) -> Iterator[WorkerExit]:
        """Yield one WorkerExit for each worker process of `machine`.

        If the machine is lost, the last requests that it sent are unknown. Every request that it had to send in the
        whole run is therefore counted as due. If the run ends after a fixed duration, this number is unknown. In this
        case, only the requests that were due when the machine sent its last message are counted.

        A request that is due but has no Record gets the error `worker_lost`, because no other machine sends it.
        """
        tasks = machine.tasks
        due_counts = machine.due or [0] * len(tasks)
        exits = machine.ended.exits if machine.ended else [f"its machine {machine.name} ({machine.lost})"] * len(tasks)
        for task, due, exit_ in zip(tasks, due_counts, exits, strict=True):
            is_closed = task.schedule.due_ns is None or task.prompts.has_sessions
            convert = None
            if abs(machine.offset.drift_ns) > MIN_DRIFT_NS:
                convert = partial(converted, machine.offset, self._header.start_ns, closed=is_closed)
            yield WorkerExit(task, due if machine.ended else task.planned(due), exit_, None, convert)

    # Events and messages from the machines.

    @property
    def present(self) -> list[Machine]:
        """Return the machines that have joined the run and have tasks."""
        return [machine for machine in self._places if machine is not None]

    def listen(self) -> None:
        """Handle the events that have arrived. Wait up to LISTEN_S seconds for the first event.

        Raises DistributedError if the Locust process has ended.
        """
        try:
            for event in self._link.available(LISTEN_S):
                self._handle_event(event)
        except EOFError:
            raise DistributedError(
                "Locust's master process ended unexpectedly", "The records that arrived are in the part files."
            ) from None

    def counts(self) -> LiveCounters:
        """Return the live counters, summed over all machines."""
        return sum_counters(machine.counts for machine in self.present)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, protocol.Listening):
            self._port = event.port
        elif isinstance(event, protocol.Joined):
            self._joined.add(event.node)
        elif isinstance(event, protocol.Sealed):
            self._on_message(event.node, protocol.WORKER_MESSAGE.decode(event.body))
        elif isinstance(event, protocol.PeerLost):
            self._on_peer_lost(event)
        else:
            machine = self._known.get(event.node)
            if machine is not None:
                self._on_clock_event(machine, event)

    def _on_clock_event(self, machine: Machine, event: protocol.ClockSeries | protocol.Exchanged) -> None:
        if isinstance(event, protocol.ClockSeries):
            machine.measured = True
            return
        machine.samples.append(event.sample)
        if len(machine.samples) > MAX_SAMPLES:
            del machine.samples[MAX_SAMPLES // 2]

    def _on_message(self, node: str, message: protocol.WorkerMessage) -> None:
        machine = self._known.get(node)
        if isinstance(message, protocol.Hello):
            self._greet(node, message)
        elif machine is None or machine.lost:
            pass  # a machine that was given up has already received Stop
        elif isinstance(message, protocol.PromptsReady):
            machine.drawn = message
        elif isinstance(message, protocol.Ready):
            machine.ready = message
        elif isinstance(message, protocol.Unable):
            raise DistributedError(f"{machine.name} cannot take part: {message.message}", message.hint)
        elif isinstance(message, protocol.Progress):
            machine.counts, machine.due = _live_counters(message), message.due
            if message.ahead_ns < 0:
                self._say(f"{machine.name} got the order to start {-message.ahead_ns / 1e6:.1f} ms after the start")
        elif isinstance(message, protocol.Piece):
            part = next((task.part for task in machine.tasks if task.number == message.worker), None)
            if part is None:
                raise DistributedError(f"{machine.name} sent a part of worker {message.worker}, which it does not run")
            self._link.send(protocol.append_piece(message, part), machine.node)
        else:
            machine.ended, machine.due = message, message.due

    def _greet(self, node: str, hello: protocol.Hello) -> None:
        ours = version("llm-loadgen")
        if hello.version != ours:
            reason = f"the master is loadgen {ours}, and this machine has {hello.version}"
            self._link.send(protocol.Bye(reason, kept=False), node)
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
        if self._started:
            self._link.send(protocol.Wait("the run has begun"), node)
            self._say(f"{machine.name} joined after the start and has no part in this run")
        elif None in self._places:
            self._place(machine)
        else:
            reason = f"all {len(self._places)} places are taken"
            self._link.send(protocol.Wait(reason), node)
            self._say(f"{machine.name} waits: {reason}")

    def _place(self, machine: Machine) -> None:
        """Assign a group of tasks to a machine that has joined.

        There is one group of tasks for each expected machine. The first group without a machine is assigned.
        """
        index = self._places.index(None)
        self._places[index], machine.tasks = machine, self._tasks[index]
        self._say(f"{machine.name} joined: {len(self.present)} of {len(self._places)} machines")
        urls = [replica["url"] for replica in self._header.server.get("replicas", ())]
        plan = {**self._plan, "url": self._header.server["url"], "more_urls": urls[1:]}
        self._link.send(
            protocol.Assign(plan, machine.workers[0], len(machine.tasks), machine.tasks[0].id_prefix), machine.node
        )

    def _on_peer_lost(self, event: protocol.PeerLost) -> None:
        if self._port is None:
            raise DistributedError(f"cannot listen: {event.reason}", "Name another address with --bind HOST:PORT.")
        if event.node not in self._joined:
            self._say(f"refused {_host_of(event.node)}: {event.reason}")
        self._joined.discard(event.node)
        machine = self._known.get(event.node)
        if machine is None:
            return
        machine.lost = event.reason
        if machine not in self.present:
            del self._known[event.node]
        elif not self._started:
            self._places[self._places.index(machine)] = None
            del self._known[event.node]
            self._say(f"{machine.name} was lost before the start ({event.reason}); waiting for another machine")
            spare = next((known for known in self._known.values() if known not in self.present), None)
            if spare is not None:
                self._place(spare)
        elif machine.ended is None:
            self._say(f"{machine.name} is lost: {event.reason}. {machine.unsent_hint}")


def _host_of(node: str) -> str:
    """Return the host name of a node. Locust names workers <host name>_<random number>."""
    return node.rpartition("_")[0] or node


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of a worker machine's clock from the master's clock during a run.

    Master and worker machine exchange timestamps several times before and after the start of the run. Two of these
    exchanges determine the offset: the one with the shortest round trip before the start, and the one with the shortest
    round trip after it. Between these two exchanges the clock is assumed to drift at a constant rate.
    """

    before: ClockSample
    after: ClockSample
    """Equal to `before` until an exchange has taken place after the start of the run."""

    @property
    def drift_ns(self) -> int:
        """Return the change of the clock offset from the first exchange to the second one, in ns."""
        return self.after.offset_ns - self.before.offset_ns

    def correction(self, start_ns: int, instant_ns: int) -> int:
        """Return the ns to add to a time that a worker machine recorded, because its clock has drifted.

        `instant_ns` is the recorded time in ns since the start of the run. `start_ns` is the start of the run on the
        master's clock.

        Between the exchanges `before` and `after`, the clock of the worker machine drifted by `drift_ns`. The rate of
        the drift is assumed to be constant. The correction is the drift from `before` until the recorded time, with the
        opposite sign.
        """
        span_ns = self.after.at_ns - self.before.at_ns
        passed_ns = min(max(start_ns + instant_ns - self.before.at_ns, 0), span_ns)
        return -(self.drift_ns * passed_ns // max(span_ns, 1))


def offset_of(samples: Sequence[ClockSample], start_ns: int) -> ClockOffset:
    """Return the clock offset of a machine, given its exchanges of timestamps with the master (`samples`).

    The offset is computed from two exchanges, one before and one after the start of the run (`start_ns`). On each side
    of the start, the exchange with the shortest round trip is used. Without an exchange after the start, the one before
    the start is used twice. Raises ValueError if there is no exchange before the start.
    """
    best = partial(min, key=attrgetter("round_trip_ns"))
    before = best(sample for sample in samples if sample.at_ns <= start_ns)
    after = best((sample for sample in samples if sample.at_ns > start_ns), default=before)
    return ClockOffset(before, after)


def converted(offset: ClockOffset, start_ns: int, line: bytes, *, closed: bool = False) -> bytes:
    """Return `line`, a line from a worker machine's part file, with its times converted to the master's clock.

    The line normally contains the Record of a request. All times of the Record are shifted by the same amount, so
    durations do not change. The only exception is the due time in an open loop, which comes from the plan and is not
    shifted. `closed` is True for a closed loop.

    `offset` describes the difference of the two clocks over time. The times are shifted by the difference at the moment
    when the request was sent, or when it was due if it was not sent. `start_ns` is the start of the run on the master's
    clock.

    A line without a Record is returned unchanged.
    """
    try:
        record = msgspec.json.decode(line, type=Record)
    except DECODE_ERRORS:
        return line
    at_ns = record.due_ns if record.sent_ns is None else record.sent_ns
    shifted = shift_record(record, offset.correction(start_ns, at_ns))
    if not closed:
        shifted.due_ns = record.due_ns
    return msgspec.json.encode(shifted) + b"\n"


def _live_counters(message: protocol.Progress) -> LiveCounters:
    counts = LiveCounters(*message.counts[: len(INTEGER_NAMES)])
    counts.tokens_per_s = message.tokens_per_s
    counts.ttft.merge(message.ttft)
    counts.tpot.merge(message.tpot)
    return counts
