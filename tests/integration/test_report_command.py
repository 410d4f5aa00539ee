"""`loadgen report` on run folders as they are found: whole, killed, damaged, or not runs at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.analysis.run.errors import RunFileError
from loadgen.analysis.run.runfile import RunWriter
from loadgen.cli.report import report
from loadgen.errors import OutputError
from tests.support.runs import burst, footer, header, healthy, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that ended well."""
    records = burst(30, 4)
    return write(tmp_path / "run", [header(30), *records, *healthy(), footer(records)])


def test_both_files_are_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """summary.json and report.html appear beside the run, and the terminal shows the summary and the page's path."""
    report([folder], None, as_json=False, quiet=False)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["requests"]["complete"] == 30
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")
    output = capsys.readouterr().out
    assert "All 30 requests complete." in output
    assert output.endswith(f"{folder / 'report.html'}\n")


def test_making_them_again_changes_nothing(folder: Path) -> None:
    """Both files depend on the run file alone: the second time they are the same, byte for byte."""
    report([folder], None, as_json=False, quiet=True)
    first = [(folder / name).read_bytes() for name in ("summary.json", "report.html")]
    report([folder / "run.jsonl"], None, as_json=False, quiet=True)
    assert [(folder / name).read_bytes() for name in ("summary.json", "report.html")] == first


def test_a_killed_run_is_reported_from_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No footer, the records still in a part file, its last line cut: everything readable counts, the rest is said."""
    folder = write(tmp_path / "run", [header(100)])
    part = write(tmp_path / "part", [*burst(20, 4), b'{"type":"request","id":99,"sta']) / "run.jsonl"
    part.rename(folder / "part-0.jsonl")
    report([folder], None, as_json=False, quiet=False)
    output = " ".join(capsys.readouterr().out.split())
    assert "80 of 100 requests not complete (80%): 80 without a record." in output
    assert "Interrupted: figures cover the part" in output
    assert "1 damaged line of the run file left out." in output
    assert "Interrupted: figures cover the part" in (folder / "report.html").read_text("utf-8")


def test_a_run_that_goes_on_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a worker has its part open; no sooner is it closed than the run is one that was interrupted."""
    folder = write(tmp_path / "run", [header(100)])
    part = RunWriter(folder / "part-0.jsonl")
    for record in burst(20, 4):
        part.add(record)
    part.flush()
    report([folder], None, as_json=False, quiet=False)
    output = " ".join(capsys.readouterr().out.split())
    assert "80 of 100 requests not complete" in output
    assert "still going on: figures cover what is recorded so far" in output
    assert "Interrupted" not in output
    part.close()
    report([folder], None, as_json=False, quiet=True)
    assert "Interrupted: figures cover the part" in capsys.readouterr().err


def test_several_runs_share_a_page(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run gets its own summary.json, and one page holds them all; --json prints a list."""
    other = write(tmp_path / "other", [header(10, server="vllm"), *burst(10, 4)])
    report([folder, other], tmp_path / "both.html", as_json=True, quiet=False)
    assert [each["requests"]["complete"] for each in json.loads(capsys.readouterr().out)] == [30, 10]
    assert (other / "summary.json").exists()
    assert not (folder / "report.html").exists()
    page = (tmp_path / "both.html").read_text("utf-8")
    assert 'class="run run-1"' in page
    assert 'class="run run-2"' in page


def test_json_and_quiet_print_what_they_promise(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the summary and nothing else; --quiet prints nothing."""
    report([folder], None, as_json=True, quiet=False)
    assert json.loads(capsys.readouterr().out) == json.loads((folder / "summary.json").read_text("utf-8"))
    report([folder], None, as_json=False, quiet=True)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, b"", b"hello\n", b'{"type":"header","format":99}\n'])
def test_what_is_not_a_run_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """No file, an empty one, one that is something else, one of a newer version: a message, and nothing is written."""
    if content is not None:
        (tmp_path / "run.jsonl").write_bytes(content)
    with pytest.raises(RunFileError):
        report([tmp_path], None, as_json=False, quiet=False)
    assert not (tmp_path / "summary.json").exists()


def test_a_place_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    """Where the page cannot go the error names the file and says what to do."""
    with pytest.raises(OutputError, match="no-such-folder") as error:
        report([folder], tmp_path / "no-such-folder" / "report.html", as_json=False, quiet=True)
    assert "--out" in error.value.hint


@pytest.mark.parametrize("linked", [True, False], ids=["to a file", "to nothing"])
def test_links_in_a_run_folder_are_replaced(folder: Path, linked: bool) -> None:
    """A folder from another person cannot make loadgen write to a file outside, or create one there."""
    outside = folder.parent / "outside"
    outside.mkdir()
    names = ("summary.json", "report.html")
    for name in names:
        if linked:
            (outside / name).write_text("precious")
        (folder / name).symlink_to(outside / name)
    report([folder], None, as_json=False, quiet=True)
    for name in names:
        assert not (folder / name).is_symlink()
        assert (outside / name).exists() == linked
        assert not linked or (outside / name).read_text() == "precious"
    assert json.loads((folder / "summary.json").read_text("utf-8"))["requests"]["complete"] == 30
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_link_that_the_user_names_is_followed(folder: Path) -> None:
    """`--out latest.html` may be a link to another place, which gets the page."""
    page = folder.parent / "pages" / "today.html"
    page.parent.mkdir()
    link = folder.parent / "latest.html"
    link.symlink_to(page)
    report([folder], link, as_json=False, quiet=True)
    assert link.is_symlink()
    assert page.read_text("utf-8").startswith("<!doctype html>")
