"""loadgen as a whole command: it builds prompts, decodes every event, and writes the run file and the summary."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.comparison.client import Client, Load, Reported
from benchmarks.comparison.install import nothing

RUN = "run"
"""Name of the run's folder in the scratch folder."""
_LIMITED = 5
_ROOT = Path(__file__).parents[2]


def client(workers: int = 1) -> Client:
    """Return loadgen as a client of the comparison.

    Exit code 5 is accepted, because it means that the client was the limit. The results exist in this case too.
    """
    return Client(
        name="loadgen" if workers == 1 else f"loadgen, {workers} workers",
        version=_version(),
        install=nothing,
        command=lambda _, load: _command(load, workers),
        reported=_reported,
        environment={"PYTHONPATH": str(_ROOT)},
        exit_codes=(0, _LIMITED),
    )


def _version() -> str:
    try:
        return version("llm-loadgen")
    except PackageNotFoundError:  # run from the tree
        return "this tree"


def _command(load: Load, workers: int) -> list[str]:
    return [
        *(sys.executable, "-m", "loadgen", "burst"),
        *("--server", "vllm"),
        *("--url", load.url),
        *("--n", str(load.n)),
        *("--input-tokens", str(load.input_tokens)),
        *("--output-tokens", str(load.output_tokens)),
        *("--workers", str(workers)),
        *("--out", RUN),
        "--no-report",
        "--quiet",
    ]


def _reported(scratch: Path) -> Reported:
    latency = json.loads((scratch / RUN / "summary.json").read_text("utf-8"))["latency"]
    return Reported(ttft_ms=latency["ttft_s"]["p50"] * 1e3, tpot_ms=latency["tpot_s"]["p50"] * 1e3)
