"""Self-check of the timestamps, in every run.

Every read's ring timestamp is compared with its socket timestamp, and every response's timestamps with its own request.
A response that fails a check gets the timestamps of the next best source (`TimestampSource.fallback`), and the run
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import sub
from time import monotonic_ns, sleep

from loadgen.servers.wire.timestamps import RETRY_S, Instants, Response, TimestampSource, ToMonotonic

LIMIT_NS = 100_000
"""Largest difference between two timestamps of one read that agree. Both are taken within about 2 us."""
DISAGREEING_SHARE = 0.01
"""Share of a response's reads that may differ by more than LIMIT_NS, as when the machine pauses between the two."""
REJECTED_MIN, REJECTED_SHARE = 3, 0.05
"""A worker stops using its ring after this number of rejected responses, if they are more than this share of all."""


def stamp_differences(arrivals: Sequence[int], stamps: Sequence[int], closed_ns: int = 0) -> list[int]:
    """Return by how many ns the ring's timestamp of each read differs from the socket's. Reads without a timestamp in
    the ring (negative) are left out. A FIN, which arrived at `closed_ns`, gives its own timestamp to the last read."""
    differences = [*map(abs, map(sub, arrivals, stamps))]
    if closed_ns or max(differences, default=0) > LIMIT_NS:
        both = zip(arrivals, stamps, strict=True)
        return [min(abs(ring - stamp), abs(closed_ns - stamp)) for ring, stamp in both if ring >= 0]
    return differences


def stamps_agree(apart: Sequence[int]) -> bool:
    """Return True unless too many of these differences (ns) are beyond the limit."""
    if max(apart, default=0) <= LIMIT_NS:
        return True
    return sum(map(LIMIT_NS.__lt__, apart)) <= DISAGREEING_SHARE * len(apart)


def in_order(received: Response, arrivals: Sequence[int], instants: Sequence[int]) -> bool:
    """Return True if the timestamps of a response fit its request: ascending, none before the request was sent, and
    no read before its bytes had arrived. `arrivals` has one instant per read, `instants` begins with the first byte's.
    Timestamps of two clocks may contradict each other by LIMIT_NS where nothing is wrong."""
    if received.sent_ns is not None and instants[0] < received.sent_ns:
        return False
    if min(map(sub, received.user_ns, arrivals)) < -LIMIT_NS:
        return False
    return instants == sorted(instants)


def checked_instants(
    source: TimestampSource, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
) -> list[tuple[list[int], Instants]]:
    """Return what `source.instants_batch` returns, except for responses whose timestamps do not fit their own requests:
    those get the timestamps of the first fallback that fits."""
    results = source.instants_batch(responses, to_monotonic)
    for index, (received, ends) in enumerate(responses):
        arrivals, (instants, used) = results[index]
        while used.fallback is not None and not in_order(received, arrivals, instants):
            used.reject()
            ((arrivals, (instants, used)),) = used.fallback.instants_batch([(received, ends)], to_monotonic)
            results[index] = arrivals, (instants, used)
    return results


def wait_for_syn_ack(key: int, syn_acks: Container[int], collect: Callable[[], object], within_ns: int) -> bool:
    """Return whether the ring sees an open connection, which it does if it has its SYN-ACK.

    It does not if NAT on this machine changes the address of packets after the ring has seen them. A port that Docker
    publishes is an example.
    """
    until_ns = monotonic_ns() + within_ns
    while key not in syn_acks and monotonic_ns() < until_ns:
        sleep(RETRY_S)
        collect()
    return key in syn_acks
