"""Sessions with an identity at a real socket: headers, cookies and connections."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from tests.support.busy_proxies import nginx_hashing
from tests.support.command import burst
from tests.support.plain_openai import PlainServer, Talk, plain_openai

SESSIONS = ("--workload", "multi-turn:turns=3", "--lengths", "approximate", "--arrivals", "closed:3", "-n", "6")


def run(folder: Path, server: PlainServer, *options: str, url: str = "") -> list[tuple[int, dict[str, str]]]:
    """Run sessions against the server, and return the client's port and the headers of each request.

    `url` is the URL of a proxy in front of the server. By default, requests go to the server itself."""
    code, out, err = burst(
        folder, "--server", "openai", "--url", url or server.url, "--endpoint", "completions", "--metrics-every", "0",
        "--output-tokens", "2", "--no-ignore-eos", *options, command="run",
    )  # fmt: skip
    assert code in (0, 5), out + err
    heads = [(port, request.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:]) for port, request in server.requests]
    return [(port, dict(line.split(": ", 1) for line in lines)) for port, lines in heads]


def by_session(folder: Path, requests: list[tuple[int, dict[str, str]]]) -> dict[int, list[tuple[int, dict[str, str]]]]:
    """Group requests by the session of their Record, which the id on the wire names."""
    loaded = runfile.read(folder / "run")
    assert {record.state for record in loaded.records} == {"complete"}
    sessions = {f"{loaded.header.client['request_ids']}-{record.id}": record.session for record in loaded.records}
    result = defaultdict(list)
    for port, headers in requests:
        result[sessions[headers["X-Request-Id"]]].append((port, headers))
    return result  # type: ignore[return-value]


def test_a_session_keeps_its_header_on_every_turn(tmp_path: Path) -> None:
    """Each session has one value, no two sessions share it, and it is not that of another run."""
    values = set[str]()
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with plain_openai(Talk.stream) as server:
            requests = run(folder, server, *SESSIONS, "--session-header", "vllm-router", "--session-header", "X-Key")
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
        requests = run(tmp_path, server, *SESSIONS, "--connections", use)
    ports_by_session = [{port for port, _ in turns} for turns in by_session(tmp_path, requests).values()]
    ports = {port for port, _ in requests}
    if use == "new":
        assert len(ports) == 18
    elif use == "session":
        assert [len(ports) for ports in ports_by_session] == [1] * 6
        assert len(ports) == 6
    else:
        assert len(ports) <= 4


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
        on_first = by_session(tmp_path, run(tmp_path, first, *sessions, *options, url=url))
        heads = [request.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")[1:] for _, request in second.requests]
    on_second = by_session(tmp_path, [(0, dict(line.split(": ", 1) for line in lines)) for lines in heads])
    turns = {session: (len(on_first.get(session, ())), len(on_second.get(session, ()))) for session in (0, 8, 16, 24)}
    assert [sum(counts) for counts in turns.values()] == [8] * 4
    assert all(0 in counts for counts in turns.values()) == identity
