"""The ring's stamps held against the socket's, in every run: an instrument that checks itself."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from time import monotonic_ns, sleep

from servers.wire.stamps import RETRY_S


def off(arrivals: Sequence[int], stamps: Sequence[int], closed_ns: int) -> list[int]:
    """By how many ns, as bit lengths, arrivals that are known differ from another's stamps of them. A FIN, which came
    at `closed_ns`, lends its stamp to the last bytes when it is read with them."""
    both = zip(arrivals, stamps, strict=True)
    return [min(abs(ours - stamp), abs(closed_ns - stamp)).bit_length() for ours, stamp in both if ours >= 0]


def comes(key: int, greeted: Container[int], collect: Callable[[], object], within_ns: int) -> bool:
    """Whether the ring sees a connection that is open: its SYN-ACK comes. None does where NAT on this machine gives
    packets another address behind the ring than before it: a port that Docker publishes, say."""
    until_ns = monotonic_ns() + within_ns
    while key not in greeted and monotonic_ns() < until_ns:
        sleep(RETRY_S)
        collect()
    return key in greeted
