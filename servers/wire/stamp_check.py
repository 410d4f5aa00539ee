"""Checks the receive timestamps of each response in every run.

Two timestamps may be available for a read from the socket. Both come from the kernel:

- The ring timestamp: the time when the packet with these bytes arrived, from the packet ring.
- The socket timestamp: the time that the socket delivers together with the bytes.

A response passes the check if two conditions hold. Its ring timestamps agree with its socket timestamps, and none of
its timestamps is earlier than its request.

A response that fails gets its timestamps from the next best source instead (`TimestampSource.fallback`). The run
reports the number of such responses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import sub
from time import monotonic_ns, sleep

from loadgen.servers.wire.timestamps import RETRY_S, Instants, Response, TimestampSource, ToMonotonic

LIMIT_NS = 100_000
"""Two timestamps of one read agree if they differ by at most LIMIT_NS. The kernel takes both within about 2 us."""
DISAGREEING_SHARE = 0.01
"""Share of a response's reads whose timestamps may differ by more than LIMIT_NS, for example because the machine paused
between the two timestamps."""
REJECTED_MIN, REJECTED_SHARE = 3, 0.05
"""A worker stops using its ring after REJECTED_MIN rejected responses, if they are more than REJECTED_SHARE of all."""


def stamp_differences(arrivals: Sequence[int], stamps: Sequence[int], closed_ns: int = 0) -> list[int]:
    """Return, for each read, the absolute difference in ns between its ring timestamp and its socket timestamp.

    - `arrivals` contains the ring timestamp of each read. A negative number means that the read has no ring timestamp.
      Such a read is left out of the result.
    - `stamps` contains the socket timestamp of each read.
    - `closed_ns` is the ring timestamp of a FIN, or 0 if there is no FIN. The socket timestamp of the last read may be
      the time of the FIN. With a FIN, the difference of a read is therefore the smaller one of `abs(ring - socket)` and
      `abs(closed_ns - socket)`.
    """
    differences = [*map(abs, map(sub, arrivals, stamps))]
    if closed_ns or max(differences, default=0) > LIMIT_NS:
        both = zip(arrivals, stamps, strict=True)
        return [min(abs(ring - stamp), abs(closed_ns - stamp)) for ring, stamp in both if ring >= 0]
    return differences


def stamps_agree(apart: Sequence[int]) -> bool:
    """Return True if the ring timestamps and the socket timestamps of a response agree.

    `apart` contains the difference between the two timestamps of each read, in ns. Differences of more than LIMIT_NS
    are allowed for a few reads: at most the share DISAGREEING_SHARE of all reads.
    """
    if max(apart, default=0) <= LIMIT_NS:
        return True
    return sum(map(LIMIT_NS.__lt__, apart)) <= DISAGREEING_SHARE * len(apart)


def in_order(received: Response, arrivals: Sequence[int], instants: Sequence[int]) -> bool:
    """Return True if the arrival times of the response `received` are possible.

    `instants` contains the arrival time of the first byte, followed by those of other parts of the response. `arrivals`
    contains one time per read from the socket: the arrival of the last byte of this read. The times are possible if
    three conditions hold:

    - The first byte did not arrive before the request was sent (`received.sent_ns`).
    - No byte arrived after the process read it (`received.user_ns`). A difference of up to LIMIT_NS is allowed, because
      two clocks measure arrivals and reads.
    - The times in `instants` are in ascending order.
    """
    if received.sent_ns is not None and instants[0] < received.sent_ns:
        return False
    if min(map(sub, received.user_ns, arrivals)) < -LIMIT_NS:
        return False
    return instants == sorted(instants)


def checked_instants(
    source: TimestampSource, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
) -> list[tuple[list[int], Instants]]:
    """Return the arrival times of several responses. Impossible times are replaced (see `in_order`).

    The times come from `source`, which may have a fallback: another source of timestamps. If the times of a response
    are impossible, the times from the fallback are used. If these times are impossible too, the fallback of the
    fallback is used, and so on. The times of the last source are used without a check.

    The parameters and the result have the form that `TimestampSource.instants_batch` defines.
    """
    results = source.instants_batch(responses, to_monotonic)
    for index, (received, ends) in enumerate(responses):
        arrivals, (instants, used) = results[index]
        while used.fallback is not None and not in_order(received, arrivals, instants):
            used.reject()
            ((arrivals, (instants, used)),) = used.fallback.instants_batch([(received, ends)], to_monotonic)
            results[index] = arrivals, (instants, used)
    return results


def wait_for_syn_ack(key: int, syn_acks: Container[int], collect: Callable[[], object], within_ns: int) -> bool:
    """Wait until the packet ring has the SYN-ACK of an open connection, and return True if it arrives in time.

    `key` identifies the connection, and `within_ns` is the maximum time to wait. `syn_acks` contains the keys of the
    SYN-ACKs that have arrived, and `collect` updates it from the ring.

    A SYN-ACK shows that the ring sees the packets of the connection. The ring does not see them if NAT on this machine
    changes their addresses, for example for a port that Docker publishes.
    """
    until_ns = monotonic_ns() + within_ns
    while key not in syn_acks and monotonic_ns() < until_ns:
        sleep(RETRY_S)
        collect()
    return key in syn_acks
