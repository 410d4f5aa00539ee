"""The mark of a simulated server, which is in everything that the server says, and how a client finds the mark.

A gateway may hide the server's own page, remove headers or rewrite ids. A simulated server therefore repeats its mark
in the headers, the model card, the version pages, the metrics page and every response to a request for tokens. The mark
holds the speed of the server's clock, so that whoever finds one place knows both.
"""

from __future__ import annotations

import re

HEADER = "x-simulated-speed"
FIELD = "simulated_speed"
"""Name of the field in JSON bodies and of the gauge on the metrics page."""
_WORD = re.compile(r"(?:^|-)simulated(?:-x(?P<speed>[0-9.]+(?:e[+-]?[0-9]+)?))?(?:-|$)")


def header(speed: float) -> tuple[str, str]:
    """The header of every response."""
    return HEADER, f"{speed:g}"


def fields(speed: float) -> dict[str, float]:
    """The field of a JSON body."""
    return {FIELD: speed}


def word(speed: float) -> str:
    """The part of an id or of a version, such as `simulated-x5`."""
    return f"simulated-x{speed:g}"
