"""A worker machine of a distributed run.

The machine joins the master, prepares its part of the requests, sends them with the measuring engine, and transfers its
part files to the master.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from loadgen import machine as host
from loadgen.distributed import DistributedError, TokenError, protocol
from loadgen.distributed.protocol import VARIABLE, Address, Event, Frames, fingerprint, token_of
from loadgen.engine import coordinator, prepare
from loadgen.engine.client_health import INTEGER_NAMES, sum_counters
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
RESOLVE_EVERY_S = 1.0
"""Time in seconds between two attempts to resolve the host name of the master."""
PROGRESS_EVERY_S = 0.5
GOODBYE_LIMIT_S = 10.0
MAX_INTERRUPTS = 2
"""Number of interrupts after which the machine no longer waits for the master."""
PIECE_BYTES = 1 << 18
MAX_PIECES_IN_FLIGHT = 4
"""Maximum number of pieces of the machine's part files that are sent but not yet acknowledged."""
MessageT = TypeVar("MessageT", bound=protocol.MasterMessage)


class MasterSession:
    """A worker machine's session with the master: the messages received so far, and the tasks of this machine."""

    def __init__(self, link: Frames[Event], interrupts: Interrupts, on_progress: prepare.OnProgress) -> None:
        self.link = link
        self.joined = False
        self.closed_by_peer = ""
        """Reason why the connection to the master has ended. Empty while it is open."""
        self.began = False
        """True once this machine has received the order to start."""
        self.interrupts = interrupts
        self._on_progress = on_progress
        self._messages: dict[type, protocol.MasterMessage] = {}
        self._stopped = False
        self._outgoing = Outgoing({}, link.send)
        self._reported_s = 0.0
        self._ended_ns = 0
        self._parent = os.getppid()

    def last(self, kind: type[MessageT]) -> MessageT | None:
        """Return the last message of the type `kind` that the master has sent, or None if there was none."""
        return cast("MessageT | None", self._messages.get(kind))

    @property
    def interrupted_here(self) -> bool:
        """Return True if the user interrupted the command on this machine. A stop by the master does not count."""
        return self.interrupts.count > self._stopped

    @property
    def over(self) -> bool:
        """Return True if the session with the master has ended."""
        return bool(self.closed_by_peer or self.last(protocol.Bye))

    def listen(self, timeout_s: float) -> None:
        """Handle the events that have arrived. Wait up to `timeout_s` seconds for the first event.

        Raises TokenError if the master has refused this machine.
        """
        if os.getppid() != self._parent and not self.interrupts.count:  # the parent of this command has ended
            detached = os.getsid(0) == os.getpid() or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # setsid, nohup
            self.interrupts.count += not detached
        if self.closed_by_peer:
            time.sleep(timeout_s)
            return
        try:
            for event in self.link.available(timeout_s):
                self._handle_event(event)
        except EOFError:
            self._handle_event(protocol.PeerLost("", "the Locust process on this machine ended unexpectedly"))

    def until(self, reached: Callable[[], object]) -> None:
        """Handle events until `reached` returns a true value.

        The wait also ends when the session ends or this machine is interrupted."""
        while not reached() and not self.over and not self.interrupted_here:
            self.listen(LISTEN_S)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, protocol.Joined):
            self.joined = True
        elif isinstance(event, protocol.PeerLost):
            if event.node:
                hint = f"Set the master's {VARIABLE} here, and check the address."
                raise TokenError(f"the master refused this machine: {event.reason}", hint)
            self.closed_by_peer = self.closed_by_peer or event.reason
            self._stop()
        elif isinstance(event, protocol.Sealed):
            message = protocol.MASTER_MESSAGE.decode(event.body)
            self._messages[type(message)] = message
            if isinstance(message, protocol.Stop | protocol.Bye):
                self._stop()
            elif isinstance(message, protocol.PieceAck):
                self._outgoing.acknowledge(message)

    def _stop(self) -> None:
        """Stop the run as a first Ctrl-C would. Do nothing if there was an interrupt already.

        A second interrupt would kill the worker processes.
        """
        if not self.interrupts.count:
            self._stopped = True
            self.interrupts.count += 1

    def drive(self, tasks: Sequence[WorkerTask]) -> list[WorkerExit]:
        """Run the worker processes: open the connections, wait for the start, and send all requests.

        Return how each worker process ended.
        """
        self._outgoing = Outgoing({task.number: task.part for task in tasks}, self.link.send)

        def end() -> None:
            self._ended_ns = time.monotonic_ns()

        return coordinator.run_workers(tasks, self._begin, self.interrupts, self._tick, end)

    def deliver(self, outcomes: Sequence[WorkerExit]) -> None:
        """Send the remaining bytes of the part files, and wait for the master's last message.

        `outcomes` states how each worker process ended. The wait ends early if the master is lost or after
        MAX_INTERRUPTS interrupts.
        """
        for outcome in outcomes:
            if outcome.rescued is not None:
                self._outgoing.append(outcome.task.number, outcome.rescued)
        while not self.over and not self._outgoing.pump():
            self.listen(LISTEN_S)
        due = [outcome.due for outcome in outcomes]
        exits = [outcome.exit for outcome in outcomes]
        self.link.send(protocol.Ended(self._ended_ns, due, exits, self.interrupted_here))
        while not self.over and self.interrupts.count < MAX_INTERRUPTS:
            self.listen(LISTEN_S)

    def _begin(self, stamps: str, workers: Sequence[Worker]) -> int | None:
        """Report that this machine is ready and wait for the order to start.

        `stamps` is the least exact timestamp source of any worker. Return the start time in ns (CLOCK_MONOTONIC), or
        None if the run was cancelled.
        """
        self.link.send(protocol.Ready(stamps, least_raised(worker.scheduling for worker in workers)))
        self.until(lambda: self.last(protocol.StartAt))
        start = self.last(protocol.StartAt)
        if start is None:
            return None
        self._report(workers, start.at_ns - time.monotonic_ns())
        self.began = True
        return start.at_ns

    def _report(self, workers: Sequence[Worker], ahead_ns: int = 0) -> None:
        """Send the live counters of this machine's worker processes to the master.

        The first report is sent when the order to start the run arrives. In this report, `ahead_ns` is the time in ns
        until the start, or negative if the time of the start has already passed. In all later reports, `ahead_ns` is 0.
        """
        counts = sum_counters(worker.counts for worker in workers)
        due = [worker.counts.due for worker in workers]
        integers = [getattr(counts, name) for name in INTEGER_NAMES]
        latencies = counts.ttft.by_bucket(), counts.tpot.by_bucket()
        self.link.send(protocol.Progress(integers, counts.tokens_per_s, *latencies, due, ahead_ns))

    def _tick(self, phase: str, workers: Sequence[Worker]) -> None:
        """Handle events, report progress, and send new bytes of the part files. Called ten times a second."""
        self.listen(0)
        self._on_progress(phase, sum_counters(worker.counts for worker in workers))
        if not self.began:
            return
        self._outgoing.pump()
        now_s = time.monotonic()
        if now_s - self._reported_s >= PROGRESS_EVERY_S or phase == "ended":
            self._reported_s = now_s
            self._report(workers)


class Outgoing:
    """Sends the part files of a worker machine to the master while the files grow.

    A part file holds the records of one worker process. Bytes that cannot be sent remain in the files.
    """

    def __init__(self, parts: dict[int, Path], send: Callable[[protocol.Piece], None]) -> None:
        """Prepare to send the part files. `parts` maps the number of each worker process to its part file."""
        self._files = {worker: [path] for worker, path in parts.items()}
        self._send = send
        self._sent = dict.fromkeys(parts, 0)
        self._in_flight: set[protocol.PieceAck] = set()

    def append(self, worker: int, rescued: Path) -> None:
        """Also send the file `rescued`, after the part file of the worker process number `worker`.

        If the disk is full, a worker process writes the end of its part file to another place. This is the file
        `rescued`.
        """
        self._files[worker].append(rescued)

    def acknowledge(self, ack: protocol.PieceAck) -> None:
        """Record that the master has written a piece of a part file. The piece is no longer in flight."""
        self._in_flight.discard(ack)

    def pump(self) -> bool:
        """Send bytes of the part files that have not been sent yet. Return True if the master has acknowledged every
        byte.

        Bytes are sent in pieces. If MAX_PIECES_IN_FLIGHT pieces are not acknowledged yet, no further piece is sent.
        """
        more = True
        while more:
            more = False
            for worker in self._files:  # in turn, so that no part file waits until another is complete
                if len(self._in_flight) == MAX_PIECES_IN_FLIGHT:
                    return False
                data = _read_from(self._files[worker], self._sent[worker])
                if data:
                    more = True
                    self._send(protocol.Piece(worker, self._sent[worker], data))
                    self._sent[worker] += len(data)
                    self._in_flight.add(protocol.PieceAck(worker, self._sent[worker]))
        return not self._in_flight


def _read_from(files: Sequence[Path], offset: int) -> bytes:
    """Return up to PIECE_BYTES bytes at `offset`. The files are read as if they were one concatenated file."""
    for path in files:
        size = path.stat().st_size if path.exists() else 0
        if offset < size:
            with path.open("rb") as file:
                return os.pread(file.fileno(), PIECE_BYTES, offset)
        offset -= size
    return b""


def serve(master: Address, folder: Path, *, stay: bool, say: Say, on_progress: prepare.OnProgress) -> int:
    """Take part in one distributed run and return the exit code. With `stay`, take part in one run after another.

    Part files are kept in a new folder below `folder` until the master has written their content. Raises
    DistributedError if the master refused this machine or did not receive its part files. Also raises every error that
    `prepare.run` raises.
    """
    protocol.require_locust()
    token_of(os.environ)
    while True:
        interrupts = Interrupts()
        with interrupts.counting():
            _wait_for_name(master, say, interrupts, limit_s=inf if stay else protocol.MASTER_LIMIT_S)
        if interrupts.count:
            return EXIT_INTERRUPTED
        with interrupts.counting(), protocol.locust_process("worker", master.host, master.port) as link:
            session = MasterSession(link, interrupts, on_progress)
            say(f"waiting for the master at {master}" + ("" if stay else f", for {protocol.MASTER_LIMIT_S} s at most"))
            with new_folder(folder, f"parts-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}") as parts:
                _join(session, parts, say, stay=stay)
                assign = session.last(protocol.Assign)
                if assign is not None:
                    _take_part(session, assign, parts, say)
            if session.interrupted_here:
                return EXIT_INTERRUPTED
            bye = session.last(protocol.Bye)
            if stay:
                continue
            if (bye and bye.kept) or session.last(protocol.Wait):
                return EXIT_OK
            raise DistributedError(bye.reason if bye else session.closed_by_peer)


def _wait_for_name(master: Address, say: Say, interrupts: Interrupts, *, limit_s: float) -> None:
    """Wait until the host name of the master can be resolved. An interrupt ends the wait.

    A new machine in a cluster may get its name only after the workers have started. If the name cannot be resolved at
    first, `say` is called once. Raises DistributedError if the name still cannot be resolved after `limit_s` seconds.
    """
    deadline_s = time.monotonic() + limit_s
    is_reported = False
    while not interrupts.count:
        try:
            socket.getaddrinfo(master.host, master.port)
            return
        except OSError as error:
            problem = f"--master {master}: no such host ({error.strerror})"
        if not is_reported:
            limit = "" if limit_s == inf else f", for {limit_s:g} s at most"
            say(f"{problem}. Check the name, or write an IP address. Trying again every second{limit}.")
            is_reported = True
        if time.monotonic() >= deadline_s:
            raise DistributedError(problem, "Check the name, or write an IP address.")
        time.sleep(RESOLVE_EVERY_S)


def _join(session: MasterSession, parts: Path, say: Say, *, stay: bool) -> None:
    """Join the master and wait for an assignment.

    `parts` is the folder of the part files. If the master does not need this machine, the function returns. With
    `stay`, it waits for the next run instead.
    """
    session.until(lambda: session.joined)
    if not session.joined:
        return
    say("joined the master")
    session.link.send(protocol.Hello(version("llm-loadgen"), host.facts(), str(parts.absolute())))
    session.until(lambda: session.last(protocol.Assign) or session.last(protocol.Wait))
    wait = session.last(protocol.Wait)
    if wait is not None and session.last(protocol.Assign) is None:
        say(f"not needed now: {wait.reason}" + ("; waiting for the next run" if stay else ""))
        if stay:
            session.until(lambda: session.last(protocol.Assign))


def _take_part(session: MasterSession, assign: protocol.Assign, parts: Path, say: Say) -> None:
    """Carry out an assignment: prepare and run the tasks of this machine, and deliver its records.

    `parts` is the folder of the part files. If an error occurs before the start, the run is cancelled on all machines.
    """
    try:
        plan = Plan(**{**assign.plan, "workers": 1}).replaced(workers=assign.plan["workers"], cold=False)
        with prepare.prepare(plan, parts, say) as prepared:
            check_room(parts, prepared.bytes * assign.workers // len(prepared.tasks))
            own_tasks = [
                msgspec.structs.replace(task, id_prefix=assign.id_prefix)
                for task in prepared.tasks[assign.first : assign.first + assign.workers]
            ]
            fingerprints = [fingerprint(task.requests(), task.dialect, task.model) for task in own_tasks]
            session.link.send(protocol.PromptsReady(fingerprints, prepared.header.server))
            session.until(lambda: session.last(protocol.Connect))
            outcomes = session.drive(own_tasks) if session.last(protocol.Connect) else []
    except Exception as error:
        if not session.began:
            session.link.send(protocol.Unable(str(error), str(getattr(error, "hint", ""))))
            deadline = time.monotonic() + GOODBYE_LIMIT_S
            session.until(lambda: time.monotonic() > deadline)
        raise
    if session.began:
        session.deliver(outcomes)
    bye = session.last(protocol.Bye)
    if session.began and not (bye and bye.kept):
        reason = session.closed_by_peer or (bye.reason if bye else "interrupted twice")
        raise DistributedError(
            f"{reason}: this machine's records are in {parts}",
            "Copy its part files into the run's folder on the master, then run `loadgen report` on that folder.",
        )
    for outcome in outcomes:
        for path in (outcome.task.part, outcome.rescued):
            if path is not None:
                path.unlink(missing_ok=True)
    say(bye.reason if bye else session.closed_by_peer or "interrupted")
