"""`loadgen export`: tables that independent readers understand, and that lead to the figures of the report."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from loadgen.analysis.export import TABLES
from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.record import Record
from loadgen.analysis.run.runfile import Run
from loadgen.cli.report import export
from loadgen.errors import LoadgenError, OutputError, PlanError, install_hint
from tests.support.runs import MILLISECOND_NS as MS
from tests.support.runs import burst, complete, failed, header, loop, run_of, summarise

RECORDS: list[Record] = [
    *burst(40, 6),
    complete(40, [30 * MS, 90 * MS, 95 * MS], tokens=[2, 1, 3]),
    failed(41, "in_band_error", '=HYPERLINK("http://example.com")'),
    failed(42, "connect", sent_ns=None, sent_end_ns=None, http_status=None),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A burst with every kind of row."""
    return run_of(tmp_path / "run", RECORDS)


def test_parquet_holds_every_record(run: Run, tmp_path: Path) -> None:
    """DuckDB finds each request and chunk with its instants as whole nanoseconds, and null where nothing happened."""
    export(run.path, parquet=tmp_path / "tables", quiet=True)
    ask = duckdb.connect()
    tables = {name: f"'{tmp_path / 'tables' / name}.parquet'" for name in TABLES}
    found = ask.sql(
        f"select request, state, sent_ns, error_detail from {tables['requests']} order by request"
    ).fetchall()
    assert found == [(each.id, each.state, each.sent_ns, each.error_detail or None) for each in RECORDS]
    chunks = ask.sql(f"select token, tokens, at_ns, gap_ns from {tables['chunks']} where request = 40").fetchall()
    assert chunks == [(1, 2, 30 * MS, None), (3, 1, 90 * MS, 60 * MS), (4, 3, 95 * MS, 5 * MS)]
    assert ask.sql(f"select count(*) from {tables['chunks']}").fetchall() == [(40 * 6 + 3,)]
    lateness = ask.sql(f"select sum(value) from {tables['telemetry']} where figure = 'late_counts.28'").fetchall()
    assert lateness == [(10 * 1400,)]
    plan = ask.sql(f"select server, simulated, speed, plan from {tables['run']}").fetchall()
    assert plan[0][:3] == ("tgi", False, None)
    assert json.loads(plan[0][3])["n"] == len(RECORDS)


def test_csv_says_what_parquet_says(run: Run, tmp_path: Path) -> None:
    """Both forms at once, file by file and column by column; only what a spreadsheet would run has an apostrophe."""
    export(run.path, parquet=tmp_path / "both", as_csv=tmp_path / "both", quiet=True)
    for name, columns in TABLES.items():
        parquet = pd.read_parquet(tmp_path / "both" / f"{name}.parquet")
        csv = pd.read_csv(tmp_path / "both" / f"{name}.csv")
        assert list(csv.columns) == list(parquet.columns) == [column.name for column in columns]
        text = parquet.map(lambda value: f"'{value}" if str(value).startswith("=") else value)
        pd.testing.assert_frame_equal(csv, text, check_dtype=False)


def test_the_tables_lead_to_the_figures_of_the_report(tmp_path: Path) -> None:
    """Complete, measured requests due inside the window have, by pandas, the percentiles of summary.json."""
    run = run_of(tmp_path / "run", loop(1200, warmup=3), plan=header(1200).plan | {"arrivals": "constant:100"})
    export(run.path, parquet=tmp_path, quiet=True)
    requests = pd.read_parquet(tmp_path / "requests.parquet")
    window = pd.read_parquet(tmp_path / "run.parquet").iloc[0]
    inside = requests.due_ns.between(window.window_from_ns, window.window_to_ns)
    counted = requests[inside & (requests.phase == "measured") & (requests.state == "complete")]
    latency = summarise(run)["latency"]
    assert len(counted) == latency["ttft_s"]["n"] == 1150
    for name in ("ttft_s", "ttft_due_s", "tpot_s", "e2e_s", "e2e_due_s"):
        assert counted[name].quantile([0.5, 0.9]).tolist() == pytest.approx(
            [latency[name]["p50"], latency[name]["p90"]], abs=1e-9
        )


def test_repeats_get_a_folder_each(run: Run, tmp_path: Path) -> None:
    """Of their names, each with all tables."""
    for place in (1, 2):
        (tmp_path / "repeats" / f"repeat-{place}").mkdir(parents=True)
        shutil.copy(run.path, tmp_path / "repeats" / f"repeat-{place}")
    export(tmp_path / "repeats", as_csv=tmp_path / "tables", quiet=True)
    found = sorted(str(file.relative_to(tmp_path / "tables")) for file in (tmp_path / "tables").rglob("*.csv"))
    assert found == sorted(f"repeat-{place}/{name}.csv" for place in (1, 2) for name in TABLES)


def test_an_export_that_breaks_off_leaves_no_table(tmp_path: Path) -> None:
    """A file that is no run is refused, and the folder that was made for its tables is removed."""
    (tmp_path / "run.jsonl").write_text("hello\n", "utf-8")
    with pytest.raises(RunFileError):
        export(tmp_path, as_csv=tmp_path / "tables", parquet=tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_what_is_missing_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no library for Parquet, a folder that cannot be: each has a hint that says what to do."""
    with pytest.raises(PlanError) as nowhere:
        export(run.path)
    assert "--csv DIR" in nowhere.value.hint
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        export(run.path, as_csv=tmp_path / "file")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LoadgenError) as missing:
        export(run.path, parquet=tmp_path / "tables")
    assert install_hint("parquet") in missing.value.hint
