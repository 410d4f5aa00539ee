"""A worker machine's Locust process: Locust's WorkerRunner, which proves the token and answers the clock exchanges.

    python -m loadgen.distributed.locust_worker HOST PORT FD      started by loadgen.distributed.link

Locust brings the socket, the heartbeats and the notice of a master that is gone. It patches the interpreter for gevent
as it is imported, so this module is never imported by another, and nothing is measured in this process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import gevent
import locust.runners as locust_runners
import msgspec
from gevent.lock import RLock
from locust.env import Environment
from locust.rpc import Message

from loadgen.distributed import messages, token
from loadgen.distributed.errors import TokenError
from loadgen.distributed.frames import Frames

CHANNEL = "loadgen"
MASTER_SILENCE_S = 20
"""Without a heartbeat of the master for so long, it is gone. Locust's own limit is a minute."""
HANDSHAKE_LIMIT_S = 15.0


class Side:
    """Proves itself, passes words on, answers exchanges."""

    def __init__(self, runner: locust_runners.WorkerRunner, frames: Frames[messages.Orders], secret: str) -> None:
        self._runner = runner
        self._frames = frames
        self._token = secret
        self._nonce = token.nonce()
        self._handshake: token.Handshake | None = None
        self._session: token.Session | None = None
        self._sending = RLock()
        runner.register_message(CHANNEL, self._on_message)

    def begin(self) -> None:
        """Ask to be let in."""
        self._say(step="hello", nonce=self._nonce)
        gevent.spawn_later(HANDSHAKE_LIMIT_S, self._give_up)

    def obey(self) -> None:
        """Carry out the command's orders until it goes away."""
        while True:
            try:
                order = self._frames.receive()
            except EOFError:
                return
            if isinstance(order, messages.Tell):
                self._send("words", order.body)

    def _give_up(self) -> None:
        if self._session is None:
            self._refuse("a Locust master answers there, but not as loadgen's does")

    def _refuse(self, reason: str) -> None:
        self._frames.post(messages.Refused(self._runner.client_id, reason))

    def _on_message(self, environment: Environment, msg: Message) -> None:  # noqa: ARG002 - by Locust's names
        arrived_ns = time.monotonic_ns()
        said = msg.data
        if not isinstance(said, dict):
            return
        step = said.get("step")
        if step == "challenge" and self._handshake is None:
            self._prove(said)
        elif step == "refused" and self._session is None:
            self._refuse(str(said.get("reason")))
        elif step == "welcome" and self._session is None:
            self._enter(said)
        elif self._session is not None:
            self._sealed(self._session, said, arrived_ns)

    def _prove(self, said: Mapping[str, Any]) -> None:
        theirs = said.get("nonce")
        if isinstance(theirs, bytes):
            self._handshake = token.Handshake(self._token, self._runner.client_id, self._nonce, theirs)
            self._say(step="proof", proof=self._handshake.proof(token.WORKER))

    def _enter(self, said: Mapping[str, Any]) -> None:
        if self._handshake is None or not self._handshake.proves(token.MASTER, said.get("proof")):
            self._refuse(f"what answers there has another {token.VARIABLE}")
            return
        self._session = self._handshake.session(token.WORKER)
        self._frames.post(messages.Joined(self._runner.client_id))

    def _sealed(self, session: token.Session, said: Mapping[str, Any], arrived_ns: int) -> None:
        try:
            body = session.open(said)
        except TokenError:
            return
        if said.get("step") == "ping":
            number = msgspec.msgpack.decode(body, type=int)
            with self._sending:
                reply = msgspec.msgpack.encode((number, arrived_ns, time.monotonic_ns()))
                self._say(step="pong", **session.seal(reply))
        elif said.get("step") == "words":
            self._frames.post(messages.Heard("", body))

    def _send(self, step: str, body: bytes) -> None:
        with self._sending:  # the numbers go out in their order
            if self._session is not None:
                self._say(step=step, **self._session.seal(body))

    def _say(self, **said: object) -> None:
        self._runner.send_message(CHANNEL, said)


def main(host: str, port: int, fd: int) -> None:
    """Until the command, or the master, goes away."""
    locust_runners.MASTER_HEARTBEAT_TIMEOUT = MASTER_SILENCE_S
    frames: Frames[messages.Orders] = Frames(socket.socket(fileno=fd), messages.Orders)
    environment = Environment()
    try:
        runner = environment.create_worker_runner(host, port)
    except (Exception, SystemExit) as error:
        frames.post(messages.Refused("", str(error) or "no master answers there"))
        return
    side = Side(runner, frames, token.token_of(os.environ))
    side.begin()
    obeying = gevent.spawn(side.obey)
    gevent.spawn(_until_left, runner, frames, obeying)
    obeying.join()
    environment.events.quitting.fire(environment=environment)  # tells the master
    runner.greenlet.kill(block=True)  # or it would read from a closed socket for ever
    runner.client.close(linger=1000)


def _until_left(runner: locust_runners.WorkerRunner, frames: Frames[messages.Orders], obeying: gevent.Greenlet) -> None:
    """Locust's own greenlets end when the master has said so, or is silent."""
    runner.greenlet.join()
    frames.post(messages.Gone("", "the master is gone"))
    obeying.kill()


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # what matters goes to the command in words
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
