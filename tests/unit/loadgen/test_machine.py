"""What a machine allows, found out before anything is sent."""

import resource

import pytest

from loadgen import machine as host
from loadgen.errors import OpenFilesError, PortsError


def test_too_few_open_files_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit may not be raised: the message names both numbers and what to do."""

    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(OpenFilesError, match=r"1000 connections in one process need 1064 open files.*512") as caught:
        host.allow_open_files(1000)
    assert "--workers 4" in caught.value.hint


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than needed, and the hard limit stays."""
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    host.allow_open_files(1000)
    assert wanted == [(1064, 4096)]


def test_too_few_ports_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address of the server allows as many connections as there are local ports."""
    monkeypatch.setattr(host, "port_range", lambda: (40_000, 40_039))
    host.check_ports(40, 1)
    host.check_ports(80, 2)
    with pytest.raises(PortsError, match=r"81 concurrent requests .*\(40000 to 40039\) allows only 80") as caught:
        host.check_ports(81, 2)
    assert "sysctl -w net.ipv4.ip_local_port_range" in caught.value.hint


def test_the_facts_of_a_machine_are_plain_values() -> None:
    """They go into the header as they are."""
    facts = host.facts()
    assert isinstance(facts["cores"], int)
    assert facts["memory_bytes"] > 1 << 20
