"""Sessions with an identity at a real socket: headers, cookies and connections."""

import re
from pathlib import Path

import pytest

from tests.support.plain_openai import Talk, plain_openai
from tests.support.sessions import by_session, run_sessions

SESSIONS = ("--workload", "multi-turn:turns=3", "--lengths", "approximate", "--arrivals", "closed:3", "-n", "6")


def test_a_session_keeps_its_header_on_every_turn(tmp_path: Path) -> None:
    """Each session has one value, no two sessions share it, and it is not that of another run."""
    values = set[str]()
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with plain_openai(Talk.stream) as server:
            requests = run_sessions(
                folder, server, *SESSIONS, "--session-header", "vllm-router", "--session-header", "X-Key"
            )
        sessions = by_session(folder, requests)
        assert [len(turns) for turns in sessions.values()] == [3] * 6
        for turns in sessions.values():
            (value,) = {headers["X-Session-ID"] for _, headers in turns}
            assert {headers["X-Key"] for _, headers in turns} == {value}
            values.add(value)
    assert len(values) == 12
    assert all(re.fullmatch(r"[0-9a-f]{12}-s\d+", value) for value in values)


@pytest.mark.parametrize("use", ["pooled", "session", "new"])
def test_connections_are_shared_as_requested(use: str, tmp_path: Path) -> None:
    """`new` gives every request a connection, `session` gives every session one, and `pooled` shares all of them."""
    with plain_openai(Talk.stream) as server:
        requests = run_sessions(tmp_path, server, *SESSIONS, "--connections", use)
    ports_by_session = [{port for port, _ in turns} for turns in by_session(tmp_path, requests).values()]
    ports = {port for port, _ in requests}
    if use == "new":
        assert len(ports) == 18
    elif use == "session":
        assert [len(ports) for ports in ports_by_session] == [1] * 6
        assert len(ports) == 6
    else:
        assert len(ports) <= 4
