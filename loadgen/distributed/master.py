"""The master: waits for worker machines, splits the plan over them, starts them at one instant, and writes the Run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from loadgen import host, prepare
from loadgen.distributed import link as links
from loadgen.distributed import messages
from loadgen.distributed.address import Address
from loadgen.distributed.errors import DistributedError, TokenError
from loadgen.distributed.machines import Machine, Machines, exits, left_there
from loadgen.distributed.offsets import Offset, converted
from loadgen.distributed.parts import Incoming
from loadgen.distributed.prints import print_of
from loadgen.distributed.token import VARIABLE, token_of
from loadgen.engine.clock import ClockPairs
from loadgen.engine.coordinator import Interrupts
from loadgen.engine.sampler import Sampler
from loadgen.engine.worker import WorkerTask
from loadgen.gather import Outcome, append, gather
from loadgen.plan import Plan
from loadgen.runfile import Footer, Header, Telemetry

LISTEN_S = 0.1
LEAD_NS = 300_000_000
"""From the order to start to the start, beside twice the longest round trip: enough for each machine's workers to be
watching their clocks."""
MEASURE_LIMIT_S = 30.0
DRIFT_LEAST_NS = 1_000
"""Less than this between the clocks is left alone."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a run is spread over machines."""

    machines: int
    bind: Address
    join_timeout_s: float


def run(
    plan: Plan, asked: Asked, folder: Path, *, command: list[str], say: prepare.Say, on_progress: prepare.OnProgress
) -> Footer:
    """Run the plan on worker machines, `plan.workers` processes on each, and write `folder/run.jsonl`.

    Raises DistributedError before anything is sent, and what `prepare.run` raises.
    """
    links.require()
    bind = asked.bind.numeric
    check_bind(bind, token_of(os.environ))
    total = plan.model_copy(update={"workers": plan.workers * asked.machines})
    with (
        prepare.prepare(total, folder, say) as prepared,
        links.opened("master", bind.host, bind.port) as link,
    ):
        host.make_folder(folder, prepare.bytes_of(plan, prepared.schedule))
        header = prepared.header
        header.command = command
        machines = Machines(link, asked.machines, say, version=version("llm-loadgen"))
        master = Master(machines, prepared.tasks, header, folder, say=say, on_progress=on_progress)
        with master.interrupts.watched():
            return master.run(asked, prepare.sampler_of(total, header.server, prepared.schedule.due_ns))


def check_bind(bind: Address, token: str) -> None:
    """Raises TokenError when strangers could reach the master."""
    if not token and not bind.loopback:
        raise TokenError(
            f"--bind {bind}: without a token the master listens on this machine only",
            f"Give the same token to every machine: export {VARIABLE}=$(openssl rand -hex 32)",
        )


class Master:
    """One run over several machines."""

    def __init__(
        self,
        machines: Machines,
        shares: Sequence[WorkerTask],
        header: Header,
        folder: Path,
        *,
        say: prepare.Say,
        on_progress: prepare.OnProgress,
    ) -> None:
        self.interrupts = Interrupts()
        self._machines = machines
        self._shares = shares
        self._header = header
        self._folder = folder
        self._say = say
        self._on_progress = on_progress
        self._incoming = Incoming({share.worker: share.part for share in shares})
        self._each = len(shares) // len(machines.places)
        machines.on_place = self._assign
        machines.on_piece = self._write

    def run(self, asked: Asked, sampler: Sampler) -> Footer:
        """From the first machine to the footer. However it ends, each machine is told. `sampler` reads the server from
        here."""
        ended = "the master failed"
        kept = False
        try:
            sampler.idle()
            self._assemble(asked)
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
            self._incoming.close()

    def _assemble(self, asked: Asked) -> None:
        """Until every place is taken by a machine that is ready and whose clock is known."""
        machines = self._machines
        soon = time.monotonic() + MEASURE_LIMIT_S
        self._until(lambda: machines.port is not None, soon, "Locust's master does not come up")
        self._say(f"waiting for {asked.machines} worker machines on {asked.bind.host}:{machines.port}")
        deadline = time.monotonic() + asked.join_timeout_s
        late = f"not every machine was ready after {asked.join_timeout_s:g} s"
        while not (machines.full and all(machine.ready for machine in machines.present)):
            self._until(lambda: machines.full and all(machine.prepared for machine in machines.present), deadline, late)
            self._measure()
            if machines.full:
                self._connect()
                self._until(lambda: not machines.full or all(each.ready for each in machines.present), deadline, late)

    def _connect(self) -> None:
        """Only now, and all at the same time, so that no connection idles for long before the start."""
        for machine in self._machines.present:
            if not machine.connecting:
                self._check(machine)
                machine.connecting = True
                self._machines.link.tell(messages.Connect(), machine.node)

    def _until(self, reached: Callable[[], bool], deadline: float, late: str) -> None:
        while not reached():
            if self.interrupts.count:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                there = ", ".join(machine.name for machine in self._machines.present) or "none"
                raise DistributedError(late, f"Present: {there}. --join-timeout waits longer.")
            self._machines.listen(LISTEN_S)
            self._on_progress("connecting", self._machines.counts())

    def _assign(self, machine: Machine, place: int) -> None:
        machine.first = place * self._each
        plan = {**self._header.plan, "url": self._header.server["url"]}
        self._machines.link.tell(messages.Assign(plan, machine.first, self._each), machine.node)

    def _check(self, machine: Machine) -> None:
        """The same server and the same bytes everywhere, or the run would be of something else."""
        assert machine.prepared is not None
        for fact in ("name", "version", "model", "simulated"):
            ours, theirs = self._header.server[fact], machine.prepared.server.get(fact)
            if ours != theirs:
                raise DistributedError(
                    f"{machine.name} finds another server at {self._header.server['url']}: {fact} {theirs}, not {ours}",
                    "Give a --url that leads every machine to the same server.",
                )
        if machine.prepared.prints != [print_of(share) for share in self._shares_of(machine)]:
            raise DistributedError(
                f"{machine.name} draws other prompts from the same seed",
                "Its tokenizer, dataset or trace file is not the master's: copy the file, under the same path.",
            )

    def _shares_of(self, machine: Machine) -> Sequence[WorkerTask]:
        assert machine.first is not None
        return self._shares[machine.first : machine.first + self._each]

    def _measure(self) -> None:
        """A series of exchanges with every machine, now. One that does not answer keeps what is known of it."""
        there = [machine for machine in self._machines.present if not machine.lost]
        for machine in there:
            machine.measured = False
            self._machines.link.measure(machine.node)
        deadline = time.monotonic() + MEASURE_LIMIT_S
        while time.monotonic() < deadline and not all(machine.measured or machine.lost for machine in there):
            self._machines.listen(LISTEN_S)

    def _start(self) -> None:
        machines = self._machines.present
        longest = max(sample.round_trip_ns for machine in machines for sample in machine.samples)
        clocks = ClockPairs()
        start_ns = self._header.start_ns = time.monotonic_ns() + LEAD_NS + 2 * longest
        self._header.start_realtime_ns = clocks.to_realtime(start_ns)
        stamps = {machine.ready.stamps for machine in machines if machine.ready is not None}
        self._header.client["stamps"] = "kernel" if stamps == {"kernel"} else "user"
        self._header.client["machines"] = [self._described(machine, machine.offset(start_ns)) for machine in machines]
        append(self._folder / "run.jsonl", [msgspec.json.encode(self._header) + b"\n"])
        self._machines.started = True
        for machine in machines:
            at_ns = start_ns + machine.offset(start_ns).before.offset_ns
            self._machines.link.tell(messages.Start(at_ns), machine.node)

    def _described(self, machine: Machine, offset: Offset) -> dict[str, Any]:
        return {
            "name": machine.name,
            "workers": [share.worker for share in self._shares_of(machine)],
            "host": machine.host,
            "offset_ns": offset.before.offset_ns,
            "uncertainty_ns": offset.before.uncertainty_ns,
            "exchanges": len(machine.samples),
        }

    def _watch(self) -> None:
        """Until each machine has sent everything or is lost. The first interrupt stops them all."""
        told = 0
        while not all(machine.over for machine in self._machines.present):
            self._machines.listen(LISTEN_S)
            if self.interrupts.count > told:
                told = self.interrupts.count
                self._machines.tell(messages.Stop())
                if told > 1:
                    self._abandon()
            self._on_progress("running", self._machines.counts())
        self._on_progress("ended", self._machines.counts())

    def _abandon(self) -> None:
        for machine in self._machines.present:
            if not machine.over:
                machine.lost = "given up by a second interrupt"
                self._say(f"{machine.name}: {machine.lost}. {left_there(machine)}")

    def _write(self, machine: Machine, piece: messages.Piece) -> None:
        if piece.worker not in [share.worker for share in self._shares_of(machine)]:
            raise DistributedError(f"{machine.name} sent the part of worker {piece.worker}, which is not its own")
        self._machines.link.tell(self._incoming.take(piece), machine.node)

    def _gather(self, beside: Sequence[Path]) -> Footer:
        start_ns, main = self._header.start_ns, self._folder / "run.jsonl"
        machines = self._machines.present
        append(main, (line for machine in machines for line in self._clock_lines(machine, machine.offset(start_ns))))
        outcomes = [outcome for machine in machines for outcome in self._outcomes(machine)]
        notes = [f"{each.name} was interrupted there" for each in machines if each.ended and each.ended.interrupted]
        notes += [f"{each.name} is lost: {each.lost}. {left_there(each)}" for each in machines if not each.ended]
        ends = [each.ended.at_ns - each.offset(start_ns).after.offset_ns for each in machines if each.ended]
        interrupted, ended_ns = self.interrupts.count > 0, max(ends, default=None)
        return gather(
            outcomes, self._header, main, interrupted=interrupted, ended_ns=ended_ns, beside=beside, notes=notes
        )

    def _clock_lines(self, machine: Machine, offset: Offset) -> Iterator[bytes]:
        workers = [share.worker for share in self._shares_of(machine)]
        for sample in dict.fromkeys((offset.before, offset.after)):
            values = {
                "machine": machine.name,
                "workers": workers,
                "offset_ns": sample.offset_ns,
                "uncertainty_ns": sample.uncertainty_ns,
            }
            at_ns = sample.at_ns - self._header.start_ns
            yield msgspec.json.encode(Telemetry(source="clock", at_ns=at_ns, worker=workers[0], values=values)) + b"\n"

    def _outcomes(self, machine: Machine) -> Iterator[Outcome]:
        """How each of its workers ended. Of a lost machine every request that the plan gave it counts as due, because
        nobody else sends it."""
        offset = machine.offset(self._header.start_ns)
        shares = self._shares_of(machine)
        measured = shares[0].schedule.due_ns is None or shares[0].prompts.of_sessions
        convert = partial(converted, offset, self._header.start_ns, closed=measured)
        known = machine.due or [0] * len(shares)
        for share, due, exit_ in zip(shares, known, exits(machine, len(shares)), strict=True):
            due_in_all = due if machine.ended else planned(share, due)
            yield Outcome(share, due_in_all, exit_, None, convert if abs(offset.drift_ns) > DRIFT_LEAST_NS else None)


def planned(share: WorkerTask, due: int) -> int:
    """How many requests a worker would have sent in the end; `due` of them where only the clock was to end it."""
    schedule = share.schedule
    if schedule.until_ns is not None:
        return due
    if schedule.due_ns is None or share.prompts.of_sessions:
        return sum(1 for _ in share.requests())
    return len(schedule.due_ns)
