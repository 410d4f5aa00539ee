"""Which replica each request goes to, and the bytes that are sent to it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from loadgen.engine.balance import (
    LEFT_OUT_NS,
    Dealer,
    InFlightTable,
    LeastBusy,
    NewAddress,
    is_unavailable,
    readdressed,
    replica_in_turn,
)
from loadgen.servers.proxy import proxy_at
from loadgen.servers.target import Target
from loadgen.servers.wire.http1 import encode_post
from loadgen.workloads.request import Request

ADDRESS = (2, ("127.0.0.1", 8000))


def request(number: int, session: int | None = None, turn: int = 0) -> Request:
    """Return a request without a prompt."""
    return Request(number, "", 0, 1, session=session, turn=turn)


@pytest.mark.parametrize("replicas", [2, 3, 7])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("first_id", [0, 10_000_000])
def test_a_burst_is_dealt_exactly_evenly(replicas: int, workers: int, first_id: int) -> None:
    """The numbers of requests differ by at most one, whatever the number of workers. Spare connections suffice."""
    count = 100
    dealt = Counter[int | None]()
    for worker in range(workers):
        dealer = Dealer(replicas, "even", worker, workers, first_id)
        own = [dealer.choose(request(first_id + number)) for number in range(worker, count, workers)]
        dealt.update(own)
        for replica in range(replicas):
            assert dealer.spare(replica, len(own)) == max(1, own.count(replica))
    assert max(dealt.values()) - min(dealt.values()) <= 1
    assert dealt.total() == count


@pytest.mark.parametrize(("workers", "replicas"), [(1, 2), (2, 2), (4, 2), (4, 4), (2, 4), (6, 4), (3, 2)])
def test_each_worker_sends_to_every_replica(workers: int, replicas: int) -> None:
    """A worker deals its requests evenly, and its sessions too. So a fast replica gets no more requests than others."""
    for worker in range(workers):
        numbers = range(worker, 12 * workers * replicas, workers)
        dealer = Dealer(replicas, "even", worker, workers)
        assert {*Counter(dealer.choose(request(number)) for number in numbers).values()} == {12}
        sticky = Dealer(replicas, "session", worker, workers)
        dealt = Counter(sticky.choose(request(number, session=number)) for number in numbers)
        assert {*dealt.values()} == {12}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
@pytest.mark.parametrize(("workers", "replicas"), [(2, 2), (2, 3), (4, 6), (6, 4), (8, 8)])
def test_the_first_requests_are_dealt_evenly(count: int, workers: int, replicas: int) -> None:
    """Wherever a run ends, the numbers of requests per replica differ by at most one."""
    dealt = Counter(replica_in_turn(number, replicas, workers) for number in range(count))
    assert max(dealt.values()) - min(dealt[replica] for replica in range(replicas)) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sessions_are_dealt_evenly_and_stay(workers: int) -> None:
    """With `session`, every turn of a session has its replica. With `even`, the next turn has the next replica."""
    turns = 4
    first = Counter[int | None]()
    for worker in range(workers):
        sticky, even = Dealer(2, "session", worker, workers), Dealer(2, "even", worker, workers)
        for session in range(worker, 12, workers):
            ids = range(session * turns, (session + 1) * turns)
            stays = [sticky.choose(request(number, ids[0], number - ids[0])) for number in ids]
            assert len({*stays}) == 1
            first[stays[0]] += 1
            goes_on = [even.choose(request(number, ids[0], number - ids[0])) for number in ids]
            assert all(before != after for before, after in pairwise(goes_on))
        again = sticky.choose(request(worker * turns + 1, worker * turns, 1))  # a later turn of the first session
        assert again == worker % 2
    assert first == {0: 6, 1: 6}


def test_canaries_and_warmup_keep_to_their_replicas() -> None:
    """A canary goes to the same replica each time, also if the driver chooses those of the other requests."""
    dealer = Dealer(3, "least-busy", 0, 1)
    assert [dealer.choose(request(number)) for number in range(3)] == [None] * 3
    assert [dealer.choose(request(-1 - number)) for number in range(3)] == [2, 1, 0]
    assert [dealer.choose(request(-1_000_000 - serial), canary=4) for serial in range(3)] == [1] * 3


def test_the_least_busy_replica_is_known_to_all_workers() -> None:
    """The choice counts the requests of every worker. Among equals the replicas take turns."""
    table = InFlightTable(workers=2, replicas=3)
    first, second = LeastBusy(table, 0), LeastBusy(table, 1)
    for balancer, expected in ((first, 0), (second, 1), (first, 2), (second, 2), (first, 0), (second, 1)):
        replica = balancer.choose(0)
        assert replica == expected
        balancer.began(replica)
    assert table.totals() == [2, 2, 2]
    second.ended(1)
    assert (first.choose(0), second.choose(0)) == (1, 1)


def test_a_replica_that_refuses_requests_is_left_out() -> None:
    """It gets no requests for a while, although it has none in flight. If all replicas refuse, all are tried."""
    table = InFlightTable(workers=1, replicas=2)
    balancer = LeastBusy(table, 0)
    table.add(0, 1, 5)
    balancer.refused(0, 0)
    assert [balancer.choose(now_ns) for now_ns in (0, LEFT_OUT_NS - 1, LEFT_OUT_NS)] == [1, 1, 0]
    balancer.refused(0, LEFT_OUT_NS)
    balancer.refused(1, LEFT_OUT_NS)
    assert balancer.choose(LEFT_OUT_NS) == 0


@pytest.mark.parametrize(
    ("error_kind", "http_status", "expected"),
    [
        ("connect", None, True),
        ("client_limit", None, False),
        ("timeout", None, False),
        ("", 200, False),
        ("http", 503, True),
        ("http", 429, False),
        ("http", 500, False),
    ],
)
def test_which_failures_mean_that_a_replica_is_down(error_kind: str, http_status: int | None, expected: bool) -> None:
    """A limit of this machine, a time limit or an error of one request says nothing about the replica."""
    assert is_unavailable(error_kind, http_status) == expected


@pytest.mark.parametrize("proxied", [False, True])
def test_a_readdressed_request_is_the_one_for_its_replica(proxied: bool) -> None:
    """The bytes are those that encoding for this replica gives, with a base path and a proxy too."""
    proxy = proxy_at("http://127.0.0.1:3128") if proxied else None
    one = Target("a.test", 80, "", None, (ADDRESS,), proxy=proxy)
    other = Target("b.test", 8000, "/base", None, (ADDRESS,), proxy=proxy)

    def encoded(target: Target, headers: dict[str, str]) -> bytes:
        return encode_post(target.request_target("/v1/chat"), target.host_field, headers, b"{\r\nHost: a.test\r\n}")

    for headers in ({}, {"X-One": "1"}, {"Host": "mine"}):
        assert readdressed(encoded(one, headers), NewAddress.between(one, other)) == encoded(other, headers)
        assert readdressed(encoded(other, headers), NewAddress.between(other, one)) == encoded(one, headers)
