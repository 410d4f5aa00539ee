"""A worker machine: joins the master, prepares its share, drives it with the measuring engine, and sends its parts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar, cast

from loadgen import machine as host
from loadgen.distributed import DistributedError, TokenError, protocol
from loadgen.distributed.protocol import VARIABLE, Address, Event, Frames, fingerprint, token_of
from loadgen.engine import coordinator, prepare
from loadgen.engine.client_health import COUNTER_NAMES, sum_counters
from loadgen.engine.coordinator import Worker
from loadgen.engine.merge_parts import WorkerExit
from loadgen.engine.priority import least_raised
from loadgen.engine.resolve_server import Say
from loadgen.engine.signals import Interrupts
from loadgen.engine.worker import WorkerTask
from loadgen.errors import EXIT_INTERRUPTED, EXIT_OK
from loadgen.folders import check_room, new_folder
from loadgen.plan import Plan

LISTEN_S = 0.05
PROGRESS_EVERY_S = 0.5
GOODBYE_LIMIT_S = 10.0
INTERRUPTS_MOST = 2
"""Then nobody wants to wait for the master any more."""
PIECE_BYTES = 1 << 18
PIECES_UNTAKEN = 4
"""Of a machine's part files, so many pieces at most are on their way at a time."""
Word = TypeVar("Word", bound=protocol.MasterWord)


class MasterSession:
    """What the master has said so far, and this machine's part of the run: the measuring engine at its orders."""

    def __init__(self, link: Frames[Event], interrupts: Interrupts, on_progress: prepare.OnProgress) -> None:
        self.link = link
        self.joined = False
        self.closed_by_peer = ""
        """Why the master says nothing more."""
        self.began = False
        """Whether this machine has been given the start."""
        self.interrupts = interrupts
        self._on_progress = on_progress
        self._words: dict[type, protocol.MasterWord] = {}
        self._stopped = False
        self._outgoing = Outgoing({}, link.tell)
        self._told_s = 0.0
        self._ended_ns = 0
        self._parent = os.getppid()

    def word(self, kind: type[Word]) -> Word | None:
        """The last word of this kind; None when there was none."""
        return cast("Word | None", self._words.get(kind))

    @property
    def interrupted_here(self) -> bool:
        """Whether somebody interrupted this machine's command, rather than the master its run."""
        return self.interrupts.count > self._stopped

    @property
    def over(self) -> bool:
        """Whether the master has nothing more to say."""
        return bool(self.closed_by_peer or self.word(protocol.Bye))

    def listen(self, timeout_s: float) -> None:
        """Take what has come, for so long at most until the first of it. Raises TokenError, DistributedError."""
        if os.getppid() != self._parent and not self.interrupts.count:  # who started this machine's command is gone
            detached = os.getsid(0) == os.getpid() or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # setsid, nohup
            self.interrupts.count += not detached
        if self.closed_by_peer:
            time.sleep(timeout_s)
            return
        try:
            for event in self.link.available(timeout_s):
                self._take(event)
        except EOFError:
            self._take(protocol.PeerLost("", "the Locust process here ended on its own"))

    def until(self, reached: Callable[[], object]) -> None:
        """Listen until then, or until there is nothing more to wait for, or an interrupt here."""
        while not reached() and not self.over and not self.interrupted_here:
            self.listen(LISTEN_S)

    def _take(self, event: Event) -> None:
        if isinstance(event, protocol.Joined):
            self.joined = True
        elif isinstance(event, protocol.PeerLost):
            if event.node:
                hint = f"Set the master's {VARIABLE} here, and check the address."
                raise TokenError(f"not let in: {event.reason}", hint)
            self.closed_by_peer = self.closed_by_peer or event.reason
            self._stop()
        elif isinstance(event, protocol.Sealed):
            word = protocol.MASTER_WORD.decode(event.body)
            self._words[type(word)] = word
            if isinstance(word, protocol.Stop | protocol.Bye):
                self._stop()
            elif isinstance(word, protocol.PieceAck):
                self._outgoing.taken(word)

    def _stop(self) -> None:
        """As if it had been interrupted here, once: a second interrupt would kill the workers."""
        if not self.interrupts.count:
            self._stopped = True
            self.interrupts.count += 1

    def drive(self, tasks: Sequence[WorkerTask]) -> list[WorkerExit]:
        """Connect, wait for the start, and drive to the end."""
        self._outgoing = Outgoing({task.worker: task.part for task in tasks}, self.link.tell)

        def end() -> None:
            self._ended_ns = time.monotonic_ns()

        return coordinator.run_workers(tasks, self._begin, self.interrupts, self._look, end)

    def deliver(self, outcomes: Sequence[WorkerExit]) -> None:
        """Send the rest of the parts, and wait until the master has taken everything, or is gone."""
        for outcome in outcomes:
            if outcome.rescued is not None:
                self._outgoing.append(outcome.task.worker, outcome.rescued)
        while not self.over and not self._outgoing.pump():
            self.listen(LISTEN_S)
        due, exits = [outcome.due for outcome in outcomes], [outcome.exit for outcome in outcomes]
        self.link.tell(protocol.Ended(self._ended_ns, due, exits, self.interrupted_here))
        while not self.over and self.interrupts.count < INTERRUPTS_MOST:
            self.listen(LISTEN_S)

    def _begin(self, stamps: str, workers: Sequence[Worker]) -> int | None:
        """The agreed instant, once everybody is ready."""
        self.link.tell(protocol.Ready(stamps, least_raised(worker.scheduling for worker in workers)))
        self.until(lambda: self.word(protocol.StartAt))
        start = self.word(protocol.StartAt)
        if start is None:
            return None
        self._tell(workers, start.at_ns - time.monotonic_ns())
        self.began = True
        return start.at_ns

    def _tell(self, workers: Sequence[Worker], ahead_ns: int = 0) -> None:
        counts = sum_counters(worker.counts for worker in workers)
        due = [worker.counts.due for worker in workers]
        self.link.tell(protocol.Progress([getattr(counts, name) for name in COUNTER_NAMES], due, ahead_ns))

    def _look(self, phase: str, workers: Sequence[Worker]) -> None:
        """Ten times a second: hear the master, tell how far it is, and send what has been recorded."""
        self.listen(0)
        self._on_progress(phase, sum_counters(worker.counts for worker in workers))
        if not self.began:
            return
        self._outgoing.pump()
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_EVERY_S or phase == "ended":
            self._told_s = now_s
            self._tell(workers)


class Outgoing:
    """Sends the part files of a worker machine as they grow. What could not be sent stays where it is."""

    def __init__(self, parts: dict[int, Path], send: Callable[[protocol.Piece], None]) -> None:
        """`parts` by the worker's number."""
        self._files = {worker: [path] for worker, path in parts.items()}
        self._send = send
        self._sent = dict.fromkeys(parts, 0)
        self._untaken: set[protocol.PieceAck] = set()

    def append(self, worker: int, rescued: Path) -> None:
        """A worker has ended, and wrote the end of its part elsewhere, because its own disk was full."""
        self._files[worker].append(rescued)

    def taken(self, word: protocol.PieceAck) -> None:
        """The master has written down a piece."""
        self._untaken.discard(word)

    def pump(self) -> bool:
        """Send what has come and may go. Whether everything that there is has been taken."""
        more = True
        while more:
            more = False
            for worker in self._files:  # in turn, so that no part waits for the others to end
                if len(self._untaken) == PIECES_UNTAKEN:
                    return False
                if data := _read_from(self._files[worker], self._sent[worker]):
                    more = True
                    self._send(protocol.Piece(worker, self._sent[worker], data))
                    self._sent[worker] += len(data)
                    self._untaken.add(protocol.PieceAck(worker, self._sent[worker]))
        return not self._untaken


def _read_from(files: Sequence[Path], offset: int) -> bytes:
    """A piece, from this offset on, of files of which each goes on in the next one."""
    for path in files:
        size = path.stat().st_size if path.exists() else 0
        if offset < size:
            with path.open("rb") as file:
                return os.pread(file.fileno(), PIECE_BYTES, offset)
        offset -= size
    return b""


def serve(master: Address, folder: Path, *, stay: bool, say: Say, on_progress: prepare.OnProgress) -> int:
    """Take part in one run, or with `stay` in one after the other; parts lie in a new folder below `folder` until the
    master has them. The exit code. Raises DistributedError when this machine was not let in or could not deliver, and
    what `prepare.run` raises."""
    protocol.require_locust()
    token_of(os.environ)
    while True:
        interrupts = Interrupts()
        with interrupts.counting(), protocol.locust_process("worker", master.host, master.port) as link:
            session = MasterSession(link, interrupts, on_progress)
            say(f"waiting for the master at {master}" + ("" if stay else f", for {protocol.MASTER_LIMIT_S} s at most"))
            with new_folder(folder, f"parts-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}") as parts:
                _join(session, parts, say, stay=stay)
                if (assign := session.word(protocol.Assign)) is not None:
                    _take_part(session, assign, parts, say)
            if session.interrupted_here:
                return EXIT_INTERRUPTED
            bye = session.word(protocol.Bye)
            if stay:
                continue
            if (bye and bye.kept) or session.word(protocol.Wait):
                return EXIT_OK
            raise DistributedError(bye.reason if bye else session.closed_by_peer)


def _join(session: MasterSession, parts: Path, say: Say, *, stay: bool) -> None:
    """Until there is something to do. Returns without when this machine is not needed, and need not wait."""
    session.until(lambda: session.joined)
    if not session.joined:
        return
    say("let in")
    session.link.tell(protocol.Hello(version("llm-loadgen"), host.facts(), str(parts.absolute())))
    session.until(lambda: session.word(protocol.Assign) or session.word(protocol.Wait))
    wait = session.word(protocol.Wait)
    if wait is not None and session.word(protocol.Assign) is None:
        say(f"not needed now: {wait.reason}" + ("; waiting for the next run" if stay else ""))
        if stay:
            session.until(lambda: session.word(protocol.Assign))


def _take_part(session: MasterSession, assign: protocol.Assign, parts: Path, say: Say) -> None:
    """Prepare, drive, deliver. What can go wrong before the start calls the whole run off."""
    try:
        plan = Plan(**{**assign.plan, "workers": 1}).replaced(workers=assign.plan["workers"])
        with prepare.prepare(plan, parts, say) as prepared:
            check_room(parts, prepared.bytes * assign.workers // plan.workers)
            mine = prepared.tasks[assign.first : assign.first + assign.workers]
            prints = [fingerprint(task.requests(), task.dialect, task.model) for task in mine]
            session.link.tell(protocol.PromptsReady(prints, prepared.header.server))
            session.until(lambda: session.word(protocol.Connect))
            outcomes = session.drive(mine) if session.word(protocol.Connect) else []
    except Exception as error:
        if not session.began:
            session.link.tell(protocol.Unable(str(error), str(getattr(error, "hint", ""))))
            deadline = time.monotonic() + GOODBYE_LIMIT_S
            session.until(lambda: time.monotonic() > deadline)
        raise
    if session.began:
        session.deliver(outcomes)
    bye = session.word(protocol.Bye)
    if session.began and not (bye and bye.kept):
        reason = session.closed_by_peer or (bye.reason if bye else "interrupted twice")
        raise DistributedError(
            f"{reason}: what this machine recorded is in {parts}",
            "Copy its part files into the run's folder on the master, then `loadgen report` it.",
        )
    for outcome in outcomes:
        for path in (outcome.task.part, outcome.rescued):
            if path is not None:
                path.unlink(missing_ok=True)
    say(bye.reason if bye else session.closed_by_peer or "interrupted")
