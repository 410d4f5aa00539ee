"""The connection pools of a worker process for several replicas, and the assignment of requests to replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loadgen.engine.balance import LeastBusy, NewAddress, is_unavailable, readdressed
from loadgen.engine.request_queue import ScheduledRequest
from loadgen.servers.target import Target
from loadgen.servers.wire.pool import ConnectionUse, Pool

BURST = 64
"""Maximum number of requests in a group that is assigned to replicas when it is due. The requests of a group are due
together. A larger group is assigned before it is due."""


class ReplicaPools:
    """The connection pools of a worker process, one for each replica.

    Without `least_busy`, the replica of each request is chosen before the request is encoded. With `least_busy`, it is
    chosen when the request is due. If more than BURST requests are due at the same time, it is chosen earlier.
    """

    def __init__(self, pools: Sequence[Pool], targets: Sequence[Target], least_busy: LeastBusy | None = None) -> None:
        self.pools = pools
        self._addresses = [NewAddress.between(targets[0], target) for target in targets]
        self._least_busy = least_busy

    @property
    def use(self) -> ConnectionUse:
        """The rule for reusing connections: which requests may share a connection."""
        return self.pools[0].use

    async def fill(self) -> None:
        """Open the spare connections of every pool, and wait until every attempt has ended."""
        await asyncio.gather(*(pool.fill() for pool in self.pools))

    def top_up(self) -> None:
        """Open connections in the background until every pool has its spare connections."""
        for pool in self.pools:
            pool.top_up()

    def waits_until_due(self, group: Sequence[ScheduledRequest]) -> bool:
        """Return True if the replicas of a group of requests must be chosen when the group is due, not before."""
        if self._least_busy is None or len(group) > BURST:
            return False
        return any(slot.replica is None for slot in group)

    def assign(self, slot: ScheduledRequest, now_ns: int) -> None:
        """Assign a request to the replica with the fewest requests in flight, unless it has a replica already.

        From `now_ns` (CLOCK_MONOTONIC) on, the request counts as in flight on this replica, even if it is sent later.
        Otherwise all requests of a large group would go to one replica.
        """
        if self._least_busy is None or slot.counted:
            return
        if slot.replica is None:
            slot.replica = self._least_busy.choose(now_ns)
            if slot.replica:
                slot.payload = readdressed(slot.payload, self._addresses[slot.replica])
        slot.counted = True
        self._least_busy.began(slot.replica)

    def ended(self, slot: ScheduledRequest, error_kind: str, http_status: int | None, now_ns: int) -> None:
        """Note that a request no longer counts as in flight on its replica.

        The request ended at `now_ns` (CLOCK_MONOTONIC), or will never be sent. If its error kind and HTTP status show
        that the replica is down, the replica gets no requests for a while.
        """
        if self._least_busy is not None and slot.counted and slot.replica is not None:
            slot.counted = False
            self._least_busy.ended(slot.replica)
            if is_unavailable(error_kind, http_status):
                self._least_busy.refused(slot.replica, now_ns)
