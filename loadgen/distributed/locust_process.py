"""The Locust process of a distributed run: sockets, heartbeats, and the check of the shared token.

    python -m loadgen.distributed.locust_process ROLE HOST PORT FD      started by loadgen.distributed.protocol

Locust provides the sockets, the heartbeats and the detection of lost machines. Importing Locust patches the interpreter
for gevent. Therefore no other module imports this one, and nothing is measured in this process.

In this module, "the command" is the loadgen command that started this process, on the same machine. The command sends
orders to this process and receives events from it, through a socket.
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
"""Locust message type of all loadgen messages."""
ACCEPTED_TYPES = {"client_ready", "heartbeat", "quit", CHANNEL}
"""Message types that the master accepts. Messages of other types are ignored. Locust needs the first three types to
track machines."""
ACCEPTED_BY_WORKER = {"ack", "heartbeat", "quit", "reconnect", CHANNEL}
"""Message types that a worker accepts. Messages of other types are ignored. Locust needs all but the last for the
connection."""
LOST_HEARTBEATS = -5
"""Heartbeat count at which a machine is lost, about eight seconds after its last message.

Locust reports a worker as missing after three silent seconds and continues to count down. A busy machine may recover
before the count reaches this value.
"""
MASTER_SILENCE_S = 20
"""Time in seconds without a heartbeat after which a worker machine considers the master lost. Locust's own limit is a
minute."""
HANDSHAKE_LIMIT_S = 15.0
NONCE_BYTES = 16
SERIES_LENGTH = 20
SERIES_GAP_S = 0.01
EXCHANGE_EVERY_S = 1.0
EXCHANGE_LIMIT_S = 2.0
WATCH_EVERY_S = 0.2
MAX_PENDING_HANDSHAKES = 256
"""Maximum number of unfinished handshakes. A new handshake beyond this limit replaces the oldest one."""

Payload = Mapping[str, Any]
"""Content of a message of type CHANNEL. It is untrusted, because any host that reaches the port can send one."""


class GuardedRunner(locust_runners.MasterRunner):  # type: ignore[misc] # Locust is not typed throughout
    """Locust's master runner, restricted to the accepted message types and robust against malformed bytes."""

    def handle_message(self, client_id: str, msg: Message) -> None:
        """Handle a message of an accepted type. Ignore a message of any other type, or with a wrong sender.

        The sender is wrong if the node ID in the message is not `client_id`, the ID of the machine that has sent it.
        """
        if msg.type in ACCEPTED_TYPES and msg.node_id == client_id:
            super().handle_message(client_id, msg)

    def client_listener(self) -> NoReturn:
        """Listen for messages, and continue after malformed bytes. Locust's own listener stops at malformed bytes."""
        while True:
            try:
                super().client_listener()
            except Exception:  # noqa: S112 - a stranger's bytes may raise anything
                continue


class GuardedWorker(locust_runners.WorkerRunner):  # type: ignore[misc] # Locust is not typed throughout
    """Locust's worker runner, restricted to the accepted message types and robust against malformed bytes.

    Messages from the master are checked too, because the peer at the master's address may be any program.
    """

    def handle_message(self, msg: Message) -> None:
        """Handle a message if its type is accepted. Ignore any other message, such as Locust's order to start users."""
        if msg.type in ACCEPTED_BY_WORKER:
            super().handle_message(msg)

    def worker(self) -> NoReturn:
        """Receive messages, and continue after malformed bytes. Locust's own loop stops at malformed bytes."""
        while True:
            try:
                super().worker()
            except Exception:  # noqa: S112 - a stranger's bytes may raise anything
                continue


class Peer:
    """Base class of the master's side and the worker machine's side of a distributed run.

    A peer runs in a Locust process, which a loadgen command has started. The peer runs the handshake, opens sealed
    messages and passes them to the command, and carries out the command's orders.
    """

    role: str

    def __init__(self, runner: Any, frames: Frames[Order], **handshake: Callable[[str, Payload], None]) -> None:
        """Register for Locust's messages.

        `handshake` maps each step of the handshake to the function that handles its message. These functions may
        receive messages from any program, because the sender has not yet proven that it knows the shared token.
        """
        self.runner = runner
        self.frames = frames
        self.token = protocol.token_of(os.environ)
        self.channels: dict[str, protocol.SealedChannel] = {}
        """Channels of authenticated peers, by node. A worker has only the channel to the master, under an empty name.
        """
        self.sealed: dict[str, Callable[[str, bytes, int], None]] = {
            "words": lambda node, body, _: frames.post(protocol.Sealed(node, body))
        }
        """Handlers of opened messages, by step. A handler takes the node, the body and the arrival time in ns."""
        self._handshake = handshake
        self._sending = RLock()
        runner.register_message(CHANNEL, self._on_message)

    def obey(self, series: Callable[[str], None] | None = None) -> None:
        """Carry out the orders that the loadgen command sends, until the command closes its socket.

        The function `series` runs a series of clock exchanges with a worker machine, whose name is its argument. Only
        the master passes this function.
        """
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
        """Open the sealed channel to a node, and report the node to the loadgen command.

        `handshake` is the finished handshake, which has proven that the node knows the shared token.
        """
        self.channels[node] = handshake.channel(self.role)
        self.frames.post(protocol.Joined(handshake.node))

    def send(self, node: str, step: str, body: Callable[[], bytes]) -> None:
        """Send a message to the machine `node` through its sealed channel. Do nothing if `node` has no sealed channel.

        A sealed channel adds a number and an authentication code to every message. `body` is a function that returns
        the content of the message. `step` is the type of the message, such as `ping`. The authentication code protects
        only the content, not the type.

        While `body` runs, no other message can be sent. Messages are therefore sent in the order of their numbers.
        """
        with self._sending:
            channel = self.channels.get(node)
            if channel is not None:
                self.send_open(node, step=step, **channel.seal(body()))

    def send_open(self, node: str, **payload: object) -> None:
        """Send the message `payload` to a node, without an authentication code.

        A worker machine is connected only to the master, so `node` has no effect there.
        """
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
    """The master's side of a distributed run.

    Admits worker machines, exchanges timestamps with them, and reports lost machines.
    """

    role = protocol.MASTER

    def __init__(self, runner: GuardedRunner, frames: Frames[Order]) -> None:
        super().__init__(runner, frames, hello=self._challenge, proof=self._check_proof)
        self.sealed["pong"] = self._on_pong
        self._pending: dict[str, protocol.Handshake] = {}
        self._answered: defaultdict[str, Event] = defaultdict(Event)

    def watch(self) -> None:
        """Report to the loadgen command which machines have disconnected or have been silent for too long."""
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
        """Run a series of clock exchanges with a node, one shortly after the other.

        The exchange with the shortest round trip is the most exact one. When the series has ended, the loadgen command
        is notified.
        """
        self._exchange(node, range(SERIES_LENGTH), SERIES_GAP_S)
        self.frames.post(protocol.ClockSeries(node))

    def _exchange(self, node: str, times: Iterable[int], gap_s: float) -> None:
        """Exchange timestamps with the machine `node`, once for each element of `times`.

        For example, `range(20)` gives 20 exchanges. Each exchange waits for the machine's answer for up to
        EXCHANGE_LIMIT_S. The next exchange starts `gap_s` seconds after the end of the wait. If the machine
        disconnects, the function returns early.
        """
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
    """The worker machine's side of a distributed run.

    Proves that the machine knows the shared token, and answers clock exchanges."""

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
    """Run the Locust process of a machine until the loadgen command that started this process ends.

    - `role` is the role of the machine in the distributed run: `master` or `worker`.
    - `host` and `port` are the address of the master.
    - `fd` is the file descriptor of the socket to the command.

    On a worker machine, the process also ends when the connection to the master is lost.
    """
    locust_runners.MASTER_HEARTBEAT_TIMEOUT = MASTER_SILENCE_S
    locust_runners.CONNECT_RETRY_COUNT = protocol.MASTER_LIMIT_S // locust_runners.CONNECT_TIMEOUT - 1
    command = socket.socket(fileno=fd)
    frames: Frames[Order] = Frames(command, Order)
    watching = gevent.spawn(_end_with, command)  # Locust may search for the master for minutes
    environment = Environment()
    at_master = role == protocol.MASTER
    try:
        runner = (GuardedRunner if at_master else GuardedWorker)(environment, host, port)
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
    runner.environment.events.quitting.fire(environment=runner.environment)  # informs the master
    runner.greenlet.kill(block=True)  # otherwise it would read from a closed socket forever
    runner.client.close(linger=1000)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # the command reports what matters
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
