"""The kinds of errors that a Record may have are those that the code gives it, each under its one name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen.record import ERROR_KINDS

Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_every_kind_is_listed_and_every_listed_kind_is_given(root: Path) -> None:
    """What is assigned to `error_kind`, or passed as `kind` beside a `detail`, anywhere in what sends and records, is
    ERROR_KINDS and nothing else: documents and reports list that."""
    given = kinds_given(_trees(root))
    assert set(given) == set(ERROR_KINDS), {kind: sorted(places) for kind, places in given.items()}
    assert len(set(ERROR_KINDS)) == len(ERROR_KINDS)


def test_kinds_are_found_however_they_are_given() -> None:
    """Assigned, in pairs, by keyword, by place, starred from a tuple, and returned by a function."""
    text = """
def fail(self, kind, detail): self.error_kind, self.error_detail = kind, detail
GONE = ("starred", "why")
def verdict(record):
    chosen = record.error_kind or "by-name"
    if record.error_kind == "compared":
        return "failed", "returned", ""
    return "failed", chosen, ""
record.error_kind = "assigned" if late else ""
record.state, record.error_kind = "failed", "paired"
record.state, record.error_kind, record.error_detail = verdict(record)
Record(error_kind="keyword")
exchange.fail("placed", "why")
exchange.fail(kind="named", detail="why")
exchange.fail(*GONE)
"""
    given = kinds_given({"here": ast.parse(text)})
    names = {"assigned", "paired", "keyword", "placed", "named", "starred", "returned", "by-name"}
    assert set(given) == names


def kinds_given(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Each literal that becomes an error kind, with the places where."""
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    takers = {function.name: place for function in functions if (place := _place_of_kind(function)) is not None}
    starred = {name for tree in trees.values() for name in _starred(tree, takers)}
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            for value in _values(node, takers, starred, functions):
                for literal in _literals(value):
                    found.setdefault(literal, set()).add(f"{file}:{value.lineno}")
    return found


def _trees(root: Path) -> dict[str, ast.Module]:
    files = [*root.glob("loadgen/**/*.py"), *root.glob("servers/kinds/*.py"), *root.glob("servers/*.py")]
    return {str(file.relative_to(root)): ast.parse(file.read_text("utf-8")) for file in files}


def _place_of_kind(function: Function) -> int | None:
    """Where callers put the kind, if the function takes one and a detail."""
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    return names.index("kind") if {"kind", "detail"} <= set(names) else None


def _starred(tree: ast.Module, takers: dict[str, int]) -> Iterator[str]:
    """Names of (kind, detail) that are passed on as `*name`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _name(call.func) in takers:
            yield from (_name(argument.value) for argument in call.args if isinstance(argument, ast.Starred))


def _values(
    node: ast.AST, takers: dict[str, int], starred: set[str], functions: Sequence[Function]
) -> Iterator[ast.expr]:
    """Expressions whose value is an error kind."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target, node.value, starred, functions)
    elif isinstance(node, ast.Call):
        place = takers.get(_name(node.func))
        yield from (each.value for each in node.keywords if each.arg == "error_kind")
        if place is not None:
            yield from node.args[place : place + 1]
            yield from (each.value for each in node.keywords if each.arg == "kind")


def _assigned(
    target: ast.expr, value: ast.expr, starred: set[str], functions: Sequence[Function]
) -> Iterator[ast.expr]:
    if _name(target) == "error_kind":
        yield value
    elif _name(target) in starred:
        yield from (each.elts[0] for each in ast.walk(value) if isinstance(each, ast.Tuple))
    elif isinstance(target, ast.Tuple):
        for place, part in enumerate(target.elts):
            if _name(part) != "error_kind":
                continue
            if isinstance(value, ast.Tuple):
                yield value.elts[place]
            elif isinstance(value, ast.Call):
                yield from (each for f in functions if f.name == _name(value.func) for each in _returned(f, place))


def _returned(function: Function, place: int) -> Iterator[ast.expr]:
    """What a function returns at this place of a tuple, looking through its own names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            part = node.value.elts[place]
            yield part
            for each in ast.walk(function):
                if isinstance(part, ast.Name) and isinstance(each, ast.Assign) and _name(each.targets[0]) == part.id:
                    yield each.value


def _literals(value: ast.expr) -> Iterator[str]:
    """The strings that an expression may be; what it compares with is none of them."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from (*_literals(value.body), *_literals(value.orelse))
    elif isinstance(value, ast.BoolOp):
        yield from (literal for part in value.values for literal in _literals(part))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
