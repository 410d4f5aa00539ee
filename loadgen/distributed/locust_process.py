"""Locust's side of a run over several machines: sockets, heartbeats, and a token check for new machines.

    python -m loadgen.distributed.locust_process ROLE HOST PORT FD      started by loadgen.distributed.protocol

Locust provides the sockets, the heartbeats and the detection of lost machines. Importing Locust patches the
interpreter for gevent. So no other module imports this one, and nothing is measured in this process.
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
"""Locust's message type for our messages."""
ACCEPTED_TYPES = {"client_ready", "heartbeat", "quit", CHANNEL}
"""Message types that the master accepts. Locust needs the first three to track machines; others are ignored."""
LOST_HEARTBEATS = -5
"""Heartbeat count at which a machine is lost, about eight seconds after its last message. Locust calls a worker missing
after three silent seconds and keeps counting down; until then a busy machine may come back."""
MASTER_SILENCE_S = 20
"""The master is lost after this time without a heartbeat. Locust's own limit is a minute."""
HANDSHAKE_LIMIT_S = 15.0
NONCE_BYTES = 16
SERIES_LENGTH = 20
SERIES_GAP_S = 0.01
EXCHANGE_EVERY_S = 1.0
EXCHANGE_LIMIT_S = 2.0
WATCH_EVERY_S = 0.2
MAX_PENDING_HANDSHAKES = 256
"""A new handshake beyond this limit replaces the oldest."""

Payload = Mapping[str, Any]
"""The content of a message on our channel. A stranger may have sent it."""


class GuardedRunner(locust_runners.MasterRunner):  # type: ignore[misc] # Locust is not typed throughout
    """Locust's master, restricted to the messages used here and robust against malformed bytes."""

    def handle_message(self, client_id: str, msg: Message) -> None:
        """Handle an accepted message that bears its sender's own name."""
        if msg.type in ACCEPTED_TYPES and msg.node_id == client_id:
            super().handle_message(client_id, msg)

    def client_listener(self) -> NoReturn:
        """Listen again after malformed bytes, on which Locust's own listener would end."""
        while True:
            try:
                super().client_listener()
            except Exception:  # noqa: S112 - a stranger's bytes may raise anything
                continue


class Peer:
    """The part that both sides share: open sealed messages and pass them on, run the handshake, obey the command."""

    role: str

    def __init__(self, runner: Any, frames: Frames[Order], **handshake: Callable[[str, Payload], None]) -> None:
        """`handshake` maps a step to the handler of messages from nodes that have not proven themselves."""
        self.runner = runner
        self.frames = frames
        self.token = protocol.token_of(os.environ)
        self.channels: dict[str, protocol.SealedChannel] = {}
        """By node: the channels of proven peers. A worker has only the master's channel, under an empty name."""
        self.sealed: dict[str, Callable[[str, bytes, int], None]] = {
            "words": lambda node, body, _: frames.post(protocol.Sealed(node, body))
        }
        """By step: the handler of an opened message. It takes the node, the body and the arrival time in ns."""
        self._handshake = handshake
        self._sending = RLock()
        runner.register_message(CHANNEL, self._on_message)

    def obey(self, series: Callable[[str], None] | None = None) -> None:
        """Carry out the command's orders until it is gone. The master passes `series` to run clock exchanges."""
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
        """Open the channel to a node that has proven itself."""
        self.channels[node] = handshake.channel(self.role)
        self.frames.post(protocol.Joined(handshake.node))

    def send(self, node: str, step: str, body: Callable[[], bytes]) -> None:
        """Seal and send a message. `body` is called under the lock, so that message numbers go out in order."""
        with self._sending:
            channel = self.channels.get(node)
            if channel is not None:
                self.send_open(node, step=step, **channel.seal(body()))

    def send_open(self, node: str, **payload: object) -> None:
        """Send a message that is not sealed. A worker always sends to the master."""
        self.runner.send_message(CHANNEL, payload, client_id=node)

    def _on_message(self, environment: Environment, msg: Message) -> None:  # noqa: ARG002 - Locust passes keywords
        arrived_ns = time.monotonic_ns()
        payload = msg.data
        node = msg.node_id if self.role == protocol.MASTER else ""
        step = payload.get("step") if isinstance(payload, dict) else None
        if not isinstance(step, str):
            return
        if node not in self.channels:
            if step in self._handshake:
                self._handshake[step](node, payload)
            return
        with contextlib.suppress(TokenError):
            body = self.channels[node].open(payload)
            if step in self.sealed:
                self.sealed[step](node, body, arrived_ns)


class MasterPeer(Peer):
    """The master's side: admits worker machines, exchanges timestamps with them, and reports lost machines."""

    role = protocol.MASTER

    def __init__(self, runner: GuardedRunner, frames: Frames[Order]) -> None:
        super().__init__(runner, frames, hello=self._challenge, proof=self._check_proof)
        self.sealed["pong"] = self._on_pong
        self._pending: dict[str, protocol.Handshake] = {}
        self._answered: defaultdict[str, Event] = defaultdict(Event)

    def watch(self) -> None:
        """Report machines that left and machines that have been silent for too long."""
        while True:
            gevent.sleep(WATCH_EVERY_S)
            for node in list(self.channels):
                seen = self.runner.clients.get(node)
                missed = seen and seen.state == locust_runners.STATE_MISSING and seen.heartbeat <= LOST_HEARTBEATS
                if seen is None or missed:
                    del self.channels[node]
                    self.frames.post(protocol.PeerLost(node, "its heartbeats stopped" if missed else "it left"))

    def _challenge(self, node: str, payload: Payload) -> None:
        worker_nonce = payload.get("nonce")
        if not isinstance(worker_nonce, bytes):
            return
        while len(self._pending) >= MAX_PENDING_HANDSHAKES:
            del self._pending[next(iter(self._pending))]
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._pending[node] = protocol.Handshake(self.token, node, worker_nonce, nonce)
        self.send_open(node, step="challenge", nonce=nonce)

    def _check_proof(self, node: str, payload: Payload) -> None:
        handshake = self._pending.pop(node, None)
        if handshake is None:
            return
        if not handshake.is_proof(protocol.WORKER, payload.get("proof")):
            self.send_open(node, step="refused", reason=f"its {protocol.VARIABLE} is not the master's")
            self.frames.post(protocol.PeerLost(node, f"its {protocol.VARIABLE} is not ours"))
            return
        self.enter(node, handshake)  # before the welcome: the machine may answer at once
        self.send_open(node, step="welcome", proof=handshake.proof(protocol.MASTER))
        gevent.spawn(self._exchange, node, itertools.count(), EXCHANGE_EVERY_S)

    def series(self, node: str) -> None:
        """Run many exchanges at once. The one with the shortest round trip is the most exact."""
        self._exchange(node, range(SERIES_LENGTH), SERIES_GAP_S)
        self.frames.post(protocol.ClockSeries(node))

    def _exchange(self, node: str, times: Iterable[int], gap_s: float) -> None:
        """Exchange timestamps with a connected machine. Each exchange ends, or times out, before the next."""
        for _ in times:
            if node not in self.channels:
                return
            self._answered[node].clear()
            self.send(node, "ping", lambda: msgspec.msgpack.encode(time.monotonic_ns()))
            self._answered[node].wait(EXCHANGE_LIMIT_S)
            gevent.sleep(gap_s)

    def _on_pong(self, node: str, body: bytes, arrived_ns: int) -> None:
        t1, t2, t3 = msgspec.msgpack.decode(body, type=tuple[int, int, int])
        self.frames.post(protocol.Exchanged(node, exchanged(t1, t2, t3, arrived_ns)))
        self._answered[node].set()


class WorkerPeer(Peer):
    """The worker's side: proves that it holds the token and answers clock exchanges."""

    role = protocol.WORKER

    def __init__(self, runner: locust_runners.WorkerRunner, frames: Frames[Order]) -> None:
        super().__init__(runner, frames, challenge=self._prove, refused=self._refused, welcome=self._welcome)
        self.sealed["ping"] = self._answer
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._own_handshake: protocol.Handshake | None = None
        self.send_open("", step="hello", nonce=self._nonce)
        silent = {"reason": "the Locust master at that address is not a loadgen master"}
        gevent.spawn_later(HANDSHAKE_LIMIT_S, self._refused, "", silent)

    def _refused(self, _node: str, payload: Payload) -> None:
        if not self.channels:
            self.frames.post(protocol.PeerLost(self.runner.client_id, str(payload.get("reason"))))

    def _prove(self, node: str, payload: Payload) -> None:
        master_nonce = payload.get("nonce")
        if self._own_handshake is None and isinstance(master_nonce, bytes):
            handshake = protocol.Handshake(self.token, self.runner.client_id, self._nonce, master_nonce)
            self._own_handshake = handshake
            self.send_open(node, step="proof", proof=handshake.proof(protocol.WORKER))

    def _welcome(self, node: str, payload: Payload) -> None:
        handshake = self._own_handshake
        if handshake is None or not handshake.is_proof(protocol.MASTER, payload.get("proof")):
            self._refused(node, {"reason": f"the master there has another {protocol.VARIABLE}"})
        else:
            self.enter(node, handshake)

    def _answer(self, node: str, body: bytes, arrived_ns: int) -> None:
        sent_ns = msgspec.msgpack.decode(body, type=int)
        self.send(node, "pong", lambda: msgspec.msgpack.encode((sent_ns, arrived_ns, time.monotonic_ns())))


def main(role: str, host: str, port: int, fd: int) -> None:
    """Run until the command is gone or, at a worker machine, until the master is gone."""
    locust_runners.MASTER_HEARTBEAT_TIMEOUT = MASTER_SILENCE_S
    locust_runners.CONNECT_RETRY_COUNT = protocol.MASTER_LIMIT_S // locust_runners.CONNECT_TIMEOUT - 1
    command = socket.socket(fileno=fd)
    frames: Frames[Order] = Frames(command, Order)
    watching = gevent.spawn(_end_with, command)  # Locust may search for the master for minutes
    environment = Environment()
    at_master = role == protocol.MASTER
    try:
        runner = GuardedRunner(environment, host, port) if at_master else environment.create_worker_runner(host, port)
    except (Exception, SystemExit) as error:
        if at_master and isinstance(error, SystemExit):
            reason = "the port is in use"
        else:
            reason = str(error) or "no master answers there"
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
        runner.greenlet.join()  # ends when the master ends it or is silent
        frames.post(protocol.PeerLost("", "the master is gone"))
        obeying.kill()

    gevent.spawn(until_left)
    obeying.join()
    runner.environment.events.quitting.fire(environment=runner.environment)  # tells the master
    runner.greenlet.kill(block=True)  # or it would read from a closed socket for ever
    runner.client.close(linger=1000)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # the command reports what matters
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
