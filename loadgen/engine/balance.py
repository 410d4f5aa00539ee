"""Chooses the replica of each request when a run has several (`--url` repeated).

    even         Requests go to the replicas in turn, and each worker process sends to every replica
                 (replica_in_turn). The first requests of sessions also go to the replicas in turn. Each later request
                 of a session goes to the replica after the one that got the previous request.
    session      Sessions go to the replicas in turn. All requests of a session go to the same replica.
    least-busy   A request goes to the replica with the fewest requests in flight when the request is due. Requests in
                 flight are counted over all worker processes of this machine, but not over several machines. A
                 replica that has just refused a request gets no requests for LEFT_OUT_NS. The requests of a group of
                 more than BURST requests (loadgen.engine.replica_pools) are assigned earlier, and count as in flight
                 from then on.

Warm-up requests go to the replicas in turn. A canary (--verify) always goes to the same replica, so that its answers
are comparable.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from math import gcd, lcm
from mmap import mmap
from typing import Literal, NamedTuple

from loadgen.servers.target import Target
from loadgen.workloads.request import Request

Balance = Literal["even", "least-busy", "session"]
ITEM_BYTES = 4
LEFT_OUT_NS = 1_000_000_000
"""Time in ns for which `least-busy` sends no requests to a replica that has refused one. Without this pause, a replica
that is down would attract all requests, because it never has any in flight."""
UNAVAILABLE = frozenset({502, 503, 504})
"""HTTP statuses of a replica that is down, starting or overloaded."""


def replica_in_turn(number: int, replicas: int, workers: int) -> int:
    """Return the index of the replica for the request or session with this number.

    `replicas` is the number of replicas, and `workers` is the number of worker processes. Each block of `replicas`
    consecutive numbers has one request for every replica. Wherever the run ends, the numbers of requests per replica
    therefore differ by at most one.

    The plain rule `number % replicas` is not enough. Worker w sends the requests w, w + workers, w + 2 * workers, and
    so on. With as many workers as replicas, all requests of a worker would go to the same replica. Therefore the order
    of the replicas is rotated by one after every `lcm(replicas, workers)` numbers. With 2 workers and 2 replicas:

        number               0  1  2  3  4  5  6  7
        replica              0  1  1  0  0  1  1  0
        sent by worker 0     0     1     0     1
        sent by worker 1        1     0     1     0
    """
    rotation = number // lcm(replicas, workers) % gcd(replicas, workers)
    return (number + rotation) % replicas


class Dealer:
    """Chooses the replica for each request of one worker process before the request is encoded.

    This is possible for the balances `even` and `session`. With the balance `least-busy`, the replica of a request is
    chosen only when the request is due. This class then chooses replicas only for warm-up requests and canaries (test
    prompts).
    """

    def __init__(self, replicas: int, balance: Balance, worker: int, workers: int, first_id: int = 0) -> None:
        """Create the dealer for a worker process.

        `worker` is the number of this worker process, and `workers` is the number of all worker processes. `first_id`
        is the id of the first request in the class of traffic that this worker process sends.
        """
        self._replicas = replicas
        self._balance = balance
        self._worker = worker
        self._workers = workers
        self._first_id = first_id
        self._sessions = array("q")
        """Ids of the sessions of this worker, in the order in which they start."""

    def choose(self, request: Request, canary: int | None = None) -> int | None:
        """Return the index of the replica for `request`, or None if the replica is chosen only when the request is due.

        The result is None only for the balance `least-busy`. Even with this balance, warm-up requests and canaries
        (test prompts of --verify) get an index. `canary` is the number of the canary, or None if the request is not a
        canary.

        Pass the sessions of a run in the order in which they start, because the replica depends on the position of the
        session in this order.
        """
        if canary is not None:
            return canary % self._replicas
        if self._balance == "least-busy" and request.id >= 0:  # warm-up requests have negative ids
            return None
        if request.session is None:
            return replica_in_turn(request.id - self._first_id, self._replicas, self._workers)
        position = bisect_left(self._sessions, request.session)
        if position == len(self._sessions):
            self._sessions.append(request.session)
        number = self._worker + position * self._workers
        step = 0 if self._balance == "session" else request.id - request.session
        return (replica_in_turn(number, self._replicas, self._workers) + step) % self._replicas

    def spare(self, replica: int, spare: int) -> int:
        """Return the number of connections that a worker opens in advance to the replica with the index `replica`.

        `spare` is the total of these connections over all replicas. They are divided like the first `spare` requests of
        the worker. For example, if 3 of these requests go to a replica, the worker opens 3 connections to it. Every
        replica gets at least one connection.
        """
        numbers = range(self._worker, self._worker + spare * self._workers, self._workers)
        return max(1, sum(replica_in_turn(number, self._replicas, self._workers) == replica for number in numbers))


class InFlightTable:
    """The number of requests in flight per worker process and replica, in memory that the workers share.

    Each worker changes only its own row, and reads all rows.
    """

    def __init__(self, workers: int, replicas: int) -> None:
        self._memory = mmap(-1, max(1, workers * replicas * ITEM_BYTES))  # anonymous, so that forked workers share it
        self._counts = memoryview(self._memory).cast("i")
        self._workers = workers
        self._replicas = replicas

    def add(self, worker: int, replica: int, change: int) -> None:
        """Add `change` to the number of requests that a worker has in flight on a replica."""
        self._counts[worker * self._replicas + replica] += change

    def totals(self) -> list[int]:
        """Return the number of requests in flight on each replica, over all workers of this machine."""
        size = self._workers * self._replicas
        return [sum(self._counts[replica : size : self._replicas]) for replica in range(self._replicas)]


class LeastBusy:
    """Assigns each request to the replica with the fewest requests in flight.

    If several replicas have equally few requests, they are used in turn. A replica that has refused a request is left
    out for LEFT_OUT_NS, unless all replicas are left out.
    """

    def __init__(self, table: InFlightTable, worker: int) -> None:
        self._table = table
        self._worker = worker
        self._last = worker - 1
        self._left_out_until_ns: dict[int, int] = {}
        """Time (CLOCK_MONOTONIC) until which a replica is left out, by its index."""

    def choose(self, now_ns: int) -> int:
        """Return the index of the replica for a request that is due now (`now_ns`, CLOCK_MONOTONIC)."""
        totals = self._table.totals()
        replicas = len(totals)
        following = [(self._last + step) % replicas for step in range(1, replicas + 1)]
        usable = [replica for replica in following if self._left_out_until_ns.get(replica, now_ns) <= now_ns]
        self._last = min(usable or following, key=totals.__getitem__)
        return self._last

    def refused(self, replica: int, now_ns: int) -> None:
        """Leave a replica out for LEFT_OUT_NS, because it has refused a request."""
        self._left_out_until_ns[replica] = now_ns + LEFT_OUT_NS

    def began(self, replica: int) -> None:
        """Count a request that has been assigned to a replica."""
        self._table.add(self._worker, replica, 1)

    def ended(self, replica: int) -> None:
        """Count the end of a request that had been assigned to a replica."""
        self._table.add(self._worker, replica, -1)


def is_unavailable(error_kind: str, http_status: int | None) -> bool:
    """Return True if a request failed because its replica is down.

    A replica counts as down if the client could not connect, if the connection was closed before the first byte of the
    response, or if the HTTP status is one of UNAVAILABLE.
    """
    return error_kind == "connect" if http_status is None else http_status in UNAVAILABLE


class NewAddress(NamedTuple):
    """The replacements that make an encoded request suitable for another replica.

    The bytes `old_prefix` are replaced by `new_prefix`, and the bytes `old_host` by `new_host`.
    """

    old_prefix: bytes
    new_prefix: bytes
    """Beginning of the request target: the path of the URL, or with a proxy the whole URL."""
    old_host: bytes
    new_host: bytes
    """Host header with its line end."""

    @classmethod
    def between(cls, written_for: Target, target: Target) -> NewAddress:
        """Return the parts to replace in an encoded request, so that it can be sent to another replica.

        The request was encoded for the replica `written_for`, and is sent to the replica `target`.
        """
        return cls(
            written_for.request_target("").encode("latin-1"),
            target.request_target("").encode("latin-1"),
            f"Host: {written_for.host_field}\r\n".encode("latin-1"),
            f"Host: {target.host_field}\r\n".encode("latin-1"),
        )


def readdressed(payload: bytes, address: NewAddress) -> bytes:
    """Return the encoded request `payload` with a new request line and a new Host header, for another replica.

    `address` contains the old and the new parts. A Host header that the user has set is not changed. The body is copied
    only once, because the request is already due.
    """
    target_at = payload.find(b" ") + 1
    headers_at = payload.find(b"\r\n") + 2
    view = memoryview(payload)
    line = view[:target_at], address.new_prefix, view[target_at + len(address.old_prefix) : headers_at]
    if payload.startswith(address.old_host, headers_at):
        return b"".join((*line, address.new_host, view[headers_at + len(address.old_host) :]))
    return b"".join((*line, view[headers_at:]))
