"""Locust's side of the process that reads the server beside a run (loadgen.interactive.reading)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gevent
from gevent.subprocess import PIPE, Popen

from loadgen.errors import PlanError
from loadgen.interactive.setting import Setting

LIMIT_S = 15.0
"""For an answer: readings have limits of their own, below five seconds each."""


class Beside:
    """One process for one run; it is started early, because starting takes longer than a person likes to wait."""

    def __init__(self) -> None:
        self._process: Any = Popen(
            [sys.executable, "-m", "loadgen.interactive.reading"],
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # an interrupt is for the run: this process ends with it
        )
        self._awaited = True

    def ready(self) -> None:
        """Wait until it has started."""
        if self._awaited:
            self._awaited = False
            self._heard()

    def facts(self, setting: Setting) -> Mapping[str, Any]:
        """Read everything for the first time; what is measured and what is not, as in the header.

        Raises PlanError when something is missing that the plan asks for.
        """
        self.ready()
        server = {name: getattr(setting.facts, name) for name in type(setting.facts).__slots__}
        found = self._ask({"plan": setting.plan.model_dump(mode="json"), "server": server})
        if found is None:
            return {"not_measured": dict.fromkeys(("server", "gpu", "host"), "the process that reads them has ended")}
        if "error" in found:
            raise PlanError(found["error"], found["hint"])
        facts: Mapping[str, Any] = found["facts"]
        return facts

    def begin(self, start_ns: int, folder: Path) -> None:
        """From now on read into a part file in this folder."""
        self._ask({"start_ns": start_ns, "folder": str(folder.resolve())})

    def end(self, *, patient: bool) -> list[Path]:
        """Read everything for the last time; the files that hold the lines. `patient` lets the server come to rest."""
        found = self._ask({"patient": patient}) or {}
        self.close()
        return [Path(name) for name in found.get("files", ())]

    def close(self) -> None:
        """Let it go."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LIMIT_S)
        except TimeoutError:
            self._process.kill()
        self._process.stdout.close()

    def _ask(self, told: Mapping[str, Any]) -> dict[str, Any] | None:
        """Its answer, or None where there is none any more."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any] | None:
        line = b""
        with contextlib.suppress(OSError), gevent.Timeout(LIMIT_S, False):
            line = self._process.stdout.readline()
        if not line:
            self._process.kill()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer
