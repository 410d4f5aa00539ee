"""A small process that has imported loadgen. It forks a child process for each command that the tests start.

A fork copies the page tables of its parent, and its end frees them. A test process that has collected all tests has
400 MB of memory, which costs each fork 35 ms of CPU time. This process has a quarter of that.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; from tests.support import fork_server; fork_server.serve(int(sys.argv[1]))"
POLL_EVERY_S = 0.005
"""Interval in seconds between two questions whether a child process has ended."""
_MAX_DESCRIPTORS = 64


@dataclass(slots=True)
class ChildSpec:
    """A child process to fork. Its standard streams and the descriptors it keeps travel next to this message."""

    kind: str
    """Name of the class in `tests.support.command` whose method `runs` the child calls."""
    words: list[str]
    folder: str
    environment: dict[str, str]
    kept: list[int]
    """Numbers of the descriptors that the child keeps, in addition to 0, 1 and 2."""
    new_session: bool


@dataclass(slots=True)
class EndQuery:
    """A question whether a child process has ended. The reply has the form of the result of os.waitpid."""

    pid: int


class ForkServer:
    """The client's end of a fork server. The server starts with the first request."""

    def __init__(self) -> None:
        self.usable = False
        """Whether this process uses the fork server. Only test processes do, and not the processes that they fork."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the server."""
        self.usable = False
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()

    def fork(self, child: ChildSpec, streams: Sequence[int]) -> int:
        """Fork a child process and return its pid. `streams` are the descriptors for its standard streams."""
        reply = self._ask(child, [*streams, *child.kept])
        assert isinstance(reply, int)
        return reply

    def waitpid(self, pid: int, flags: int) -> tuple[int, int]:
        """Wait for the end of a child process, as os.waitpid does for children of the calling process."""
        while True:
            reply = self._ask(EndQuery(pid))
            assert isinstance(reply, tuple)
            if reply[0] or flags & os.WNOHANG:
                return reply
            time.sleep(POLL_EVERY_S)

    def _ask(self, message: object, descriptors: Sequence[int] = ()) -> object:
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            _send(self._socket, message, descriptors)
            return _receive(self._socket)[0]

    def _start(self) -> socket.socket:
        """Start the server and return the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A terminal sends Ctrl-C to the test process only. A new session would have its own share of the CPU.
                process_group=0,
            )
        return ours


def _send(connection: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    data = pickle.dumps(message)
    socket.send_fds(connection, [len(data).to_bytes(4, "big")], descriptors)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[object, list[int]]:
    """Return the next message and the descriptors that came with it. Raises EOFError if the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, _MAX_DESCRIPTORS)
    if len(head) < 4:
        raise EOFError
    rest = memoryview(bytearray(int.from_bytes(head, "big")))
    received = 0
    while received < len(rest):
        received += connection.recv_into(rest[received:])
    return pickle.loads(rest), list(descriptors)


def serve(number: int) -> None:
    """Answer requests until the test process ends. `number` is the descriptor of the socket to the test process."""
    from tests.support import command

    command.prepare_forks()
    warnings.simplefilter("error")  # as in tests
    warnings.simplefilter("ignore", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = socket.socket(fileno=number)
    while True:
        try:
            message, descriptors = _receive(connection)
        except EOFError:
            return
        if isinstance(message, EndQuery):
            _send(connection, os.waitpid(message.pid, os.WNOHANG))
            continue
        assert isinstance(message, ChildSpec)
        pid = os.fork()
        if pid == 0:
            _place(descriptors, [0, 1, 2, *message.kept])
            kind: type[command.Forked] = getattr(command, message.kind)
            kind.become(message)
        for descriptor in descriptors:
            os.close(descriptor)
        _send(connection, pid)


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Duplicate the descriptors to the given numbers. A number may be that of another descriptor in the list."""
    free = max(*descriptors, *numbers) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
