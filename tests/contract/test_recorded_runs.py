"""Runs that were recorded long ago keep their figures, to the last digit."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import command
from tests.support.command import ROOT

RECORDED = Path(__file__).parent.parent / "data" / "recorded"
RUNS = ("burst", "poisson", "sessions")
SCIPY = {"ks", "difference_ci95", "ratio_ci95", "no_larger_than", "p_value", "adjusted_p"}


@pytest.mark.parametrize("name", RUNS)
def test_report(name: str, tmp_path: Path) -> None:
    """`report` gives each figure that it gave when the run was recorded."""
    shutil.copytree(RECORDED / name, tmp_path / name)
    done = loadgen("report", str(tmp_path / name), "--json")
    _same(json.loads(done.stdout), json.loads((RECORDED / name / "summary.expected.json").read_text()))


@pytest.mark.parametrize("name", RUNS)
def test_export(name: str, tmp_path: Path) -> None:
    """`export` gives each row and column that it gave when the run was recorded."""
    assert loadgen("export", str(RECORDED / name), "--csv", str(tmp_path)).returncode == 0
    for expected in (RECORDED / name).glob("*.expected.csv"):
        found = _rows(tmp_path / expected.name.replace(".expected", ""))
        rows = _rows(expected)
        assert [
            {key: _known(each[key], row[key]) for key in row} for each, row in zip(found, rows, strict=True)
        ] == rows
    (run,) = _rows(tmp_path / "run.csv")
    assert (run["simulated"], float(run["speed"])) == ("true", 5.0)


def _known(cell: str, expected: str) -> str:
    """Return a cell without the fields that its JSON object gained since the run was recorded."""
    if not (cell.startswith("{") and expected.startswith("{")):
        return cell
    known = json.loads(expected)
    return json.dumps({name: value for name, value in json.loads(cell).items() if name in known})


@pytest.mark.parametrize(("a", "b", "name"), [("burst", "burst-again", "burst"), ("poisson", "poisson", "poisson")])
def test_compare(a: str, b: str, name: str) -> None:
    """`compare` gives each figure that it gave when the runs were recorded."""
    done = loadgen("compare", str(RECORDED / a), str(RECORDED / b), "--anyway", "--json")
    _same(json.loads(done.stdout), json.loads((RECORDED / f"compare-{name}.expected.json").read_text()))


def loadgen(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = command.loadgen(ROOT, *arguments)
    assert done.returncode == 0, done.stderr
    return done


def _rows(table: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(table.read_text().splitlines()))


def _same(found: Any, expected: Any) -> None:
    """Every number of `expected` is in the same place of `found`. What comes of scipy's distributions may differ by
    1e-9: ours, which were there when the runs were recorded, were exact to 1e-10."""
    for path, value in _numbers(expected):
        place = found
        for key in path:
            assert isinstance(place, list) or key in place, f"{path}: {key} is gone"
            place = place[key]
        assert place == (pytest.approx(value, rel=1e-9) if SCIPY & set(path) else value), path


def _numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, (*path, key))
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _numbers(each, (*path, place))
    elif isinstance(value, int | float):
        yield path, value
