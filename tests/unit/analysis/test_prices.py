"""Prices as users write them, and as pages and the terminal show them."""

from __future__ import annotations

import pytest

from loadgen.analysis.prices import Price, format_price, parse_price


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("2.5", Price(2.5)),
        (2.5, Price(2.5)),
        ("$2.50", Price(2.5, "$")),
        ("2.50 EUR", Price(2.5, "EUR")),
        ("2.50eur", Price(2.5, "EUR")),
        ("€ 2", Price(2.0, "€")),
        ("2€", Price(2.0, "€")),
        (".5", Price(0.5)),
    ],
)
def test_a_price_has_an_amount_and_a_currency(text: str | float, price: Price) -> None:
    """A sign stands before or after the amount, and a code after it. The currency may be left out."""
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["cheap", "", "-1", "nan", "inf", "2,50", "$2 EUR", "2 EURO", "1e3", "<b>2"])
def test_other_text_is_refused(text: str) -> None:
    """An error names the text."""
    with pytest.raises(ValueError, match=r"not a price|two currencies"):
        parse_price(text)


def test_the_currency_is_shown() -> None:
    """Signs stand before the amount, and codes after it."""
    shown = [format_price(0.2591, currency) for currency in ("$", "EUR", "")]
    assert shown == ["$0.259", "0.259 EUR", "0.259"]
    assert format_price(None, "$") == "–"  # noqa: RUF001 - a dash in a table cell
