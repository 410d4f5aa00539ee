"""Signs of differences in the terminal and on pages."""

from __future__ import annotations

import pytest

from loadgen.analysis.format import signed, typeset_minus


@pytest.mark.parametrize(
    ("value", "text", "page"),
    [(0.0, "0", "0"), (12.0, "+12.0", "+12.0"), (-3778.0, "-3,778", "\u22123,778"), (-0.25, "-0.250", "\u22120.250")],
)
def test_a_difference_has_its_sign(value: float, text: str, page: str) -> None:
    """Zero has none. Pages have a minus sign, which is not a hyphen, and both have thousands separators."""
    assert signed(value) == text
    assert typeset_minus(signed(value)) == page


def test_hyphens_inside_words_stay() -> None:
    """Names of servers and figures have hyphens and digits."""
    assert typeset_minus("llama-3 -4.6 to -1.9") == "llama-3 \u22124.6 to \u22121.9"
