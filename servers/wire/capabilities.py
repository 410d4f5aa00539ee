"""Takes or permanently gives up a Linux capability of the calling thread (capabilities(7))."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CAPABILITY_VERSION_3 = 0x20080522
"""linux/capability.h."""


def take_capability(number: int) -> None:
    """Make a capability below 32 effective where it is permitted. Files only permit it (setcap with +p)."""
    _change(number, take=True)


def give_up_capability(number: int) -> None:
    """Give up a capability below 32 permanently. Files and sockets opened with it stay open. Raises OSError."""
    _change(number, take=False)


def _change(number: int, *, take: bool) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    sets = ctypes.create_string_buffer(24)  # effective, permitted and inheritable, 32 capabilities each, twice
    if libc.capget(header, sets):
        return
    effective, permitted, inheritable, *upper = struct.unpack("6I", sets.raw)
    capability = 1 << number
    if take:
        effective |= permitted & capability
    else:
        effective &= ~capability
        permitted &= ~capability
        inheritable &= ~capability
    if libc.capset(header, struct.pack("6I", effective, permitted, inheritable, *upper)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
