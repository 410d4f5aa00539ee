"""A command's line to its own Locust process, which it starts and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

import msgspec

from loadgen.distributed import messages
from loadgen.distributed.errors import LocustError
from loadgen.distributed.frames import Frames

END_LIMIT_S = 5.0
"""For Locust to say goodbye."""
_WORDS: msgspec.msgpack.Decoder[messages.Words] = msgspec.msgpack.Decoder(messages.Words)


class Link:
    """Tells and hears, through Locust."""

    def __init__(self, frames: Frames[messages.Events]) -> None:
        self._frames = frames

    def tell(self, word: messages.Words, node: str = "") -> None:
        """Send a word to the other side; at the master, to this machine. A link that has ended takes it to nobody."""
        self._frames.post(messages.Tell(node, msgspec.msgpack.encode(word)))  # `receive` tells when it is gone

    def measure(self, node: str) -> None:
        """Ask for a series of exchanges; `Measured` comes when it is over."""
        self._frames.post(messages.Measure(node))

    def receive(self, timeout_s: float) -> messages.Events | None:
        """The next event, or None. Raises EOFError when the Locust process is gone."""
        return self._frames.receive(timeout_s)


def word_of(event: messages.Heard) -> messages.Words:
    """What the other side said. Only a holder of the token gets here, so anything else is a bug of ours."""
    return _WORDS.decode(event.body)


@contextlib.contextmanager
def opened(role: Literal["master", "worker"], host: str, port: int) -> Iterator[Link]:
    """Start a Locust process and talk to it. Raises LocustError when Locust is not installed."""
    require()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", f"loadgen.distributed.locust_{role}", host, str(port), str(theirs.fileno())]
    with ours, theirs:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own arguments
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")},
            start_new_session=True,  # an interrupt is the command's to understand
        )
        theirs.close()
        try:
            yield Link(Frames(ours, messages.Events))
        finally:
            ours.close()
            _end(child)


def require() -> None:
    """Raises LocustError unless Locust is installed. Nothing of it is imported here: it would patch this process."""
    if find_spec("locust") is None:
        raise LocustError(
            "several machines are joined by Locust, which is not installed", "pip install 'llm-loadgen[ui]'"
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
