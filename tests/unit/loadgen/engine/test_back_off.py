"""The back-off of a closed loop: when waiting clients try again, and when the server counts as gone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadgen.engine.back_off import FIRST_PAUSE_NS, GIVE_UP_NS, MAX_PAUSE_NS, BackOff

MS = 1_000_000


def tries_in_an_outage(back_off: BackOff, clients: int, outage_ns: int) -> list[int]:
    """Let every client fail at instant 0 and every try fail until the outage is over; return the instants of tries."""
    for _ in range(clients):
        back_off.failed(0, was_retry=False)
    tries = list[int]()
    while back_off.next_try_ns < outage_ns:
        now_ns = back_off.next_try_ns
        assert len(back_off.take(now_ns)) == 1
        tries.append(now_ns)
        back_off.failed(now_ns + MS, was_retry=True)
    return tries


def test_pauses_double_up_to_the_longest() -> None:
    """One client tries after 0.1, 0.2, 0.4 and 0.8 s, and then every second."""
    tries = tries_in_an_outage(BackOff(), 1, 5_000 * MS)
    instants = [0, *tries]
    pauses = [round((later - earlier) / MS, -1) for earlier, later in pairwise(instants)]
    assert pauses == [100, 200, 400, 800, 1000, 1000, 1000]


@pytest.mark.parametrize("clients", [2, 8, 1000])
def test_an_outage_costs_as_many_tries_for_many_clients_as_for_one(clients: int) -> None:
    """While all tries fail, one client at a time tries."""
    assert tries_in_an_outage(BackOff(), clients, 5_000 * MS) == tries_in_an_outage(BackOff(), 1, 5_000 * MS)


def test_no_client_tries_before_the_pause_is_over() -> None:
    """Too early a look returns nothing, and changes nothing."""
    back_off = BackOff()
    back_off.failed(0, was_retry=False)
    assert back_off.take(FIRST_PAUSE_NS - 1) == []
    assert back_off.take(FIRST_PAUSE_NS) == [FIRST_PAUSE_NS]
    assert back_off.waiting == 0


@pytest.mark.parametrize("clients", [2, 8, 1000])
def test_clients_come_back_though_no_answer_has_ended_yet(clients: int) -> None:
    """After a long outage tries are answered slowly: every client is back within two more seconds."""
    back_off = BackOff()
    over_ns = tries_in_an_outage(back_off, clients, 20_000 * MS)[-1]
    now_ns = over_ns
    while back_off.waiting:
        now_ns = back_off.next_try_ns
        assert back_off.take(now_ns)
    assert now_ns - over_ns <= 2 * MAX_PAUSE_NS + MS


def test_an_answer_to_a_try_lets_the_next_client_go_at_once() -> None:
    """The client that has waited longest goes on as soon as a try has been answered."""
    back_off = BackOff()
    last_ns = tries_in_an_outage(back_off, 8, 5_000 * MS)[-1]
    now_ns = last_ns + 2 * MAX_PAUSE_NS
    assert len(back_off.take(now_ns)) == 1
    assert back_off.take(now_ns + MS) == []
    back_off.went_on(now_ns + MS, was_retry=True)
    assert len(back_off.take(now_ns + MS)) == 1


def test_a_new_outage_begins_with_the_first_pause() -> None:
    """What an earlier outage did to the pause is forgotten once every client is back."""
    back_off = BackOff()
    tries_in_an_outage(back_off, 1, 20_000 * MS)
    now_ns = back_off.next_try_ns
    back_off.take(now_ns)
    back_off.went_on(now_ns, was_retry=True)
    back_off.failed(now_ns + MS, was_retry=False)
    assert back_off.next_try_ns == now_ns + MS + FIRST_PAUSE_NS


def test_the_server_counts_as_gone_after_a_minute_of_failures_only() -> None:
    """One request that does not fail at once starts the minute again."""
    back_off = BackOff()
    assert not back_off.gives_up(GIVE_UP_NS)
    back_off.failed(0, was_retry=False)
    assert not back_off.gives_up(GIVE_UP_NS - 1)
    assert back_off.gives_up(GIVE_UP_NS)
    back_off.went_on(GIVE_UP_NS, was_retry=False)
    assert not back_off.gives_up(2 * GIVE_UP_NS)
