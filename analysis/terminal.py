"""Printing for the terminal: what every text report shares."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any


def printed(parts: Iterable[Any], *, width: int, colour: bool) -> str:
    """Tables and texts of `rich` as lines of at most `width` characters; ANSI colours only if asked for."""
    from rich.console import Console

    output = StringIO()
    console = Console(
        file=output,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


def plain(text: str) -> str:
    """Without control characters: a server's words must not move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)
