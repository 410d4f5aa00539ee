"""Doubles of functions take the arguments of the original."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.checked_patches import difference


def original(first: int, second: int = 0, *, named: bool = False) -> int:
    return first + second + named


@pytest.mark.parametrize(
    "double",
    [
        lambda first, second=0, *, named=False: 0,  # noqa: ARG005
        lambda *parts, **more: 0,  # noqa: ARG005
        SimpleNamespace(),
    ],
)
def test_a_double_of_the_same_arguments_is_accepted(double: object) -> None:
    """So is one that takes any arguments, and a value that is no function."""
    assert difference(original, double) == ""


@pytest.mark.parametrize("double", [lambda first: 0, lambda first, second: 0, lambda first, second=0: 0])  # noqa: ARG005
def test_a_double_that_lacks_an_argument_is_refused(double: object) -> None:
    """Also one that needs an argument which the original does not, or that lacks a named one."""
    assert "missing a required argument" in difference(original, double) or "original (first" in difference(
        original, double
    )


def test_the_fixture_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By object and by dotted path; what it accepts is undone at the end."""
    owner = SimpleNamespace(function=original)
    with pytest.raises(TypeError, match="double of function cannot replace it"):
        monkeypatch.setattr(owner, "function", lambda: 0)
    with pytest.raises(TypeError, match="double of significant"):
        monkeypatch.setattr("loadgen.analysis.format.significant", lambda: "")
    monkeypatch.setattr(owner, "function", lambda *_parts, **_more: 7)
    assert owner.function(1) == 7
