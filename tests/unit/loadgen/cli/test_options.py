"""What people type who come from other tools: their options, -h, completion, times without a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadgen.cli import COMMANDS, HEADINGS
from tests.support.command import in_process


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        (("run", "--concurrency", "8"), "Write: --arrivals closed:8"),
        (("run", "--max-concurrency=8"), "Write: --arrivals closed:8"),
        (("run", "--rate", "2.5"), "Write: --arrivals poisson:2.5"),
        (("run", "--request-rate", "4"), "Write: --arrivals poisson:4"),
        (("run", "--num-prompts", "100"), "Write: --n 100"),
        (("run", "--dataset", "f.jsonl"), "Write: --workload jsonl:f.jsonl (or sharegpt:f.jsonl)"),
        (("burst", "--num-prompts", "100"), "Write: --n 100"),
        (("burst", "--concurrency", "8"), "Write: loadgen run ... --arrivals closed:8"),
        (("burst", "--concurrency"), "closed:N"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(typed: tuple[str, ...], write: str, tmp_path: Path) -> None:
    """The message is to be copied, with the value that was given."""
    code, _, err = in_process(tmp_path, *typed)
    assert (code, f"there is no {typed[1].partition('=')[0]}" in err, write in err) == (2, True, True), err


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
    """Of 80 columns and 24 lines: what most runs need, a line each under load, server, prompts and output; the advanced
    options by name. --help-all explains every one of them, and the exit codes."""
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = in_process(tmp_path, command, "--help")
    lines = shown.splitlines()
    assert code == 0
    assert len(lines) <= 24
    assert max(map(len, lines)) < 80
    assert [line.split()[0] for line in lines if re.match(r"[A-Z]\w+ +--", line)] == [*HEADINGS, "Advanced"]
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
        code, _, err = in_process(tmp_path, "sim", "--server", "tgi", option, "200")
        assert (code, "200 has no unit: write 200ms or 200s" in err) == (2, True), err


def test_neither_a_server_nor_a_url(tmp_path: Path) -> None:
    """The message names the choices."""
    for command in ("burst", "ui"):
        code, _, err = in_process(tmp_path, command)
        assert (code, "--server is missing: name vllm, tgi, lightllm or openai, or give --url" in err) == (2, True), err
