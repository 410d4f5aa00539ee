"""Checks the receive timestamps in every run.

The ring timestamp of each read is compared with the socket timestamp of the read. The timestamps of each response are
compared with the time at which its request was sent. A response that fails a check gets the timestamps of the next best
source (`TimestampSource.fallback`), and the run reports the number of such responses.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from operator import sub
from time import monotonic_ns, sleep

from loadgen.servers.wire.timestamps import RETRY_S, Instants, Response, TimestampSource, ToMonotonic

LIMIT_NS = 100_000
"""Two timestamps of one read agree if they differ by at most this. Both are taken within about 2 us."""
DISAGREEING_SHARE = 0.01
"""Share of a response's reads whose timestamps may differ by more than LIMIT_NS, for example because the machine paused
between the two timestamps."""
REJECTED_MIN, REJECTED_SHARE = 3, 0.05
"""A worker stops using its ring after REJECTED_MIN rejected responses, if they are more than REJECTED_SHARE of all."""


def stamp_differences(arrivals: Sequence[int], stamps: Sequence[int], closed_ns: int = 0) -> list[int]:
    """Return the absolute difference in ns between the ring timestamp and the socket timestamp of each read.

    `arrivals` holds the ring timestamps, and `stamps` the socket timestamps. Reads without a ring timestamp (negative)
    are left out. If a FIN arrived at `closed_ns`, the socket gives the last read the timestamp of the FIN. The
    difference is then `min(abs(ring - socket), abs(closed_ns - socket))`."""
    differences = [*map(abs, map(sub, arrivals, stamps))]
    if closed_ns or max(differences, default=0) > LIMIT_NS:
        both = zip(arrivals, stamps, strict=True)
        return [min(abs(ring - stamp), abs(closed_ns - stamp)) for ring, stamp in both if ring >= 0]
    return differences


def stamps_agree(apart: Sequence[int]) -> bool:
    """Return True if at most the share DISAGREEING_SHARE of these differences (ns) exceeds LIMIT_NS."""
    if max(apart, default=0) <= LIMIT_NS:
        return True
    return sum(map(LIMIT_NS.__lt__, apart)) <= DISAGREEING_SHARE * len(apart)


def in_order(received: Response, arrivals: Sequence[int], instants: Sequence[int]) -> bool:
    """Return True if the timestamps of a response are consistent with its request.

    The timestamps must be ascending, none may be earlier than the request, and no read may be earlier than the arrival
    of its bytes. `arrivals` has one instant per read. `instants` begins with the instant of the first byte. A read may
    appear to be up to LIMIT_NS too early, because the timestamps come from two clocks."""
    if received.sent_ns is not None and instants[0] < received.sent_ns:
        return False
    if min(map(sub, received.user_ns, arrivals)) < -LIMIT_NS:
        return False
    return instants == sorted(instants)


def checked_instants(
    source: TimestampSource, responses: Sequence[tuple[Response, Sequence[int]]], to_monotonic: ToMonotonic
) -> list[tuple[list[int], Instants]]:
    """Return the result of `source.instants_batch`, after replacing timestamps that fail the check `in_order`.

    For a response with such timestamps, the fallback sources are tried in turn. The response gets the timestamps of the
    first source that passes the check, or those of the last source."""
    results = source.instants_batch(responses, to_monotonic)
    for index, (received, ends) in enumerate(responses):
        arrivals, (instants, used) = results[index]
        while used.fallback is not None and not in_order(received, arrivals, instants):
            used.reject()
            ((arrivals, (instants, used)),) = used.fallback.instants_batch([(received, ends)], to_monotonic)
            results[index] = arrivals, (instants, used)
    return results


def wait_for_syn_ack(key: int, syn_acks: Container[int], collect: Callable[[], object], within_ns: int) -> bool:
    """Wait up to `within_ns` for the SYN-ACK of an open connection, and return True if the ring has it.

    If the ring has the SYN-ACK, it sees the packets of the connection. It does not see them if NAT on this machine
    changes their addresses after they pass the ring. A port that Docker publishes is an example."""
    until_ns = monotonic_ns() + within_ns
    while key not in syn_acks and monotonic_ns() < until_ns:
        sleep(RETRY_S)
        collect()
    return key in syn_acks
