"""Parses and formats prices with or without a currency, such as `2.50`, `$2.50` and `2.50 EUR`."""

from __future__ import annotations

import re
from typing import NamedTuple

from loadgen.analysis.format import UNKNOWN, significant

PRICE = re.compile(r"([$€£¥]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]{3}|[$€£¥])?")
HINT = "Write 2.50, $2.50, or 2.50 EUR"


class Price(NamedTuple):
    """An amount of money. `currency` is a sign such as `$` or a code such as `EUR`, or empty if it was not named."""

    amount: float
    currency: str = ""


def parse_price(text: str | float) -> Price:
    """Parse a price such as `2.50`, `$2.50` or `2.50 EUR`. Raises ValueError for other text."""
    match = PRICE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text} is not a price")
    sign, amount, code = match.groups()
    if sign and code:
        raise ValueError(f"{text} names two currencies")
    return Price(float(amount), sign or (code or "").upper())


def currency_parts(currency: str) -> tuple[str, str]:
    """Return the text before and after an amount in this currency: `("$", "")` or `("", " EUR")`."""
    return ("", f" {currency}") if currency.isalpha() else (currency, "")


def format_price(amount: float | None, currency: str, digits: int = 3) -> str:
    """Format an amount with its currency, such as `$0.259` or `0.259 EUR`."""
    if amount is None:
        return UNKNOWN
    before, after = currency_parts(currency)
    return f"{before}{significant(amount, digits)}{after}"
