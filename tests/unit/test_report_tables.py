"""What the page's tables and first screen hold: trust, the overview of several runs, memory and the server's counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.metrics import summarise
from analysis.report.machines import counter_rows, memory_rows, not_measured
from analysis.report.tables import OVERVIEW, objective_rows, overview_rows, trust
from loadgen.runfile import Telemetry
from tests.runs import burst, dropped, failed, healthy, run_of

SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("records", "changes", "kind", "word"),
    [
        (burst(30, 4), {}, "good", "Yes: nothing that was checked speaks against it."),
        ([*burst(30, 4), failed(30)], {}, "care", "With care: 1 remark below."),
        ([failed(0), dropped(1)], {}, "bad", "There is nothing to believe: no request was complete."),
        (
            burst(30, 4),
            {"telemetry": healthy(stall_ns_max=2 * SECOND_NS)},
            "bad",
            "Not as it stands: the client may have been the limit.",
        ),
    ],
)
def test_the_first_screen_says_whether_to_believe_it(
    tmp_path: Path, records: list[Any], changes: dict[str, Any], kind: str, word: str
) -> None:
    """Nothing against it, a remark, nothing complete, a client that stood still."""
    found = trust(summarise(run_of(tmp_path / "run", records, **changes)))
    assert (found["kind"], found["word"]) == (kind, word)


def test_the_overview_has_one_unit_down_a_column(tmp_path: Path) -> None:
    """Seconds and milliseconds as the heads say, raw values to sort by, and no percentile of too few requests."""
    summary = summarise(run_of(tmp_path / "run", burst(100, 8)))
    (row,) = overview_rows([summary])
    cells = dict(zip([title for title, _ in OVERVIEW], row, strict=True))
    median = summary["latency"]["tpot_s"]["p50"]
    assert cells["TPOT p50"] == (f"{median * 1e3:.2f}", median)
    assert cells["TTFT p99"] == ("n too small", None)
    assert cells["complete"] == ("100 of 100", 100)
    nothing = summarise(run_of(tmp_path / "nothing", []))
    assert {text for text, _ in overview_rows([nothing])[0]} <= {"–", "n too small", "0 of 0"}  # noqa: RUF001


def test_objectives_have_their_verdict(tmp_path: Path) -> None:
    """Each is a row with the kind that colours it; a run without any has none."""
    entry = {"objective": "ttft.p99 < 1s", "verdict": "cannot tell", "said": "0.9 s", "left_out": 0}
    (row,) = objective_rows([{"objectives": [entry]}, {}])
    assert (row["run"], row["kind"], row["verdict"]) == (0, "care", "cannot tell")


def test_memory_and_counts_stand_in_rows(tmp_path: Path) -> None:
    """Before, after and at most of each GPU; the server's counts beside the client's; readings that failed are said."""
    gib = 2**30

    def gpu(at_s: int, moment: str, used: int) -> Telemetry:
        values = {"moment": moment, "gpus": [{"index": 0, "memory_used_bytes": used * gib}]}
        return Telemetry(source="gpu", at_ns=at_s * SECOND_NS, values=values)

    def server(at_s: int, moment: str, **values: Any) -> Telemetry:
        return Telemetry(source="server", at_ns=at_s * SECOND_NS, values={"moment": moment, **values})

    telemetry = [
        *healthy(),
        *(gpu(-1, "idle", 10), gpu(1, "run", 72), gpu(4, "after", 70)),
        server(-1, "idle", requests_finished=0, output_tokens=0),
        server(1, "run", gap="timeout"),
        server(4, "after", requests_finished=20, output_tokens=81),
    ]
    summary = summarise(run_of(tmp_path / "run", burst(20, 4), telemetry=telemetry))
    (row,) = memory_rows([summary])
    assert row["of"] == "GPU 0"
    assert [text for _, text in row["levels"]][:3] == ["10.0 GiB", "70.0 GiB", "72.0 GiB"]
    counted = {each["title"]: (each["server"], each["client"], each["agree"]) for each in counter_rows([summary])}
    assert counted["Requests finished"] == ("20", "20", "yes")
    assert counted["Output tokens"] == ("81", "80", "no")
    assert not_measured(summary) == {"server": "1 reading failed: timeout"}
