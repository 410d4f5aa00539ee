"""What people type who come from other tools: their options, -h, completion, times without a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadgen.cli import COMMANDS
from loadgen.cli.command_help import HEADINGS
from tests.support.command import in_process


def test_a_word_that_is_no_option_of_anybody_is_left_to_the_parser(tmp_path: Path) -> None:
    """As are theirs in a command that runs no plan, and as the values of ours."""
    assert "No such option: --colour" in in_process(tmp_path, "run", "--colour", "red")[2]
    assert "No such option: --rate" in in_process(tmp_path, "report", "--rate", "5")[2]


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("servers", "up")])
def test_the_short_option_for_help_is_understood_everywhere(command: tuple[str, ...], tmp_path: Path) -> None:
    """-h is --help."""
    code, shown, _ = in_process(tmp_path, *command, "-h")
    assert (code, shown) == (0, in_process(tmp_path, *command, "--help")[1])
    assert " ".join(("Usage: loadgen", *command)) in shown


@pytest.mark.parametrize("command", ["burst", "run", "ui"])
def test_help_fits_a_screen(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short help has 80 columns and at most 34 lines: one line for each common option, and advanced options by
    name. --help-all explains every option and the exit codes."""
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = in_process(tmp_path, command, "--help")
    lines = shown.splitlines()
    assert code == 0
    assert len(lines) <= 34
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r"[A-Z]\w+ +-", line)] == [*HEADINGS, "Advanced"]
    code, whole, _ = in_process(tmp_path, command, "--help-all")
    assert code == 0
    assert "Exit codes:" in " ".join(whole.split())
    explained = set(re.findall("--[a-z][a-z-]+|--n", whole))
    assert set(re.findall("(?:^|[A-Za-z]| ) +(--[a-z-]+)", shown, re.M)) <= explained
    assert len(explained) > 35


@pytest.mark.parametrize(
    ("words", "expected"),
    [("loadgen bu", "burst"), ("loadgen run --arr", "--arrivals"), ("loadgen servers st", "status")],
)
def test_a_shell_completes_commands_and_options(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `loadgen --install-completion` has it ask."""
    monkeypatch.setenv("_LOADGEN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    code, said, _ = in_process(tmp_path)
    assert (code, said.split()) == (0, [expected])


def test_a_simulated_time_needs_a_unit(tmp_path: Path) -> None:
    """200 would be 200 s; the message has both to copy."""
    for option in ("--ttft", "--itl", "--jitter"):
        code, _, err = in_process(tmp_path, "mock-server", "--server", "tgi", option, "200")
        assert (code, "200 has no unit: write 200ms or 200s" in err) == (2, True), err


def test_neither_a_server_nor_a_url(tmp_path: Path) -> None:
    """The message names the choices."""
    for command in ("burst", "ui"):
        code, _, err = in_process(tmp_path, command)
        assert (code, "--server is missing: name vllm, tgi, lightllm or openai, or give --url" in err) == (2, True), err
