"""`--expect-replicas`: a run starts only when enough replicas answer, and otherwise says which do not."""

from __future__ import annotations

import socket
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from loadgen.servers import expected_replicas
from loadgen.servers.auth import NO_AUTH
from loadgen.servers.errors import UnreachableError
from loadgen.servers.expected_replicas import Round, wait_for_replicas
from loadgen.servers.json_client import JsonResponse
from loadgen.servers.server_url import fixed_number
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, burst
from tests.support.simulated import equal, replicas, running, urls_of
from tests.support.stub_server import answering

SUCCESS = (0, 5)
"""Exit codes of commands whose requests were all complete. A busy machine may limit the client."""
LOAD = ("--n", "4", "--input-tokens", "16", "--output-tokens", "4")
NAME = "replicas.test"


def free_url() -> str:
    """Return a URL at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_run_starts_when_every_replica_answers(tmp_path: Path) -> None:
    """Two of two replicas answer: both are named before the server is."""
    with replicas(*equal(2)) as servers:
        code, out, err = burst(tmp_path, *urls_of(servers), "--expect-replicas", "2", *LOAD)
    assert code in SUCCESS, err
    assert f"2 replicas answer: {servers[0].url}, {servers[1].url}" in out


def test_a_missing_replica_is_named(tmp_path: Path) -> None:
    """One of two replicas does not listen: exit code 3 after the stated time, and nothing is sent to the other."""
    missing = free_url()
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        words = ("--url", server.url, "--url", missing, "--expect-replicas", "2", "--replicas-wait", "2s")
        code, _, err = burst(tmp_path, *words, *LOAD)
    assert code == 3
    assert f"only 1 of 2 replicas answered within 2 s: {server.url}" in err
    assert f"nothing listens at {missing}" in err
    assert "--replicas-wait 10m" in err
    assert not server.log


def test_a_header_names_the_replicas() -> None:
    """Three replicas behind one URL. nginx also names a server that it has tried before, in front of the last one. A
    response with status 503 comes from the balancer."""
    turns = count()

    def from_one_of_three(_body: object) -> tuple[int, object, str]:
        turn = next(turns) % 4
        names = ("10.0.0.1:80", "10.0.0.9:80, 10.0.0.2:80", "10.0.0.3:80", "10.0.0.8:80")
        return 503 if turn == 3 else 200, {}, f"X-Served-By: {names[turn]}"

    said: list[str] = []
    with answering({"GET /v1/models": from_one_of_three}) as stub:
        wait_for_replicas([stub.url], 3, "x-served-by", 60, NO_AUTH, said.append)
        with pytest.raises(UnreachableError) as caught:
            wait_for_replicas([stub.url], 4, "x-served-by", 2, NO_AUTH, said.append)
    assert sorted(said[0].removeprefix("3 replicas answer: ").split(", ")) == [f"10.0.0.{n}:80" for n in (1, 2, 3)]
    assert "only 3 of 4 replicas answered within 2 s (by the header x-served-by): 10.0.0." in str(caught.value)
    assert f"{stub.url}: answers 503" in str(caught.value)


def test_a_header_that_no_response_has_is_said(tmp_path: Path) -> None:
    """The message names the header after the first round, because waiting longer would not help."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        words = (
            "--url",
            server.url,
            "--replica-header",
            "X-None",
            "--expect-replicas",
            "2",
            "--replicas-wait",
            "1h",
        )
        code, _, err = burst(tmp_path, *words, *LOAD)
    assert code == 3
    assert "--expect-replicas 2: no response had the header X-None" in err


def test_addresses_of_a_name_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name leads to two addresses, each of which is asked. The run is not started for three replicas."""
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        hosts = ("127.0.0.1", "127.0.0.2") if host == NAME else (host,)
        return [result for each in hosts for result in original(each, port, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    said: list[str] = []
    with running(SimulatedConfig(server="vllm", host="0.0.0.0", **FAST)) as server:
        url = f"http://{NAME}:{server.url.rpartition(':')[2]}"
        wait_for_replicas([url], 2, "", 60, NO_AUTH, said.append)
        assert said == [f"2 replicas answer: {url} 127.0.0.1, {url} 127.0.0.2"]
        with pytest.raises(UnreachableError, match=r"only 2 of 3 replicas answered within 2 s"):
            wait_for_replicas([url], 3, "", 2, NO_AUTH, said.append)
    assert fixed_number([url]) is None


def test_two_names_of_one_address_are_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with two names counts once."""
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **more: Any) -> list[Any]:
        return original("127.0.0.1" if str(host).endswith(".test") else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        port = server.url.rpartition(":")[2]
        urls = [f"http://{name}.test:{port}" for name in ("one", "two")]
        with pytest.raises(UnreachableError, match=r"only 1 of 2 replicas answered within 1 s: http://one\.test"):
            wait_for_replicas(urls, 2, "", 1, NO_AUTH, print)


def test_a_round_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes 5 s under a fake clock. A round of 40 requests ends after the 12 s that the user allows."""
    now_s = [0.0]
    sent: list[str] = []

    def answer(url: str, _access: object, _until_s: float, _address: object = None) -> JsonResponse:
        sent.append(url)
        now_s[0] += 5.0
        return JsonResponse(200, b"", headers={"x-served-by": "one"})

    monkeypatch.setattr(expected_replicas, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(expected_replicas, "AT_ONCE", 1)
    monkeypatch.setattr(expected_replicas, "_answer", answer)
    with pytest.raises(UnreachableError, match="only 1 of 2 replicas answered within 12 s"):
        wait_for_replicas(["http://a:1", "http://b:1"], 2, "x-served-by", 12.0, NO_AUTH, print)
    assert len(sent) == 3


def test_replicas_that_start_later_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each change of the number, until every replica answers."""
    rounds = iter(range(5))
    monkeypatch.setattr(expected_replicas, "ROUND_S", 0.0)
    monkeypatch.setattr(
        expected_replicas,
        "_round_by_address",
        lambda *_: Round(dict.fromkeys(map(str, range(next(rounds) // 2 + 1))), {}),
    )
    said: list[str] = []
    wait_for_replicas(["http://h"], 3, "", 600.0, NO_AUTH, said.append)
    assert said == [
        "1 of 3 replicas answer; waiting for the others, at most 600 s",
        "2 of 3 replicas answer; waiting for the others, at most 600 s",
        "3 replicas answer: 0, 1, 2",
    ]


def test_more_replicas_than_addresses_is_a_mistake(tmp_path: Path) -> None:
    """Two IP addresses can never be three replicas, so the command does not wait for them."""
    words = ("--url", "http://127.0.0.1:1", "--url", "[::1]:2", "--expect-replicas", "3", "--server", "tgi")
    code, _, err = burst(tmp_path, *words, *LOAD)
    assert code == 2
    assert "--expect-replicas 3: the URLs have only 2 addresses" in err
    assert (fixed_number(["unix:/run/a.sock"]), fixed_number(["http://h:1", "10.0.0.1:8000"])) == (1, None)
