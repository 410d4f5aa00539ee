"""A matrix as text."""
from typing import Any, Mapping
from analysis import words
def in_a_line(summary: Mapping[str, Any]) -> str:
    return "ok"
