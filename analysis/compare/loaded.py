"""What a comparison needs of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.frame import Frame
from analysis.gather import load
from analysis.summarise import summarise
from analysis.summary import as_dict
from loadgen.runfile import Run


@dataclass(frozen=True)
class Loaded:
    """A Run without its Records, their Frame and its summary."""

    run: Run
    frame: Frame
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its folder; of a repeat with that of all."""
        folder = self.run.path.resolve().parent
        return f"{folder.parent.name}/{folder.name}" if folder.name.startswith("repeat-") else folder.name

    @property
    def plan(self) -> Mapping[str, Any]:
        """As its header has it."""
        return self.run.header.plan

    @property
    def one_burst(self) -> bool:
        """Whether all requests were due at one instant, so that all waited in one queue."""
        return bool(self.frame.window is None)


def loaded(path: Path) -> Loaded:
    """Read a run. Raises RunFileError."""
    run, frame = load(path)
    return Loaded(run, frame, as_dict(summarise(run, frame)))
