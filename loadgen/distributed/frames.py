"""Messages over a stream socket between a command and its Locust process: a length of four bytes, then msgpack."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Generic, TypeVar

import msgspec

FRAME_BYTES_MOST = 1 << 24
"""Nothing that is said is nearly as long."""
_LENGTH = struct.Struct("!I")
T = TypeVar("T")


class Frames(Generic[T]):
    """One end. Reads messages of type T."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._read = bytearray()
        self._sending = threading.Lock()  # of greenlets in a Locust process: what is long goes out in several pieces

    def send(self, message: msgspec.Struct) -> None:
        """Write one message; waits as long as the other end does not read. Raises OSError when it is gone."""
        body = self._encoder.encode(message)
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def post(self, message: msgspec.Struct) -> None:
        """Send, unless the other end is gone: whoever reads there is told."""
        with contextlib.suppress(OSError):
            self.send(message)

    def receive(self, timeout_s: float | None = None) -> T | None:
        """The next message, or None when none came in time. Raises EOFError when the other end is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._whole()) is None:
            if deadline is not None and not self._readable(deadline - time.monotonic()):
                return None
            self._more()
        return message

    def close(self) -> None:
        """The other end sees it."""
        self._socket.close()

    def _whole(self) -> T | None:
        if len(self._read) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._read)
        assert length <= FRAME_BYTES_MOST
        end = _LENGTH.size + length
        if len(self._read) < end:
            return None
        body = bytes(self._read[_LENGTH.size : end])
        del self._read[:end]
        return self._decoder.decode(body)

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _more(self) -> None:
        try:
            piece = self._socket.recv(1 << 18)
        except ConnectionError:
            piece = b""
        if not piece:
            raise EOFError
        self._read += piece
