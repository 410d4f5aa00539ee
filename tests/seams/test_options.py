"""To add an option of a run is to add a field to the Plan: a made-up one is seen everywhere that options are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from loadgen import plan as plans
from loadgen.analysis.run import runfile
from loadgen.plan import Plan
from loadgen.plan_fields import RunOption, command_line
from tests.support.command import ROOT, in_process

HELP = "Which colour the prompts have."


@dataclass(frozen=True, init=False)
class Colourful(Plan):
    """A Plan with a made-up option."""

    colour: Annotated[Literal["red", "blue"], RunOption("Prompts", "form")] = "red"
    """Which colour the prompts have."""


WEB_FORM = """
import loadgen.plan
from tests.seams.test_options import Colourful
loadgen.plan.Plan = Colourful
from loadgen.interactive import user
from locust.argument_parser import ui_extra_args_dict
field = ui_extra_args_dict([])["colour"]
print(field["help_text"], field["default_value"])
"""
"""In a process of its own, because Locust brings gevent."""


@pytest.fixture
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Plan has one option more."""
    monkeypatch.setattr(plans, "Plan", Colourful)


@pytest.mark.usefixtures("colourful")
def test_help_lists_it_under_its_heading() -> None:
    """`--help` of each command that runs a plan has it, with its help; another command has not."""
    for command in ("burst", "run", "ui"):
        assert "--colour" in in_process(ROOT, command, "--help")[1]
        code, shown, _ = in_process(ROOT, command, "--help-all")
        prompts = shown.partition("Prompts:")[2].partition("Advanced:")[0]
        assert code == 0
        assert "--colour" in prompts
        assert HELP in " ".join(prompts.split())
    assert "--colour" not in in_process(ROOT, "report", "--help")[1]


@pytest.mark.usefixtures("colourful")
def test_the_command_line_and_the_plan_file_set_it(tmp_path: Path) -> None:
    """A plan file sets it, the command line wins over the file, and the run's header says what held; a value that it
    does not take is refused in its name."""
    file = tmp_path / "plan.toml"
    file.write_text('server = "tgi"\nn = 2\ninput_tokens = 8\noutput_tokens = 2\nspeed = 1000\ncolour = "blue"\n')
    run = ["run", str(file), "--no-report", "--quiet"]
    for more, expected in (([], "blue"), (["--colour", "red"], "red")):
        folder = tmp_path / expected
        in_process(ROOT, *run, *more, "--out", str(folder))
        assert runfile.read(folder).header.plan["colour"] == expected
    code, _, said = in_process(ROOT, *run, "--colour", "green")
    assert (code, "--colour green: unknown; choose 'red' or 'blue'" in said) == (2, True)


def test_the_command_that_repeats_a_run_names_it() -> None:
    """As words of a command line, where it is not at its default."""
    assert command_line(Colourful(server="tgi", n=2, colour="blue"))[-2:] == ["--colour", "blue"]
    assert "--colour" not in command_line(Colourful(server="tgi", n=2))


@pytest.mark.usefixtures("colourful")
def test_the_generated_page_documents_it() -> None:
    """A row for each command that has it."""
    assert _generate().command_line().count(f"| `--colour` | {HELP}") == 6


def test_the_web_form_offers_it() -> None:
    """`loadgen ui` gives it to Locust as a field of the start form, with its help and its default."""
    done = subprocess.run(
        [sys.executable, "-c", WEB_FORM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == f"{HELP} red\n", done.stderr


def _generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
