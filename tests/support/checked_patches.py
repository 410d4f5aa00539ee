"""A `monkeypatch` that refuses a replacement function which does not accept the arguments of the original function.

Without this check, a test fails only if the code happens to call the replacement with such arguments.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from _pytest.monkeypatch import derive_importpath

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ABSENT = object()


class CheckedMonkeyPatch(pytest.MonkeyPatch):
    """A MonkeyPatch that compares the signature of a replacement function with the signature of the original."""

    patching: ClassVar[set[int]] = set()
    """Ids of the objects of this class that have replaced more than environment variables, until they undo it."""

    def setitem(self, dic: Any, name: Any, value: Any) -> None:
        """Replace an item of a dict."""
        self._note(dic)
        super().setitem(dic, name, value)

    def delitem(self, dic: Any, name: Any, raising: bool = True) -> None:
        """Delete an item of a dict."""
        self._note(dic)
        super().delitem(dic, name, raising)

    def delattr(self, target: Any, *name: Any, raising: bool = True) -> None:
        """Delete an attribute."""
        self._note(target)
        super().delattr(target, *name, raising=raising)

    def undo(self) -> None:
        """Restore everything that was replaced."""
        super().undo()
        self.patching.discard(id(self))

    def _note(self, owner: object) -> None:
        if owner is not os.environ:
            self.patching.add(id(self))

    def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:  # type: ignore[override]
        """Replace an attribute. Raises TypeError if a new function does not accept the arguments of the old one."""
        owner, attribute, double = target, name, value[0] if value else None
        if not value:
            attribute, owner = derive_importpath(target, raising)
            double = name
        original = inspect.getattr_static(owner, attribute, ABSENT)
        if isinstance(original, staticmethod | classmethod):
            original = getattr(owner, attribute)
        if original is not ABSENT:
            problem = difference(original, double)
            if problem:
                raise TypeError(f"the double of {attribute} cannot replace it: {problem}")
        self._note(owner)
        super().setattr(owner, attribute, double, raising=raising)


def difference(original: Any, double: Any) -> str:
    """Return why `double` cannot be called with the arguments of `original`, or "" if it can.

    Also return "" if one of the two objects is not a function, or is a C function without a signature.
    """
    if not (inspect.isroutine(original) and inspect.isroutine(double)):
        return ""
    try:
        ours, theirs = inspect.signature(double), inspect.signature(original)
    except (TypeError, ValueError):  # functions of C without a signature
        return ""
    for arguments, keywords in _calls(theirs):
        try:
            ours.bind(*arguments, **keywords)
        except TypeError as error:
            return f"{error} (original {theirs}, double {ours})"
    return ""


def _calls(signature: inspect.Signature) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the arguments of two calls of a function: with only its required parameters, and with all parameters.

    The arguments of a call are a list of positional arguments and a dict of keyword arguments.
    """
    for needed in (True, False):
        chosen = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind not in VARIADIC and not (needed and parameter.default is not inspect.Parameter.empty)
        ]
        by_name = [parameter.name for parameter in chosen if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
        by_position = [parameter.name for parameter in chosen if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
        yield by_position, dict.fromkeys(by_name, "")
