"""Sessions with an identity header behind nginx, which selects a replica by the hash of this header."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.busy_proxies import nginx_hashing
from tests.support.plain_openai import Talk, plain_openai
from tests.support.sessions import by_session, run_sessions


@pytest.mark.parametrize("identity", [True, False])
def test_a_hashing_balancer_keeps_sessions_together_only_with_the_header(identity: bool, tmp_path: Path) -> None:
    """Eight turns through nginx with two replicas: with the header, each session stays on one replica."""
    sessions = ("--workload", "multi-turn:turns=8", "--lengths", "approximate", "--arrivals", "closed:2", "-n", "4")
    options = ("--session-header", "X-Session-ID") if identity else ()
    with (
        plain_openai(Talk.stream) as first,
        plain_openai(Talk.stream) as second,
        nginx_hashing(tmp_path, first.url, second.url) as url,
    ):
        on_first = by_session(tmp_path, run_sessions(tmp_path, first, *sessions, *options, url=url))
        heads = [request.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:] for _, request in second.requests]
    on_second = by_session(tmp_path, [(0, dict(line.split(": ", 1) for line in lines)) for lines in heads])
    turns = {session: (len(on_first.get(session, ())), len(on_second.get(session, ()))) for session in (0, 8, 16, 24)}
    assert [sum(counts) for counts in turns.values()] == [8] * 4
    assert all(0 in counts for counts in turns.values()) == identity
