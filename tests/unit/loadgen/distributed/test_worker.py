"""A worker machine that does not find its master."""

from __future__ import annotations

import socket
import time
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.distributed import DistributedError
from loadgen.distributed.protocol import Address
from loadgen.distributed.worker import _wait_for_name
from loadgen.engine.signals import Interrupts

MASTER = Address("bench-1.invalid")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the resolver and the clock. `succeed_after` is the number of attempts that fail before one succeeds."""
    state = SimpleNamespace(made=0, succeed_after=1 << 30, now_s=0.0, interrupts=Interrupts(), interrupt_after=1 << 30)

    def getaddrinfo(
        host: Any,
        port: Any,
        family: Any = 0,
        type: Any = 0,  # noqa: A002 - the name of the replaced function's parameter
        proto: Any = 0,
        flags: Any = 0,
    ) -> list[Any]:
        assert (host, port) == (MASTER.host, MASTER.port)
        state.made += 1
        if state.made > state.succeed_after:
            return []
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def sleep(seconds: float, /) -> None:
        state.now_s += seconds
        state.interrupts.count += state.made >= state.interrupt_after

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: state.now_s)
    return state


def test_an_unknown_master_is_reported_once_and_given_up_at_the_limit(attempts: SimpleNamespace) -> None:
    """The line names the host and what to do, at once. The error at the end has the same words."""
    lines: list[str] = []
    with pytest.raises(DistributedError, match=r"bench-1\.invalid:5557: no such host"):
        _wait_for_name(MASTER, lines.append, attempts.interrupts, limit_s=300)
    assert attempts.made == 301
    assert lines == [
        "--master bench-1.invalid:5557: no such host (Name or service not known). Check the name, or write an IP "
        "address. Trying again every second, for 300 s at most."
    ]


def test_a_name_that_appears_later_is_used(attempts: SimpleNamespace) -> None:
    """In a cluster, the name of the master may exist only after the workers have started."""
    attempts.succeed_after = 2
    lines: list[str] = []
    _wait_for_name(MASTER, lines.append, attempts.interrupts, limit_s=inf)
    assert (attempts.made, len(lines)) == (3, 1)
    assert lines[0].endswith("Trying again every second.")


def test_a_known_name_needs_no_line(attempts: SimpleNamespace) -> None:
    """The usual case prints nothing."""
    attempts.succeed_after = 0
    lines: list[str] = []
    _wait_for_name(MASTER, lines.append, attempts.interrupts, limit_s=300)
    assert (attempts.made, lines) == (1, [])


def test_an_interrupt_ends_the_wait(attempts: SimpleNamespace) -> None:
    """Ctrl-C is not ignored for five minutes."""
    attempts.interrupt_after = 2
    _wait_for_name(MASTER, lambda _: None, attempts.interrupts, limit_s=300)
    assert attempts.made == 2
