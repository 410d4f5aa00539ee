"""The worker machines as the master sees them: who has joined, who has a place in the run, what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.distributed import link as links
from loadgen.distributed import messages
from loadgen.distributed.errors import DistributedError
from loadgen.distributed.offsets import Offset, Sample, offset_of
from loadgen.engine.health import Counts

SAMPLES_MOST = 10_000
"""At one exchange a second, the last hours."""
Say = Callable[[str], None]


@dataclass(slots=True)
class Machine:
    """One worker machine."""

    node: str
    """Its name in Locust."""
    name: str
    """Its host's name, and a number where several have the same."""
    folder: str
    host: dict[str, Any]
    first: int | None = None
    """The first of its workers' numbers; None without a place in the run."""
    prepared: messages.Prepared | None = None
    connecting: bool = False
    ready: messages.Ready | None = None
    measured: bool = False
    """Whether the series of exchanges that was asked for last is over."""
    samples: list[Sample] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    due: list[int] = field(default_factory=list)
    ended: messages.Ended | None = None
    lost: str = ""
    """Why nothing more comes from it."""

    @property
    def over(self) -> bool:
        """Whether nothing more of the run comes from it."""
        return self.ended is not None or bool(self.lost)

    def offset(self, start_ns: int) -> Offset:
        """Its clock against the master's."""
        return offset_of(self.samples, start_ns)


class Machines:
    """Takes events from the link and keeps the machines' states; `places` many of them have a part in the run."""

    def __init__(self, link: links.Link, places: int, say: Say, *, version: str) -> None:
        self.link = link
        self.port: int | None = None
        self.places: list[Machine | None] = [None] * places
        self.started = False
        self.on_piece: Callable[[Machine, messages.Piece], None] = _unexpected
        self.on_place: Callable[[Machine, int], None] = _unexpected
        """Gets a machine and the number of the place that it was given."""
        self._known: dict[str, Machine] = {}
        self._joined: set[str] = set()
        """Let in and not gone, also those that have not said anything yet."""
        self._say = say
        self._version = version

    @property
    def present(self) -> list[Machine]:
        """Those with a place."""
        return [machine for machine in self.places if machine is not None]

    @property
    def full(self) -> bool:
        """Whether every place is taken."""
        return None not in self.places

    def listen(self, timeout_s: float) -> None:
        """Take what comes, for so long at most until the first event. Raises DistributedError when nothing can come."""
        try:
            event = self.link.receive(timeout_s)
            while event is not None:
                self._take(event)
                event = self.link.receive(0)
        except EOFError:
            raise DistributedError(
                "Locust's master process ended on its own", "What came is in the part files."
            ) from None

    def tell(self, word: messages.Words) -> None:
        """Tell each machine that has a place and is still there."""
        for machine in self.present:
            if not machine.lost:
                self.link.tell(word, machine.node)

    def dismiss(self, reason: str, *, kept: bool) -> None:
        """Tell everybody that it is over."""
        for node in self._joined:
            machine = self._known.get(node)
            took_part = machine is not None and machine.first is not None
            self.link.tell(messages.Bye(reason, kept and took_part), node)

    def counts(self) -> Counts:
        """Sums over the machines."""
        sums = Counts()
        for machine in self.present:
            for (name, _), value in zip(Counts._fields_, machine.counts, strict=False):
                setattr(sums, name, getattr(sums, name) + value)
        return sums

    def _take(self, event: messages.Events) -> None:
        if isinstance(event, messages.Bound):
            self.port = event.port
        elif isinstance(event, messages.Refused):
            self._refused(event)
        elif isinstance(event, messages.Joined):
            self._joined.add(event.node)
        elif isinstance(event, messages.Heard):
            self._heard(event.node, links.word_of(event))
        elif (machine := self._known.get(event.node)) is not None:
            self._happened(machine, event)

    def _refused(self, event: messages.Refused) -> None:
        if self.port is None:
            raise DistributedError(f"cannot listen: {event.reason}", "Name another address with --bind HOST:PORT.")
        self._say(f"refused {_host_of(event.node)}: {event.reason}")

    def _happened(self, machine: Machine, event: messages.Events) -> None:
        if isinstance(event, messages.Gone):
            self._gone(machine, event.reason)
        elif isinstance(event, messages.Measured):
            machine.measured = True
        elif isinstance(event, messages.Exchanged):
            machine.samples.append(Sample(event.at_ns, event.offset_ns, event.round_trip_ns))
            if len(machine.samples) > SAMPLES_MOST:
                del machine.samples[SAMPLES_MOST // 2]

    def _heard(self, node: str, word: messages.Words) -> None:
        machine = self._known.get(node)
        if isinstance(word, messages.Hello):
            self._greet(node, word)
        elif machine is None or machine.lost:
            pass  # who was given up has been told so
        elif isinstance(word, messages.Prepared):
            machine.prepared = word
        elif isinstance(word, messages.Ready):
            machine.ready = word
        elif isinstance(word, messages.Unable):
            raise DistributedError(f"{machine.name} cannot take part: {word.message}", word.hint)
        elif isinstance(word, messages.Progress):
            machine.counts, machine.due = word.counts, word.due
        elif isinstance(word, messages.Piece):
            self.on_piece(machine, word)
        elif isinstance(word, messages.Ended):
            machine.ended, machine.due = word, word.due
        elif isinstance(word, messages.Started) and word.ahead_ns < 0:
            self._say(f"{machine.name} got the order to start {-word.ahead_ns / 1e6:.1f} ms after the start")

    def _greet(self, node: str, hello: messages.Hello) -> None:
        if hello.version != self._version:
            reason = f"the master is loadgen {self._version}, and this machine has {hello.version}"
            self.link.tell(messages.Bye(reason, kept=False), node)
            self._say(f"refused {_host_of(node)}: it has loadgen {hello.version}, not {self._version}")
            return
        machine = Machine(node, self._name(str(hello.host.get("hostname", node))), hello.folder, hello.host)
        self._known[node] = machine
        if self.started:
            self.link.tell(messages.Wait("the run has begun"), node)
            self._say(f"{machine.name} came after the start and has no part in this run")
        elif not self.full:
            self._place(machine)
        else:
            self.link.tell(messages.Wait(f"{len(self.places)} machines are there already"), node)
            self._say(f"{machine.name} waits: {len(self.places)} machines are there already")

    def _place(self, machine: Machine) -> None:
        place = self.places.index(None)
        self.places[place] = machine
        self._say(f"{machine.name} joined: {len(self.present)} of {len(self.places)} machines")
        self.on_place(machine, place)

    def _gone(self, machine: Machine, reason: str) -> None:
        self._joined.discard(machine.node)
        machine.lost = reason
        if machine not in self.present:
            del self._known[machine.node]
        elif not self.started:
            self.places[self.places.index(machine)] = None
            del self._known[machine.node]
            self._say(f"{machine.name} is gone before the start ({reason}); waiting for another")
            waiting = next((each for each in self._known.values() if each not in self.present), None)
            if waiting is not None:
                self._place(waiting)
        elif machine.ended is None:
            self._say(f"{machine.name} is lost: {reason}. {left_there(machine)}")

    def _name(self, hostname: str) -> str:
        names = {machine.name for machine in self._known.values()}
        numbered = (hostname if number == 1 else f"{hostname} ({number})" for number in range(1, len(names) + 2))
        return next(name for name in numbered if name not in names)


def left_there(machine: Machine) -> str:
    """Where to look for what a lost machine did not send."""
    return f"What it recorded and did not send is on that machine, in {machine.folder}"


def _host_of(node: str) -> str:
    """Locust calls a worker <host name>_<random number>."""
    return node.rpartition("_")[0] or node


def _unexpected(*_: object) -> None:
    raise AssertionError("nobody was to take this yet")


def exits(machine: Machine, workers: int) -> Sequence[str]:
    """How each of a machine's workers ended, in words that follow `ended with`."""
    if machine.ended is not None:
        return machine.ended.exits
    return [f"its machine {machine.name} ({machine.lost})"] * workers
