"""A name with several addresses: the run uses those that answer, in turn, and names them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run.runfile import read
from loadgen.servers.target import Target, address_text, resolve_target
from loadgen.servers.wire.addresses import Connector, Rotation, select_addresses
from loadgen.servers.wire.connection import Connection
from tests.support.command import burst, summary_of
from tests.support.plain_openai import PlainServer, Talk, plain_openai
from tests.support.runs import said, typed

LOAD = ("--server", "openai", "--endpoint", "completions", "--lengths", "approximate", "--input-tokens", "4")
LOAD = (*LOAD, "--output-tokens", "max:2", "--metrics-every", "0", "--timeout", "20s")
NAME = "replicas.test"

Resolver = Callable[[Sequence[str]], None]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Return a function that gives NAME these addresses."""
    original = socket.getaddrinfo

    def give(addresses: Sequence[str]) -> None:
        def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
            hosts = addresses if host == NAME else [host]
            return [result for each in hosts for result in original(each, port, *rest, **more)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return give


def streams(talk: Talk) -> None:
    """Answer, and keep the connection."""
    talk.stream()


ATTEMPTS = 5
"""Number of ports that are tried."""


@contextlib.contextmanager
def replicas(*hosts: str) -> Iterator[list[PlainServer]]:
    """Serve on the same port of several addresses.

    A port that is free on the first address may be in use on another one. Then another port is tried.
    """
    with contextlib.ExitStack() as stack:
        for attempt in range(ATTEMPTS):
            servers = [stack.enter_context(plain_openai(streams, host=hosts[0]))]
            try:
                servers += [
                    stack.enter_context(plain_openai(streams, host=host, port=servers[0].port)) for host in hosts[1:]
                ]
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or attempt == ATTEMPTS - 1:
                    raise
                stack.close()
        yield servers


@pytest.mark.parametrize("arrivals", ["burst", "closed:6", "constant:100"])
def test_every_address_of_a_name_gets_its_share(arrivals: str, tmp_path: Path, resolve: Resolver) -> None:
    """Three hosts serve one name (DNS round robin): connections go to them in turn. Header and report name them, and
    one source timestamps the responses of all."""
    resolve(["127.0.0.3", "127.0.0.1", "127.0.0.2"])
    with replicas("127.0.0.1", "127.0.0.2", "127.0.0.3") as servers:
        words = (*LOAD, "--url", f"http://{NAME}:{servers[0].port}", "--arrivals", arrivals, "--n", "30")
        _, out, err = burst(tmp_path, *words, command="run")
    run = read(tmp_path / "run")
    assert Counter(record.state for record in run.records) == {"complete": 30}
    assert {record.stamps for record in run.records} == {run.header.stamps.name}
    assert all(len(server.ids) >= 5 for server in servers), [len(server.ids) for server in servers]
    used = ["127.0.0.3", "127.0.0.1", "127.0.0.2"]
    assert run.header.server["addresses"] == used
    assert f"{NAME}: connections go in turn to 127.0.0.3, 127.0.0.1, 127.0.0.2" in out, err
    assert "Connections went in turn to 127.0.0.3, 127.0.0.1, 127.0.0.2." in " ".join(out.split())
    summary = summary_of(tmp_path)
    assert summary["server"]["addresses"] == used
    answered = Counter(record.replica for record in run.records)
    assert answered == {f"127.0.0.{index}": len(server.ids) for index, server in enumerate(servers, 1)}
    assert {part["name"]: part["requests"]["complete"] for part in summary["replicas"]} == answered


def test_several_urls_of_which_one_has_several_addresses(tmp_path: Path, resolve: Resolver) -> None:
    """Each URL gets half of the requests. The addresses of a URL share its half, and are named with the URL."""
    resolve(["127.0.0.2", "127.0.0.3"])
    with replicas("127.0.0.1", "127.0.0.2", "127.0.0.3") as servers:
        port = servers[0].port
        urls = (f"http://{NAME}:{port}", f"http://127.0.0.1:{port}")
        words = (*LOAD, "--url", urls[0], "--url", urls[1], "--expect-replicas", "3")
        _, out, err = burst(tmp_path, *words, "--n", "20")
    named = [f"{urls[0]} 127.0.0.2", f"{urls[0]} 127.0.0.3", urls[1]]
    assert f"3 replicas answer: {', '.join(named)}" in out, err
    assert Counter(record.replica for record in read(tmp_path / "run").records) == dict(
        zip(named, (5, 5, 10), strict=True)
    )
    assert f"Connections to {urls[0]} went in turn to 127.0.0.2, 127.0.0.3." in " ".join(out.split())
    expected = {urls[0]: ["127.0.0.2", "127.0.0.3"], urls[1]: ["127.0.0.1"]}
    assert summary_of(tmp_path)["server"]["replicas"] == expected


def test_a_header_names_the_replica(tmp_path: Path) -> None:
    """A balancer names the replica in a header of any spelling. Figures per replica add up, and one can be judged."""

    def from_one_of_two(talk: Talk) -> None:
        talk.stream(more=f"X-SERVED-BY:  node-{talk.number % 2} \r\n")

    with plain_openai(from_one_of_two) as server:
        words = (*LOAD, "--url", server.url, "--arrivals", "closed:1", "--n", "20", "--replica-header", "x-served-by")
        code, out, err = burst(tmp_path, *words, "--assert", "node-1: ttft.p50 < 10s", command="run")
    assert code in (0, 5), err  # a busy machine may make the client the limit
    parts = {part["name"]: part["requests"]["complete"] for part in summary_of(tmp_path)["replicas"]}
    assert parts.keys() == {"node-0", "node-1"}
    assert sum(parts.values()) == 20
    assert "node-1" in out


def test_a_replica_header_must_be_a_name(tmp_path: Path) -> None:
    """A text that is no header name is refused before anything is sent."""
    code, _, err = burst(tmp_path, "--url", "http://127.0.0.1:9", "--replica-header", "X Served By")
    assert code == 2
    assert "--replica-header" in err
    assert "must be the name of a response header" in err


def test_an_address_that_refuses_is_left_out_and_named(tmp_path: Path, resolve: Resolver) -> None:
    """The first of two addresses refuses: every request goes to the other, and the report says so."""
    resolve(["127.0.0.2", "127.0.0.1"])
    with plain_openai(streams) as server:
        burst(tmp_path, *LOAD, "--url", f"http://{NAME}:{server.port}", "--n", "9")
    run = read(tmp_path / "run")
    assert Counter(record.state for record in run.records) == {"complete": 9}
    assert run.header.server["addresses"] == ["127.0.0.1"]
    assert run.header.server["addresses_unused"] == {"127.0.0.2": "Connection refused"}
    sentence = "Connections went to 127.0.0.1; 127.0.0.2 was not used (Connection refused)."
    assert said(typed(summary_of(tmp_path)), "addresses") == sentence


def test_of_two_families_the_first_that_works_is_used(resolve: Resolver) -> None:
    """A host that serves both families is one host: its second family is not used, and the target says why."""
    resolve(["::1", "127.0.0.1", "127.0.0.2"])
    with replicas("::1", "127.0.0.1") as servers:
        target = select_addresses(resolve_target(f"http://{NAME}:{servers[0].port}", None))
    assert target.facts == {
        "addresses": ["::1"],
        "addresses_unused": {"127.0.0.1": "IPv6 is used", "127.0.0.2": "Connection refused"},
    }


def test_if_no_address_answers_all_are_kept(resolve: Resolver) -> None:
    """The run is to record what is wrong with them."""
    resolve(["127.0.0.1", "127.0.0.2"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    target = select_addresses(resolve_target(f"http://{NAME}:{port}", None))
    assert [address_text(address) for address in target.addresses] == ["127.0.0.1", "127.0.0.2"]
    assert target.unused == {}


async def peer_of(connector: Connector) -> str:
    """Open a connection; return the address that it goes to."""
    begun = connector()
    connection = begun if isinstance(begun, Connection) else await begun
    try:
        return str(connection.sock.getpeername()[0])
    finally:
        connection.close()


async def test_an_address_that_fails_during_the_run_is_passed_over(resolve: Resolver) -> None:
    """Connections go in turn to both servers; once one is gone every connection goes to the other. Where both are gone
    the error is the server's."""
    resolve(["127.0.0.1", "127.0.0.2"])
    with plain_openai(streams) as first:
        target = resolve_target(f"http://{NAME}:{first.port}", None)
        connector = Connector(target, 5)
        with plain_openai(streams, host="127.0.0.2", port=first.port):
            assert [await peer_of(connector) for _ in range(4)] == ["127.0.0.1", "127.0.0.2"] * 2
        assert [await peer_of(connector) for _ in range(4)] == ["127.0.0.1"] * 4
    with pytest.raises(ConnectionRefusedError):
        await peer_of(connector)


def test_an_address_that_failed_is_tried_last() -> None:
    """It is still tried: if every address has failed, the order is the usual one."""
    addresses = tuple((socket.AF_INET, (f"127.0.0.{number}", 80)) for number in (1, 2, 3))
    rotation = Rotation(addresses, first=2)
    assert rotation.order() == [addresses[2], addresses[0], addresses[1]]
    rotation.failed(addresses[0])
    assert rotation.order() == [addresses[1], addresses[2], addresses[0]]
    rotation.failed(addresses[1])
    rotation.failed(addresses[2])
    assert rotation.order() == [addresses[1], addresses[2], addresses[0]]


def test_a_url_with_an_address_has_one() -> None:
    """Nothing is tried before such a run."""
    target = resolve_target("http://127.0.0.1:1", None)
    assert isinstance(target, Target)
    assert select_addresses(target) is target
    assert target.facts == {"addresses": ["127.0.0.1"]}
