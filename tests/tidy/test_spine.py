"""The spine, the files that one prompt passes from the Plan to the printed summary, stays short and connected."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FILES_MOST = 35
ENDS = {"loadgen/cli/run.py", "loadgen/cli/output.py"}
"""What joins the spine at its two ends: the command that makes a Plan, and what a command prints."""
BY_NAME = {
    "loadgen/cli/__init__.py",
    "servers/own_process.py",
    "servers/simulated/server.py",
    "servers/telemetry.py",
}
"""Files that import modules by name: commands, the main modules of processes, simulated servers, optional libraries."""


@pytest.fixture
def spine(root: Path) -> list[str]:
    """The list of CONTRIBUTING.md."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`: ", (root / "CONTRIBUTING.md").read_text("utf-8"), re.M)


def test_the_spine_is_short(root: Path, spine: list[str]) -> None:
    """The list has at most 35 files, and names each file once."""
    assert len(set(spine)) == len(spine) <= FILES_MOST


def test_each_file_of_the_spine_is_reached_from_its_ends(root: Path, spine: list[str]) -> None:
    """By imports within the list: nothing is listed that is not on the way."""
    reached, new = set[str](), ENDS
    while new:
        reached |= new
        new = {name for file in new for name in _imports(root / file) if name in spine} - reached
    assert not set(spine) - reached


def test_imports_can_be_followed(root: Path, package_files: list[Path]) -> None:
    """No module is opened by a text but where a table names them: else nobody sees it on the way, nor a circle."""
    calls = re.compile(r"\b(import_module|__import__|spec_from_file_location|run_module|run_path)\(")
    found = {str(file.relative_to(root)) for file in package_files if calls.search(file.read_text("utf-8"))}
    assert found == BY_NAME


def test_the_answers_name_what_is_there(root: Path, spine: list[str]) -> None:
    """Every function that answers a reader's question is in the file that is named with it, two imports from the spine
    at most."""
    near = set(spine)
    for _ in range(2):
        near |= {name for file in near if (root / file).exists() for name in _imports(root / file)}
    rows = [line for line in (root / "CONTRIBUTING.md").read_text("utf-8").splitlines() if line.count("`") > 3]
    answers = [row.split(" | ")[1] for row in rows if row.startswith("| ") and "? | " in row]
    assert len(answers) == 5
    for answer in answers:
        for part in answer.split("; "):
            names = re.findall(r"`([^`]+)`", part)
            assert {name for name in names if name.endswith(".py")} <= near
            text = "".join((root / name).read_text("utf-8") for name in names if name.endswith(".py"))
            assert all(name.split(".")[-1].strip() in text for name in names if text and not name.endswith(".py")), part


@cache
def _imports(file: Path) -> set[str]:
    """The files that a file imports, anywhere in it."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            path = re.sub(
                r"^loadgen/(?=(servers|workloads|analysis)\b)", "", module.replace(".", "/")
            )  # through the links
            found |= {f"{path}.py", f"{path}/__init__.py"}
    # Packages pass on what they import: loadgen.servers.backends names its kinds.
    more = {name for name in found if name.endswith("/__init__.py") and (_root(file) / name).exists()}
    return found | {each for name in more if _root(file) / name != file for each in _imports(_root(file) / name)}


def _root(file: Path) -> Path:
    return next(parent for parent in file.parents if (parent / "pyproject.toml").exists())
