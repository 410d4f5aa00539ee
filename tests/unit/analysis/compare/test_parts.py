"""The level of the verdicts on classes of traffic."""

from __future__ import annotations

from loadgen.analysis.compare.figures import ComparedFigure
from loadgen.analysis.compare.parts import ComparedClass, classes_method


def row(p_value: float | None) -> ComparedFigure:
    """Return a figure with this p-value."""
    return ComparedFigure("ttft.p50", "s", "lower", p_value=p_value)


def test_the_separate_level_of_classes_is_stated() -> None:
    """The sentence counts the figures that are tested. Without such figures there is no sentence."""
    classes = [ComparedClass("chat", [row(0.01), row(None)]), ComparedClass("batch", [row(0.5)])]
    assert classes_method(classes) == (
        "The 2 figures of the classes have a separate level of 5% (Holm's correction), so each of the two tables "
        "has its own chance of a false verdict."
    )
    assert classes_method([]) == classes_method([ComparedClass("chat", [row(None)])]) == ""
