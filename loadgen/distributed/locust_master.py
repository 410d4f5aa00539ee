"""The master's Locust process: Locust's MasterRunner, with the token at its door and the clock exchanges.

    python -m loadgen.distributed.locust_master HOST PORT FD      started by loadgen.distributed.link

Locust brings the sockets, the workers' heartbeats and the notice of missing ones. It patches the interpreter for gevent
as it is imported, so this module is never imported by another.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import gevent
import locust.runners as locust_runners
import msgspec
from gevent.event import AsyncResult
from gevent.lock import RLock
from locust.env import Environment
from locust.rpc import Message

from loadgen.distributed import messages, token
from loadgen.distributed.errors import TokenError
from loadgen.distributed.frames import Frames
from loadgen.distributed.offsets import exchanged

CHANNEL = "loadgen"
"""Locust's name for our messages."""
HEARD = {"client_ready", "heartbeat", "quit", CHANNEL}
"""Of Locust's own messages only those that it needs to know who is there; the rest has no use here."""
LOST_HEARTBEATS = -5
"""Locust calls a worker missing after three silent seconds and more, and goes on counting down; a busy machine may come
back. At this count nobody waits for it any more: about eight seconds after its last word."""
SERIES = 20
SERIES_GAP_S = 0.01
EXCHANGE_EVERY_S = 1.0
EXCHANGE_LIMIT_S = 2.0
WATCH_EVERY_S = 0.2
STRANGERS_MOST = 256
"""Handshakes under way at a time; the oldest gives way."""


class Master(locust_runners.MasterRunner):  # type: ignore[misc] # Locust is not typed throughout
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


class Side:
    """Lets worker machines in, passes words on, exchanges stamps."""

    def __init__(self, runner: Master, frames: Frames[messages.Orders], secret: str) -> None:
        self._runner = runner
        self._frames = frames
        self._token = secret
        self._strangers: dict[str, token.Handshake] = {}
        self._sessions: dict[str, token.Session] = {}
        self._sending = RLock()
        self._waiting: dict[int, AsyncResult] = {}
        self._exchanges = 0
        runner.register_message(CHANNEL, self._on_message)

    def obey(self) -> None:
        """Carry out the command's orders until it goes away."""
        while True:
            try:
                order = self._frames.receive()
            except EOFError:
                return
            if isinstance(order, messages.Tell):
                self._send(order.node, "words", order.body)
            elif isinstance(order, messages.Measure):
                gevent.spawn(self._series, order.node)

    def watch(self) -> None:
        """Tell of machines that left and of those that Locust has missed for too long."""
        while True:
            gevent.sleep(WATCH_EVERY_S)
            for node in list(self._sessions):
                seen = self._runner.clients.get(node)
                if seen is None:
                    self._lose(node, "it left")
                elif seen.state == locust_runners.STATE_MISSING and seen.heartbeat <= LOST_HEARTBEATS:
                    self._lose(node, "no heartbeat came any more")

    def _lose(self, node: str, reason: str) -> None:
        del self._sessions[node]
        self._frames.post(messages.Gone(node, reason))

    def _on_message(self, environment: Environment, msg: Message) -> None:  # noqa: ARG002 - by Locust's names
        arrived_ns = time.monotonic_ns()
        said, node = msg.data, msg.node_id
        if not isinstance(said, dict):
            return
        if said.get("step") == "hello":
            self._challenge(node, said)
        elif said.get("step") == "proof":
            self._judge(node, said)
        elif node in self._sessions:
            self._sealed(node, said, arrived_ns)

    def _challenge(self, node: str, said: Mapping[str, Any]) -> None:
        theirs = said.get("nonce")
        if node in self._sessions or not isinstance(theirs, bytes):
            return
        while len(self._strangers) >= STRANGERS_MOST:
            del self._strangers[next(iter(self._strangers))]
        self._strangers[node] = token.Handshake(self._token, node, theirs, token.nonce())
        self._say(node, step="challenge", nonce=self._strangers[node].master_nonce)

    def _judge(self, node: str, said: Mapping[str, Any]) -> None:
        handshake = self._strangers.pop(node, None)
        if handshake is None:
            return
        if not handshake.proves(token.WORKER, said.get("proof")):
            self._say(node, step="refused", reason=f"its {token.VARIABLE} is not the master's")
            self._frames.post(messages.Refused(node, f"its {token.VARIABLE} is not ours"))
            return
        self._sessions[node] = handshake.session(token.MASTER)
        self._say(node, step="welcome", proof=handshake.proof(token.MASTER))
        self._frames.post(messages.Joined(node))
        gevent.spawn(self._always, node)

    def _sealed(self, node: str, said: Mapping[str, Any], arrived_ns: int) -> None:
        try:
            body = self._sessions[node].open(said)
        except TokenError:
            return
        if said.get("step") == "words":
            self._frames.post(messages.Heard(node, body))
        elif said.get("step") == "pong":
            number, t2, t3 = msgspec.msgpack.decode(body, type=tuple[int, int, int])
            if (waiting := self._waiting.get(number)) is not None:
                waiting.set((t2, t3, arrived_ns))

    def _always(self, node: str) -> None:
        """An exchange a second, as long as the machine is there."""
        while node in self._sessions:
            self._exchange(node)
            gevent.sleep(EXCHANGE_EVERY_S)

    def _series(self, node: str) -> None:
        for _ in range(SERIES):
            if node in self._sessions:
                self._exchange(node)
                gevent.sleep(SERIES_GAP_S)
        self._frames.post(messages.Measured(node))

    def _exchange(self, node: str) -> None:
        number = self._exchanges = self._exchanges + 1
        waiting = self._waiting[number] = AsyncResult()
        body = msgspec.msgpack.encode(number)
        t1 = time.monotonic_ns()
        self._send(node, "ping", body)
        try:
            t2, t3, t4 = waiting.get(timeout=EXCHANGE_LIMIT_S)
        except gevent.Timeout:
            return
        finally:
            del self._waiting[number]
        sample = exchanged(t1, t2, t3, t4)
        self._frames.post(messages.Exchanged(node, sample.at_ns, sample.offset_ns, sample.round_trip_ns))

    def _send(self, node: str, step: str, body: bytes) -> None:
        with self._sending:  # the numbers go out in their order
            if (session := self._sessions.get(node)) is not None:
                self._say(node, step=step, **session.seal(body))

    def _say(self, node: str, **said: object) -> None:
        self._runner.send_message(CHANNEL, said, client_id=node)


def main(host: str, port: int, fd: int) -> None:
    """Until the command goes away."""
    frames: Frames[messages.Orders] = Frames(socket.socket(fileno=fd), messages.Orders)
    try:
        environment = Environment()
        runner = Master(environment, host, port)
    except (Exception, SystemExit) as error:
        reason = "something else listens there" if isinstance(error, SystemExit) else str(error)
        frames.post(messages.Refused("", reason))
        return
    environment.runner = runner
    side = Side(runner, frames, token.token_of(os.environ))
    frames.post(messages.Bound(runner.server.port))
    gevent.spawn(side.watch)
    side.obey()
    runner.quit()
    runner.server.close(linger=500)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # what matters goes to the command in words
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
