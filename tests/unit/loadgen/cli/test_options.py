"""What people type who come from other tools: their options, -h, completion, times without a unit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from loadgen.cli import COMMAND_GROUPS, COMMANDS, app
from loadgen.cli.command_help import HEADINGS
from loadgen.cli.examples import EXAMPLES
from tests.support.command import in_process


def test_a_word_that_is_no_option_of_anybody_is_left_to_the_parser(tmp_path: Path) -> None:
    """As are theirs in a command that runs no plan, and as the values of ours."""
    assert "No such option: --colour" in in_process(tmp_path, "run", "--colour", "red")[2]
    assert "No such option: --rate" in in_process(tmp_path, "report", "--rate", "5")[2]


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("plan-capacity", "--assert", "--objective"),
        ("sweep", "--assert", "--objective"),
        ("run", "--objective", "--assert"),
    ],
)
def test_the_name_of_an_option_in_other_commands_is_a_hint(
    tmp_path: Path, command: str, typed: str, meant: str
) -> None:
    """Runs check objectives with --assert, and searches have --objective."""
    message = " ".join(in_process(tmp_path, command, typed, "x")[2].split())
    assert message.endswith(f"No such option: {typed} (Possible options: {meant})")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("servers", "up")])
def test_the_short_option_for_help_is_understood_everywhere(command: tuple[str, ...], tmp_path: Path) -> None:
    """-h is --help."""
    code, shown, _ = in_process(tmp_path, *command, "-h")
    assert (code, shown) == (0, in_process(tmp_path, *command, "--help")[1])
    assert " ".join(("Usage: loadgen", *command)) in shown


@pytest.mark.parametrize("words", [*((name,) for name in COMMANDS), ("sweep", "--help-all")])
def test_no_sentence_of_the_help_is_cut_off_at_80_columns(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that ends with an ellipsis hides a part of the sentence. A list such as `1, 2, ...` may end so."""
    monkeypatch.setenv("COLUMNS", "80")
    _, shown, _ = in_process(tmp_path, *words, "--help")
    lines = [line.strip() for line in shown.splitlines() if not line.startswith("Usage:")]
    assert not [
        line for line in lines if line.endswith(("...", "[...]")) and not line.endswith(", ...") and line != "..."
    ]


@pytest.mark.parametrize("command", ["burst", "run", "ui"])
def test_help_fits_a_screen(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short help has 80 columns and at most 36 lines: one line for each common option, and advanced options by
    name. --help-all explains every option and the exit codes."""
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = in_process(tmp_path, command, "--help")
    lines = shown.splitlines()
    assert code == 0
    assert len(lines) <= 36
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r"[A-Z]\w+ +-", line)] == [*HEADINGS, "Advanced"]
    assert "--join-timeout" not in shown, "it only completes --distributed"
    code, whole, _ = in_process(tmp_path, command, "--help-all")
    assert code == 0
    assert "Exit codes:" in " ".join(whole.split())
    explained = set(re.findall("--[a-z][a-z-]+|--n", whole))
    assert set(re.findall("(?:^|[A-Za-z]| ) +(--[a-z-]+)", shown, re.M)) <= explained
    assert len(explained) > 35


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("loadgen bu", "burst"),
        ("loadgen mo", "mock-server"),
        ("loadgen run --arr", "--arrivals"),
        ("loadgen servers st", "status"),
        ("loadgen run --server v", "vllm"),
        ("loadgen burst --server vllm --endpoint ch", "chat"),
        ("loadgen run --arrivals po", "poisson:"),
        ("loadgen run --workload alp", "alpaca:"),
        ("loadgen run --stamps r", "ring"),
        ("loadgen run --lengths ap", "approximate"),
        ("loadgen run --client-priority n", "normal"),
        ("loadgen run --catalog paper-", "paper-burst"),
        ("loadgen simulate --server li", "lightllm"),
        ("loadgen mock-server --server tg", "tgi"),
        ("loadgen mock-server --server tgi --clock b", "batching"),
        ("loadgen servers up --server l", "lightllm"),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `loadgen --install-completion` has it ask."""
    monkeypatch.setenv("_LOADGEN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    code, said, _ = in_process(tmp_path)
    assert (code, said.split()) == (0, [expected])


def test_the_list_of_commands_has_groups_and_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command has one complete line, under the heading of what it is for; the old name of a command is hidden."""
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = in_process(tmp_path, "--help")
    lines = shown.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines[1:] if line.endswith(("...", "[...]"))]
    for heading, names in COMMAND_GROUPS.items():
        begin = lines.index(f"{heading}:") + 1
        assert [line.split()[0] for line in lines[begin : begin + len(names)]] == [*names]
    assert sum(line.startswith("  loadgen ") for line in lines) == 3
    assert "docs/index.md" in shown
    assert not re.search(r"^  sim ", shown, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_can_be_parsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands at the end of the help, fits 80 columns, and its options exist."""
    monkeypatch.setenv("COLUMNS", "80")
    _, shown, _ = in_process(tmp_path, name, "--help")
    assert f"Example: {EXAMPLES[name]}" in shown
    assert len(f"Example: {EXAMPLES[name]}") <= 80
    words = shlex.split(EXAMPLES[name])[1:]
    assert words[0] == name
    group: Any = get_command(app)
    command = group.get_command(None, name)
    context = command.make_context(name, words[1:])
    if hasattr(command, "get_command"):
        subcommand = command.get_command(context, words[1])
        subcommand.make_context(words[1], words[2:], parent=context)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if " " in name])
def test_a_subcommand_has_an_example_of_its_own(name: str, tmp_path: Path) -> None:
    """`hardware compare --help` does not end with the example of `compare`."""
    _, shown, _ = in_process(tmp_path, *name.split(), "--help")
    assert shown.rstrip().endswith(f"Example: {EXAMPLES[name]}")
    assert EXAMPLES[name].startswith(f"loadgen {name} ")


def test_the_old_name_of_a_command_still_works(tmp_path: Path) -> None:
    """`sim` is `mock-server`."""
    code, shown, _ = in_process(tmp_path, "sim", "--help")
    assert (code, shown) == (
        0,
        in_process(tmp_path, "mock-server", "--help")[1].replace("loadgen mock-server [", "loadgen sim ["),
    )


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("compare", "[default: 5%]"),
        ("compare", "[default: 10%]"),
        ("calibrate", "[default: 20ms]"),
        ("run", "[default: 10m]"),
        ("sweep", "[default: 95%]"),
    ],
)
def test_defaults_are_shown_as_users_write_them(command: str, default: str, tmp_path: Path) -> None:
    """`10m` instead of 600.0, and `5%` instead of 0.05."""
    option = "--help-all" if command in ("run", "sweep") else "--help"
    assert default in " ".join(in_process(tmp_path, command, option)[1].split())


def test_help_shows_placeholders_instead_of_types(tmp_path: Path) -> None:
    """`--n N`, not `--n INTEGER`."""
    commands = [(name,) for name in COMMANDS]
    for words in (*commands, ("servers", "up"), ("twin", "fit"), ("dissect", "inference")):
        _, shown, _ = in_process(tmp_path, *words, "--help")
        assert not re.search("<(str|int|float|path)( range)?>|INTEGER", shown)


def test_a_simulated_time_needs_a_unit(tmp_path: Path) -> None:
    """200 would be 200 s; the message has both to copy."""
    for option in ("--ttft", "--itl", "--jitter"):
        code, _, err = in_process(tmp_path, "mock-server", "--server", "tgi", option, "200")
        assert (code, "200 has no unit: write 200ms or 200s" in err) == (2, True), err


def test_neither_a_server_nor_a_url(tmp_path: Path) -> None:
    """The message names the choices."""
    for command in ("burst", "ui"):
        code, _, err = in_process(tmp_path, command)
        assert (code, "--server is missing: name vllm, tgi, lightllm, sglang, tei or openai, or give --url" in err) == (
            2,
            True,
        ), err
