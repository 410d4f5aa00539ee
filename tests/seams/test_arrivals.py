"""The seam of arrivals: a made-up process, added here alone, is read, run, checked and reported like the others."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Self

import pytest
from typer.testing import CliRunner

from loadgen.analysis.run.runfile import Header, read
from loadgen.analysis.steady_window import load_run as loaded
from loadgen.cli import app
from loadgen.engine.prepare import build_schedule
from loadgen.errors import PlanError
from loadgen.plan import Plan
from loadgen.servers.simulated.config import SimulatedConfig
from loadgen.workloads import arrivals
from loadgen.workloads.arrival_facts import Arrivals, LoadFacts
from loadgen.workloads.spec_syntax import NS_PER_S, format_number, parse_rate
from tests.support.simulated import running


class Pairs(Arrivals, frozen=True):
    """Two at a time, evenly."""

    rate: Fraction

    SYNTAX = "pairs:R, such as pairs:20"

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(parse_rate(rest))

    def due_ns(self, seed: int) -> Iterator[int]:  # noqa: ARG002
        return (index // 2 * int(2 * NS_PER_S / self.rate) for index in count())

    @property
    def facts(self) -> LoadFacts:
        return LoadFacts(
            text=f"{format_number(self.rate)} per second, in pairs", steady=True, rate_per_s=float(self.rate)
        )

    def __str__(self) -> str:
        return f"pairs:{format_number(self.rate)}"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line in the registry."""
    monkeypatch.setitem(arrivals.ARRIVAL_PROCESSES, "pairs", Pairs)


def test_a_plan_takes_it_and_holds_it_to_its_rules() -> None:
    """Its due instants are the schedule's; it never ends by itself; what is wrong is answered with its syntax."""
    schedule = build_schedule(Plan(server="tgi", arrivals="pairs:20", n=4))
    assert list(schedule.due_ns or ()) == [0, 0, NS_PER_S // 10, NS_PER_S // 10]
    with pytest.raises(PlanError, match="would never end"):
        Plan(server="tgi", arrivals="pairs:20")
    with pytest.raises(PlanError, match="write pairs:R, such as pairs:20"):
        Plan(server="tgi", arrivals="pairs:x", n=1)
    with pytest.raises(PlanError, match="starts, pairs"):
        Plan(server="tgi", arrivals="nothing:1", n=1)


def test_a_run_of_it_is_described_checked_and_reported(tmp_path: Path) -> None:
    """The command line sends it; the header keeps what it says of itself, and delivery, window and page use that."""
    with running(SimulatedConfig(server="tgi", ttft_s=0.02, itl_s=0.002)) as simulated:
        options = ["--server", "tgi", "--url", simulated.url, "--arrivals", "pairs:40", "--n", "40"]
        more = ["--input-tokens", "8", "--output-tokens", "4", "--out", str(tmp_path / "run")]
        result = CliRunner().invoke(app, ["run", *options, *more])
    assert result.exit_code in (0, 5), result.output
    facts = read(tmp_path / "run").header.load
    assert (facts.kind, facts.text, facts.rate_per_s) == ("pairs", "40 per second, in pairs", 40.0)
    assert facts.open_loop
    assert facts.steady
    assert not any((facts.burst, facts.finite, facts.law))
    _, frame = loaded(tmp_path / "run")
    assert frame.window is not None  # steady: a window is looked for
    assert '"named": 40.0' in (tmp_path / "run/summary.json").read_text("utf-8")
    assert "in pairs" in (tmp_path / "run/report.html").read_text("utf-8")


def test_a_run_of_it_reads_where_nobody_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is in the header; a header without that promises nothing."""
    header = Header(version="1", started_at="", start_ns=0, plan={"arrivals": "pairs:40"}, server={})
    monkeypatch.delitem(arrivals.ARRIVAL_PROCESSES, "pairs")
    assert header.load.text == "40 per second, in pairs"
    unknown = Header(version="1", started_at="", start_ns=0, plan={"arrivals": "pairs:40"}, server={}).load
    assert (unknown.kind, unknown.text, unknown.rate_per_s) == ("pairs", "arriving as pairs:40", None)
