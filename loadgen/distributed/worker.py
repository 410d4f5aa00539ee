"""A worker machine: joins the master, prepares its share, drives it with the measuring engine, and sends its parts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from loadgen import host, prepare
from loadgen.distributed import link as links
from loadgen.distributed import messages
from loadgen.distributed.address import Address
from loadgen.distributed.errors import DistributedError, TokenError
from loadgen.distributed.parts import Outgoing
from loadgen.distributed.prints import print_of
from loadgen.distributed.token import VARIABLE, token_of
from loadgen.engine import coordinator
from loadgen.engine.coordinator import Interrupts, Worker
from loadgen.engine.counts import Counts, total
from loadgen.engine.worker import WorkerTask
from loadgen.errors import EXIT_INTERRUPTED, EXIT_OK
from loadgen.gather import Outcome
from loadgen.plan import plan_of

LISTEN_S = 0.05
PROGRESS_EVERY_S = 0.5
GOODBYE_LIMIT_S = 10.0
INTERRUPTS_MOST = 2
"""Then nobody wants to wait for the master any more."""


class Talk:
    """What the master has said so far."""

    def __init__(self, link: links.Link, interrupts: Interrupts) -> None:
        self.link = link
        self.joined = False
        self.assign: messages.Assign | None = None
        self.connect = False
        self.start: messages.Start | None = None
        self.wait: messages.Wait | None = None
        self.bye: messages.Bye | None = None
        self.gone = ""
        """Why the master says nothing more."""
        self.outgoing: Outgoing | None = None
        self.interrupts = interrupts
        self._stops = 0

    @property
    def interrupted_here(self) -> bool:
        """Whether somebody interrupted this machine's command, rather than the master its run."""
        return self.interrupts.count > self._stops

    @property
    def over(self) -> bool:
        """Whether the master has nothing more to say."""
        return bool(self.gone) or self.bye is not None

    def listen(self, timeout_s: float) -> None:
        """Take what has come, for so long at most until the first of it. Raises TokenError, DistributedError."""
        if self.gone:
            time.sleep(timeout_s)
            return
        try:
            event = self.link.receive(timeout_s)
            while event is not None:
                self._take(event)
                event = self.link.receive(0)
        except EOFError:
            self._ends("the Locust process here ended on its own")

    def until(self, reached: Callable[[], object]) -> None:
        """Listen until then, or until there is nothing more to wait for, or an interrupt here."""
        while not reached() and not self.over and not self.interrupted_here:
            self.listen(LISTEN_S)

    def _take(self, event: messages.Events) -> None:
        if isinstance(event, messages.Joined):
            self.joined = True
        elif isinstance(event, messages.Refused) and event.node:
            raise TokenError(f"not let in: {event.reason}", f"Set the master's {VARIABLE} here, and check the address.")
        elif isinstance(event, messages.Refused | messages.Gone):
            self._ends(event.reason)
        elif isinstance(event, messages.Heard):
            self._heard(links.word_of(event))

    def _heard(self, word: messages.Words) -> None:
        if isinstance(word, messages.Assign):
            self.assign = word
        elif isinstance(word, messages.Connect):
            self.connect = True
        elif isinstance(word, messages.Start):
            self.start = word
        elif isinstance(word, messages.Wait):
            self.wait = word
        elif isinstance(word, messages.Stop):
            self._stop()
        elif isinstance(word, messages.Taken) and self.outgoing is not None:
            self.outgoing.taken(word)
        elif isinstance(word, messages.Bye):
            self.bye = word
            self._stop()

    def _ends(self, reason: str) -> None:
        self.gone = self.gone or reason
        self._stop()

    def _stop(self) -> None:
        """As if it had been interrupted here, once: a second interrupt would kill the workers."""
        if not self.interrupts.count:
            self._stops += 1
            self.interrupts.count += 1


def serve(master: Address, folder: Path, *, stay: bool, say: prepare.Say, on_progress: prepare.OnProgress) -> int:
    """Take part in one run, or with `stay` in one after the other; parts lie in a new folder below `folder` until the
    master has them. The exit code.

    Raises DistributedError when this machine was not let in or could not deliver, and what `prepare.run` raises.
    """
    links.require()
    token_of(os.environ)
    while True:
        interrupts = Interrupts()
        with interrupts.watched(), links.opened("worker", master.host, master.port) as link:
            talk = Talk(link, interrupts)
            say(f"looking for the master at {master}")
            parts = folder / f"parts-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
            _join(talk, parts, say, stay=stay)
            if talk.assign is not None:
                _take_part(talk, talk.assign, parts, say, on_progress)
            if talk.interrupted_here:
                return EXIT_INTERRUPTED
            if not stay:
                return _left(talk)


def _join(talk: Talk, parts: Path, say: prepare.Say, *, stay: bool) -> None:
    """Until there is something to do. Returns without when this machine is not needed, and need not wait."""
    talk.until(lambda: talk.joined)
    if not talk.joined:
        return
    say("let in")
    talk.link.tell(messages.Hello(version("llm-loadgen"), host.facts(), str(parts.absolute())))
    talk.until(lambda: talk.assign or talk.wait)
    if talk.wait is not None and talk.assign is None:
        say(f"not needed now: {talk.wait.reason}" + ("; waiting for the next run" if stay else ""))
        if stay:
            talk.until(lambda: talk.assign)


def _left(talk: Talk) -> int:
    """The exit code of a machine that took part, or was not needed. Raises DistributedError otherwise."""
    if (talk.bye is not None and talk.bye.kept) or talk.wait is not None:
        return EXIT_OK
    raise DistributedError(talk.bye.reason if talk.bye is not None else talk.gone)


def _take_part(
    talk: Talk, assign: messages.Assign, parts: Path, say: prepare.Say, on_progress: prepare.OnProgress
) -> None:
    """Prepare, drive, deliver. What can go wrong before the start calls the whole run off."""
    engine = None
    try:
        plan = plan_of(**{**assign.plan, "workers": 1}).model_copy(update={"workers": assign.plan["workers"]})
        with prepare.prepare(plan, parts, say) as prepared:
            host.make_folder(parts, prepare.bytes_of(plan, prepared.schedule) * assign.workers // plan.workers)
            mine = prepared.tasks[assign.first : assign.first + assign.workers]
            engine = _Engine(talk, mine, on_progress)
            talk.link.tell(messages.Prepared([print_of(share) for share in mine], prepared.header.server))
            talk.until(lambda: talk.connect)
            outcomes = engine.drive() if talk.connect else []
    except Exception as error:
        if engine is None or not engine.began:
            talk.link.tell(messages.Unable(str(error), str(getattr(error, "hint", ""))))
            deadline = time.monotonic() + GOODBYE_LIMIT_S
            talk.until(lambda: time.monotonic() > deadline)
        raise
    if engine.began:
        engine.deliver(outcomes)
        if talk.bye is None or not talk.bye.kept:
            reason = talk.gone or (talk.bye.reason if talk.bye else "interrupted twice")
            raise DistributedError(
                f"{reason}: what this machine recorded is in {parts}",
                "Copy its part files into the run's folder on the master, then `loadgen report` it.",
            )
    for outcome in outcomes:
        outcome.task.part.unlink(missing_ok=True)
        if outcome.rescued is not None:
            outcome.rescued.unlink(missing_ok=True)
    parts.rmdir()
    say(talk.bye.reason if talk.bye is not None else talk.gone or "interrupted")


class _Engine:
    """The measuring engine, ordered about by the master."""

    def __init__(self, talk: Talk, shares: Sequence[WorkerTask], on_progress: prepare.OnProgress) -> None:
        self.began = False
        self._talk = talk
        self._shares = shares
        self._on_progress = on_progress
        self._told_s = 0.0
        self._ended_ns = 0
        self._outgoing = talk.outgoing = Outgoing({share.worker: share.part for share in shares}, talk.link.tell)

    def drive(self) -> list[Outcome]:
        """Connect, wait for the start, and drive to the end."""
        return coordinator.drive(self._shares, self._begin, self._talk.interrupts, self._look, self._end)

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """Send the rest of the parts, and wait until the master has taken everything, or is gone."""
        for outcome in outcomes:
            if outcome.rescued is not None:
                self._outgoing.append(outcome.task.worker, outcome.rescued)
        while not self._talk.over and not self._outgoing.pump(ended=True):
            self._talk.listen(LISTEN_S)
        ended = messages.Ended(
            self._ended_ns,
            [outcome.due for outcome in outcomes],
            [outcome.exit for outcome in outcomes],
            self._talk.interrupted_here,
        )
        self._talk.link.tell(ended)
        while not self._talk.over and self._talk.interrupts.count < INTERRUPTS_MOST:
            self._talk.listen(LISTEN_S)

    def _begin(self, stamps: str, _workers: Sequence[Worker]) -> int | None:
        """The agreed instant, once everybody is ready."""
        talk = self._talk
        talk.link.tell(messages.Ready(stamps))
        talk.until(lambda: talk.start)
        if talk.start is None:
            return None
        talk.link.tell(messages.Started(talk.start.at_ns - time.monotonic_ns()))
        self.began = True
        return talk.start.at_ns

    def _end(self) -> None:
        self._ended_ns = time.monotonic_ns()

    def _look(self, phase: str, workers: Sequence[Worker]) -> None:
        """Ten times a second: hear the master, tell how far it is, and send what has been recorded."""
        self._talk.listen(0)
        counts = total(worker.counts for worker in workers)
        self._on_progress(phase, counts)
        if not self.began:
            return
        self._outgoing.pump()
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_EVERY_S or phase == "ended":
            self._told_s = now_s
            values = [getattr(counts, name) for name, _ in Counts._fields_]
            self._talk.link.tell(messages.Progress(values, [worker.counts.due for worker in workers]))
