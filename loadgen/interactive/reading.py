"""The process beside an interactive run that reads the server's metrics, the GPUs and memory (loadgen.engine.sampler).

gevent has made greenlets of the threads of Locust's process, so a reading there would stand between the kernel and the
streams. Here they are threads. One JSON object per line comes in and one goes out for each; when nothing more comes in,
the process that ran the users has gone, and this one goes too.

                                starts                              -> {}
    {"plan", "server"}          reads everything for the first time    -> {"facts"}, or {"error", "hint"}
    {"start_ns", "folder"}      reads on, into the folder              -> {}
    {"patient"}                 reads everything for the last time     -> {"files"}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.engine.counts import Counts
from loadgen.engine.sampler import Sampler
from loadgen.errors import LoadgenError
from loadgen.plan import Plan
from loadgen.prepare import sampler_of


def main() -> None:
    """Answer each line in turn."""
    sampler: Sampler | None = None
    _say({})
    for line in sys.stdin:
        told = json.loads(line)
        try:
            if sampler is None:
                sampler = _sampler(told)
                sampler.idle()
                sampler.start()
                answer: Mapping[str, Any] = {"facts": sampler.facts}
            elif "folder" in told:
                sampler.begin(told["start_ns"], Path(told["folder"]), Counts)
                answer = {}
            else:
                answer = {"files": [str(path) for path in sampler.end(patient=told["patient"])]}
        except LoadgenError as error:
            answer = {"error": str(error), "hint": error.hint}
        _say(answer)


def _say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _sampler(told: Mapping[str, Any]) -> Sampler:
    """Of an interactive run, whose load nobody knows before it comes. Raises PlanError."""
    return sampler_of(Plan(**told["plan"]), told["server"], None)


if __name__ == "__main__":
    main()
