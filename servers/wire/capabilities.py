"""Makes a Linux capability of the calling thread effective, or gives it up permanently (capabilities(7))."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CAPABILITY_VERSION_3 = 0x20080522
"""linux/capability.h."""


def take_capability(number: int) -> None:
    """Make capability `number` of this thread effective, if the capability is in the permitted set.

    `number` must be below 32. `setcap` with `+p` gives an executable file a permitted capability. A process that runs
    the file must make the capability effective before it can use the capability.
    """
    _change(number, take=True)


def give_up_capability(number: int) -> None:
    """Remove capability `number` of this thread permanently. `number` must be below 32.

    Files and sockets that were opened with the capability stay open. Raises OSError if the kernel refuses the change.
    """
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
