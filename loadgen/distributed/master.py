"""The master: waits for worker machines, splits the plan over them, starts them at one instant, and writes the Run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from loadgen import host, prepare
from loadgen.distributed import DistributedError, TokenError, protocol
from loadgen.distributed.clocks import ClockOffset, ClockSample, converted, offset_of
from loadgen.distributed.peers import VARIABLE, Address, fingerprint, token_of
from loadgen.distributed.protocol import Event, Frames, write_down
from loadgen.engine.clock import ClockPairs
from loadgen.engine.coordinator import Interrupts
from loadgen.engine.health import Counts
from loadgen.engine.sampler import Sampler, sampler_of
from loadgen.engine.worker import WorkerTask
from loadgen.plan import Plan
from loadgen.runfile import Footer, Header, Outcome, Telemetry, append, gather, open_run
from servers.wire.stamps import common

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


@dataclass(slots=True)
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
    drawn: protocol.Drawn | None = None
    connecting: bool = False
    ready: protocol.Ready | None = None
    measured: bool = False
    """Whether the series of exchanges that was asked for last is over."""
    samples: list[ClockSample] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    ended: protocol.Ended | None = None
    lost: str = ""
    """Why nothing more comes from it."""

    @property
    def workers(self) -> list[int]:
        """Their numbers."""
        return [task.worker for task in self.tasks]

    @property
    def over(self) -> bool:
        """Whether nothing more of the run comes from it."""
        return self.ended is not None or bool(self.lost)

    @property
    def kept_there(self) -> str:
        """Where to look for what a lost machine did not send."""
        return f"What it recorded and did not send is on that machine, in {self.folder}"

    def offset(self, start_ns: int) -> ClockOffset:
        """Its clock against the master's."""
        return offset_of(self.samples, start_ns)


class Machines:
    """Takes events from Locust and keeps the machines' states; as many have a part in the run as there are places."""

    def __init__(
        self, link: Frames[Event], places: Sequence[Sequence[WorkerTask]], plan: Mapping[str, Any], say: prepare.Say
    ) -> None:
        """`places` are the tasks that each machine gets, of this plan."""
        self.link = link
        self.port: int | None = None
        self.places: list[Machine | None] = [None] * len(places)
        self.started = False
        self._tasks = places
        self._plan = plan
        self._known: dict[str, Machine] = {}
        self._joined: set[str] = set()
        """Let in and not gone, also those that have not said anything yet."""
        self._say = say

    @property
    def present(self) -> list[Machine]:
        """Those with a place."""
        return [machine for machine in self.places if machine is not None]

    @property
    def full(self) -> bool:
        """Whether every place is taken."""
        return None not in self.places

    def listen(self) -> None:
        """Take what comes, after a short wait for the first of it. Raises DistributedError when nothing can come."""
        try:
            for event in self.link.available(LISTEN_S):
                self._take(event)
        except EOFError:
            raise DistributedError(
                "Locust's master process ended on its own", "What came is in the part files."
            ) from None

    def dismiss(self, reason: str, *, kept: bool) -> None:
        """Tell everybody that it is over."""
        for node in self._joined:
            machine = self._known.get(node)
            self.link.tell(protocol.Bye(reason, kept and machine is not None and bool(machine.tasks)), node)

    def counts(self) -> Counts:
        """Sums over the machines."""
        told = [machine.counts for machine in self.present if machine.counts]
        return Counts(*map(sum, zip(*told, strict=True)))

    def _take(self, event: Event) -> None:
        if isinstance(event, protocol.Listening):
            self.port = event.port
        elif isinstance(event, protocol.Joined):
            self._joined.add(event.node)
        elif isinstance(event, protocol.Sealed):
            self._heard(event.node, protocol.WORKER_WORD.decode(event.body))
        elif isinstance(event, protocol.Gone):
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
        elif isinstance(word, protocol.Drawn):
            machine.drawn = word
        elif isinstance(word, protocol.Ready):
            machine.ready = word
        elif isinstance(word, protocol.Unable):
            raise DistributedError(f"{machine.name} cannot take part: {word.message}", word.hint)
        elif isinstance(word, protocol.Progress):
            machine.counts, machine.due = word.counts, word.due
        elif isinstance(word, protocol.Piece):
            self._write(machine, word)
        elif isinstance(word, protocol.Ended):
            machine.ended, machine.due = word, word.due
        elif isinstance(word, protocol.Started) and word.ahead_ns < 0:
            self._say(f"{machine.name} got the order to start {-word.ahead_ns / 1e6:.1f} ms after the start")

    def _write(self, machine: Machine, piece: protocol.Piece) -> None:
        part = next((task.part for task in machine.tasks if task.worker == piece.worker), None)
        if part is None:
            raise DistributedError(f"{machine.name} sent the part of worker {piece.worker}, which is not its own")
        self.link.tell(write_down(piece, part), machine.node)

    def _greet(self, node: str, hello: protocol.Hello) -> None:
        if hello.version != (ours := version("llm-loadgen")):
            reason = f"the master is loadgen {ours}, and this machine has {hello.version}"
            self.link.tell(protocol.Bye(reason, kept=False), node)
            self._say(f"refused {_host_of(node)}: it has loadgen {hello.version}, not {ours}")
            return
        machine = Machine(node, self._name(str(hello.host.get("hostname", node))), hello.folder, hello.host)
        self._known[node] = machine
        if self.started:
            self.link.tell(protocol.Wait("the run has begun"), node)
            self._say(f"{machine.name} came after the start and has no part in this run")
        elif not self.full:
            self._place(machine)
        else:
            self.link.tell(protocol.Wait(f"{len(self.places)} machines are there already"), node)
            self._say(f"{machine.name} waits: {len(self.places)} machines are there already")

    def _place(self, machine: Machine) -> None:
        place = self.places.index(None)
        self.places[place], machine.tasks = machine, self._tasks[place]
        self._say(f"{machine.name} joined: {len(self.present)} of {len(self.places)} machines")
        self.link.tell(protocol.Assign(dict(self._plan), machine.workers[0], len(machine.tasks)), machine.node)

    def _gone(self, gone: protocol.Gone) -> None:
        if self.port is None:
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
        elif not self.started:
            self.places[self.places.index(machine)] = None
            del self._known[gone.node]
            self._say(f"{machine.name} is gone before the start ({gone.reason}); waiting for another")
            waiting = next((each for each in self._known.values() if each not in self.present), None)
            if waiting is not None:
                self._place(waiting)
        elif machine.ended is None:
            self._say(f"{machine.name} is lost: {gone.reason}. {machine.kept_there}")

    def _name(self, hostname: str) -> str:
        names = {machine.name for machine in self._known.values()}
        numbered = (hostname if number == 1 else f"{hostname} ({number})" for number in range(1, len(names) + 2))
        return next(name for name in numbered if name not in names)


def _host_of(node: str) -> str:
    """Locust calls a worker <host name>_<random number>."""
    return node.rpartition("_")[0] or node


def run(
    plan: Plan,
    spread: MachinePlan,
    folder: Path,
    *,
    command: list[str],
    say: prepare.Say,
    on_progress: prepare.OnProgress,
) -> Footer:
    """Run the plan on worker machines, `plan.workers` processes on each, and write `folder/run.jsonl`.

    Raises DistributedError before anything is sent, and what `prepare.run` raises.
    """
    protocol.require_locust()
    bind = spread.bind.numeric
    if not token_of(os.environ) and not host.is_loopback(bind.host):  # strangers could reach the master
        raise TokenError(
            f"--bind {bind}: without a token the master listens on this machine only",
            f"Give the same token to every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )
    total = plan.model_copy(update={"workers": plan.workers * spread.machines})
    with (
        prepare.prepare(total, folder, say) as prepared,
        protocol.locust_process("master", bind.host, bind.port) as link,
    ):
        host.make_folder(folder, prepared.bytes)
        prepared.header.command = command
        places = [prepared.tasks[first : first + plan.workers] for first in range(0, total.workers, plan.workers)]
        told = {**prepared.header.plan, "url": prepared.header.server["url"]}
        machines = Machines(link, places, told, say)
        master = Master(machines, spread, prepared.header, folder, say, on_progress)
        with master.interrupts.watched():
            return master.run(sampler_of(total, prepared.header.server, prepared.schedule.due_ns))


@dataclass(slots=True)
class Master:
    """One run over several machines."""

    _machines: Machines
    _spread: MachinePlan
    _header: Header
    _folder: Path
    _say: prepare.Say
    _on_progress: prepare.OnProgress
    interrupts: Interrupts = field(default_factory=Interrupts)

    def run(self, sampler: Sampler) -> Footer:
        """From the first machine to the footer. However it ends, each machine is told. `sampler` reads the server from
        here."""
        ended = "the master failed"
        kept = False
        try:
            sampler.idle()
            self._assemble()
            sampler.start()
            self._header.telemetry = sampler.facts
            self._start()
            sampler.begin(self._header.start_ns, self._folder, self._machines.counts)
            self._watch()
            beside = sampler.end(patient=not self.interrupts.count)
            self._measure()
            footer = self._gather(beside)
            ended, kept = "the run is over", True
            return footer
        except (DistributedError, KeyboardInterrupt) as error:
            ended = f"the run was called off: {error or 'interrupted'}"
            raise
        finally:
            sampler.stop()
            self._machines.dismiss(ended, kept=kept)

    def _assemble(self) -> None:
        """Until every place is taken by a machine that is ready and whose clock is known."""
        machines, spread = self._machines, self._spread
        soon = time.monotonic() + MEASURE_LIMIT_S
        self._until(lambda: machines.port is not None, soon, "Locust's master does not come up")
        self._say(f"waiting for {spread.machines} worker machines on {spread.bind.numeric.host}:{machines.port}")
        deadline = time.monotonic() + spread.join_timeout_s
        late = f"not every machine was ready after {spread.join_timeout_s:g} s"
        while not (machines.full and all(machine.ready for machine in machines.present)):
            self._until(lambda: machines.full and all(machine.drawn for machine in machines.present), deadline, late)
            self._measure()
            if not machines.full:
                continue
            # Only now, and all at the same time, so that no connection idles for long before the start.
            for machine in machines.present:
                if not machine.connecting:
                    self._check(machine)
                    machine.connecting = True
                    machines.link.tell(protocol.Connect(), machine.node)
            self._until(lambda: not machines.full or all(each.ready for each in machines.present), deadline, late)

    def _until(self, reached: Callable[[], bool], deadline: float, late: str) -> None:
        while not reached():
            if self.interrupts.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                there = ", ".join(machine.name for machine in self._machines.present) or "none"
                raise DistributedError(late, f"Present: {there}. --join-timeout waits longer.")
            self._machines.listen()
            self._on_progress("connecting", self._machines.counts())

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
        ours = [fingerprint(task.requests(), task.dialect, task.model) for task in machine.tasks]
        if machine.drawn.fingerprints != ours:
            raise DistributedError(
                f"{machine.name} draws other prompts from the same seed",
                "Its tokenizer, dataset or trace file is not the master's: copy the file, under the same path.",
            )

    def _measure(self) -> None:
        """A series of exchanges with every machine, now. One that does not answer keeps what is known of it."""
        there = [machine for machine in self._machines.present if not machine.lost]
        for machine in there:
            machine.measured = False
            self._machines.link.post(protocol.ClockSeries(machine.node))
        deadline = time.monotonic() + MEASURE_LIMIT_S
        while time.monotonic() < deadline and not all(machine.measured or machine.lost for machine in there):
            self._machines.listen()

    def _start(self) -> None:
        machines = self._machines.present
        longest = max(sample.round_trip_ns for machine in machines for sample in machine.samples)
        start_ns = time.monotonic_ns() + LEAD_NS + 2 * longest
        self._header.client["machines"] = [
            {"name": machine.name, "workers": machine.workers, "host": machine.host}
            | _known_to(machine.offset(start_ns).before)
            | {"exchanges": len(machine.samples)}
            for machine in machines
        ]
        stamps = common(machine.ready.stamps for machine in machines if machine.ready is not None)
        open_run(self._folder, self._header, stamps, start_ns, ClockPairs().to_realtime(start_ns))
        self._machines.started = True
        for machine in machines:
            at_ns = start_ns + machine.offset(start_ns).before.offset_ns
            self._machines.link.tell(protocol.StartAt(at_ns), machine.node)

    def _watch(self) -> None:
        """Until each machine has sent everything or is lost. The first interrupt stops them all; the second gives them
        up."""
        told = 0
        while not all(machine.over for machine in self._machines.present):
            self._machines.listen()
            if self.interrupts.count > told:
                told = self.interrupts.count
                for machine in self._machines.present:
                    if not machine.lost:
                        self._machines.link.tell(protocol.Stop(), machine.node)
                    if told > 1 and not machine.over:
                        machine.lost = "given up by a second interrupt"
                        self._say(f"{machine.name}: {machine.lost}. {machine.kept_there}")
            self._on_progress("running", self._machines.counts())
        self._on_progress("ended", self._machines.counts())

    def _gather(self, beside: Sequence[Path]) -> Footer:
        start_ns, main = self._header.start_ns, self._folder / "run.jsonl"
        machines = self._machines.present
        append(main, (line for machine in machines for line in self._clock_lines(machine)))
        outcomes = [outcome for machine in machines for outcome in self._outcomes(machine)]
        notes = [f"{each.name} was interrupted there" for each in machines if each.ended and each.ended.interrupted]
        notes += [f"{each.name} is lost: {each.lost}. {each.kept_there}" for each in machines if not each.ended]
        ends = [each.ended.at_ns - each.offset(start_ns).after.offset_ns for each in machines if each.ended]
        interrupted, ended_ns = self.interrupts.count > 0, max(ends, default=None)
        return gather(
            outcomes, self._header, main, interrupted=interrupted, ended_ns=ended_ns, beside=beside, notes=notes
        )

    def _clock_lines(self, machine: Machine) -> Iterator[bytes]:
        offset = machine.offset(self._header.start_ns)
        for sample in dict.fromkeys((offset.before, offset.after)):
            values = {"machine": machine.name, "workers": machine.workers} | _known_to(sample)
            at_ns = sample.at_ns - self._header.start_ns
            line = Telemetry(source="clock", at_ns=at_ns, worker=machine.workers[0], values=values)
            yield msgspec.json.encode(line) + b"\n"

    def _outcomes(self, machine: Machine) -> Iterator[Outcome]:
        """How each of its workers ended. Of a lost machine every request that the plan gave it counts as due, because
        nobody else sends it."""
        offset = machine.offset(self._header.start_ns)
        tasks = machine.tasks
        measured = tasks[0].schedule.due_ns is None or tasks[0].prompts.of_sessions
        convert = partial(converted, offset, self._header.start_ns, closed=measured)
        known = machine.due or [0] * len(tasks)
        exits = machine.ended.exits if machine.ended else [f"its machine {machine.name} ({machine.lost})"] * len(tasks)
        for task, due, exit_ in zip(tasks, known, exits, strict=True):
            due_in_all = due if machine.ended else planned(task, due)
            yield Outcome(task, due_in_all, exit_, None, convert if abs(offset.drift_ns) > DRIFT_LEAST_NS else None)


def _known_to(sample: ClockSample) -> dict[str, int]:
    return {"offset_ns": sample.offset_ns, "uncertainty_ns": sample.uncertainty_ns}


def planned(task: WorkerTask, due: int) -> int:
    """How many requests a worker would have sent in the end; `due` of them where only the clock was to end it."""
    schedule = task.schedule
    if schedule.until_ns is not None:
        return due
    if schedule.due_ns is None or task.prompts.of_sessions:
        return sum(1 for _ in task.requests())
    return len(schedule.due_ns)
