"""Locust's side of a run over several machines: its sockets and heartbeats, with the token at the door.

    python -m loadgen.distributed.locust_process ROLE HOST PORT FD      started by loadgen.distributed.protocol

Locust brings the sockets, the heartbeats and the notice of who is gone. It patches the interpreter for gevent as it is
imported, so this module is never imported by another, and nothing is measured in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import gevent
import locust.runners as locust_runners
import msgspec
from gevent.event import Event
from gevent.lock import RLock
from locust.env import Environment
from locust.rpc import Message

from loadgen.distributed import TokenError, protocol
from loadgen.distributed.protocol import Frames, Order, exchanged

CHANNEL = "loadgen"
"""Locust's name for our messages."""
HEARD = {"client_ready", "heartbeat", "quit", CHANNEL}
"""Of Locust's own messages to the master only those that it needs to know who is there; the rest has no use here."""
LOST_HEARTBEATS = -5
"""Locust calls a worker missing after three silent seconds and more, and goes on counting down; a busy machine may come
back. At this count nobody waits for it any more: about eight seconds after its last word."""
MASTER_SILENCE_S = 20
"""Without a heartbeat of the master for so long, it is gone. Locust's own limit is a minute."""
HANDSHAKE_LIMIT_S = 15.0
NONCE_BYTES = 16
SERIES = 20
SERIES_GAP_S = 0.01
EXCHANGE_EVERY_S = 1.0
EXCHANGE_LIMIT_S = 2.0
WATCH_EVERY_S = 0.2
STRANGERS_MOST = 256
"""Handshakes under way at a time; the oldest gives way."""

Said = Mapping[str, Any]
"""A message on our channel, which a stranger may have sent."""


class GuardedRunner(locust_runners.MasterRunner):  # type: ignore[misc] # Locust is not typed throughout
    """Locust's master, deaf to what has no use here, and not to be silenced by bytes that are no message."""

    def handle_message(self, client_id: str, msg: Message) -> None:
        """Only what the sender says in its own name."""
        if msg.type in HEARD and msg.node_id == client_id:
            super().handle_message(client_id, msg)

    def client_listener(self) -> NoReturn:
        """Locust ends here on bytes that msgpack cannot make a message of; then listen again."""
        while True:
            try:
                super().client_listener()
            except Exception:  # noqa: S112 - whatever a stranger's bytes brought about
                continue


class Peer:
    """What both sides do: open and pass on what is sealed, give the rest to the handshake, obey the command."""

    role: str

    def __init__(self, runner: Any, frames: Frames[Order], **handshake: Callable[[str, Said], None]) -> None:
        """`handshake` takes the messages of those that have not proven themselves, by their step."""
        self.runner = runner
        self.frames = frames
        self.token = protocol.token_of(os.environ)
        self.channels: dict[str, protocol.SealedChannel] = {}
        """By node, of those that have proven themselves; a worker has the master's only, whose name is empty."""
        self.sealed: dict[str, Callable[[str, bytes, int], None]] = {
            "words": lambda node, body, _: frames.post(protocol.Sealed(node, body))
        }
        """By step, what takes a message that was opened: its node, its body and when it came."""
        self._handshake = handshake
        self._sending = RLock()
        runner.register_message(CHANNEL, self._on_message)

    def obey(self, series: Callable[[str], None] | None = None) -> None:
        """Carry out the command's orders until it goes away; at the master also that of a series of exchanges."""
        while True:
            try:
                order = self.frames.receive()
            except EOFError:
                return
            if isinstance(order, protocol.Sealed):
                self.send(order.node, "words", partial(bytes, order.body))
            elif order is not None and series is not None:
                gevent.spawn(series, order.node)

    def enter(self, node: str, handshake: protocol.Handshake) -> None:
        """The other side has proven itself."""
        self.channels[node] = handshake.channel(self.role)
        self.frames.post(protocol.Joined(handshake.node))

    def send(self, node: str, step: str, body: Callable[[], bytes]) -> None:
        """Seal and send what `body` gives when its turn has come: the numbers go out in their order."""
        with self._sending:
            if (channel := self.channels.get(node)) is not None:
                self.say(node, step=step, **channel.seal(body()))

    def say(self, node: str, **said: object) -> None:
        """Send as it is. A worker has nobody but the master to send it to."""
        self.runner.send_message(CHANNEL, said, client_id=node)

    def _on_message(self, environment: Environment, msg: Message) -> None:  # noqa: ARG002 - by Locust's names
        arrived_ns = time.monotonic_ns()
        said, node = msg.data, msg.node_id if self.role == protocol.MASTER else ""
        step = said.get("step") if isinstance(said, dict) else None
        if not isinstance(step, str):
            return
        if node not in self.channels:
            if step in self._handshake:
                self._handshake[step](node, said)
            return
        with contextlib.suppress(TokenError):
            body = self.channels[node].open(said)
            if step in self.sealed:
                self.sealed[step](node, body, arrived_ns)


class MasterPeer(Peer):
    """The master's side: lets worker machines in, exchanges stamps with them, and tells who is gone."""

    role = protocol.MASTER

    def __init__(self, runner: GuardedRunner, frames: Frames[Order]) -> None:
        super().__init__(runner, frames, hello=self._challenge, proof=self._judge)
        self.sealed["pong"] = self._take
        self._strangers: dict[str, protocol.Handshake] = {}
        self._answered: defaultdict[str, Event] = defaultdict(Event)

    def watch(self) -> None:
        """Tell of machines that left and of those that Locust has missed for too long."""
        while True:
            gevent.sleep(WATCH_EVERY_S)
            for node in list(self.channels):
                seen = self.runner.clients.get(node)
                missed = seen and seen.state == locust_runners.STATE_MISSING and seen.heartbeat <= LOST_HEARTBEATS
                if seen is None or missed:
                    del self.channels[node]
                    self.frames.post(protocol.PeerLost(node, "no heartbeat came any more" if missed else "it left"))

    def _challenge(self, node: str, said: Said) -> None:
        theirs = said.get("nonce")
        if not isinstance(theirs, bytes):
            return
        while len(self._strangers) >= STRANGERS_MOST:
            del self._strangers[next(iter(self._strangers))]
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._strangers[node] = protocol.Handshake(self.token, node, theirs, nonce)
        self.say(node, step="challenge", nonce=nonce)

    def _judge(self, node: str, said: Said) -> None:
        handshake = self._strangers.pop(node, None)
        if handshake is None:
            return
        if not handshake.proves(protocol.WORKER, said.get("proof")):
            self.say(node, step="refused", reason=f"its {protocol.VARIABLE} is not the master's")
            self.frames.post(protocol.PeerLost(node, f"its {protocol.VARIABLE} is not ours"))
            return
        self.enter(node, handshake)  # first: the machine may answer at once
        self.say(node, step="welcome", proof=handshake.proof(protocol.MASTER))
        gevent.spawn(self._exchange, node, itertools.count(), EXCHANGE_EVERY_S)

    def series(self, node: str) -> None:
        """Many exchanges, now: the quickest of them tells the most."""
        self._exchange(node, range(SERIES), SERIES_GAP_S)
        self.frames.post(protocol.ClockSeries(node))

    def _exchange(self, node: str, times: Iterable[int], gap_s: float) -> None:
        """Send stamps, which come back with the machine's own, as long as it is there. Until one is back, or until the
        limit, no other follows."""
        for _ in times:
            if node not in self.channels:
                return
            self._answered[node].clear()
            self.send(node, "ping", lambda: msgspec.msgpack.encode(time.monotonic_ns()))
            self._answered[node].wait(EXCHANGE_LIMIT_S)
            gevent.sleep(gap_s)

    def _take(self, node: str, body: bytes, arrived_ns: int) -> None:
        t1, t2, t3 = msgspec.msgpack.decode(body, type=tuple[int, int, int])
        self.frames.post(protocol.Exchanged(node, exchanged(t1, t2, t3, arrived_ns)))
        self._answered[node].set()


class WorkerPeer(Peer):
    """The worker's side: proves itself, and answers exchanges."""

    role = protocol.WORKER

    def __init__(self, runner: locust_runners.WorkerRunner, frames: Frames[Order]) -> None:
        super().__init__(runner, frames, challenge=self._prove, refused=self._refused, welcome=self._welcome)
        self.sealed["ping"] = self._answer
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._mine: protocol.Handshake | None = None
        self.say("", step="hello", nonce=self._nonce)
        silent = {"reason": "a Locust master answers there, but not as loadgen's does"}
        gevent.spawn_later(HANDSHAKE_LIMIT_S, self._refused, "", silent)

    def _refused(self, _node: str, said: Said) -> None:
        if not self.channels:
            self.frames.post(protocol.PeerLost(self.runner.client_id, str(said.get("reason"))))

    def _prove(self, node: str, said: Said) -> None:
        theirs = said.get("nonce")
        if self._mine is None and isinstance(theirs, bytes):
            self._mine = protocol.Handshake(self.token, self.runner.client_id, self._nonce, theirs)
            self.say(node, step="proof", proof=self._mine.proof(protocol.WORKER))

    def _welcome(self, node: str, said: Said) -> None:
        if self._mine is None or not self._mine.proves(protocol.MASTER, said.get("proof")):
            self._refused(node, {"reason": f"what answers there has another {protocol.VARIABLE}"})
        else:
            self.enter(node, self._mine)

    def _answer(self, node: str, body: bytes, arrived_ns: int) -> None:
        sent_ns = msgspec.msgpack.decode(body, type=int)
        self.send(node, "pong", lambda: msgspec.msgpack.encode((sent_ns, arrived_ns, time.monotonic_ns())))


def main(role: str, host: str, port: int, fd: int) -> None:
    """Until the command, or at a worker machine the master, goes away."""
    locust_runners.MASTER_HEARTBEAT_TIMEOUT = MASTER_SILENCE_S
    locust_runners.CONNECT_RETRY_COUNT = protocol.MASTER_LIMIT_S // locust_runners.CONNECT_TIMEOUT - 1
    command = socket.socket(fileno=fd)
    frames: Frames[Order] = Frames(command, Order)
    watching = gevent.spawn(_end_with, command)  # while Locust looks for the master and nobody obeys
    environment = Environment()
    at_master = role == protocol.MASTER
    try:
        runner = GuardedRunner(environment, host, port) if at_master else environment.create_worker_runner(host, port)
    except (Exception, SystemExit) as error:
        taken = at_master and isinstance(error, SystemExit)
        reason = "something else listens there" if taken else str(error) or "no master answers there"
        frames.post(protocol.PeerLost("", reason))
        return
    watching.kill()
    environment.runner = runner
    if not at_master:
        _worker(runner, frames)
        return
    peer = MasterPeer(runner, frames)
    frames.post(protocol.Listening(runner.server.port))
    gevent.spawn(peer.watch)
    peer.obey(peer.series)
    runner.quit()
    runner.server.close(linger=500)


def _end_with(command: socket.socket) -> None:
    if not command.recv(1, socket.MSG_PEEK):
        os._exit(0)


def _worker(runner: locust_runners.WorkerRunner, frames: Frames[Order]) -> None:
    obeying = gevent.spawn(WorkerPeer(runner, frames).obey)

    def until_left() -> None:
        runner.greenlet.join()  # Locust's own greenlets end when the master has said so, or is silent
        frames.post(protocol.PeerLost("", "the master is gone"))
        obeying.kill()

    gevent.spawn(until_left)
    obeying.join()
    runner.environment.events.quitting.fire(environment=runner.environment)  # tells the master
    runner.greenlet.kill(block=True)  # or it would read from a closed socket for ever
    runner.client.close(linger=1000)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # what matters goes to the command in words
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
