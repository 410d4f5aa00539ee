"""Class names are unique, every test states a behaviour, and no test is switched off."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    named = re.compile("|".join(switches))  # parsing a file takes far longer than searching it
    switched_off = [
        f"{file.relative_to(root)}:{node.lineno} {ast.unparse(node)}"
        for file in all_files
        if named.search(file.read_text("utf-8"))
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute) and node.attr in switches and ast.unparse(node).startswith("pytest.")
    ]
    assert not switched_off


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"), filename=str(file))


def _functions(file: Path) -> Iterator[Function]:
    """Yield the functions of a module and of its classes. pytest finds no tests inside functions."""
    scopes: list[ast.Module | ast.ClassDef] = [_tree(file)]
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, Function):
                yield node
            elif isinstance(node, ast.ClassDef):
                scopes.append(node)
