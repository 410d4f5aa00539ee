"""The tables of docs/guides/coming-from.md, each row of which is typed."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.command import in_process

PAGE = Path(__file__).parents[4] / "docs/guides/coming-from.md"
TOOLS = PAGE.read_text("utf-8").partition("Each row below is checked")[2]
ROWS: list[tuple[str, str]] = re.findall(r"^\| (`.*`) \| (.*) \|$", TOOLS, re.M)
EXAMPLE = re.search(r"```\n\$ (.*)\n((?:.*\n)*?)```", PAGE.read_text("utf-8"))


def contains(words: list[str], part: list[str]) -> bool:
    """Return True if each option of `part` has the same value in `words`."""
    pairs = {*pairwise(words)}
    single = {*words}
    return all((left, right) in pairs for left, right in pairwise(part) if left.startswith("-")) and {*part} <= single


def test_the_page_covers_the_tools() -> None:
    """Five tables, and the rows of each are found."""
    assert len(ROWS) > 80
    assert {"vllm bench serve", "GuideLLM", "AIPerf", "k6", "Locust"} <= {*re.findall("^## (.*)$", TOOLS, re.M)}


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_each_row_is_what_loadgen_answers(theirs: str, ours: str, tmp_path: Path) -> None:
    """The written command has the words on the right, or says why the option is left out."""
    typed = shlex.split(theirs.strip("`"))
    options = typed if "http" in theirs or "--host" in typed else ["--url", "http://h:1", *typed]
    if theirs == ours:
        assert in_process(tmp_path, "run", "--url", "http://127.0.0.1:9", *typed, "-n", "9")[0] == 3
        return
    code, _, err = in_process(tmp_path, "run", *options)
    assert code == 2, err
    lines = [line.strip() for line in err.splitlines()]
    if ours.startswith("left out: "):
        reason = ours.removeprefix("left out: ")
        assert any("left out" in line and reason in line for line in lines), err
        return
    written = shlex.split(lines[lines.index("Write:") + 1])
    assert contains(written, shlex.split(ours.strip("`").removeprefix("loadgen "))), err
    if ours.startswith("`loadgen "):
        assert written[1] == shlex.split(ours.strip("`"))[1]


def test_the_example_is_the_real_answer(tmp_path: Path) -> None:
    """The page shows what the command prints."""
    assert EXAMPLE is not None
    code, _, err = in_process(tmp_path, *shlex.split(EXAMPLE[1])[1:])
    assert (code, err) == (2, EXAMPLE[2])
