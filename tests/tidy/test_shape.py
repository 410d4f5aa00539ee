"""Small files, short functions, and tests that say what they check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

LINES_PER_FILE = 300
LINES_PER_FUNCTION = 60
LINES_OF_THE_MEDIAN_FUNCTION = 10

LONGER_FILES: dict[str, int] = {}
"""A ratchet: path and present length of each file over the limit. Entries only shrink and go."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_files_stay_short(root: Path, all_files: list[Path]) -> None:
    """No Python file is longer than 300 lines, and one on the ratchet is exactly as long as it says."""
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


def test_most_functions_are_very_short(package_files: list[Path]) -> None:
    """Half of the functions of the four packages have fewer than 10 lines."""
    assert median(_length(f) for file in package_files for f in _functions(file)) < LINES_OF_THE_MEDIAN_FUNCTION


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
