"""Small files, short functions, and tests that say what they check."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LINES_PER_FILE = 500
LINES_PER_FUNCTION = 60
PRODUCT_LINES, PRODUCT_FILES = 40_155, 197

LONGER_FILES: dict[str, int] = {}
"""A ratchet: path and present length of each file over the limit. Entries only shrink and go."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_files_stay_short(root: Path, all_files: list[Path]) -> None:
    """No Python file is longer than 500 lines, and one on the ratchet is exactly as long as it says."""
    lengths = {str(file.relative_to(root)): len(file.read_text("utf-8").splitlines()) for file in all_files}
    assert {name: length for name, length in lengths.items() if length > LINES_PER_FILE} == LONGER_FILES


def test_functions_stay_short(root: Path, package_files: list[Path]) -> None:
    """No function of the four packages is longer than 60 lines, its docstring not counted."""
    too_long = {
        f"{file.relative_to(root)}:{function.lineno} {function.name}": length
        for file in package_files
        for function in _functions(file)
        if (length := _length(function)) > LINES_PER_FUNCTION
    }
    assert not too_long


def test_the_house_stays_small(package_files: list[Path]) -> None:
    """The four packages together stay below a ratchet, which is raised only for what a user gets."""
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in package_files)
    assert (lines <= PRODUCT_LINES, len(package_files) <= PRODUCT_FILES) == (True, True), (lines, len(package_files))


def test_each_class_name_has_one_meaning(package_files: list[Path]) -> None:
    """No two classes of the four packages have one name."""
    names = Counter(
        node.name for file in package_files for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_every_test_states_the_behaviour(root: Path, all_files: list[Path]) -> None:
    """A test's docstring says what holds when it passes."""
    silent = [
        f"{file.relative_to(root)}:{function.lineno} {function.name}"
        for file in all_files
        if file.name.startswith("test_")
        for function in _functions(file)
        if function.name.startswith("test_") and not ast.get_docstring(function)
    ]
    assert not silent


def test_no_test_is_switched_off(root: Path, all_files: list[Path]) -> None:
    """A test that does not run proves nothing: there is no skip and no expected failure."""
    switches = {"skip", "skipif", "xfail", "importorskip"}
    switched_off = [
        f"{file.relative_to(root)}:{node.lineno} {ast.unparse(node)}"
        for file in all_files
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute) and node.attr in switches and ast.unparse(node).startswith("pytest.")
    ]
    assert not switched_off


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), filename=str(file))


def _functions(file: Path) -> Iterator[Function]:
    return (node for node in ast.walk(_tree(file)) if isinstance(node, Function))


def _length(function: Function) -> int:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)
