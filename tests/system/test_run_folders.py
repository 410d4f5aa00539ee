"""Commands that start at the same instant in one directory: none of them loses anything."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from loadgen.analysis.run import runfile
from loadgen.errors import EXIT_OK, EXIT_USAGE
from loadgen.folders import FolderClaim
from loadgen.servers.simulated.config import SimulatedConfig
from tests.support.command import FAST, Forked, in_process
from tests.support.simulated import running

PAIRS = 6
LEAD_S = 0.4
"""Both processes have been forked by then and wait for the common instant."""
SMALL = ("--n", "5", "--input-tokens", "8", "--output-tokens", "4", "--no-report", "--quiet")


class Waiting(Forked):
    """A command that begins at a given instant, so that two of them begin together."""

    forks_here = True
    at_s = 0.0

    @classmethod
    def runs(cls, words: list[str]) -> None:
        """Wait, then run the command."""
        time.sleep(max(0.0, cls.at_s - time.monotonic()))
        super().runs(words)


def together(folder: Path, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Start commands at the same instant and wait for them; return their exit codes and what they said on stderr."""

    class Together(Waiting):
        at_s = time.monotonic() + LEAD_S

    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [Together(list(words), cwd=folder, **pipe) for words in commands]
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert "Traceback" not in "".join(said), said
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def whole(run: Path) -> bool:
    """Whether a folder holds one run with one header, a footer, and every request once."""
    lines = (run / "run.jsonl").read_text().splitlines()
    read = runfile.read(run)
    kinds = [line.partition('"type":"')[2].partition('"')[0] for line in lines]
    return (
        (kinds.count("header"), kinds.count("footer"), kinds.count("request")) == (1, 1, 5)
        and sorted(record.id for record in read.records) == [0, 1, 2, 3, 4]
        and read.footer is not None
        and read.footer.complete == 5
    )


def left(folder: Path) -> set[str]:
    """Everything below a folder but whole files of runs."""
    known = {"run.jsonl", "summary.json", "report.html"}
    return {path.name for path in folder.rglob("*") if path.is_file() and path.name not in known}


@pytest.mark.parametrize("command", ["simulate", "burst"])
def test_pairs_with_default_names_get_a_folder_each(command: str, tmp_path: Path) -> None:
    """Two commands of the same second, in the same directory: both runs are there, complete, in two folders."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        to = ("--url", server.url) if command == "burst" else ()
        words = (command, "--server", "vllm", *to, *SMALL)
        for number in range(PAIRS):
            folder = tmp_path / str(number)
            folder.mkdir()
            ended = together(folder, words, words)
            assert {code for code, _ in ended} <= {EXIT_OK, 5}, ended
            runs = [*(folder / "runs").iterdir()]
            assert len(runs) == 2
            assert all(map(whole, runs))
            assert left(folder) == set()


@pytest.mark.parametrize("command", ["simulate", "burst"])
def test_of_a_pair_in_one_folder_one_wins(command: str, tmp_path: Path) -> None:
    """With the same --out one command measures, and the other one exits with 2 and says why."""
    with running(SimulatedConfig(server="vllm", **FAST)) as server:
        to = ("--url", server.url) if command == "burst" else ()
        words = (command, "--server", "vllm", *to, *SMALL, "--out", "x")
        for number in range(PAIRS):
            folder = tmp_path / str(number)
            folder.mkdir()
            (won, _), (lost, said) = sorted(together(folder, words, words), key=lambda ended: ended[0] == EXIT_USAGE)
            assert won in {EXIT_OK, 5}
            assert lost == EXIT_USAGE
            assert "another loadgen is writing to x" in said or "x exists and is not empty" in said
            assert whole(folder / "x")
            assert left(folder) == set()


def test_repeats_claim_their_common_folder(tmp_path: Path) -> None:
    """A single run does not slip in between two repeats."""
    repeats = ("simulate", "--server", "vllm", *SMALL, "--repeats", "3", "--out", "x")
    once = ("simulate", "--server", "vllm", *SMALL, "--out", "x")
    ended = together(tmp_path, repeats, once)
    assert sorted(code for code, _ in ended) == [EXIT_OK, EXIT_USAGE]
    assert {path.name for path in (tmp_path / "x").iterdir()} in (
        {"repeat-1", "repeat-2", "repeat-3", "summary.json"},
        {"run.jsonl", "summary.json"},
    )


def test_of_two_sweeps_in_one_folder_one_wins(tmp_path: Path) -> None:
    """The other one neither mixes with it nor goes on with it unasked."""
    words = ("sweep", "--server", "vllm", "--virtual", "H100", "--model", "llama-2-7b", "--concurrency", "1,2", "--n")
    words += ("4", "--input-tokens", "8", "--output-tokens", "4", "--quiet", "--out", "x")
    ended = together(tmp_path, words, words)
    assert sorted(code for code, _ in ended) == [EXIT_OK, EXIT_USAGE], ended
    lines = (tmp_path / "x" / "sweep.jsonl").read_text()
    assert (lines.count('"type": "plan"'), lines.count('"type": "resumed"')) == (1, 0)


def test_a_folder_in_use_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    """Nothing listens at the URL, and the folder is what is complained of."""
    with FolderClaim(tmp_path / "x"):
        code, _, said = in_process(
            tmp_path, "burst", "--server", "vllm", "--url", "http://127.0.0.1:9", "--out", "x", "--n", "1"
        )
    assert (code, "another loadgen is writing to x" in said) == (EXIT_USAGE, True), said


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    """Neither of a default name nor of one that was given."""
    words = ("burst", "--server", "vllm", "--url", "http://127.0.0.1:9", "--n", "1")
    for out in ((), ("--out", "some/where")):
        code, _, _ = in_process(tmp_path, *words, *out)
        assert code == 3
        assert [*tmp_path.iterdir()] == []


def test_reports_of_one_run_at_once_do_not_mix(tmp_path: Path) -> None:
    """Each writes its files whole, under a name of its own, and the last one wins."""
    assert in_process(tmp_path, "simulate", "--server", "vllm", *SMALL, "--out", "x")[0] == EXIT_OK
    ended = together(tmp_path, *[("report", "x", "--quiet")] * 3)
    assert [code for code, _ in ended] == [EXIT_OK] * 3, ended
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"run.jsonl", "summary.json", "report.html"}
    assert json.loads((tmp_path / "x" / "summary.json").read_text())["requests"]["complete"] == 5


def test_exports_into_one_folder_at_once_do_not_mix(tmp_path: Path) -> None:
    """Either one waits for nobody and exits with 2, or both write the same tables, one after the other."""
    assert in_process(tmp_path, "simulate", "--server", "vllm", *SMALL, "--out", "x")[0] == EXIT_OK
    ended = together(tmp_path, *[("export", "x", "--csv", "t", "--quiet")] * 2)
    assert EXIT_OK in {code for code, _ in ended}
    assert all(code == EXIT_OK or (code == EXIT_USAGE and "another loadgen" in said) for code, said in ended), ended
    assert {path.name for path in (tmp_path / "t").iterdir()} == {
        "requests.csv",
        "chunks.csv",
        "telemetry.csv",
        "run.csv",
    }
