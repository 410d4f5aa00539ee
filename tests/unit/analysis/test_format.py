"""How numbers and intervals are written."""

from __future__ import annotations

import pytest

from loadgen.analysis.format import confidence_interval, interval_text, percent, relative_change, times_speed


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        ("7.99", "9.12", "7.99\u20139.12"),
        ("3.086", "3.086", "3.086"),  # no digits are lost
        ("-2.2", "+5.0", "-2.2 to +5.0"),  # a dash next to a sign cannot be read
        ("+9.4", "+13.3", "+9.4 to +13.3"),
        ("12.0", "∞", "12.0\u2013∞"),
    ],
)
def test_an_interval_is_a_range_or_one_number(low: str, high: str, text: str) -> None:
    """Two ends with the same digits are one number, and ends with signs are joined by a word. A confidence interval
    whose ends have the same digits says nothing that the figure does not say."""
    assert interval_text(low, high) == text
    assert confidence_interval(low, high) == ("" if low == high else f"95% CI {text}")


def test_a_confidence_interval_names_its_level() -> None:
    """Levels with decimals are written with them."""
    assert confidence_interval("1", "2", level=0.975) == "97.5% CI 1\u20132"


@pytest.mark.parametrize(("share", "text"), [(0.12, "12%"), (0.0312, "3.1%"), (1.0, "100%"), (None, "\u2013")])
def test_no_space_precedes_the_percent_sign(share: float | None, text: str) -> None:
    """A percentage has two significant digits. An unknown share is a dash."""
    assert percent(share) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.17, "-83.0%"), (1.0, "+0.0%"), (1.977, "+97.7%"), (2.0, "2.00x"), (6.297, "6.30x"), (176.3, "176x")],
)
def test_a_large_ratio_is_a_factor(ratio: float, text: str) -> None:
    """A change of more than 100% is hard to read."""
    assert relative_change(ratio) == text


def test_an_interval_has_the_form_of_its_value() -> None:
    """The end of an interval can be a percentage above 100%, or a factor below 2."""
    assert relative_change(2.517, as_factor=False) == "+152%"
    assert relative_change(1.8, as_factor=True) == "1.80x"


def test_speeds_are_a_list_of_words() -> None:
    """The last two speeds are joined by a word."""
    assert times_speed(1, 4, 5) == " at 1, 4 and 5 times speed"
    assert times_speed(4, 1) == " at 1 and 4 times speed"
    assert times_speed(1) == ""
