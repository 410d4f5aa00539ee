"""The seam of receive stamps: a made-up source, added here alone, stamps a run and is named wherever stamps are."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from loadgen.analysis.run.runfile import Header, read
from loadgen.analysis.steady_window import load_run as loaded
from loadgen.cli import app
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.servers.wire.timestamp_sources import SOURCES, least_exact_source, open_source
from loadgen.servers.wire.timestamps import PLAIN, Address, Instants, Received, Share, TimestampSource, ToMonotonic
from tests.support.runs import burst, run_of
from tests.support.simulated import running

EARLIER_NS = 3


class Sundial(TimestampSource):
    """Gives every byte a stamp of its own: here the reading's, and a little earlier."""

    name = "sundial"
    title = "sundial timestamps"
    exact = True
    error_s = 7e-6
    by_read = False
    there: ClassVar = True

    @classmethod
    def open(cls, servers: Sequence[Address] = (), share: Share = (0, 1)) -> Self | None:  # noqa: ARG003
        return cls() if cls.there else None

    def watch(self, sock: socket.socket) -> None:
        sock.getpeername()  # a connection that is open

    def instants(self, received: Received, ends: Sequence[int], to_monotonic: ToMonotonic) -> Instants:
        return [instant - EARLIER_NS for instant in PLAIN.instants(received, ends, to_monotonic)[0]], self

    def counts(self) -> dict[str, int]:
        return {"clouds": 2}


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    """Its line in the registry, before all others."""
    before = dict(SOURCES)
    SOURCES.clear()
    SOURCES.update({"sundial": Sundial, **before})
    yield
    del SOURCES["sundial"]


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
        result = CliRunner().invoke(app, ["burst", *options, "--stamps", "sundial", "--out", str(folder), *more])
    assert result.exit_code in (0, 5), result.output
    return result.output


def test_a_run_is_stamped_by_it_and_says_so(tmp_path: Path) -> None:
    """Records, header, health, summary, terminal and page name it, and its own error is the error bar."""
    printed = run(tmp_path / "run")
    found = read(tmp_path / "run")
    assert {record.stamps for record in found.records} == {"sundial"}
    assert not any(record.coalesced_reads or record.first_token_merged for record in found.records)
    assert found.header.client["stamps"] == found.header.stamps.name == "sundial"
    assert (found.header.stamps.title, found.header.stamps.error_s) == ("sundial timestamps", 7e-6)
    assert all(line.values["clouds"] == 2 for line in found.telemetry if line.source == "client")
    assert {source.stamps for source in loaded(tmp_path / "run")[1].sources} == {"sundial"}
    assert "sundial timestamps" in printed
    assert '"stamps": "sundial"' in (tmp_path / "run/summary.json").read_text("utf-8")
    assert "sundial timestamps" in (tmp_path / "run/report.html").read_text("utf-8")


def test_the_best_that_works_stamps_a_run(tmp_path: Path) -> None:
    """`auto` is the first of the list, and the default."""
    assert open_source("auto", []).name == "sundial"
    run(tmp_path / "run", "--no-report", "--stamps", "auto")
    assert read(tmp_path / "run").header.stamps.name == "sundial"


def test_a_machine_without_it_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best stamps the run, and the run says that."""
    monkeypatch.setattr(Sundial, "there", False)
    run(tmp_path / "run", "--no-report")
    assert read(tmp_path / "run").header.stamps.name in [*SOURCES][1:3]


def test_processes_of_different_sources_are_as_good_as_the_least() -> None:
    """One process without it is enough; of a source that is not known here nothing is promised."""
    assert least_exact_source(["sundial", "sundial"]) == "sundial"
    assert least_exact_source(["sundial", "socket"]) == "socket"
    assert least_exact_source([]) == least_exact_source(["sundial", "hourglass"]) == "user"


def test_the_source_of_an_older_run_is_known_by_its_name(tmp_path: Path) -> None:
    """A header that only names it is filled in; a name that nobody knows promises nothing; `kernel` is `socket` now."""
    header = Header(version="1", started_at="", start_ns=0, plan={}, server={}, client={"stamps": "kernel"})
    assert (header.stamps.name, header.stamps.title, header.stamps.exact) == ("socket", "kernel timestamps", True)
    again = replace(header, stamps=replace(header.stamps, name="kernel"))
    assert again.stamps.name == "socket"
    other = Header(version="1", started_at="", start_ns=0, plan={}, server={}, client={"stamps": "dial"})
    assert (other.stamps.title, other.stamps.exact) == ("dial timestamps", False)
    older = run_of(tmp_path / "run", [replace(record, stamps="kernel") for record in burst(4, 2)])
    assert {record.stamps for record in older.records} == {"socket"}
