"""Named workloads: one TOML file each in `workloads/catalog/`, saying where its numbers come from.

summary = "one line"
source = "what was published where, and what is our own choice"
requests = 1000
arrivals = "poisson:2"            # workloads.arrivals
input_tokens = "512"              # workloads.lengths
output_tokens = "128"
workload = "synthetic"            # workloads.workload; may be missing
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import arrivals, lengths, workload
from workloads.arrivals import Arrivals
from workloads.lengths import Lengths
from workloads.syntax import WorkloadError
from workloads.workload import Workload

FOLDER = Path(__file__).with_name("catalog")
REQUESTS_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Named:
    """One workload of the catalog."""

    name: str
    summary: str
    source: str
    """Where its lengths come from."""
    requests: int
    arrivals: Arrivals
    input_tokens: Lengths
    output_tokens: Lengths
    workload: Workload


def names() -> list[str]:
    """The catalog's names: `paper-burst` first, the others in alphabetical order."""
    return sorted((file.stem for file in FOLDER.glob("*.toml")), key=lambda name: (name != "paper-burst", name))


def load(name: str) -> Named:
    """One workload by name. Raises WorkloadError when there is none of that name, or its file is wrong."""
    if name not in names():
        raise WorkloadError(f"there is no workload {name!r} in the catalog", f"choose {', '.join(names())}")
    return parse((FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse(text: str, name: str) -> Named:
    """Read a catalog file. Raises WorkloadError with one line per mistake."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WorkloadError(f"{name}: is not TOML: {error}") from None
    given.setdefault("workload", "synthetic")
    mistakes = [f"{key}: there is no such setting" for key in given if key not in SETTINGS]
    mistakes += [f"{key}: missing" for key in SETTINGS if key not in given]
    values: dict[str, Any] = {}
    for key in SETTINGS.keys() & given.keys():
        try:
            values[key] = SETTINGS[key](given[key])
        except WorkloadError as error:
            mistakes.append(f"{key}: {error}; {error.hint}".removesuffix("; "))
    if mistakes:
        raise WorkloadError("\n".join(f"{name}: {mistake}" for mistake in sorted(mistakes)), "mend the file")
    return Named(name=name, **values)


def _requests(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= REQUESTS_LIMIT:
        raise WorkloadError(f"{value!r} is not a whole number from 1 to {REQUESTS_LIMIT}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise WorkloadError(f"{value!r} is not a text", "write it in quotes")
    return value.strip()


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "summary": _text,
    "source": _text,
    "requests": _requests,
    "arrivals": lambda value: arrivals.parse(_text(value)),
    "input_tokens": lambda value: lengths.parse(_text(value)),
    "output_tokens": lambda value: lengths.parse(_text(value)),
    "workload": lambda value: workload.parse(_text(value)),
}
"""Every key a catalog file may have, and what reads its value."""
