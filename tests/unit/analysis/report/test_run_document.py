"""What the page's tables hold: the overview of several runs, memory and the server's counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from loadgen.analysis.report import ChartRef, Disclosure, Document, Paragraph, Section, Table, tables
from loadgen.analysis.report.run_document import page_document, run_names
from loadgen.analysis.run.runfile import Telemetry
from tests.support.runs import burst, healthy, part_of, run_of, summarise, typed

SECOND_NS = 10**9


def texts(table: Table) -> list[dict[str, str]]:
    """Each row by its heads."""
    heads = [column.title for column in table.columns]
    return [dict(zip(heads, (cell.text for cell in row.cells), strict=True)) for row in table.rows]


def section(document: Document, name: str) -> Section:
    return next(each for each in document.sections if each.id == name)


def test_the_overview_has_one_unit_down_a_column(tmp_path: Path) -> None:
    """Seconds and milliseconds as the heads say, raw values to sort by, and a mark at what rests on too few."""
    summary = typed(summarise(run_of(tmp_path / "run", burst(100, 8))))
    table = tables.overview([summary])
    (row,) = texts(table)
    median = summary.latencies["tpot_s"].p50
    assert median
    assert row["TPOT p50, ms"] == f"{median * 1e3:.2f}"
    assert median in [cell.value for cell in table.rows[0].cells]
    p99 = summary.latencies["ttft_s"].p99
    assert p99
    assert row["TTFT p99, s"] == f"{p99:.4f}*"
    assert (row["complete"], row["validity"]) == ("100 of 100", "valid")
    nothing = typed(summarise(run_of(tmp_path / "nothing", [])))
    assert {*texts(tables.overview([nothing]))[0].values()} == {"", "–", "0 of 0", "invalid"}  # noqa: RUF001


def test_a_page_about_embeddings_speaks_of_no_tokens(tmp_path: Path) -> None:
    """Sections about tokens are left out, and the overview has no output rate of 0."""
    without = {"chunk_ns": [], "chunk_tokens": [], "output_tokens": None, "output_tokens_asked": 0, "counted_by": ""}
    embedded = [replace(record, **without) for record in burst(50, 4)]
    run = run_of(tmp_path / "run", embedded)
    part = part_of(run)
    assert part.data["course"]["generates"] is False
    document = page_document([part])
    sections = {each.id for each in document.sections}
    assert {"waiting", "gaps"} & sections == set()
    assert {"latency", "course", "timeline"} <= sections
    (course,) = section(document, "course").blocks[:1]
    assert isinstance(course, ChartRef)
    assert list(course.caption) == ["Peak 50 requests in flight."]
    assert texts(tables.overview([part.summary]))[0]["output, tokens/s"] == "–"  # noqa: RUF001
    assert {"waiting", "gaps"} <= {
        each.id for each in page_document([part_of(run_of(tmp_path / "b", burst(9, 4)))]).sections
    }


def test_repeats_are_called_repeats(tmp_path: Path) -> None:
    """Repeats of one plan are named by their number alone. If a repeat used another server, names contain the server.
    Two groups of repeats are told apart by place."""
    first, second = (typed(summarise(run_of(tmp_path / name, burst(12, 4)))) for name in "ab")
    for place, each in ((2, first), (1, second)):
        each.run.repeat, each.run.repeats = place, 3
    assert run_names([first, second]) == ["repeat 2", "repeat 1"]
    first.server.version = "3.3.4"
    assert run_names([first, second]) == ["tgi 3.3.4 (repeat 2)", "tgi 3.3.5 (repeat 1)"]
    first.server.version = second.server.version
    assert run_names([first, second] * 2)[3] == "tgi 3.3.5 (run 4)"


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
    document = page_document([part_of(run_of(tmp_path / "run", burst(20, 4), telemetry=telemetry))])
    folded = section(document, "machines").blocks[-1]
    assert isinstance(folded, Disclosure)
    memory, counters, missing, readings = folded.blocks
    assert isinstance(readings, ChartRef)
    assert isinstance(memory, Table)
    assert isinstance(counters, Table)
    assert [cell.text for cell in memory.rows[0].cells][:4] == ["GPU 0", "10.0 GiB", "70.0 GiB", "72.0 GiB"]
    counted = {row["counter"]: (row["server"], row["client"], row["equal"]) for row in texts(counters)}
    assert counted["Requests finished"] == ("20", "20", "yes")
    assert counted["Output tokens"] == ("81", "80", "no")
    assert isinstance(missing, Paragraph)
    assert missing.text == "Not read: server (1 reading failed: timeout)."
