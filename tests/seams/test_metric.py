"""A metric is one entry of METRICS: a made-up one shows everywhere without another line of code."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.command import ROOT
from tests.support.runs import burst, run_of

PROGRAM = """
import contextlib, io, json, sys
from loadgen.analysis.metrics import METRICS, Metric

METRICS["ttfb_s"] = Metric(
    "ttfb_s", "TTFB", "Time to first byte", "t_byte - t_sent, made up.",
    lambda f: (f.first_byte_ns - f.sent_ns) / 1e9, stamps="ttft",
)

from loadgen.cli import main

def command(*arguments):
    sys.argv = ["loadgen", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, (arguments, ended.code)
    return printed.getvalue()

one, other, folder = sys.argv[1:]
kept = ("--assert", "ttfb.p50 < 100s", "--goodput", "ttfb < 100s")
found = {
    "summary": json.loads(command("report", one, *kept, "--json")),
    "comparison": json.loads(command("compare", one, other, "--json", "--fail-if", "ttfb.p50 worse by 1000%")),
    "page": open(one + "/report.html", encoding="utf-8").read(),
}
command("export", one, "--csv", folder)
sys.path.insert(0, "docs")
import generate
from loadgen.interactive.live_run import LiveFigures
found |= {"docs": generate.metrics(), "live": list(LiveFigures().metrics), "export_docs": generate.exported()}
json.dump(found, sys.stdout)
"""


pytestmark = pytest.mark.xdist_group("metric")  # the tests share the output of one interpreter


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every command says of two runs where there is one metric more."""
    folder = tmp_path_factory.mktemp("metric")
    runs = [run_of(folder / name, burst(80, 4, seed=seed)).path.parent for seed, name in enumerate(("one", "other"))]
    command = [sys.executable, "-c", PROGRAM, *map(str, runs), str(folder / "tables")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    with (folder / "tables" / "requests.csv").open() as table:
        return {**json.loads(done.stdout), "rows": list(csv.DictReader(table))}


def test_summary_objectives_and_goodput_have_it(found: dict[str, Any]) -> None:
    """Described like every latency, judged by --assert and by --goodput."""
    summary = found["summary"]
    assert summary["latency"]["ttfb_s"]["p50"] == summary["latency"]["ttft_s"]["p50"]
    assert [(each["figure"], each["verdict"]) for each in summary["objectives"]] == [("ttfb", "pass")]
    assert summary["goodput"]["attainment"] == 1


def test_export_has_it(found: dict[str, Any]) -> None:
    """A column, with the value of each request."""
    assert [row["ttfb_s"] for row in found["rows"]] == [row["ttft_s"] for row in found["rows"]]
    assert float(found["rows"][0]["ttfb_s"]) > 0


def test_comparison_has_it(found: dict[str, Any]) -> None:
    """A gate on it is judged, with a row of its own."""
    assert any(row["figure"] == "ttfb.p50" for row in found["comparison"]["rows"])


def test_pages_and_documents_have_it(found: dict[str, Any]) -> None:
    """The report's table, the live page's figures, the reference pages."""
    assert "TTFB" in found["page"]
    assert "ttfb_s" in found["live"]
    assert "| `ttfb_s` | Time to first byte |" in found["docs"]
    assert "| `ttfb_s` | float64 |" in found["export_docs"]
