"""The seam of receive stamps: a made-up source, added here alone, stamps a run and is named wherever stamps are."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest
from typer.testing import CliRunner

from analysis.window import load as loaded
from loadgen.cli import app
from loadgen.runfile import Header, read
from servers.simulated.config import SimulatedConfig
from servers.wire import stamps
from servers.wire.stamps import PLAIN, Received, StampSource, ToMonotonic, common, open_source
from tests.simulated import running

EARLIER_NS = 3


class Ring(StampSource):
    """Gives every byte a stamp of its own: here the reading's, and a little earlier."""

    name = "ring"
    title = "packet ring timestamps"
    exact = True
    error_s = 7e-6
    by_read = False
    there: ClassVar = True

    @classmethod
    def open(cls) -> Self | None:
        return cls() if cls.there else None

    def watch(self, sock: socket.socket) -> None:
        sock.getpeername()  # a connection that is open

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> list[int]:
        return [instant - EARLIER_NS for instant in PLAIN.instants(received, ends, to_monotonic)]

    def counts(self) -> dict[str, int]:
        return {"ring_drops": 2}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line in the registry."""
    monkeypatch.setitem(stamps.SOURCES, "ring", Ring)


def run(folder: Path, *more: str) -> str:
    """A small burst with it; what the command prints."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.002)) as simulated:
        options = [
            "--server",
            "tgi",
            "--url",
            simulated.url,
            "--n",
            "20",
            "--input-tokens",
            "8",
            "--output-tokens",
            "4",
        ]
        result = CliRunner().invoke(app, ["burst", *options, "--stamps", "ring", "--out", str(folder), *more])
    assert result.exit_code in (0, 5), result.output
    return result.output


def test_a_run_is_stamped_by_it_and_says_so(tmp_path: Path) -> None:
    """Records, header, health, summary, terminal and page name it, and its own error is the error bar."""
    printed = run(tmp_path / "run")
    found = read(tmp_path / "run")
    assert {record.stamps for record in found.records} == {"ring"}
    assert not any(record.coalesced_reads or record.first_token_merged for record in found.records)
    assert found.header.client["stamps"] == found.header.stamps.name == "ring"
    assert (found.header.stamps.title, found.header.stamps.error_s) == ("packet ring timestamps", 7e-6)
    assert all(line.values["ring_drops"] == 2 for line in found.telemetry if line.source == "client")
    assert {source.stamps for source in loaded(tmp_path / "run")[1].sources} == {"ring"}
    assert "packet ring timestamps" in printed
    assert '"stamps": "ring"' in (tmp_path / "run/summary.json").read_text("utf-8")
    assert "packet ring timestamps" in (tmp_path / "run/report.html").read_text("utf-8")


def test_a_machine_without_it_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain source stamps the run, and the run says that."""
    monkeypatch.setattr(Ring, "there", False)
    assert open_source("ring") is PLAIN
    run(tmp_path / "run", "--no-report")
    assert read(tmp_path / "run").header.stamps.name == "user"


def test_processes_of_different_sources_have_the_plain_one_in_common() -> None:
    """One process without it is enough: the run is no better than that."""
    assert (common(["ring", "ring"]), common(["ring", "kernel"]), common([])) == ("ring", "user", "user")


def test_the_source_of_an_older_run_is_known_by_its_name() -> None:
    """A header that only names it is filled in; a name that nobody knows promises nothing."""
    header = Header(version="1", started_at="", start_ns=0, plan={}, server={}, client={"stamps": "kernel"})
    assert (header.stamps.title, header.stamps.exact) == ("kernel timestamps", True)
    other = Header(version="1", started_at="", start_ns=0, plan={}, server={}, client={"stamps": "sundial"})
    assert (other.stamps.title, other.stamps.exact) == ("sundial timestamps", False)
