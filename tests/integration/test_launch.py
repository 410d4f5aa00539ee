"""Servers that the launchers start or take as they are: up on entry, down on exit."""

from __future__ import annotations

import os
from typing import Any

import pytest

from loadgen.servers.discovery import probe
from loadgen.servers.errors import LaunchError, UnreachableError, WrongServerError
from loadgen.servers.launch import LaunchMethod, LaunchSpec, launched_server
from loadgen.servers.launch.spec import LOCAL
from loadgen.servers.simulated import ConfigError
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.simulated import running


def wanted(how: LaunchMethod, server: str = "tgi", **options: Any) -> LaunchSpec:
    return LaunchSpec(server, LOCAL, "tiny", how, options)


def test_a_simulated_server_is_up_and_then_down() -> None:
    """Inside it answers as the server named, by the process whose id is given; afterwards nothing listens there."""
    lines: list[str] = []
    with launched_server(wanted("simulated", ttft_s=0.01), lines.append) as server:
        facts = probe(server.url, "tgi")
        assert (facts.simulated, facts.model) == (True, "tiny")
        assert server.facts["launch"] == "simulated"
        assert server.facts["ready_s"] > 0
        (pid,) = server.pids
        os.kill(pid, 0)
        assert server.url in lines[0]
    with pytest.raises(UnreachableError):
        probe(server.url, "tgi")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_simulated_server_that_cannot_start_says_why() -> None:
    """A port that is taken is a LaunchError with a hint, an option that does not exist a ConfigError."""
    with running(SimulatedConfig(server="tgi")) as first:
        port = int(first.url.rpartition(":")[2])
        with (
            pytest.raises(LaunchError, match="did not start") as caught,
            launched_server(wanted("simulated", port=port), print),
        ):
            pass
    assert caught.value.hint
    with pytest.raises(ConfigError, match="no colour"), launched_server(wanted("simulated", colour="red"), print):
        pass


def test_a_running_server_is_taken_as_it_is() -> None:
    """It is probed at entry and still answers after exit."""
    with running(SimulatedConfig(server="vllm")) as there:
        with launched_server(wanted("running", "vllm", url=there.url), print) as server:
            assert (server.url, server.pids) == (there.url, ())
        assert probe(there.url, "vllm").simulated


def test_a_running_server_must_be_the_one_named() -> None:
    """Another server at the URL, or none given, is an error."""
    with (
        running(SimulatedConfig(server="vllm")) as there,
        pytest.raises(WrongServerError),
        launched_server(wanted("running", "tgi", url=there.url), print),
    ):
        pass
    with pytest.raises(LaunchError, match="URL"), launched_server(wanted("running"), print):
        pass
