"""Capabilities of the calling thread (capabilities(7)): one is taken where it is permitted, or given up for good."""

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
    """Give a capability below 32 up for good. What was opened with it stays open. Raises OSError."""
    _change(number, take=False)


def _change(number: int, *, take: bool) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)  # effective, permitted, inheritable of 32 capabilities each, twice
    if libc.capget(header, held):
        return
    effective, permitted, inheritable, *others = struct.unpack("6I", held.raw)
    right = 1 << number
    if take:
        effective |= permitted & right
    else:
        effective, permitted, inheritable = effective & ~right, permitted & ~right, inheritable & ~right
    if libc.capset(header, struct.pack("6I", effective, permitted, inheritable, *others)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
