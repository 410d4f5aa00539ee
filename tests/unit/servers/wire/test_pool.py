"""The pool of connections: what is done while the server accepts them."""

from __future__ import annotations

import asyncio
from itertools import count
from unittest.mock import Mock

import pytest

from loadgen.servers.wire import pool
from loadgen.servers.wire.pool import MAX_CONCURRENT_CONNECTS, Pool


@pytest.mark.parametrize(("step_s", "drawn"), [(0.0, [3, 1]), (0.001, [2, 1]), (1.0, [0, 0])])
def test_pauses_between_connections_are_used_until_they_end_or_nothing_is_left(
    step_s: float, drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three things are to be done; each look at the clock takes `step_s`, and a pause 3 ms."""
    ticks, done = count(), list[str]()
    monkeypatch.setattr(pool, "monotonic", lambda: next(ticks) * step_s)

    async def connect() -> Mock:
        done.append("open")
        return Mock()

    def meanwhile() -> bool:
        done.append("draw")
        return done.count("draw") < 3

    asyncio.run(Pool(connect, spare=2 * MAX_CONCURRENT_CONNECTS + 1, meanwhile=meanwhile).fill())
    opened = ["open"] * MAX_CONCURRENT_CONNECTS
    assert done == [*opened, *["draw"] * drawn[0], *opened, *["draw"] * drawn[1], "open"]
