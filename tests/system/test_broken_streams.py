"""Standard streams that are closed, full or go away: the measurement goes on and is kept.

Commands are started with a fresh interpreter, because streams that are closed before it starts are part of the matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.analysis.run import runfile
from loadgen.errors import (
    EXIT_CLIENT_LIMITED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REQUESTS_FAILED,
    EXIT_USAGE,
)
from loadgen.servers.simulated.config import SimulatedConfig, parse_rule
from loadgen.servers.simulated.process import spawn
from tests.support.command import FAST, ROOT, events_sent, in_process

N = 5
FINE = (EXIT_OK, EXIT_CLIENT_LIMITED)
"""Exit codes of a complete run; 5 if this machine was too busy."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A simulated vLLM for the whole module."""
    with spawn(SimulatedConfig(server="vllm", **FAST)) as address:
        yield address


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}


def command(url: str, *more: str) -> str:
    words = ["-m", "loadgen", "burst", "--server", "vllm", "--url", url, "--n", str(N), "--input-tokens", "8"]
    return " ".join([sys.executable, *words, "--output-tokens", "4", "--out", "run", *more])


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash to its end. A traceback, or a complaint of the interpreter as it ends, is never right."""
    line = f"set -o pipefail; {line}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return done


def kept(folder: Path, n: int = N) -> bool:
    """Whether the run, its summary and its page are there, and whole."""
    run = runfile.read(folder / "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return (
        sorted(record.id for record in run.records) == list(range(n))
        and run.footer is not None
        and sum(summary["requests"][state] for state in ("complete", "truncated", "failed")) == n
        and (folder / "run" / "report.html").read_text().rstrip().endswith("</html>")
    )


BROKEN = {
    "a pipe that nobody reads": "{} | true",
    "a pipe whose reader ends": "{} | head -1",
    "both streams in a pipe whose reader ends": "{} 2>&1 | head -1",
    "both streams in a pipe that nobody reads": "{} 2>&1 | true",
    "a closed standard output": "{} >&-",
    "a closed standard error": "{} 2>&-",
    "a closed standard input": "{} <&-",
    "all streams closed": "{} <&- >&- 2>&-",
    "a full standard error": "{} 2>/dev/full",
    "a full standard output": "{} >/dev/full",
    "both streams full": "{} >/dev/full 2>&1",
    "an encoding without our characters": "PYTHONIOENCODING=ascii {}",
    "a locale without our characters": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {}",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_run_outlives_its_streams(line: str, url: str, tmp_path: Path) -> None:
    """Every request is sent, the run and its results are written, and the exit code is that of the run."""
    done = shell(tmp_path, line.format(command(url)))
    assert done.returncode in FINE, (done.returncode, done.stderr)
    assert kept(tmp_path)


@pytest.mark.parametrize("setting", ["PYTHONIOENCODING=ascii", "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"])
def test_results_are_printed_in_ascii(setting: str, url: str, tmp_path: Path) -> None:
    """A terminal that has only ASCII shows the whole report, with question marks in place of other characters."""
    done = shell(tmp_path, f"{setting} {command(url)}")
    assert done.returncode in FINE
    assert "TTFT" in done.stdout
    assert "report.html" in done.stdout.splitlines()[-1] or "summary.json" in done.stdout.splitlines()[-1]
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"runs-\xc3\xbc", "the locale of this terminal is not UTF-8"),
        (b"runs-\xff", "is not UTF-8"),
    ],
)
def test_a_name_that_the_locale_cannot_decode(name: bytes, words: str, tmp_path: Path) -> None:
    """Valid UTF-8 is not called invalid in the locale C: the message says which setting helps."""
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "loadgen", "burst", "--server", "vllm", "--out", name]
    done = subprocess.run(program, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, words in done.stderr) == (EXIT_USAGE, True), done.stderr
    assert ("LC_ALL=C.UTF-8" in done.stderr) == (words != "is not UTF-8")


@pytest.mark.parametrize("line", ["{} >&- 2>&-", "{} 2>&1 | true", "{} --quiet 2>/dev/full"])
def test_the_exit_code_still_tells_of_failures(line: str, tmp_path: Path) -> None:
    """A request fails, and nobody can be told but by the exit code."""
    with spawn(SimulatedConfig(server="vllm", faults=(parse_rule("500:2"),), **FAST)) as failing:
        done = shell(tmp_path, line.format(command(failing)))
    assert (done.returncode, kept(tmp_path)) == (EXIT_REQUESTS_FAILED, True), done.stderr


def test_a_full_output_of_json_is_an_error_after_the_run(url: str, tmp_path: Path) -> None:
    """Whoever asked for JSON must not take an empty file for a result. The run is kept, and the message says so."""
    done = shell(tmp_path, f"{command(url, '--json')} >/dev/full")
    assert done.returncode in {EXIT_USAGE, EXIT_CLIENT_LIMITED}, done.stderr  # a busy machine's own code comes first
    assert kept(tmp_path)
    assert "cannot write standard output: No space left on device" in done.stderr
    assert "run" in done.stderr.splitlines()[-1]


def test_a_json_reader_that_goes_away_is_no_error(url: str, tmp_path: Path) -> None:
    """`| true` has what it wanted."""
    done = shell(tmp_path, f"{command(url, '--json')} | true")
    assert done.returncode in FINE
    assert kept(tmp_path)


def test_a_pipe_that_breaks_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """Whoever reads both streams goes away while requests are in flight."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.2)) as slow:
        reading, writing = os.pipe()
        process = subprocess.Popen(
            command(slow, "--output-tokens", "16").split(),
            cwd=tmp_path,
            env=environment(),
            stdout=writing,
            stderr=writing,
        )
        os.close(writing)
        while events_sent(slow) < N and process.poll() is None:
            time.sleep(0.02)
        os.close(reading)
        assert process.wait(60) in FINE
    assert kept(tmp_path)


def test_tables_and_journals_outlive_their_streams(tmp_path: Path) -> None:
    """A sweep goes on to its end too."""
    words = "sweep --server vllm --virtual H100 --model llama-2-7b --concurrency 1,2 --n 4 --output-tokens 4 --out x"
    done = shell(tmp_path, f"{sys.executable} -m loadgen {words} 2>&1 | true")
    assert done.returncode == EXIT_OK
    assert (tmp_path / "x" / "frontier.html").read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize(
    "words",
    [
        "report run",
        "report run --json",
        "compare run other --anyway",
        "limits --gpu H100",
        "plan-capacity --rate 5 --objective 'ttft.p99 < 1s' --gpu H100 --tp 1",
        "export run --csv -",
    ],
)
def test_commands_that_only_print_say_that_they_could_not(words: str, url: str, tmp_path: Path) -> None:
    """What they print is all that they are for: a full disk is exit code 2 and a sentence. A reader that goes away is
    no error."""
    for name in ("run", "other"):
        code, _, said = in_process(tmp_path, "simulate", "--server", "vllm", "--n", "3", "--out", name, "--quiet")
        assert code == EXIT_OK, said
    line = f"{sys.executable} -m loadgen {words}"
    full = shell(tmp_path, f"{line} >/dev/full")
    assert (full.returncode, "cannot write standard output: No space left" in full.stderr) == (EXIT_USAGE, True)
    assert shell(tmp_path, f"{line} | true").returncode == EXIT_OK
    assert shell(tmp_path, f"{line} >&-").returncode == EXIT_OK


@pytest.mark.parametrize("line", ["{} 2>&-", "{} >&- 2>&-", "{} >/dev/full 2>&1", "{} 2>&1 | true"])
def test_a_mistake_has_its_exit_code_without_a_stream(line: str, tmp_path: Path) -> None:
    """The message cannot be shown."""
    words = f"{sys.executable} -m loadgen compare none neither"
    assert shell(tmp_path, line.format(words)).returncode == EXIT_USAGE


def in_terminal(folder: Path, line: str, *, hangup_ignored: bool) -> tuple[int, int]:
    """Start a command in a terminal of its own; its process id and our end of the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup_ignored else signal.SIG_DFL)
            os.execvpe(sys.executable, line.split(), environment())
        os._exit(99)
    return pid, terminal


@pytest.mark.parametrize("hangup_ignored", [False, True], ids=["hung up", "nohup"])
def test_a_terminal_that_goes_away(hangup_ignored: bool, tmp_path: Path) -> None:
    """The hangup interrupts the run, which is kept with its results; a shell's second hangup changes nothing. Under
    nohup the run goes on to its end, although nothing can be printed any more."""
    with spawn(SimulatedConfig(server="vllm", ttft_s=0.05, itl_s=0.2)) as slow:
        line = command(slow, "--output-tokens", "12")
        pid, terminal = in_terminal(tmp_path, line, hangup_ignored=hangup_ignored)
        while events_sent(slow) < N:
            time.sleep(0.02)
        os.close(terminal)
        for _ in range(3):
            time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (FINE if hangup_ignored else (EXIT_INTERRUPTED,))
    assert kept(tmp_path)
    kinds = {record.error_kind for record in runfile.read(tmp_path / "run").records}
    assert kinds == ({""} if hangup_ignored else {"cancelled"})


def test_results_that_cannot_be_written_are_printed_all_the_same(url: str, tmp_path: Path) -> None:
    """The disk is full when the page is written: the figures are on the screen, exit code 2, and the run is safe."""
    (tmp_path / "page").symlink_to("/dev/full")
    done = shell(tmp_path, command(url, "--junit page --assert 'complete >= 50%'"))
    assert done.returncode == EXIT_USAGE
    assert "TTFT" in done.stdout
    assert "cannot write page: No space left on device" in done.stderr
    assert kept(tmp_path)
