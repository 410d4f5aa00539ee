"""To add an option of a run is to add a field to the Plan: a made-up one is seen everywhere that options are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from loadgen import plan as plans
from loadgen import runfile
from loadgen.plan import Plan, RunOption, command_of
from tests.command import ROOT, called

HELP = "Which colour the prompts have."


class Colourful(Plan):
    """A Plan with a made-up option."""

    colour: Annotated[Literal["red", "blue"], RunOption(HELP, "Prompts", "form")] = "red"


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Plan has one option more."""
    monkeypatch.setattr(plans, "Plan", Colourful)


@pytest.mark.usefixtures("colourful")
def test_help_lists_it_under_its_heading() -> None:
    """`--help` of each command that runs a plan has it, with its help; another command has not."""
    for command in ("burst", "run", "ui"):
        code, shown, _ = called(command, "--help")
        prompts = shown.partition("Prompts:")[2].partition("Measurement:")[0]
        assert code == 0
        assert "--colour" in prompts
        assert HELP in " ".join(prompts.split())
    assert "--colour" not in called("report", "--help")[1]


@pytest.mark.usefixtures("colourful")
def test_the_command_line_and_the_plan_file_set_it(tmp_path: Path) -> None:
    """A plan file sets it, the command line wins over the file, and the run's header says what held; a value that it
    does not take is refused in its name."""
    file = tmp_path / "plan.toml"
    file.write_text('server = "tgi"\nn = 2\ninput_tokens = 8\noutput_tokens = 2\nspeed = 1000\ncolour = "blue"\n')
    run = ["run", str(file), "--no-report", "--quiet"]
    for more, expected in (([], "blue"), (["--colour", "red"], "red")):
        folder = tmp_path / expected
        called(*run, *more, "--out", str(folder))
        assert runfile.read(folder).header.plan["colour"] == expected
    code, _, said = called(*run, "--colour", "green")
    assert (code, "--colour green: unknown; choose 'red' or 'blue'" in said) == (2, True)


def test_the_command_that_repeats_a_run_names_it() -> None:
    """As words of a command line, where it is not at its default."""
    assert command_of(Colourful(server="tgi", n=2, colour="blue"))[-2:] == ["--colour", "blue"]
    assert "--colour" not in command_of(Colourful(server="tgi", n=2))


@pytest.mark.usefixtures("colourful")
def test_the_generated_page_documents_it() -> None:
    """A row for each command that has it."""
    assert _generate().command_line().count(f"| `--colour` | {HELP}") == 3


def _generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
