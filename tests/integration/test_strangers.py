"""What a server is told in confidence, and what strangers say: neither secrets nor control characters come out."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from tests.support.command import burst, in_process
from tests.support.echo import ANSWERS, ESCAPE, SECRET, echoing, leaks

SMALL = ("--output-tokens", "1", "--n", str(len(ANSWERS) + 2), "--metrics-every", "1s")
MOVES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What moves a terminal's cursor, or turns its lines about."""


@pytest.mark.parametrize("way", ["key", "header", "basic"])
def test_a_server_that_echoes_everything_gives_no_secret_away(tmp_path: Path, way: str) -> None:
    """Its key comes back in errors, events, comments, reasons, headers, names, metrics, cut and spelled otherwise.
    No file of the run has it, not the screen, nor what is made of the run later."""
    given = {
        "key": ((), {"LOADGEN_API_KEY": f"{SECRET}\n"}),
        "header": (("--header", f"Authorization: Bearer {SECRET}"), {}),
        "basic": (("--header", "Authorization: $GATE"), {"GATE": f"Bearer {SECRET}"}),
    }
    options, environment = given[way]
    with echoing() as echo:
        common = ("--server", "vllm", "--url", echo.url, *SMALL, *options)
        junit = ("--assert", "failed <= 3", "--junit", str(tmp_path / "junit.xml"))
        code, out, err = burst(tmp_path, *common, *junit, report=True, **environment)
    assert (code, set(echo.generated)) == (4, set(ANSWERS)), err
    kinds = Counter(record.error_kind for record in runfile.read(tmp_path / "run").records)
    assert {*kinds} >= {"", "http_status", "in_band_error", "protocol"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.jsonl", "summary.json", "report.html"}
    assert not leaks(tmp_path, out, err)
    told = runfile.read(tmp_path / "run").records
    assert any("***" in record.error_detail for record in told)  # and not because nothing was said
    for words in (("report", "run", "--json"), ("export", "run", "--csv", "tables"), ("compare", "run", "run")):
        assert not leaks(tmp_path, *in_process(tmp_path, *words)[1:])


def test_words_of_a_server_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    """Escapes in its version, model, reasons and errors are blanks on the screen; the page has them as text."""
    with echoing(ESCAPE) as echo:
        common = ("--server", "vllm", "--url", echo.url, *SMALL)
        _, out, err = burst(tmp_path, *common, report=True, LOADGEN_API_KEY=SECRET)
        asked = ("--server", "vllm", "--url", echo.url, "--model", "another", "--n", "1")
        (tmp_path / "unlisted").mkdir()
        _, unlisted_out, unlisted_err = burst(tmp_path / "unlisted", *asked, LOADGEN_API_KEY=SECRET)
    assert not MOVES.search(out + err + unlisted_out + unlisted_err)
    assert "]0;owned" in out
    assert "]0;owned" in unlisted_out + unlisted_err


def hostile(folder: Path, name: str) -> Path:
    """A run whose every text is hostile, the recorded one otherwise."""
    lines = []
    for line in (Path(__file__).parents[1] / "golden/burst/run.jsonl").read_text("utf-8").splitlines():
        item = json.loads(line)
        if item["type"] == "header":
            item["plan"] |= {"label": f"l{ESCAPE}", "platform": ESCAPE, "workload": f"synthetic{ESCAPE}"}
            item["server"] |= {"version": ESCAPE, "model": f"m{ESCAPE}", "name": f"x{ESCAPE}", "title": ESCAPE}
            item["command"] = [*item["command"], ESCAPE]
            item["host"] |= {key: f"{value}{ESCAPE}" for key, value in item["host"].items() if isinstance(value, str)}
        elif item["type"] == "footer":
            item["notes"] = [f"note {ESCAPE}"]
        elif item["type"] == "request" and item["id"] % 3 == 0:
            item |= {"state": "failed", "error_kind": f"http_status{ESCAPE}", "error_detail": ESCAPE}
            item["finish_reason"] = ESCAPE
        lines.append(json.dumps(item))
    (folder / name).mkdir(parents=True)
    (folder / name / "run.jsonl").write_text("\n".join(lines) + "\n")
    return folder / name


def test_words_of_a_run_file_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    """Of its label, server, notes and errors, and of the names of folders, in every command that reads runs."""
    name = f"run{ESCAPE}".replace("/", "")
    run, other = str(hostile(tmp_path, name)), str(hostile(tmp_path, "other"))
    told = []
    for words in (
        ("report", run, "--assert", "ttft.p99 < 1us", "--junit", "junit.xml"),
        ("report", run, "--quiet"),
        ("report", run, other, "--out", "both.html"),
        ("compare", run, other),
        ("compare", run, other, "--markdown", "--anyway"),
        ("compare", run, str(tmp_path / f"none{ESCAPE}")),
        ("export", run, "--csv", f"tables{ESCAPE}"),
        ("report", str(tmp_path / f"none{ESCAPE}")),
        ("matrix", str(tmp_path / f"none{ESCAPE}.toml")),
        ("run", str(tmp_path / f"none{ESCAPE}.toml")),
    ):
        code, out, err = in_process(tmp_path, *words)
        assert (out + err, code in (0, 2, 4, 6)) != ("", True)
        told.append((words, out + err))
    shutil.rmtree(run)
    assert not [(words, found[0]) for words, said in told for found in [MOVES.search(said)] if found]
